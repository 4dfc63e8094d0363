"""``octavo doctor preflight CONFIG``: check a configuration before a long run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from octavo.cli import options
from octavo.cli.console import print_json, print_lines, print_table
from octavo.cli.doctor.printing import counts, exit_code_of, print_findings, print_remedies
from octavo.cli.progress import Display, open_display, phases
from octavo.doctor import Finding
from octavo.experiments import Check, Origin, run_data
from octavo.experiments import preflight as try_out
from octavo.experiments.paired import check_numbers
from octavo.models.sources import check_run_folder
from octavo.text.tokenizer import SMALLEST_VOCABULARY
from octavo.text.tokens import preparing
from octavo.training.config import RunConfig, load_config
from octavo.training.memory import check_run_fits, fitting_in_memory
from octavo.training.run_folder import CONFIG
from octavo.training.setup import check_data

__all__ = ["preflight"]


def preflight(
    *,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file, or the folder of a run to continue.")],
    source: options.Source = None,
    hub: options.DataHub = False,
    steps: Annotated[int, typer.Option(help="Updates per short run; the second half is measured.")] = 20,
    orders: Annotated[int, typer.Option(help="Seeds for measuring the gap to BF16.")] = 2,
    as_json: options.Json = False,
) -> None:
    """Check a configuration before a long run: checkpoint, memory, bitwise replay, ranks, shapes, gap to BF16."""
    del hub  # its option opens the Hub
    check_numbers(steps=steps, orders=orders)
    with open_display() as display, _origin(config, source, display) as (origin, run_dir):
        checks = _checks(origin, run_dir, steps=steps, orders=orders, display=display)
    findings = [finding for check in checks for finding in check.findings]
    if as_json:
        print_json({"config": str(config), "checks": [asdict(check) for check in checks]})
    else:
        _print(checks, findings)
    raise typer.Exit(exit_code_of(findings))


@contextmanager
def _origin(config: Path, source: str | None, display: Display) -> Iterator[tuple[Origin, Path | None]]:
    """Return the configuration and data to check, and the run's folder if one continues; new tokens are temporary."""
    if config.is_dir():
        check_run_folder(config)
        run_config = load_config(config / CONFIG)
        yield Origin(config=run_config, data=run_data(config)), config
        return
    new_config: RunConfig = options.configured(config, source=source, vocab_size=None)
    check_run_fits(new_config, SMALLEST_VOCABULARY)  # independent of the text, so checked before it is read
    with (
        TemporaryDirectory(prefix="octavo-") as folder,
        preparing(
            new_config.data.source,
            Path(folder) / "data",
            vocab_size=new_config.data.vocab_size,
            progress=phases(display),
        ) as data,
    ):
        check_data(data, new_config)
        yield Origin(config=new_config, data=data), None


def _checks(origin: Origin, run_dir: Path | None, *, steps: int, orders: int, display: Display) -> list[Check]:
    advance = display.phase("checks", None)
    finished: list[Check] = []

    def on_run(runs: int) -> None:
        advance(len(finished), f"{runs} short runs")

    with fitting_in_memory(origin.config.training):
        for check in try_out(origin, run_dir=run_dir, steps=steps, orders=orders, on_run=on_run):
            finished.append(check)
            advance(len(finished), check.name)
    return finished


def _print(checks: list[Check], findings: list[Finding]) -> None:
    rows = [[check.name, _verdict(check), check.said] for check in checks]
    print_table("Preflight", ["check", "", "result"], rows, left=3)
    print_findings(findings)
    print_remedies(findings)
    conclusion = "nothing fails: the run can start" if not exit_code_of(findings) else "not ready: fix what fails first"
    print_lines(conclusion)


def _verdict(check: Check) -> str:
    return counts(check.findings) or ("ok" if check.is_known else "unknown")
