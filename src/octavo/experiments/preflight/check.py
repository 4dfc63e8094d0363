"""The result of a check."""

from dataclasses import dataclass

from octavo.doctor import Finding

__all__ = ["Check"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was tried.

    Attributes:
        name: what was tried.
        said: what came out, with its numbers, whether or not it is a finding.
        findings: none where all is well, or nothing is known.
        is_known: whether the check could tell.
    """

    name: str
    said: str
    findings: tuple[Finding, ...] = ()
    is_known: bool = True
