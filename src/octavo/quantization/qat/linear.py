"""``QATLinear``: a linear layer during quantisation-aware training.

It is an ``octavo.nn.Linear`` whose backward is straight through, and which sets the scale of a static input itself. A
scale outlives training, so it comes from what training sees, in one of three ways:

| scales    | the input's scale in training                                    | learned by the optimizer |
|-----------|------------------------------------------------------------------|--------------------------|
| `tracked` | that of a running maximum: amax ← max(this batch's, decay · amax) | no                       |
| `learned` | 2^log2_scale, from the first batch's amax on; see below           | yes                      |
| `frozen`  | stays what it is                                                  | no                       |

A running maximum provides for the batch at hand, so nothing is clipped while it is tracked. It forgets slowly, because
the two errors are not alike: on a floating grid a scale that is too large by a factor of two costs only the smallest
values, and one that is too small cuts off the largest.

A recipe with scales that are powers of two rounds log2_scale up. It starts half a step below the power in use, as
far from the next one down as from the next one up.

``input_scale`` is always the value in use, in evaluation too. Zero means none yet; an input that has been zero
throughout has scale 1. Other casts take their scales from their own tensors and need no state.
"""

from collections.abc import Callable
from enum import StrEnum

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.functional import InputOperands
from octavo.nn import Linear
from octavo.numerics import PerTensor, ScaleRounding, measure, scale_from_amax
from octavo.quantization.qat.straight_through import straight_through_linear
from octavo.recipes import CastSpec, Recipe
from octavo.scaling import EMPTY, OperandScaling, inside_backward

__all__ = ["DECAY", "QATLinear", "Scales"]

LARGEST_EXPONENT = 126  # of a learned scale: its reciprocal is a normal FP32 number too
DECAY = 0.999  # in 700 steps a maximum that is not seen again fades to half


class Scales(StrEnum):
    """How a static input's scale is found; the module's text tells them apart."""

    TRACKED = "tracked"
    LEARNED = "learned"
    FROZEN = "frozen"


class QATLinear(Linear):
    """Made of an ``octavo.nn.Linear`` by ``octavo.prepare_qat``, and made one again by ``octavo.convert_qat``.

    Attributes:
        scales: how the scale of a static input is found; FROZEN where the input is not static.
        decay: what is left of a tracked amax after a call.
        clip_gradients: whether values that saturate take the gradient zero.
        seen_amax: float32 [], the tracked amax; -1 where nothing was seen.
        log2_scale: [], the learned scale's logarithm, −inf before the first batch; None where none is learned.
    """

    scales: Scales
    decay: float
    clip_gradients: bool
    seen_amax: Tensor
    log2_scale: torch.nn.Parameter | None

    def begin(self, scales: Scales, *, decay: float, clip_gradients: bool) -> None:
        """Start on what was an ``octavo.nn.Linear``; a scale that it has already is where its own begins."""
        self.scales = scales if self.recipe.has_static_input else Scales.FROZEN
        self.decay, self.clip_gradients = decay, clip_gradients
        self.shared_input = None  # its backward needs the input itself
        self.register_buffer("seen_amax", self.fresh_state(self.weight.device)["seen_amax"], persistent=False)
        learned = torch.nn.Parameter(self._log2_of_scale()) if self.scales == Scales.LEARNED else None
        self.register_parameter("log2_scale", learned)

    def finish(self) -> Linear:
        """The ``octavo.nn.Linear`` that it was, with the scale that was found."""
        self.freeze()
        del self.seen_amax, self.log2_scale, self.scales, self.decay, self.clip_gradients
        self.__class__ = Linear  # type: ignore[assignment]
        return self

    @torch.no_grad()
    def freeze(self) -> None:
        """Let the scale stay what it is from now on."""
        self._read_learned()
        self.scales = Scales.FROZEN
        if self.log2_scale is not None:
            self.log2_scale.requires_grad_(False)

    def forward_cast(
        self, recipe: Recipe, make: Callable[[OperandScaling], tuple[Tensor, InputOperands | None]]
    ) -> Tensor:
        """What the converted layer computes, differentiated straight through."""
        if recipe.is_delayed:
            raise ConfigError(
                f"recipe {recipe.name!r} takes its scales from training steps, which the converted model has not; "
                "use 'static' with scales='tracked' in quantisation-aware training"
            )
        x, operands = make(OperandScaling())
        assert operands is None, "whoever casts for a layer asks for exactly octavo.nn.Linear"
        if recipe.has_static_input:
            assert recipe.output.a is not None
            self._follow(x, recipe.output.a)
        scaling = self._layer_scaling(recipe)
        return straight_through_linear(
            x,
            self.weight,
            self.bias,
            recipe,
            weight_operands=self._operands(recipe, scaling),
            scaling=scaling,
            clip_gradients=self.clip_gradients,
            log2_scale=self.log2_scale if self.scales == Scales.LEARNED else None,
        )

    @torch.no_grad()
    def _follow(self, x: Tensor, spec: CastSpec) -> None:
        """Set the scale for this call; activation checkpointing's second run of it finds it set."""
        if self.scales == Scales.FROZEN or inside_backward():
            return
        if self.training and not self._has_learned:
            self._track(x, spec)
            if self.log2_scale is not None and self.seen_amax > 0:
                self.log2_scale.copy_(self._log2_of_scale())
        self._read_learned()

    def _track(self, x: Tensor, spec: CastSpec) -> None:
        known = torch.where(self.seen_amax >= 0, self.seen_amax, self.input_scale * spec.format.max)
        self.seen_amax.copy_(torch.maximum(measure(x.detach(), PerTensor()).amax, known * self.decay))
        found = scale_from_amax(
            self.seen_amax, spec.format, rounding=spec.scale_rounding, amax_floor=spec.amax_floor, margin=spec.margin
        )
        self.input_scale.copy_(torch.where(self.seen_amax > 0, found, 1.0))

    @property
    def _has_learned(self) -> bool:
        return self.log2_scale is not None and bool(self.log2_scale.isfinite())

    def _log2_of_scale(self) -> Tensor:
        """Where a learned scale starts: the middle of those that round up to a power of two, or the scale's own."""
        exponent = self.input_scale.log2()
        return exponent.ceil() - 0.5 if self._is_power_of_two else exponent

    def _read_learned(self) -> None:
        if self._has_learned and self.scales == Scales.LEARNED:
            assert self.log2_scale is not None
            exponent = self.log2_scale.float().clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
            self.input_scale.copy_((exponent.ceil() if self._is_power_of_two else exponent).exp2())

    @property
    def _is_power_of_two(self) -> bool:
        assert self.recipe.output.a is not None
        return self.recipe.output.a.scale_rounding is not ScaleRounding.FP32

    def fresh_state(self, device: torch.device | None) -> dict[str, Tensor]:
        """Nothing seen, beside what a linear layer has."""
        seen = torch.full((), EMPTY, dtype=torch.float32, device=device)
        return {**super().fresh_state(device), "seen_amax": seen}
