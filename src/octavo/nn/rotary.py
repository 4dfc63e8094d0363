"""Rotary positions: the pair (x[i], x[i + D/2]) of a head turns by position · theta^(-2i / D).

The score of a query and a key then depends on the distance of their positions alone. Pairs are made of a head's first
and second half, as in Hugging Face's models; weights that pair neighbours need their rows reordered.

| tensor   | shape             | note                                                            |
|----------|-------------------|-----------------------------------------------------------------|
| cos, sin | [positions, D]    | float32; the D/2 angles stand twice, once for each half         |
| x        | [B, T, heads, D]  | position t of x takes row t: hand in the rows of its positions  |

Reference: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv 2104.09864, equation 34.
Scaling for longer texts is that of Llama 3.1 (Meta's release of July 2024).
"""

import math
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.nn.arguments import check_sizes

__all__ = ["RotaryScaling", "rotary_table", "rotate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryScaling:
    """Slower rotation of the long wavelengths, as in Llama 3.1, for texts longer than those of pretraining.

    With w = 2π / frequency and L = ``original_positions``:

        w < L / high_frequency_factor    frequency
        w > L / low_frequency_factor     frequency / factor
        between                          frequency · (share + (1 − share) / factor),
                                         share = (L / w − low_frequency_factor) / (high − low)

    Attributes:
        factor: how many times as slow the longest wavelengths turn.
        low_frequency_factor: wavelengths of a text of pretraining from which on all turn so slowly.
        high_frequency_factor: wavelengths from which on none is slowed; more than ``low_frequency_factor``.
        original_positions: length of a text of pretraining.

    Raises:
        ConfigError: a number that is not positive, or factors in the other order.

    Example:
        >>> scaling = RotaryScaling(
        ...     factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=8192
        ... )
        >>> scaling.scaled(torch.tensor([1.0, 0.001, 0.0001]))
        tensor([1.0000e+00, 2.1361e-04, 1.2500e-05])
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int

    def __post_init__(self) -> None:
        if not all(isinstance(each, int | float) and 0 < each < math.inf for each in astuple(self)):
            raise ConfigError(f"numbers of a rotary scaling must be positive, not {astuple(self)}")
        if self.low_frequency_factor >= self.high_frequency_factor:
            raise ConfigError(
                f"low_frequency_factor must be less than high_frequency_factor ({self.high_frequency_factor}), not "
                f"{self.low_frequency_factor}"
            )

    def scaled(self, frequencies: Tensor) -> Tensor:
        """Scale float32 [D/2] radians a position."""
        low, high = self.low_frequency_factor, self.high_frequency_factor
        wavelengths = 2 * math.pi / frequencies
        share = ((self.original_positions / wavelengths - low) / (high - low)).clamp(0, 1)
        return (1 - share) * frequencies / self.factor + share * frequencies


def rotary_table(
    head_dim: int,
    max_positions: int,
    theta: float = 10000.0,
    *,
    scaling: RotaryScaling | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position · theta^(-2i / D), float32 [max_positions, D].

    Args:
        head_dim: width of one head, D; even.
        max_positions: number of rows.
        theta: base of the wavelengths.
        scaling: of the frequencies theta^(-2i / D); None scales none.
        device: of the table.

    Raises:
        ConfigError: an odd ``head_dim``, a size below 1 or a ``theta`` that is not positive.

    Example:
        >>> cos, sin = rotary_table(4, 8)
        >>> cos.shape, cos[0].tolist(), sin[0].tolist()
        (torch.Size([8, 4]), [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0])
    """
    check_sizes(head_dim=head_dim, max_positions=max_positions)
    if head_dim % 2:
        raise ConfigError(f"head_dim must be even, so that a head can be turned in pairs, not {head_dim}")
    if not 0 < theta < math.inf:
        raise ConfigError(f"theta must be a positive number, not {theta!r}")
    exponents = torch.arange(0, head_dim, 2, device=device).float() / head_dim
    frequencies = 1.0 / theta**exponents
    frequencies = frequencies if scaling is None else scaling.scaled(frequencies)
    angles = torch.outer(torch.arange(max_positions, device=device).float(), frequencies)
    both_halves = torch.cat((angles, angles), dim=-1)
    return both_halves.cos(), both_halves.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn every head by its position's angles.

    Args:
        x: [B, T, heads, D].
        cos: [T, D], the rows of the T positions.
        sin: the same.

    Returns:
        The same shape and dtype; computed in the wider of the dtypes of ``x`` and the table, rounded once.

    Raises:
        ConfigError: tables of another shape, or an odd D.

    Example:
        >>> x = torch.ones(1, 3, 2, 4)
        >>> cos, sin = rotary_table(4, 8)
        >>> turned = rotate(x, cos[:3], sin[:3])
        >>> torch.equal(turned[:, 0], x[:, 0]), torch.allclose(turned.norm(dim=-1), x.norm(dim=-1))
        (True, True)
    """
    if x.ndim != 4 or x.shape[3] % 2 or not cos.shape == sin.shape == (x.shape[1], x.shape[3]):
        raise ConfigError(
            "heads [B, T, heads, D] turn by two tables [T, D] with an even D, "
            f"not {tuple(x.shape)} by {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
