"""A linear layer for each expert, in place of transformers' experts with weights of three dimensions.

Files, servers and everything octavo does after training know an expert as linear layers of its own. transformers writes
them so too: its table of conversions divides ``gate_up_proj`` [E, 2I, K] into ``experts.0.w1.weight`` [I, K] and so on,
by the names of each architecture. :func:`unfuse_experts` asks that table which rows of which weight have which name,
with numbered rows in place of weights, so there is no list of architectures here. The layers' weights are views of the
fused ones: nothing is copied.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.convert.experts import InterfaceExperts, is_experts, kind_of
from octavo.convert.other_modules import ConvertedModule
from octavo.errors import ConfigError

__all__ = ["TensorNames", "UnfusedExperts", "expert_layers", "file_names", "undivided_experts", "unfuse_experts"]

_EXPERT = re.compile(r"\.experts\.(\d+)\.(\w+)\.weight$")


class _Rows(NamedTuple):
    """Rows of an expert's matrix in a fused weight that have a name of their own in checkpoints."""

    weight: str
    name: str
    start: int
    stop: int


class UnfusedExperts(nn.Module):
    """Experts of transformers' interface with a linear layer for each name that an expert's weights have in files.

    Args:
        fused: the experts; its weights become the layers', its activation stays in use.
        parts: rows of its weights by name, in the order of the rows.
    """

    def __init__(self, fused: nn.Module, parts: tuple[_Rows, ...]) -> None:
        super().__init__()
        self.num_experts = int(fused.num_experts)  # type: ignore[arg-type]
        *self.up_names, self.down_name = [part.name for part in parts]
        for expert in range(self.num_experts):
            layers = {part.name: _linear(getattr(fused, part.weight), expert, part) for part in parts}
            self.add_module(str(expert), nn.ModuleDict(layers))
        for weight in {part.weight for part in parts}:
            delattr(fused, weight)
        self.activation = fused.train(mode=fused.training)
        self.train(mode=fused.training)

    def experts(self) -> Iterator[nn.ModuleDict]:
        """The layers of each expert, by name."""
        for expert in range(self.num_experts):
            layers = self._modules[str(expert)]
            assert isinstance(layers, nn.ModuleDict)
            yield layers

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Send each token [K] to its experts, top_k of [tokens, top_k], and add up their outputs by their weights.

        An index of ``num_experts`` stands for no expert.
        """
        (tokens, top_k), width = top_k_index.shape, hidden_states.shape[-1]
        index, order = torch.sort(top_k_index.reshape(-1), stable=True)
        counts = torch.bincount(index, minlength=self.num_experts + 1).tolist()
        outputs = hidden_states.new_zeros(tokens * top_k, width)
        for layers, rows in zip(self.experts(), order.split(counts), strict=False):
            if len(rows):
                output = self._expert(layers, hidden_states[rows // top_k])
                outputs[rows] = (output * top_k_weights.reshape(-1)[rows, None]).to(outputs.dtype)
        return outputs.view(tokens, top_k, width).sum(dim=1)

    def _expert(self, layers: nn.ModuleDict, x: Tensor) -> Tensor:
        rule: Any = self.activation
        hidden = torch.cat([layers[name](x) for name in self.up_names], dim=-1)
        activate = rule._apply_gate if rule.has_gate else rule.act_fn  # noqa: SLF001 (transformers' interface)
        output: Tensor = layers[self.down_name](activate(hidden))
        return output


def _linear(weight: Tensor, expert: int, part: _Rows) -> nn.Linear:
    matrix = weight.detach()[expert, part.start : part.stop]
    layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(matrix, requires_grad=weight.requires_grad)
    return layer


def unfuse_experts(model: nn.Module) -> dict[str, str]:
    """Give each expert of transformers' interface its own linear layers, in place.

    Returns:
        The paths of the experts that stay as they are, with the reason.

    Raises:
        ConfigError: experts run a recipe already.
    """
    for path, module in model.named_modules():
        if isinstance(module, ConvertedModule) and is_experts(module):
            raise ConfigError(
                f"the experts {path!r} run a recipe on their weights of three dimensions; call octavo.restore(model), "
                "then unfuse_experts, then convert the linear layers"
            )
    reasons = {}
    for path, module, parts in list(_divisions(model)):
        if isinstance(parts, str):
            reasons[path] = parts
        else:
            model.set_submodule(path, UnfusedExperts(module, parts))
    return reasons


def undivided_experts(model: nn.Module) -> dict[str, str]:
    """Paths of the experts that :func:`unfuse_experts` would leave as they are, with the reason.

    Example:
        >>> undivided_experts(torch.nn.Linear(4, 4))
        {}
    """
    return {path: parts for path, _, parts in _divisions(model) if isinstance(parts, str)}


def _divisions(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[_Rows, ...] | str]]:
    """Experts with how files divide their weights, or the reason why they cannot be divided."""
    for path, module in model.named_modules():
        if is_experts(module):
            known = kind_of(module) is InterfaceExperts
            yield path, module, _parts(model, path, module) if known else "octavo does not know how files name them"


def expert_layers(model: nn.Module) -> set[str]:
    """Paths of the linear layers of all experts that :func:`unfuse_experts` gave layers of their own.

    Example:
        >>> expert_layers(torch.nn.Linear(4, 4))
        set()
    """
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, UnfusedExperts)
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
    }


def _parts(model: nn.Module, path: str, module: Any) -> tuple[_Rows, ...] | str:
    """How files divide the experts' weights, or the reason why they cannot be divided."""
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    if {name for name, _ in module.named_parameters()} != set(names):
        return "experts with biases or norms are not divided"
    if not hasattr(model, "config"):
        return "the model has no config, by which transformers names the weights in files"
    parts = list[_Rows]()
    for weight in names:
        experts, rows, _ = getattr(module, weight).shape
        numbered = torch.arange(experts * rows).view(experts, rows, 1)
        found = {_rows(weight, rows, *each) for each in _written(model, {f"{path}.{weight}": numbered}).items()}
        known = [each for each in found if each is not None]
        if len(known) < len(found) or sum(each.stop - each.start for each in known) != rows:
            return "files have one weight for all of its experts"
        parts += sorted(known, key=lambda each: each.start)
    return tuple(parts)


