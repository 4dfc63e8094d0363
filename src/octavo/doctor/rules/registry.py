"""Every rule, in the order in which causes come before consequences."""

from collections.abc import Callable, Iterator

from octavo.doctor.findings import Finding
from octavo.doctor.series import Series
from octavo.doctor.thresholds import Thresholds

__all__ = ["RULES", "Rule"]

Rule = Callable[[Series, Thresholds], Iterator[Finding]]

RULES: tuple[Rule, ...] = ()
