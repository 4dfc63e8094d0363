"""Philox-4x32-10 against its authors' known answers, and what is made of it for a tensor."""

import pytest
import torch

from octavo.numerics.random_bits import philox, random_bits, seed_from

CPU = torch.device("cpu")
KNOWN = (  # counter, key, result: Random123's kat_vectors, philox4x32 10
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
)


def _words(text: str) -> list[torch.Tensor]:
    return [torch.tensor([int(word, 16)]) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN)
def test_known_answers(counter, key, wanted):
    assert [f"{int(word):08x}" for word in philox(_words(counter), _words(key))] == wanted.split()


def test_an_element_has_its_word_whatever_the_shape():
    seed = torch.tensor(0x2999_31D0_A409_3822)
    all_of_them = random_bits(seed, (3, 7), CPU)
    assert torch.equal(all_of_them.view(-1)[:5], random_bits(seed, (5,), CPU))
    for place in (0, 6, 20):
        counter = [torch.tensor([place // 4]), *[torch.tensor([0])] * 3]
        word = philox(counter, (seed & 0xFFFF_FFFF, seed >> 32))[place % 4]
        assert int(all_of_them.view(-1)[place]) & 0xFFFF_FFFF == int(word)


def test_seeds_follow_their_generator():
    one, same, other = (seed_from(torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert one == same
    assert one != other
    assert random_bits(one, (0, 3), CPU).shape == (0, 3)
