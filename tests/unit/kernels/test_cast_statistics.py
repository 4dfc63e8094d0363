"""What Python decides before the native sums of a cast are made; the sums themselves: tests/unit/doctor."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import octavo
from octavo.errors import BackendError
from octavo.formats import E4M3, E4M3_FNUZ
from octavo.kernels import cast_statistics, native_bindings
from octavo.numerics import PerBlock, QuantizedTensor

built = pytest.mark.skipif(
    native_bindings.why_absent() is not None, reason=f"no native kernels: {native_bindings.why_absent()}"
)
ALL = slice(None)


def cast(*shape, fmt=E4M3):
    x = torch.randn(shape)
    return x, octavo.quantize(x, fmt)


@built
def test_cast_statistics_sum_the_cast_elements():
    x, made = cast(4, 6)
    assert cast_statistics.sums(x, made)
    assert not cast_statistics.sums(*cast(4, 6, fmt=E4M3_FNUZ))
    assert not cast_statistics.sums(x.to("meta"), made)
    with FlopCounterMode(display=False):
        assert not cast_statistics.sums(x, made), "somebody watches operations, and addresses are none"


def test_without_the_extension_nothing_is_summed(monkeypatch):
    monkeypatch.setattr(native_bindings, "_absence", "not built")
    assert not cast_statistics.sums(*cast(4, 6))


@built
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_torchs_default_dtype_is_not_its_own(default):
    x, made = cast(40, 60)
    wanted = cast_statistics.cast_sums(x, made, ALL)
    torch.set_default_dtype(default)
    try:
        found = cast_statistics.cast_sums(x, made, ALL)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype is torch.float64
    assert torch.equal(found, wanted)


@built
def test_codes_may_lie_in_any_order():
    x = torch.randn(40, 60)
    for granularity in (octavo.PerTensor(), octavo.PerRow(), PerBlock(7, 9)):
        made = octavo.quantize(x, E4M3, granularity=granularity)
        turned = made.data.t().contiguous().t()
        other = QuantizedTensor(turned, made.scale, granularity, made.hp_dtype)
        assert torch.equal(cast_statistics.cast_sums(x, made, ALL), cast_statistics.cast_sums(x, other, ALL))


@built
def test_conflicting_options_are_refused():
    x, made = cast(4, 6)
    with pytest.raises(BackendError, match=r"have one shape, not \(4, 5\) and \(4, 6\)"):
        cast_statistics.cast_sums(x[:, :5], made, ALL)
    with pytest.raises(BackendError, match="have one shape"):
        cast_statistics.cast_sums(x.reshape(2, 2, 6), made, ALL)
    for rows in (slice(4, None), slice(None, None, -1)):
        with pytest.raises(BackendError, match="there are no rows"):
            cast_statistics.cast_sums(x, made, rows)
    with pytest.raises(BackendError, match="no empty tensor"):
        cast_statistics.cast_sums(x[:0], octavo.quantize(x[:0], E4M3), ALL)
    with pytest.raises(BackendError, match="plain tensors on a CPU"):
        cast_statistics.cast_sums(
            x, QuantizedTensor(*(t.to("meta") for t in (made.data, made.scale)), *_rest(made)), ALL
        )
    with pytest.raises(BackendError, match="there is no level 'sse2' here"):
        cast_statistics.cast_sums(x, made, ALL, level="sse2")


def _rest(made):
    return made.granularity, made.hp_dtype
