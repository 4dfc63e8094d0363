"""Statistics of the experts of a mixture, one line a layer: the expert of the worst cast, and tokens per expert.

A layer may have 128 experts, whose casts would be thousands of rows of a page. Of each layer's experts are kept:

| name                 | meaning                                                                                  |
|----------------------|------------------------------------------------------------------------------------------|
| expert_sqnr_db       | lowest SQNR of a cast of any expert's input, weight or gradient                          |
| worst_expert         | which expert that is                                                                     |
| least_expert_tokens  | tokens of the expert that got the fewest in the step                                     |
| most_expert_tokens   | tokens of the one that got the most                                                      |
| least_expert_share   | tokens in all sampled steps so far over an even share, of the expert with the fewest     |
| least_expert         | which expert that is                                                                     |
| idle_experts         | experts that got no token in any sampled step so far                                     |

A token is a row that is not all zeros: Llama 4 passes every token to every expert, times a score of 0 where the router
chose another.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from octavo.doctor.statistics import CAST_SUMS, cast_sums
from octavo.doctor.tables import Floats
from octavo.nn.grouped_linear import ExpertsProjection, GroupedLinear
from octavo.numerics import QuantizedTensor
from octavo.recipes import CastSpec
from octavo.scaling import INPUT, Operand

__all__ = ["ExpertStatistics"]

_ENERGY, _NOISE = CAST_SUMS.index("energy"), CAST_SUMS.index("noise")


class _ExpertRecorder:
    """The ``experts_watch`` of one layer: tokens of each expert, and the largest relative noise of its casts."""

    def __init__(self, experts: int, device: torch.device) -> None:
        self.tokens, self.noise = torch.zeros(2, experts, dtype=torch.float64, device=device)

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
            noise = measured[:, _NOISE] / measured[:, _ENERGY]
            self.noise[at] = torch.maximum(self.noise[at], noise.nan_to_num(0.0))


class ExpertStatistics:
    """Statistics of all experts of a model; their tokens are added up over the sampled steps.

    Attributes:
        layers: the layers of experts, by path.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, GroupedLinear)}
        self._tokens: dict[str, Floats] = {}

    @contextmanager
    def recording(self, measured: dict[str, Tensor]) -> Iterator[None]:
        """Measure a step; ``measured`` is filled with tokens and noise [2, E] of each layer's experts at its end."""
        recorders: dict[str, list[_ExpertRecorder]] = {}
        for path, layer in self.layers.items():
            owner = path.rpartition(".")[0] if isinstance(layer, ExpertsProjection) else path
            layer.experts_watch = _ExpertRecorder(layer.experts, layer.stored_weight.device)
            recorders.setdefault(owner, []).append(layer.experts_watch)
        try:
            yield
            for owner, each in recorders.items():  # projections of the same experts see the same tokens
                pairs = torch.stack([torch.stack([one.tokens, one.noise]) for one in each])
                measured[owner] = pairs.amax(dim=0)
        finally:
            for layer in self.layers.values():
                layer.experts_watch = None

    def numbers(self, measured: Mapping[str, Floats]) -> dict[str, dict[str, float]]:
        """The numbers of the table above by name and path; adds the step's tokens to those before."""
        lines = {path: self._line(path, tokens, noise) for path, (tokens, noise) in measured.items() if tokens.any()}
        names = next(iter(lines.values()), {})
        return {name: {path: line[name] for path, line in lines.items()} for name in names}

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
