"""``octavo doctor RUN``: findings in a run's statistics; ``octavo doctor --env``: facts about this machine."""

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli import options
from octavo.cli.console import number, print_json, print_lines
from octavo.cli.doctor.environment import show_environment
from octavo.cli.doctor.printing import counts, exit_code_of, print_findings, print_remedies
from octavo.cli.output_files import check_target
from octavo.cli.progress import open_display
from octavo.doctor import Captures, Finding, Severity, Thresholds, diagnose
from octavo.doctor.histograms import histograms_of
from octavo.doctor.losses import newest_gap, plateau_of_unknown_text
from octavo.doctor.remedies import applied, ranked
from octavo.errors import ConfigError, DataError
from octavo.models.sources import has_run
from octavo.reports.doctor import doctor_page
from octavo.reports.rendering import write_page
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
        Path | None, typer.Option("--against", metavar="RUN", help="The same run in BF16, to compare the loss.")
    ] = None,
    fixed: Annotated[
        Path | None,
        typer.Option("--apply", metavar="FILE", help="Write the configuration with the first remedy of each cause."),
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write an HTML page with loss, heat map and findings.")
    ] = None,
    env: Annotated[
        bool, typer.Option("--env", help="Print versions, devices, native kernels and GEMM backends.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Read a run's statistics and print what is wrong, worst first, with remedies."""
    if env:
        run_options = {"run": run_dir, "--against": against, "--apply": fixed, "--html": page}
        options.refuse_given(run_options, "--env cannot be combined with {}; leave one of them out")
        show_environment(as_json=as_json)
        return
    if run_dir is None:
        raise ConfigError("give a run's folder, or --env for facts about this machine")
    _check_targets({"--html": page, "--apply": fixed}, [path for path in (run_dir, against) if path is not None])
    run, reference = _runs(run_dir, against)
    config = None if fixed is None else _config_to_fix(run)
    diagnosis = diagnose(run.series, reference=None if reference is None else reference.series)
    findings = _rank_remedies(diagnosis, run)
    if as_json:
        print_json({**_facts(run, reference), "findings": [asdict(finding) for finding in findings]})
    else:
        print_findings(findings)
        print_remedies(findings)
        print_lines(*_summary(run, reference, findings))
    if page is not None:
        _write_page(run, reference, findings, page)
    if fixed is not None and config is not None:
        _write_fixed(config, findings, fixed, run_dir)
    raise typer.Exit(exit_code_of(findings))


def _check_targets(targets: Mapping[str, Path | None], run_dirs: Sequence[Path]) -> None:
    """Raise ConfigError for a file that is unwritable, named twice or in a run's folder, except a page at its top."""
    option_of_path: dict[Path, str] = {}
    for option, target in targets.items():
        if target is None:
            continue
        check_target(option, target)
        resolved = target.resolve()
        if resolved in option_of_path:
            raise ConfigError(
                f"{option_of_path[resolved]} and {option} both name {str(target)!r}; name another file for one"
            )
        option_of_path[resolved] = option
        is_page = option == "--html" and resolved.suffix == ".html"
        for run_dir in run_dirs:
            folder = run_dir.resolve()
            if resolved.is_relative_to(folder) and not (is_page and resolved.parent == folder):
                raise ConfigError(
                    f"{option}: {str(target)!r} is inside the run's folder {str(run_dir)!r}, which this would change; "
                    "name another file, outside of it"
                )


def _runs(run_dir: Path, against: Path | None) -> tuple[WatchedRun, WatchedRun | None]:
    run = watched_run(run_dir)
    if against is None:
        return run, None
    reference = read_run(against)
    check_comparable(run, reference)
    return run, reference


def _rank_remedies(findings: list[Finding], run: WatchedRun) -> list[Finding]:
    """Return the findings with remedies ranked by replaying captured layers, where there are captures."""
    captures = Captures(run.run_dir / CAPTURES)
    if not findings or not captures.files():
        return findings
    ranked_findings = []
    with open_display() as display:
        advance = display.phase("replay remedies", len(findings))
        for done, finding in enumerate(findings, 1):
            try:
                ranked_findings.append(replace(finding, remedies=ranked(finding, captures, series=run.series)))
            except DataError as error:  # of one capture, on which the finding itself does not depend
                display.say(f"remedies of {finding.code} at {finding.path} are not ranked: {error}")
                ranked_findings.append(finding)
            advance(done)
    return ranked_findings


def _config_to_fix(run: WatchedRun) -> RunConfig:
    if run.config is None:
        raise ConfigError(f"--apply needs a run's {CONFIG}, but {str(run.run_dir)!r} has none; leave --apply out")
    return run.config


def _write_fixed(config: RunConfig, findings: list[Finding], fixed: Path, run_dir: Path) -> None:
    """Write a configuration with the first remedies of warnings and failures, and print how to train with it."""
    serious = [one for one in findings if one.severity is not Severity.NOTE and one.remedies]
    causes = [one for one in serious if one.code != "loss-gap"]
    if any(one.remedies[0].changes for one in causes):  # from which the gap may follow: its remedy changes all layers
        serious = causes
    fixed_config = config_from_dict(applied(config.to_dict(), [one.remedies[0] for one in serious]))
    if fixed_config == config:
        line = f"{fixed} was not written: no finding can be fixed by the configuration"
    else:
        save_config(fixed_config, fixed)
        command = ["octavo", "train", "--config", str(fixed), "--out", str(_free_folder(run_dir))]
        codes = ", ".join(dict.fromkeys(one.code for one in serious if one.remedies[0].changes))
        line = f"{fixed} has the first remedies of {codes}; train with: {shlex.join(command)}"
    print_lines(line, to_stderr=True)


def _free_folder(run_dir: Path) -> Path:
    """Return an unused folder next to the run's."""
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
    write_page(page, content)
    print_lines(f"page: {page}", to_stderr=True)


def _facts(run: WatchedRun, reference: WatchedRun | None) -> dict[str, Any]:
    gap = None if reference is None else newest_gap(run.series, reference.series)
    return {
        "run": str(run.run_dir),
        "against": None if reference is None else str(reference.run_dir),
        "gap": None if gap is None else asdict(gap),
        "step": run.step,
        "steps": run.steps,
        "samples": run.samples,
        "layers": run.layers,
    }


def _summary(run: WatchedRun, reference: WatchedRun | None, findings: list[Finding]) -> Iterator[str]:
    if reference is not None:
        yield _gap_sentence(run, reference)
    so_far = f" of {run.steps}" if run.steps and run.step < run.steps else ""
    times = "once" if run.samples == 1 else f"{run.samples} times"
    coverage = f"{run.layers} layers, sampled {times} up to step {run.step}{so_far}"
    is_clear = all(one.severity is Severity.NOTE for one in findings)
    stalled = plateau_of_unknown_text(run.series, Thresholds()) if is_clear else None
    if stalled is not None:
        yield f"{stalled}: check the learning rate and the data"
    nothing = "nothing" if stalled is None else "nothing else"
    if run.unsampled is not None:
        found = counts(findings) if findings else f"{nothing} found"
        yield f"{found} in the losses up to step {run.step}{so_far}; nothing was sampled: {run.unsampled}"
        return
    if findings:
        yield f"{counts(findings)}, in {coverage}"
    if not run.layers:
        first_fp8_step = run.fp8_begins
        since = (
            f"; FP8 begins at step {first_fp8_step}" if first_fp8_step is not None and first_fp8_step > run.step else ""
        )
        yield f"no layer has used FP8 up to step {run.step}{so_far}, so there is nothing to judge yet{since}"
    elif not findings:
        yield f"{'healthy: ' if stalled is None else ''}{nothing} found in {coverage}"


def _gap_sentence(run: WatchedRun, reference: WatchedRun) -> str:
    gap = newest_gap(run.series, reference.series)
    if gap is None:
        return f"no gap to {reference.run_dir}: the runs have no step in common"
    error = "" if gap.standard_error is None else f" ± {number(gap.standard_error, 2)}"
    unchecked = "" if run.settings and reference.settings else "; whether their settings are the same is not known"
    return (
        f"the loss is {abs(gap.relative):.2%} ({number(abs(gap.nats), 3)}{error} nats) {_side(gap.nats)} that of "
        f"{reference.run_dir}, averaged over steps {gap.first_step}-{gap.last_step}{_held_out(gap.held_out)}{unchecked}"
    )


def _held_out(nats: float | None) -> str:
    return "" if nats is None else f"; held out, {number(abs(nats), 3)} nats {_side(nats)}"


def _side(nats: float) -> str:
    return "above" if nats >= 0 else "below"
