"""``python -m benchmarks.hopper``: all measurements on an H100 or H200, in one command.

The results are written after every part, so that finished parts are kept however the command ends.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.hopper.reading import joined, load_report
from benchmarks.hopper.runner import PARTS, check_parts, facts, run
from benchmarks.hopper.session import Session, hopper_session, rehearsal_session, share_out
from octavo.bench.render import markdown
from octavo.bench.results import PartRecord, Report, result_name, write_result
from octavo.cli.app import ErrorBoundary
from octavo.cli.console import stderr, stdout
from octavo.cli.progress import open_display
from octavo.errors import ConfigError
from octavo.files import write_atomically
from octavo.reports.benchmark import benchmark_page
from octavo.reports.rendering import write_page

__all__ = ["app"]

THEME = "hopper"
REHEARSED = "A rehearsal: the times above mean nothing, and nothing was written."
NAMES = ", ".join(part.name for part in PARTS)

app = typer.Typer(
    cls=ErrorBoundary,
    invoke_without_command=True,
    subcommand_metavar="",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Example: python -m benchmarks.hopper --out results/",
)


@app.callback()
def measure(
    *,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the results: .md, .json and .html.")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help=f"A part, of {NAMES}; may be repeated.")] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="Time for all parts; each has its share.")] = 450.0,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Run every part on the CPU with tiny shapes; the times mean nothing.")
    ] = False,
    prebuild: Annotated[
        str | None,
        typer.Option(
            "--prebuild",
            metavar="I/N",
            help="Time nothing: fill the compilers' caches, as number I (from 0) of N processes that share the work.",
        ),
    ] = None,
    redraw: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Measure nothing: write the .md and .html of this .json; of several, joined."),
    ] = None,
) -> None:
    """Measure memory, casts, GEMMs, layers and training on a Hopper GPU."""
    check_parts(only or ())
    if prebuild is not None:
        _refuse_out(out, "building ahead")
        shared = _share(prebuild)
        session = rehearsal_session() if rehearse else hopper_session()
        session.prebuilds = shared
        report = _measured(session, only, seconds, None)
        stdout().print("\n".join(_unbuilt(report)), markup=False, soft_wrap=True)
        return
    if rehearse:
        _refuse_out(out, "a rehearsal")
        report = _measured(rehearsal_session(), only, seconds, None)
        stdout().print(markdown(report), markup=False, soft_wrap=True)
        stdout().print(REHEARSED, markup=False, soft_wrap=True)
        return
    if redraw:
        given = {path: _own_report(path) for path in redraw}
        report, folder = joined(list(given.values())), _given(out)
        _try_to_write(folder)
        _refuse_to_replace(report, given, folder)
        _write(report, folder)
        return
    folder = _given(out)
    session = hopper_session()
    _try_to_write(folder)
    _refuse_to_overwrite(session, folder)
    _measured(session, only, seconds, folder)


def _measured(session: Session, only: list[str] | None, seconds: float, folder: Path | None) -> Report:
    """Measure and return the report; if there is a folder, write it after every part.

    Raises:
        KeyboardInterrupt: Ctrl-C, after the finished parts were written.
    """
    with open_display() as display:
        advance = display.phase("measuring", None)
        report = run(
            session,
            seconds=seconds,
            only=only or (),
            on_progress=lambda part, doing: advance(0, f"{part}: {doing}"),
            on_begin=display.say,
            on_part=lambda so_far: _keep(so_far, folder),
        )
    if folder is not None:
        _write(report, folder)
    if report.is_interrupted:
        raise KeyboardInterrupt
    return report


def _keep(so_far: Report, folder: Path | None) -> None:
    if folder is not None:
        _write_numbers(so_far, folder)


def _name(report: Report) -> str:
    """Name of the report's files, without suffix."""
    return result_name(THEME, report.facts["device"], report.measured)


def _write_numbers(report: Report, folder: Path) -> Path:
    """Write the JSON and Markdown files."""
    return write_result(folder, _name(report), {".json": report.to_json(), ".md": markdown(report)})


def _write(report: Report, folder: Path) -> None:
    """Write all files, and print a summary line."""
    path, written = _write_numbers(report, folder), ".md, .json"
    try:
        write_page(path.with_name(f"{path.name}.html"), benchmark_page(report))
        written += ", .html"
    except ConfigError as error:
        stderr().print(str(error), markup=False, soft_wrap=True)
    line = f"{report.tally}, {len(report.failures)} not measured; {path}: {written}"
    stdout().print(line, markup=False, soft_wrap=True)


def _refuse_out(out: Path | None, what: str) -> None:
    if out is not None:
        raise ConfigError(f"{what} writes no results; leave out --out")


def _share(text: str) -> Iterator[bool]:
    """Parse "I/N" for :attr:`Session.prebuilds`.

    Raises:
        ConfigError: the text has another form, or N is not above I.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(f"--prebuild takes I/N with I below N, such as 0/2 and 1/2, not {text!r}")
    return share_out(int(match[1]), int(match[2]))


def _unbuilt(report: Report) -> Iterator[str]:
    names = ", ".join(part.name for part in report.parts)
    yield f"built ahead: {names}; {len(report.failures)} failed"
    yield from (f"{where}: {failure.name}: {failure.reason}" for where, failure in report.failures)


def _refuse_to_overwrite(session: Session, folder: Path) -> None:
    empty = Report(facts=facts(session), command="", is_rehearsal=False)
    path = folder / f"{_name(empty)}.json"
    if path.exists():
        raise ConfigError(f"{path} holds today's result; name another folder, and join the two with --from")


def _own_report(path: Path) -> Report:
    """Load a report of this command.

    Raises:
        ConfigError: the report is of another command.
        DataError: the file is not a report.
    """
    report = load_report(path)
    if report.theme != THEME:
        raise ConfigError(
            f"{path} is a result of {report.theme!r}, and --from takes those of benchmarks.hopper; leave it out"
        )
    return report


def _refuse_to_replace(report: Report, given: Mapping[Path, Report], folder: Path) -> None:
    """Allow replacing only an earlier join of these files, or the files beside a single report.

    Raises:
        ConfigError: the target is one of several reports to join, or holds a part that none of them has.
        DataError: the target is not a report.
    """
    target = folder / f"{_name(report)}.json"
    if not target.exists() or (len(given) == 1 and target.samefile(next(iter(given)))):
        return
    if any(target.samefile(path) for path in given):
        raise ConfigError(
            f"{target} is one of the files to join, and would be replaced; name another folder with --out"
        )
    known = [_measurement(part) for other in given.values() for part in other.parts]
    if any(part.sections and _measurement(part) not in known for part in load_report(target).parts):
        raise ConfigError(f"{target} holds a part that none of the given files has; name another folder with --out")


def _measurement(part: PartRecord) -> tuple[object, ...]:
    """Identity of a part's run; its bars may be judged by another's."""
    return part.name, part.seconds, [(section.title, section.rows) for section in part.sections]


def _given(out: Path | None) -> Path:
    """Return the folder.

    Raises:
        ConfigError: no folder is given.
    """
    if out is None:
        raise ConfigError(
            "name a folder for the results with --out, or use --rehearse on a machine without a Hopper GPU"
        )
    return out


def _try_to_write(out: Path) -> None:
    """Create the folder, and check before the measurements that it can be written.

    Raises:
        OSError: it cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    trial = out / ".octavo-bench"
    write_atomically(trial, "")
    trial.unlink()


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.hopper")
