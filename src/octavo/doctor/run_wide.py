"""Merging of findings that are the same in most layers: a mistake of the recipe shows in every tensor that it casts."""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace

from octavo.doctor.findings import Finding, worst_first

__all__ = ["run_wide"]

MIN_LAYERS = 4  # findings about fewer layers stay separate
MIN_SHARE = 0.5  # of the layers


def run_wide(findings: Iterable[Finding], layers: Collection[str]) -> list[Finding]:
    """Merge findings of one code that cover more than half of the layers; return all findings, worst first.

    If fewer than four layers have the worst severity of their code, their findings stay separate, so that a few
    failures are not hidden among many warnings.

    Args:
        findings: the findings of one run.
        layers: paths of the layers that cast.

    Example:
        >>> from octavo.doctor.findings import Severity
        >>> paths = [f"layers.{index}" for index in range(5)]
        >>> alike = [Finding(code="saturation", severity=Severity.WARN, path=path, cause="it is") for path in paths]
        >>> print(run_wide(alike, paths)[0])
        warn: saturation at the run, step 0: 5 of 5 FP8 layers; the worst is layers.0: it is
    """
    merged = worst_first(list(findings))
    for code in dict.fromkeys(one.code for one in merged):
        same_code = _without_rare_severities([one for one in merged if one.code == code and one.path in layers])
        places = _places(same_code)
        if len(places) >= MIN_LAYERS and len(places) > MIN_SHARE * len(layers):
            others = [one for one in merged if not any(one is same for same in same_code)]
            merged = [*others, _merge(same_code, places, len(layers))]
    return worst_first(merged)


def _without_rare_severities(findings: list[Finding]) -> list[Finding]:
    while findings:
        worst = [one for one in findings if one.severity is findings[0].severity]
        if len(_places(worst)) >= MIN_LAYERS:
            break
        findings = findings[len(worst) :]
    return findings


def _places(findings: Iterable[Finding]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.path for one in findings))


def _merge(alike: list[Finding], places: tuple[str, ...], layers: int) -> Finding:
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
        consequences=dict(sum((Counter(one.consequences) for one in alike), Counter())),
    )
