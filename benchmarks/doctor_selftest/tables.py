"""A self-test's result as tables: for a terminal, and as Markdown to publish."""

import math
from collections.abc import Iterator, Sequence

from benchmarks.doctor_selftest.cases import RunKind
from benchmarks.doctor_selftest.other_tools import ANOMALY, HUGGING_FACE
from benchmarks.doctor_selftest.selftest import GAP_BAR_NATS, Cure, JudgedRun, SelftestResult
from octavo.bench.results import Section, markdown_table
from octavo.doctor.findings import CAUSES

__all__ = ["confusion", "markdown", "summary", "tables"]

NOTHING, ELSEWHERE, NONE = "nothing", "elsewhere", "–"


def tables(result: SelftestResult) -> list[Section]:
    """Confusion matrix, other tools, remedies."""
    made = [_confusion_table(result), _tools_table(result)]
    return made if not result.cures else [*made, _cures_table(result)]


def summary(result: SelftestResult) -> list[str]:
    """The verdict, a sentence each."""
    setting, faulty, clean = result.config.setting, result.of(RunKind.FAULT), result.clean
    seeds = ", ".join(map(str, result.config.seeds))
    restored = [cure for cure in result.cures if cure.restores]
    said, findings = sum(run.first is not None for run in clean), [one for run in faulty for one in run.said]
    astray = sum(len(run.unexplained) for run in faulty)
    what = (
        f"{len(result.runs)} runs of {setting.steps} updates in {result.seconds / 60:.0f} min: "
        f"width {setting.hidden_size}, {setting.num_layers} layers, seeds {seeds}."
    )
    recall = (
        f"Recall {result.recall:.3f}: the first finding names cause and place in {len(result.named)} of {len(faulty)} "
        "runs with a fault."
    )
    precision = f"Precision {result.precision:.3f}: so often the first finding, where there is one, is right."
    quiet = (
        f"Of {len(clean)} clean runs {len(result.clean_fails)} have a finding of severity fail, "
        f"{said} one of severity warn or fail (Wilson's 95 %: at most {_at_most(said, len(clean)):.0%} of all)."
    )
    others = f"Of all {len(findings)} findings in runs with a fault {astray} do not follow from it."
    lines = [what, recall, precision, others, quiet]
    if result.cures:
        hurt = sum(cure.had_hurt for cure in restored)
        lines.append(
            f"{len(restored)} of {len(result.cures)} remedies bring the loss to within {GAP_BAR_NATS} nats of the "
            f"clean run; {hurt} of these faults had broken the run or cost more than that."
        )
    return lines


def markdown(result: SelftestResult) -> str:
    """The whole result."""
    lines = ["# The doctor's self-test", "", *(f"- {line}" for line in summary(result))]
    for table in tables(result):
        lines += ["", f"## {table.title}", "", *markdown_table(table.columns, table.rows)]
    missed = list(_missed(result))
    if missed:
        lines += ["", "## What went wrong", "", *(f"- {line}" for line in missed)]
    return "\n".join(lines) + "\n"


def confusion(result: SelftestResult) -> dict[str, dict[str, int]]:
    """By fault, and "clean", how often each code was the first finding's.

    A finding with the right code at another place counts under "elsewhere", a run without one under "nothing".
    """
    counts: dict[str, dict[str, int]] = {name: {} for name in (*result.config.faults, "clean")}
    for run in (*result.of(RunKind.FAULT), *result.clean):
        row = counts[run.case.name if run.fault else "clean"]
        found = _found(run, result.config.setting.num_layers)
        row[found] = row.get(found, 0) + 1
    return counts


def _found(run: JudgedRun, layers: int) -> str:
    if run.first is None:
        return NOTHING
    is_elsewhere = run.fault is not None and run.first.code == run.fault.code and not run.names_fault(layers)
    return ELSEWHERE if is_elsewhere else run.first.code


def _confusion_table(result: SelftestResult) -> Section:
    counts = confusion(result)
    seen = {code for row in counts.values() for code in row}
    columns = [code for code in (*CAUSES, ELSEWHERE, NOTHING) if code in seen]
    rows = tuple((name, *(str(row.get(code, "")) for code in columns)) for name, row in counts.items())
    return Section(title="First finding by fault", columns=("fault", *columns), rows=rows)


def _tools_table(result: SelftestResult) -> Section:
    """Number of a fault's runs in which each tool reported something, and in which it named the layer."""
    rows = []
    for name in (*result.config.faults, "clean"):
        runs = result.clean if name == "clean" else [run for run in result.of(RunKind.FAULT) if run.case.name == name]
        layers = result.config.setting.num_layers
        others = [_cell(runs, tool, layers) for tool in (ANOMALY, HUGGING_FACE)]
        rows.append((name, str(len(runs)), _octavo(runs, layers), *others))
    columns = ("fault", "runs", *(f"{tool}: spoke, named" for tool in ("octavo", ANOMALY, HUGGING_FACE)))
    return Section(title="Beside other tools, on the same runs", columns=columns, rows=tuple(rows))


def _octavo(runs: Sequence[JudgedRun], layers: int) -> str:
    spoke = sum(run.first is not None for run in runs)
    return f"{spoke}, {sum(run.names_fault(layers) for run in runs)}"


def _cell(runs: Sequence[JudgedRun], tool: str, layers: int) -> str:
    asked = [run for run in runs if tool in run.answers]
    if not asked:
        return NONE
    spoke = [run for run in asked if run.answers[tool].words]
    return f"{len(spoke)}, {sum(_names(run, tool, layers) for run in spoke)}"


def _names(run: JudgedRun, tool: str, layers: int) -> bool:
    """Whether a tool's words name a place of the fault: any of its paths."""
    places = () if run.fault is None else run.fault.places
    return any(run.answers[tool].names(place.format(layer=run.case.seed % layers)) for place in places)


def _cures_table(result: SelftestResult) -> Section:
    columns = (
        "fault",
        "first remedy",
        "clean, nats",
        "with the fault",
        "with fault and remedy",
        "gap",
        "restored",
        "had hurt",
    )
    rows = tuple(_cure_row(cure) for cure in result.cures)
    return Section(title="Remedies, with the fault still there", columns=columns, rows=rows)


def _cure_row(cure: Cure) -> tuple[str, ...]:
    numbers = [_nats(value) for value in (cure.clean, cure.faulty, cure.cured)]
    gap = NONE if cure.gap is None else f"{cure.gap:+.4f}"
    verdicts = ["yes" if verdict else "no" for verdict in (cure.restores, cure.had_hurt)]
    return (cure.fault.name, cure.remedy.text, *numbers, gap, *verdicts)


def _nats(value: float | None) -> str:
    return "broke" if value is None else f"{value:.4f}"


def _missed(result: SelftestResult) -> Iterator[str]:
    for run in result.of(RunKind.FAULT):
        if not run.names_fault(result.config.setting.num_layers):
            yield f"{run.case.name}, seed {run.case.seed}: {run.first or 'nothing was found'}"
    for run in result.clean:
        if run.first is not None:
            yield f"{run.case.kind} run {run.case.name!r}, seed {run.case.seed}: {run.first}"


def _at_most(found: int, of: int) -> float:
    """The upper end of Wilson's 95 % interval for a share; 1 of nothing."""
    if not of:
        return 1.0
    share, z2 = found / of, 1.96**2
    return (share + z2 / (2 * of) + math.sqrt(z2 * (share * (1 - share) + z2 / (4 * of)) / of)) / (1 + z2 / of)
