"""``python -m benchmarks.doctor_selftest``: recall and precision of the doctor on known faults."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from benchmarks.doctor_selftest.selftest import (
    SelftestConfig,
    SelftestResult,
    measuring,
    quick,
    run_selftest,
    tuning,
)
from benchmarks.doctor_selftest.tables import confusion, markdown, summary, tables
from octavo.cli import options
from octavo.cli.app import ErrorBoundary
from octavo.cli.console import print_json, print_table, stderr, stdout
from octavo.cli.output_files import check_target
from octavo.cli.progress import Display, open_display, phases
from octavo.errors import ConfigError
from octavo.files import write_atomically
from octavo.text.sources import BUILTIN
from octavo.text.tokens import prepare

__all__ = ["app"]

FAILED = 1

app = typer.Typer(
    cls=ErrorBoundary,
    invoke_without_command=True,
    subcommand_metavar="",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Example: python -m benchmarks.doctor_selftest --quick",
)


@app.callback()
def selftest(
    *,
    is_quick: Annotated[bool, typer.Option("--quick", help="Every fault once, and few clean runs.")] = False,
    is_tuning: Annotated[
        bool, typer.Option("--tuning", help="The width and seeds that thresholds may be tuned on, not those published.")
    ] = False,
    processes: Annotated[int, typer.Option(help="Runs at a time.")] = 1,
    out: Annotated[Path | None, typer.Option("--out", help="A Markdown file for the whole result.")] = None,
    as_json: options.Json = False,
) -> None:
    """Train with and without known faults, and count those that the doctor names; exit code 1 below the bars."""
    if out is not None:
        check_target("--out", out)
    if is_quick and is_tuning:
        raise ConfigError("--quick and --tuning are two settings; give one of them")
    config = quick() if is_quick else tuning() if is_tuning else measuring()
    with open_display() as display:
        result = _run(config, processes, display)
    if as_json:
        print_json(_record(result))
    else:
        for table in tables(result):
            print_table(table.title, table.columns, table.rows)
        stdout().print("\n".join(summary(result)), markup=False, soft_wrap=True)
    if out is not None:
        write_atomically(out, markdown(result))
        stderr().print(f"{out} holds the whole result", markup=False, soft_wrap=True)
    raise typer.Exit(0 if result.passed else FAILED)


def _run(config: SelftestConfig, processes: int, display: Display) -> SelftestResult:
    show = phases(display)
    with TemporaryDirectory(prefix="octavo-") as folder:
        data = prepare(BUILTIN, Path(folder) / "data", vocab_size=config.setting.vocab_size, progress=show)
        return run_selftest(config, data=data, processes=processes, on_progress=show)


def _record(result: SelftestResult) -> dict[str, Any]:
    cures = result.cures
    return {
        "passed": result.passed,
        "runs": len(result.runs),
        "recall": result.recall,
        "precision": result.precision,
        "clean_runs": len(result.clean),
        "clean_fails": len(result.clean_fails),
        "confusion": confusion(result),
        "remedies": [{"fault": cure.fault.name, "gap_nats": cure.gap, "restores": cure.restores} for cure in cures],
        "seconds": result.seconds,
    }


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.doctor_selftest")
