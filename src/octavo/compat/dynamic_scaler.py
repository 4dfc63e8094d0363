"""``DynamicScaler`` of the source article, with its method names and corrected numerics.

***Its scale multiplies before the cast**: codes ≈ x · scale, so divide codes by it. In octavo ``scale`` decodes.

| the article's pseudocode                              | here                                                        |
|-------------------------------------------------------|-------------------------------------------------------------|
| 240 as E5M2's maximum                                 | 57344; 240 is a maximum of E4M3 variants                    |
| the window starts with 32 scales of 65536, which bend | it starts empty; the first tensor gives the first scale     |
| the mean for 128 calls                                |                                                             |
| 0.99 is assigned to a variable that is overwritten    | the scale is multiplied by 0.99, and the next call derives  |
| before it is read                                     | no new one                                                  |
| ``maximum / (amax + 1e-8)``, NaN where an element is  | octavo's amax → scale: of the finite elements; a tensor     |
|                                                       | without any, or of zeros, does not change the window        |

As in the article, the scale is the mean of a window of encode scales. It lags behind growing amaxes, and values out of
range saturate; octavo's delayed recipes use the window's largest amax.
"""

from collections import deque

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.formats import E5M2
from octavo.nn.arguments import check_sizes
from octavo.numerics import amax, cast_nearest, encode_scale_from_amax

__all__ = ["DynamicScaler"]

BACKOFF = 0.99  # the article's; a factor of 2 takes 69 overflows


class DynamicScaler:
    """Cast of gradients to E5M2 by the mean of the last scales.

    Args:
        history_size: scales in the window.
        update_freq: calls between two new scales.

    Attributes:
        scale: multiplies before the cast; 1 before the first tensor with an amax.
        history: the window, oldest first.
        overflow_count: overflows seen by :meth:`check_overflow`.

    Raises:
        ConfigError: a size below 1.

    Example:
        >>> scaler = DynamicScaler()
        >>> codes, scale = scaler.scale_tensor(torch.tensor([7.0, -1.0]))
        >>> scale, (codes.float() / scale).tolist()
        (8192.0, [7.0, -1.0])
    """

    def __init__(self, history_size: int = 32, update_freq: int = 4) -> None:
        check_sizes(history_size=history_size, update_freq=update_freq)
        self.update_freq = update_freq
        self.history: deque[float] = deque(maxlen=history_size)
        self.scale = 1.0
        self.iteration = 0
        self.overflow_count = 0
        self._backed_off = False

    @torch.no_grad()
    def scale_tensor(self, x: Tensor, update_freq: int | None = None) -> tuple[Tensor, float]:
        """Cast ``x`` after adding its amax to the window, every ``update_freq`` calls.

        Args:
            x: float16, bfloat16, float32 or float64. Zeros, NaN and ±Inf are preserved.
            update_freq: update frequency for this call; None is the scaler's.

        Returns:
            float8_e5m2 codes, saturated at ±57344, and the encode scale, exact in float32.
        """
        check_sizes(update_freq=update_freq)
        due = self.iteration % (update_freq or self.update_freq) == 0 or not self.history
        if due and not self._backed_off:
            self._update(amax(x))
        self.iteration += 1
        self._backed_off = False
        return cast_nearest(x, E5M2, torch.tensor(self.scale, dtype=torch.float32, device=x.device)), self.scale

    def check_overflow(self, x: Tensor) -> bool:
        """Return True if ``x`` holds NaN or ±Inf; then reduce the scale, and keep it for the next call.

        Args:
            x: any floating dtype, codes included.
        """
        if not x.is_floating_point():
            raise ConfigError(f"check_overflow takes a floating tensor, not {x.dtype}")
        widened = x.float() if x.itemsize == 1 else x
        if bool(widened.isfinite().all()):
            return False
        self.overflow_count += 1
        self.scale = _float32(self.scale * BACKOFF)
        self._backed_off = True
        return True

    def _update(self, largest: Tensor) -> None:
        if largest > 0:
            self.history.append(encode_scale_from_amax(largest, E5M2).item())
            self.scale = _float32(sum(self.history) / len(self.history))


def _float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32, device="cpu").item()
