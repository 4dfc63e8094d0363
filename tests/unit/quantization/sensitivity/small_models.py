"""A Llama of two blocks that is sure of what it predicts, and text that it wrote itself."""

import torch
from torch import Tensor

from octavo.models import Llama
from tests.tiny_llama import tiny_llama_config

WORDS, LENGTH = 64, 24


def small_llama(*, tied: bool = True, layers: int = 2) -> Llama:
    """Weights six times as large as an untrained model's, so that predictions are far from uniform."""
    config = tiny_llama_config(
        vocab_size=WORDS, intermediate_size=48, num_layers=layers, max_positions=LENGTH, tie_embeddings=tied
    )
    model = Llama(config, seed=3).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    return model


@torch.no_grad()
def windows_of(model: Llama, count: int, *, seed: int = 0) -> Tensor:
    """Tokens [count, LENGTH] drawn from the model's own predictions: it is as sure as it should be."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(WORDS, (count, 1), generator=generator)
    for _ in range(LENGTH - 1):
        probabilities = model(tokens)[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    return tokens
