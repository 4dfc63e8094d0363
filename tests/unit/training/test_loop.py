"""The loop against the same training written out plainly, and its refusals."""

import dataclasses
import json
import math
import os
import shutil
import signal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from octavo.errors import CheckpointError, ConfigError, DataError, NonFiniteLossError, TrainingError
from octavo.experiments.paired import fp8_layers
from octavo.models import Llama
from octavo.models.sources import has_run
from octavo.training import loop
from octavo.training.config import Device, load_config
from octavo.training.evaluate import evaluate, token_loss
from octavo.training.events import Evaluated, Event, Notice, Saved, StepDone
from octavo.training.loop import train
from octavo.training.metrics import read_metrics
from octavo.training.run_folder import claimed, load_run
from octavo.training.schedules import learning_rate
from octavo.training.setup import build_model, build_optimizer
from tests.unit.training.tiny_runs import MODEL, comparable, tiny_config, tiny_data


def gradient_of(parameter):
    return parameter.grad.double()


def plain_training(data, training):
    """AdamW, clipping and the schedule by their formulas, in FP64 where PyTorch's own code is not used."""
    model = Llama(MODEL.llama(vocab_size=data.vocab_size, max_positions=training.context), seed=training.seed)
    means = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    squares = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    losses, norms = [], []
    beta1, beta2 = training.betas
    for step in range(1, training.steps + 1):
        model.zero_grad()
        total = 0.0
        for micro in range(training.grad_accumulation):
            index = (step - 1) * training.grad_accumulation + micro
            x, y = data.batch(index, batch_size=training.batch_size, context=training.context, seed=training.seed)
            loss = -torch.log_softmax(model(x), -1).gather(-1, y[..., None]).mean()
            (loss / training.grad_accumulation).backward()
            total += loss.item() / training.grad_accumulation
        norm = math.sqrt(sum(gradient_of(p).square().sum().item() for p in model.parameters()))
        factor = min(1.0, training.clip_norm / (norm + 1e-6))
        lr = learning_rate(step, peak=training.lr, floor=training.min_lr, warmup=training.warmup, steps=training.steps)
        with torch.no_grad():
            for name, p in model.named_parameters():
                gradient = gradient_of(p) * factor
                means[name] = beta1 * means[name] + (1 - beta1) * gradient
                squares[name] = beta2 * squares[name] + (1 - beta2) * gradient**2
                decay = training.weight_decay if p.ndim == 2 else 0.0
                update = means[name] / (1 - beta1**step) / ((squares[name] / (1 - beta2**step)).sqrt() + training.eps)
                p.copy_(p.double() * (1 - lr * decay) - lr * update)
        losses.append(total)
        norms.append(norm)
    return model, losses, norms


def test_train_matches_a_loop_written_by_hand(tmp_path, data):
    config = tiny_config(grad_accumulation=2, clip_norm=0.5, steps=8, eval_interval=0, weight_decay=0.3)
    result = train(config, tmp_path / "run", data=data)
    model, losses, norms = plain_training(data, config.training)
    steps = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "step"]
    assert [loss for _, loss in result.train_curve] == pytest.approx(losses, rel=1e-5)
    assert [line["grad_norm"] for line in steps] == pytest.approx(norms, rel=1e-4)
    assert any(norm > 0.5 for norm in norms)
    assert losses[-1] < losses[0] - 0.01
    ours = load_run(tmp_path / "run").model.state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=2e-6)
    assert result.validation_curve[-1][1] == pytest.approx(
        evaluate(model, data, context=16, max_tokens=64).nats, rel=1e-5
    )


@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "rowwise", "delayed"])
def test_every_recipe_learns_and_stays_near_fp32(tmp_path, data, recipe):
    curves = {}
    for name in ("fp32", recipe):
        result = train(tiny_config(recipe=name, lr=1e-2, steps=12), tmp_path / name, data=data)
        curves[name] = [loss for _, loss in result.train_curve]
    assert curves[recipe] != curves["fp32"]
    assert curves[recipe] == pytest.approx(curves["fp32"], abs=0.02)
    assert curves[recipe][-1] < curves[recipe][0] - 0.05