def _rows(weight: str, rows: int, name: str, numbers: Tensor) -> _Rows | None:
    """The rows of an expert's matrix that a file's tensor has; None if it is not that."""
    expert = _EXPERT.search(name)
    if expert is None:
        return None
    start = int(numbers.flatten()[0]) - int(expert[1]) * rows
    expected = torch.arange(start, start + len(numbers))[:, None] + int(expert[1]) * rows
    is_part = start >= 0 and torch.equal(numbers, expected)
    return _Rows(weight, expert[2], start, start + len(numbers)) if is_part else None


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of tensors that are others in files than in the model, or the other way round.

    Attributes:
        changed: other name by name.
    """

    changed: Mapping[str, str] = field(default_factory=dict)

    def path(self, path: str) -> str:
        """The other path of a layer."""
        return self.changed.get(f"{path}.weight", f"{path}.weight").removesuffix(".weight")

    def tensor(self, name: str) -> str:
        """The other name of a tensor; what is beside a layer's weight, such as its scale, follows the layer."""
        path, dot, last = name.rpartition(".")
        return self.changed[name] if name in self.changed else f"{self.path(path)}{dot}{last}"

    def reversed(self) -> "TensorNames":
        """From the other names to these."""
        return TensorNames({other: name for name, other in self.changed.items()})


def file_names(model: nn.Module) -> TensorNames:
    """Names in files of the tensors of a model with unfused experts; other models' are the same in both.

    Example:
        >>> file_names(torch.nn.Linear(4, 4))
        TensorNames(changed={})
    """
    if not any(isinstance(module, UnfusedExperts) for module in model.modules()):
        return TensorNames()
    names = list(model.state_dict())
    written = _written(model, {name: torch.tensor(number) for number, name in enumerate(names)})
    changed = {names[int(number)]: name for name, number in written.items()}
    return TensorNames({name: other for name, other in changed.items() if other != name})


def _written(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a state_dict under the names and in the shapes that transformers writes."""
    from transformers.core_model_loading import revert_weight_conversion

    pretrained: Any = model
    written: dict[str, Tensor] = revert_weight_conversion(pretrained, tensors)
    return written
