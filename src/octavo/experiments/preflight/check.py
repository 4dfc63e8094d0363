"""Result of a preflight check."""

from dataclasses import dataclass

from octavo.doctor import Finding

__all__ = ["Check"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Result of one check.

    Attributes:
        name: name of the check.
        said: the result in words, with its numbers.
        findings: problems; empty if there are none or the check has no result.
        is_known: False if the check has no result.
    """

    name: str
    said: str
    findings: tuple[Finding, ...] = ()
    is_known: bool = True
