import pytest
import torch

from octavo.errors import ConfigError
from octavo.nn import DotProductAttention
from octavo.nn.attention import attend
from tests.contract.transformer_oracle import Shape, assert_close, scores_to_values, seen

LENGTHS = [7, 4, 0]


def _operands(*, asked=7, kv=2, dtype=torch.float32):
    shapes = (3, asked, 4, 6), (3, 7, kv, 6), (3, 7, kv, 6)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def _compare(actual, exact, operands, doubles, *, relative=1e-5):
    up = torch.randn_like(exact)
    assert_close(actual, exact, relative=relative, what="output")
    grads = torch.autograd.grad(actual, operands, up.to(actual.dtype))
    expected = torch.autograd.grad(exact, doubles, up.to(actual.dtype).double())
    for name, ours, theirs in zip(("queries", "keys", "values"), grads, expected, strict=True):
        assert_close(ours, theirs, relative=2 * relative, what=name)


@pytest.mark.parametrize("padded", [None, "lengths", "bool"])
@pytest.mark.parametrize("window", [None, 0, 2, 9])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv", [1, 2, 4])
def test_outputs_and_gradients(causal, window, padded, kv):
    operands = _operands(kv=kv)
    doubles = [x.detach().double().requires_grad_() for x in operands]
    lengths = torch.tensor(LENGTHS)
    padding = {None: None, "lengths": lengths, "bool": torch.arange(7) < lengths[:, None]}[padded]
    y = DotProductAttention(causal=causal, window=window)(*operands, padding=padding)
    visible = seen(Shape(heads=4, kv_heads=kv, causal=causal, window=window), LENGTHS if padded else [7] * 3, 7, 7)
    _compare(y, scores_to_values(*doubles, visible=visible), operands, doubles)


