"""Codes and decoded weights of ``frozen="fp8"``: what torch may do with them, and which writes are refused."""

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import octavo
from octavo.errors import ConfigError
from octavo.nn.fp8_weight import FP8WeightLinear
from octavo.nn.guarded_tensors import WeightCodes

LOST = r"would be lost; call octavo\.restore"
UNSCALED = r"torch would write numbers into them without it; call octavo\.restore"


def _model(recipe: str = "rowwise", *, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(48, 40)).requires_grad_(False)
    assert octavo.convert(model, recipe, frozen="fp8").stored == ("0",)
    return model


def _layer(model: nn.Sequential) -> FP8WeightLinear:
    layer = model[0]
    assert isinstance(layer, FP8WeightLinear)
    return layer


def _bytes(model: nn.Sequential) -> Tensor:
    return _layer(model).stored_codes().data.view(torch.uint8).clone()


CODE_WRITES: dict[str, Callable[[nn.Parameter, Tensor], Any]] = {
    "data.copy_": lambda codes, other: codes.data.copy_(other),
    "copy_": lambda codes, other: codes.copy_(other),
    "detach": lambda codes, other: codes.detach().copy_(other),
    "a view": lambda codes, other: codes.data.view(-1)[:40].copy_(other.view(-1)[:40]),
    "item": lambda codes, other: codes.__setitem__(0, other[0]),
    "number": lambda codes, _: codes.__setitem__(0, 0.5),
    "foreach": lambda codes, other: torch._foreach_copy_([codes], [other]),
    "zero_": lambda codes, _: codes.zero_(),
    "constant_": lambda codes, _: nn.init.constant_(codes, 0.02),
    "zeros_": lambda codes, _: nn.init.zeros_(codes),
    "normal_": lambda codes, _: nn.init.normal_(codes),
    "mul_": lambda codes, _: codes.data.mul_(0.5),
    "data": lambda codes, other: setattr(codes, "data", other),
    "vector": lambda codes, other: nn.utils.vector_to_parameters(other.flatten(), [codes]),
    "other codes": lambda codes, other: codes.data.copy_(other.to(torch.float8_e5m2)),
    "out": lambda codes, other: torch.neg(other, out=codes.data),
}


@pytest.mark.parametrize("write", CODE_WRITES)
def test_codes_take_no_values(write):
    """torch would cast them to FP8 without the codes' scale."""
    model = _model()
    before = _bytes(model)
    with torch.no_grad(), pytest.raises(ConfigError, match=UNSCALED):
        CODE_WRITES[write](_layer(model).weight_codes, torch.randn(40, 48))
    assert torch.equal(_bytes(model), before)


def test_a_target_network_of_codes_is_not_overwritten_by_a_float_one():
    model = _model()
    online, before = nn.Sequential(nn.Linear(48, 40)), _bytes(model)
    target, source = next(zip(model.parameters(), online.parameters(), strict=True))
    with pytest.raises(ConfigError, match=UNSCALED):
        target.data.copy_(source.data)
    assert torch.equal(_bytes(model), before)


def _moved(model: nn.Sequential) -> nn.Sequential:
    return copy.deepcopy(model).to("meta").to_empty(device="cpu")


def _pickled(model: nn.Sequential) -> nn.Sequential:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Sequential = torch.load(file, weights_only=False)
    return loaded


def _swapped(model: nn.Sequential) -> nn.Sequential:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = copy.deepcopy(model).to(torch.bfloat16).float()
        model.load_state_dict(model.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    return model


@pytest.mark.parametrize(
    "of",
    [
        copy.deepcopy,
        lambda model: copy.deepcopy(model).to(torch.bfloat16).float(),
        lambda model: copy.deepcopy(model).double().half().float().share_memory(),
        _moved,
        _pickled,
        _swapped,
    ],
)
@pytest.mark.parametrize("assign", [False, True])
def test_codes_stay_guarded(of, assign):
    model, x = _model(), torch.randn(3, 48)
    other = of(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file)  # weights only
    assert {type(value) for value in model.state_dict().values()} == {Tensor}
    assert other.load_state_dict(state, assign=assign) == ([], [])
    codes = _layer(other).weight_codes
    assert type(codes) is WeightCodes
    assert not codes.requires_grad
    assert torch.equal(other(x), model(x))
    with pytest.raises(ConfigError, match=UNSCALED):
        codes.data.copy_(torch.randn(40, 48))
    with torch.no_grad():
        codes.copy_(_layer(_model(seed=1)).weight_codes)
    assert torch.equal(_bytes(other), _bytes(_model(seed=1)))


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_codes_compile_without_graph_breaks(backend):
    torch._dynamo.reset()
    model, x = _model(), torch.randn(3, 48)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend=backend)(x), model(x))
    assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))


