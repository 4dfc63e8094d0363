"""``octavo doctor preflight CONFIG``: what is tried before a long run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from octavo.cli import options
from octavo.cli.console import print_json, print_table, stdout
from octavo.cli.doctor.printing import counts, exit_code_of, print_findings, print_remedies
from octavo.cli.progress import Display, open_display, phases
from octavo.doctor import Finding
from octavo.experiments import Check, Origin, run_data
from octavo.experiments import preflight as try_out
from octavo.experiments.paired import check_numbers
from octavo.models.sources import check_is_run
from octavo.text.tokenizer import SMALLEST_VOCABULARY
from octavo.text.tokens import preparing
from octavo.training.config import RunConfig, load_config
from octavo.training.loop import check_data
from octavo.training.memory import check_run_fits, fitting_in_memory
from octavo.training.run_folder import CONFIG

__all__ = ["preflight"]


def preflight(
    *,
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="A TOML file, or the folder of a run that is to be continued.")
    ],
    source: options.Source = None,
    steps: Annotated[int, typer.Option(help="Updates of each short run; the second half counts.")] = 20,
    orders: Annotated[int, typer.Option(help="Seeds that the gap to BF16 is measured under.")] = 2,
    as_json: options.Json = False,
) -> None:
    """Try a configuration before a long run: checkpoint, memory, replay to the last bit, ranks, shapes, gap to BF16."""
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
    """What is to be trained, and the run that it continues; tokens of a new run are made in a folder for the while."""
    if config.is_dir():
        check_is_run(config)
        own = load_config(config / CONFIG)
        yield Origin(config=own, data=run_data(config)), config
        return
    given: RunConfig = options.configured(config, source=source, vocab_size=None)
    check_run_fits(given, SMALLEST_VOCABULARY)  # what no text can change, before it is read
    with (
        TemporaryDirectory(prefix="octavo-") as folder,
        preparing(
            given.data.source, Path(folder) / "data", vocab_size=given.data.vocab_size, progress=phases(display)
        ) as data,
    ):
        check_data(data, given)
        yield Origin(config=given, data=data), None


def _checks(origin: Origin, run_dir: Path | None, *, steps: int, orders: int, display: Display) -> list[Check]:
    advance = display.phase("checks", None)
    made: list[Check] = []

    def on_run(runs: int) -> None:
        advance(len(made), f"{runs} short runs")

    with fitting_in_memory(origin.config.training):
        for check in try_out(origin, run_dir=run_dir, steps=steps, orders=orders, on_run=on_run):
            made.append(check)
            advance(len(made), check.name)
    return made


def _print(checks: list[Check], findings: list[Finding]) -> None:
    rows = [[check.name, _verdict(check), check.said] for check in checks]
    print_table("Preflight", ["check", "", "what came out"], rows, left=3)
    print_findings(findings)
    print_remedies(findings)
    ready = "nothing fails: the run can start" if not exit_code_of(findings) else "not ready: mend what fails first"
    stdout().print(ready, markup=False, soft_wrap=True)


def _verdict(check: Check) -> str:
    return counts(check.findings) or ("ok" if check.is_known else "not known")
