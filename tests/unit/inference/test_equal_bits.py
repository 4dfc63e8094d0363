"""octavo's server: a token's logits have the same bits in prefill, in decoding, alone and in company."""

import pytest
import torch

from octavo.formats import BF16, E4M3, FP32
from octavo.inference import ModelRunner
from octavo.kernels import native_bindings
from octavo.models import Llama
from tests.tiny_llama import tiny_llama_config

LENGTHS = (97, 64, 3)


@pytest.mark.parametrize("level", native_bindings.levels())
@pytest.mark.parametrize("recipe", ["fp8", "fp8-dynamic"])
@pytest.mark.parametrize("fmt", [E4M3, BF16, FP32], ids=str)
def test_a_token_has_the_same_bits_in_every_way(fmt, recipe, level):
    config = tiny_llama_config(vocab_size=60, hidden_size=72, intermediate_size=200, num_heads=6, max_positions=128)
    runner = ModelRunner(Llama(config, seed=3), recipe=recipe, level=level)
    texts = [torch.randint(60, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    prefill = [runner(text, runner.new_cache(fmt=fmt), every=True) for text in texts]
    for text, whole in zip(texts, prefill, strict=True):
        for sizes in ([1] * len(text), [2, len(text) - 2]):
            cache = runner.new_cache(fmt=fmt)
            parts = [runner(part, cache, every=True) for part in text.split(sizes)]
            assert torch.equal(torch.cat(parts), whole)
    batch = runner.new_batch(len(texts), fmt=fmt)
    for text, sequence in zip(texts, batch.sequences, strict=True):
        runner(text[:-2], sequence)
    for place in (-2, -1):
        together = runner.step(torch.stack([text[place] for text in texts]), batch)
        assert torch.equal(together, torch.stack([whole[place] for whole in prefill]))
