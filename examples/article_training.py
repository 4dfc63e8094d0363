"""The article's complete training and inference example, on any device: only its import line is another.

    python examples/article_training.py

Its ``TransformerLayer`` takes [sequence, batch, hidden] unless told otherwise, and the script hands it batch-first
tensors, so that attention runs along the batch. That is the article's; it does no harm to random tokens. In a program
of your own write ``attn_input_format="bshd"``.

One thing is changed. The article draws new random labels for every batch: nothing connects them with the inputs, so the
best any model can do is to give each of the 1000 tokens the same probability, a loss of ln 1000 = 6.91, and the falling
losses that it prints cannot come from this loop. Here one batch, drawn once, is learnt by heart.
"""

import math

import torch
from torch import nn, optim

from octavo.compat.transformer_engine.pytorch import TransformerLayer, fp8_autocast

VOCAB_SIZE, HIDDEN_DIM, NUM_LAYERS = 1000, 256, 2
BATCH_SIZE, SEQ_LEN, NUM_BATCHES = 8, 64, 10

torch.manual_seed(42)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class SimpleTinyTransformer(nn.Module):
    """An embedding, two layers, a norm and a head."""

    def __init__(self, vocab_size: int, hidden_dim: int, num_layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden_dim)
        self.layers = nn.ModuleList(
            TransformerLayer(hidden_size=hidden_dim, ffn_hidden_size=hidden_dim * 4, num_attention_heads=4)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(hidden_dim)
        self.lm_head = nn.Linear(hidden_dim, vocab_size)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of every position."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, attention_mask=attention_mask)
        logits: torch.Tensor = self.lm_head(self.norm(x))
        return logits


def train_with_fp8() -> nn.Module:
    model = SimpleTinyTransformer(VOCAB_SIZE, HIDDEN_DIM, NUM_LAYERS).to(device)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    print(f"device: {device}")
    print(f"parameters: {sum(p.numel() for p in model.parameters()):,}")
    print(f"loss of a uniform guess: {math.log(VOCAB_SIZE):.4f}")
    input_ids = torch.randint(0, VOCAB_SIZE, (BATCH_SIZE, SEQ_LEN), device=device)
    labels = torch.randint(0, VOCAB_SIZE, (BATCH_SIZE, SEQ_LEN), device=device)
    model.train()
    for step in range(NUM_BATCHES):
        optimizer.zero_grad()
        # Inputs and weights of the layers' GEMMs are cast to E4M3, gradients in the backward pass to E5M2.
        with fp8_autocast(enabled=True):
            logits = model(input_ids)
            loss = criterion(logits.view(-1, logits.size(-1)), labels.view(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        print(f"batch {step:2d} | loss {loss.item():.4f}")
    return model


def inference_example(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad(), fp8_autocast(enabled=True):
        logits = model(torch.randint(0, VOCAB_SIZE, (4, 32), device=device))
        predictions = logits.argmax(dim=-1)
    print(f"predictions: {list(predictions.shape)}, the first sequence starts with {predictions[0, :5].tolist()}")


if __name__ == "__main__":
    inference_example(train_with_fp8())
