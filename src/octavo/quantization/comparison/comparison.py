"""Comparison of one language model in several formats with BF16, on the same text.

    loop over windows            compute the reference's logits, then each variant's; discard them after scoring
    difference to the reference  paired: loss differences of the same windows, their mean and its standard error

Windows that are hard for one format are hard for all, so the paired error is far smaller than the spread of the losses.
Memory holds every variant (one copy each, one or two bytes an element) and the logits of two of them for one window.
The reference's logits for all the text would take 100 MB a window for a vocabulary of 49,152.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.quantization.comparison.scores import Scores, WindowScore, score_window
from octavo.quantization.comparison.storage import Storage
from octavo.quantization.comparison.variants import FormatVariant
from octavo.training.comparison import Gap, paired_gap

__all__ = ["Entry", "FormatComparison", "compare"]

Advance = Callable[[int, int], None]  # windows done, of all


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Scores and size of one variant."""

    name: str
    scores: Scores
    storage: Storage
    quantized: int  # linear layers in its format


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatComparison:
    """Results of all variants on the same windows.

    Attributes:
        reference: name of the variant that the others are compared with.
        entries: in the order given, including the reference.
        windows: number of text windows.
        length: tokens per window; the first is not predicted.
    """

    reference: str
    entries: tuple[Entry, ...]
    windows: int
    length: int

    @property
    def tokens(self) -> int:
        """Number of tokens predicted by each variant."""
        return self.windows * (self.length - 1)

    def entry(self, name: str) -> Entry:
        """Entry of the variant with that name.

        Raises:
            KeyError: there is no such variant.
        """
        return {entry.name: entry for entry in self.entries}[name]

    def gap(self, name: str) -> Gap:
        """Paired loss difference between a variant and the reference."""
        return paired_gap(self.entry(name).scores.window_nats, self.entry(self.reference).scores.window_nats)

    def share_of_bytes(self, name: str) -> float:
        """File size of a variant relative to the reference's."""
        return self.entry(name).storage.file_bytes / self.entry(self.reference).storage.file_bytes


@torch.no_grad()
def compare(
    variants: Sequence[FormatVariant],
    windows: Tensor,
    *,
    reference: str = "bf16",
    advance: Advance = lambda _done, _total: None,
) -> FormatComparison:
    """Score every variant on every window.

    Args:
        variants: with distinct names, including the reference.
        windows: token ids, int64 [count, length].
        reference: name of the variant that the others are compared with.
        advance: called after each window of each variant with (done, total).

    Raises:
        ConfigError: the reference is missing, a name occurs twice, or ``windows`` has another shape.
    """
    names = [variant.name for variant in variants]
    if names.count(reference) != 1 or len({*names}) != len(names):
        raise ConfigError(f"the formats must be distinct and include {reference!r}, not {', '.join(names)}")
    if windows.ndim != 2 or windows.shape[0] < 1 or windows.shape[1] < 2:
        raise ConfigError(f"windows are [count, length] with a length of at least 2, not {tuple(windows.shape)}")
    base = variants[names.index(reference)]
    scores: dict[str, list[WindowScore]] = {name: [] for name in names}
    total = len(windows) * len(names)
    for index, window in enumerate(windows):
        for number, (name, score) in enumerate(_scores(variants, base, window)):
            scores[name].append(score)
            advance(index * len(names) + number + 1, total)
    entries = (
        Entry(name=c.name, scores=Scores(windows=tuple(scores[c.name])), storage=c.storage, quantized=len(c.quantized))
        for c in variants
    )
    return FormatComparison(reference=reference, entries=tuple(entries), windows=len(windows), length=windows.shape[1])


def _scores(
    variants: Sequence[FormatVariant], base: FormatVariant, window: Tensor
) -> Iterator[tuple[str, WindowScore]]:
    """Score of each variant in one window; only the reference's logits are kept between them."""
    expected = base.logits(window[None, :-1])[0]
    for variant in variants:
        score = score_window(
            expected if variant is base else variant.logits(window[None, :-1])[0], expected, window[1:]
        )
        yield variant.name, score
