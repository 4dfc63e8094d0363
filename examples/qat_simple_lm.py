"""The article's quantization-aware training, with FP8 in place of its int8 observers.

    python examples/qat_simple_lm.py

Its model, its three steps and its names, on Python's own documentation instead of random tokens, so that there is
something to learn: smaller, and with a causal mask, without which the layer would read the character it is to guess.

All of ``nn.TransformerEncoderLayer`` is FP8: the projections of its attention, ``linear1`` and ``linear2``. ``lm_head``
is not, unless ``octavo.prepare_qat`` is asked for it. The article calls ``torch.ao.quantization``'s ``prepare_qat`` and
``convert``, which torch deprecates; with ``model.qconfig = octavo.compat.torch_ao.fp8_qconfig()`` they do the same, to
the bit.
"""

import pydoc_data.topics
from collections.abc import Iterable

import torch
from torch import Tensor, nn

import octavo

VOCABULARY, WINDOW, BATCH = 128, 32, 16
TEXT = torch.tensor(list("".join(pydoc_data.topics.topics.values()).encode("ascii", "replace")))


class SimpleLM(nn.Module):
    """The article's: one encoder layer between an embedding and a head."""

    def __init__(self, vocab_size: int, hidden_dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden_dim)
        self.transformer = nn.TransformerEncoderLayer(d_model=hidden_dim, nhead=8, batch_first=True)
        self.lm_head = nn.Linear(hidden_dim, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Token ids [B, T] to logits [B, T, V]."""
        x = self.embed(input_ids)
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        x = self.transformer(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.lm_head(x)
        return logits


def qat_for_fp8(model: nn.Module, train_loader: Iterable[tuple[Tensor, Tensor]], num_epochs: int = 3) -> nn.Module:
    """Train with the arithmetic that the model will have, so that its weights adapt to it."""
    # Step 1: from here on the layers compute in FP8, and scales follow what they see
    print(octavo.prepare_qat(model, "static", scales="tracked"))

    # Step 2: train; gradients pass straight through the rounding
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(num_epochs):
        for batch_idx, (input_ids, labels) in enumerate(train_loader):
            optimizer.zero_grad()
            logits = model(input_ids)
            loss = criterion(logits.view(-1, logits.size(-1)), labels.reshape(-1))
            loss.backward()
            optimizer.step()
            if batch_idx % 10 == 0:
                print(f"Epoch {epoch}, Batch {batch_idx}, Loss: {loss.item():.4f}")

    # Step 3: real FP8 layers, with the scales that training found
    octavo.convert_qat(model)
    return model


def batches(count: int, *, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(TEXT) - WINDOW, (count, BATCH, 1), generator=generator)
    return [(window[:, :-1], window[:, 1:]) for window in TEXT[starts + torch.arange(WINDOW + 1)]]


@torch.no_grad()
def loss_of(model: nn.Module, held_out: list[tuple[Tensor, Tensor]]) -> float:
    losses = [nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten()) for ids, labels in held_out]
    return sum(loss.item() for loss in losses) / len(losses)


def main() -> None:
    torch.manual_seed(0)
    model, held_out = SimpleLM(vocab_size=VOCABULARY, hidden_dim=64), batches(8, seed=2)
    train_loader = batches(60, seed=1)
    quantized_model = qat_for_fp8(model, train_loader, num_epochs=2).eval()
    scales = octavo.scaling_state(quantized_model).items()
    print("QAT complete. Scales: " + ", ".join(f"{name} {scale.item():.4g}" for name, scale in scales))
    print(f"Held-out loss in FP8:                 {loss_of(quantized_model, held_out):.4f} nats a character")
    with octavo.autocast(enabled=False):
        print(f"Held-out loss of its weights in FP32: {loss_of(quantized_model, held_out):.4f}")


if __name__ == "__main__":
    main()
