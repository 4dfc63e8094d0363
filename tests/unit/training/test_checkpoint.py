"""Checkpoints: what comes back, what survives a failure, what is refused."""

import json
import resource
import threading
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import octavo
from octavo.checksums import sealed, unsealed
from octavo.doctor.metrics_lines import LinesWritten
from octavo.errors import CheckpointError
from octavo.models import Llama
from octavo.training.checkpoint import (
    CheckpointState,
    foreign_file,
    latest,
    load_checkpoint,
    load_model,
    read_state,
    remove_checkpoints,
    save_checkpoint,
    snapshot,
    write_checkpoint,
)
from octavo.training.checkpoint_files import fingerprint
from octavo.training.checkpoint_saver import CheckpointSaver
from octavo.training.config import ModelConfig, TrainingConfig
from octavo.training.evaluate import token_loss
from octavo.training.events import Saved
from octavo.training.precision import apply_recipe
from octavo.training.setup import build_optimizer
from tests.unit.training.checkpoint_parts import divided
from tests.unit.training.tiny_runs import MODEL

SHAPE = MODEL.llama(vocab_size=50, max_positions=8)


def build(recipe="fp32", *, seed=0, shape=SHAPE):
    training = TrainingConfig(recipe=recipe)
    model = Llama(shape, seed=seed)
    apply_recipe(model, training)
    return model, build_optimizer(model, training)


def train_a_little(model, optimizer, steps=2):
    for _ in range(steps):
        tokens = torch.randint(0, 50, (2, 8))
        optimizer.zero_grad()
        token_loss(model(tokens), tokens).backward()
        optimizer.step()
        octavo.update_scales(model)


def state(step=1):
    return CheckpointState(step=step, config_hash="c", data_hash="d", model={"vocab_size": 50})


def everything(model, optimizer):
    tensors = {**model.state_dict(), **octavo.scaling_state(model)}
    for name, parameter in model.named_parameters():
        tensors |= {f"{name}/{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("recipe", ["fp32", "tensorwise", "delayed"])
def test_save_and_load_restore_everything(tmp_path, recipe):
    model, optimizer = build(recipe)
    train_a_little(model, optimizer)
    path = save_checkpoint(tmp_path, state(7), model=model, optimizer=optimizer)
    expected, next_random = everything(model, optimizer), torch.rand(3)
    other, other_optimizer = build(recipe, seed=9)
    loaded = load_checkpoint(path, model=other, optimizer=other_optimizer)
    found = everything(other, other_optimizer)
    assert loaded == state(7) == read_state(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert torch.equal(torch.rand(3), next_random)
    assert ("model.layers.0.mlp.up_proj.input.amax" in found) == (recipe == "delayed")


def test_files_are_plain_safetensors(tmp_path):
    model, optimizer = build()
    train_a_little(model, optimizer)
    path = save_checkpoint(tmp_path, state(), model=model, optimizer=optimizer)
    assert path == tmp_path / "checkpoints" / "step-000001"
    assert {file.name for file in path.iterdir()} == {
        "model.safetensors", "optimizer.safetensors", "scaling.safetensors", "state.json",
    }  # fmt: skip
    assert load_file(path / "model.safetensors").keys() == model.state_dict().keys()
    assert "lm_head.weight/exp_avg" in load_file(path / "optimizer.safetensors")


def test_a_tied_weight_is_saved_once(tmp_path):
    shape = ModelConfig(hidden_size=16, num_heads=2, tie_embeddings=True).llama(vocab_size=50, max_positions=8)
    model, optimizer = build(shape=shape)
    train_a_little(model, optimizer)
    path = save_checkpoint(tmp_path, state(), model=model, optimizer=optimizer)
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    other, other_optimizer = build(seed=5, shape=shape)
    load_checkpoint(path, model=other, optimizer=other_optimizer)
    assert other.lm_head.weight is other.model.embed_tokens.weight
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)


@pytest.fixture
def saved(tmp_path):
    """A model, its optimizer, and a checkpoint of it."""
    model, optimizer = build()
    train_a_little(model, optimizer)
    return model, optimizer, save_checkpoint(tmp_path, state(1), model=model, optimizer=optimizer)


def test_latest_is_the_newest_complete_checkpoint(tmp_path, saved):
    model, optimizer, _ = saved
    second = save_checkpoint(tmp_path, state(20), model=model, optimizer=optimizer)
    (tmp_path / "checkpoints" / "step-000900").mkdir()
    (tmp_path / "checkpoints" / ".step-000800.0123456789abcdef.writing").mkdir()
    (tmp_path / "checkpoints" / "step-latest").mkdir()
    assert latest(tmp_path) == second
    assert latest(tmp_path / "nowhere") is None


def test_only_the_newest_checkpoints_are_kept(tmp_path, saved):
    model, optimizer, _ = saved
    for step in (2, 3, 4):
        save_checkpoint(tmp_path, state(step), model=model, optimizer=optimizer, keep_last=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000003", "step-000004"]


def test_a_step_may_be_saved_again(tmp_path, saved):
    model, optimizer, path = saved
    train_a_little(model, optimizer)
    assert save_checkpoint(tmp_path, state(1), model=model, optimizer=optimizer) == path
    assert torch.equal(load_file(path / "model.safetensors")["lm_head.weight"], model.lm_head.weight)
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_full_disk_keeps_the_earlier_checkpoint_and_leaves_no_partial_one(tmp_path, saved):
    """A limit on file size makes every write beyond it fail as a full disk does."""
    model, optimizer, path = saved
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(
            CheckpointError, match=r"cannot save .*step-000002.*earlier checkpoints are intact"
        ) as caught:
            save_checkpoint(tmp_path, state(2), model=model, optimizer=optimizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in str(caught.value)
    assert ".writing" not in str(caught.value)
    assert [each.name for each in path.parent.iterdir()] == ["step-000001"]
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert latest(tmp_path) == path


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "scaling.safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_damaged_file_is_refused_by_name_and_nothing_is_loaded(saved, name, damage):
    _, _, path = saved
    file = path / name
    content = file.read_bytes()
    if damage == "truncated":
        file.write_bytes(content[:-5])
    elif damage == "flipped":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        file.unlink()
    model, optimizer = build(seed=9)
    before = everything(model, optimizer)
    words = {"truncated": "is damaged: it has", "flipped": "SHA-256 differs", "missing": "cannot be read"}[damage]
    with pytest.raises(CheckpointError, match=rf"{name}.*{words}.*delete .*step-000001"):
        load_checkpoint(path, model=model, optimizer=optimizer)
    after = everything(model, optimizer)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert not optimizer.state


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "checkpoint format None"),
        ('{"format": 99}', "checkpoint format 99; this octavo reads 1"),
        ('{"format": 1, "step": 3}', "lacks 'config_hash'"),
    ],
)
def test_damaged_state_is_refused_by_name(saved, content, words):
    _, _, path = saved
    (path / "state.json").write_text(content)
    with pytest.raises(CheckpointError, match=words):
        read_state(path)


