"""``octavo export`` and ``octavo import`` on a finished run and what is made of it."""

import json
import os
import shutil
import signal
import subprocess

import pytest
import torch
from safetensors.torch import load_file

from octavo.checkpoints import load_quantized
from octavo.export.checkpoint_writer import save_quantized
from octavo.quantization.sensitivity.mix import Mix, save_mix
from tests.unit.checkpoints.folders import ROW, dynamic, written

GRAPH = ["--format", "onnx"]
FOREIGN = [
    *([*GRAPH, option, *value] for option, value in (("--no-verify", []), ("--max-shard-size", ["1GB"]))),
    [*GRAPH, "--device", "cpu"],
    *(
        [option, *value]
        for option, value in (
            ("--opset", ["21"]),
            ("--kv-cache", []),
            ("--attention", ["builtin"]),
            ("--external-data", []),
            ("--tensorrt", []),
            ("--max-batch", ["4"]),
            ("--max-length", ["16"]),
        )
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("fp8") / "rows"
    written(made, "rows")
    return made


@pytest.mark.long
@pytest.mark.usefixtures("forked_verification")
def test_a_run_is_exported_verified_and_explained(octavo, finished_run, tmp_path):
    out = tmp_path / "new" / "served"
    result = octavo("export", finished_run, "--format", "hf-fp8", "--out", out)
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert "verified by octavo: layer by layer" in words
    assert "16 of 16 greedy tokens agree" in words
    for server in ("vLLM", "SGLang", "TensorRT-LLM", "transformers"):
        assert server in words
    record = json.loads((out / "config.json").read_text())
    assert record["architectures"] == ["LlamaForCausalLM"]
    assert record["quantization_config"]["weight_block_size"] == [128, 128]
    assert len(load_quantized(out).recipes) == 7


def test_json_and_options(octavo, finished_run, tmp_path):
    out = tmp_path / "m"
    options = ["--recipe", "weight_only", "--skip", "*.k_proj", "--dtype", "fp32", "--max-shard-size", "10KB"]
    result = octavo("export", finished_run, "--out", out, *options, "--no-verify", "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["agreement"] is None
    assert record["schemes"] == {"weights with a scale a row, inputs in high precision": 6}
    assert "model.layers.0.self_attn.k_proj" in record["left_out"]
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    assert len(list(out.glob("*.safetensors"))) > 2


def test_a_qat_folder(octavo, finished_run, text, tmp_path):
    small = ["--steps", 2, "--batch-size", 2, "--context", 16, "--eval-windows", 3, "--warmup", 1]
    assert octavo("qat", finished_run, "--data", text, *small, "--out", tmp_path / "qat").exit_code == 0
    result = octavo(
        "export", tmp_path / "qat", "--format", "modelopt", "--no-verify", "--out", tmp_path / "m", "--json"
    )
    assert result.exit_code == 0, result.output
    read = load_quantized(tmp_path / "m")
    assert {recipe.name for recipe in read.recipes.values()} == {"static"}
    refused = octavo("export", tmp_path / "qat", "--recipe", "rowwise", "--out", tmp_path / "n")
    assert "trained for its own recipe" in " ".join(refused.stderr.split())


@pytest.mark.long
def test_a_repository_for_triton(octavo, finished_run, tmp_path):
    pytest.importorskip("onnx")
    triton = ["export", finished_run, "--format", "triton", "--no-verify"]
    done = octavo(*triton, "--out", tmp_path / "repo", "--json")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["models"] == ["octavo", "octavo_whole", "onnx"]
    assert (record["checkpoint"]["agreement"], record["graph"]["dtype"]) == (None, "fp16")
    files = ["README.md", "client.py", "models", "other_backends"]
    assert sorted(path.name for path in (tmp_path / "repo").iterdir()) == files
    again = octavo(*triton, "--out", tmp_path / "repo")
    assert "is not empty" in again.stderr
    for option in (["--tensorrt"], ["--dtype", "bf16"]):
        assert octavo(*triton, "--out", tmp_path / "no", *option).exit_code == 2
        assert not (tmp_path / "no").exists()


def test_import_prints_recipes_and_checks(octavo, folder):
    result = octavo("import", folder)
    assert result.exit_code == 0, result.output
    assert "every tensor is recognized" in result.stdout
    record = json.loads(octavo("import", folder, "--json").stdout)
    assert record["format"] == "compressed-tensors"
    assert len(record["layers"]) == 14
    assert record["checksums"] is True
    assert " files match their checksums (octavo.sha256)" in result.stdout


def test_import_without_checksums_says_corruption_is_undetected(octavo, folder, tmp_path):
    foreign = shutil.copytree(folder, tmp_path / "foreign", ignore=shutil.ignore_patterns("octavo.sha256"))
    result = octavo("import", foreign)
    assert result.exit_code == 0, result.output
    assert "no checksums (octavo.sha256), so corrupted codes cannot be detected" in result.stdout
    assert json.loads(octavo("import", foreign, "--json").stdout)["checksums"] is False


def test_import_format_needs_out(octavo, folder):
    result = octavo("import", folder, "--format", "hf-fp8")
    assert result.exit_code == 2, result.output
    assert "--format is the format of --out; give --out FOLDER too" in " ".join(result.stderr.split())


def test_a_mix_s_table_is_codes_in_the_file_and_stays_so(octavo, finished_run, tmp_path):
    """Written by the command, and again from the folder that it wrote."""
    save_mix(Mix(overrides={"*_proj": "rowwise"}, tables={"model.embed_tokens": (1,)}), tmp_path / "mix.toml")
    for source, out, options in ((finished_run, "m", ["--mix", tmp_path / "mix.toml"]), (tmp_path / "m", "n", [])):
        arguments = ["--format", "octavo", "--out", tmp_path / out, *options, "--no-verify"]
        assert octavo("export", source, *arguments).exit_code == 0
        found = load_file(tmp_path / out / "model.safetensors")
        assert found["model.embed_tokens.table.codes"].dtype == torch.float8_e4m3fn
        assert "model.embed_tokens.weight" not in found


@pytest.mark.long
@pytest.mark.usefixtures("forked_verification")
def test_import_narrows_nothing(octavo, tmp_path):
    save_quantized(dynamic(ROW), tmp_path / "wide", dtype="fp32", verify_folder=False)
    assert octavo("import", tmp_path / "wide", "--out", tmp_path / "own").exit_code == 0
    assert load_quantized(tmp_path / "own").dtype == torch.float32
    narrow = octavo("export", tmp_path / "wide", "--out", tmp_path / "narrow", "--dtype", "bf16")
    assert narrow.exit_code == 0, narrow.output
    assert load_quantized(tmp_path / "narrow").dtype == torch.bfloat16


@pytest.mark.long
@pytest.mark.usefixtures("forked_verification")
def test_import_writes_the_same_codes(octavo, folder, tmp_path):
    result = octavo("import", folder, "--out", tmp_path / "own", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["agreement"]["logits_error"] < 1e-6
    ours, theirs = (load_quantized(each).model.state_dict() for each in (folder, tmp_path / "own"))
    assert all(ours[name].equal(theirs[name]) for name in ours if "_proj" in name)


@pytest.mark.parametrize("method", [None, "foo"])
def test_import_quantizes_nothing(octavo, folder, tmp_path, method):
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied, ignore=shutil.ignore_patterns("octavo.sha256"))
    record = json.loads((copied / "config.json").read_text())
    record["quantization_config"] = method and {"quant_method": method}
    (copied / "config.json").write_text(json.dumps(record))
    for out in ([], ["--out", tmp_path / "out"]):
        result = octavo("import", copied, *out)
        assert result.exit_code == 2, result.output
        assert ("'foo' as quant_method" if method else "is not in FP8") in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == [copied]


def test_eval_and_generate_take_the_folder(octavo, folder, text):
    result = octavo("eval", folder, "--data", text, "--windows", 2, "--context", 16, "--json")
    assert result.exit_code == 0, result.output
    result = octavo("generate", folder, "--prompt", "some text", "--max-new-tokens", 4)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("some text")


def test_generate_runs_a_blockwise_export(octavo, tmp_path):
    written(tmp_path / "blocks", "blocks")
    result = octavo("generate", tmp_path / "blocks", "--prompt", "some text", "--max-new-tokens", 4)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--format", "gguf"], "--format must be one of compressed-tensors, hf-fp8, modelopt, octavo, onnx"),
        ([*GRAPH, "--opset", "22"], "opset must be one of 21, 23, not 22"),
        ([*GRAPH, "--dtype", "int8"], "dtype must be one of fp32, fp16, bf16"),
        ([*GRAPH, "--max-batch", "4"], "set tensorrt, or leave them out"),
        ([*GRAPH, "--tensorrt", "--max-length", "33"], "max_length is 33, and the model reads at most 32 tokens"),
        ([*GRAPH, "--recipe", "blockwise"], "an ONNX graph supports"),
        (["--format", "modelopt"], "has kept no amaxes"),
        (["--format", "hf-fp8", "--recipe", "rowwise"], "hf-fp8 has weights with a scale a 128x128 block"),
        (["--recipe", "nothing"], "there is no recipe"),
        (["--recipe", "rowwise", "--mix", "mix.toml"], "leave one of them out"),
        (["--calibration", "nowhere"], "holds no calibration"),
        (["--max-shard-size", "many"], "such as 500MB"),
        (["--dtype", "int8"], "dtype must be one of"),
        (["--skip", "nothing.like.it"], "matches no layer"),
        (["--skip", "*"], "no layer of this model is in FP8: each of its 8 linear layers is the head, is skipped"),
        (["--recipe", "bf16"], "or has a recipe in high precision"),
        ([*GRAPH, "--recipe", "bf16"], "choose a recipe and what to skip (--recipe, --skip, --head)"),
    ],
)
def test_bad_input_ends_with_one_sentence_and_leaves_nothing(octavo, finished_run, tmp_path, *, options, words):
    result = octavo("export", finished_run, "--out", tmp_path / "m", *options)
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dtype", "fp8"], "--dtype must be one of bf16, fp16, fp32, not 'fp8'"),
        ([*GRAPH, "--dtype", "fp8"], "dtype must be one of fp32, fp16, bf16, not 'fp8'"),
        (["--recipe", "nothing"], "there is no recipe"),
        ([*GRAPH, "--recipe", "nothing"], "there is no recipe"),
        (["--recipe", "mxfp8", "--power-of-two"], "--power-of-two goes with rowwise"),
    ],
)
def test_unknown_values_are_refused_before_loading(octavo, tmp_path, *, options, words):
    result = octavo("export", "no-model.gguf", "--out", tmp_path / "m", *options)
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.stderr.split())


