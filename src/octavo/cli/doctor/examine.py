"""``octavo doctor RUN``: what a run's statistics show, worst first; ``octavo doctor --env``: what this machine has."""

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli import options
from octavo.cli.console import number, print_json, stderr, stdout
from octavo.cli.doctor.environment import show_environment
from octavo.cli.doctor.printing import counts, exit_code_of, print_findings, print_remedies
from octavo.cli.progress import open_display
from octavo.cli.targets import check_target
from octavo.doctor import Captures, Finding, Severity, diagnose
from octavo.doctor.histograms import histograms_of
from octavo.doctor.losses import newest_gap
from octavo.doctor.remedies import applied, ranked
from octavo.errors import ConfigError, DataError
from octavo.files import write_atomically
from octavo.models.sources import has_run
from octavo.reports.doctor import doctor_page
from octavo.training.config import RunConfig, config_from_dict, save_config
from octavo.training.run_folder import CAPTURES, CONFIG
from octavo.training.watched_run import WatchedRun, check_comparable, read_run, watched_run

__all__ = ["examine"]


def examine(
    *,
    run_dir: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="A run's folder; it may still be training.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option("--against", metavar="RUN", help="The same run in BF16, to compare the loss with.")
    ] = None,
    fixed: Annotated[
        Path | None,
        typer.Option("--apply", metavar="FILE", help="Write the configuration with every finding's first remedy."),
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page to look at: loss, heat map, findings.")
    ] = None,
    env: Annotated[bool, typer.Option("--env", help="Show versions, devices, native kernels, who multiplies.")] = False,
    as_json: options.Json = False,
) -> None:
    """Read a run's statistics and print what is wrong, worst first, and what mends it."""
    if env:
        _refuse_beside_env({"run": run_dir, "--against": against, "--apply": fixed, "--html": page})
        show_environment(as_json=as_json)
        return
    if run_dir is None:
        raise ConfigError("name a run's folder, or ask for --env: what octavo found on this machine")
    _check_targets({"--html": page, "--apply": fixed}, [path for path in (run_dir, against) if path is not None])
    run, reference = _runs(run_dir, against)
    config = None if fixed is None else _config_to_mend(run)
    found = diagnose(run.series, reference=None if reference is None else reference.series)
    findings = _with_proof(found, run)
    if as_json:
        print_json({**_facts(run, reference), "findings": [asdict(finding) for finding in findings]})
    else:
        print_findings(findings)
        print_remedies(findings)
        stdout().print("\n".join(_summary(run, reference, findings)), markup=False, soft_wrap=True)
    if page is not None:
        _write_page(run, reference, findings, page)
    if fixed is not None and config is not None:
        _write_mended(config, findings, fixed, run_dir)
    raise typer.Exit(exit_code_of(findings))


def _refuse_beside_env(given: Mapping[str, Path | None]) -> None:
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"--env is about this machine and takes no {name}; leave one of them out")


def _check_targets(targets: Mapping[str, Path | None], run_dirs: Sequence[Path]) -> None:
    """Refuse files that cannot be written, one for two options, and any in a run's folder but a page at its top."""
    taken: dict[Path, str] = {}
    for option, target in targets.items():
        if target is None:
            continue
        check_target(option, target)
        whole = target.resolve()
        if whole in taken:
            raise ConfigError(f"{taken[whole]} and {option} both name {str(target)!r}; name another file for one")
        taken[whole] = option
        is_page = option == "--html" and whole.suffix == ".html"
        for run_dir in run_dirs:
            folder = run_dir.resolve()
            if whole.is_relative_to(folder) and not (is_page and whole.parent == folder):
                raise ConfigError(
                    f"{option}: {str(target)!r} lies in {str(run_dir)!r}, whose files say what that run is; "
                    "name another file, outside of it"
                )


def _runs(run_dir: Path, against: Path | None) -> tuple[WatchedRun, WatchedRun | None]:
    run = watched_run(run_dir)
    if against is None:
        return run, None
    reference = read_run(against)
    check_comparable(run, reference)
    return run, reference


