"""Runs that were trained as an engine serves: the trainer's log-probabilities against the engine's, over 10,000 tokens.

A run of ``octavo train --as-served-by`` on the built-in text is read back as evaluation reads it, and its weights are
run by :func:`octavo.engines.model_as`. ``octavo serve --as`` scores all windows at once; the trainer is compared with
it in one pass a window, as it trains, and row by row. For engines that serve, the run is exported as with ``--for`` and
verified.

The same runs' linear layers are computed by the engines' own quantizers and GEMMs on a CPU, first each on the input
that it has in octavo's decoder, then all together (tests/oracle/engines/own_layers.py says what of a layer is not the
engine's). A CPU sums in FP32: octavo is compared with FP32 sums, and with those of its profile; and Triton's kernels
multiply as octavo models tensor cores, too.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.trained_as_served import ENGINES
from octavo.engines import RowByRow, get, model_as
from octavo.engines.token_scores import text_log_probabilities
from octavo.errors import ConfigError
from octavo.export.checkpoint_writer import save_quantized
from octavo.export.engine_format import format_of_engine
from octavo.export.sources import ConversionOptions, load_source
from octavo.inference import Engine, EngineConfig, Event, SamplingParams, load_served_model_as
from octavo.language_model import load_language_model
from octavo.numerics import Accumulate
from octavo.quantization import text_windows
from octavo.text.corpus import Split
from octavo.text.sources import BUILTIN
from octavo.text.tokens import prepare
from octavo.training.config import DataConfig, RunConfig, TrainingConfig
from octavo.training.loop import train
from octavo.training.run_folder import load_run
from tests.oracle.engines.own_layers import OWN, own_run

__all__ = ["COLUMNS", "OWN_COLUMNS", "served_tables"]

STEPS, CONTEXT, TOKENS, OWN_WINDOWS = 20, 128, 10_000, 2
COLUMNS = [
    "engine",
    "gradients",
    "tokens",
    "the engine's pass",
    "octavo's server, row by row",
    "octavo's server, in one pass",
    "the folder, read back",
]
OWN_COLUMNS = [
    "engine",
    "sums: its own layers, octavo's",
    "tokens",
    "layers' outputs",
    "unequal",
    "largest mean error of a layer",
    "mean Δ log p",
    "largest",
    "equal log p",
]
SUMS = {Accumulate.FP32: "FP32", Accumulate.HOPPER_FAST: "tensor cores", Accumulate.HOPPER_SLOW: "tensor cores"}


def served_tables() -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Rows of :data:`COLUMNS`: log-probabilities of the trainer that equal others; and of :data:`OWN_COLUMNS`."""
    config = RunConfig(data=DataConfig(vocab_size=512))
    served, own = [], []
    for engine, recipe in ENGINES.items():
        training = TrainingConfig(
            recipe=recipe, as_served_by=engine, steps=STEPS, batch_size=2, context=CONTEXT, eval_tokens=1024, warmup=5
        )
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "run"
            data = prepare(BUILTIN, Path(place) / "data", vocab_size=config.data.vocab_size)
            train(replace(config, training=training), folder, data=data)
            served.append((engine, recipe, *compared(folder, engine), exported(folder, engine)))
            own += own_rows(folder, engine) if engine in OWN else []
    return served, own


def own_rows(folder: Path, engine: str) -> Iterator[tuple[str, ...]]:
    """A row for each pair of sums; ``exported`` has written the server's folder."""
    profile = get(engine)
    plain = load_language_model(folder)
    windows = text_windows(plain, BUILTIN, Split.TEST, count=OWN_WINDOWS, length=CONTEXT, seed=0)
    kernels = [Accumulate.FP32] if engine.startswith("te-") else [Accumulate.FP32, Accumulate.HOPPER_SLOW]
    for sums in kernels:
        found = own_run(engine, folder, folder.parent / engine, windows, accumulate=sums, place=folder.parent)
        for ours in dict.fromkeys((sums, profile.accumulate)):
            changed = replace(profile, accumulate=ours)
            unequal, outputs, error = found.unequal(changed)
            deltas = found.deltas(changed)
            yield (
                engine, f"{SUMS[sums]}, {SUMS[ours]}", f"{deltas.numel()}", f"{outputs:,}", f"{unequal:,}",
                f"{error:.1e}", f"{deltas.mean():.1e}", f"{deltas.max():.1e}", f"{int((deltas == 0).sum())}",
            )  # fmt: skip


@torch.no_grad()
def compared(folder: Path, engine: str) -> tuple[str, ...]:
    """Tokens, and how many log-probabilities of the trainer equal the engine's, and the server's in two ways."""
    trained, plain = load_run(folder), load_language_model(folder)
    windows = text_windows(plain, BUILTIN, Split.TEST, count=-(-TOKENS // (CONTEXT - 1)), length=CONTEXT, seed=0)
    with trained.surroundings:
        trainer = log_probabilities(trained.model, windows)
    found = [f"{trainer.numel():,}", equality(trainer, log_probabilities(model_as(plain.model, get(engine)), windows))]
    try:
        server = server_log_probabilities(folder, engine, windows)
    except ConfigError:  # tokens share a scale
        return (*found, "–", "–")
    with trained.surroundings, RowByRow():
        by_row = log_probabilities(trained.model, windows)
    return (*found, equality(by_row, server), equality(trainer, server))


def log_probabilities(model: nn.Module, windows: Tensor) -> Tensor:
    """Of the windows' tokens but the first, float64 [windows, CONTEXT - 1], a pass a window."""
    return torch.stack([text_log_probabilities(model(each[None, :-1])[0], each[1:]) for each in windows])


def server_log_probabilities(folder: Path, engine: str, windows: Tensor) -> Tensor:
    """The same of octavo's server, which reads all windows at once."""
    served = load_served_model_as(folder, engine)
    config = EngineConfig(cache_format=served.runner.cache_format, max_waiting=len(windows))
    server = Engine(served.runner, served.tokenizer, config=config)
    params = SamplingParams(max_tokens=1, logprobs=0, prompt_logprobs=True)
    told: list[list[Event]] = [[] for _ in windows]
    for window, events in zip(windows.tolist(), told, strict=True):
        server.submit(window, params, events.append)
    while server.step():
        pass
    return torch.tensor([[token.logprob for token in events[0].prompt] for events in told], dtype=torch.float64)


def equality(ours: Tensor, theirs: Tensor) -> str:
    """Number of equal ones, and the largest difference if there is one."""
    equal, largest = int((ours == theirs).sum()), float((ours - theirs).abs().max())
    return f"{equal:,} equal" + (f", others to {largest:.1e}" if largest else "")


def exported(folder: Path, engine: str) -> str:
    """Verification of the exported folder; "–" for an engine that reads none."""
    if engine.startswith("te-"):
        return "–"
    profile = get(engine)
    source = load_source(str(folder), format_of_engine(profile), ConversionOptions(engine=profile))
    saved = save_quantized(source.language_model, folder.parent / engine, format=format_of_engine(profile))
    assert saved.agreement is not None
    return f"{saved.reader}: layers {saved.agreement.logits_error:.1e}, end to end {saved.agreement.free_error:.1e}"