def _foreach_copy(target, source):
    torch._foreach_copy_([target], [source])
    return target


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "copy_": lambda w: torch.zeros(40, 48).copy_(w),
    "item": lambda w: _set(torch.zeros(80, 48), w)[:40],
    "iadd": lambda w: torch.zeros(40, 48).__iadd__(w),
    "lerp_": lambda w: torch.zeros(40, 48).lerp_(w, 1.0),
    "foreach": lambda w: _foreach_copy(torch.zeros(40, 48), w),
    "out": lambda w: torch.mul(w, 1.0, out=torch.empty(40, 48)),
    "data": lambda w: _data(nn.Linear(48, 40), w),
    "parameter": lambda w: nn.Parameter(w.float()).detach(),
    "sparse": lambda w: w.to_sparse().to_dense(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "saved": lambda w: _saved(w),
    "vmap": lambda w: torch.vmap(lambda x: F.linear(x, w))(torch.eye(48)[:, None])[:, 0].T,
    "grad": lambda w: torch.func.jacrev(lambda x: F.linear(x, w))(torch.zeros(48)),
}


def _set(target: Tensor, value: Tensor) -> Tensor:
    target[:40] = value
    return target


def _data(layer: nn.Linear, value: Tensor) -> Tensor:
    layer.weight.data = value.clone()
    layer.weight.data.copy_(value.data)
    return layer.weight.detach()


def _saved(value: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save({"w": value}, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)["w"]
    return loaded


@pytest.mark.parametrize("read", READS)
def test_reading_a_decoded_weight_is_no_write(read):
    layer = _layer(_model())
    result = READS[read](layer.weight)
    assert type(result) is Tensor
    assert torch.equal(result, layer.stored_codes().dequantize())


WRITES: dict[str, Callable[[FP8WeightLinear], Any]] = {
    "transpose": lambda layer: torch.transpose(input=layer.weight, dim0=0, dim1=1).add_(1),
    "flatten": lambda layer: torch.flatten(input=layer.weight).zero_(),
    "sort": lambda layer: torch.sort(layer.weight, out=(layer.weight, torch.empty(0, dtype=torch.long))),
    "embedding": lambda layer: F.embedding(torch.tensor([0, 1]), layer.weight, max_norm=1e-3),
    "set_": lambda layer: layer.weight.set_(torch.zeros(40, 48).untyped_storage()),
    "data": lambda layer: setattr(layer.weight, "data", torch.zeros(40, 48)),
    "rows": lambda layer: [row.zero_() for row in layer.weight],
    "fill_": lambda layer: torch.fill_(value=0.0, input=layer.weight),
    "foreach": lambda layer: torch._foreach_copy_([torch.zeros(40, 48), layer.weight], [torch.zeros(40, 48)] * 2),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_into_a_decoded_weight_are_refused(write):
    with pytest.raises(ConfigError, match=LOST):
        WRITES[write](_layer(_model()))


def test_a_weight_on_the_meta_device_reads_as_results_that_may_be_written():
    layer = _layer(_model().to("meta"))
    x = torch.empty(2, 48, device="meta")
    assert F.linear(x, layer.weight).add_(1).shape == (2, 40)
    with pytest.raises(ConfigError, match=LOST):
        layer.weight.T.add_(1)


def test_a_compiled_function_takes_a_decoded_weight():
    torch._dynamo.reset()
    layer, x = _layer(_model()), torch.randn(2, 48)
    compiled = torch.compile(lambda x, w: F.linear(x, w), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, layer.weight), F.linear(x, layer.weight))


def test_a_weight_stored_as_codes_cannot_be_set_or_tied():
    model, x = _model(), torch.randn(2, 48)
    with pytest.raises(ConfigError, match=r"cannot be set; call octavo\.restore.*functional_call the named_parameters"):
        torch.func.functional_call(model, model.state_dict(), (x,))
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    assert torch.equal(torch.func.functional_call(model, tensors, (x,)), model(x))
    with pytest.raises(ConfigError, match=r"layer '0' is stored as FP8 codes and cannot be set or tied; call"):
        model[0].weight = nn.Embedding(40, 48).weight


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("half", ["weight_codes", "weight_scale"])
def test_half_of_codes_and_scale_is_not_loaded(half, strict):
    model, state = _model(), _model(seed=1).state_dict()
    before = model.state_dict() | {"0.weight_scale": model.state_dict()["0.weight_scale"].clone()}
    codes = _bytes(model)
    del state[f"0.{half}"]
    with pytest.raises(RuntimeError, match=rf"0\.{half} is missing: codes mean values only with their own scale"):
        model.load_state_dict(state, strict=strict)
    assert torch.equal(_bytes(model), codes)
    assert torch.equal(model.state_dict()["0.weight_scale"], before["0.weight_scale"])


@pytest.mark.parametrize("of", ["storage", "slice", "overlap"])
def test_weights_that_share_bytes_are_not_stored_apart(of):
    memory = torch.randn(96)
    weights = {"storage": (0, 0), "slice": (0, 64), "overlap": (0, 32)}[of]
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False), nn.Linear(8, 8))
    for layer, start in zip(model, weights, strict=False):
        size = layer.out_features * 8  # type: ignore[operator]
        layer.weight = nn.Parameter(memory[start : start + size].view(-1, 8))
    report = octavo.convert(model.requires_grad_(False), frozen="fp8")
    assert report.stored == (("0", "1", "2") if of == "slice" else ("2",))
    assert set(report.not_stored.values()) == (set() if of == "slice" else {"other modules use it too"})


