"""What the autopilot has done, as the "autopilot" lines of metrics.jsonl tell it, and what a run trains with by it.

    {"kind": "autopilot", "step": 40, "finding": "frozen-scale", "path": "layers.0.down_proj", "role": "input",
     "number": 1, "act": "Run layers.0.down_proj with scales from the tensors themselves (tensorwise).",
     "changes": {"overrides": {"layers.0.down_proj": "tensorwise"}}, "evidence": {"stale_ratio": 8.2, …}}
    {"kind": "autopilot", "step": 200, …, "takes_back": 1, "helped": true, …}

The first holds from step 41 on. ``number`` counts the acts; a line that takes one back has its number, and whether it
had helped. A line without changes says that nothing is left to try.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.doctor.findings import Remedy
from octavo.doctor.remedies import applied
from octavo.errors import ConfigError
from octavo.training.config import RunConfig, TrainingConfig, config_from_dict

__all__ = ["LIVE", "Act", "Journal", "is_possible", "training_after"]

LIVE = frozenset(  # keys of [training] that a run can change on its way
    {
        "recipe", "recipe_options", "overrides", "precision_schedule", "skip", "cache_weights", "precision",
        "loss_scale", "lr", "min_lr", "warmup",
    }
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Act:
    """One remedy that was applied.

    Attributes:
        number: its place among the acts, from 1 on.
        step: it holds from the next one on.
        code: of the finding.
        path: of the finding; "" for the run.
        role: of the finding.
        remedy: what was changed.
        judged: the step of the look that judged it; None before that.
        taken_back: the step after which it does not hold any more; None while it does.
        helped: whether it was taken back though it had helped.
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
    """The acts so far.

    Attributes:
        patience: looks after which an act is judged.
        acts: in order.
        given_up: (code, path) of findings that nothing is left to try for.
        since: the step of the last act, or of the last taking back.
        looks: looks since then.
    """

    patience: int
    acts: list[Act] = field(default_factory=list)
    given_up: set[tuple[str, str]] = field(default_factory=set)
    since: int = 0
    looks: int = 0

    def see(self, line: Mapping[str, Any]) -> None:
        """Take note of a line of metrics.jsonl."""
        if line["kind"] == "statistics":
            self._see_look(line["step"])
        elif line["kind"] == "autopilot":
            self._see_move(line)

    @property
    def in_force(self) -> list[Act]:
        """The acts that were not taken back."""
        return [act for act in self.acts if act.taken_back is None]

    @property
    def on_trial(self) -> list[Act]:
        """Those that were not judged yet."""
        return [act for act in self.in_force if act.judged is None]

    def moves(self, path: str) -> int:
        """How often the configuration of a place was changed and changed back."""
        return sum(1 + (act.taken_back is not None) for act in self.acts if act.path == path)

    def _see_look(self, step: int) -> None:
        self.looks += 1
        if self.looks >= self.patience:
            for act in self.on_trial:
                act.judged = step

    def _see_move(self, line: Mapping[str, Any]) -> None:
        if not line["changes"]:
            self.given_up.add((line["finding"], line["path"]))
            return
        self.since, self.looks = line["step"], 0
        if "takes_back" in line:
            act = self.acts[line["takes_back"] - 1]
            act.taken_back, act.helped = line["step"], line["helped"]
            return
        remedy = Remedy(text=line["act"], changes=line["changes"])
        act = Act(
            number=line["number"],
            step=line["step"],
            code=line["finding"],
            path=line["path"],
            role=line["role"],
            remedy=remedy,
        )
        self.acts.append(act)


def training_after(config: RunConfig, acts: Iterable[Act]) -> TrainingConfig:
    """What a run trains with under acts.

    Raises:
        ConfigError: together with the run's own settings they are none that a run can have.
    """
    remedies = [act.remedy for act in acts]
    return config_from_dict(applied(config.to_dict(), remedies)).training if remedies else config.training


def is_possible(config: RunConfig, acts: Iterable[Act]) -> bool:
    """Whether a run can be trained under acts."""
    try:
        training_after(config, acts)
    except ConfigError:
        return False
    return True
