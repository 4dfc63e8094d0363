"""``octavo study`` of several seeds or factors, or of a preset: run a grid in a folder, print and write its tables."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from octavo.cli.console import print_json, print_lines, print_table, stdout
from octavo.cli.progress import Display, open_display, phases
from octavo.cli.study_run import DATA, REPORT, check_same_config
from octavo.cli.thread_choice import threads_of
from octavo.errors import ConfigError
from octavo.experiments import grid_tables
from octavo.experiments.bars import BARS, Bars, read_bars, save_bars, study_bars
from octavo.experiments.cells import CellResult, Variant
from octavo.experiments.claims import outcomes
from octavo.experiments.grid import CELLS, Grid, locked, run_grid
from octavo.experiments.grid_comparison import GridComparison
from octavo.experiments.grid_results import write_results
from octavo.experiments.intervals import facts_with_ends
from octavo.experiments.presets import Preset, preset_named
from octavo.experiments.run_measures import Phase
from octavo.experiments.study import DEFAULT_RECIPES, STUDY, check_study_data
from octavo.parallel.process_group import Place
from octavo.reports.grid import grid_page
from octavo.reports.rendering import write_page
from octavo.text.corpus import Split
from octavo.text.tokenizer import SMALLEST_VOCABULARY
from octavo.text.tokens import TokenData, open_data, preparing
from octavo.training.config import RunConfig, save_config
from octavo.training.evaluate import unigram_entropy
from octavo.training.memory import check_run_fits
from octavo.training.run_folder import CONFIG
from octavo.training.signals import StoppedBySignal
from octavo.training.study_facts import facts_of

__all__ = ["GridOptions", "Sharing", "refuse", "study_grid"]

FACTOR = "1"  # of the learning rate and of the warm-up, by default


@dataclass(frozen=True, slots=True, kw_only=True)
class GridOptions:
    """Options of the command that make a grid of a study."""

    seeds: int
    lr_factors: str
    warmup_factors: str
    preset: str | None

    @property
    def is_one_run(self) -> bool:
        """True if every recipe has a single run."""
        factors = self.lr_factors, self.warmup_factors
        return self.preset is None and self.seeds == 1 and factors == (FACTOR, FACTOR)

    def grid(self, recipes: Sequence[str] | None, *, first_seed: int) -> tuple[Grid, Preset | None]:
        """The grid, and its preset; ``recipes`` are None if they were not given.

        Raises:
            ConfigError: an unknown preset, a factor that is no number, or an option that the preset sets.
        """
        seeds = tuple(range(first_seed, first_seed + self.seeds))
        if self.preset is not None:
            factors = self.lr_factors, self.warmup_factors
            refuse(recipes is not None, "--recipes", "no preset, which has its own; leave one of them out")
            refuse(factors != (FACTOR, FACTOR), "--lr-factors or --warmup-factors", "no preset; leave one of them out")
            preset = preset_named(self.preset)
            return preset.grid(seeds), preset
        names = DEFAULT_RECIPES if recipes is None else recipes
        grid = Grid(
            variants=tuple(Variant(name=name, recipe=name) for name in names),
            seeds=seeds,
            lr_factors=_factors("--lr-factors", self.lr_factors),
            warmup_factors=_factors("--warmup-factors", self.warmup_factors),
        )
        return grid, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Processes that share a grid's cells.

    Attributes:
        jobs: of this command.
        place: this command's place in a launch; None outside of one.
        chooses_threads: take the folder's number of CPU threads, or as many as there are free cores for each process.
    """

    jobs: int = 1
    place: Place | None = None
    chooses_threads: bool = False

    @property
    def ranks(self) -> int | None:
        """Processes that share this machine's free cores; None if the configuration sets the threads."""
        if not self.chooses_threads:
            return None
        return self.jobs if self.place is None else self.place.local_size


def refuse(given: bool, option: str, needs: str) -> None:
    """Raise ConfigError if an option was given that has no effect."""
    if given:
        raise ConfigError(f"{option} needs a study of {needs}")


