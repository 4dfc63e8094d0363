"""Loss of mixtures trained in FP8 against BF16: a small Mixtral and a small Qwen3-MoE, paired over seeds.

    python -m benchmarks.mixtures [--replay] [--steps 300] [--seeds 3] [--only mixtral] [--known FILE] [--quick]

Both learn the built-in corpus with their own routers and the loss that balances these. The runs of a seed share initial
weights and batches; gaps have the 95 % interval of octavo.experiments.intervals over seeds and held-out windows. "one
scale" is tensorwise with one scale for all experts of a layer, where octavo has one for each. "bf16 nudged" is BF16
with initial weights larger by 2^-20: its gap is what routing makes of any small difference. With ``--replay``
the routers of all runs of a seed, BF16's too, choose the experts that a BF16 run from other initial weights chose on
the same batches: gaps are then of what experts compute, and not of which are asked; own choices would favour BF16.
Each finished run is a line of ``runs.jsonl`` in ``--out``, and is not computed again. ``--known`` is a compressed file
of such lines, from another machine of the same kind: read if it exists, and written with all.
"""

import argparse
import gzip
import hashlib
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import octavo
from benchmarks.measure import hardware, markdown_table, publish
from octavo.experiments.intervals import Interval, paired_interval
from octavo.files import write_atomically
from octavo.functional import grouped_linear
from octavo.kernels import cast_each
from octavo.numerics import CastSpec, PerTensor
from octavo.text.tokens import TokenData, prepare
from octavo.training.comparison import GAP_BAR_NATS
from octavo.training.config import demo_config
from octavo.training.schedules import learning_rate

