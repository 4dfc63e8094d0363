"""``octavo agree MODEL``: whether a trainer and a server compute the same, or one server in every way, and why not."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor

from octavo.cli import options
from octavo.cli.compare_formats import EvaluationRequest, evaluated_windows
from octavo.cli.console import finite, print_json, print_lines, print_table
from octavo.cli.contamination import readers_of, warnings_of
from octavo.cli.progress import Display, open_display, phases
from octavo.cli.result_saving import folder_to_fill, save_or_keep
from octavo.convert import unfuse_experts
from octavo.engines import (
    Agreement,
    Attribution,
    Suspects,
    agree,
    agree_with_itself,
    attribute,
    find_suspects,
    get,
    names,
    read_server_logprobs,
)
from octavo.engines.summary import (
    EFFECT_COLUMNS,
    FORMAT,
    LAYER_COLUMNS,
    TOKEN_COLUMNS,
    WAY_COLUMNS,
    effect_cells,
    headline,
    layer_cells,
    notes,
    path_in_words,
    record,
    self_notes,
    self_record,
    suspect_in_words,
    suspect_notes,
    token_rows,
    way_cells,
    worst_first,
)
from octavo.engines.suspects import check_server_logprobs
from octavo.errors import ConfigError, DataError
from octavo.files import check_folder, check_room, write_atomically
from octavo.language_model import LanguageModel, load_language_model
from octavo.models.sources import located
from octavo.numerics import Accumulate
from octavo.parsing import read_object
from octavo.reports.agreement import agreement_page
from octavo.reports.rendering import check_report_extra, write_page
from octavo.training.config import MOST_SEED

__all__ = ["show_agreement"]

WINDOWS, LENGTH, WHY_WINDOWS = 8, 256, 4
DISAGREES = 1  # exit code
RECORD, PAGE, TOKENS = "agreement.json", "agree.html", "tokens.jsonl"
BYTES = 8 << 20  # of the files: plotly's script and less than three MiB of content
WORST, SUSPECTS = 12, 5  # rows printed


def show_agreement(
    *,
    model: options.Model,
    server: Annotated[str, typer.Option(help=f"Engine that serves: {', '.join(names())}; each also with +fp8-cache.")],
    trainer: Annotated[str | None, typer.Option(help="Engine that trains; one of the same names.")] = None,
    itself: Annotated[
        bool,
        typer.Option(
            "--itself", help="Compare the server with itself: alone, in a batch, token by token, on 2 and 4 ranks."
        ),
    ] = False,
    source: options.EvaluatedText = None,
    split: options.EvaluatedSplit = None,
    windows: Annotated[int, typer.Option(help="Windows of text.")] = WINDOWS,
    context: Annotated[
        int | None, typer.Option(help=f"Tokens per window. [default: {LENGTH}, or the model's context]")
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option(help="Largest KL(server ‖ trainer) that agrees, nats a token. [default: no verdict]")
    ] = None,
    why: Annotated[
        bool, typer.Option("--why", help=f"Swap each property alone, on the first {WHY_WINDOWS} windows.")
    ] = False,
    server_logprobs: Annotated[
        Path | None,
        typer.Option(
            help="Log-probabilities of a real server, to name the property in which it differs from --server."
        ),
    ] = None,
    accumulate: Annotated[
        str | None, typer.Option(help="fp32 sums both engines' GEMMs in FP32, which is faster and not what they do.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help=f"Folder for {PAGE}, {RECORD} and {TOKENS}.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Seed of the server's tokens.")] = 0,
    device: options.Device = None,
    hub: options.Hub = False,
    as_json: options.Json = False,
) -> None:
    """Compare what two engines compute of a model on one text, or one engine with itself.

    The exit code is 1 if --max-kl is exceeded.
    """
    request = EvaluationRequest(
        model=model, source=source, split=split, windows=windows, length=context, device=options.device_of(device)
    )
    _check((trainer, server), max_kl, accumulate)
    if trainer is None or itself:
        _check_itself(trainer, itself=itself, others={"--why": why, "--server-logprobs": server_logprobs, "--out": out})
        _show_itself(request, server, max_kl, accumulate, seed=seed, hub=hub, as_json=as_json)
        return
    logprobs = None if server_logprobs is None else read_server_logprobs(server_logprobs)
    if out is not None:
        check_folder(out, is_own=_is_own_folder)
        check_report_extra(PAGE)
        check_room(out, BYTES)
    with open_display() as display:
        loaded, tokens, text = _loaded(request, hub=hub)
        if logprobs is not None:
            check_server_logprobs(tokens, logprobs)
        sums = None if accumulate is None else Accumulate(accumulate)
        show = phases(display)
        agreement = agree(
            loaded, trainer, server, tokens, max_kl=max_kl, accumulate=sums, seed=seed, on_progress=show
        )  # fmt: skip
        attribution = attribute(loaded, agreement, tokens[:WHY_WINDOWS], on_progress=show) if why else None
        suspects = _suspects(loaded, agreement, tokens, logprobs, display)
    facts = {"model": model, **text} | _sums_facts(sums)
    results = record(agreement, facts, attribution, suspects)
    folder, save_error = None, None
    if out is not None:
        page = agreement_page(agreement, facts, attribution, suspects)
        folder, save_error = save_or_keep(
            out, lambda place: _save(place, results, page, tokens), command="agree", nbytes=BYTES
        )
    if as_json:
        print_json(results)
    else:
        _print(agreement, facts, attribution, suspects)
        print_lines(*([] if folder is None else [f"\nIn {folder}: {PAGE}, {RECORD}, {TOKENS}"]))
    if save_error is not None:
        raise save_error
    if max_kl is not None and not agreement.agrees:
        raise typer.Exit(DISAGREES)


def _check(engines: Sequence[str | None], max_kl: float | None, accumulate: str | None) -> None:
    for name in filter(None, engines):
        get(name)
    if max_kl is not None and not max_kl >= 0:
        raise ConfigError(f"--max-kl takes nats a token, 0 or more, not {max_kl}")
    if accumulate not in (None, Accumulate.FP32):
        raise ConfigError(
            f"--accumulate takes {Accumulate.FP32}, not {accumulate!r}; leave it out for the engines' own"
        )


def _check_itself(trainer: str | None, *, itself: bool, others: dict[str, object]) -> None:
    if not itself:
        raise ConfigError("give --trainer to compare two engines, or --itself to compare the server with itself")
    for option, value in {"--trainer": trainer, **others}.items():
        if value:
            raise ConfigError(f"--itself compares one engine; leave {option} out")


def _show_itself(
    request: EvaluationRequest,
    engine: str,
    max_kl: float | None,
    accumulate: str | None,
    *,
    seed: int,
    hub: bool,
    as_json: bool,
) -> None:
    """Compare one engine with itself, and print it."""
    with open_display() as display:
        loaded, tokens, text = _loaded(request, hub=hub)
        sums = None if accumulate is None else Accumulate(accumulate)
        found = agree_with_itself(
            loaded, engine, tokens, max_kl=max_kl, accumulate=sums, seed=seed, on_progress=phases(display)
        )
    facts = {"model": request.model, **text} | _sums_facts(sums)
    if as_json:
        print_json(self_record(found, facts))
    else:
        title = f"{engine} against itself, {request.model} on {facts['data']}"
        print_table(title, WAY_COLUMNS, [way_cells(way) for way in found.ways])
        print_lines("", *self_notes(found))
        if sums is not None:
            print_lines(f"Sums are {facts['accumulate']}.")
    if max_kl is not None and not found.agrees:
        raise typer.Exit(DISAGREES)


def _sums_facts(sums: Accumulate | None) -> dict[str, str]:
    return {} if sums is None else {"accumulate": f"{sums}, not the engines' own"}


def _loaded(request: EvaluationRequest, *, hub: bool) -> tuple[LanguageModel, Tensor, dict[str, Any]]:
    """The model, the windows of text, and what is said of the text."""
    if hub:
        located(request.model, hub=True)
    model = load_language_model(request.model, device=request.device)
    unfuse_experts(model.model)
    length = min(LENGTH, model.context) if request.length is None else request.length
    return model, *evaluated_windows(model, replace(request, length=length), readers_of(request.model))


def _suspects(
    model: LanguageModel, agreement: Agreement, tokens: Tensor, logprobs: Sequence[Tensor] | None, display: Display
) -> Suspects | None:
    if logprobs is None:
        return None
    return find_suspects(model, agreement.server, tokens, logprobs, on_progress=phases(display))


def _is_own_folder(out: Path) -> bool:
    """Return True for a folder that this command wrote."""
    try:
        return read_object(out / RECORD).get("format") == FORMAT
    except (OSError, DataError):
        return False


def _save(out: Path, results: dict[str, Any], page: str, tokens: Tensor) -> None:
    with folder_to_fill(out) as folder:
        write_atomically(folder / RECORD, json.dumps(finite(results), indent=1, allow_nan=False) + "\n")
        write_page(folder / PAGE, page)
        write_atomically(folder / TOKENS, "".join(f"{json.dumps(window)}\n" for window in tokens.tolist()))


def _print(
    agreement: Agreement,
    facts: dict[str, Any],
    attribution: Attribution | None,
    suspects: Suspects | None,
) -> None:
    title = f"{agreement.server.name} against {agreement.trainer.name}, {facts['model']} on {facts['data']}"
    print_table(title, TOKEN_COLUMNS, token_rows(agreement))
    worst = worst_first(agreement)
    print_table(
        "Layers on the trainer's inputs, worst first", LAYER_COLUMNS, [layer_cells(each) for each in worst[:WORST]]
    )
    if len(worst) > WORST:
        print_lines(f"and {len(worst) - WORST} more; --out or --json has all")
    if attribution is not None:
        _print_attribution(attribution)
    if suspects is not None:
        print_lines("\nWhat explains the server's log-probabilities, best first:")
        print_lines(*(f"  {suspect_in_words(each)}" for each in suspects.ranked[:SUSPECTS]))
        print_lines(*suspect_notes(agreement, suspects))
    print_lines("", *notes(agreement), *warnings_of(facts.get("read_before", {}), facts["data"], facts["split"]))
    if "accumulate" in facts:
        print_lines(f"Sums are {facts['accumulate']}.")
    print_lines(f"{headline(agreement)}.")


def _print_attribution(attribution: Attribution) -> None:
    rows = [effect_cells(effect) for effect in attribution.effects if not effect.changes_nothing]
    print_table("Each property alone, from the trainer's value to the server's", EFFECT_COLUMNS, rows)
    print_lines(f"Interactions: {attribution.interactions:+.4g} of {attribution.total.estimate:.4g} nats.")
    if unused := [effect.name for effect in attribution.effects if effect.changes_nothing]:
        print_lines(f"No number on this text depends on {', '.join(unused)}.")
    if attribution.inseparable:
        print_lines(f"Not possible alone: {', '.join(attribution.inseparable)}.")
    if attribution.path:
        print_lines("KL once properties are equal:", *(f"  {path_in_words(each)}" for each in attribution.path))
