"""Findings and remedies of the doctor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from octavo.html.notebook import Table, summary
from octavo.html.wording import counted, number

__all__ = [
    "CAUSES",
    "FP8_BEGINS",
    "LARGE_UPDATE",
    "REPLACED_WEIGHTS",
    "SIGNS",
    "STALLED_LOSS",
    "STEP_BEFORE",
    "Finding",
    "Findings",
    "Remedy",
    "Severity",
    "capitalized",
    "worst_first",
]


class Severity(StrEnum):
    """Severity of a finding."""

    FAIL = "fail"  # training is broken or will be
    WARN = "warn"  # it costs accuracy or speed
    NOTE = "note"  # worth knowing


SIGNS = {Severity.FAIL: "■", Severity.WARN: "▲", Severity.NOTE: "●"}  # seen without colours


CAUSES = {
    "nonfinite": "NaN or ±Inf reached a cast",
    "saturation": "values exceed the range of the scale",
    "gradient-underflow": "small gradients become zero",
    "bulk-underflow": "the scale puts most values below the format's range, where they become zero",
    "stale-scale": "a scale is made from outdated amaxes",
    "frozen-scale": "a scale does not change while its tensor does",
    "scale-oscillation": "a scale jumps up and down",
    "inexact-amax": "a scale was not computed from its tensor's exact amax",
    "stale-weight": "a GEMM multiplies codes of another tensor",
    "weight-jump": "a weight changed by more than its updates can change it",
    "rank-mismatch": "ranks cast the same tensor with different scales",
    "zero-tensor": "a tensor is zero in consecutive steps",
    "outlier-growth": "outliers grow during training",
    "biased-accumulation": "a tensor core's sums of same-sign products are biased",
    "sensitive-module": "a module that should not run in FP8 does",
    "batch-norm": "a batch norm next to FP8 layers has erratic statistics",
    "starved-experts": "the router sends an expert few tokens or none",
    "attention-logits": "attention's logits are so large that FP8's steps change its probabilities",
    "attention-gradient": "the gradients of attention's scores do not add up to zero as codes",
    "gradient-below-noise": "quantization noise drowns the gradient",
    "loss-scale": "the loss scale is too large or too small",
    "learning-rate": "the learning rate is too large, or jumped, or updates did, such as at a change of precision",
    "divergence": "the loss rises far above its beginning, or loses most of its progress",
    "loss-spike": "the loss spikes above its beginning",
    "stalled-loss": "the loss no longer falls, near that of a model of token frequencies alone",
    "loss-gap": "the loss departs from the reference's",
    "nondeterministic": "the same micro-batch gives different numbers when it is run again",
    "slow-layer": "FP8 makes this layer slower",
    "checkpoint": "the newest checkpoint cannot be continued from",
    "memory": "a step needs more memory than the device has",
}


REPLACED_WEIGHTS, LARGE_UPDATE = "replaced_weights", "large_update"  # evidence: an update over the norm of the weights
STALLED_LOSS = "stalled_loss"  # evidence: the level of a loss that does not fall
STEP_BEFORE = "step_before"  # evidence of a jump: the sample before it
FP8_BEGINS = "fp8_begins"  # evidence of a gap that is older than FP8: its first step


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Remedy for a finding; :mod:`octavo.doctor.remedies` selects, ranks, applies and reverts remedies.

    Attributes:
        text: what to do, in one sentence.
        changes: values of a configuration's [training] section by key, such as ``{"overrides": {"layers.0.q_proj":
            "rowwise"}}``; empty if no configuration change helps.
        error_removed: share of the layer's error that it removes in a replay, 1 for all; None before a replay.
        time_ratio: the time of the layer's GEMMs with it over that without; None before a replay.
        is_time_measured: whether that time was measured on a GPU; otherwise it assumes tensor cores that multiply FP8
            twice as fast as BF16.
        bytes_ratio: the same ratio for the bytes of codes and scales.

    Example:
        >>> Remedy(text="run the head in BF16", changes={"skip": ["lm_head"]}).error_removed is None
        True
    """

    text: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    error_removed: float | None = None
    time_ratio: float | None = None
    is_time_measured: bool = False
    bytes_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem: its location, its steps, and the numbers that show it.

    Attributes:
        code: one of :data:`CAUSES`.
        severity: how much it matters.
        path: the module's path; "" for the run as a whole.
        role: the tensor's role, such as "grad_output"; "" for a finding about a module or the run.
        first_step: the first step that shows it.
        last_step: the last one.
        evidence: numbers by name, including those that the rule compared.
        cause: one sentence.
        remedies: best first.
        weight: orders findings of one severity: larger is worse.
        places: paths of the affected layers, worst first, of a finding about many layers (``path`` is "").
        consequences: number of findings by code that follow from this one and are not listed.
        may_be_older: ``first_step`` is the oldest sample that was kept.

    Example:
        >>> finding = Finding(
        ...     code="saturation",
        ...     severity=Severity.WARN,
        ...     path="layers.0.q_proj",
        ...     role="input",
        ...     first_step=10,
        ...     last_step=40,
        ...     evidence={"saturation_fraction": 0.21},
        ...     cause="values exceed the range of the scale",
        ... )
        >>> print(finding)
        warn: saturation at layers.0.q_proj, input, steps 10-40: values exceed the range of the scale
    """

    code: str
    severity: Severity
    path: str = ""
    role: str = ""
    first_step: int = 0
    last_step: int = 0
    evidence: Mapping[str, float] = field(default_factory=dict)
    cause: str = ""
    remedies: tuple[Remedy, ...] = ()
    weight: float = 0.0
    places: tuple[str, ...] = ()
    consequences: Mapping[str, int] = field(default_factory=dict)
    may_be_older: bool = False

    def __post_init__(self) -> None:
        assert self.code in CAUSES, self.code

    def __str__(self) -> str:
        place = ", ".join(filter(None, (self.path, self.role))) or "the run"
        return f"{self.severity}: {self.code} at {place}, {self.steps}: {self.explanation}"

    def _repr_html_(self) -> str | None:
        return summary(f"octavo.doctor: {self.severity}", tables=[_table([self])])

    @property
    def sentence(self) -> str:
        """The cause, capitalized, with a full stop."""
        text = self.explanation or CAUSES[self.code]
        return capitalized(text if text.endswith((".", "!", "?")) else f"{text}.")

    @property
    def explanation(self) -> str:
        """The cause, what follows from it, and whether it may be older than the samples."""
        follows = ", ".join(f"{code} ({count})" for code, count in self.consequences.items())
        older = f"samples before step {self.first_step} were dropped, and it may have begun in them"
        return "; ".join(
            filter(None, (self.cause, follows and f"from it follow {follows}", older if self.may_be_older else ""))
        )

    @property
    def steps(self) -> str:
        """The steps, such as "steps 10-40"."""
        if self.may_be_older:
            return f"until step {self.last_step}"
        same = self.first_step == self.last_step
        return f"step {self.first_step}" if same else f"steps {self.first_step}-{self.last_step}"

    @property
    def when(self) -> str:
        """The steps in words."""
        if self.may_be_older:
            return f"until step {self.last_step:,}"
        same = self.first_step == self.last_step
        return f"step {self.first_step:,}" if same else f"steps {self.first_step:,} to {self.last_step:,}"

    def is_at(self, path: str) -> bool:
        """True if the finding concerns this module, alone or among others; "" is the run as a whole."""
        return path == self.path or path in self.places


class Findings(list[Finding]):
    """List of findings; a notebook shows it as a table.

    Example:
        >>> Findings([]) == []
        True
    """

    def _repr_html_(self) -> str | None:
        return summary(f"octavo.doctor: {counted(len(self), 'finding')}", tables=[_table(self)])


def worst_first(findings: list[Finding]) -> list[Finding]:
    """Sort findings by severity, then weight, then first step."""
    order = list(Severity)
    return sorted(findings, key=lambda one: (order.index(one.severity), -one.weight, one.first_step))


def capitalized(text: str) -> str:
    """Text with a capital first letter, the others as they are.

    Example:
        >>> capitalized("a NaN")
        'A NaN'
    """
    return text[0].upper() + text[1:]


def _table(findings: Sequence[Finding]) -> Table:
    return Table(
        columns=("severity", "where", "finding", "evidence", "remedies, best first"),
        rows=[
            (
                f"{SIGNS[one.severity]} {one.severity}",
                tuple(filter(None, (one.path or "the whole run", one.role, one.when))),
                (one.code, one.sentence),
                tuple(f"{name} = {number(value)}" for name, value in one.evidence.items()),
                tuple(f"{place}. {remedy.text}" for place, remedy in enumerate(one.remedies, 1)),
            )
            for one in findings
        ],
    )
