"""Statistics of the experts of a mixture, one line a layer: the expert of the worst cast, and tokens per expert.

A layer may have 128 experts, whose casts would be thousands of rows of a page. Of each layer's experts are kept:

| name                 | meaning                                                                                  |
|----------------------|------------------------------------------------------------------------------------------|
| expert_sqnr_db       | lowest SQNR of a cast of any expert's input, weight or gradient; -inf with NaN or ±Inf   |
| worst_expert         | which expert that is                                                                     |
| least_expert_tokens  | tokens of the expert that got the fewest in the step                                     |
| most_expert_tokens   | tokens of the one that got the most                                                      |
| least_expert_share   | tokens in all sampled steps so far over an even share, of the expert with the fewest     |
| least_expert         | which expert that is                                                                     |
| idle_experts         | experts that got no token in any sampled step so far                                     |

Experts that are linear layers each, in a list or of ``unfuse_experts``, have this line too, beside their own rows. A
token of theirs is one that reaches an expert's first layer.

A token is a row that is not all zeros: Llama 4 passes every token to every expert, times a score of 0 where the router
chose another.

Of a sample in which a cast of any expert has NaN or ±Inf there is also, by "path role gemm" of each weight's casts:

| name                 | meaning                                                                                  |
|----------------------|------------------------------------------------------------------------------------------|
| expert_nonfinite     | NaN and ±Inf elements of all experts since the previous sample                           |
| nonfinite_expert     | the expert with the most in the sampled step; NaN if none has any in it                  |
| casts_before         | how many casts of linear layers ran before                                               |
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from octavo.convert import UnfusedExperts
from octavo.convert.other_modules import weight_name
from octavo.convert.routers import experts_in
from octavo.doctor.series import CastKey
from octavo.doctor.statistics import CAST_SUMS, cast_sums
from octavo.doctor.tables import Floats
from octavo.nn.grouped_linear import ExpertsProjection, GroupedLinear
from octavo.numerics import QuantizedTensor
from octavo.recipes import CastSpec
from octavo.scaling import GRAD_OUTPUT, INPUT, ROLES, Operand, inside_backward

__all__ = ["ExpertStatistics"]

_ENERGY, _NOISE, _NONFINITE = (CAST_SUMS.index(name) for name in ("energy", "noise", "nonfinite"))


class _ExpertRecorder:
    """The ``experts_watch`` of one layer: tokens of each expert, and the largest relative noise of its casts.

    Args:
        layer: the layer.
        path: of the weight, in its model.
        casts: of all layers of experts in this step so far, in order; its own are added: the number of linear layers'
            casts before, then the elements of each expert, [1 + E].
        linear_casts: the casts of linear layers in this step so far.
    """

    def __init__(
        self, layer: GroupedLinear, path: str, casts: dict[CastKey, Tensor], linear_casts: Mapping[CastKey, Tensor]
    ) -> None:
        device = layer.stored_weight.device
        self.tokens, self.noise = torch.zeros(2, layer.experts, dtype=torch.float64, device=device)
        self.path, self.casts, self.linear_casts = path, casts, linear_casts

    def cast(
        self,
        role: int,
        spec: CastSpec | None,
        matrices: Sequence[Tensor],
        operands: Sequence[Operand],
        experts: tuple[int, ...],
    ) -> None:
        """Measure one cast of each of these experts."""
        at = torch.tensor(experts, dtype=torch.int64, device=self.tokens.device)
        if role == INPUT:
            rows = torch.stack([(matrix != 0).any(dim=1).sum() for matrix in matrices]) if matrices else at
            self.tokens[at] += rows.to(self.tokens)
        pairs = zip(matrices, operands, strict=True)
        sums = [cast_sums(matrix, each) for matrix, each in pairs if isinstance(each, QuantizedTensor)]
        if spec is not None and len(sums) == len(experts) and sums:
            measured = torch.stack(sums).to(self.tokens.device)
            self.noise[at] = torch.maximum(self.noise[at], _relative_noise(measured))
            key = CastKey(self.path, ROLES[role], "grad_input" if role == GRAD_OUTPUT else "output")
            if key not in self.casts:
                before = torch.tensor([float(len(self.linear_casts))], dtype=torch.float64)
                self.casts[key] = torch.cat([before.to(self.tokens.device), torch.zeros_like(self.tokens)])
            self.casts[key][1 + at] += measured[:, _NONFINITE]


class _CountedTokens:
    """Hooks that count the tokens of each expert until they are removed.

    Args:
        first: the first layer of each expert, by its path.
    """

    def __init__(self, first: Mapping[str, nn.Module]) -> None:
        device = next(next(iter(first.values())).parameters()).device
        self.tokens = torch.zeros(len(first), dtype=torch.float64, device=device)
        self._handles = [
            layer.register_forward_pre_hook(partial(self._count, expert), with_kwargs=True)
            for expert, layer in enumerate(first.values())
        ]

    def _count(self, expert: int, _: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        if not inside_backward():  # activation checkpointing runs a forward again
            x = (*inputs, *named.values())[0]
            self.tokens[expert] += (x.detach() != 0).any(dim=-1).sum().to(self.tokens)

    def remove(self) -> None:
        """Count no more."""
        for handle in self._handles:
            handle.remove()


def _first_layers(experts: nn.Module) -> dict[str, nn.Module]:
    """The first linear layer of each expert, by the expert's name; empty where an expert has none."""
    each = dict(experts.named_children())
    if isinstance(experts, UnfusedExperts):
        each = {name: module for name, module in each.items() if name.isdigit()}
    elif not isinstance(experts, nn.ModuleList | nn.ModuleDict):
        return {}
    first = {
        name: next((layer for layer in module.modules() if isinstance(layer, nn.Linear)), None)
        for name, module in each.items()
    }
    return {name: layer for name, layer in first.items() if layer is not None} if all(first.values()) else {}


