"""Weight rounding with error compensation (GPTQ): later columns absorb the rounding error of earlier ones.

Rounding every weight to the nearest code is best if nothing is known about the inputs. Sample inputs x of a layer
determine how much an error D of its weight changes the output:

    Σ |D x|² = trace(D M Dᵀ)          M = Σ x xᵀ, [K, K]

The columns of W are rounded one after the other. After column j is rounded, the remaining columns are adjusted to
compensate its error:

    W_free ← W_free − (w_j − q_j) · U[j, free] / U[j, j]          U upper triangular, UᵀU = M⁻¹

which is the least-squares solution for all columns rounded so far (Frantar et al., GPTQ, arXiv 2210.17323, equations 2
and 3 and section 3.3). A language model's inputs are strongly correlated: a fraction of the output error is left
(docs/concepts/qat.md).

The weight's cast reproduces the chosen values: all of them lie on the FP8 grid, and the largest element of each scaling
group is not moved, so the scale does not change. Nothing else has to be stored.

All M are in memory at once, in FP32: K² · 4 bytes a layer, 0.5 GB for a decoder of 135 M parameters.
"""

from collections.abc import Callable, Iterable, Mapping, Sized
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.autocast import autocast
from octavo.convert import read_by_others
from octavo.errors import ConfigError, DataError
from octavo.functional import quantize_operand
from octavo.kernels import quantize
from octavo.language_model import LanguageModel
from octavo.nn import Linear
from octavo.numerics import PerRow
from octavo.quantization.calibration.observers import Batch, call_of, evaluating, module_of
from octavo.recipes import CastSpec

__all__ = ["compensate_rounding", "rounded_by_data"]

DAMPING = 0.01  # of M's mean diagonal, added to M: regularises directions that the data hardly cover
BLOCK = 64  # columns whose errors are propagated to later blocks in one GEMM
OnBatch = Callable[[int, int | None], None]


@torch.no_grad()
def compensate_rounding(
    model: nn.Module | LanguageModel,
    batches: Iterable[Batch],
    *,
    on_batch: OnBatch = lambda _done, _total: None,
) -> dict[str, float]:
    """Adjust the weights of a converted or prepared model in place, to minimise the output error of their FP8 codes.

    The batches are run in high precision. Layers without input are not changed, nor are layers that share their weight
    with another module, such as a head tied to the embedding.

    Args:
        model: converted by ``octavo.convert`` or ``octavo.prepare_qat`` to recipes that cast weights.
        batches: as in :func:`octavo.calibrate`; a few thousand tokens of the kind that the model will serve.
        on_batch: called after each batch with (done, total or None).

    Returns:
        For each adjusted layer's path, its squared output error on these batches relative to rounding to nearest.

    Raises:
        ConfigError: no layer casts an unshared high-precision weight, or a weight contains NaN or ±Inf.
        DataError: no batch, or a batch in which a layer's input contains NaN or ±Inf, or its squares overflow.

    Example:
        >>> import octavo
        >>> from octavo.quantization import compensate_rounding
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> _ = octavo.convert(model, "tensorwise")
        >>> left = compensate_rounding(model, [torch.randn(32, 1) * torch.ones(8) + torch.randn(32, 8) / 10])
        >>> left["0"] < 0.8
        True
    """
    shared_weights = read_by_others(module_of(model))
    layers = {
        path: layer
        for path, layer in module_of(model).named_modules()
        if isinstance(layer, Linear) and layer.recipe.output.b is not None and layer.codes_layout is None
        if path not in shared_weights
    }
    if not layers:
        raise ConfigError(
            "no layer of this model casts an unshared weight; call octavo.convert or octavo.prepare_qat first"
        )
    for path, layer in layers.items():
        if (spec := layer.recipe.output.b) is not None and spec.engine is not None:
            raise ConfigError(
                f"layer {path!r} casts its weight as another engine does ({layer.recipe.name!r}), which rounds to "
                "nearest; leave compensated rounding out"
            )
        if not layer.weight.isfinite().all():
            raise ConfigError(f"the weight of layer {path!r} contains NaN or infinity; correct the model")
    moments = _second_moments(model, batches, layers, on_batch)
    with torch.autocast(next(iter(layers.values())).weight.device.type, enabled=False):
        return {path: _compensate(layers[path], moment) for path, moment in moments.items()}


def _compensate(layer: Linear, moment: Tensor) -> float:
    """Compensate a layer's weight if that helps; returns its squared output error relative to rounding to nearest."""
    spec, weight = layer.recipe.output.b, layer.weight.detach().float()
    assert spec is not None
    compensated, rounded = rounded_by_data(weight, spec, moment)
    nearest_error = _output_error(quantize_operand(weight, spec).dequantize() - weight, moment)
    error = _output_error(rounded - weight, moment)
    if not error < nearest_error:
        return 1.0
    layer.weight.copy_(compensated)
    return error / nearest_error


