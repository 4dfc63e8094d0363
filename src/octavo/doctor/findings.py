"""What the doctor says: findings, and what would mend them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

__all__ = ["CAUSES", "Finding", "Remedy", "Severity", "worst_first"]


class Severity(StrEnum):
    """How much a finding matters."""

    FAIL = "fail"  # training is broken or will be
    WARN = "warn"  # it costs accuracy or speed
    NOTE = "note"  # worth knowing


CAUSES = {
    "nonfinite": "NaN or ±Inf reached a cast",
    "saturation": "values lie beyond what the scale provides for",
    "gradient-underflow": "small gradients become zero",
    "bulk-underflow": "outliers set a scale under which most values become zero",
    "stale-scale": "a scale is made from amaxes that no longer hold",
    "frozen-scale": "a scale does not move while its tensor does",
    "scale-oscillation": "a scale jumps up and down",
    "inexact-amax": "a scale was not made from its tensor's exact amax",
    "stale-weight": "a GEMM multiplies codes that are not those of its tensor",
    "rank-mismatch": "ranks cast the same tensor with different scales",
    "zero-tensor": "a tensor is zero, step after step",
    "outlier-growth": "outliers grow while training goes on",
    "biased-accumulation": "a tensor core's sums of same-sign products lose a part of them",
    "sensitive-module": "a module runs in FP8 that should not",
    "batch-norm": "a batch norm next to FP8 layers has erratic statistics",
    "gradient-below-noise": "quantization noise drowns the gradient",
    "loss-scale": "the loss scale is too large or too small",
    "learning-rate": "the learning rate or its updates jumped, as where the precision changes",
    "divergence": "the loss rises far above its beginning, or loses what it had gained",
    "loss-gap": "the loss leaves that of the reference",
    "nondeterministic": "the same micro-batch gives other numbers when it is run again",
    "slow-layer": "FP8 makes this layer slower",
    "checkpoint": "the newest checkpoint cannot be continued from",
    "memory": "a step needs more memory than the device has",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What would mend a finding; :mod:`octavo.doctor.remedies` knows which, ranks, applies and takes them back.

    Attributes:
        text: what to do, in one sentence.
        changes: values of a configuration's [training] section by key, such as ``{"overrides": {"layers.0.q_proj":
            "rowwise"}}``; empty where no configuration mends it.
        error_removed: share of the layer's error that a replay lost by it, 1 for all; None before a replay.
        time_ratio: the time of the layer's GEMMs with it over that without; None before a replay.
        is_time_measured: whether a GPU took that time; otherwise it is a tensor core's, which multiplies FP8 twice as
            fast as BF16.
        bytes_ratio: as ``time_ratio``, of the bytes of codes and scales.

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
    """One thing that is wrong, where, since when, and by which numbers.

    Attributes:
        code: one of :data:`CAUSES`.
        severity: how much it matters.
        path: the module's path; "" for the run as a whole.
        role: the tensor's role, such as "grad_output"; "" where it is about a module or the run.
        first_step: the first step that shows it.
        last_step: the last one.
        evidence: numbers by name, those that the rule compared among them.
        cause: one sentence.
        remedies: what would mend it, best first.
        weight: orders findings of one severity: larger is worse.
        places: of a finding about many layers, whose ``path`` is "": their paths, the worst first.

    Example:
        >>> finding = Finding(
        ...     code="saturation",
        ...     severity=Severity.WARN,
        ...     path="layers.0.q_proj",
        ...     role="input",
        ...     first_step=10,
        ...     last_step=40,
        ...     evidence={"saturation_fraction": 0.21},
        ...     cause="values lie beyond what the scale provides for",
        ... )
        >>> print(finding)
        warn: saturation at layers.0.q_proj, input, steps 10-40: values lie beyond what the scale provides for
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

    def __post_init__(self) -> None:
        assert self.code in CAUSES, self.code

    def __str__(self) -> str:
        place = ", ".join(filter(None, (self.path, self.role))) or "the run"
        steps = f"step {self.first_step}" if self.first_step == self.last_step else self._steps
        return f"{self.severity}: {self.code} at {place}, {steps}: {self.cause}"

    def is_at(self, path: str) -> bool:
        """Whether it is about this module, alone or among others; "" asks for the run as a whole."""
        return path == self.path or path in self.places

    @property
    def _steps(self) -> str:
        return f"steps {self.first_step}-{self.last_step}"


def worst_first(findings: list[Finding]) -> list[Finding]:
    """By severity, then weight, then the first step."""
    order = list(Severity)
    return sorted(findings, key=lambda one: (order.index(one.severity), -one.weight, one.first_step))