BASE, NUDGED, ONE_SCALE = "bf16", "bf16 nudged", "one scale"
RECIPES = (BASE, NUDGED, "tensorwise", "delayed", "rowwise", "blockwise", ONE_SCALE)
OTHER_WEIGHTS = 1000  # added to the seed of the run whose experts are replayed
PRESETS = {NUDGED: BASE, ONE_SCALE: "tensorwise"}  # of those that are not called by their recipe
SIZES: dict[str, Any] = {
    "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.02, "use_cache": False,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 8, "intermediate_size": 320}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 16, "moe_intermediate_size": 160, "norm_topk_prob": True}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings of one run; a run with others is not the same."""

    model: str
    recipe: str
    seed: int
    steps: int
    batch_size: int
    context: int
    lr: float
    warmup: int
    eval_tokens: int
    replay: bool = False


def build(name: str, vocab_size: int, context: int, seed: int) -> Any:
    """Create a model of :data:`MODELS` with random weights."""
    import transformers

    base, options = MODELS[name]
    config_class, model_class = getattr(transformers, f"{base}Config"), getattr(transformers, f"{base}ForCausalLM")
    torch.manual_seed(seed)
    return model_class(config_class(vocab_size=vocab_size, max_position_embeddings=context, **SIZES | options))


@contextmanager
def one_scale_for_all_experts() -> Iterator[None]:
    """Cast the matrices of all experts with the largest amax of any of them, where the recipe has a scale a tensor."""

    def cast(matrices: Sequence[Tensor], spec: CastSpec, *, amax: Tensor | None = None, **options: Any) -> Any:
        if amax is None and isinstance(spec.granularity, PerTensor):
            amax = torch.stack([each.abs().amax().float() for each in matrices]).amax().repeat(len(matrices))
        return cast_each(matrices, spec, amax=amax, **options)[0], amax

    with mock.patch.object(grouped_linear, "cast_each", cast):
        yield


@contextmanager
def recording(path: Path) -> Iterator[None]:
    """Save each choice of experts, in order."""
    chosen: list[Tensor] = []
    top, part = torch.topk, path.with_suffix(".part")

    def topk(x: Tensor, k: int, dim: int = -1) -> tuple[Tensor, Tensor]:
        values, indices = top(x, k, dim=dim)
        chosen.append(indices.to(torch.uint8))
        return values, indices

    with mock.patch.object(torch, "topk", topk):
        yield
    torch.save(chosen, part)
    part.rename(path)


@contextmanager
def replaying(path: Path) -> Iterator[None]:
    """Choose the experts of :func:`recording`, whatever their scores are."""
    chosen = iter(torch.load(path))

    def topk(x: Tensor, k: int, dim: int = -1) -> tuple[Tensor, Tensor]:
        indices = next(chosen).long()
        assert indices.shape == (*x.shape[:-1], k)
        return x.gather(dim, indices), indices

    with mock.patch.object(torch, "topk", topk):
        yield
    assert next(chosen, None) is None, "every choice was replayed"


def train(setting: Setting, data: TokenData, *, weights: int | None = None) -> tuple[list[float], list[float]]:
    """Train one model; returns the losses of its steps and of each held-out window, in nats.

    Args:
        setting: what to train.
        data: the text.
        weights: seed of the initial weights; None for the setting's.
    """
    model = build(setting.model, data.vocab_size, setting.context, setting.seed if weights is None else weights)
    if setting.recipe == NUDGED:
        torch._foreach_mul_([parameter.data for parameter in model.parameters()], 1 + 2**-20)
    octavo.convert(model, PRESETS.get(setting.recipe, setting.recipe))
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=setting.lr, betas=(0.9, 0.95))
    losses = []
    for step in range(1, setting.steps + 1):
        rate = learning_rate(step, peak=setting.lr, floor=setting.lr / 10, warmup=setting.warmup, steps=setting.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        inputs, targets = data.batch(step, batch_size=setting.batch_size, context=setting.context, seed=setting.seed)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(input_ids=inputs)
        loss = F.cross_entropy(output.logits.float().flatten(0, 1), targets.flatten())
        (loss + model.router_aux_loss_coef * output.aux_loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, held_out(model.eval(), data, setting)


@torch.no_grad()
def held_out(model: Any, data: TokenData, setting: Setting) -> list[float]:
    """Mean loss of each window of the validation split."""
    nats: list[float] = []
    windows = data.windows(setting.context, max_tokens=setting.eval_tokens)
    for inputs, targets in zip(*(each.split(setting.batch_size) for each in windows), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=inputs).logits.float()
        nats += F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(dim=1).tolist()
    return nats


class Runs:
    """Finished runs in a file of one JSON object a line, and in a compressed one that other machines read."""

    def __init__(self, path: Path, known: Path | None = None) -> None:
        self.path, self.known = path, known
        lines = path.read_text().splitlines() if path.is_file() else []
        if known is not None and known.is_file():
            lines = gzip.decompress(known.read_bytes()).decode().splitlines() + lines
        whole = [line for line in dict.fromkeys(lines) if _is_whole(line)]  # the last may have been cut
        path.write_text("".join(f"{line}\n" for line in whole))
        self._windows: dict[str, list[float]] = {
            key(Setting(**run["setting"])): run["windows"] for run in map(json.loads, whole)
        }

    def windows(self, setting: Setting, data: TokenData) -> list[float]:
        """Held-out losses of a run, which is computed if it is not in the file."""
        if key(setting) not in self._windows:
            scales = one_scale_for_all_experts() if setting.recipe == ONE_SCALE else nullcontext()
            routes = replaying(self._routes(setting, data)) if setting.replay else nullcontext()
            with scales, routes:
                losses, windows = train(setting, data)
            self._windows[key(setting)] = windows
            with self.path.open("a") as file:
                file.write(json.dumps({"setting": asdict(setting), "windows": windows, "losses": losses}) + "\n")
            if self.known is not None:
                write_atomically(self.known, gzip.compress(self.path.read_bytes(), mtime=0))
            print(setting.model, setting.recipe, setting.seed, f"{statistics.fmean(windows):.4f}", flush=True)
        return self._windows[key(setting)]

    def _routes(self, setting: Setting, data: TokenData) -> Path:
        """File of the choices that all runs of a seed replay, whose other settings are these but for the recipe."""
        recorded = replace(setting, recipe=BASE)
        digest = hashlib.sha256(key(recorded).encode()).hexdigest()[:8]
        path = self.path.with_name(f"routes-{setting.model}-{setting.seed}-{digest}.pt")
        if not path.exists():
            with recording(path):
                train(recorded, data, weights=setting.seed + OTHER_WEIGHTS)
        return path


def _is_whole(line: str) -> bool:
    try:
        json.loads(line)
    except json.JSONDecodeError:
        return False
    return True


def key(setting: Setting) -> str:
    """Text that two equal settings share."""
    return json.dumps(asdict(setting), sort_keys=True)


def row(name: str, recipe: str, windows: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> list[str]:
    """A line of the table: the loss, and the gap with its interval."""
    nats = statistics.fmean(statistics.fmean(each) for each in windows)
    if recipe == BASE:
        return [name, recipe, f"{nats:.4f}", "", ""]
    gap = paired_interval(np.subtract(windows, base))
    return [name, recipe, f"{nats:.4f}", f"{gap.estimate:+.4f} ± {gap.half_width:.4f}", against_bar(gap)]


def against_bar(gap: Interval) -> str:
    """Verdict of a gap whose interval may reach over the bar."""
    if gap.high <= GAP_BAR_NATS:
        return "met"
    return "missed" if gap.low > GAP_BAR_NATS else "undecided"


def main() -> None:
    """Train, compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replay", action="store_true", help="all runs of a seed use the experts of one other run")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3, choices=range(1, 9))
    parser.add_argument("--only", default=",".join(MODELS), help="models, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("runs/mixtures"))
    parser.add_argument("--known", type=Path)
    parser.add_argument("--quick", action="store_true", help="three steps, to check that all runs; writes no result")
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    machine, data_config = hardware(), demo_config().data
    arguments.out.mkdir(parents=True, exist_ok=True)
    data = prepare(data_config.source, arguments.out / "data", vocab_size=data_config.vocab_size)
    common: dict[str, Any] = {"batch_size": 4, "context": 128, "lr": 1.5e-3, "warmup": 100, "eval_tokens": 32768}
    common |= {"steps": arguments.steps, "replay": arguments.replay}
    if arguments.quick:
        common |= {"batch_size": 2, "context": 32, "warmup": 1, "eval_tokens": 256, "steps": 3}
    runs, rows = Runs(arguments.out / "runs.jsonl", arguments.known), []
    for name in arguments.only.split(","):
        windows: dict[str, list[list[float]]] = {recipe: [] for recipe in RECIPES}
        for seed in range(arguments.seeds):
            for recipe in RECIPES:
                setting = Setting(model=name, recipe=recipe, seed=seed, **common)
                windows[recipe].append(runs.windows(setting, data))
        rows += [row(name, recipe, windows[recipe], windows[BASE]) for recipe in RECIPES]
    header = ["model", "recipe", "held-out nats", "− bf16 (95 % interval)", f"bar of {GAP_BAR_NATS}"]
    sizes = {name: sum(p.numel() for p in build(name, data.vocab_size, 64, 0).parameters()) for name in MODELS}
    lines = [*markdown_table(header, rows), "", f"{arguments.seeds} seeds, {common['steps']} steps."]
    lines += [f"- {name}: {size / 1e6:.1f} M parameters" for name, size in sizes.items()]
    write = not (arguments.no_write or arguments.quick)
    variant, routes = ("replayed", ", one choice of experts") if arguments.replay else ("", "")
    title = f"Mixtures trained in FP8 against BF16{routes}"
    publish("mixtures", lines, title=title, machine=machine, write=write, variant=variant)


if __name__ == "__main__":
    main()