def _noise_of_each(path: str, experts: Collection[str], casts: Mapping[CastKey, Tensor]) -> Tensor:
    """The largest relative noise of the casts of each expert's layers."""
    place = {f"{path}.{name}" if path else name: number for number, name in enumerate(experts)}
    noise = [torch.zeros((), dtype=torch.float64)] * len(place)
    depth = path.count(".") + 2 if path else 1
    for key, sums in casts.items():
        number = place.get(".".join(key.path.split(".")[:depth]))
        if number is not None:
            noise[number] = torch.maximum(noise[number].to(sums), _relative_noise(sums))
    return torch.stack([each.to(noise[0]) for each in noise])


def _relative_noise(sums: Tensor) -> Tensor:
    """Noise over energy of CAST_SUMS [..., F]; inf with NaN or ±Inf."""
    noise = sums[..., _NOISE] / sums[..., _ENERGY]
    return noise.nan_to_num(0.0).masked_fill(sums[..., _NONFINITE] > 0, torch.inf)


class ExpertStatistics:
    """Statistics of all experts of a model; their tokens are added up over the sampled steps.

    Attributes:
        layers: the layers of experts, by the path of their weight.
        lists: the first linear layer of each expert, by the path of experts that are linear layers each.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = {
            weight_name(path): layer for path, layer in model.named_modules() if isinstance(layer, GroupedLinear)
        }
        self.lists = {path: first for path in experts_in(model) if (first := _first_layers(model.get_submodule(path)))}
        self._tokens: dict[str, Floats] = {}

    @contextmanager
    def recording(
        self,
        measured: dict[str, Tensor],
        expert_casts: dict[CastKey, Tensor],
        linear_casts: Mapping[CastKey, Tensor],
    ) -> Iterator[None]:
        """Measure a step.

        Args:
            measured: filled at its end with tokens and noise [2, E] of each layer's experts.
            expert_casts: filled for each weight's casts with the number of linear layers' casts before and the NaN and
                ±Inf elements of each expert, [1 + E].
            linear_casts: the casts of linear layers in this step so far.
        """
        recorders: dict[str, list[_ExpertRecorder]] = {}
        for path, layer in self.layers.items():
            owner = path.rpartition(".")[0] if isinstance(layer, ExpertsProjection) else path
            recorder = layer.experts_watch = _ExpertRecorder(layer, path, expert_casts, linear_casts)
            recorders.setdefault(owner, []).append(recorder)
        counting = {path: _CountedTokens(first) for path, first in self.lists.items()}
        try:
            yield
            for path, counted in counting.items():
                noise = _noise_of_each(path, self.lists[path], linear_casts)
                measured[path] = torch.stack([counted.tokens, noise.to(counted.tokens)])
            for owner, each in recorders.items():  # projections of the same experts see the same tokens
                pairs = torch.stack([torch.stack([one.tokens, one.noise]) for one in each])
                measured[owner] = pairs.amax(dim=0)
        finally:
            for layer in self.layers.values():
                layer.experts_watch = None
            for counted in counting.values():
                counted.remove()

    def numbers(self, measured: Mapping[str, Floats]) -> dict[str, dict[str, float]]:
        """The numbers of the table above by name and path; adds the step's tokens to those before."""
        lines = {path: self._line(path, tokens, noise) for path, (tokens, noise) in measured.items() if tokens.any()}
        names = next(iter(lines.values()), {})
        return {name: {path: line[name] for path, line in lines.items()} for name in names}

    @staticmethod
    def nonfinite(
        expert_casts: Mapping[CastKey, Floats], counts: Mapping[tuple[str, str], int]
    ) -> dict[str, dict[str, float]]:
        """The numbers of the second table above; empty without NaN and ±Inf.

        Args:
            expert_casts: as :meth:`recording` fills it.
            counts: elements since the previous sample by the weight's path and the role.
        """
        numbers = {
            " ".join(key): {
                "expert_nonfinite": max(float(elements.sum()), counts[key.path, key.role]),
                "nonfinite_expert": float(elements.argmax()) if elements.any() else np.nan,
                "casts_before": float(before),
            }
            for key, (before, *rest) in expert_casts.items()
            for elements in [np.array(rest)]
        }
        if not any(each["expert_nonfinite"] for each in numbers.values()):
            return {}
        names = next(iter(numbers.values()))
        return {name: {cast: each[name] for cast, each in numbers.items()} for name in names}

    def _line(self, path: str, tokens: Floats, noise: Floats) -> dict[str, float]:
        total = self._tokens[path] = self._tokens.get(path, np.zeros_like(tokens)) + tokens
        worst = int(noise.argmax())
        return {
            "expert_sqnr_db": float(-10 * np.log10(noise[worst])) if noise[worst] else np.nan,
            "worst_expert": worst,
            "least_expert_tokens": float(tokens.min()),
            "most_expert_tokens": float(tokens.max()),
            "least_expert_share": float(total.min() / total.mean()),
            "least_expert": int(total.argmin()),
            "idle_experts": int((total == 0).sum()),
        }
