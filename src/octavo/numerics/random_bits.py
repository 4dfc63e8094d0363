"""Random bits as a function of a seed and a place, the same on every device.

Philox-4x32-10 turns a key of two 32-bit words and a counter of four into four random words, by ten rounds of two
multiplications: there is no state, so every thread of a GPU makes its own. The key is the seed; element i of a tensor
takes word i % 4 of counter i // 4.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.errors import ConfigError

__all__ = ["philox", "random_bits", "random_bits_by_torch", "seed_from"]

_WORD = 0xFFFF_FFFF
_MULTIPLIERS = (0xD251_1F53, 0xCD9E_8D57)
_KEY_STEPS = (0x9E37_79B9, 0xBB67_AE85)
_ROUNDS = 10


def random_bits(seed: Tensor, shape: Sequence[int], device: torch.device) -> Tensor:
    """32 random bits for each element, int32.

    Args:
        seed: int64 [], on any device.
        shape: of the result.
        device: of the result. A seed on the CPU reaches a GPU without a wait.

    Raises:
        ConfigError: a seed on the CPU while a CUDA graph is captured, which would repeat it.

    Example:
        >>> [hex(word & 0xFFFFFFFF) for word in random_bits(torch.tensor(0), (4,), torch.device("cpu")).tolist()]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    drawn: Tensor = torch.ops.octavo.random_bits(_on(device, seed), torch.Size(shape).numel())
    return drawn.view(tuple(shape))


def _on(device: torch.device, seed: Tensor) -> Tensor:
    if seed.device.type == device.type:
        return seed.to(device)
    if device.type == "cuda" and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            "a CUDA graph would repeat the random bits of a seed on the CPU; give a generator of the tensor's device"
        )
    return seed.new_empty((), device=device).fill_(seed)  # a launch with the seed's value, where a copy would wait


def seed_from(generator: torch.Generator | None) -> Tensor:
    """A seed drawn from a generator, on its device; None is torch's default one of the CPU.

    So the same generator gives a GPU's tensor and a CPU's the same bits.
    """
    device = "cpu" if generator is None else generator.device
    return torch.randint(1 << 62, (), generator=generator, device=device)


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words for every counter; words are the low 32 bits of int64 tensors.

    Args:
        counter: four words, lowest first.
        key: two words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # A product wraps modulo 2^64, which leaves its bits as they are; the shift repeats the sign, the mask drops it.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((second >> 32) & _WORD) ^ c1 ^ k0, second & _WORD
        c2, c3 = ((first >> 32) & _WORD) ^ c3 ^ k1, first & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def random_bits_by_torch(seed: Tensor, count: int) -> Tensor:
    """The formula, for every device."""
    places = torch.arange(-(-count // 4), device=seed.device)
    nothing = torch.zeros_like(places)
    words = philox((places & _WORD, places >> 32, nothing, nothing), (seed & _WORD, (seed >> 32) & _WORD))
    return torch.stack(words, dim=1).view(-1)[:count].to(torch.int32)


# An operator, for which a device may have a faster kernel than this formula.
torch.library.define("octavo::random_bits", "(Tensor seed, SymInt count) -> Tensor")
torch.library.impl("octavo::random_bits", "CompositeExplicitAutograd")(random_bits_by_torch)
