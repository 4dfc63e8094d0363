"""transformers' ``save_pretrained`` of a converted model: decoded weights, never codes as weights."""

import copy
import io
import json
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import octavo
from octavo.errors import ConfigError
from octavo.language_model import LanguageModel
from octavo.nn import Linear
from octavo.nn.fp8_weight import store_weight_as_codes
from octavo.numerics import QuantizedTensor
from octavo.text.tokenizer import train_tokenizer
from tests.tiny_llama import tiny_hugging_face_config

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing is saved with it")

LAYER = "model.layers.0.self_attn.q_proj"


def _llama() -> Any:
    config = tiny_hugging_face_config(num_hidden_layers=1, max_position_embeddings=32)
    return transformers.LlamaForCausalLM(config)


def _held(model: Any = None) -> Any:
    model = (_llama() if model is None else model).requires_grad_(False)
    assert octavo.convert(model, frozen="fp8").stored
    return model


def _read(folder: Path) -> dict[str, torch.Tensor]:
    return transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()


def _pickled(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("of", [lambda model: model, copy.deepcopy, _pickled])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_stored_as_codes_are_saved_decoded(of, dtype, tmp_path):
    model = of(_held(_llama().to(dtype)))
    model.save_pretrained(tmp_path / "m")
    model.save_pretrained(tmp_path / "n", state_dict=model.state_dict(), max_shard_size="30KB")
    assert len(list((tmp_path / "n").glob("*.safetensors"))) > 1
    assert "quantization_config" not in json.loads((tmp_path / "m" / "config.json").read_text())
    assert model.get_submodule(LAYER).codes_layout is not None, "the model keeps its codes"
    octavo.restore(model)
    assert "save_pretrained" not in vars(model)
    state = model.state_dict()
    for folder in ("m", "n"):
        saved = _read(tmp_path / folder)
        assert saved.keys() == state.keys()
        assert all(torch.equal(saved[key], state[key]) for key in state)


def test_saved_model_is_plain_and_computes_the_decoded_models_logits(tmp_path):
    model, tokens = _held().eval(), torch.arange(16)[None]
    model.save_pretrained(tmp_path / "m")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert not any(type(module).__module__.startswith("octavo") for module in plain.modules())
    octavo.restore(model)
    assert torch.equal(plain(tokens).logits, model(tokens).logits)


def test_no_more_than_one_shard_is_decoded_at_a_time(tmp_path, monkeypatch):
    model = _held()
    alive, decode = weakref.WeakSet[torch.Tensor](), QuantizedTensor.dequantize
    sizes: list[int] = []

    def decode_and_count(codes: QuantizedTensor) -> torch.Tensor:
        decoded = decode(codes)
        alive.add(decoded)
        sizes.append(sum(tensor.nbytes for tensor in alive))
        return decoded

    monkeypatch.setattr(QuantizedTensor, "dequantize", decode_and_count)
    model.save_pretrained(tmp_path / "m", max_shard_size=20_000)
    assert len(sizes) == 7
    assert max(sizes) <= 20_000 < sum(tensor.nbytes for tensor in _read(tmp_path / "m").values()) / 4


def test_distributed_checkpoint_of_codes_is_refused(tmp_path):
    reason = r"write FP8 codes as weights \(.*q_proj\.weight and 6 more\).*octavo\.restore\(model\) first"
    with pytest.raises(ConfigError, match=reason):
        _held().save_pretrained(tmp_path / "m", distributed_checkpoint=True)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("part", ["model", "model.layers", "model.layers.0.mlp.up_proj"])
def test_from_pretrained_refuses_save_pretrained_output_of_a_partly_converted_model(part, tmp_path):
    """Its outermost module does not know what was converted inside, so from_pretrained refuses instead."""
    model = _llama().requires_grad_(False)
    inner = model.get_submodule(part)
    if part.endswith("up_proj"):
        octavo.convert(model)
        assert isinstance(inner, Linear)
        store_weight_as_codes(inner)
    else:
        assert octavo.convert(inner, frozen="fp8").stored
    type(model).save_pretrained(model, tmp_path / "m")
    with pytest.raises(RuntimeError, match=r"ignore_mismatched_sizes"):
        _read(tmp_path / "m")


def test_plain_module_is_refused_with_another_way_to_save_its_codes(tmp_path):
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with pytest.raises(TypeError, match=r"not Sequential; write other modules with safetensors.torch.save_file\("):
        octavo.save_quantized(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_that_are_handed_over_are_saved(tmp_path):
    model = _llama()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    _held(model).save_pretrained(tmp_path / "m", state_dict=dict(weights))
    assert all(torch.equal(value, weights[key]) for key, value in _read(tmp_path / "m").items())
    _held(_llama()).save_pretrained(tmp_path / "n", True, dict(weights))
    assert all(torch.equal(value, weights[key]) for key, value in _read(tmp_path / "n").items())


def test_converted_model_without_codes_saves_its_plain_weights(tmp_path):
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
    with pytest.raises(ConfigError, match=r"names that from_pretrained does not read .*call the adapter's unload\(\)"):
        adapted.get_base_model().save_pretrained(tmp_path / "base")
    adapted.unload().save_pretrained(tmp_path / "base")
    assert _read(tmp_path / "base").keys() == _llama().state_dict().keys()


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


@pytest.mark.long
@pytest.mark.usefixtures("forked_verification")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bit_model_is_exported_and_stays_unchanged(dtype, tmp_path):
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