def test_delayed_scales_update_once_per_optimizer_step(tmp_path, data):
    """Not once a micro-batch, and not never: three operands in each of seven layers, one closed step an update."""
    result = train(tiny_config(recipe="delayed", grad_accumulation=2), tmp_path / "run", data=data)
    assert result.checkpoint is not None
    state = load_file(result.checkpoint / "scaling.safetensors")
    steps = [tensor.item() for name, tensor in state.items() if name.endswith(".steps")]
    assert steps == [6] * 7 * 3


def test_events_and_result_match_the_metrics(tmp_path, data):
    events: list[Event] = []
    result = train(tiny_config(checkpoint_interval=3), tmp_path / "run", data=data, on_event=events.append)
    kinds = [(type(event), event.step) for event in events if not isinstance(event, Notice)]
    assert kinds == [
        (Evaluated, 0), (StepDone, 1), (StepDone, 2), (Evaluated, 2), (StepDone, 3), (Saved, 3), (StepDone, 4),
        (Evaluated, 4), (StepDone, 5), (StepDone, 6), (Evaluated, 6), (Saved, 6),
    ]  # fmt: skip
    assert (result.step, result.interrupted, result.converted) == (6, False, 0)
    assert result.checkpoint == tmp_path / "run" / "checkpoints" / "step-000006"
    assert [step for step, _ in result.validation_curve] == [0, 2, 4, 6]
    assert result.validation_curve[0][1] == pytest.approx(math.log(data.vocab_size), abs=0.05)
    assert result.tokens_per_second > 0
    assert result.peak_memory_bytes > 2**20
    assert load_config(tmp_path / "run" / "config.toml") == tiny_config(checkpoint_interval=3)


def test_tied_weights_train(tmp_path, data):
    config = tiny_config(recipe="tensorwise")
    config = type(config)(
        model=type(MODEL)(hidden_size=16, num_layers=1, num_heads=2, tie_embeddings=True),
        data=config.data,
        training=config.training,
    )
    train(config, tmp_path / "run", data=data)
    model = load_run(tmp_path / "run").model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_only_matrices_decay():
    model = Llama(MODEL.llama(vocab_size=50, max_positions=8))
    names = {parameter: name for name, parameter in model.named_parameters()}
    matrices, vectors = build_optimizer(model, tiny_config(weight_decay=0.2).training).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.2, 0.0)
    assert all("norm" in names[parameter] for parameter in vectors["params"])
    assert len(matrices["params"]) + len(vectors["params"]) == len(names)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_nonfinite_step_stops_before_the_weights_change(tmp_path, data, monkeypatch, where):
    """The fault appears in the fifth step; the checkpoint of the fourth is the last good one."""
    real_init = loop.Trainer.__init__

    def with_fault(self, *args, **options):
        real_init(self, *args, **options)

        def spoil(module, inputs, output):
            if self.step != 4 or not module.training:
                return output
            if where == "forward":
                return output * float("nan")
            output.register_hook(lambda gradient: gradient * float("inf"))
            return output

        self.model.model.layers[0].mlp.up_proj.register_forward_hook(spoil)
        trainers.append(self)

    trainers: list[loop.Trainer] = []
    monkeypatch.setattr(loop.Trainer, "__init__", with_fault)
    words = {
        "forward": r"at step 5 the loss is nan; the first .* is the output of model.layers.0.mlp.up_proj",
        "backward": r"at step 5 the gradient norm is (nan|inf); the first .* is the gradient of",
    }[where]
    with pytest.raises(NonFiniteLossError, match=words + r".*last good checkpoint is .*step-000004"):
        train(tiny_config(checkpoint_interval=2, recipe="tensorwise"), tmp_path / "run", data=data)
    good = load_run(tmp_path / "run").model.state_dict()
    assert all(torch.equal(good[name], tensor) for name, tensor in trainers[0].model.state_dict().items())
    *earlier, statistics, failure = read_metrics(tmp_path / "run")
    assert [line["step"] for line in earlier if line["kind"] == "step"] == [1, 2, 3, 4]
    assert (statistics["kind"], statistics["step"]) == ("statistics", 5), "the step that broke is looked at"
    assert (failure["kind"], failure["step"]) == ("failure", 5)
    assert failure["tensor"].startswith({"forward": "output of ", "backward": "gradient of "}[where])


