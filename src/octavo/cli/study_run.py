"""Shared part of ``octavo study`` and ``octavo demo``: run the study in a folder, write its report, print its table."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.cli.console import print_json, print_lines, print_table, stdout
from octavo.cli.progress import open_display, phases
from octavo.errors import ConfigError
from octavo.experiments.grid import CELLS
from octavo.experiments.run_measures import MEASURES, Phase
from octavo.experiments.study import STUDY, check_prompt, check_study_data, configs_of, run_study
from octavo.models.sources import has_run
from octavo.reports.rendering import write_page
from octavo.reports.study import study_page
from octavo.text.tokenizer import SMALLEST_VOCABULARY
from octavo.text.tokens import open_data, preparing
from octavo.training import study_table
from octavo.training.comparison import Study
from octavo.training.config import RunConfig, load_config, save_config
from octavo.training.memory import check_run_fits
from octavo.training.precision import resolve_device
from octavo.training.run_folder import CONFIG, check_start, is_own_config, remove_runs, resumable_state
from octavo.training.setup import build_model

__all__ = ["DATA", "REPORT", "check_same_config", "compare", "print_study"]

SAMPLE_LINES = 12
DATA, REPORT = "data", "report.html"


def compare(
    config: RunConfig,
    out: Path,
    *,
    recipes: Sequence[str],
    prompt: str | None = None,
    test_tokens: int | None = None,
    force: bool = False,
) -> Study:
    """Prepare the data, run or finish the study in ``out``, and write config.toml and report.html.

    All checks run before existing files change.

    Raises:
        ConfigError: an unknown recipe; a device that is not available; a micro-batch that does not fit in memory; or
            ``out`` holds a study of another configuration and ``force`` is not given, or files that no study wrote.
        DataError: a split of the text is too short.
    """
    configs = configs_of(config, recipes)
    if (out / CELLS).exists():
        raise ConfigError(f"{str(out)!r} holds a study of several seeds; name another folder with --out")
    check_prompt(prompt or "")
    check_run_fits(config, SMALLEST_VOCABULARY)  # independent of the text, so checked before it is read
    if force:
        _check_ownership(out, recipes)
    else:
        check_same_config(config, out)
        _check_runs(out, configs)
    with open_display() as display:
        show = phases(display)
        with preparing(config.data.source, out / DATA, vocab_size=config.data.vocab_size, progress=show) as tokens:
            check_study_data(tokens, config)
            for recipe, each in configs.items():
                build_model(each, tokens.vocab_size)  # raises for an unavailable device or an unknown layer
                if not force:
                    resumable_state(out / recipe, each, tokens)
            if force:
                start_over(out, recipes)
        data = open_data(out / DATA)

        def on_phase(phase: Phase) -> None:
            show(phase.name, phase.done, phase.total, phase.note)

        with _written_config(config, out, recipes):
            study = run_study(
                config, out, data=data, recipes=recipes, prompt=prompt, test_tokens=test_tokens, on_phase=on_phase
            )
    _write_report(study, out, device_of(config))
    return study


@contextmanager
def _written_config(config: RunConfig, out: Path, recipes: Sequence[str]) -> Iterator[None]:
    """Write config.toml; remove it again if an error ends the study before its first run has begun."""
    is_new = not (out / CONFIG).exists()
    save_config(config, out / CONFIG)
    try:
        yield
    except Exception:
        if is_new and not any(has_run(out / recipe) for recipe in recipes):
            (out / CONFIG).unlink()
        raise


def start_over(out: Path, recipes: Sequence[str]) -> None:
    """Remove the runs and files of a study, but not its tokens; call ``_check_ownership`` first."""
    remove_runs([out / recipe for recipe in recipes if has_run(out / recipe)], also=(MEASURES,))
    for name in (STUDY, REPORT, CONFIG):
        (out / name).unlink(missing_ok=True)


def print_study(study: Study, config: RunConfig, out: Path, *, as_json: bool) -> None:
    """Print the table, its verdict and notes, the files, and a sample of the FP8 model's text."""
    if as_json:
        print_json(_record(study, out))
        return
    device = device_of(config)
    rows = [[row.name, *row.cells, row.difference, row.article] for row in study_table.rows(study, device)]
    print_table("", study_table.columns(study), rows)
    notes = (
        study_table.yardstick(study),
        study_table.target_note(study),
        study_table.ARTICLE_NOTE,
        study_table.threads_note(study, device),
        study_table.emulation_note(device),
    )
    for note in (study_table.verdict(study), *filter(None, notes)):
        stdout().print(note, "", sep="\n", markup=False)
    _print_files(study, out)
    _print_sample(study)