@pytest.mark.parametrize("asked", [1, 3])
@pytest.mark.parametrize("window", [None, 2])
def test_fewer_queries_are_the_last_positions(asked, window):
    operands = _operands(asked=asked)
    doubles = [x.detach().double().requires_grad_() for x in operands]
    visible = seen(Shape(heads=4, kv_heads=2, window=window), [7] * 3, asked, 7)
    _compare(
        attend(*operands, causal=True, window=window), scores_to_values(*doubles, visible=visible), operands, doubles
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", [(7, 7), (1, 7), (3, 4, 7, 7), (3, 1, 1, 7)], ids=str)
def test_masks_of_the_callers_own(shape, causal):
    mask, bias = torch.rand(shape) > 0.4, torch.randn(shape)
    operands = _operands()
    doubles = [x.detach().double().requires_grad_() for x in operands]
    attention = DotProductAttention(causal=causal)
    everything = seen(Shape(heads=4, kv_heads=2, causal=causal), [7] * 3, 7, 7)[:, None]
    visible = mask & everything
    _compare(attention(*operands, mask=mask), scores_to_values(*doubles, visible=visible), operands, doubles)
    exact = scores_to_values(*doubles, visible=everything, bias=bias.double())
    _compare(attention(*operands, mask=bias), exact, operands, doubles)
    barred = torch.where(mask, bias, -torch.inf)
    exact = scores_to_values(*doubles, visible=visible, bias=bias.double())
    _compare(attention(*operands, mask=barred), exact, operands, doubles)


def test_a_mask_and_padding_are_both_kept():
    operands, mask, lengths = _operands(), torch.rand(3, 4, 7, 7) > 0.4, torch.tensor(LENGTHS)
    exact = scores_to_values(
        *(x.detach().double() for x in operands),
        visible=mask & seen(Shape(heads=4, kv_heads=2, window=3), LENGTHS, 7, 7)[:, None],
    )
    assert_close(DotProductAttention(window=3)(*operands, padding=lengths, mask=mask), exact, relative=1e-5)


def test_a_query_that_sees_nothing_gives_zeros_and_takes_no_gradient():
    operands = _operands()
    y = DotProductAttention(causal=False)(*operands, padding=torch.tensor([7, 0, 3]))
    assert torch.equal(y[1], torch.zeros_like(y[1]))
    for gradient in torch.autograd.grad(y.sum(), operands):
        assert gradient.isfinite().all()
        assert not gradient[1].any()


@pytest.mark.parametrize("mask", [None, "bool", "floating"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits(dtype, mask):
    """Widened or not, the result is the exact one to about the dtype's resolution."""
    operands = _operands(dtype=dtype)
    doubles = [x.detach().double().requires_grad_() for x in operands]
    chosen = torch.rand(7, 7) > 0.4
    visible, given = seen(Shape(heads=4, kv_heads=2), [7] * 3, 7, 7), None
    if mask is not None:
        visible = visible & chosen
        given = chosen if mask == "bool" else torch.where(chosen, 0.0, -torch.inf)
    y = DotProductAttention()(*operands, mask=given)
    assert y.dtype is dtype
    _compare(y, scores_to_values(*doubles, visible=visible), operands, doubles, relative=3 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_the_result_has_its_dtype(dtype):
    operands = _operands()
    with torch.autocast("cpu", dtype):
        y = DotProductAttention()(*operands)
    assert y.dtype is dtype
    assert_close(y, DotProductAttention()(*operands), relative=4 * torch.finfo(dtype).eps)


def test_the_scale_is_the_callers():
    queries, keys, values = (x.detach() for x in _operands())
    expected = attend(queries * 0.3 * 6**0.5, keys, values, causal=True)
    torch.testing.assert_close(DotProductAttention(scale=0.3)(queries, keys, values), expected)


def test_dropout_is_for_training_and_keeps_the_mean():
    operands = torch.zeros(1, 1, 1, 1), torch.zeros(1, 4000, 1, 1), torch.ones(1, 4000, 1, 1)
    attention = DotProductAttention(causal=False, dropout=0.25)
    trained = attention(*operands).item()
    assert trained != 1.0
    assert trained == pytest.approx(1.0, abs=0.05)
    assert attention.eval()(*operands).item() == pytest.approx(1.0, abs=1e-6)


def test_the_causal_flag_serves_where_it_can(monkeypatch):
    """A mask costs memory and torch's fastest kernels."""
    seen_arguments = []
    original = torch.nn.functional.scaled_dot_product_attention

    def recorded(q, k, v, attn_mask=None, **options):
        seen_arguments.append((attn_mask is None, options["is_causal"]))
        return original(q, k, v, attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    operands = _operands()
    attend(*operands, causal=True)
    attend(*operands, causal=False)
    attend(*_operands(asked=1), causal=True)
    attend(*operands, causal=True, window=3)
    assert seen_arguments == [(True, True), (True, False), (True, False), (False, False)]


@pytest.mark.parametrize(("batch", "positions"), [(0, 5), (2, 0)])
@pytest.mark.parametrize("window", [None, 2])
def test_empty(batch, positions, window):
    operands = [torch.randn(batch, positions, heads, 6, requires_grad=True) for heads in (4, 2, 2)]
    y = DotProductAttention(window=window)(*operands)
    y.sum().backward()
    assert y.shape == (batch, positions, 4, 6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"window": -1}, "window must be a whole number of at least 0, not -1"),
        ({"dropout": 1.0}, "dropout must be a probability"),
        ({"scale": 0.0}, "scale must be a positive number, or None"),
    ],
)
def test_arguments_are_checked(arguments, words):
    with pytest.raises(ConfigError, match=words):
        DotProductAttention(**arguments)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"keys": (2, 5, 3, 6), "values": (2, 5, 3, 6)}, "a number of heads that divides theirs"),
        ({"keys": (2, 5, 2, 4), "values": (2, 5, 2, 4)}, "the queries' batch and width"),
        ({"keys": (1, 5, 2, 6), "values": (1, 5, 2, 6)}, "the queries' batch and width"),
        ({"values": (2, 4, 2, 6)}, "keys and values of one shape"),
        ({"queries": (2, 5, 24)}, r"takes queries, keys and values \[B, T, heads, D\]"),
        ({"queries": (2, 6, 4, 6)}, "6 are more than 5 keys"),
        (
            {"padding": torch.ones(2, 4, dtype=torch.bool)},
            r"padding must be bool \[2, 5\], True for real keys, or 2 int",
        ),
        ({"padding": torch.ones(2, 5)}, r"not torch.float32 \(2, 5\)"),
        (
            {"mask": torch.ones(2, 5, 5, dtype=torch.bool)},
            r"\[T, S\] or \[B, heads, T, S\], any of them 1\), not torch.bool \(2, 5, 5\)",
        ),
        ({"mask": torch.ones(3, 3, dtype=torch.bool)}, r"\[5, 5\] or \[2, 4, 5, 5\].*not torch.bool \(3, 3\)"),
        ({"mask": torch.ones(5, 4, dtype=torch.bool)}, r"not torch.bool \(5, 4\)"),
        ({"mask": torch.zeros(3, 1, 5, 5)}, r"not torch.float32 \(3, 1, 5, 5\)"),
        ({"mask": torch.zeros(2, 2, 5, 5)}, r"not torch.float32 \(2, 2, 5, 5\)"),
        ({"padding": torch.ones(3, 5, dtype=torch.bool)}, r"not torch.bool \(3, 5\)"),
        ({"padding": torch.tensor([7, 5])}, r"lengths must be 0 to 5, the number of keys, not \[7, 5\]"),
        ({"padding": torch.tensor([5, -1])}, r"lengths must be 0 to 5, the number of keys, not \[5, -1\]"),
        ({"padding": torch.ones(2, dtype=torch.complex64)}, r"2 integer lengths, not torch.complex64"),
        ({"mask": torch.ones(5, 5, dtype=torch.int64)}, "must be bool or floating"),
    ],
)
def test_inputs_are_checked(changes, words):
    shapes = {"queries": (2, 5, 4, 6), "keys": (2, 5, 2, 6), "values": (2, 5, 2, 6)}
    given = {name: torch.zeros(changes.pop(name, shape)) for name, shape in shapes.items()}
    with pytest.raises(ConfigError, match=words):
        DotProductAttention()(*given.values(), **changes)
