"""A language model of four layers, for what conversion does to heads and tied weights."""

import torch
from torch import nn

__all__ = ["TinyLanguageModel"]


class TinyLanguageModel(nn.Module):
    """Embedding, two projections, a head; the head may share the embedding's weight."""

    def __init__(self, *, tied: bool = False, head: str = "lm_head") -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16, bias=False)
        self.head = head
        setattr(self, head, nn.Linear(16, 40, bias=False))
        if tied:
            self.get_submodule(head).weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.get_submodule(self.head)(self.down(self.up(self.embed(tokens)).relu()))
        return logits