@pytest.mark.parametrize("options", FOREIGN, ids=" ".join)
def test_options_of_another_format_are_refused_before_any_work(octavo, tmp_path, *, options):
    result = octavo("export", "no-model.gguf", "--out", tmp_path / "m", *options)
    assert result.exit_code == 2
    option = options[2] if options[:2] == GRAPH else options[0]
    assert f"{option} belongs to --format" in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_graph_of_a_folder_in_fp8_with_everything(octavo, text, tmp_path):
    """Its codes are those of the folder; the scales of its cache have no place in the graph, and that is said."""
    pytest.importorskip("onnxscript")
    onnx = pytest.importorskip("onnx")
    written(tmp_path / "fp8", "static")
    switches = ["--kv-cache", "--external-data", "--tensorrt", "--opset", "23", "--dtype", "fp32", "--attention", text]
    result = octavo("export", tmp_path / "fp8", *GRAPH, *switches, "--out", tmp_path / "graph")
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert "14 of 15 linear layers in FP8; opset 23, fp32" in words
    assert "not converted: lm_head" in words
    assert "onnxruntime" in words
    assert "the graph does not use the model's scales of keys and values: its cache is in fp32" in words
    assert "tracing the graph" in result.stderr
    weight = load_quantized(tmp_path / "fp8").model.get_parameter("model.layers.0.mlp.up_proj.weight_codes")
    graph = onnx.load(tmp_path / "graph" / "model.onnx").graph
    codes = next(each for each in graph.initializer if each.name.endswith("layers.0.mlp.up_proj.codes"))
    assert codes.raw_data == weight.data.t().contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.long
