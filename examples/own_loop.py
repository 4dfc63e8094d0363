"""FP8 in a training loop of your own: a small network that guesses the next character of Python's documentation.

    python examples/own_loop.py

Three runs from the same weights on the same batches: FP32, and two FP8 recipes. The loop knows nothing of FP8; one call
to ``octavo.convert`` before it is all.
"""

import pydoc_data.topics

import torch
import torch.nn.functional as F

import octavo

WINDOW, STEPS, BATCH = 16, 150, 128
TEXT = torch.tensor(list("".join(pydoc_data.topics.topics.values()).encode("ascii", "replace")))


def build_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(128, 32),
        torch.nn.Flatten(),
        torch.nn.Linear(WINDOW * 32, 256),
        torch.nn.GELU(),
        torch.nn.Linear(256, 256),
        torch.nn.GELU(),
        torch.nn.Linear(256, 128),
    )


def train(model: torch.nn.Module) -> float:
    """Mean loss of the last fifty steps, in nats a character."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(len(TEXT) - WINDOW, (BATCH, 1), generator=generator)
        window = TEXT[starts + torch.arange(WINDOW + 1)]
        loss = F.cross_entropy(model(window[:, :-1]), window[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-50:]) / 50


def main() -> None:
    print(f"{'fp32':<12}{train(build_model()):.4f} nats a character")
    for recipe in ("tensorwise", "delayed"):
        model = build_model()
        report = octavo.convert(model, recipe, skip=["6"])  # the last layer is this model's head
        print(
            f"{recipe:<12}{train(model):.4f} nats a character; {len(report.converted)} layers in FP8, {report.skipped}"
        )


if __name__ == "__main__":
    main()
