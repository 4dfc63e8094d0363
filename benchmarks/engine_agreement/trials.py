"""Trials of a server with one fault: whether its log-probabilities name the property that is not as claimed.

A trial claims one profile and serves another that differs in one property or setting, drawn at random from those that
change a number on the text. The log-probabilities pass through a file, as a real server's do, and every such change is
ranked by them. The fault is named if its line comes first and exact, and neither the claimed profile nor
another property shares it; changes that give the same numbers cannot be told apart, and are listed.

No server has octavo's kernels, so that nothing is exact: each fault is served again with the last bits of the
embeddings changed, as in the floor of ``octavo agree``. It is named if the nearest profiles have no other change.
"""

import functools
import json
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.engine_agreement.saved_steps import SavedSteps
from octavo.engines import (
    PROFILES,
    EngineProfile,
    Suspect,
    TriedChanges,
    get,
    neighbours,
    read_server_logprobs,
    server_settings,
    try_changes,
)
from octavo.engines.agreement import nudge
from octavo.engines.model import copies_for
from octavo.engines.token_scores import text_log_probabilities
from octavo.errors import BackendError, ConfigError
from octavo.language_model import LanguageModel

__all__ = [
    "CLAIMED",
    "COLUMNS",
    "TRIALS",
    "changes_in_words",
    "faults_of",
    "log_probabilities",
    "through_a_file",
    "trial_rows",
]

CLAIMED = ("vllm-block", "te-current", "vllm-token", "compressed-tensors")
TRIALS = 5  # of each
COLUMNS = [
    "claimed",
    "fault",
    "named",
    "first",
    "mean |Δ log p| of the runner-up",
    "named with other last bits",
    "first with other last bits",
    "its mean |Δ log p|",
]


@torch.no_grad()
def trial_rows(model: LanguageModel, window: Tensor, *, trials: int = TRIALS) -> Iterator[list[str]]:
    """A row a trial; each is saved when it is done."""
    steps = SavedSteps("trials")
    for claimed in CLAIMED:
        tried = functools.cache(functools.partial(try_changes, model, get(claimed), window[None]))
        done = 0
        for name, value, profile in faults_of(model, claimed, window[None]):

            def compute(
                fault: tuple[str, str] = (name, value),
                profiles: tuple[EngineProfile, EngineProfile] = (get(claimed), profile),
                tried: Callable[[], TriedChanges] = tried,
            ) -> list[str] | None:
                return _trial(model, window, fault, profiles, tried)

            row: list[str] | None = steps.step(f"{claimed}: {name} {value}", compute)
            if row is not None:
                yield row
                done += 1
            if done == trials:
                break


def faults_of(model: LanguageModel | nn.Module, claimed: str, windows: Tensor) -> list[tuple[str, str, EngineProfile]]:
    """All profiles that differ from the claimed one in a property or a setting, in an order drawn once."""
    copies = copies_for(model, (get(claimed),), windows)
    faults = [*neighbours(get(claimed), PROFILES.values()), *server_settings(copies, get(claimed))]
    random.Random(claimed).shuffle(faults)
    return faults


def _trial(
    model: LanguageModel,
    window: Tensor,
    fault: tuple[str, str],
    profiles: tuple[EngineProfile, EngineProfile],
    tried: Callable[[], TriedChanges],
) -> list[str] | None:
    """Row of one trial; None if no kernel computes the profile, or no number depends on the fault."""
    claimed, profile = profiles
    copies = copies_for(model, profiles, window[None])
    try:
        right, served = (log_probabilities(copies.of(each), window) for each in profiles)
        moved = copies.of(profile)
        nudge(moved, 0)
    except (BackendError, ConfigError):
        return None
    if torch.equal(right, served):
        return None
    best, runner_up, *_ = tried().suspects(through_a_file([served])).ranked
    near, *_ = tried().suspects(through_a_file([log_probabilities(moved, window)])).ranked
    is_exact = best.is_exact and not runner_up.is_exact
    return [
        claimed.name,
        " ".join(fault),
        "yes" if is_exact and _is_named(best, fault) else "no",
        changes_in_words(best),
        f"{runner_up.mean_delta:.3g}",
        "yes" if _is_named(near, fault) else "no",
        changes_in_words(near),
        f"{near.mean_delta:.3g}",
    ]


def through_a_file(served: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Log-probabilities of windows as a file has them."""
    lines = (json.dumps([None, *(round(each, 6) for each in window.tolist())]) for window in served)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "server.jsonl"
        file.write_text("".join(f"{line}\n" for line in lines))
        return read_server_logprobs(file)


def _is_named(suspect: Suspect, fault: tuple[str, str]) -> bool:
    return suspect.properties == (fault[0],) and fault in suspect.changes


def changes_in_words(suspect: Suspect) -> str:
    """All changes that share a place."""
    return "; ".join(f"{name} {value}".strip() for name, value in suspect.changes)


def log_probabilities(engine: Any, window: Tensor) -> Tensor:
    """Of a window's tokens but the first, float64 [T - 1]."""
    return text_log_probabilities(engine(window[None, :-1])[0], window[1:])