def test_a_run_folder_is_not_overwritten(tmp_path, data):
    train(tiny_config(steps=1), tmp_path / "run", data=data)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="already holds a run; continue it with --resume"):
        train(tiny_config(steps=1), tmp_path / "run", data=data)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_resume_without_a_run_is_refused(tmp_path, data):
    with pytest.raises(ConfigError, match="there is no run to resume"):
        train(tiny_config(), tmp_path / "run", data=data, resume=True)
    assert not has_run(tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "words"),
    [({"lr": 0.5}, "training.lr = 0.003, not 0.5"), ({"seed": 1}, "training.seed = 0, not 1")],
)
def test_resume_with_another_config_is_refused_by_key(tmp_path, data, change, words):
    train(tiny_config(steps=2), tmp_path / "run", data=data)
    with pytest.raises(ConfigError, match=words):
        train(tiny_config(steps=2, **change), tmp_path / "run", data=data, resume=True)


def test_resuming_with_another_model_is_refused(tmp_path, data):
    config = tiny_config(steps=2)
    train(config, tmp_path / "run", data=data)
    wider = type(config)(model=type(MODEL)(hidden_size=32, num_heads=2), data=config.data, training=config.training)
    with pytest.raises(ConfigError, match=r"model.hidden_size = 16, not 32"):
        train(wider, tmp_path / "run", data=data, resume=True)


def test_resuming_on_other_text_is_refused(tmp_path, data):
    train(tiny_config(steps=2), tmp_path / "run", data=data)
    other = tiny_data(tmp_path, text="entirely other text, \n" * 800)
    with pytest.raises(CheckpointError, match="trained on other text"):
        train(tiny_config(steps=2), tmp_path / "run", data=other, resume=True)


def test_two_processes_do_not_share_a_folder(tmp_path, data):
    with (
        claimed(tmp_path / "run", tiny_config(), data, resume=False),
        pytest.raises(TrainingError, match="another process is training"),
    ):
        train(tiny_config(), tmp_path / "run", data=data, resume=True)
    train(tiny_config(), tmp_path / "run", data=data, resume=True)


def test_an_unwritable_folder_is_refused_before_training(tmp_path, data):
    (tmp_path / "file").write_text("not a folder")
    events: list[Event] = []
    with pytest.raises(TrainingError, match=r"cannot write into the run folder .*file/run"):
        train(tiny_config(), tmp_path / "file" / "run", data=data, on_event=events.append)
    assert events == []


def test_text_shorter_than_the_context_is_refused_before_anything_is_written(tmp_path, data):
    with pytest.raises(DataError, match="too few for a context of 5000"):
        train(tiny_config(context=5000), tmp_path / "run", data=data)
    assert not (tmp_path / "run").exists()


def test_signal_saves_a_checkpoint_and_stops(tmp_path, data):
    def on_event(event):
        if isinstance(event, StepDone) and event.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    result = train(tiny_config(), tmp_path / "run", data=data, on_event=on_event)
    assert (result.step, result.interrupted) == (3, True)
    assert result.checkpoint is not None
    assert result.checkpoint.name == "step-000003"


def test_resuming_a_finished_run_changes_nothing(tmp_path, data):
    first = train(tiny_config(), tmp_path / "run", data=data)
    before = comparable(read_metrics(tmp_path / "run"))
    again = train(tiny_config(), tmp_path / "run", data=data, resume=True)
    assert again.train_curve == first.train_curve
    assert again.step == 6
    assert comparable(read_metrics(tmp_path / "run")) == before