def device_of(config: RunConfig) -> str:
    """Device type of a configuration, such as ``"cpu"``."""
    return resolve_device(config.training.device).type


def _check_ownership(out: Path, recipes: Sequence[str]) -> None:
    """Raise ConfigError if a file that ``start_over`` would remove was not written by a study."""
    folders = [out / recipe for recipe in recipes if has_run(out / recipe)]
    if any((out / name).exists() for name in (CONFIG, STUDY, REPORT)):
        folders.append(out)
    for folder in folders:
        if not is_own_config(folder / CONFIG):
            raise ConfigError(f"{str(folder)!r} holds files that octavo did not write; name another folder with --out")


def check_same_config(config: RunConfig, out: Path) -> None:
    """Raise ConfigError if ``out`` holds a study of another configuration."""
    path = out / CONFIG
    if not path.exists() and (out / REPORT).exists():
        raise ConfigError(f"{str(out / REPORT)!r} was not written by a study; name another folder with --out")
    if path.exists() and load_config(path).config_hash() != config.config_hash():
        raise ConfigError(
            f"{str(out)!r} holds a study of another configuration ({path}); name another folder with --out"
            + ("" if (out / CELLS).exists() else ", or start over with --force")
        )


def _check_runs(out: Path, configs: Mapping[str, RunConfig]) -> None:
    """Raise ConfigError for runs that cannot be resumed."""
    for recipe, config in configs.items():
        folder = out / recipe
        if has_run(folder) and not (folder / CONFIG).is_file():
            raise ConfigError(
                f"{str(folder)!r} holds files of a run but no {CONFIG}, so it cannot be continued; move it away, or "
                "name another folder with --out"
            )
        if has_run(folder):
            check_start(folder, config, resume=True)


def _write_report(study: Study, out: Path, device: str) -> None:
    try:
        page = study_page(study, device=device)
    except ConfigError as error:
        print_lines(f"note: no report.html: {error}", to_stderr=True)
        return
    write_page(out / REPORT, page)


def _print_files(study: Study, out: Path) -> None:
    runs = ", ".join(f"{run.recipe}/" for run in study.runs)
    has_events = any(out.rglob("events.out.tfevents.*"))
    lines = [
        f"  {runs}  metrics.jsonl, {'TensorBoard events, ' if has_events else ''}checkpoints",
        f"  {CONFIG}, {STUDY}, {DATA}/  the configuration, every figure, the tokens",
    ]
    if (out / REPORT).exists():
        lines.insert(0, f"  {REPORT}  the curves, the gap and this table; it loads plotly-….min.js beside it")
    print_lines(f"Files: {out}/")
    stdout().print(*lines, sep="\n", markup=False)


def _print_sample(study: Study) -> None:
    recipe = study.fp8_runs[0].recipe if study.fp8_runs else study.runs[-1].recipe
    lines = ["", f"The {study_table.title_of(recipe)} model continues {study.prompt!r}:"]
    lines += [f"  | {line}" for line in (study.prompt + study.samples[recipe]).splitlines()[:SAMPLE_LINES]]
    stdout().print("\n".join(lines), markup=False)


def _record(study: Study, out: Path) -> dict[str, Any]:
    names = [run.recipe for run in study.runs]
    gaps = [(run.recipe, base) for run in study.fp8_runs for base in ("bf16", "fp32") if base in names]
    return {
        "folder": str(out),
        "verdict": study_table.verdict(study),
        "target_nats": study.target_nats,
        "unigram_nats": study.unigram_nats,
        "runs": [
            {
                "recipe": run.recipe,
                "nats": run.nats,
                "perplexity": run.perplexity,
                "steps": run.steps,
                "steps_to_target": study.steps_to_target(run.recipe),
                "relative_gradient_variance": study.relative_variance(run.recipe),
                "gradient_error": run.gradient_error,
                "tokens_per_second": run.tokens_per_second,
                "threads": run.threads,
                "peak_memory_bytes": run.peak_memory_bytes,
            }
            for run in study.runs
        ],
        "gaps": [
            {"run": run, "base": base, "nats": gap.nats, "standard_error": gap.standard_error, "percent": gap.percent}
            for run, base in gaps
            for gap in (study.gap(run, base),)
        ],
        "facts": dict(study.facts),
        "samples": dict(study.samples),
    }
