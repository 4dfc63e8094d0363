import hashlib
import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import octavo
from octavo.errors import CheckpointError, ConfigError
from octavo.models import Llama
from octavo.quantization import calibrate, load_calibration
from octavo.quantization.calibration.result import weights_hash
from tests.unit.quantization.calibration.test_calibrate import mlp, mlp_batches
from tests.unit.quantization.calibration.test_observers import SHAPE, llama, token_batches


@pytest.fixture(scope="module")
def found():
    return calibrate(
        llama(), token_batches(), granularity="row", weight_method="mse", kv_cache=True, method="entropy", source="own"
    )


def test_saved_calibration_loads_with_the_same_fields(found, tmp_path):
    found.save(tmp_path / "out")
    loaded = load_calibration(tmp_path / "out")
    for name in ("recipe", "rule", "weight_method", "health", "groups", "left_out", "shapes", "model_hash", "seen",
                 "octavo_version"):  # fmt: skip
        assert getattr(loaded, name) == getattr(found, name), name
    for name in ("input_scales", "weight_scales", "key_means"):
        mine, theirs = getattr(found, name), getattr(loaded, name)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[path], theirs[path]) for path in mine)
    assert [[float(s) for s in loaded.kv_scales[i]] for i in (0, 1)] == [
        [float(s) for s in found.kv_scales[i]] for i in (0, 1)
    ]
    assert loaded.warnings() == found.warnings()


def test_a_loaded_calibration_computes_the_same(found, tmp_path):
    found.save(tmp_path)
    outputs = []
    for one in (found, load_calibration(tmp_path)):
        model = llama()
        one.apply(model)
        with torch.no_grad():
            outputs.append(model.logits(token_batches(1)[0]))
    assert torch.equal(*outputs)


def test_calibration_folder_has_its_three_files(found, tmp_path):
    found.save(tmp_path / "a" / "b")
    folder = tmp_path / "a" / "b"
    assert sorted(path.name for path in folder.iterdir()) == ["calibration.json", "recipe.toml", "scales.safetensors"]
    assert octavo.recipes.from_toml((folder / "recipe.toml").read_text()) == found.recipe
    assert tomllib.loads((folder / "recipe.toml").read_text())["output"]["b"]["granularity"] == "row"
    scales = load_file(folder / "scales.safetensors")
    path = "model.layers.1.mlp.up_proj"
    assert torch.equal(scales[f"{path}.input.scale"], found.input_scales[path])
    assert scales[f"{path}.weight.scale"].shape == (64, 1)
    assert {key for key in scales if key.startswith("kv_cache")} == {
        f"kv_cache.{i}.{what}" for i in (0, 1) for what in ("key.scale", "value.scale", "key.mean")
    }
    assert all(scale.dtype is torch.float32 for scale in scales.values())
    record = json.loads((folder / "calibration.json").read_text())
    assert record["seen"] == {"batches": 5, "samples": 10, "tokens": 160, "source": "own", "split": "", "run": ""}
    assert record["warnings"] == found.warnings()


def test_the_scales_are_a_scaling_state_of_the_converted_model(tmp_path):
    model = mlp()
    found = calibrate(model, mlp_batches())
    found.save(tmp_path)
    scales = load_file(tmp_path / "scales.safetensors")
    octavo.convert(model, found.recipe)
    octavo.load_scaling_state(model, {key: scales[key] for key in octavo.scaling_state(model)})
    other = mlp()
    found.apply(other)
    x = mlp_batches(1)[0]
    with torch.no_grad():
        assert torch.equal(model(x), other(x))


def test_a_model_that_is_one_layer_has_a_path_too(tmp_path):
    model = nn.Linear(8, 4)
    calibrate(model, [torch.ones(2, 8)]).save(tmp_path)
    assert set(load_file(tmp_path / "scales.safetensors")) == {"input.scale", "weight.scale"}
    loaded = load_calibration(tmp_path)
    assert list(loaded.input_scales) == list(loaded.weight_scales) == [""]
    assert loaded.apply(model).converted == ("",)