def _with_proof(findings: list[Finding], run: WatchedRun) -> list[Finding]:
    """The findings, their remedies ranked by a replay where a layer was captured and can be replayed."""
    captures = Captures(run.run_dir / CAPTURES)
    if not findings or not captures.files():
        return findings
    proven = []
    with open_display() as display:
        advance = display.phase("replay remedies", len(findings))
        for done, finding in enumerate(findings, 1):
            try:
                proven.append(replace(finding, remedies=ranked(finding, captures, series=run.series)))
            except DataError as error:  # of one capture; what was found does not depend on it
                display.say(f"remedies of {finding.code} at {finding.path} are not ranked: {error}")
                proven.append(finding)
            advance(done)
    return proven


def _config_to_mend(run: WatchedRun) -> RunConfig:
    if run.config is None:
        raise ConfigError(f"--apply changes a run's {CONFIG}, and {str(run.run_dir)!r} has none; leave it out")
    return run.config


def _write_mended(config: RunConfig, findings: list[Finding], fixed: Path, run_dir: Path) -> None:
    """Write what the first remedies of warnings and failures make of a configuration; say how to train it."""
    serious = [finding for finding in findings if finding.severity is not Severity.NOTE]
    remedies = [finding.remedies[0] for finding in serious if finding.remedies]
    mended = config_from_dict(applied(config.to_dict(), remedies))
    if mended == config:
        line = f"{fixed} is not written: nothing was found that a configuration mends"
    else:
        save_config(mended, fixed)
        command = ["octavo", "train", "--config", str(fixed), "--out", str(_free_folder(run_dir))]
        line = f"{fixed} holds the remedies; train with {shlex.join(command)}"
    stderr().print(line, markup=False, soft_wrap=True)


def _free_folder(run_dir: Path) -> Path:
    """Beside the run, where no other is yet."""
    names = (f"{run_dir}-fixed{number or ''}" for number in itertools.count())
    return next(path for path in map(Path, names) if not has_run(path))


def _write_page(run: WatchedRun, reference: WatchedRun | None, findings: list[Finding], page: Path) -> None:
    content = doctor_page(
        run.series,
        findings,
        title=run.run_dir.resolve().name,
        reference=None if reference is None else reference.series,
        histograms=histograms_of(findings, Captures(run.run_dir / CAPTURES), series=run.series),
    )
    write_atomically(page, content)
    stderr().print(f"{page} holds the page", markup=False, soft_wrap=True)


def _facts(run: WatchedRun, reference: WatchedRun | None) -> dict[str, Any]:
    gap = None if reference is None else newest_gap(run.series, reference.series)
    return {
        "run": str(run.run_dir),
        "against": None if reference is None else str(reference.run_dir),
        "gap": None if gap is None else asdict(gap),
        "step": run.step,
        "steps": run.steps,
        "looks": run.looks,
        "layers": run.layers,
    }


def _summary(run: WatchedRun, reference: WatchedRun | None, findings: list[Finding]) -> Iterator[str]:
    if reference is not None:
        yield _gap_sentence(run, reference)
    so_far = f" of {run.steps}" if run.steps and run.step < run.steps else ""
    times = "once" if run.looks == 1 else f"{run.looks} times"
    looked = f"{run.layers} layers, looked at {times} up to step {run.step}{so_far}"
    if findings:
        yield f"{counts(findings)}, in {looked}"
    if not run.layers:
        begins = run.fp8_begins
        since = f"; FP8 begins at step {begins}" if begins is not None and begins > run.step else ""
        yield f"no layer has cast to FP8 up to step {run.step}{so_far}, so nothing of FP8 is judged yet{since}"
    elif not findings:
        yield f"healthy: nothing found in {looked}"


def _gap_sentence(run: WatchedRun, reference: WatchedRun) -> str:
    gap = newest_gap(run.series, reference.series)
    if gap is None:
        return f"no gap to {reference.run_dir}: no step has a loss in both"
    side = "above" if gap.nats >= 0 else "below"
    return (
        f"the loss lies {abs(gap.relative):.2%} ({number(abs(gap.nats), 3)} nats) {side} that of {reference.run_dir}, "
        f"in the mean of steps {gap.first_step}-{gap.last_step}"
    )
