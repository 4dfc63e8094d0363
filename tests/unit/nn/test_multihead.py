import pytest
import torch
from torch import nn

import octavo
from octavo.errors import ConfigError
from octavo.nn import KVCache, MultiheadAttention, rotary_table
from tests.contract.gemm_oracle import recorded_products
from tests.contract.transformer_oracle import Shape, assert_close, attention, seen, spread_out, weights_of

LENGTHS = [7, 3]


def _layer(**changes):
    layer = MultiheadAttention(24, 4, **{"recipe": "bf16", **changes})
    spread_out(layer)
    return layer


def _table(head_dim=6):
    return rotary_table(head_dim, 16, 100.0)


@pytest.mark.parametrize("norm", [None, "layernorm", "rmsnorm"])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(
    "changes", [{}, {"num_kv_heads": 2, "window": 2}, {"num_kv_heads": 1, "head_dim": 10}, {"causal": False}], ids=str
)
def test_output_and_gradients(changes, qk_norm, norm):
    layer = _layer(input_layernorm=norm is not None, normalization=norm or "layernorm", qk_norm=qk_norm, **changes)
    x, up = torch.randn(2, 7, 24, requires_grad=True), torch.randn(2, 7, 24)
    y = layer(x, padding=torch.tensor(LENGTHS), rotations=_table(layer.head_dim))
    shape = Shape(
        heads=4,
        kv_heads=layer.num_kv_heads,
        normalization=norm or "layernorm",
        theta=100.0,
        causal=changes.get("causal", True),
        window=changes.get("window"),
    )
    weights, exact_x = weights_of(layer), x.detach().double().requires_grad_()
    exact = attention(weights, "", exact_x, shape, visible=seen(shape, LENGTHS, 7, 7))
    assert_close(y, exact, relative=1e-5)
    actual = torch.autograd.grad(y, [x, *layer.parameters()], up)
    expected = torch.autograd.grad(exact, [exact_x, *weights.values()], up.double())
    for name, ours, theirs in zip(["x", *weights], actual, expected, strict=True):
        assert_close(ours, theirs, relative=3e-5, what=name)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_output_equals_torch(bias, cross):
    """Rows of torch's in_proj_weight stand in our order."""
    theirs = nn.MultiheadAttention(24, 4, bias=bias, batch_first=True)
    spread_out(theirs)
    ours = _layer(bias=bias, cross_attention=cross, causal=False)
    state = theirs.state_dict()
    parts = {"q.linear": slice(0, 24), "kv": slice(24, 72)} if cross else {"qkv.linear": slice(0, 72)}
    kinds = ("weight", "bias") if bias else ("weight",)
    mapped = {f"{name}.{kind}": state[f"in_proj_{kind}"][rows] for name, rows in parts.items() for kind in kinds}
    ours.load_state_dict(mapped | {f"out.{kind}": state[f"out_proj.{kind}"] for kind in kinds})
    x, memory = torch.randn(2, 5, 24), torch.randn(2, 7, 24)
    source, lengths = (memory, torch.tensor([7, 4])) if cross else (x, torch.tensor([5, 2]))
    padded = torch.arange(source.shape[1]) >= lengths[:, None]  # torch's masks mark what is left out
    expected, _ = theirs(x, source, source, key_padding_mask=padded, need_weights=False)
    actual = ours(x, encoder_output=source if cross else None, padding=lengths)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_cross_attention_normalises_x_and_not_the_encoders_output():
    layer = _layer(cross_attention=True, input_layernorm=True, qk_norm=True, num_kv_heads=2)
    x, memory = torch.randn(2, 3, 24), torch.randn(2, 5, 24)
    shape = Shape(heads=4, kv_heads=2)
    everything = torch.ones(2, 3, 5, dtype=torch.bool)
    exact = attention(weights_of(layer), "", x.double(), shape, visible=everything, memory=memory.double())
    assert_close(layer(x, encoder_output=memory), exact, relative=1e-5)
    assert {name.split(".")[0] for name in layer.state_dict()} == {"q", "kv", "q_norm", "k_norm", "out"}