def test_another_models_shapes_are_refused(saved):
    _, _, path = saved
    wider, _ = build(shape=ModelConfig(hidden_size=32, num_heads=2, num_layers=1).llama(vocab_size=50, max_positions=8))
    with pytest.raises(CheckpointError, match=r"belongs to another model"):
        load_model(path, wider)
    deeper, _ = build(
        shape=ModelConfig(
            hidden_size=16, intermediate_size=32, num_heads=2, num_kv_heads=1, num_layers=2
        ).llama(vocab_size=50, max_positions=8)
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"has no tensor 'model.layers.1"):
        load_model(path, deeper)


def test_file_without_a_tensor_is_refused(saved):
    _, _, path = saved
    tensors = load_file(path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, path / "model.safetensors")
    raw = unsealed(json.loads((path / "state.json").read_text()))
    raw["files"]["model.safetensors"] = fingerprint(path / "model.safetensors")
    (path / "state.json").write_text(json.dumps(sealed(raw)))
    with pytest.raises(CheckpointError, match=r"has no tensor 'lm_head.weight'"):
        load_model(path, build()[0])


def test_another_recipes_scaling_state_is_refused(saved):
    _, _, path = saved
    with pytest.raises(CheckpointError, match="scaling state does not fit"):
        load_model(path, build("delayed")[0])


def test_a_state_of_another_type_is_refused(tmp_path):
    model, optimizer = build()
    path = save_checkpoint(tmp_path, state(), model=model, optimizer=optimizer)
    content = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(sealed({**unsealed(content), "step": "six"})))
    with pytest.raises(CheckpointError, match="step = 'six'"):
        read_state(path)


