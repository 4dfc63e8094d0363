"""Faults in settings: the learning rate at a switch of precision, the loss scale."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from benchmarks.doctor_selftest.faults.fault import Fault, Injection
from octavo import recipes
from octavo.nn import Linear
from octavo.training.loop import Trainer
from octavo.training.metrics import MetricsLog

__all__ = ["LEARNING_RATE", "SETTING_FAULTS", "restarting_rate", "switching_precision"]

SWITCH_AFTER = 10  # steps
RESTART_AFTER = 12  # steps
LEARNING_RATE = 1.5e-3  # that every run of the self-test has learnt at


def switching_precision(*, first_rate: float | None = None) -> Injection:
    """The layers run in BF16 for some steps and as their recipe says afterwards.

    Args:
        first_rate: peak learning rate before the switch; None for that of the settings.
    """

    @contextmanager
    def switching(trainer: Trainer, _layer: int) -> Iterator[None]:
        switch = trainer.step + SWITCH_AFTER
        layers = [m for m in trainer.model.modules() if isinstance(m, Linear) and not m.recipe.is_high_precision]
        wanted = [module.recipe for module in layers]
        genuine_step, genuine_rate = trainer.train_step, trainer._learning_rate  # noqa: SLF001

        def rate() -> float:
            lr = genuine_rate()
            if first_rate is not None and trainer.step < switch:
                lr *= first_rate / trainer.training.lr
            for group in trainer.optimizer.param_groups:
                group["lr"] = lr
            return lr

        def step(log: MetricsLog) -> None:
            if trainer.step == switch:
                log.write("precision", trainer.step + 1, recipe=trainer.training.recipe)
                for module, recipe in zip(layers, wanted, strict=True):
                    module.set_recipe(recipe, module.scale_updates, path=module.path)
            genuine_step(log)

        for module in layers:
            module.set_recipe(recipes.get("bf16"), module.scale_updates, path=module.path)
        with mock.patch.object(trainer, "train_step", step), mock.patch.object(trainer, "_learning_rate", rate):
            yield

    return switching


@contextmanager
def restarting_rate(trainer: Trainer, _layer: int) -> Iterator[None]:
    """The learning rate falls to a tenth within 12 steps and starts again, as cosine schedules with restarts do."""
    began, genuine = trainer.step, trainer._learning_rate  # noqa: SLF001

    def rate() -> float:
        lr: float = genuine() * 0.1 ** ((trainer.step - began) % RESTART_AFTER / RESTART_AFTER)
        for group in trainer.optimizer.param_groups:
            group["lr"] = lr
        return lr

    with mock.patch.object(trainer, "_learning_rate", rate):
        yield


SETTING_FAULTS = (
    Fault(
        name="learning rate at the switch",
        story="the learning rate is ten times as large from the switch from BF16 to FP8 on",
        code="learning-rate",
        places=("",),
        training={"lr": 10 * LEARNING_RATE},
        inject=switching_precision(first_rate=LEARNING_RATE),
    ),
    Fault(
        name="loss scale",
        story="a loss scale of 2^24 with FP16 around",
        code="loss-scale",
        places=("",),
        also=frozenset({"nonfinite"}),
        training={"precision": "fp16", "loss_scale": 2.0**24},
    ),
)