def test_an_older_calibration_is_replaced_and_other_files_are_not(tmp_path):
    first, second = (calibrate(mlp(), [x * factor for x in mlp_batches()]) for factor in (1, 2))
    first.save(tmp_path)
    second.save(tmp_path)
    assert load_calibration(tmp_path).input_scales["0"] == second.input_scales["0"] != first.input_scales["0"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("three years")
    with pytest.raises(ConfigError, match="holds other files; name a new folder"):
        first.save(other)
    assert [path.name for path in other.iterdir()] == ["thesis.txt"]
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        first.save(other / "thesis.txt")


@pytest.mark.parametrize(
    "damage", ["no record", "no scales", "other scales", "other recipe", "record", "shapes", "another kind"]
)
def test_a_damaged_folder_is_refused(found, tmp_path, damage):
    found.save(tmp_path)
    match damage:
        case "no record":
            (tmp_path / "calibration.json").unlink()
        case "no scales":
            (tmp_path / "scales.safetensors").unlink()
        case "other scales":
            save_file({"a.input.scale": torch.ones(())}, tmp_path / "scales.safetensors")
        case "other recipe":
            (tmp_path / "recipe.toml").write_text(octavo.recipes.to_toml(octavo.recipes.get("static")))
        case "record":
            record = json.loads((tmp_path / "calibration.json").read_text())
            del record["shapes"]
            (tmp_path / "calibration.json").write_text(json.dumps(record))
        case "shapes":
            record = json.loads((tmp_path / "calibration.json").read_text())
            record["shapes"] = [1]
            (tmp_path / "calibration.json").write_text(json.dumps(record))
        case "another kind":
            (tmp_path / "calibration.json").write_text('{"format": "something else"}')
    with pytest.raises(CheckpointError, match=r"holds no calibration|is damaged"):
        load_calibration(tmp_path)


@pytest.mark.parametrize("stop", range(2))
def test_a_save_over_an_older_calibration_leaves_one_of_them_whole(found, tmp_path, monkeypatch, stop):
    """Whichever rename it stops at; nothing else stays beside it."""
    out = tmp_path / "out"
    older = calibrate(mlp(), mlp_batches())
    older.save(out)
    rename, renamed = Path.replace, []

    def replace(path, target):
        renamed.append(path)
        if len(renamed) == stop + 1:
            raise OSError("the power is gone")
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OSError, match="the power is gone"):
        found.save(out)
    monkeypatch.undo()
    assert load_calibration(out).model_hash == older.model_hash
    found.save(out)
    assert load_calibration(out).model_hash == found.model_hash
    assert list(tmp_path.iterdir()) == [out]


def test_a_file_beside_a_calibration_is_somebodys(found, tmp_path):
    found.save(tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds other files"):
        found.save(tmp_path / "out")
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def other_weights():
    """The same shape, of another run."""
    return replace(llama(), model=Llama(SHAPE, seed=2).eval())


@pytest.mark.parametrize("method", ["max", "mse"])
def test_a_calibration_is_refused_by_the_weights_of_another_run(tmp_path, method):
    calibrate(llama(), token_batches(), kv_cache=True, weight_method=method).save(tmp_path)
    loaded = load_calibration(tmp_path)
    other = other_weights()
    with pytest.raises(CheckpointError, match=r"is of other weights .* calibrate this model"):
        loaded.apply(other)
    with pytest.raises(CheckpointError, match="is of other weights"):
        loaded.means_of_keys(other)
    assert not any(isinstance(layer, octavo.nn.Linear) for layer in other.model.modules())
    loaded.apply(llama())


def test_one_changed_weight_is_another_model(tmp_path):
    calibration = calibrate(llama(), token_batches())
    model = llama()
    with torch.no_grad():
        model.model.model.embed_tokens.weight[3, 5] *= 1.01
    with pytest.raises(CheckpointError, match="is of other weights"):
        calibration.apply(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_in_another_dtype_are_the_same_weights(dtype):
    calibration = calibrate(llama(), token_batches())
    model = llama()
    model.model.to(dtype)
    assert calibration.apply(model).converted


def test_an_older_calibration_knows_no_weights_and_is_taken(tmp_path):
    calibrate(llama(), token_batches()).save(tmp_path)
    record = json.loads((tmp_path / "calibration.json").read_text())
    del record["weights_hash"]
    record.pop("sha256", None)
    (tmp_path / "calibration.json").write_text(json.dumps(record))
    assert load_calibration(tmp_path).apply(other_weights()).converted


def test_the_hash_of_weights_is_that_of_their_bf16_bytes_by_name():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1))
    digest = hashlib.sha256()
    for name in ("0.weight", "1.bias", "1.weight"):
        parameter = model.get_parameter(name).detach()
        digest.update(f"{name} {list(parameter.shape)}\n".encode())
        digest.update(parameter.bfloat16().view(torch.int16).numpy().tobytes())
    assert weights_hash(model) == digest.hexdigest()
