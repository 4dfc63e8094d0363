"""``octavo train``, ``octavo qat`` and ``octavo export`` for an engine: one set of codes from training to the file."""

import json

import pytest
import torch
from safetensors.torch import load_file

from octavo.checkpoints import load_quantized
from octavo.convert import restore
from octavo.engines import get, model_as, weight_as
from octavo.formats import E4M3
from octavo.language_model import load_language_model
from octavo.nn import Linear
from octavo.nn.parameter_rounding import rounded_parameters
from octavo.numerics.fnuz import to_fnuz
from octavo.quantization import load_qat
from octavo.training.config import load_config
from octavo.training.run_folder import load_run
from tests.oracle.engines.adversarial import same_codes

QAT = ["--steps", 3, "--batch-size", 2, "--context", 16, "--eval-windows", 3, "--warmup", 1, "--lr", 1e-3]
IDS = torch.arange(64).reshape(2, 32) % 200


def file_is_of(folder, plain, engine):
    """Whether codes and scales of a folder are the engine's, of a plain model's weights in BF16."""
    stored = {key: tensor for path in folder.glob("*.safetensors") for key, tensor in load_file(path).items()}
    layers = [path for path, m in load_quantized(folder).model.named_modules() if isinstance(m, Linear)]
    assert layers
    for path in layers:
        codes = weight_as(plain.model.get_submodule(path).weight.detach().bfloat16(), get(engine))
        assert torch.equal(stored[f"{path}.weight"].view(torch.uint8), codes.data.view(torch.uint8)), path
        scale = next(stored[key] for key in stored if key.startswith(f"{path}.weight_scale"))
        assert torch.equal(scale.reshape(codes.scale.shape), codes.scale), path


@pytest.mark.long
@pytest.mark.usefixtures("forked_verification")
def test_train_and_export(octavo, setting, tmp_path):
    run, served, engine = tmp_path / "run", tmp_path / "served", "vllm-token+fp8-cache"
    result = octavo("train", *setting, "--recipe", "rowwise", "--as-served-by", engine, "--out", run)
    assert result.exit_code == 0, result.output
    assert load_config(run / "config.toml").training.as_served_by == engine
    trained, plain = load_run(run), load_language_model(run)
    with torch.no_grad(), trained.surroundings:
        logits = trained.model(IDS)
    assert torch.equal(logits, model_as(plain.model, get(engine))(IDS))
    result = octavo("export", run, "--for", "vllm+fp8-cache", "--out", served, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["format"] == "compressed-tensors"
    file_is_of(served, plain, "vllm-token")


@pytest.mark.usefixtures("forked_verification")
def test_export_for_fnuz_codes(octavo, finished_run, tmp_path):
    """The folder's OCP codes and scales become the engine's as vLLM converts them."""
    served = tmp_path / "served"
    result = octavo("export", finished_run, "--for", "vllm-fnuz", "--out", served)
    assert result.exit_code == 0, result.output
    plain, layers = load_language_model(finished_run).model, 0
    for path, layer in load_quantized(served).model.named_modules():
        if isinstance(layer, Linear) and (stored := layer.stored_codes()) is not None:
            assert stored.format == E4M3
            weight = plain.get_parameter(f"{path}.weight").detach().bfloat16()
            ours, expected = to_fnuz(stored), weight_as(weight, get("vllm-fnuz"))
            assert same_codes(ours.tensor.data, expected.data), path
            assert torch.equal(ours.tensor.scale, expected.scale), path
            layers += 1
    assert layers


@pytest.mark.long
def test_a_run_goes_on_as_it_would_have(octavo, setting, tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    options = ["--recipe", "rowwise", "--as-served-by", "te-current"]
    assert octavo("train", *setting, *options, "--out", whole).exit_code == 0
    assert octavo("train", *setting, *options, "--out", halves).exit_code == 0
    for path in (halves / "checkpoints").glob("step-*4"):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    assert octavo("train", "--resume", "--out", halves).exit_code == 0
    ours, theirs = load_run(whole).model.state_dict(), load_run(halves).model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.long
@pytest.mark.usefixtures("forked_verification")
@pytest.mark.parametrize("engine", ["vllm-token", "modelopt"])
def test_qat_and_export(octavo, finished_run, text, tmp_path, engine):
    tuned, served = tmp_path / "tuned", tmp_path / "served"
    result = octavo("qat", finished_run, "--data", text, *QAT, "--as-served-by", engine, "--out", tuned)
    assert result.exit_code == 0, result.output
    assert json.loads((tuned / "qat.json").read_text())["settings"]["engine"] == engine
    learned, untuned, plain = load_qat(tuned), load_qat(tuned).model, load_language_model(tuned)
    restore(untuned)
    if engine == "vllm-token":
        with torch.no_grad(), rounded_parameters(learned.model, torch.bfloat16):
            logits = learned.logits(IDS[:, :16])
        assert torch.equal(logits, model_as(untuned, get(engine))(IDS[:, :16]))
    result = octavo("export", tuned, "--for", engine, "--out", served)
    assert result.exit_code == 0, result.output
    file_is_of(served, plain, engine)
    other = octavo("export", tuned, "--for", "sglang", "--out", tmp_path / "other")
    assert other.exit_code == 2
    assert "octavo qat --as-served-by sglang-block" in other.stderr


@pytest.mark.parametrize(
    "refusal",
    [
        (
            "train",
            ["--recipe", "bf16", "--as-served-by", "vllm-token"],
            "'weight_only' has gradients in high precision",
        ),
        ("train", ["--as-served-by", "vllm-tensor"], "octavo qat --as-served-by vllm-tensor"),
        ("train", ["--as-served-by", "te-delayed"], "its fused_cast is"),
        ("train", ["--as-served-by", "vlm"], "there is no engine 'vlm'"),
        ("train", ["--as-served-by", "vllm-token", "--shard", 2], "whole layers on each rank"),
        ("train", ["--as-served-by", "vllm-token", "--autopilot"], "autopilot changes casts"),
        ("qat", ["--as-served-by", "vllm-token", "--recipe", "static"], "both define the casts"),
        ("qat", ["--as-served-by", "vllm-tensor", "--scales", "learned"], "use scales='tracked'"),
        ("export", ["--for", "te-block"], "te-block trains, and reads no checkpoint in FP8"),
        ("export", ["--for", "modelopt-mxfp8"], "no format holds what modelopt-mxfp8 multiplies"),
        ("export", ["--for", "vllm", "--format", "hf-fp8"], "--for chooses the format"),
        ("export", ["--for", "vllm-fnuz", "--fnuz"], "leave --fnuz out"),
        ("export", ["--for", "vllm", "--recipe", "rowwise"], "as --recipe does"),
        ("export", ["--for", "vllm-tensor"], "--for vllm-tensor has static inputs, and the run"),
        ("export", ["--for", "vllm-tensor"], "or calibrate on data: octavo calibrate MODEL --out SCALES, then"),
        ("export", ["--for", "vlm"], "or of vllm, sglang, transformers, tensorrt-llm"),
    ],
)
def test_refusals(octavo, finished_run, setting, tmp_path, refusal):
    command, options, says = refusal
    arguments = setting if command == "train" else [finished_run]
    result = octavo(command, *arguments, *options, "--out", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()
