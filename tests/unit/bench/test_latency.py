"""Passes are timed in turn and counted by the token."""

import pytest
import torch

from octavo.bench import latency
from octavo.bench.latency import pass_times


class Model:
    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def logits(self, tokens):
        self.calls.append((self.name, tuple(tokens.shape)))
        assert torch.equal(tokens, torch.arange(5).expand_as(tokens))
        return torch.zeros(1)


@pytest.mark.long
def test_formats_alternate_after_an_untimed_round():
    calls: list[tuple[str, tuple[int, ...]]] = []
    seconds = iter([2.0, 30.0, 4.0, 10.0, 3.0, 20.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])

    def clock(run):
        run()
        return next(seconds)

    told: list[tuple[int, int]] = []
    found = pass_times(
        {"a": Model("a", calls), "b": Model("b", calls)},
        torch.arange(5),
        rounds=3,
        clock=clock,
        advance=lambda done, total: told.append((done, total)),
    )
    assert calls == [(name, (batch, 5)) for batch in (1, 16) for _ in range(4) for name in "ab"]
    assert told == [(done, 16) for done in range(16)]
    assert [(time.name, time.batch, time.length, time.latency_ms) for time in found] == [
        ("a", 1, 5, 3000.0), ("b", 1, 5, 20_000.0), ("a", 16, 5, 1000.0), ("b", 16, 5, 1000.0)
    ]  # fmt: skip
    assert found[0].tokens_per_second == pytest.approx(5 / 3)
    assert found[2].tokens_per_second == 80.0


def test_note_depends_on_the_device(monkeypatch):
    """The model's device says it, and not what else the machine has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "no FP8 instructions" in latency.passes_note(torch.device("cpu"))
    assert latency.passes_note(torch.device("cuda")) == "These are times of this GPU."
