"""Which folders a server reads as they are, by its weights' scales, its inputs and its cache."""

from dataclasses import replace

import pytest
import torch

import octavo
from octavo.engines import EngineCopies, agree, agree_with_itself, get, input_amaxes, names
from octavo.engines.folder_fit import check_folder_fits
from octavo.errors import ConfigError
from octavo.export.checkpoint_writer import save_quantized
from octavo.inference import load_served_model_as
from octavo.language_model import load_language_model
from tests.unit.checkpoints.folders import DYNAMIC, static, written
from tests.unit.quantization.tiny_models import language_model, windows

TOKENS = windows(1, 8)
ROWS = {"torchao-rowwise", "compressed-tensors", "vllm-token", "vllm-token-cuda", "vllm-fnuz", "octavo-token"}
BLOCKS = {"te-block", "transformers-fp8", "octavo-block"} | {
    *(f"vllm-block{end}" for end in ("", "-cuda", "-ue8m0")),
    *(f"sglang-block{end}" for end in ("", "-ue8m0")),
}
STATIC = {"vllm-tensor", "modelopt", "compressed-tensors-static"}
READERS = {
    "rows": ROWS,
    "tensors": ROWS | {"te-current", "torchao-tensorwise"},  # one scale a tensor is one for every row
    "weights": set(),
    "blocks": BLOCKS,
    "own rows": ROWS,
    "own groups": {"te-mxfp8", "modelopt-mxfp8"},
    "static": STATIC,
    "modelopt": STATIC,
    "static rows": {"compressed-tensors-static"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folders = {}

    def folder_of(kind):
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp("folders") / "folder"
            if kind == "static rows":
                model, _ = static("row")
                save_quantized(model, folders[kind], format="compressed-tensors", verify_folder=False)
            else:
                written(folders[kind], kind)
        return folders[kind]

    return folder_of


@pytest.mark.parametrize("kind", READERS)
def test_an_engine_computes_only_what_it_would_read(folder, kind):
    assert {*DYNAMIC} < {*READERS}
    model = load_language_model(folder(kind))
    copies, read = EngineCopies(model, input_amaxes(model, TOKENS)), set()
    for name in names():
        try:
            check_folder_fits(model, get(name))
            copies.of(name)
        except ConfigError as error:
            assert name in str(error)  # noqa: PT017
        else:
            read.add(name)
    assert read == READERS[kind]


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("static", "vllm-token", "with static scales of inputs, and vllm-token with dynamic scales of inputs"),
        ("weights", "vllm-token", "with inputs in high precision, and vllm-token with dynamic scales of inputs"),
        ("tensors", "vllm-block", "has a scale a tensor, and vllm-block reads one a 128×128 block"),
        ("rows", "sglang-block-ue8m0", "has a scale a row, and sglang-block-ue8m0 reads one a 128×128 block"),
        (
            "static",
            "vllm-tensor+fp8-cache",
            "has scales of keys and values, and octavo computes vllm-tensor.fp8-cache",
        ),
    ],
)
def test_what_a_server_would_not_compute_is_refused(folder, kind, name, says):
    model = load_language_model(folder(kind))
    for call in (
        lambda: agree(model, name, name, TOKENS),
        lambda: agree_with_itself(model, name, TOKENS),
        lambda: load_served_model_as(folder(kind), name),
    ):
        with pytest.raises(ConfigError, match=says):
            call()


def test_calibrated_scales_that_a_folder_has_not_are_refused(folder):
    with pytest.raises(ConfigError, match="with dynamic scales of inputs, and vllm-tensor with static scales"):
        agree(load_language_model(folder("tensors")), "vllm-token", "vllm-tensor", TOKENS)


def test_a_trainer_need_not_cast_the_folders_inputs(folder):
    found = agree(load_language_model(folder("static")), "te-current", "vllm-tensor", TOKENS)
    assert found.kl.estimate > 0


def test_any_server_may_have_a_model_in_high_precision():
    for name in (*names(), "vllm-token+fp8-cache"):
        check_folder_fits(language_model(), get(name))


def test_a_folder_of_weights_alone_fits_an_engine_that_casts_no_inputs(folder):
    check_folder_fits(load_language_model(folder("weights")), replace(get("octavo-token"), input=None))


def test_caches_whose_scales_are_1_or_missing_fit_an_fp8_cache(folder, tmp_path):
    model, found = static(kv_cache=True)
    ones = {index: (torch.ones(()), torch.ones(())) for index in found}
    save_quantized(model, tmp_path / "ones", kv_scales=ones, verify_folder=False)
    check_folder_fits(load_language_model(tmp_path / "ones"), get("vllm-tensor+fp8-cache"))
    check_folder_fits(load_language_model(folder("rows")), get("vllm-token+fp8-cache"))
    one_other = {**ones, max(ones): (torch.ones(()), torch.full((), 2.0))}
    save_quantized(model, tmp_path / "two", kv_scales=one_other, verify_folder=False)
    with pytest.raises(ConfigError, match="has scales of keys and values"):
        check_folder_fits(load_language_model(tmp_path / "two"), get("vllm-tensor+fp8-cache"))


def test_the_last_layer_counts(folder):
    model, other = (load_language_model(folder(kind)).model for kind in ("rows", "static"))
    path = "model.layers.1.mlp.down_proj"
    model.set_submodule(path, other.get_submodule(path))
    with pytest.raises(ConfigError, match=f"this folder runs '{path}' with static scales of inputs"):
        check_folder_fits(model, get("vllm-token"))


def test_a_trained_models_recipe_is_no_folder():
    model = language_model().model
    octavo.convert(model, "delayed")
    check_folder_fits(model, get("vllm-token"))