def test_loading_a_missing_run_is_refused(tmp_path, data):
    with pytest.raises(CheckpointError, match="holds no run"):
        load_run(tmp_path)
    with claimed(tmp_path / "run", tiny_config(), data, resume=False):
        pass
    with pytest.raises(CheckpointError, match="no finished checkpoint yet"):
        load_run(tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "words"),
    [({"recipe": "tensorwise", "skip": ("zz",)}, "zz"), ({"device": Device.CUDA}, "no CUDA device")],
)
def test_refused_start_does_not_block_the_corrected_command(data, tmp_path, monkeypatch, change, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=words):
        train(tiny_config(**change), tmp_path / "run", data=data)
    assert not (tmp_path / "run").exists()
    assert train(tiny_config(steps=1), tmp_path / "run", data=data).step == 1


def test_a_model_that_does_not_fit_in_memory_is_named(data, tmp_path):
    config = dataclasses.replace(tiny_config(), model=dataclasses.replace(MODEL, hidden_size=1_000_000_000))
    with pytest.raises(ConfigError, match=r"hidden_size 1,000,000,000,? .* does not fit in the memory"):
        train(config, tmp_path / "run", data=data)


@pytest.mark.parametrize("batch_size", [10**11, 10**400])
def test_a_batch_far_too_large_is_refused_before_anything_is_written(data, tmp_path, batch_size):
    with pytest.raises(ConfigError, match=rf"batch_size {batch_size} and context 16 does not fit .* lower one of them"):
        train(tiny_config(batch_size=batch_size), tmp_path / "run", data=data)
    assert not (tmp_path / "run").exists()


def no_memory_in_numpy():
    np.empty(1 << 60, dtype=np.uint8)


def no_memory_in_torch():
    torch.empty(1 << 60, dtype=torch.uint8)


def no_memory_on_cuda():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nAnd more.")


NO_MEMORY = [no_memory_in_numpy, no_memory_in_torch, no_memory_on_cuda]


def failing_loss(monkeypatch, fail, *, at):
    """The training loss of the micro-batch ``at`` (0 is the first) fails."""
    calls: list[int] = []

    def failing(*args, **options):
        calls.append(1)
        if len(calls) == at + 1:
            fail()
        return token_loss(*args, **options)

    monkeypatch.setattr(loop, "token_loss", failing)


@pytest.mark.parametrize("fail", NO_MEMORY)
def test_out_of_memory_is_one_sentence_and_leaves_no_run(data, tmp_path, monkeypatch, fail):
    failing_loss(monkeypatch, fail, at=0)
    with pytest.raises(ConfigError, match="batch_size 2 and context 16 does not fit in the memory of 'cpu'") as caught:
        train(tiny_config(), tmp_path / "run", data=data)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
    assert train(tiny_config(batch_size=1, steps=1), tmp_path / "run", data=data).step == 1


@pytest.mark.parametrize("fail", NO_MEMORY)
def test_out_of_memory_after_the_first_step_keeps_the_run(data, tmp_path, monkeypatch, fail):
    failing_loss(monkeypatch, fail, at=3)
    with pytest.raises(ConfigError, match="does not fit in the memory"):
        train(tiny_config(checkpoint_interval=2), tmp_path / "run", data=data)
    assert load_run(tmp_path / "run").step == 2
    assert train(tiny_config(checkpoint_interval=2), tmp_path / "run", data=data, resume=True).step == 6


