# The training and inference program of the article that octavo implements, written for Transformer Engine; only its
# import line is another. It draws new random labels for every batch, so that no model's loss can fall below
# ln 1000 = 6.91; the falling losses in the article are not of this program. The example shows only that it runs.
#
#     python examples/article_training.py
#
# ruff: noqa: D102, D200, D205, D212, D415, F401, I001, PLR0402
# fmt: off
"""
FP8 Training Example with NVIDIA Transformer Engine
Requires: pip install transformer-engine torch
"""

import torch
import torch.nn as nn
import torch.optim as optim
from octavo.compat.transformer_engine.pytorch import fp8_autocast, TransformerLayer
from torch.distributed import init_process_group
import os

# Simulated distributed setup (single GPU for demo)
torch.manual_seed(42)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

class SimpleTinyTransformer(nn.Module):
    """Minimal transformer for demonstration."""
    def __init__(self, vocab_size=1000, hidden_dim=256, num_layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden_dim)
        self.layers = nn.ModuleList([
            TransformerLayer(
                hidden_size=hidden_dim,
                ffn_hidden_size=hidden_dim * 4,
                num_attention_heads=4,
            )
            for _ in range(num_layers)
        ])
        self.norm = nn.LayerNorm(hidden_dim)
        self.lm_head = nn.Linear(hidden_dim, vocab_size)

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, attention_mask=attention_mask)
        x = self.norm(x)
        logits = self.lm_head(x)
        return logits

def train_with_fp8():
    """
    Train a small transformer with FP8 precision using Transformer Engine.
    """
    # Setup
    model = SimpleTinyTransformer(vocab_size=1000, hidden_dim=256, num_layers=2)
    model = model.to(device)

    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()

    # Synthetic data
    batch_size = 8
    seq_len = 64
    num_batches = 10

    print("Starting FP8 training...")
    print(f"Device: {device}")
    print(f"Model Parameters: {sum(p.numel() for p in model.parameters()):,}")

    # Training loop with FP8 autocast
    model.train()
    for batch_idx in range(num_batches):
        # Generate synthetic batch
        input_ids = torch.randint(0, 1000, (batch_size, seq_len), device=device)
        labels = torch.randint(0, 1000, (batch_size, seq_len), device=device)

        optimizer.zero_grad()

        # FP8 forward/backward: the magic happens inside fp8_autocast
        # Weights, activations cast to E4M3; gradients to E5M2
        with fp8_autocast(enabled=True):
            logits = model(input_ids)
            loss = criterion(logits.view(-1, logits.size(-1)), labels.view(-1))

        loss.backward()

        # Optional: gradient clipping (common with FP8 to prevent scale overflow)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)

        optimizer.step()

        print(f"Batch {batch_idx:2d} | Loss: {loss.item():.4f}")

    print("\nTraining complete!")
    return model

def inference_example(model):
    """
    Run inference with the trained model.
    """
    model.eval()
    batch_size = 4
    seq_len = 32

    with torch.no_grad():
        input_ids = torch.randint(0, 1000, (batch_size, seq_len), device=device)

        # FP8 inference: automatic format selection
        with fp8_autocast(enabled=True):
            logits = model(input_ids)
            predictions = torch.argmax(logits, dim=-1)

        print(f"\nInference Output Shape: {predictions.shape}")
        print(f"Sample Predictions (first token, first 5 samples):\n{predictions[0, :5]}")

if __name__ == "__main__":
    # Train
    model = train_with_fp8()

    # Infer
    inference_example(model)
