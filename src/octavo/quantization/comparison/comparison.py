"""The comparison people ask for: one language model in several formats, on the same text, beside BF16.

    loop over windows            the reference's logits, then each contestant's, are made and thrown away again
    difference to the reference  paired: the loss differences of the same windows, their mean and its standard error

Windows that are hard for one format are hard for all, so the paired error is far smaller than the spread of the losses.
What must be in memory is every contestant (a copy each, one or two bytes an element) and the logits of two of them for
one window, not the reference's logits for all the text: those are 100 MB a window for a vocabulary of 49,152.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.quantization.comparison.contestants import Contestant
from octavo.quantization.comparison.scores import Scores, WindowScore, score_window
from octavo.quantization.comparison.storage import Storage
from octavo.training.comparison import Gap, paired_gap

__all__ = ["Comparison", "Entry", "compare"]

Advance = Callable[[int, int], None]  # windows done, of all


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What one contestant showed."""

    name: str
    scores: Scores
    storage: Storage
    quantized: int  # linear layers in its format


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All contestants on the same windows.

    Attributes:
        reference: name of the one that the others are compared with.
        entries: in the order given, the reference among them.
        windows: how many windows of text.
        length: tokens of a window; the first of each is not predicted.
    """

    reference: str
    entries: tuple[Entry, ...]
    windows: int
    length: int

    @property
    def tokens(self) -> int:
        """How many tokens each contestant predicted."""
        return self.windows * (self.length - 1)

    def entry(self, name: str) -> Entry:
        """The contestant of that name.

        Raises:
            KeyError: there is none.
        """
        return {entry.name: entry for entry in self.entries}[name]

    def gap(self, name: str) -> Gap:
        """How much more a contestant loses than the reference, window by window."""
        return paired_gap(self.entry(name).scores.window_nats, self.entry(self.reference).scores.window_nats)

    def share_of_bytes(self, name: str) -> float:
        """A contestant's file as a share of the reference's."""
        return self.entry(name).storage.file_bytes / self.entry(self.reference).storage.file_bytes


@torch.no_grad()
def compare(
    contestants: Sequence[Contestant],
    windows: Tensor,
    *,
    reference: str = "bf16",
    advance: Advance = lambda _done, _total: None,
) -> Comparison:
    """Score every contestant on every window.

    Args:
        contestants: each of another name, the reference among them.
        windows: token ids, int64 [count, length].
        reference: name of the contestant that the others are compared with.
        advance: called after every window of a contestant with (done, total).

    Raises:
        ConfigError: there is no such contestant, a name stands twice, or the windows are no windows.
    """
    names = [contestant.name for contestant in contestants]
    if names.count(reference) != 1 or len({*names}) != len(names):
        raise ConfigError(f"the contestants must be different and {reference!r} one of them, not {', '.join(names)}")
    if windows.ndim != 2 or windows.shape[0] < 1 or windows.shape[1] < 2:
        raise ConfigError(f"windows are [count, length] with a length of at least 2, not {tuple(windows.shape)}")
    base = contestants[names.index(reference)]
    found: dict[str, list[WindowScore]] = {name: [] for name in names}
    total = len(windows) * len(names)
    for index, window in enumerate(windows):
        for number, (name, score) in enumerate(_scores(contestants, base, window)):
            found[name].append(score)
            advance(index * len(names) + number + 1, total)
    entries = (
        Entry(name=c.name, scores=Scores(windows=tuple(found[c.name])), storage=c.storage, quantized=len(c.quantized))
        for c in contestants
    )
    return Comparison(reference=reference, entries=tuple(entries), windows=len(windows), length=windows.shape[1])


def _scores(contestants: Sequence[Contestant], base: Contestant, window: Tensor) -> Iterator[tuple[str, WindowScore]]:
    """Every contestant's score of a window, one after the other; beside the reference's no logits are kept."""
    expected = base.logits(window[None, :-1])[0]
    for contestant in contestants:
        score = score_window(
            expected if contestant is base else contestant.logits(window[None, :-1])[0], expected, window[1:]
        )
        yield contestant.name, score
