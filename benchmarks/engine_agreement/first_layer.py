"""Trials of a server with one fault and other kernels, that serves the model's first decoder layer alone.

A pass of one layer costs a fraction of the whole model's, so that many tokens are affordable, which average over other
last bits. The server is transformers' decoder, with rotary positions and attention in BF16 where octavo's differ; its
linear layers compute the faulty profile and sum in another order. Its log-probabilities, rounded to six digits as in a
file, are ranked by those of octavo's decoder. Transformers' norms round to BF16 before they multiply by the weight too,
octavo's only after it: each trial is run with both.

A fault is named if its property alone is possible (see :mod:`octavo.engines.suspects`).
"""

import copy
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.engine_agreement.saved_steps import SavedSteps
from benchmarks.engine_agreement.trials import (
    CLAIMED,
    TRIALS,
    changes_in_words,
    faults_of,
    log_probabilities,
    through_a_file,
)
from octavo.engines import EngineProfile, TriedChanges, get, try_changes
from octavo.engines.linear import linear_of_codes
from octavo.engines.model import EngineLinear, EngineModel, copies_for
from octavo.engines.summary import in_nats
from octavo.errors import BackendError, ConfigError
from octavo.language_model import LanguageModel
from octavo.models import Llama
from octavo.models.llama_folder import write_llama
from octavo.nn import RMSNorm
from octavo.numerics import QuantizedTensor

__all__ = ["COLUMNS", "NORMS", "first_layer_rows", "other_kernels"]

GROUP = 32  # columns whose order changes: every scale of the profiles has whole groups
NORMS = ("before the weight too", "after the weight")
COLUMNS = [
    "claimed",
    "fault",
    "the server's norms round",
    "named",
    "possible changes",
    "the fault among them",
    "first",
    "its mean |Δ log p|",
    "the fault's above it",
]


@torch.no_grad()
def first_layer_rows(model: LanguageModel, windows: Tensor, *, trials: int = TRIALS) -> Iterator[list[str]]:
    """Two rows a trial, one for each of :data:`NORMS`; saved when they are done."""
    steps = SavedSteps("first-layer")
    first = copy.deepcopy(model.model)
    assert isinstance(first, Llama)
    first.model.layers = first.model.layers[:1]
    first.config = replace(first.config, num_layers=1)
    readers = _Readers(ours=first, theirs=read_by_transformers(first), windows=windows)
    for claimed in CLAIMED:
        tried = functools.cache(functools.partial(try_changes, first, get(claimed), windows))
        done = 0
        for name, value, profile in faults_of(first, claimed, windows):
            compute = functools.partial(readers.trial, get(claimed), (name, value), profile, tried)
            rows: list[list[str]] | None = steps.step(f"{claimed}: {name} {value}", compute)
            if rows is not None:
                yield from rows
                done += 1
            if done == trials:
                break


def read_by_transformers(decoder: Llama) -> dict[str, nn.Module]:
    """The same decoder of transformers, in FP32, by :data:`NORMS`: with its own norms, and with octavo's."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        write_llama(Path(folder), decoder)
        read: nn.Module = AutoModelForCausalLM.from_pretrained(  # in evaluation mode
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    once = copy.deepcopy(read)
    for path, norm in decoder.named_modules():
        if isinstance(norm, RMSNorm):
            once.set_submodule(path, copy.deepcopy(norm))
    return dict(zip(NORMS, (read, once), strict=True))


def other_kernels(decoder: nn.Module, profile: EngineProfile, windows: Tensor) -> EngineModel:
    """A decoder of transformers under a profile, whose linear layers sum in another order."""
    engine = copies_for(decoder, (profile,), windows).of(profile)
    for path, layer in engine.layers.items():
        engine.model.set_submodule(path, ReorderedLinear(layer))
    return engine


class ReorderedLinear(nn.Module):
    """A layer under a profile with the columns of both operands in another order, within each group of them."""

    def __init__(self, layer: EngineLinear) -> None:
        super().__init__()
        codes, self.layer = layer.codes, layer
        generator = torch.Generator().manual_seed(0)
        groups = torch.arange(codes.data.shape[1]).split(GROUP)
        self.order = torch.cat([group[torch.randperm(len(group), generator=generator)] for group in groups])
        data = codes.data.view(torch.uint8)[:, self.order].view(codes.data.dtype)
        self.codes = QuantizedTensor(data, codes.scale, codes.granularity, codes.hp_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N], in the profile's ``activations``."""
        layer = self.layer
        y = linear_of_codes(
            x[..., self.order],
            self.codes,
            layer.profile,
            bias=layer.bias,
            input_scale=layer.input_scale,
            input_amax=layer.input_amax,
        )
        return y.to(layer.profile.activations)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Readers:
    """The model in octavo and in transformers, and the text."""

    ours: nn.Module
    theirs: Mapping[str, nn.Module]
    windows: Tensor

    def trial(
        self,
        claimed: EngineProfile,
        fault: tuple[str, str],
        profile: EngineProfile,
        tried: Callable[[], TriedChanges],
    ) -> list[list[str]] | None:
        """Rows of one trial; None if no kernel computes the profile, or no number depends on the fault."""
        copies = copies_for(self.ours, (claimed, profile), self.windows)
        try:
            right, faulty = (self._log_probabilities(copies.of(each)) for each in (claimed, profile))
        except (BackendError, ConfigError):
            return None
        if all(map(torch.equal, right, faulty)):
            return None
        return [
            [
                claimed.name,
                " ".join(fault),
                norms,
                *self._found(other_kernels(decoder, profile, self.windows), fault, tried()),
            ]
            for norms, decoder in self.theirs.items()
        ]

    def _found(self, server: EngineModel, fault: tuple[str, str], tried: TriedChanges) -> list[str]:
        found = tried.suspects(through_a_file(self._log_probabilities(server)))
        best, *_ = found.ranked
        (its_own,) = (each for each in found.ranked if fault in each.changes)
        properties = {name for each in found.possible for name in each.properties}
        return [
            "yes" if properties == {fault[0]} else "no",
            str(len(found.possible)),
            "yes" if its_own.is_possible else "no",
            changes_in_words(best),
            f"{best.mean_delta:.3g}",
            in_nats(its_own.behind),
        ]

    def _log_probabilities(self, engine: Any) -> list[Tensor]:
        return [log_probabilities(engine, window) for window in self.windows]
