"""Journal of the autopilot's acts, read from the "autopilot" lines of metrics.jsonl, and the settings that result.

    {"kind": "autopilot", "step": 40, "finding": "frozen-scale", "path": "layers.0.down_proj", "role": "input",
     "number": 1, "act": "Run layers.0.down_proj with scales from the tensors themselves (tensorwise).",
     "changes": {"overrides": {"layers.0.down_proj": "tensorwise"}}, "evidence": {"stale_ratio": 8.2, …}}
    {"kind": "autopilot", "step": 200, …, "takes_back": 1, "helped": true, …}

The first act applies from step 41 on. ``number`` counts the acts; ``takes_back`` is the number of a reverted act and
``helped`` whether it had helped. A line without changes means that no remedy is left.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.doctor.findings import Remedy
from octavo.doctor.remedies import applied
from octavo.errors import ConfigError
from octavo.training.config import RunConfig, TrainingConfig, config_from_dict

__all__ = ["LIVE", "Act", "Journal", "is_possible", "training_after"]

LIVE = frozenset(  # keys of [training] that can change during a run
    {
        "recipe", "recipe_options", "overrides", "precision_schedule", "skip", "cache_weights", "precision",
        "loss_scale", "lr", "min_lr", "warmup",
    }
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Act:
    """An applied remedy.

    Attributes:
        number: number of the act, from 1 on.
        step: step before the first that it applies to.
        code: code of the finding.
        path: path of the finding; "" for the run.
        role: role of the finding.
        remedy: the remedy, with the changes.
        judged: step of the sample that judged it; None before that.
        taken_back: last step that it applies to; None while it applies.
        helped: False if it was taken back because it did not help.
    """

    number: int
    step: int
    code: str
    path: str
    role: str
    remedy: Remedy
    judged: int | None = None
    taken_back: int | None = None
    helped: bool = True


@dataclass(slots=True)
class Journal:
    """Acts so far.

    Attributes:
        patience: samples after which an act is judged.
        acts: acts in order.
        given_up: (code, path) of findings without a remaining remedy.
        since: step of the last act or reversal.
        samples: samples since then.
    """

    patience: int
    acts: list[Act] = field(default_factory=list)
    given_up: set[tuple[str, str]] = field(default_factory=set)
    since: int = 0
    samples: int = 0

    def see(self, line: Mapping[str, Any]) -> None:
        """Record a line of metrics.jsonl."""
        if line["kind"] == "statistics":
            self._see_sample(line["step"])
        elif line["kind"] == "autopilot":
            self._see_move(line)

    @property
    def in_force(self) -> list[Act]:
        """Acts that were not taken back."""
        return [act for act in self.acts if act.taken_back is None]

    @property
    def on_trial(self) -> list[Act]:
        """Acts that were not judged yet."""
        return [act for act in self.in_force if act.judged is None]

    def acts_on(self, code: str, path: str) -> list[Act]:
        """Acts on one finding at one path, including those taken back."""
        return [act for act in self.acts if (act.code, act.path) == (code, path)]

    def moves(self, path: str) -> int:
        """Number of changes and reversals at a path."""
        return sum(1 + (act.taken_back is not None) for act in self.acts if act.path == path)

    def _see_sample(self, step: int) -> None:
        self.samples += 1
        if self.samples >= self.patience:
            for act in self.on_trial:
                act.judged = step

    def _see_move(self, line: Mapping[str, Any]) -> None:
        if not line["changes"]:
            self.given_up.add((line["finding"], line["path"]))
            return
        self.since, self.samples = line["step"], 0
        if "takes_back" in line:
            act = self.acts[line["takes_back"] - 1]
            act.taken_back, act.helped = line["step"], line["helped"]
            return
        values = {key: line[key] for key in ("number", "step", "path", "role")}
        remedy = Remedy(text=line["act"], changes=line["changes"])
        self.acts.append(Act(**values, code=line["finding"], remedy=remedy))


def training_after(config: RunConfig, acts: Iterable[Act]) -> TrainingConfig:
    """Settings of a run under acts.

    Raises:
        ConfigError: the acts and the run's own settings are not valid together.
    """
    remedies = [act.remedy for act in acts]
    return config_from_dict(applied(config.to_dict(), remedies)).training if remedies else config.training


def is_possible(config: RunConfig, acts: Iterable[Act]) -> bool:
    """Return True if the settings under acts are valid."""
    try:
        training_after(config, acts)
    except ConfigError:
        return False
    return True
