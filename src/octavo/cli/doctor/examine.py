"""``octavo doctor RUN``: what a run's statistics show, worst first; ``octavo doctor --env``: what this machine has."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli import options
from octavo.cli.console import number, print_json, print_table, stdout
from octavo.cli.doctor.environment import show_environment
from octavo.cli.runs import check_is_run
from octavo.doctor import Finding, Severity, diagnose
from octavo.errors import ConfigError
from octavo.training.watched_run import WatchedRun, watched_run

__all__ = ["examine", "exit_code_of", "print_findings"]

FAILED = 1


def examine(
    *,
    run_dir: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="A run's folder; it may still be training.")
    ] = None,
    env: Annotated[bool, typer.Option("--env", help="Show versions, devices, native kernels, who multiplies.")] = False,
    as_json: options.Json = False,
) -> None:
    """Read a run's statistics and print what is wrong, worst first."""
    if env:
        _refuse_run(run_dir)
        show_environment(as_json=as_json)
        return
    if run_dir is None:
        raise ConfigError("name a run's folder, or ask for --env: what octavo found on this machine")
    check_is_run(run_dir)
    run = watched_run(run_dir)
    findings = diagnose(run.series)
    if as_json:
        print_json({**_facts(run), "findings": [asdict(finding) for finding in findings]})
    else:
        print_findings(findings)
        stdout().print(_summary(run, findings), markup=False, soft_wrap=True)
    raise typer.Exit(exit_code_of(findings))


def exit_code_of(findings: list[Finding]) -> int:
    """1 if a finding fails, 0 otherwise."""
    return FAILED if any(finding.severity is Severity.FAIL for finding in findings) else 0


def print_findings(findings: list[Finding]) -> None:
    """A table, worst first; nothing where there is none."""
    if findings:
        columns = ["severity", "finding", "where", "steps", "what, by which numbers"]
        print_table("Findings", columns, map(_cells, findings), left=len(columns))


def _refuse_run(run_dir: Path | None) -> None:
    if run_dir is not None:
        raise ConfigError("--env is about this machine and takes no run; leave one of them out")


def _cells(finding: Finding) -> list[str]:
    place = " ".join(filter(None, (finding.path, finding.role))) or "the run"
    steps = str(finding.first_step)
    if finding.last_step != finding.first_step:
        steps = f"{steps}-{finding.last_step}"
    evidence = ", ".join(_evidence(finding))
    return [
        finding.severity,
        finding.code,
        place,
        steps,
        f"{finding.cause} ({evidence})" if evidence else finding.cause,
    ]


def _evidence(finding: Finding) -> Iterator[str]:
    for name, value in finding.evidence.items():
        yield f"{name.replace('_', ' ')} {number(value, 3)}"


def _facts(run: WatchedRun) -> dict[str, Any]:
    return {
        "run": str(run.run_dir),
        "step": run.step,
        "steps": run.steps,
        "looks": run.looks,
        "layers": run.layers,
    }


def _summary(run: WatchedRun, findings: list[Finding]) -> str:
    so_far = f" of {run.steps}" if run.steps and run.step < run.steps else ""
    times = "once" if run.looks == 1 else f"{run.looks} times"
    looked = f"{run.layers} layers, looked at {times} up to step {run.step}{so_far}"
    if not findings:
        return f"healthy: nothing found in {looked}"
    counts = {severity: sum(finding.severity is severity for finding in findings) for severity in Severity}
    return f"{', '.join(f'{count} {severity}' for severity, count in counts.items() if count)}, in {looked}"