def test_one_gemm_computes_queries_keys_and_values():
    with recorded_products() as products:
        _layer(recipe="tensorwise", num_kv_heads=2, input_layernorm=True)(torch.randn(2, 3, 24))
    assert [tuple(product.b.shape) for product in products] == [(48, 24), (24, 24)]


@pytest.mark.parametrize("steps", [[1] * 9, [4, 1, 1, 3], [9]], ids=str)
@pytest.mark.parametrize("window", [None, 3])
def test_cached_decoding_matches_the_whole_sequence(window, steps):
    """To float32 rounding: torch's attention sums one query's row in another order than a block of rows."""
    layer = _layer(num_kv_heads=2, qk_norm=True, input_layernorm=True, window=window).eval()
    x, cache = torch.randn(2, 9, 24), layer.new_cache(2, 9)
    with torch.inference_mode():
        whole = layer(x, rotations=_table())
        parts = [layer(part, rotations=_table(), cache=cache) for part in x.split(steps, dim=1)]
    assert cache.position == 9
    assert_close(torch.cat(parts, dim=1), whole, relative=2e-6)


@torch.inference_mode()
def test_a_cache_in_the_weights_dtype_serves_autocast():
    layer = _layer(num_kv_heads=2)
    x, cache = torch.randn(2, 6, 24), layer.new_cache(2, 6)
    with torch.autocast("cpu", torch.bfloat16):
        whole = layer(x)
        parts = [layer(part, cache=cache) for part in x.split(1, dim=1)]
    assert cache.keys.dtype is torch.float32
    assert parts[0].dtype is torch.bfloat16
    assert_close(torch.cat(parts, dim=1), whole, relative=2**-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_new_cache_has_the_weights_dtype_also_where_they_are_held_as_codes_or_restored(dtype):
    layer = _layer().to(dtype).requires_grad_(False)
    octavo.convert(layer, "rowwise", frozen="fp8")
    assert layer.out.weight_codes.dtype is torch.float8_e4m3fn
    assert layer.new_cache(1, 4).keys.dtype is dtype
    octavo.restore(layer)
    assert layer.new_cache(1, 4).keys.dtype is dtype


@torch.inference_mode()
def test_a_narrower_cache_rounds_what_it_stores():
    layer, x = _layer(), torch.randn(2, 6, 24)
    y = layer(x, cache=KVCache(2, 6, 4, 6, dtype=torch.bfloat16))
    assert y.dtype is torch.float32
    assert not torch.equal(y, layer(x))
    assert_close(y, layer(x), relative=2**-6)


def test_causal_mask_tensor_matches_the_causal_option():
    layer, free, x = _layer(), _layer(causal=False), torch.randn(2, 6, 24)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    torch.testing.assert_close(free(x, mask=mask), layer(x), rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_padding_with_a_cache_counts_all_positions():
    layer = _layer()
    x, cache, real = torch.randn(2, 6, 24), layer.new_cache(2, 6), torch.rand(2, 6) > 0.3
    whole = layer(x, padding=real)
    parts = [layer(x[:, t : t + 1], cache=cache, padding=real[:, : t + 1]) for t in range(6)]
    assert_close(torch.cat(parts, dim=1), whole, relative=2e-6)


def test_dropout_is_for_training():
    layer, x = _layer(dropout=0.5), torch.randn(2, 7, 24)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_heads": 5}, "num_heads must divide hidden_size, or head_dim be given; 5 does not divide 24"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads; 3 does not divide 4"),
        ({"num_kv_heads": 0}, "num_kv_heads must be a whole number"),
        ({"head_dim": 0}, "head_dim must be a whole number"),
        ({"normalization": "x"}, "normalization must be one of"),
        ({"window": -1}, "window must be a whole number of at least 0, not -1"),
        ({"dropout": 2.0}, "dropout must be a probability"),
        ({"eps": 0}, "eps must be a positive"),
        ({"recipe": "fp4"}, "there is no recipe"),
        ({"cross_attention": True, "causal": True}, "no common positions; leave out causal and window"),
        ({"cross_attention": True, "window": 4}, "no common positions; leave out causal and window"),
    ],
)
def test_arguments_are_checked(arguments, words):
    with pytest.raises(ConfigError, match=words):
        MultiheadAttention(**{"hidden_size": 24, "num_heads": 4, **arguments})


