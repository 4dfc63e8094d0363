"""A linear layer whose ranks each compute a slice of it, as tensor parallelism divides a decoder.

    outputs divided    q, k, v, gate, up and the head: a rank has rows of W, [N/R, K], and computes columns of y
    inputs divided     o and down: a rank has columns of W, [N, K/R], and of x; y is the sum of all ranks' products

An engine casts what a rank has: a scale of a row of x or of W, or of a tensor, is that of the slice. Blocks that end at
a slice's edge, scales from a calibration and those of a folder's weights are the whole layer's.

Each rank's product is rounded to the output's dtype; products are added in the ranks' order, in that dtype. The first
rank adds the bias.

Reference: Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from octavo.engines.linear import gemm_as, input_as, weight_as
from octavo.engines.model import EngineLinear
from octavo.errors import ConfigError
from octavo.numerics import PerBlock, PerRow, QuantizedTensor

__all__ = ["INPUTS", "OUTPUTS", "SlicedLinear", "divided_dimension"]

OUTPUTS, INPUTS = 0, 1  # dimensions of a weight [N, K]
BY_INPUTS = ("o_proj", "down_proj")
BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")


class SlicedLinear(nn.Module):
    """An :class:`EngineLinear` on one rank or several.

    Args:
        layer: the whole layer.
        weight: what the engine loads, as :meth:`octavo.engines.EngineCopies.weights_of` gives it.
        dimension: :data:`OUTPUTS` or :data:`INPUTS`.
        ranks: number of slices.
        own_scales: whether a rank casts its slices with their own scales, as engines do, or with the whole layer's.
        sums: dtype of the ranks' products and of their sum; None is the profile's ``output``.

    Attributes:
        weight_scales: share of the weight's elements whose scale is not the whole weight's.
        input_scales: the same of the input of each pass.

    Raises:
        ConfigError: the ranks do not divide the layer evenly, or end within a block whose scale is to be the whole's.
    """

    def __init__(
        self,
        layer: EngineLinear,
        weight: Tensor | QuantizedTensor,
        *,
        dimension: int,
        ranks: int,
        own_scales: bool = True,
        sums: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.layer, self.dimension, self.ranks, self.own_scales = layer, dimension, ranks, own_scales
        self.profile = replace(layer.profile, output=sums or layer.profile.output)
        if own_scales:
            self.codes = [weight_as(part, self.profile) for part in _slices(weight, dimension, ranks)]
        else:
            self.codes = [part for part in _slices(layer.codes, dimension, ranks) if isinstance(part, QuantizedTensor)]
        self.weight_scales = _other_scales(layer.codes, self.codes, dimension)
        self.input_scales: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N], in the profile's ``activations``."""
        y = self._outputs(x) if self.dimension == OUTPUTS else self._sum(x)
        y = y.to(self.layer.profile.output).to(self.profile.activations)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def _outputs(self, x: Tensor) -> Tensor:
        operand, bias = self._input(x), self.layer.bias
        biases = [None] * self.ranks if bias is None else bias.chunk(self.ranks)
        slices = zip(self.codes, biases, strict=True)
        return torch.cat([gemm_as(operand, codes, self.profile, bias=bias) for codes, bias in slices], dim=-1)

    def _sum(self, x: Tensor) -> Tensor:
        whole = self._input(x)
        operands: Sequence[QuantizedTensor | Tensor]
        if self.own_scales:
            operands = [self._input(part) for part in x.chunk(self.ranks, dim=-1)]
        else:
            operands = _slices(whole, INPUTS, self.ranks)
        if isinstance(whole, QuantizedTensor):
            codes = [each for each in operands if isinstance(each, QuantizedTensor)]
            self.input_scales.append(_other_scales(whole, codes, INPUTS))
        total = gemm_as(operands[0], self.codes[0], self.profile, bias=self.layer.bias)
        for operand, slice_codes in zip(operands[1:], self.codes[1:], strict=True):
            total = total + gemm_as(operand, slice_codes, self.profile)
        return total

    def _input(self, x: Tensor) -> QuantizedTensor | Tensor:
        return input_as(x, self.profile, scale=self.layer.input_scale, amax=self.layer.input_amax)


def divided_dimension(path: str) -> int:
    """Dimension of a layer's weight that ranks divide.

    Raises:
        ConfigError: the name is not that of a layer of Llama's.

    Example:
        >>> divided_dimension("model.layers.0.self_attn.o_proj") == INPUTS
        True
    """
    if path.endswith(BY_INPUTS):
        return INPUTS
    if path.endswith(BY_OUTPUTS):
        return OUTPUTS
    raise ConfigError(f"how ranks divide layers is known of {', '.join((*BY_OUTPUTS, *BY_INPUTS))}, not of {path}")


def _slices(x: QuantizedTensor | Tensor, dimension: int, ranks: int) -> Sequence[QuantizedTensor | Tensor]:
    """Equal slices of a matrix; those of codes have the whole's scales."""
    size = x.shape[dimension]
    if size % ranks:
        raise ConfigError(f"{ranks} ranks cannot share {size} channels evenly")
    if isinstance(x, Tensor):
        return x.chunk(ranks, dimension)
    each, scales = x.granularity, [x.scale] * ranks
    if isinstance(each, PerBlock):
        block = (each.rows, each.columns)[dimension]
        if ranks > 1 and size // ranks % block:
            raise ConfigError(f"{size} channels of {ranks} ranks do not end with a block of {block}")
    if isinstance(each, PerBlock) or (isinstance(each, PerRow) and dimension == OUTPUTS):
        scales = list(x.scale.chunk(ranks, dimension))
    parts = zip(x.data.chunk(ranks, dimension), scales, strict=True)
    return [QuantizedTensor(data.contiguous(), scale.contiguous(), each, x.hp_dtype) for data, scale in parts]


def _other_scales(whole: QuantizedTensor, parts: Sequence[QuantizedTensor], dimension: int) -> float:
    """Share of elements whose scale in its slice is not that of the whole."""
    of_parts = torch.cat([_scale_of_each(part) for part in parts], dim=dimension)
    return float((of_parts != _scale_of_each(whole)).double().mean())


def _scale_of_each(codes: QuantizedTensor) -> Tensor:
    return codes.granularity.expand(codes.fp32_scale, codes.shape).expand(codes.shape)