class _Diffuser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def save_pretrained(self, folder: str, is_main_process: bool = True, save_function: Any = None) -> str:
        return folder


def test_save_pretrained_with_another_order_of_parameters_is_refused_too():
    model = _Diffuser().requires_grad_(False)
    octavo.convert(model, frozen="fp8")
    with pytest.raises(ConfigError, match="would write FP8 codes as weights"):
        model.save_pretrained("there", True, torch.save)


def test_embeddings_are_resized_beside_a_head_of_codes():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing is resized")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).requires_grad_(False).eval()
    assert "lm_head" in octavo.convert(model, convert_head=True, frozen="fp8").stored
    decoded = model.lm_head.stored_codes().dequantize()
    model.resize_token_embeddings(70)
    assert torch.equal(model.lm_head.weight[:64], decoded)


CODES_ARE_EXACT = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("wide", CODES_ARE_EXACT, ids=str)
@pytest.mark.parametrize("narrow", [octavo.E4M3, octavo.E5M2], ids=lambda each: each.name)
def test_16_bits_hold_every_code(narrow, wide):
    codes = torch.arange(256, dtype=torch.uint8).view(narrow.torch_dtype)
    number = ~codes.float().isnan()
    assert torch.equal(codes.to(wide).to(narrow.torch_dtype).view(torch.uint8)[number], codes.view(torch.uint8)[number])


WORLDS = (1, 2)


def _sharded(rank: int, folder: Path) -> None:
    """In each world that has this rank: a process takes seconds to start."""
    for world in WORLDS:
        if rank < world:
            _sharded_over(world, rank, folder)


def _sharded_over(world: int, rank: int, folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/{world}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    results: dict[Any, Any] = {}
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(1))
    for recipe in ("rowwise", "weight_only", "mxfp8"):
        for dtype in CODES_ARE_EXACT:
            model = _model(recipe)
            expected = copy.deepcopy(model).to(dtype)(x.to(dtype))
            fully_shard(model[0], mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
            results[recipe, dtype] = (model(x), expected)
    model = _model()
    fully_shard(model[0], mesh=mesh)
    try:
        octavo.restore(model)
    except ConfigError as error:
        results["restore"] = str(error)
    torch.save(results, folder / f"{rank} of {world}.pt")
    torch.distributed.destroy_process_group()


def test_sharded_codes_cast_by_mixed_precision_compute_the_same(tmp_path: Path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ranks = [context.Process(target=_sharded, args=(rank, tmp_path)) for rank in range(max(WORLDS))]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        assert process.exitcode == 0
    for name in ("0 of 1", "0 of 2", "1 of 2"):
        results = torch.load(tmp_path / f"{name}.pt")
        assert results.pop("restore") == (
            "fully_shard has taken over layer '0', which cannot be restored any more; call octavo.restore(model) "
            "before fully_shard"
        )
        for y, expected in results.values():
            assert y.dtype is expected.dtype
            assert torch.equal(y, expected)
