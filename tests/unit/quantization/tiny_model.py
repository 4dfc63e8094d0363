"""A language model of two layers with a tokenizer, and windows that it can learn."""

import torch
from torch import Tensor

from octavo.language_model import LanguageModel
from octavo.models import Llama
from octavo.text.tokenizer import train_tokenizer
from tests.tiny_llama import tiny_llama_config

VOCABULARY, CONTEXT = 300, 32


def tiny_language_model(*, seed: int = 0, tie: bool = False) -> LanguageModel:
    config = tiny_llama_config(vocab_size=VOCABULARY, intermediate_size=48, max_positions=CONTEXT, tie_embeddings=tie)
    tokenizer = train_tokenizer(["some text, some more text"] * 3, vocab_size=VOCABULARY)
    return LanguageModel(model=Llama(config, seed=seed).eval(), tokenizer=tokenizer, context=CONTEXT, source="a test")


def windows(count: int, *, length: int = 16, seed: int = 0) -> Tensor:
    """Counting upwards, each from a place of its own: the next token follows from the last."""
    starts = torch.randint(VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(seed))
    return (starts + 7 * torch.arange(length)) % VOCABULARY
