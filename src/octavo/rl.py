"""Trainer and rollout engine of a reinforcement learning loop: log-probabilities, rollouts, and how far they differ.

A rollout engine draws tokens s from its distribution q; the loss uses the trainer's p. Of each drawn token,
log r = log p(s) − log q(s):

    k1, k3            −log r and r − 1 − log r, estimators of KL(q ‖ p)
    clipped           |r − 1| > 0.2, where PPO's clip begins
    effective share   (Σ r)² / (N Σ r²) of N tokens

A loop on a CPU that draws as vLLM does with blocks of 128, and trains in high precision:

    drawn = sample_rollout(policy, prompts, profile="vllm-block", max_new_tokens=64)
    monitor.update(log_probs(policy, drawn.tokens), drawn.log_probs, drawn.mask)

Rollouts that another program drew are compared in the same way, by the log-probabilities that it returned.

References: Schulman, "Approximating KL Divergence" (2020); Schulman et al., arXiv 1707.06347, equation 7.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octavo.caller_warnings import warn_caller
from octavo.engines.linear import needs_calibration
from octavo.engines.model import EngineCopies, EngineModel, check_token_ids, copies_for
from octavo.engines.token_scores import (
    LARGEST_ROUNDING,
    effective_share,
    is_clipped,
    k3_estimate,
    log_probabilities,
    quantile,
)
from octavo.errors import ConfigError
from octavo.experiments.intervals import Interval, student_interval
from octavo.formats import FP32
from octavo.kernels.row_by_row import RowByRow
from octavo.language_model import logits_of
from octavo.nn.arguments import check_whole
from octavo.numerics.cast import check_tensor
from octavo.recipes.engines import EngineProfile
from octavo.recipes.engines.catalog import resolved

__all__ = ["Mismatch", "MismatchMonitor", "Rollout", "log_probs", "mismatch", "sample_rollout"]

LEAST_TEMPERATURE = FP32.max / torch.finfo(torch.float64).max  # FP32 logits divided by it are FP64 numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Texts that an engine continued.

    Attributes:
        tokens: int64 [B, T]: prompt, drawn tokens, then ``stop_id`` to the end.
        log_probs: of ``tokens[:, 1:]`` when they were drawn, float64 [B, T - 1]; 0 for all others.
        mask: True for drawn tokens, the first ``stop_id`` among them, bool [B, T - 1].
    """

    tokens: Tensor
    log_probs: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Difference of a trainer and a rollout engine on tokens that the engine drew.

    Attributes:
        tokens: counted tokens.
        missing: tokens of the mask without a difference, which are not counted: NaN in an engine, or −inf in the one
            that drew them.
        mean: mean of |log r|.
        p99: its 99th percentile.
        largest: its maximum.
        k1: mean over texts of each text's mean of −log r.
        k3: the same of r − 1 − log r, with its 95 % interval.
        clipped: share of tokens with |r − 1| > 0.2.
        effective_share: (Σ r)² / (N Σ r²).

    A drawn token that the trainer rules out (its log-probability is −inf) has r = 0: mean, largest, k1 and k3 are
    infinite.
    """

    tokens: int
    missing: int
    mean: float
    p99: float
    largest: float
    k1: float
    k3: Interval
    clipped: float
    effective_share: float

    def as_metrics(self, prefix: str = "mismatch/") -> dict[str, float]:
        """The numbers by name, for a logger."""
        names = ("missing", "mean", "p99", "largest", "k1", "clipped", "effective_share")
        return {f"{prefix}{name}": getattr(self, name) for name in names} | {f"{prefix}k3": self.k3.estimate}


class MismatchMonitor:
    """Differences of a loop's rollouts by update; warns at the first above a bar, and at the first with missing tokens.

    Args:
        max_kl: largest mean k3 without a warning, nats a token; None never warns.

    Attributes:
        history: one :class:`Mismatch` an update.

    Raises:
        ConfigError: a bar that is not above 0.

    Example:
        >>> monitor = MismatchMonitor(max_kl=0.01)
        >>> same = torch.tensor([[-1.0, -2.0]])
        >>> monitor.update(same, same).k3.estimate
        0.0
    """

    def __init__(self, *, max_kl: float | None = None) -> None:
        if max_kl is not None and not max_kl > 0:
            raise ConfigError(f"max_kl must be above 0, not {max_kl}; None never warns")
        self.max_kl = max_kl
        self.history: list[Mismatch] = []
        self._warned: set[str] = set()

    def update(self, trainer: Tensor, server: Tensor, mask: Tensor | None = None) -> Mismatch:
        """Compare one batch of rollouts; arguments as for :func:`mismatch`."""
        found = mismatch(trainer, server, mask)
        self.history.append(found)
        if self.max_kl is not None and found.k3.estimate > self.max_kl:
            self._warn_once(
                f"KL of rollouts from the trainer is {found.k3.estimate:.4g} nats a token (k3), above {self.max_kl:g}; "
                "octavo agree MODEL --trainer … --server … --why names what differs",
                about="KL",
            )
        if self.max_kl is not None and found.missing:
            self._warn_once(
                f"{found.missing} of {found.missing + found.tokens} drawn tokens have no log-probability in both "
                "engines and are not counted; look for NaN in the trainer, or for what the server left out",
                about="missing",
            )
        return found

    def _warn_once(self, message: str, *, about: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warn_caller(f"update {len(self.history)}: {message}")


def mismatch(trainer: Tensor, server: Tensor, mask: Tensor | None = None) -> Mismatch:
    """Compare log-probabilities of the same drawn tokens.

    Args:
        trainer: of the trainer [B, T]; any floating dtype.
        server: of the engine that drew them [B, T].
        mask: True or 1 for tokens that were drawn [B, T]; None counts all.

    Raises:
        ConfigError: shapes differ or are not [B, T], a drawn token has a number above 0 (by more than a log-probability
            in BF16 may be rounded, 0.25), or no token has a difference.

    Example:
        >>> found = mismatch(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -2.5]]))
        >>> found.tokens, found.k1, found.clipped
        (2, -0.25, 0.5)
    """
    for name, each in (
        ("trainer's log-probabilities", trainer),
        ("server's log-probabilities", server),
        ("mask", mask),
    ):
        if each is not None:
            check_tensor(each, f"the {name}")
    if trainer.ndim != 2 or trainer.shape != server.shape or (mask is not None and mask.shape != trainer.shape):
        shapes = [tuple(each.shape) for each in (trainer, server, mask) if each is not None]
        raise ConfigError(f"log-probabilities and mask must have one shape [B, T], not {shapes}")
    ours, theirs = (each.detach().double().cpu() for each in (trainer, server))
    drawn = torch.ones_like(ours, dtype=torch.bool) if mask is None else mask.detach().bool().cpu()
    for name, each in (("trainer", ours), ("server", theirs)):
        _check_log_probabilities(name, each[drawn])
    log_ratio = ours - theirs
    counted = drawn & (log_ratio < torch.inf)  # NaN is not
    if not counted.any():
        raise ConfigError(
            "no drawn token has a log-probability in both engines; check the mask, and the trainer for NaN"
        )
    texts = [row[keep] for row, keep in zip(log_ratio, counted, strict=True) if keep.any()]
    found = torch.cat(texts)
    return Mismatch(
        tokens=found.numel(),
        missing=int((drawn & ~counted).sum()),
        mean=float(found.abs().mean()),
        p99=quantile(found.abs(), 0.99),
        largest=float(found.abs().max()),
        k1=_mean_of([float(-text.mean()) for text in texts]).estimate,
        k3=_mean_of([float(k3_estimate(text).mean()) for text in texts]),
        clipped=float(is_clipped(found).double().mean()),
        effective_share=effective_share(found),
    )


def _check_log_probabilities(name: str, values: Tensor) -> None:
    """Raise ConfigError for a number above 0; NaN and −inf are no such."""
    above = values[values > LARGEST_ROUNDING]
    if len(above):
        raise ConfigError(
            f"the {name} has {float(above[0]):.4g} for a drawn token; log-probabilities are at most 0, so give neither "
            "losses nor probabilities, and mask what the engine left out"
        )


def _mean_of(numbers: list[float]) -> Interval:
    """Mean with its interval; an infinite one has none."""
    if math.inf in numbers:
        return Interval(estimate=math.inf, error=math.nan, freedom=math.nan)
    return student_interval(numbers)


@torch.no_grad()
def log_probs(
    model: nn.Module,
    tokens: Tensor,
    *,
    profile: str | EngineProfile | None = None,
    calibration: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Log-probability of each token after those before it, float64 [B, T - 1].

    Args:
        model: octavo's Llama, a decoder of transformers, or an ``EngineModel`` of one, in its own mode: dropout is not
            turned off.
        tokens: int64 [B, T], at least two each.
        profile: engine under which the model is read, or its name; None reads it as it is. Rows are computed alone
            (``octavo.engines.RowByRow``): in any batch the result has the bits of ``octavo serve --as``.
        calibration: int64 [B, T], texts whose amaxes give the scales that an engine takes from calibration or past
            steps; those of :func:`sample_rollout`, so that an engine agrees with itself. Unused by other engines.
        temperature: divides the logits, as it did when the tokens were drawn.

    Raises:
        ConfigError: an unknown profile, one that does not fit the model or lacks its ``calibration``, other shapes,
            tokens beyond the vocabulary, or a temperature under which logits overflow.

    Example:
        >>> from octavo.models import Llama, LlamaConfig
        >>> sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_layers": 1}
        >>> llama = Llama(LlamaConfig(**sizes, num_heads=2, num_kv_heads=1, max_positions=16))
        >>> log_probs(llama, torch.arange(8).reshape(2, 4), profile="vllm-token").shape
        torch.Size([2, 3])
    """
    _check_texts(model, "tokens", tokens, least=2)
    _check_temperature(temperature)
    logits = _logits(_under(model, profile, calibration), tokens[:, :-1])
    texts = zip(logits, tokens[:, 1:], strict=True)
    return torch.stack([_row(text, temperature).gather(1, ids[:, None])[:, 0] for text, ids in texts])


