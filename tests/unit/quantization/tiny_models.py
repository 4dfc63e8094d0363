"""A decoder of two layers as a language model, and text that it knows nothing of."""

from dataclasses import replace

import torch

from octavo.language_model import LanguageModel
from octavo.models import Llama
from octavo.text.tokenizer import train_tokenizer
from tests.tiny_llama import tiny_llama_config

VOCABULARY, CONTEXT, HEADS, HEAD_DIM = 300, 64, 2, 16
LINEARS = 14  # of two layers
SHAPE = tiny_llama_config(
    vocab_size=VOCABULARY,
    hidden_size=4 * HEAD_DIM,
    intermediate_size=96,
    num_kv_heads=HEADS,
    max_positions=CONTEXT,
    tie_embeddings=True,
)


def language_model(*, tied: bool = True) -> LanguageModel:
    """Weights large enough that formats differ."""
    model = Llama(replace(SHAPE, tie_embeddings=tied), seed=3).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)
    tokenizer = train_tokenizer(["some text, some more text"] * 3, vocab_size=VOCABULARY)
    return LanguageModel(model=model, tokenizer=tokenizer, context=CONTEXT, source="a test")


def windows(count: int = 3, length: int = 24) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (count, length), generator=generator)


def model_with_a_window_of_zeros() -> tuple[LanguageModel, torch.Tensor]:
    """A model, and two windows of 8 tokens: any, and those of a token whose embedding, and so every logit, is zero."""
    model = language_model()
    with torch.no_grad():
        model.model.get_parameter("model.embed_tokens.weight")[0] = 0
    return model, torch.stack([windows(1, 8)[0].clamp(min=1), torch.zeros(8, dtype=torch.long)])
