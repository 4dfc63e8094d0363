"""Cost of the doctor: time of a sampled training step against one that is not sampled.

    python -m benchmarks.doctor_cost [--rounds 15] [--recipes tensorwise rowwise] [--no-write]

The demo's model and batch under BF16 autocast, with AdamW: a step is forward, loss, backward, the optimizer's step and
the update of the scales; a sampled step also writes its lines to metrics.jsonl and TensorBoard, as a run does. Each
round has one step of each kind, in one process and on one model. By default a run samples every tenth step, and
evaluates all rules after every eighth sample to choose the layers to capture. The cost is therefore a tenth of the time
that a sample adds to a step, plus an eightieth of that of the rules, over the time of a step.

Bar: at most 5 % of the step time, for every recipe.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.measure import hardware, interleaved, markdown_table, publish, ratio, verdict
from octavo.doctor import watch
from octavo.doctor.capture_scheduler import DIAGNOSED_EVERY
from octavo.models import Llama
from octavo.nn.scaling_state import update_scales
from octavo.training.config import RunConfig, demo_config
from octavo.training.evaluate import token_loss
from octavo.training.metrics import MetricsLog
from octavo.training.precision import apply_recipe, surroundings
from octavo.training.setup import build_optimizer

RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")
INTERVAL, BAR = 10, 5.0  # the default's; percent


def main() -> None:
    """Time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    machine, config = hardware(), demo_config(quick=False)
    header = [
        "recipe",
        "sampled step ÷ step",
        "rules ÷ step",
        f"cost, a sample every {INTERVAL} steps",
        "verdict",
    ]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for recipe in arguments.recipes:
            log = MetricsLog(Path(folder), after_step=None)
            seconds = interleaved(contestants(config, recipe, log), rounds=arguments.rounds, warmup=2)
            log.close()
            rows.append(row_of(recipe, seconds))
    lines = markdown_table(header, rows)
    bar = f"Bar: at most {BAR:g} % of the step time."
    what = f"{config.training.tokens_per_step} tokens; {config.model}"
    lines += ["", f"Median of {arguments.rounds} interleaved rounds (quartiles). {bar} {what}."]
    publish("doctor_cost", lines, title="Cost of the doctor", machine=machine, write=not arguments.no_write)


def row_of(recipe: str, seconds: dict[str, list[float]]) -> list[str]:
    """Row of a recipe: both ratios, the cost in percent of the step time, "met" or "missed"."""
    sampled, rules = (ratio(seconds, name, "plain") for name in ("sampled", "rules"))
    cost = 100 * (sampled.median - 1 + rules.median / DIAGNOSED_EVERY) / INTERVAL
    return [recipe, str(sampled), str(rules), f"{cost:.1f} %", verdict(cost <= BAR)]


def contestants(config: RunConfig, recipe: str, log: MetricsLog) -> dict[str, Callable[[], object]]:
    """Timed calls on one model: a step, a sampled step, and the rules over all samples so far."""
    training = config.with_training(recipe=recipe).training
    shape = config.model.llama(vocab_size=config.data.vocab_size, max_positions=training.context)
    model = Llama(shape, seed=0)
    apply_recipe(model, training)
    optimizer, context = build_optimizer(model, training), surroundings(training, torch.device("cpu"), model)
    watcher = watch(model, optimizer, interval=1, on_sample=log.write_sample)
    batches = _batches(shape.vocab_size, (training.batch_size, training.context))

    def plain() -> Tensor:
        tokens, targets = next(batches)
        with context:
            loss = token_loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        update_scales(model)
        return loss

    def sampled() -> Tensor:
        with watcher.step() as notes:
            notes.loss = plain()
        return notes.loss

    return {"plain": plain, "sampled": sampled, "rules": watcher.findings}


def _batches(vocab_size: int, size: tuple[int, int]) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        tokens, targets = (torch.randint(vocab_size, size, generator=generator) for _ in range(2))
        yield tokens, targets


if __name__ == "__main__":
    main()