@torch.no_grad()
def sample_rollout(
    model: nn.Module,
    prompts: Tensor,
    *,
    max_new_tokens: int,
    profile: str | EngineProfile | None = None,
    calibration: Tensor | None = None,
    temperature: float = 1.0,
    stop_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Rollout:
    """Continue prompts of one length as an engine does, and keep each token's log-probability.

    Every token takes a pass over the whole texts, together. Under a profile with one dynamic scale a tensor a text
    therefore depends on the others, as it does in that engine.

    Args:
        model: as for :func:`log_probs`; not changed.
        prompts: int64 [B, P], at least one token each.
        max_new_tokens: most tokens to draw for each.
        profile: engine that draws, or its name; None draws with the model as it is.
        calibration: as for :func:`log_probs`; None is the prompts.
        temperature: divides the logits.
        stop_id: token after which a text ends; None never ends early.
        generator: on the CPU; None for torch's global one.

    Raises:
        ConfigError: as for :func:`log_probs`, or ``max_new_tokens`` below 1.

    Example:
        >>> from octavo.models import Llama, LlamaConfig
        >>> sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_layers": 1}
        >>> llama = Llama(LlamaConfig(**sizes, num_heads=2, num_kv_heads=1, max_positions=16))
        >>> drawn = sample_rollout(llama, torch.tensor([[1, 2]]), profile="vllm-token", max_new_tokens=3)
        >>> drawn.tokens.shape, drawn.mask.tolist()
        (torch.Size([1, 5]), [[False, True, True, True]])
    """
    _check_texts(model, "prompts", prompts, least=1)
    _check_temperature(temperature)
    check_whole("max_new_tokens", max_new_tokens, least=1)
    engine, tokens = _under(model, profile, prompts if calibration is None else calibration), prompts
    running = torch.ones(len(prompts), dtype=torch.bool)
    drawn_probs: list[Tensor] = []
    masks: list[Tensor] = []
    while len(masks) < max_new_tokens and running.any():
        distribution = _row(_logits(engine, tokens)[:, -1], temperature).cpu()
        drawn = torch.multinomial(distribution.exp(), 1, generator=generator)[:, 0]
        chosen = distribution.gather(1, drawn[:, None])[:, 0]
        if stop_id is not None:
            drawn = torch.where(running, drawn, stop_id)
        drawn_probs.append(torch.where(running, chosen, 0.0))
        masks.append(running)
        tokens = torch.cat([tokens, drawn[:, None].to(tokens.device)], dim=1)
        running = running if stop_id is None else running & (drawn != stop_id)
    before = torch.zeros(len(prompts), prompts.shape[1] - 1)
    return Rollout(
        tokens=tokens,
        log_probs=torch.cat([before.double(), torch.stack(drawn_probs, dim=1)], dim=1),
        mask=torch.cat([before.bool(), torch.stack(masks, dim=1)], dim=1),
    )


def _under(model: nn.Module, profile: str | EngineProfile | None, calibration: Tensor | None) -> nn.Module:
    """The model, or a copy under a profile."""
    if profile is None:
        return model
    engine = resolved(profile)
    if calibration is not None:
        _check_texts(model, "the calibration's texts", calibration, least=1)
        return copies_for(model, (engine,), calibration).of(engine)
    if needs_calibration(engine):
        raise ConfigError(
            f"{engine.name} takes scales of inputs from calibration or past steps; give calibration=, the texts that "
            "sample_rollout had (its prompts by default)"
        )
    return EngineCopies(model).of(engine)


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    if not isinstance(model, EngineModel):
        return logits_of(model, tokens)
    with RowByRow():
        logits: Tensor = model(tokens)
    return logits


def _row(logits: Tensor, temperature: float) -> Tensor:
    return log_probabilities(logits.double() / temperature)


def _check_texts(model: nn.Module, name: str, tokens: Tensor, *, least: int) -> None:
    check_tensor(tokens, name)
    if tokens.ndim != 2 or tokens.shape[1] < least or not len(tokens):
        raise ConfigError(f"{name} are [B, T] with at least {least} a text, not {tuple(tokens.shape)}")
    check_token_ids(model, tokens)


def _check_temperature(temperature: float) -> None:
    if not LEAST_TEMPERATURE <= temperature < math.inf:
        raise ConfigError(
            f"temperature must be {LEAST_TEMPERATURE:.2g} or more, not {temperature}; logits divided by less overflow, "
            "and by 0 a likeliest token has no log-probability"
        )
