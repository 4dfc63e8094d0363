"""What transformers' ``save_pretrained`` makes of a converted model: the model, or a refusal; no codes as weights."""

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import octavo
from octavo.errors import ConfigError
from octavo.language_model import LanguageModel
from octavo.nn import Linear
from octavo.nn.fp8_weight import store_weight_as_codes
from octavo.text.tokenizer import train_tokenizer
from tests.tiny_llama import tiny_hugging_face_config

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing is saved with it")

REFUSED = r"would write FP8 codes as weights \(model\.layers\.0\.self_attn\.q_proj\.weight and 6 more\)"


def _llama() -> Any:
    config = tiny_hugging_face_config(num_hidden_layers=1, max_position_embeddings=32)
    return transformers.LlamaForCausalLM(config)


def _held(model: Any = None) -> Any:
    model = (_llama() if model is None else model).requires_grad_(False)
    assert octavo.convert(model, frozen="fp8").held
    return model


def _read(folder: Path) -> dict[str, torch.Tensor]:
    return transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()


def _pickled(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("of", [lambda model: model, copy.deepcopy, _pickled])
def test_codes_are_never_saved_as_weights(of, tmp_path):
    model = of(_held())
    with pytest.raises(
        ConfigError, match=REFUSED + r".*octavo\.save_quantized, or call octavo\.restore\(model\) first"
    ):
        model.save_pretrained(tmp_path / "m")
    assert not (tmp_path / "m").exists()
    with pytest.raises(ConfigError, match=REFUSED):
        model.save_pretrained(tmp_path / "m", state_dict=model.state_dict())
    octavo.restore(model)
    assert "save_pretrained" not in vars(model)
    model.save_pretrained(tmp_path / "m")
    saved, state = _read(tmp_path / "m"), model.state_dict()
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[key], state[key]) for key in state)
    assert state["model.layers.0.self_attn.q_proj.weight"].abs().max() < 1


@pytest.mark.parametrize("part", ["model", "model.layers", "model.layers.0.mlp.up_proj"])
def test_what_save_pretrained_writes_of_a_partly_converted_model_is_refused(part, tmp_path):
    """Its outermost module does not know what was converted inside, so from_pretrained refuses instead."""
    model = _llama().requires_grad_(False)
    inner = model.get_submodule(part)
    if part.endswith("up_proj"):
        octavo.convert(model)
        assert isinstance(inner, Linear)
        store_weight_as_codes(inner)
    else:
        assert octavo.convert(inner, frozen="fp8").held
    type(model).save_pretrained(model, tmp_path / "m")
    with pytest.raises(RuntimeError, match=r"ignore_mismatched_sizes"):
        _read(tmp_path / "m")


def test_weights_that_are_handed_over_are_saved(tmp_path):
    model = _llama()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    _held(model).save_pretrained(tmp_path / "m", state_dict=dict(weights))
    assert all(torch.equal(value, weights[key]) for key, value in _read(tmp_path / "m").items())
    _held(_llama()).save_pretrained(tmp_path / "n", True, dict(weights))
    assert all(torch.equal(value, weights[key]) for key, value in _read(tmp_path / "n").items())


