"""Linear layer in quantization-aware training.

``QATLinear`` is an ``octavo.nn.Linear`` with straight-through gradients that also sets the scale of a static input. The
scale is determined in training and used afterwards, in one of three ways:

| scales    | the input's scale in training                                    | learned by the optimizer |
|-----------|------------------------------------------------------------------|--------------------------|
| `tracked` | from a running maximum: amax ← max(amax of the batch, decay · amax) | no                     |
| `learned` | 2^log2_scale, initialised from the first batch's amax; see below  | yes                      |
| `frozen`  | constant                                                          | no                       |

A running maximum covers the current batch, so a tracked scale never clips. It decays slowly because the two errors
differ: in a floating-point format a scale that is too large by a factor of two loses only the smallest values, one that
is too small clips the largest.

A recipe with power-of-two scales rounds log2_scale up. It starts half a step below the current power, in the middle
between a change down and a change up.

``input_scale`` is always the value in use, including in evaluation. Zero means that it is not set; an input that has
only been zero has scale 1. Other casts compute scales from their tensors and need no state.
"""

from collections.abc import Callable
from enum import StrEnum

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.functional import InputOperands
from octavo.nn import Linear
from octavo.nn.tensor_parallel import LocalTensors
from octavo.numerics import PerTensor, ScaleRounding, measure, scale_from_amax
from octavo.quantization.qat.straight_through import straight_through_linear
from octavo.recipes import CastSpec, Recipe
from octavo.scaling import EMPTY, OperandScaling, inside_backward

__all__ = ["DECAY", "QATLinear", "ScaleUpdate"]

LARGEST_EXPONENT = 126  # of a learned scale: its reciprocal is a normal FP32 number too
DECAY = 0.999  # halves an outdated maximum in 700 steps


class ScaleUpdate(StrEnum):
    """Update rule of a static input's scale; see the module's table."""

    TRACKED = "tracked"
    LEARNED = "learned"
    FROZEN = "frozen"


class QATLinear(Linear):
    """Linear layer of a model between ``octavo.prepare_qat`` and ``octavo.convert_qat``.

    Attributes:
        scales: update rule of a static input's scale; FROZEN if the input is not static.
        decay: factor on a tracked amax at each call.
        clip_gradients: zero the gradient of saturated values.
        seen_amax: float32 [], the tracked amax; -1 before the first batch.
        log2_scale: [], logarithm of the learned scale, −inf before the first batch; None if it is not learned.
    """

    scales: ScaleUpdate
    decay: float
    clip_gradients: bool
    seen_amax: Tensor
    log2_scale: torch.nn.Parameter | None

    def begin(self, scales: ScaleUpdate, *, decay: float, clip_gradients: bool) -> None:
        """Initialise the state of a former ``octavo.nn.Linear``; an existing scale is the initial value."""
        self.scales = scales if self.recipe.has_static_input else ScaleUpdate.FROZEN
        self.decay, self.clip_gradients = decay, clip_gradients
        self.shared_input = None  # the straight-through backward needs the input itself
        self.register_buffer("seen_amax", self.fresh_state(self.weight.device)["seen_amax"], persistent=False)
        learned = torch.nn.Parameter(self._log2_of_scale()) if self.scales == ScaleUpdate.LEARNED else None
        self.register_parameter("log2_scale", learned)

    def finish(self) -> Linear:
        """Turn the layer back into an ``octavo.nn.Linear`` with the final scale, in place."""
        self.freeze()
        del self.seen_amax, self.log2_scale, self.scales, self.decay, self.clip_gradients
        self.__class__ = Linear  # type: ignore[assignment]
        return self

    @torch.no_grad()
    def freeze(self) -> None:
        """Keep the scale constant from now on."""
        self._load_learned_scale()
        self.scales = ScaleUpdate.FROZEN
        if self.log2_scale is not None:
            self.log2_scale.requires_grad_(False)

    def forward_cast(
        self,
        recipe: Recipe,
        make: Callable[[OperandScaling], tuple[Tensor, InputOperands | None]],
        local: LocalTensors | None = None,
    ) -> Tensor:
        """Compute the converted layer's forward pass, with straight-through gradients."""
        if local is not None:
            raise ConfigError(
                f"{self.called} is shared by ranks, and quantization-aware training takes whole layers; run it without "
                "tensor parallelism, such as under FSDP2"
            )
        if recipe.is_delayed:
            raise ConfigError(
                f"recipe {recipe.name!r} takes its scales from training steps, which the converted model does not "
                "have; use 'static' with scales='tracked' in quantization-aware training"
            )
        x, operands = make(OperandScaling())
        assert operands is None, "operands are cast in advance only for exactly octavo.nn.Linear"
        if recipe.has_static_input:
            assert recipe.output.a is not None
            self._update_scale(x, recipe.output.a)
        scaling = self._layer_scaling(recipe)
        return straight_through_linear(
            x,
            self.weight,
            self.bias,
            recipe,
            weight_operands=self._operands(recipe, scaling),
            scaling=scaling,
            clip_gradients=self.clip_gradients,
            log2_scale=self.log2_scale if self.scales == ScaleUpdate.LEARNED else None,
        )

    @torch.no_grad()
    def _update_scale(self, x: Tensor, spec: CastSpec) -> None:
        """Update the scale for this call, but not again when activation checkpointing recomputes it."""
        if self.scales == ScaleUpdate.FROZEN or inside_backward():
            return
        if self.training and not self._is_initialised:
            self._track_amax(x, spec)
            if self.log2_scale is not None and self.seen_amax > 0:
                self.log2_scale.copy_(self._log2_of_scale())
        self._load_learned_scale()

    def _track_amax(self, x: Tensor, spec: CastSpec) -> None:
        previous = torch.where(self.seen_amax >= 0, self.seen_amax, self.input_scale * spec.format.max)
        self.seen_amax.copy_(torch.maximum(measure(x.detach(), PerTensor()).amax, previous * self.decay))
        scale = scale_from_amax(
            self.seen_amax, spec.format, rounding=spec.scale_rounding, amax_floor=spec.amax_floor, margin=spec.margin
        )
        self.input_scale.copy_(torch.where(self.seen_amax > 0, scale, 1.0))

    @property
    def _is_initialised(self) -> bool:
        return self.log2_scale is not None and bool(self.log2_scale.isfinite())

    def _log2_of_scale(self) -> Tensor:
        """Initial value of a learned scale; for powers of two the middle of the interval that rounds up to it."""
        exponent = self.input_scale.log2()
        return exponent.ceil() - 0.5 if self._is_power_of_two else exponent

    def _load_learned_scale(self) -> None:
        if self._is_initialised and self.scales == ScaleUpdate.LEARNED:
            assert self.log2_scale is not None
            exponent = self.log2_scale.float().clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
            self.input_scale.copy_((exponent.ceil() if self._is_power_of_two else exponent).exp2())

    @property
    def _is_power_of_two(self) -> bool:
        assert self.recipe.output.a is not None
        return self.recipe.output.a.scale_rounding is not ScaleRounding.FP32

    def fresh_state(self, device: torch.device | None) -> dict[str, Tensor]:
        """Initial state of a linear layer, and no tracked amax."""
        no_amax = torch.full((), EMPTY, dtype=torch.float32, device=device)
        return {**super().fresh_state(device), "seen_amax": no_amax}
