"""Faults in FP8 training, with the finding that the doctor must report."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from octavo.doctor import Finding
from octavo.recipes import Recipe
from octavo.training.loop import Trainer

__all__ = ["Fault", "Injection", "nothing"]

Injection = Callable[[Trainer, int], AbstractContextManager[None]]


@contextmanager
def nothing(_trainer: Trainer, _layer: int) -> Iterator[None]:
    """Inject nothing."""
    yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault that is injected into one block of a decoder.

    A run with a fault has two parts. Its *workload* is the data and the model's state that bring the fault out, such
    as an amax that jumps; it changes nothing that high precision would compute, and a run with the workload alone is a
    clean one. The *injection* is the fault: a monkey patch or a setting, there while its context is open.

    Attributes:
        name: a word for tables.
        story: description in one sentence.
        code: the finding's that names the cause.
        places: patterns of paths one of which that finding must name; "{layer}" stands for the number of the block, and
            "" for the run as a whole.
        role: the tensor that it must name; "" for any.
        also: codes of other findings that follow from the fault, in its layer or behind it.
        training: keys of a run's training section, of the run with the fault.
        recipes: recipes of layers, by path, of the run with the fault.
        workload: in the run with the fault, in the cured one and in the clean one.
        inject: in the run with the fault and in the cured one.
        is_remediable: whether a setting of the run can fix it; False for a fault in code or in a separate module.
        ranks: processes that train together.
    """

    name: str
    story: str
    code: str
    places: tuple[str, ...]
    role: str = ""
    also: frozenset[str] = frozenset()
    training: Mapping[str, Any] = field(default_factory=dict)
    recipes: Mapping[str, str | Recipe] = field(default_factory=dict)
    workload: Injection = nothing
    inject: Injection = nothing
    is_remediable: bool = True
    ranks: int = 1

    def explains(self, finding: Finding) -> bool:
        """Return True if the finding is of this fault or of one of its consequences."""
        return finding.code in {self.code, *self.also}

    def is_named_by(self, finding: Finding, layer: int) -> bool:
        """Return True if the finding names cause and place of this fault, injected into block ``layer``."""
        patterns = [place.format(layer=layer) for place in self.places]
        return (
            finding.code == self.code
            and any(fnmatchcase(finding.path, pattern) for pattern in patterns)
            and self.role in ("", finding.role)
        )