def rounded_by_data(weight: Tensor, spec: CastSpec, moment: Tensor) -> tuple[Tensor, Tensor]:
    """Adjust a weight to minimise the output error of its cast; also returns the decoded cast.

    Args:
        weight: float32 [N, K], finite.
        spec: the weight's cast.
        moment: Σ x xᵀ of the inputs, float32 [K, K].

    Returns:
        Both float32 [N, K]; they differ only in the largest elements of each scaling group, which are not adjusted.
    """
    # Round the columns of largest energy first, while most others can still compensate.
    order = moment.diagonal().argsort(descending=True)
    feedback = _feedback(moment[order][:, order])
    nearest = quantize_operand(weight, spec)
    scales = nearest.granularity.expand(nearest.fp32_scale, weight.shape).expand(weight.shape)
    largest = nearest.granularity.expand(nearest.granularity.reduce_max(weight.abs()), weight.shape)
    is_largest = weight.abs() == largest
    columns = (weight.t()[order].contiguous(), scales.t()[order].contiguous(), is_largest.t()[order].contiguous())
    rounded = torch.empty_like(weight)
    rounded[:, order] = _rounded_columns(*columns, feedback, spec).t()
    return torch.where(is_largest, weight, rounded), rounded


def _rounded_columns(free: Tensor, scales: Tensor, is_largest: Tensor, feedback: Tensor, spec: CastSpec) -> Tensor:
    """Round the weight's columns (rows of ``free`` [K, N]) in turn, adjusting the later ones."""
    original, rounded = free.clone(), torch.empty_like(free)
    for start in range(0, len(free), BLOCK):
        block = slice(start, min(start + BLOCK, len(free)))
        errors = torch.empty_like(free[block])
        for j in range(block.start, block.stop):
            target = torch.where(is_largest[j], original[j], free[j])
            codes = quantize(target[:, None], spec.format, granularity=PerRow(), scale=scales[j, :, None])
            rounded[j] = codes.dequantize()[:, 0]
            errors[j - start] = (free[j] - rounded[j]) / feedback[j, j]
            free[j + 1 : block.stop].addr_(feedback[j, j + 1 : block.stop], errors[j - start], alpha=-1)
        free[block.stop :].addmm_(feedback[block, block.stop :].t(), errors, alpha=-1)
    return rounded


def _feedback(moment: Tensor) -> Tensor:
    """Upper triangular U of the damped M: UᵀU = M⁻¹."""
    damped = moment.double()
    damped.diagonal().add_(DAMPING * damped.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return upper.float()


def _output_error(error: Tensor, moment: Tensor) -> float:
    """Output error Σ |D x|² of a weight error D [N, K]."""
    return ((error @ moment) * error).sum(dtype=torch.float64).item()


def _second_moments(
    model: nn.Module | LanguageModel, batches: Iterable[Batch], layers: Mapping[str, Linear], on_batch: OnBatch
) -> dict[str, Tensor]:
    """Σ x xᵀ of each layer's inputs, float32 [K, K]; layers without input are missing."""
    moments: dict[str, Tensor] = {}
    last: dict[tuple[int, object], tuple[Tensor, Tensor]] = {}  # shared by queries, keys and values

    def add(path: str, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        x: Tensor = args[0] if args else kwargs["input"]
        key = (id(x), _version(x))
        if key not in last:
            last.clear()
            last[key] = (x, _second_moment(x))
        moment = last[key][1]
        moments[path] = moments[path] + moment if path in moments else moment
        if not moments[path].isfinite().all():
            raise DataError(f"layer {path!r} received {_describe_fault(x)}; correct that batch, or the model")

    total, done = len(batches) if isinstance(batches, Sized) else None, 0
    with ExitStack() as hooks, evaluating(module_of(model)), autocast(enabled=False):
        for path, layer in layers.items():
            hooks.enter_context(layer.register_forward_pre_hook(partial(add, path), with_kwargs=True))
        for done, batch in enumerate(batches, start=1):
            call_of(model)(batch)
            last.clear()
            on_batch(done, total)
    if not done:
        raise DataError("weight compensation needs at least one batch; give a few thousand tokens")
    return moments


def _second_moment(x: Tensor) -> Tensor:
    """Σ x xᵀ over all rows, float32 [K, K]."""
    with torch.autocast(x.device.type, enabled=False):  # autocast would reduce the precision of the product
        rows = x.reshape(-1, x.shape[-1]).float()
        return rows.t() @ rows


def _version(x: Tensor) -> object:
    """Version of a tensor, equal until it is written to; inference tensors have none and never compare equal."""
    return object() if x.is_inference() else x._version  # noqa: SLF001 - no public name


def _describe_fault(x: Tensor) -> str:
    return "values whose sum of squares overflows FP32" if x.isfinite().all() else "NaN or infinity"