@pytest.mark.parametrize(
    ("cross", "inputs", "words"),
    [
        (False, {"x": torch.zeros(7, 24)}, r"x must be \[B, T, 24\], not \(7, 24\)"),
        (False, {"x": torch.zeros(2, 7, 25)}, r"x must be \[B, T, 24\], not \(2, 7, 25\)"),
        (False, {"encoder_output": torch.zeros(2, 7, 24)}, "cross_attention=True; this layer attends to its own input"),
        (True, {}, "cross_attention=True; hand it in"),
        (True, {"encoder_output": torch.zeros(2, 7, 24), "rotations": _table()}, "leave out rotations and cache"),
        (True, {"encoder_output": torch.zeros(2, 7, 24), "cache": KVCache(2, 7, 4, 6)}, "leave out rotations and cach"),
        (False, {"rotations": _table(8)}, r"two tables \[positions, 6\]; make them with rotary_table"),
        (False, {"rotations": (rotary_table(6, 9)[0], rotary_table(6, 7)[1])}, r"two tables \[positions, 6\]"),
        (False, {"rotations": (torch.ones(6), torch.ones(6))}, r"two tables \[positions, 6\]"),
        (False, {"mask": torch.ones(3, 3, dtype=torch.bool)}, r"\[5, 5\] or \[2, 4, 5, 5\]"),
        (False, {"padding": torch.tensor([6, 5])}, "lengths must be 0 to 5"),
        (True, {"encoder_output": torch.zeros(2, 7, 24), "padding": torch.tensor([8, 5])}, "lengths must be 0 to 7"),
        (False, {"rotations": rotary_table(6, 3)}, "covers 3 positions, and 5 are needed; make one with more max_pos"),
    ],
)
def test_inputs_are_checked(cross, inputs, words):
    layer = MultiheadAttention(24, 4, cross_attention=cross)
    with pytest.raises(ConfigError, match=words):
        layer(**{"x": torch.zeros(2, 5, 24), **inputs})


@pytest.mark.parametrize(
    "wrong",
    [
        {"padding": torch.tensor([6, 6])},
        {"padding": torch.ones(2, 3, dtype=torch.bool)},
        {"mask": torch.ones(2, 2, dtype=torch.bool)},
        {"rotations": (rotary_table(6, 9)[0], rotary_table(6, 8)[1])},
        {"rotations": rotary_table(6, 4)},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
@torch.inference_mode()
def test_refused_call_does_not_change_the_cache(wrong):
    """So that the call may be made again."""
    layer, x = _layer(), torch.randn(2, 5, 24)
    cache = layer.new_cache(2, 9)
    first = layer(x[:, :3], cache=cache)
    with pytest.raises(ConfigError):
        layer(x[:, 3:], cache=cache, **wrong)
    assert cache.position == 3
    again = layer(x[:, 3:], cache=cache)
    assert_close(torch.cat([first, again], dim=1), layer(x), relative=2e-6)


def test_queries_and_keys_are_not_kept_as_they_were_before_rotation():
    attention = MultiheadAttention(32, 4, num_kv_heads=2, recipe="bf16")
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.untyped_storage().nbytes() // tensor.itemsize)
        return tensor

    table = octavo.nn.rotary_table(8, 5)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attention(torch.randn(2, 5, 32), rotations=table)
    assert 2 * 5 * 2 * 8 in kept  # the values by themselves
    assert 2 * 5 * (4 + 2 + 2) * 8 not in kept  # not as a part of the projection
