"""The source article's ``DynamicScaler``, with its method names and its idea, and with numbers that hold.

**Its scale multiplies before the cast**: codes ≈ x · scale, so divide codes by it. Everywhere else in octavo ``scale``
decodes.

| the article's pseudocode                              | here                                                        |
|-------------------------------------------------------|-------------------------------------------------------------|
| 240 as E5M2's maximum                                 | 57344; 240 is a maximum of E4M3 variants                    |
| the window starts with 32 scales of 65536, which bend | it starts empty; the first tensor gives the first scale     |
| the mean for 128 calls                                |                                                             |
| 0.99 goes to a variable that nothing reads before it  | the scale in use becomes 0.99 of itself, and the next call  |
| is overwritten                                        | derives no new one                                          |
| ``maximum / (amax + 1e-8)``, NaN where an element is  | octavo's amax → scale: of the finite elements; a tensor     |
|                                                       | without any, or of zeros, leaves the window as it is        |

What remains is the article's: the mean of a window of encode scales. While amaxes grow it lags behind, and what lies
beyond the maximum saturates; octavo's own delayed recipes take the window's largest amax.
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
    """Casts gradients to E5M2 by the mean of the last scales.

    Args:
        history_size: scales in the window.
        update_freq: calls between two new scales.

    Attributes:
        scale: multiplies before the cast; 1 until a tensor with an amax was seen.
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
        """Cast ``x`` and, every ``update_freq`` calls, let its amax enter the window first.

        Args:
            x: float16, bfloat16, float32 or float64. Zeros stay zeros, NaN and ±Inf stay what they are.
            update_freq: of this call; None is the scaler's.

        Returns:
            float8_e5m2 codes, saturated at ±57344, and the scale that multiplied: exactly a float32.
        """
        check_sizes(update_freq=update_freq)
        due = self.iteration % (update_freq or self.update_freq) == 0 or not self.history
        if due and not self._backed_off:
            self._update(amax(x))
        self.iteration += 1
        self._backed_off = False
        return cast_nearest(x, E5M2, torch.tensor(self.scale, dtype=torch.float32, device=x.device)), self.scale

    def check_overflow(self, x: Tensor) -> bool:
        """Whether ``x`` holds NaN or ±Inf; if so, the scale backs off and the next call derives no new one.

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
