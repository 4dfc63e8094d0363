"""A tiny model and a tokenizer whose every token is a byte, for what serves them."""

import pytest

from octavo.inference import ModelRunner
from octavo.models import Llama
from tests.tiny_llama import tiny_llama_config


@pytest.fixture(scope="package")
def byte_tokenizer():
    """One token a byte: every character beyond ASCII is cut."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # GPU tests need none

    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


@pytest.fixture(scope="package")
def byte_runner():
    config = tiny_llama_config(vocab_size=256, hidden_size=48, intermediate_size=96, max_positions=320)
    return ModelRunner(Llama(config, seed=3))
