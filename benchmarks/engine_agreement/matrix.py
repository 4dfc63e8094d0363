"""KL and mean |Δ log p| of every pair of profiles, the attribution of the largest, and faults that are named.

Of each window all profiles run once; Σ_v p_v log q_v of all pairs is one product of matrices for each position.
"""

from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine_agreement.saved_steps import SavedSteps
from octavo.engines import PROFILES, EngineCopies, agree, attribute, get, input_amaxes, neighbours
from octavo.engines.summary import in_nats
from octavo.engines.token_scores import ROWS, text_log_probabilities
from octavo.errors import BackendError, ConfigError
from octavo.experiments.intervals import student_interval
from octavo.language_model import LanguageModel
from octavo.quantization.comparison.variants import BF16, high_precision

__all__ = [
    "LENGTH",
    "NAMES",
    "attributions",
    "fault_groups",
    "floor_rows",
    "largest_pairs",
    "matrix_rows",
    "pair_matrices",
    "scale_rows",
]

LENGTH = 256
NAMES = (BF16, *PROFILES)
UE8M0 = (("vllm-block", "vllm-block-ue8m0"), ("sglang-block", "sglang-block-ue8m0"))
FLOORS = ("te-current", "te-block", "vllm-token", "vllm-block")


@torch.no_grad()
def pair_matrices(model: LanguageModel, windows: Tensor) -> dict[str, Tensor]:
    """KL(row ‖ column) and mean |Δ log p|, float64 [windows, profiles, profiles]."""
    steps = SavedSteps("matrix")
    missing = [index for index in range(len(windows)) if str(index) not in steps.results]
    engines = _engines(model, windows) if missing else {}
    for index in missing:
        steps.step(str(index), partial(_window, engines, windows[index]))
    done = [steps.results[str(index)] for index in range(len(windows))]
    found = {what: torch.tensor([each[what] for each in done], dtype=torch.float64) for what in ("kl", "delta")}
    found["kl"][found["delta"] == 0] = 0.0  # equal numbers, whose sums of products differ in their last bits
    return found


def _engines(model: LanguageModel, windows: Tensor) -> dict[str, Any]:
    copies = EngineCopies(model.model, input_amaxes(model.model, windows))
    engines: dict[str, Any] = {name: copies.of(profile) for name, profile in PROFILES.items()}
    return engines | {BF16: high_precision(model, BF16).logits}


def _window(engines: dict[str, Any], window: Tensor) -> dict[str, list[list[float]]]:
    logits = [engines[name](window[None, :-1])[0] for name in NAMES]
    text = torch.stack([text_log_probabilities(each, window[1:]) for each in logits])
    cross, rows = torch.zeros(len(NAMES), len(NAMES), dtype=torch.float64), len(window) - 1
    for first in range(0, rows, ROWS // 4):
        part = torch.stack([each[first : first + ROWS // 4].double().log_softmax(-1) for each in logits], dim=1)
        cross += torch.bmm(part.exp(), part.transpose(1, 2)).sum(0)
    kl = (cross.diagonal()[:, None] - cross) / rows
    delta = (text[:, None] - text[None]).abs().mean(-1)
    return {"kl": kl.tolist(), "delta": delta.tolist()}


def floor_rows(model: LanguageModel, windows: Tensor) -> list[list[str]]:
    """Rows: a profile, and the KL of its model with other last bits in the embeddings against itself."""
    steps, rows = SavedSteps("floors"), list[list[str]]()
    for name in FLOORS:

        def compute(name: str = name) -> list[float]:
            return [float(scores.reverse_kl.mean()) for scores in agree(model, name, name, windows).floor]

        rows.append([name, in_nats(student_interval(steps.step(name, compute)))])
    return rows


def scale_rows(kl: Tensor) -> list[list[str]]:
    """Rows: an engine with float scales, with UE8M0, KL(each ‖ BF16), and the paired difference over windows."""
    rows = []
    for pair in UE8M0:
        ours, theirs = (kl[:, NAMES.index(name), 0] for name in pair)
        rows.append([*pair, *(in_nats(student_interval(each.tolist())) for each in (ours, theirs, theirs - ours))])
    return rows


def largest_pairs(kl: Tensor, count: int) -> list[tuple[str, str]]:
    """Trainers and servers with the largest KL(server ‖ trainer), each two in the order in which it is larger.

    Without the plain BF16 model, and of profiles with equal numbers the first.
    """
    distinct = [index for index in range(1, len(NAMES)) if kl[index, 1:index].all()]
    pairs = [max(pair, pair[::-1], key=lambda each: float(kl[each[1], each[0]])) for pair in combinations(distinct, 2)]
    pairs.sort(key=lambda pair: -float(kl[pair[1], pair[0]]))
    return [(NAMES[trainer], NAMES[server]) for trainer, server in pairs[:count]]


def attributions(model: LanguageModel, pairs: list[tuple[str, str]], windows: Tensor) -> list[list[str]]:
    """Rows: pair, property, effect on layers, KL alone, KL that remains; of properties that change a number."""
    steps, rows = SavedSteps("attribution"), list[list[str]]()
    for trainer, server in pairs:

        def compute(trainer: str = trainer, server: str = server) -> list[list[str]]:
            found = attribute(model, agree(model, trainer, server, windows[:1]), windows)
            effects = [each for each in found.effects if not each.changes_nothing]
            total = [f"{trainer}, {server}", "total", "", in_nats(found.total), f"{found.interactions:+.4g}"]
            return [total] + [
                ["", each.name, f"{each.layer_error:.3g}", in_nats(each.alone), in_nats(each.remaining)]
                for each in effects
            ]

        rows += steps.step(f"{trainer}, {server}, {len(windows)} windows", compute)
    return rows


@torch.no_grad()
def fault_groups(model: LanguageModel, claimed: str, window: Tensor) -> list[list[str]]:
    """Changes of one property, grouped by the log-probabilities that they give."""
    steps = SavedSteps(f"faults-{claimed}")
    copies = EngineCopies(model.model, input_amaxes(model.model, window[None]))
    groups: dict[str, list[str]] = {}
    for name, value, profile in [("as claimed", "", get(claimed)), *neighbours(get(claimed), PROFILES.values())]:

        def compute(profile: Any = profile) -> list[float] | None:
            try:
                return text_log_probabilities(copies.of(replace(profile))(window[None, :-1])[0], window[1:]).tolist()
            except (BackendError, ConfigError):
                return None

        values = steps.step(f"{name} {value}", compute)
        if values is not None:
            groups.setdefault(str(values), []).append(f"{name} {value}".strip())
    return list(groups.values())


def matrix_rows(matrix: Tensor) -> list[list[str]]:
    """A matrix with the profiles' names."""
    return [[name, *(f"{float(value):.4g}" for value in row)] for name, row in zip(NAMES, matrix, strict=True)]