def test_other_errors_pass_unchanged_and_leave_no_run(data, tmp_path, monkeypatch):
    def fail():
        raise RuntimeError("a defect")

    failing_loss(monkeypatch, fail, at=0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(RuntimeError, match="a defect"):
        train(tiny_config(), tmp_path / "run", data=data)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("to", ["a file", "nothing"])
def test_lock_that_is_a_symbolic_link_is_refused(tmp_path, data, to):
    run, thesis = tmp_path / "run", tmp_path / "thesis.txt"
    run.mkdir()
    (run / ".lock").symlink_to(thesis)
    if to == "a file":
        thesis.write_text("three years")
    with pytest.raises(TrainingError, match=r"run/\.lock' is a symbolic link.*remove it"):
        train(tiny_config(), run, data=data)
    assert thesis.exists() == (to == "a file")
    assert to == "nothing" or thesis.read_text() == "three years"
    assert [path.name for path in run.iterdir()] == [".lock"]


@pytest.mark.parametrize("kept", [0, 1, 5])
def test_run_with_missing_metrics_lines_is_not_resumed(tmp_path, data, kept):
    """It would go on with steps missing, and nothing would say so."""
    config = tiny_config(steps=4)
    train(config, tmp_path / "run", data=data)
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:kept]))
    events: list[object] = []
    with pytest.raises(
        TrainingError, match=f"has {kept} lines, fewer than the {len(lines)} that the run's newest checkpoint records"
    ):
        train(config, tmp_path / "run", data=data, resume=True, on_event=events.append)
    assert not events, "it does not say that it continues"
    assert metrics.read_text() == "".join(lines[:kept])
    metrics.write_text("".join(lines))
    train(config, tmp_path / "run", data=data, resume=True)
    assert metrics.read_text() == "".join(lines)


def test_run_without_checksums_is_resumed_and_gets_them(tmp_path, data):
    config = tiny_config(steps=4, checkpoint_interval=2)
    train(config, tmp_path / "new", data=data)
    train(config, tmp_path / "old", data=data)
    shutil.rmtree(tmp_path / "old" / "checkpoints" / "step-000004")
    metrics, state = tmp_path / "old" / "metrics.jsonl", tmp_path / "old" / "checkpoints" / "step-000002" / "state.json"
    raw = json.loads(state.read_text())
    state.write_text(json.dumps({key: value for key, value in raw.items() if key not in ("sha256", "metrics")}))
    older = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps({k: v for k, v in line.items() if k != "sha256"}) + "\n" for line in older))
    train(config, tmp_path / "old", data=data, resume=True)
    assert all('"sha256"' in line for line in metrics.read_text().splitlines())
    assert comparable(read_metrics(tmp_path / "old")) == comparable(read_metrics(tmp_path / "new"))


def test_leftovers_of_a_killed_process_are_removed_on_resume(tmp_path, data):
    config = tiny_config(steps=4, checkpoint_interval=2)
    train(config, tmp_path / "run", data=data)
    checkpoints = tmp_path / "run" / "checkpoints"
    for name in (".step-000003.0123456789abcdef.writing", ".step-000004.0123456789abcdef.older"):
        shutil.copytree(checkpoints / "step-000002", checkpoints / name)
    (tmp_path / "run" / ".metrics.jsonl.0123456789abcdef.tmp").write_text("half")
    (checkpoints / ".notes").write_text("mine")
    (checkpoints / "step-000002").rename(checkpoints / ".step-000002.0123456789abcdef.older")
    train(config, tmp_path / "run", data=data, resume=True)
    assert not list((tmp_path / "run").glob(".*.tmp"))
    assert sorted(path.name for path in checkpoints.iterdir()) == [".notes", "step-000002", "step-000004"]


@pytest.mark.parametrize(
    ("training", "layers"),
    [
        ({"recipe": "fp32"}, 0),
        ({"recipe": "bf16"}, 0),
        ({"recipe": "tensorwise"}, 7),
        ({"recipe": "tensorwise", "precision": "fp32"}, 7),
        ({"recipe": "tensorwise", "convert_head": True}, 8),
        ({"recipe": "tensorwise", "skip": ("*.q_proj",)}, 6),
    ],
)
def test_converted_layers_are_those_that_cast_to_fp8(data, training, layers):
    """Under autocast the head runs octavo's BF16 recipe in BF16 and FP8 runs alike, and counts in neither."""
    model, converted = build_model(tiny_config(**training), data.vocab_size)
    assert converted == layers
    assert converted == len(fp8_layers(model))