def _factors(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{option} takes numbers separated by commas, such as 0.5,1,2, not {text!r}") from error


def study_grid(
    config: RunConfig,
    out: Path,
    *,
    grid: Grid,
    preset: Preset | None = None,
    bars: Path | None = None,
    sharing: Sharing | None = None,
    as_json: bool = False,
) -> None:
    """Run the cells of a grid that are not finished, and print and write what all of them say.

    Ranks of a launch are processes that share the folder's cells: all of them run cells, and the first one waits for
    the others and prints.

    Args:
        config: configuration of the runs.
        out: the study's folder.
        grid: the cells.
        preset: whose claims are tested.
        bars: file of the bars.
        sharing: processes that run the cells; None for this one, with the configuration's threads.
        as_json: print JSON.

    Raises:
        ConfigError: an invalid cell; ``out`` holds a study of another configuration or with other bars.
        DataError: a split of the text is too short.
    """
    sharing = sharing or Sharing()
    place, is_first = sharing.place, sharing.place is None or sharing.place.rank == 0
    check_run_fits(config, SMALLEST_VOCABULARY)
    for cell in grid.cells:
        cell.config(config)
    if (out / STUDY).exists():
        raise ConfigError(f"{str(out)!r} holds a study of one seed; name another folder with --out")
    own_bars = _bars(out / BARS, bars)
    if place is not None and place.local_rank < torch.cuda.device_count():
        torch.cuda.set_device(place.local_rank)
    with open_display(quiet=not is_first) as display:
        config, data = _begun(config, out, own_bars, phases(display), ranks=sharing.ranks)
        with _workers(sharing.jobs - 1, grid, config, out):
            results = _run_shown(grid, config, out, data, display, wait=is_first)
    if not is_first:
        return
    comparison = GridComparison(
        results,
        baseline=grid.variants[0].name,
        bars=own_bars,
        unigram_nats=unigram_entropy(data, Split.VALIDATION),
    )
    names = write_results(results, out)
    _write_report(comparison, preset, out, _facts(grid, config, data))
    _print(comparison, preset, out, names, as_json=as_json)


def _run_shown(
    grid: Grid, config: RunConfig, out: Path, data: TokenData, display: Display, *, wait: bool
) -> tuple[CellResult, ...]:
    """Run the grid with a line for each finished cell, and one bar."""
    finished, advance = 0, display.phase("runs", len(grid.cells))

    def on_cell(result: CellResult) -> None:
        nonlocal finished
        finished += 1
        ending = f"diverged at step {result.failed_at}" if result.diverged else f"{result.run.nats:.4f} nats"
        display.say(f"{finished}/{len(grid.cells)} {result.cell.name}: {ending}")
        advance(finished)

    def on_phase(phase: Phase) -> None:
        advance(finished, f"{phase.name} {phase.done:,.0f}/{phase.total:,.0f}")

    return run_grid(grid, config, out, data=data, wait=wait, on_phase=on_phase, on_cell=on_cell)


def _bars(own: Path, given: Path | None) -> Bars:
    """The folder's bars, or the given ones in a new folder."""
    if not own.exists():
        if any(path.is_dir() for path in own.parent.glob(f"{CELLS}/*")):
            raise ConfigError(
                f"{str(own)!r} is missing beside the study's runs; restore it, or name another folder with --out"
            )
        return Bars() if given is None else read_bars(given)
    bars = study_bars(own)
    if given is not None and read_bars(given) != bars:
        raise ConfigError(
            f"{str(own)!r} was written before this study's runs and holds other bars than {str(given)!r}; "
            "bars do not change once there are results: name another folder with --out"
        )
    return bars


def _begun(
    config: RunConfig, out: Path, bars: Bars, show: Callable[..., None], *, ranks: int | None
) -> tuple[RunConfig, TokenData]:
    """The study's configuration and tokens, written by one process at a time; ``ranks`` share chosen threads."""
    if (out / CONFIG).exists():
        config = _with_threads(config, out, ranks)
    check_same_config(config, out)
    out.mkdir(parents=True, exist_ok=True)
    with locked(out / ".data.lock", wait=True):  # another process may have begun meanwhile, with its threads
        config = _with_threads(config, out, ranks)
        check_same_config(config, out)
        if not (out / BARS).exists():
            save_bars(bars, out / BARS)
        elif study_bars(out / BARS) != bars:
            raise ConfigError(f"another process has begun {str(out)!r} with other bars; give the same to all of them")
        with preparing(config.data.source, out / DATA, vocab_size=config.data.vocab_size, progress=show) as tokens:
            check_study_data(tokens, config)
        save_config(config, out / CONFIG)
        return config, open_data(out / DATA)


def _with_threads(config: RunConfig, out: Path, ranks: int | None) -> RunConfig:
    return config if ranks is None else config.with_training(threads=threads_of(out, goes_on=True, ranks=ranks))


@contextmanager
def _workers(count: int, grid: Grid, config: RunConfig, out: Path) -> Iterator[None]:
    """Processes that run cells beside this one."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_work, args=(grid, config, out), daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    except BaseException:
        for process in processes:
            process.terminate()  # each saves a checkpoint and ends
        raise
    finally:
        for process in processes:
            process.join()


def _work(grid: Grid, config: RunConfig, out: Path) -> None:
    with suppress(StoppedBySignal, KeyboardInterrupt):
        run_grid(grid, config, out, data=open_data(out / DATA), wait=False)


def _facts(grid: Grid, config: RunConfig, data: TokenData) -> dict[str, str]:
    shape = config.model.llama(vocab_size=data.vocab_size, max_positions=config.training.context)
    facts = facts_of(config, data, parameters=shape.parameters)
    steps = f"{config.training.steps:,} a run"
    return facts | {"seed": ", ".join(map(str, grid.seeds)), "steps": steps}


def _write_report(comparison: GridComparison, preset: Preset | None, out: Path, facts: dict[str, str]) -> None:
    try:
        page = grid_page(comparison, preset, facts)
    except ConfigError as error:
        print_lines(f"note: no {REPORT}: {error}", to_stderr=True)
        return
    write_page(out / REPORT, page)


def _print(
    comparison: GridComparison, preset: Preset | None, out: Path, names: tuple[str, ...], *, as_json: bool
) -> None:
    measures = [comparison.measures(group) for group in comparison.groups]
    found = outcomes([(claim, comparison) for claim in preset.claims]) if preset else []
    if as_json:
        print_json(
            {
                "folder": str(out),
                "bars": asdict(comparison.bars),
                "groups": [facts_with_ends(one) | {"verdict": comparison.verdict(one)} for one in measures],
                "claims": [facts_with_ends(one) for one in found],
                "pairs": [facts_with_ends(one) for one in comparison.ranking(*comparison.factors)],
            }
        )
        return
    print_table("", grid_tables.GAP_COLUMNS, grid_tables.gap_rows(comparison, measures))
    if found:
        print_table("Claims", grid_tables.CLAIM_COLUMNS, grid_tables.claim_rows(found))
    ranking = comparison.ranking(*comparison.factors)
    if ranking:
        print_table(
            f"Pairs{grid_tables.at(comparison.factors)}", grid_tables.RANKING_COLUMNS, grid_tables.ranking_rows(ranking)
        )
    for note in grid_tables.notes(comparison, measures):
        stdout().print(note, "", sep="\n", markup=False)
    print_lines(f"Files: {out}/ {', '.join((REPORT, *names, CONFIG, BARS))}, cells/")
