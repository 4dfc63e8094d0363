"""``octavo bench serve``: latency, throughput and memory of a model in several recipes, or of running servers."""

import asyncio
import platform
import shlex
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from octavo._lazy import own_version
from octavo.bench.render import markdown
from octavo.bench.results import PartRecord, Report, Section, result_name, write_result
from octavo.bench.serving import Target, Workload, measured
from octavo.bench.serving.targets import Api, ask_engine, ask_server, connected, model_name
from octavo.cli.console import print_lines, print_table, stdout
from octavo.cli.options import read_api_key
from octavo.cli.progress import Display, open_display
from octavo.errors import ConfigError
from octavo.inference import Engine, EngineConfig, EngineThread, ServingRecipe, load_served_model
from octavo.nn.arguments import check_choice
from octavo.reports.benchmark import benchmark_page
from octavo.reports.rendering import write_page
from octavo.training.study_facts import processor_name

__all__ = ["bench_serve"]

THEME = "serving"
RECIPES = f"{ServingRecipe.BF16},{ServingRecipe.INT8},{ServingRecipe.FP8}"


def bench_serve(
    *,
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A model as for octavo serve; or use --url.")
    ] = None,
    recipes: Annotated[str, typer.Option(help="Recipes of MODEL; ratios are to the first.")] = RECIPES,
    calibration: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Static scales, for fp8-static.")] = None,
    url: Annotated[
        list[str] | None, typer.Option(help="A running server; repeat it to compare others with the first.")
    ] = None,
    api: Annotated[list[Api] | None, typer.Option(help="API of each --url. [default: completions]")] = None,
    name: Annotated[
        list[str] | None, typer.Option(help="Model name at each --url. [default: the first it lists]")
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(metavar="FILE", help="File with the API key to send.")] = None,
    batch: Annotated[str, typer.Option(help="Numbers of concurrent clients.")] = "1,16",
    prompt: Annotated[int, typer.Option(help="Tokens per prompt; with --url, words.")] = 128,
    answer: Annotated[int, typer.Option(help="Tokens per answer.")] = 64,
    requests: Annotated[int, typer.Option(help="Requests per client and round.")] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds of the whole workload.")] = 3,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests per second in the open loop. [default: half the first target's capacity]"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts and arrival times.")] = 0,
    timeout_seconds: Annotated[float, typer.Option(help="Give up on a server that is silent this long.")] = 120.0,
    out: Annotated[Path | None, typer.Option(help="Folder for the results: .md, .json and .html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Measure latency, throughput and memory of serving, in closed and open loops."""
    if (model is None) == (not url):
        raise ConfigError("give a MODEL, or one or more --url of running servers, but not both")
    work = Workload(
        batches=_batch_sizes(batch),
        prompt=prompt,
        answer=answer,
        requests=requests,
        rounds=rounds,
        rate=rate,
        seed=seed,
    )
    started = time.perf_counter()
    with open_display() as display:
        if model is not None:
            sections = _measure_model(model, _recipe_names(recipes), calibration, work, display)
        else:
            key = None if api_key_file is None else read_api_key(api_key_file)
            servers = _servers(url or [], api or [], name or [])
            sections = asyncio.run(_measure_servers(servers, key, timeout_seconds, work, display))
    report = Report(facts=_facts(), command=shlex.join(["octavo", *sys.argv[1:]]), is_rehearsal=False, theme=THEME)
    report.parts.append(PartRecord(name=THEME, seconds=time.perf_counter() - started, sections=sections))
    _show(report, as_json=as_json)
    if out is not None:
        _write(report, out)


def _measure_model(
    source: str, recipes: list[str], calibration: Path | None, work: Workload, display: Display
) -> list[Section]:
    """Measure each recipe in its own engine; the others are idle meanwhile."""
    threads: dict[str, EngineThread] = {}
    targets: dict[str, Target] = {}
    display.phase("loading", None)
    for recipe in recipes:
        folder = calibration if recipe == ServingRecipe.FP8_STATIC else None
        served = load_served_model(source, recipe=recipe, calibration=folder)
        longest, clients = work.prompt + work.answer, max(work.batches)
        config = EngineConfig(
            max_running=clients,
            max_waiting=clients * work.requests,
            cache_positions=clients * (longest + 64),
            step_rows=max(256, clients),
        )
        thread = threads[recipe] = EngineThread(Engine(served.runner, served.tokenizer, config=config))
        targets[recipe] = Target(ask=ask_engine(thread), weight_bytes=served.runner.resident_bytes)
    vocab_size = next(iter(threads.values())).engine.vocab_size
    try:
        advance = display.phase("measuring", work.runs(len(targets)))
        return asyncio.run(measured(targets, replace(work, vocab_size=vocab_size), advance=advance))
    finally:
        for thread in threads.values():
            thread.engine.cancel_all()
            thread.drain()


Server = tuple[str, Api, str | None]


def _servers(urls: list[str], apis: list[Api], names: list[str]) -> list[Server]:
    """Return the URL, API and model name (None if not given) of each server."""
    for option, values in (("--api", apis), ("--name", names)):
        if len(values) > len(urls):
            raise ConfigError(
                f"{option} is given {len(values)} times for {len(urls)} --url; give it at most once for each"
            )
    if len({*urls}) < len(urls):
        raise ConfigError(f"each --url must name a different server, but {', '.join(urls)} repeats one; leave it out")
    apis = [*apis, *[Api.COMPLETIONS] * (len(urls) - len(apis))]
    return list(zip(urls, apis, [*names, *[None] * (len(urls) - len(names))], strict=True))


async def _measure_servers(
    servers: list[Server], key: str | None, timeout_s: float, work: Workload, display: Display
) -> list[Section]:
    targets = {}
    async with AsyncExitStack() as open_clients:
        for url, api, name in servers:
            client = await open_clients.enter_async_context(connected(url, key=key, timeout_s=timeout_s))
            targets[url] = Target(ask=ask_server(client, api, name or await model_name(client)))
        return await measured(targets, work, advance=display.phase("measuring", work.runs(len(targets))))


def _recipe_names(recipes: str) -> list[str]:
    names = [name.strip() for name in recipes.split(",")]
    for name in names:
        check_choice("recipe", name, tuple(ServingRecipe))
    if len({*names}) < len(names):
        raise ConfigError(f"--recipes takes each recipe once, not {recipes}")
    return names


def _batch_sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--batch takes whole numbers separated by commas, such as 1,16, not {text!r}") from error


def _facts() -> dict[str, str]:
    return {
        "device": f"{processor_name()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
        "octavo": own_version(),
        "torch": torch.__version__,
        "Python": platform.python_version(),
    }


def _show(report: Report, *, as_json: bool) -> None:
    if as_json:
        stdout().print(report.to_json(), markup=False, soft_wrap=True, end="")
        return
    for section in report.parts[0].sections:
        if section.rows:
            print_table(section.title, section.columns, section.rows)
        else:
            print_lines(section.title)
        for line in [*section.notes, *map(str, section.verdicts)]:
            stdout().print(line, markup=False)


def _write(report: Report, folder: Path) -> None:
    page = benchmark_page(report)
    texts = {".json": report.to_json(), ".md": markdown(report)}
    path = write_result(folder, result_name(THEME, report.facts["device"], report.measured), texts)
    write_page(path.with_name(f"{path.name}.html"), page)
    print_lines(f"written: {path}{', '.join([*texts, '.html'])}", to_stderr=True)
