"""``octavo.nn.KVCache``: the keys and values of the positions that one attention layer has read so far."""

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.nn.arguments import check_sizes

__all__ = ["KVCache"]


class KVCache:
    """Keys and values [B, max_positions, kv heads, D], allocated once, filled from the front.

    A cache belongs to one layer and one batch; it is handed to ``MultiheadAttention`` or ``TransformerLayer`` and
    advances with every call. It is for inference: what is stored takes no gradient. ``cache.position = 0``
    starts over; a smaller position forgets what follows.

    Args:
        batch_size: B.
        max_positions: how many positions have room.
        num_kv_heads: key and value heads.
        head_dim: width of one head, D.
        device: of the tensors.
        dtype: of the tensors.

    Attributes:
        keys: the buffer of the keys; from ``position`` on its contents mean nothing.
        values: the same for the values.
        position: number of positions that are filled.

    Raises:
        ConfigError: a size below 1.

    Example:
        >>> cache = KVCache(2, 16, num_kv_heads=1, head_dim=4)
        >>> keys, values = cache.append(torch.ones(2, 3, 1, 4), torch.ones(2, 3, 1, 4))
        >>> keys.shape, cache.position
        (torch.Size([2, 3, 1, 4]), 3)
    """

    def __init__(
        self,
        batch_size: int,
        max_positions: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes(batch_size=batch_size, max_positions=max_positions, num_kv_heads=num_kv_heads, head_dim=head_dim)
        shape = batch_size, max_positions, num_kv_heads, head_dim
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.position = 0

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the next positions' keys and values [B, T, kv heads, D].

        Returns:
            Those of all positions so far, views of the buffers.

        Raises:
            ConfigError: another shape, no room, or tensors that want a gradient; nothing is stored then.
        """
        batch, room, *head = self.keys.shape
        if keys.shape != values.shape or [keys.shape[0], *keys.shape[2:]] != [batch, *head]:
            raise ConfigError(
                f"this cache takes keys and values [{batch}, T, {head[0]}, {head[1]}], "
                f"not {tuple(keys.shape)} and {tuple(values.shape)}"
            )
        end = self.position + keys.shape[1]
        if end > room:
            raise ConfigError(
                f"this cache has room for {room} positions, and {end} are needed; make one with more max_positions"
            )
        if keys.requires_grad or values.requires_grad:
            raise ConfigError(
                "a cache keeps no gradients; run the model under torch.no_grad() or torch.inference_mode()"
            )
        self.keys[:, self.position : end] = keys
        self.values[:, self.position : end] = values
        self.position = end
        return self.keys[:, :end], self.values[:, :end]