def test_sigterm_while_it_is_read_back_leaves_neither_a_folder_nor_a_process(
    octavo, finished_run, tmp_path, monkeypatch
):
    started = []

    class Told(subprocess.Popen):
        def communicate(self, *arguments, **options):
            started.append(self)
            os.kill(os.getpid(), signal.SIGTERM)
            return super().communicate(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", Told)
    result = octavo("export", finished_run, "--format", "octavo", "--out", tmp_path / "new" / "served")
    assert result.exit_code == 143, result.output
    assert [process.returncode for process in started] == [-signal.SIGKILL]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_refused_before_any_work(octavo, tmp_path):
    (tmp_path / "file").touch()
    result = octavo("export", "no-model.gguf", "--out", tmp_path)
    assert result.exit_code == 2
    assert "is not empty" in " ".join(result.stderr.split())


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN"])
def test_a_configuration_with_a_number_that_json_has_not(octavo, folder, tmp_path, *, number):
    """Python's reader lets them pass; transformers writes some, such as a time_step_limit."""
    shutil.copytree(folder, tmp_path / "copied", ignore=shutil.ignore_patterns("octavo.sha256"))
    config = tmp_path / "copied" / "config.json"
    config.write_text(config.read_text().replace("{", f'{{"time_step_limit": [0.0, {number}],', 1))
    result = octavo("import", tmp_path / "copied", "--out", tmp_path / "new" / "out")
    assert result.exit_code == 2, result.output
    assert "the model's config.json contains Infinity or NaN, which JSON does not allow" in result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["copied"]


def test_import_refuses_damaged_files(octavo, tmp_path):
    save_quantized(dynamic(ROW), tmp_path / "m", verify_folder=False)
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    result = octavo("import", tmp_path / "m")
    assert result.exit_code == 2
    assert f"'{weights}' is damaged or was edited" in result.stderr
    (tmp_path / "m" / "octavo.sha256").unlink()
    assert "cannot be read" in octavo("import", tmp_path / "m").stderr