@pytest.mark.parametrize("key", ["step", "data_hash", "generators", "files", "metrics"])
def test_a_changed_value_of_the_state_is_refused(tmp_path, key):
    model, optimizer = build()
    saved = replace(state(), metrics=LinesWritten(lines=3, sha256="0123456789abcdef"))
    path = save_checkpoint(tmp_path, saved, model=model, optimizer=optimizer)
    assert read_state(path) == saved
    file = path / "state.json"
    text = file.read_text()
    place = text.index(f'"{key}"') + len(key) + 4
    digit = next(index for index in range(place, len(text)) if text[index].isdigit())
    file.write_text(text[:digit] + str((int(text[digit]) + 1) % 10) + text[digit + 1 :])
    with pytest.raises(CheckpointError, match=r"state\.json' is damaged: a value in it was changed"):
        read_state(path)


def test_state_without_a_checksum_is_read_as_an_older_one(tmp_path):
    model, optimizer = build()
    path = save_checkpoint(tmp_path, state(), model=model, optimizer=optimizer)
    content = unsealed(json.loads((path / "state.json").read_text()))
    del content["metrics"]
    (path / "state.json").write_text(json.dumps(content))
    assert read_state(path) == state()


def test_a_state_without_the_sums_of_its_files_is_refused_as_such(saved):
    """Its files are there, and nothing says that they are whole."""
    *_, path = saved
    raw = json.loads((path / "state.json").read_text())
    del raw["files"], raw["sha256"]
    (path / "state.json").write_text(json.dumps(raw))
    model, optimizer = build()
    with pytest.raises(
        CheckpointError, match=r"state\.json' lacks 'files', the sizes and sums of the checkpoint's files"
    ):
        load_checkpoint(path, model=model, optimizer=optimizer)


def test_files_of_two_ranks_are_those_of_one_process(tmp_path):
    model, optimizer = build("delayed")
    train_a_little(model, optimizer)
    path = save_checkpoint(tmp_path, state(), model=model, optimizer=optimizer)
    divided(path)
    other, other_optimizer = build("delayed", seed=9)
    load_checkpoint(path, model=other, optimizer=other_optimizer)
    expected, found = everything(model, optimizer), everything(other, other_optimizer)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert foreign_file(tmp_path) is None
    remove_checkpoints(tmp_path)
    assert not path.exists()


def test_a_missing_part_is_refused(saved):
    _, _, path = saved
    divided(path)
    raw = unsealed(json.loads((path / "state.json").read_text()))
    del raw["files"]["model-00002-of-00002.safetensors"]
    (path / "state.json").write_text(json.dumps(sealed(raw)))
    with pytest.raises(CheckpointError, match=r"has no tensor|the pieces of .* have"):
        load_model(path, build()[0])


def test_saved_while_training_goes_on(tmp_path, monkeypatch):
    """The thread writes what the weights were; the next save waits for it, and reports what went wrong."""
    model, optimizer = build("delayed")
    train_a_little(model, optimizer)
    expected, may_write = everything(model, optimizer), threading.Event()
    events: list[object] = []

    def write(*arguments, **options):
        assert may_write.wait(60)
        return write_checkpoint(*arguments, **options)

    monkeypatch.setattr("octavo.training.checkpoint_saver.write_checkpoint", write)
    with CheckpointSaver(tmp_path, events.append, is_async=True) as saver:
        saver.save(snapshot(state(1), model=model, optimizer=optimizer))
        train_a_little(model, optimizer)
        assert latest(tmp_path) is None
        assert not events
        may_write.set()
    assert saver.newest is not None
    assert events == [Saved(step=1, path=saver.newest)]
    other, other_optimizer = build("delayed", seed=9)
    load_checkpoint(saver.newest, model=other, optimizer=other_optimizer)
    found = everything(other, other_optimizer)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_error_of_the_writing_thread_is_raised_by_the_next_save_or_the_end(tmp_path):
    model, optimizer = build()
    now = snapshot(state(1), model=model, optimizer=optimizer)
    (tmp_path / "checkpoints").write_text("a file where the folder belongs")
    with CheckpointSaver(tmp_path, print, is_async=True) as saver:
        saver.save(now)
        with pytest.raises(CheckpointError, match=r"cannot save .*step-000001"):
            saver.save(now)
    saver = CheckpointSaver(tmp_path, print, is_async=True)
    with pytest.raises(CheckpointError, match=r"cannot save .*step-000001"), saver:
        saver.save(now)


def test_error_that_ends_a_run_is_not_hidden_by_one_of_its_last_save(tmp_path):
    model, optimizer = build()
    (tmp_path / "checkpoints").write_text("a file where the folder belongs")

    def fail():
        with CheckpointSaver(tmp_path, print, is_async=True) as saver:
            saver.save(snapshot(state(1), model=model, optimizer=optimizer))
            raise ValueError("the run's own")

    with pytest.raises(ValueError, match="the run's own"):
        fail()
