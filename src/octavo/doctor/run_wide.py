"""One cause in most layers is one finding of the run: a recipe's mistake shows in every tensor that it casts."""

from collections.abc import Collection, Iterable
from dataclasses import replace

from octavo.doctor.findings import Finding, worst_first

__all__ = ["run_wide"]

FEWEST = 4  # layers; of fewer each is named
MOST = 0.5  # of the layers


def run_wide(findings: Iterable[Finding], layers: Collection[str]) -> list[Finding]:
    """The findings, worst first, with those of one code that cover more than half of the layers as one.

    Where fewer than four layers have the worst severity of their code, they are named one by one: that a few fail is
    not to be lost among many that warn.

    Args:
        findings: about one run.
        layers: paths of those that cast.

    Example:
        >>> from octavo.doctor.findings import Severity
        >>> paths = [f"layers.{index}" for index in range(5)]
        >>> alike = [Finding(code="saturation", severity=Severity.WARN, path=path, cause="it is") for path in paths]
        >>> print(run_wide(alike, paths)[0])
        warn: saturation at the run, step 0: 5 of 5 FP8 layers; the worst is layers.0: it is
    """
    found = worst_first(list(findings))
    for code in dict.fromkeys(one.code for one in found):
        alike = _without_few([one for one in found if one.code == code and one.path in layers])
        places = _places(alike)
        if len(places) >= FEWEST and len(places) > MOST * len(layers):
            others = [one for one in found if not any(one is same for same in alike)]
            found = [*others, _merged(alike, places, len(layers))]
    return worst_first(found)


def _without_few(alike: list[Finding]) -> list[Finding]:
    while alike:
        worst = [one for one in alike if one.severity is alike[0].severity]
        if len(_places(worst)) >= FEWEST:
            break
        alike = alike[len(worst) :]
    return alike


def _places(findings: Iterable[Finding]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.path for one in findings))


def _merged(alike: list[Finding], places: tuple[str, ...], layers: int) -> Finding:
    worst = alike[0]
    example = f"{worst.path}, {worst.role}" if worst.role else worst.path
    return replace(
        worst,
        path="",
        role=worst.role if all(one.role == worst.role for one in alike) else "",
        first_step=min(one.first_step for one in alike),
        last_step=max(one.last_step for one in alike),
        evidence={**worst.evidence, "layers": float(len(places)), "of": float(layers)},
        cause=f"{len(places)} of {layers} FP8 layers; the worst is {example}: {worst.cause}",
        places=places,
    )
