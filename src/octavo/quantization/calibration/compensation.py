"""Rounding weights by data: what one weight's rounding breaks, the weights after it make good.

Rounding every weight to the nearest code is best if nothing is known of the inputs. Of some text a layer's inputs x are
known, and with them how much an error D of its weight changes the output:

    Σ |D x|² = trace(D M Dᵀ)          M = Σ x xᵀ, [K, K]

The columns of W are rounded one after the other. Once column j has its codes, the columns that are still free move to
where they make up for its error best:

    W_free ← W_free − (w_j − q_j) · U[j, free] / U[j, j]          U upper triangular, UᵀU = M⁻¹

which is the least-squares solution for all columns rounded so far (Frantar et al., GPTQ, arXiv 2210.17323, equations 2
and 3 and section 3.3). A language model's inputs are alike: a fraction of the output's error is left (docs/qat.md).

Afterwards the weight's cast finds the values that were chosen: all of them lie on the grid, and the largest of each
scaling group stays as it is, so that the scale does too. Nothing else has to be stored, and whatever trains or converts
the layer next starts there.

The M of all layers are held at once, in FP32: K² · 4 bytes a layer, 0.5 GB for a decoder of 135 M parameters.
"""

from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.autocast import autocast
from octavo.convert import read_by_others
from octavo.errors import ConfigError, DataError
from octavo.functional import cast_operand
from octavo.kernels import quantize
from octavo.language_model import LanguageModel
from octavo.nn import Linear
from octavo.numerics import PerRow, QuantizedTensor
from octavo.quantization.calibration.observing import Batch, call_of, evaluating, module_of
from octavo.recipes import CastSpec, Scaling

__all__ = ["compensate_rounding", "rounded_by_data"]

DAMPING = 0.01  # of M's mean diagonal, added to it: directions that the data hardly show are not trusted
BLOCK = 64  # columns whose errors reach the columns after them in one product
OnBatch = Callable[[int, int | None], None]


@torch.no_grad()
def compensate_rounding(
    model: nn.Module | LanguageModel,
    batches: Iterable[Batch],
    *,
    on_batch: OnBatch = lambda _done, _total: None,
) -> dict[str, float]:
    """Put the weights of a converted or prepared model where their FP8 codes disturb the outputs least, in place.

    The batches are run in high precision. A layer that they do not reach stays as it is, and so does one whose weight
    something else reads too, such as a head's that is the embedding: that would be given what is best for the layer.

    Args:
        model: whose layers ``octavo.convert`` or ``octavo.prepare_qat`` has given recipes that cast weights.
        batches: as in :func:`octavo.calibrate`; a few thousand tokens of the kind that the model will serve.
        on_batch: called after each batch with (done, total or None).

    Returns:
        For the path of each layer that may move, what is left of the squared error that rounding to the nearest makes
        in its output on these batches.

    Raises:
        ConfigError: no layer of the model casts a weight of its own, in high precision; NaN or ±Inf in one.
        DataError: no batch, or one in which a layer is given NaN or ±Inf, or squares of its inputs overflow.

    Example:
        >>> import octavo
        >>> from octavo.quantization import compensate_rounding
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> _ = octavo.convert(model, "tensorwise")
        >>> left = compensate_rounding(model, [torch.randn(32, 1) * torch.ones(8) + torch.randn(32, 8) / 10])
        >>> left["0"] < 0.8
        True
    """
    others_read = read_by_others(module_of(model))
    layers = {
        path: layer
        for path, layer in module_of(model).named_modules()
        if isinstance(layer, Linear) and layer.recipe.output.b is not None and layer.held is None
        if path not in others_read
    }
    if not layers:
        raise ConfigError(
            "no layer of this model casts its weight, or nothing but those whose weight others use; call "
            "octavo.convert or octavo.prepare_qat first"
        )
    for path, layer in layers.items():
        if not layer.weight.isfinite().all():
            raise ConfigError(f"the weight of layer {path!r} holds NaN or infinity; mend the model")
    moments = _second_moments(model, batches, layers, on_batch)
    with torch.autocast(next(iter(layers.values())).weight.device.type, enabled=False):
        return {path: _moved(layers[path], moment) for path, moment in moments.items()}


def _moved(layer: Linear, moment: Tensor) -> float:
    """Move a layer's weight, if that is better than not to; what is left of its output's squared error."""
    spec, weight = layer.recipe.output.b, layer.weight.detach().float()
    assert spec is not None
    moved, rounded = rounded_by_data(weight, spec, moment)
    nearest = _output_error(_quantized(weight, spec).dequantize() - weight, moment)
    left = _output_error(rounded - weight, moment)
    if not left < nearest:
        return 1.0
    layer.weight.copy_(moved)
    return left / nearest