def test_a_converted_model_without_codes_saves_as_ever(tmp_path):
    model = _llama()
    octavo.convert(model, "delayed")
    model.save_pretrained(tmp_path / "m")
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in _read(tmp_path / "m").items())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_over_codes_are_saved(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(_held(), config)
        octavo.convert(adapted, frozen="fp8")
        adapted.save_pretrained(tmp_path / "adapter")
        assert sorted(path.name for path in (tmp_path / "adapter").glob("*.safetensors")) == [
            "adapter_model.safetensors"
        ]
        theirs = _held()
        theirs.add_adapter(config)
        theirs.save_pretrained(tmp_path / "theirs")
    assert (tmp_path / "theirs" / "adapter_model.safetensors").is_file()
    with pytest.raises(ConfigError, match="would write FP8 codes as weights"):
        adapted.get_base_model().save_pretrained(tmp_path / "base")


def test_a_folder_in_fp8_is_not_saved_as_weights_either(tmp_path):
    model, tokenizer = _llama(), train_tokenizer(["some text, some more text"] * 3, vocab_size=300)
    octavo.convert(model, octavo.recipes.get("rowwise", power_of_two=False))
    with pytest.raises(
        TypeError, match=r"with its tokenizer, not LlamaForCausalLM; call save_quantized\(.*LanguageModel"
    ):
        octavo.save_quantized(model, tmp_path / "served")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    octavo.save_quantized(  # what the sentence says
        LanguageModel(
            model=model.eval(),
            tokenizer=fast.backend_tokenizer,
            context=model.config.max_position_embeddings,
            source="",
        ),
        tmp_path / "served",
        format="octavo",
        verify_folder=False,
    )
    read = octavo.load_quantized(tmp_path / "served").model
    assert isinstance(read.get_submodule("model.layers.0.self_attn.q_proj"), Linear)


def _codes(model: Any) -> torch.Tensor:
    return model.get_submodule("model.layers.0.self_attn.q_proj").stored_codes().data.view(torch.uint8)


def test_accelerate_saves_codes_that_only_a_model_with_codes_loads(tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: nothing is saved with it")
    model, other, plain = _held(), _held(), _llama()
    accelerate.Accelerator(cpu=True).save_model(model, str(tmp_path))
    kept = {key: value.clone() for key, value in plain.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"size mismatch for .*q_proj\.weight"):
        accelerate.load_checkpoint_in_model(plain, tmp_path, strict=True)
    for where, reason in ((None, RuntimeError), ({"": "cpu"}, ValueError)):
        with pytest.raises(reason, match="shape"):
            accelerate.load_checkpoint_in_model(plain, tmp_path, device_map=where)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(plain.state_dict()[name], kept[name])
    assert not torch.equal(_codes(model), _codes(other))
    accelerate.load_checkpoint_in_model(other, tmp_path, strict=True)
    assert torch.equal(_codes(model), _codes(other))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
def test_distributed_checkpoints_keep_codes_apart_from_weights(tmp_path):
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    model, other, plain = _held(), _held(), _llama()
    save(get_model_state_dict(model), checkpoint_id=tmp_path, no_dist=True)
    weights = plain.state_dict()
    kept = {key: value.clone() for key, value in weights.items()}
    with pytest.raises(CheckpointException, match=r"Size mismatch between saved torch.Size\(\[0, "):
        load(weights, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(value, kept[key]) for key, value in weights.items())
    loaded = get_model_state_dict(other)
    load(loaded, checkpoint_id=tmp_path, no_dist=True)
    for options in (None, StateDictOptions(full_state_dict=True)):
        set_model_state_dict(other, loaded, options=options)
        assert torch.equal(_codes(model), _codes(other))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_model_of_16_bits_is_exported_and_stays_what_it_was(dtype, tmp_path):
    """Verified in FP32, as its readers compute, or 16-bit roundings in between would count as differences."""
    model = _llama().to(dtype)
    octavo.convert(model.model, octavo.recipes.get("rowwise", power_of_two=False))
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    tokenizer = train_tokenizer(["some text, some more text"] * 3, vocab_size=300)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    language_model = LanguageModel(model=model.eval(), tokenizer=fast.backend_tokenizer, context=32, source="")
    octavo.save_quantized(language_model, tmp_path / "served")
    assert (tmp_path / "served" / "model.safetensors").is_file()
    for name, tensor in model.state_dict().items():
        assert tensor.data_ptr() == before[name][0]
        assert torch.equal(tensor, before[name][1])


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_sharded_codes_are_in_a_distributed_state_dict(tmp_path):
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        models = [_held(torch.nn.Sequential(torch.nn.Linear(32, 16))) for _ in range(2)]
        for model in models:
            fully_shard(model, mesh=mesh)
        set_model_state_dict(models[1], get_model_state_dict(models[0]))
        x = torch.randn(3, 32)
        assert torch.equal(models[0](x), models[1](x))
    finally:
        torch.distributed.destroy_process_group()
