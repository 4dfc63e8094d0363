"""What is in a repository, and that its engine multiplies the numbers of the model it was made of."""

import json

import pytest
import torch

pytest.importorskip("onnx")

from octavo.checksums import SUMS, check_sums
from octavo.errors import ConfigError
from octavo.inference import ModelRunner, load_served_model
from octavo.models import Llama
from octavo.server.kserve_fields import DATATYPES
from octavo.server.triton.repository import _exact_dtype
from tests.unit.server.triton.conftest import SHAPE
from tests.unit.server.triton.repositories import source, written_repository

FILES = {
    "README.md",
    "client.py",
    "models/octavo/config.pbtxt",
    "models/octavo/warmup/text_input",
    "models/octavo/1/model.py",
    "models/octavo/1/model/config.json",
    "models/octavo/1/model/model.safetensors",
    "models/octavo/1/model/octavo.sha256",
    "models/octavo/1/model/tokenizer.json",
    "models/octavo/1/model/tokenizer_config.json",
    "models/octavo_whole/config.pbtxt",
    "models/octavo_whole/1/model.py",
    "models/onnx/config.pbtxt",
    "models/onnx/1/model.py",
    "models/onnx/1/model.onnx",
    "models/onnx/1/octavo.sha256",
    "models/onnx/1/report.json",
    "models/onnx/1/tokenizer.json",
    "models/onnx/1/build.sh",
    "models/onnx/1/benchmark.sh",
    "models/onnx/1/build_engine.py",
    "other_backends/tensorrt/config.pbtxt",
    "other_backends/vllm/config.pbtxt",
    "other_backends/vllm/1/model.json",
    "other_backends/tensorrt_llm/config.pbtxt",
}


@pytest.fixture(scope="module")
def repository(byte_tokenizer, tmp_path_factory):
    return written_repository(tmp_path_factory.mktemp("triton") / "repository", byte_tokenizer).folder


@pytest.mark.long
def test_repository_has_exactly_the_expected_files(repository):
    assert {str(path.relative_to(repository)) for path in repository.rglob("*") if path.is_file()} == FILES
    assert (repository / "other_backends/tensorrt/1").is_dir()
    assert (repository / "other_backends/tensorrt_llm/1").is_dir()


def test_sums_are_those_of_the_files_beside_them(repository):
    """octavo serve --engine triton compares them before it starts Triton."""
    lists = sorted(repository.rglob(SUMS))
    assert len(lists) == 2
    assert all(check_sums(each.parent) for each in lists)


@pytest.mark.long
def test_engine_codes_match_the_model(repository):
    """And so octavo serve says the same of the repository's checkpoint as of what was exported."""
    served = load_served_model(repository / "models/octavo/1/model")
    tokens = torch.arange(40) * 5 % SHAPE.vocab_size
    model = ModelRunner(Llama(SHAPE, seed=3))
    logits = [runner(tokens, runner.new_cache(), every=True) for runner in (served.runner, model)]
    assert torch.equal(*logits)


def test_configs_refer_to_existing_files(repository):
    settings = json.loads((repository / "other_backends/vllm/1/model.json").read_text())
    assert (repository / settings["model"] / "config.json").is_file()
    text = (repository / "models/octavo/config.pbtxt").read_text()
    assert text.count("input {") == len(DATATYPES)
    assert (repository / "models/octavo/warmup/text_input").read_bytes() == b"\x05\x00\x00\x00Hello"
    assert "--saveEngine=model.engine" in (repository / "models/onnx/1/build.sh").read_text()
    for name in ("octavo", "octavo_whole", "onnx"):
        compile((repository / f"models/{name}/1/model.py").read_text(), name, "exec")
        assert "class TritonPythonModel" in (repository / f"models/{name}/1/model.py").read_text() or name == "octavo"


def test_readme_lists_the_models(repository):
    text = (repository / "README.md").read_text()
    for folder in ("models", "other_backends"):
        assert all(path.name in text for path in (repository / folder).iterdir())
    assert "$" not in text.replace("$ ", "")


def test_high_precision_tensors_are_exact(byte_tokenizer):
    made = source(byte_tokenizer, "rowwise").language_model
    assert _exact_dtype(made) == "fp32"
    made.model.bfloat16().float()
    assert _exact_dtype(made) == "bf16"


def test_bf16_graph_is_refused(byte_tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="does not support bf16 tensors"):
        written_repository(tmp_path / "r", byte_tokenizer, dtype="bf16")
    assert not (tmp_path / "r").exists()