def rounded_by_data(weight: Tensor, spec: CastSpec, moment: Tensor) -> tuple[Tensor, Tensor]:
    """A weight moved so that its cast disturbs the output least, and what that cast decodes to.

    Args:
        weight: float32 [N, K], finite.
        spec: how the weight is cast.
        moment: Σ x xᵀ of the inputs, float32 [K, K].

    Returns:
        Float32 [N, K] both. They differ only in the largest elements of each scaling group, which have not moved.
    """
    order = moment.diagonal().argsort(descending=True)  # what matters most is rounded while most is free
    feedback = _feedback(moment[order][:, order])
    known = _quantized(weight, spec)
    scales = known.granularity.expand(known.fp32_scale, weight.shape).expand(weight.shape)
    largest = known.granularity.expand(known.granularity.reduce_max(weight.abs()), weight.shape)
    stays = weight.abs() == largest
    columns = (weight.t()[order].contiguous(), scales.t()[order].contiguous(), stays.t()[order].contiguous())
    chosen = torch.empty_like(weight)
    chosen[:, order] = _rounded_columns(*columns, feedback, spec).t()
    return torch.where(stays, weight, chosen), chosen


def _rounded_columns(free: Tensor, scales: Tensor, stays: Tensor, feedback: Tensor, spec: CastSpec) -> Tensor:
    """The weight's columns, each a row here [K, N], rounded in turn; those to come make good what is lost."""
    original, rounded = free.clone(), torch.empty_like(free)
    for start in range(0, len(free), BLOCK):
        block = slice(start, min(start + BLOCK, len(free)))
        errors = torch.empty_like(free[block])
        for j in range(block.start, block.stop):
            wanted = torch.where(stays[j], original[j], free[j])
            codes = quantize(wanted[:, None], spec.format, granularity=PerRow(), scale=scales[j, :, None])
            rounded[j] = codes.dequantize()[:, 0]
            errors[j - start] = (free[j] - rounded[j]) / feedback[j, j]
            free[j + 1 : block.stop].addr_(feedback[j, j + 1 : block.stop], errors[j - start], alpha=-1)
        free[block.stop :].addmm_(feedback[block, block.stop :].t(), errors, alpha=-1)
    return rounded


def _feedback(moment: Tensor) -> Tensor:
    """U, upper triangular, of the damped M: UᵀU = M⁻¹."""
    damped = moment.double()
    damped.diagonal().add_(DAMPING * damped.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return upper.float()


def _quantized(weight: Tensor, spec: CastSpec) -> QuantizedTensor:
    """The weight's own cast."""
    made = cast_operand(weight, replace(spec, scaling=Scaling.DYNAMIC))
    assert isinstance(made, QuantizedTensor)
    return made


def _output_error(error: Tensor, moment: Tensor) -> float:
    """Σ |D x|² of an error D [N, K] of the weight."""
    return ((error @ moment) * error).sum(dtype=torch.float64).item()


def _second_moments(
    model: nn.Module | LanguageModel, batches: Iterable[Batch], layers: Mapping[str, Linear], on_batch: OnBatch
) -> dict[str, Tensor]:
    """Σ x xᵀ of what each layer is given, float32 [K, K]; layers that are not reached are missing."""
    found: dict[str, Tensor] = {}
    last: dict[tuple[int, object], tuple[Tensor, Tensor]] = {}  # queries, keys and values share an input and its moment

    def add(path: str, _: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        x: Tensor = args[0] if args else named["input"]
        known = (id(x), _version(x))
        if known not in last:
            last.clear()
            last[known] = (x, _second_moment(x))
        moment = last[known][1]
        found[path] = found[path] + moment if path in found else moment
        if not found[path].isfinite().all():
            raise DataError(f"layer {path!r} is given {_fault(x)}; mend that batch, or the model")

    handles = [layer.register_forward_pre_hook(partial(add, path), with_kwargs=True) for path, layer in layers.items()]
    total, done = len(batches) if isinstance(batches, Sized) else None, 0
    try:
        with evaluating(module_of(model)), autocast(enabled=False):
            for done, batch in enumerate(batches, start=1):
                call_of(model)(batch)
                last.clear()
                on_batch(done, total)
    finally:
        for handle in handles:
            handle.remove()
    if not done:
        raise DataError("there is no batch to round the weights by; give a few thousand tokens")
    return found


def _second_moment(x: Tensor) -> Tensor:
    """Σ x xᵀ over all rows, float32 [K, K]."""
    with torch.autocast(x.device.type, enabled=False):  # its own products would be narrow
        rows = x.reshape(-1, x.shape[-1]).float()
        return rows.t() @ rows


def _version(x: Tensor) -> object:
    """Equal while the tensor is not written to; inference tensors do not know, and are never taken to be equal."""
    return object() if x.is_inference() else x._version  # noqa: SLF001 - torch has no other name for it


def _fault(x: Tensor) -> str:
    return "values whose squares FP32 cannot add up" if x.isfinite().all() else "NaN or infinity"
