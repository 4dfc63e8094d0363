"""Tables of findings and remedies, and the exit code of a command that prints them."""

from collections.abc import Iterator, Sequence

from octavo.cli.console import number, print_table
from octavo.doctor import Finding, Remedy, Severity

__all__ = ["counts", "exit_code_of", "print_findings", "print_remedies"]

FAILED = 1
MODELLED = "time (modelled)"  # without a GPU: modelled time of a tensor core's GEMMs


def exit_code_of(findings: Sequence[Finding]) -> int:
    """1 if a finding fails, 0 otherwise."""
    return FAILED if any(finding.severity is Severity.FAIL for finding in findings) else 0


def counts(findings: Sequence[Finding]) -> str:
    """Number of findings by severity, such as "1 fail, 2 note"."""
    numbers = {severity: sum(finding.severity is severity for finding in findings) for severity in Severity}
    return ", ".join(f"{count} {severity}" for severity, count in numbers.items() if count)


def print_findings(findings: Sequence[Finding]) -> None:
    """Print a table of findings, worst first; print nothing if there are none."""
    if findings:
        columns = ["severity", "finding", "where", "steps", "cause and evidence"]
        print_table("Findings", columns, map(_cells, findings), left=len(columns))


def print_remedies(findings: Sequence[Finding]) -> None:
    """Print the first remedy of each finding, with the result of replaying the captured layer."""
    first_remedies = [(finding, finding.remedies[0]) for finding in findings if finding.remedies]
    if first_remedies:
        rows = [[finding.code, _place(finding), remedy.text, *_proof(remedy)] for finding, remedy in first_remedies]
        time = "time" if any(remedy.is_time_measured for _, remedy in first_remedies) else MODELLED
        columns = ["finding", "where", "remedy", "error removed", time, "bytes"]
        print_table("First remedies", columns, rows, left=3)


def _cells(finding: Finding) -> list[str]:
    evidence = ", ".join(_evidence(finding))
    what = f"{finding.explanation} ({evidence})" if evidence else finding.explanation
    steps = finding.steps.removeprefix("steps ").removeprefix("step ")
    return [finding.severity, finding.code, _place(finding), steps, what]


def _place(finding: Finding) -> str:
    return " ".join(filter(None, (finding.path, finding.role))) or "the run"


def _evidence(finding: Finding) -> Iterator[str]:
    for name, value in finding.evidence.items():
        yield f"{name.replace('_', ' ')} {number(value, 3)}"


def _proof(remedy: Remedy) -> list[str]:
    removed = number(None) if remedy.error_removed is None else f"{remedy.error_removed:.0%}"
    ratios = (remedy.time_ratio, remedy.bytes_ratio)
    return [removed, *(number(None) if ratio is None else f"{ratio:.2f}×" for ratio in ratios)]
