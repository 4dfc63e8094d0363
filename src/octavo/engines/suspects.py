"""The property in which a real server differs from the profile that it is said to have.

Its log-probabilities of a text's tokens are compared with those of every profile one property away from the claimed
one, with the values that any profile of the catalogue has for that property, and with those of
:func:`server_settings`. The best match comes first: an exact one, then the smallest mean |Δ log p|. Changes that alter
no number on this text cannot be told from the claimed profile, nor two that give the same numbers from each other: they
share a place.

No match is exact where a server's attention, norms or sums have other last bits. Then a change is possible unless its
mean |Δ log p| is above the best match's: one-sided tests of paired differences of windows' means, which are taken to be
independent, with Holm's correction over all changes at 5 %. So the change that the server made is excluded in at most
about one text of twenty, if its mean |Δ log p| is the smallest over all text. Windows decide, not tokens: tokens of one
window are not independent. One window excludes nothing.

A file of log-probabilities has a line a window, each a list of numbers: those of tokens 2 to T, in nats. A leading null
is skipped, as vLLM's ``prompt_logprobs`` has one for the first token.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from octavo.engines.agreement import Progress
from octavo.engines.model import EngineCopies, copies_for
from octavo.engines.properties import neighbours, value_in_words
from octavo.engines.token_scores import LARGEST_ROUNDING, text_log_probabilities
from octavo.errors import BackendError, ConfigError, DataError
from octavo.experiments.intervals import CONFIDENCE, Interval, holm, student_interval
from octavo.language_model import LanguageModel
from octavo.parsing import parse_json
from octavo.recipes.engines.catalog import FP8_CACHE, PROFILES
from octavo.recipes.engines.profile import EngineProfile

__all__ = [
    "AS_CLAIMED",
    "EXACT",
    "Suspect",
    "Suspects",
    "TriedChanges",
    "check_server_logprobs",
    "find_suspects",
    "read_server_logprobs",
    "server_settings",
    "try_changes",
]

EXACT = 1e-5  # nats: what FP32 log-probabilities, printed with seven digits, lose
AS_CLAIMED = "as claimed"
LEVEL = 1 - CONFIDENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """Profiles that give the same log-probabilities on the text.

    Attributes:
        changes: property and value of each; :data:`AS_CLAIMED` and "" for the claimed profile.
        mean_delta: mean |Δ log p| to the server's.
        largest_delta: largest of them.
        behind: mean |Δ log p| minus the best match's, and its interval over windows.
        is_possible: whether this text does not exclude it; see the module's text.
    """

    changes: tuple[tuple[str, str], ...]
    mean_delta: float
    largest_delta: float
    behind: Interval
    is_possible: bool

    @property
    def is_exact(self) -> bool:
        """Whether every log-probability is the server's."""
        return self.largest_delta <= EXACT

    @property
    def properties(self) -> tuple[str, ...]:
        """Names of the changed properties, without repetition."""
        return tuple(dict.fromkeys(name for name, _ in self.changes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspects:
    """Result of :func:`find_suspects`.

    Attributes:
        ranked: best first.
        untried: property and value of each change that no kernel computes here, or that does not fit the model.
    """

    ranked: tuple[Suspect, ...]
    untried: tuple[tuple[str, str], ...] = ()

    @property
    def possible(self) -> tuple[Suspect, ...]:
        """Those that the text does not exclude, best first."""
        return tuple(each for each in self.ranked if each.is_possible)


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedChanges:
    """Log-probabilities of a text under a claimed profile and under each change, for any number of servers.

    Attributes:
        groups: changes that give the same log-probabilities, and those, float64 [tokens].
        untried: as in :class:`Suspects`.
    """

    groups: tuple[tuple[tuple[tuple[str, str], ...], Tensor], ...]
    untried: tuple[tuple[str, str], ...]

    def suspects(self, logprobs: Sequence[Tensor]) -> Suspects:
        """Rank the changes by how well they explain a server's log-probabilities of the same tokens, best first."""
        theirs = torch.cat(list(logprobs)).double()
        deltas = sorted(
            ((changes, (ours - theirs).abs()) for changes, ours in self.groups),
            key=lambda each: (not _is_exact(each[1]), float(each[1].mean())),
        )
        (_, best), *_ = deltas
        lengths = [len(window) for window in logprobs]
        behind = [
            student_interval([float(window.mean()) for window in (delta - best).split(lengths)]) for _, delta in deltas
        ]
        p_values = holm({str(rank): each.p_above_zero for rank, each in enumerate(behind[1:], 1) if len(lengths) > 1})
        ranked = [
            Suspect(
                changes=changes,
                mean_delta=float(delta.mean()),
                largest_delta=float(delta.max()),
                behind=behind[rank],
                is_possible=_is_exact(delta) if _is_exact(best) else p_values.get(str(rank), 1.0) >= LEVEL,
            )
            for rank, (changes, delta) in enumerate(deltas)
        ]
        return Suspects(ranked=tuple(ranked), untried=self.untried)


def find_suspects(
    model: LanguageModel | nn.Module,
    claimed: EngineProfile,
    tokens: Tensor,
    logprobs: Sequence[Tensor],
    *,
    catalogue: Iterable[EngineProfile] = tuple(PROFILES.values()),
    on_progress: Progress = lambda _name, _done, _total: None,
) -> Suspects:
    """Rank the changes of one property by how well they explain a server's log-probabilities, best first.

    Args:
        model: as for :func:`octavo.agree`.
        claimed: the profile that the server is said to have.
        tokens: int64 [windows, T]; as many of the first windows are run as there are log-probabilities.
        logprobs: of tokens 2 to T of each window, as :func:`read_server_logprobs` reads them.
        catalogue: profiles whose values are tried.
        on_progress: called with a phase's name, and profiles run of all.

    Raises:
        DataError: more windows than tokens have, another number of tokens in one, or no log-probabilities.
    """
    check_server_logprobs(tokens, logprobs)
    tried = try_changes(model, claimed, tokens[: len(logprobs)], catalogue=catalogue, on_progress=on_progress)
    return tried.suspects(logprobs)


@torch.no_grad()
def try_changes(
    model: LanguageModel | nn.Module,
    claimed: EngineProfile,
    tokens: Tensor,
    *,
    catalogue: Iterable[EngineProfile] = tuple(PROFILES.values()),
    on_progress: Progress = lambda _name, _done, _total: None,
) -> TriedChanges:
    """Run a text under a claimed profile and under each change; arguments as for :func:`find_suspects`."""
    candidates = [(AS_CLAIMED, "", claimed), *neighbours(claimed, catalogue)]
    copies = copies_for(model, [profile for *_, profile in candidates], tokens)
    candidates += server_settings(copies, claimed)
    groups: dict[bytes, tuple[list[tuple[str, str]], Tensor]] = {}
    untried = list[tuple[str, str]]()
    for index, (name, value, profile) in enumerate(candidates):
        on_progress("try every property", index, len(candidates))
        try:
            engine = copies.of(profile)
            ours = torch.cat([text_log_probabilities(engine(w[None, :-1])[0], w[1:]) for w in tokens])
        except (BackendError, ConfigError):  # no engine has such a combination
            untried.append((name, value))
            continue
        groups.setdefault(ours.numpy().tobytes(), ([], ours))[0].append((name, value))
    return TriedChanges(
        groups=tuple((tuple(changes), ours) for changes, ours in groups.values()), untried=tuple(untried)
    )


def server_settings(copies: EngineCopies, claimed: EngineProfile) -> Iterator[tuple[str, str, EngineProfile]]:
    """Profiles that differ in what servers let a user choose and no profile has by default: name, value, profile.

    An FP8 cache with the scale 1; and, unless a folder's codes decide it, the head in FP8, or a kind of layer, such as
    every down_proj, in high precision.
    """
    choices: list[tuple[str, object]] = [("kv_cache", FP8_CACHE)]
    weights = copies.weights_of(claimed)
    if all(isinstance(weight, Tensor) for weight in weights.values()):
        kinds = sorted({path.rpartition(".")[2] for path in weights})
        choices += [("head", not claimed.head), *(("skipped", (f"*.{kind}",)) for kind in kinds)]
    for name, value in choices:
        profile = replace(claimed, **{name: value})  # type: ignore[arg-type]
        if profile != claimed:
            yield name, value_in_words(profile, name), profile


def _is_exact(delta: Tensor) -> bool:
    return float(delta.max()) <= EXACT


def read_server_logprobs(path: str | Path) -> tuple[Tensor, ...]:
    """Log-probabilities of a text's tokens from a file, float64 [T − 1] for each window; see the module's text.

    Raises:
        DataError: no such numbers, or one that is not a log-probability.
        OSError: the file cannot be read.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{str(path)!r} is not text; write a list of log-probabilities a line") from error
    windows = tuple(_window(line, f"line {number} of {str(path)!r}") for number, line in enumerate(lines, 1) if line)
    if not windows:
        raise DataError(f"{str(path)!r} holds no window; write a list of log-probabilities a line")
    return windows


def _window(line: str, where: str) -> Tensor:
    try:
        values = parse_json(line)
    except DataError as error:
        raise DataError(f"{where} is no JSON: {error}") from error
    values = values[1:] if isinstance(values, list) and values[:1] == [None] else values
    if not isinstance(values, list) or not values or any(type(each) not in (int, float) for each in values):
        raise DataError(f"{where} must be a list of numbers, of which the first may be null")
    window = torch.tensor([float(each) for each in values], dtype=torch.float64)
    _check_numbers(window, where)
    return window


def _check_numbers(window: Tensor, where: str) -> None:
    if not window.isfinite().all() or (window > LARGEST_ROUNDING).any():
        raise DataError(f"{where} must hold log-probabilities: finite numbers of at most 0")


def check_server_logprobs(tokens: Tensor, logprobs: Sequence[Tensor]) -> None:
    """Raise DataError unless the log-probabilities are those of tokens 2 to T of the first windows."""
    if not logprobs or len(logprobs) > len(tokens):
        raise DataError(f"there are {len(tokens)} windows of text, and log-probabilities of {len(logprobs)}")
    for number, window in enumerate(logprobs, 1):
        if len(window) != tokens.shape[1] - 1:
            raise DataError(
                f"window {number} has {tokens.shape[1] - 1} tokens after the first, and {len(window)} log-probabilities"
            )
        _check_numbers(window, f"window {number}")
