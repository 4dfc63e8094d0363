"""Faults in casts: a tensor is cast with a scale from another number than its amax, or twice."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest import mock

from torch import Tensor

from octavo.functional import saved_operands
from octavo.nn import Linear
from octavo.numerics import PerTensor, QuantizedTensor, amax
from octavo.recipes import CastSpec, Scaling
from octavo.scaling import LayerScaling, Operand, OperandScaling

__all__ = ["requantizing", "scaling_by"]


@dataclass(slots=True)
class _WrongRole(OperandScaling):
    """A role whose casts go wrong."""

    change: Callable[[Tensor], Tensor] | None = None
    requantizes: bool = False


@dataclass(slots=True)
class _WrongTap(LayerScaling):
    """A layer's tap one role of which is a :class:`_WrongRole`."""

    role: int = 0
    change: Callable[[Tensor], Tensor] | None = None
    requantizes: bool = False

    def with_amaxes(self, amaxes: Tensor | None) -> LayerScaling:
        return replace(self, amaxes=amaxes)

    def of(self, role: int) -> OperandScaling:
        tap = LayerScaling.of(self, role)
        if role != self.role:
            return tap
        kept = {field.name: getattr(tap, field.name) for field in fields(OperandScaling)}
        return _WrongRole(**kept, change=self.change, requantizes=self.requantizes)


@contextmanager
def scaling_by(layer: Linear, role: int, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Make the scale of one role of a layer from ``change(amax)``; recipes with one scale a tensor only."""
    with _wrong(layer, role=role, change=change):
        yield


@contextmanager
def requantizing(layer: Linear, role: int) -> Iterator[None]:
    """Cast the transposed operand of one role from the dequantized codes of the other operand."""
    with _wrong(layer, role=role, requantizes=True):
        yield


@contextmanager
def _wrong(layer: Linear, **wrong: Any) -> Iterator[None]:
    genuine = layer._layer_scaling  # noqa: SLF001 (a fault breaks what no user can reach)

    def tap(*args: Any, **keywords: Any) -> LayerScaling:
        right = genuine(*args, **keywords)
        return _WrongTap(**{field.name: getattr(right, field.name) for field in fields(LayerScaling)}, **wrong)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(layer, "_layer_scaling", tap))
        stack.enter_context(mock.patch.object(saved_operands, "cast_operand", _cast(saved_operands.cast_operand)))
        both_ways = saved_operands.cast_both_ways
        stack.enter_context(mock.patch.object(saved_operands, "cast_both_ways", _cast_both_ways(both_ways)))
        yield


def _cast(genuine: Callable[..., Operand]) -> Callable[..., Operand]:
    def cast(
        x: Tensor, spec: CastSpec | None, tap: OperandScaling | None = None, *, transposed: bool = False
    ) -> Operand:
        return genuine(x, _misled(x, spec, tap), tap, transposed=transposed)

    return cast


def _cast_both_ways(genuine: Callable[..., tuple[Operand, Operand]]) -> Callable[..., tuple[Operand, Operand]]:
    def cast(x: Tensor, spec: CastSpec | None, wanted: CastSpec | None, tap: OperandScaling) -> tuple[Operand, Operand]:
        made, transposed = genuine(x, _misled(x, spec, tap), _misled(x, wanted, tap), tap)
        if isinstance(tap, _WrongRole) and tap.requantizes and isinstance(made, QuantizedTensor):
            transposed = saved_operands.cast_operand(made.dequantize(), wanted, transposed=True)
        return made, transposed

    return cast


def _misled(x: Tensor, spec: CastSpec | None, tap: OperandScaling | None) -> CastSpec | None:
    """The cast as one that takes the amax it is given, where the tap is to mislead it."""
    if spec is None or not isinstance(tap, _WrongRole) or tap.change is None:
        return spec
    if not isinstance(spec.granularity, PerTensor):
        return spec
    tap.amax = tap.change(amax(x))
    return replace(spec, scaling=Scaling.DELAYED)
