"""Modules of other libraries that multiply by weights of their own and are no ``nn.Linear``, run in FP8.

A module keeps its parameters, its name and its place: it becomes a subclass of its own class, with a layer for each
weight as a submodule, ``fp8_`` and the weight's name, which holds a recipe and scaling state and no parameter. In high
precision, as inside ``octavo.autocast(enabled=False)``, its own forward runs.

Which modules these are: :mod:`octavo.convert.experts`, :mod:`octavo.convert.convolutions`, ``nn.Bilinear``, and
transformers' ``Conv1D``, a linear layer of GPT-2's family whose weight is stored transposed.
"""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from octavo.functional import fp8_linear
from octavo.nn import Linear
from octavo.nn.scaled_layer import ScaledLayer, in_autocast_dtype
from octavo.numerics.cast import check_float
from octavo.recipes import Recipe
from octavo.scaling import ScaleUpdates
from octavo.scaling.scale_updates import stop_following

__all__ = [
    "ConvertedBilinear",
    "ConvertedConv1D",
    "ConvertedModule",
    "OwnersProjection",
    "convert_module",
    "linear_layers",
    "owner_name",
    "restore_module",
    "weight_name",
]

_PREFIX = "fp8_"


class ConvertedModule(torch.nn.Module):
    """Base of the modules that run a recipe; a subclass's forward calls the layers of the weights."""

    restored_class: ClassVar[type[torch.nn.Module]]
    is_transposed: bool = False  # whether a weight is [..., K, N]

    def weights(self) -> tuple[str, ...]:
        """Names of the parameters that the module multiplies by."""
        raise NotImplementedError

    def new_layer(self, weight: str) -> ScaledLayer:
        """Create the layer that multiplies by a parameter."""
        raise NotImplementedError

    def layer(self, weight: str) -> Any:
        """The layer that multiplies by a parameter."""
        return self._modules[f"{_PREFIX}{weight}"]

    def layers(self) -> Iterator[tuple[str, ScaledLayer]]:
        """The layers by their weight's name."""
        for name, layer in self._modules.items():
            if name.startswith(_PREFIX) and isinstance(layer, ScaledLayer):
                yield name.removeprefix(_PREFIX), layer

    def is_high_precision_now(self) -> bool:
        """Whether no weight's recipe casts in this call, so that the module's own forward runs."""
        recipes = [layer.recipe_now() for _, layer in self.layers()]  # each layer takes note that it is called
        return all(recipe.is_high_precision for recipe in recipes)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy and pickle: the class is made where it is loaded, since no module has it under a name."""
        state = super().__reduce_ex__(protocol)[2]
        return _blank, (type(self).__bases__[0], self.restored_class), state


_classes: dict[tuple[type[ConvertedModule], type[torch.nn.Module]], type[ConvertedModule]] = {}


def _subclass(kind: type[ConvertedModule], original: type[torch.nn.Module]) -> type[ConvertedModule]:
    """The class of a converted module; ``original`` stays its base, for all that ask what it is."""
    if (kind, original) not in _classes:
        _classes[kind, original] = type(f"FP8{original.__name__}", (kind, original), {"restored_class": original})
    return _classes[kind, original]


def _blank(kind: type[ConvertedModule], original: type[torch.nn.Module]) -> ConvertedModule:
    converted = _subclass(kind, original)
    return converted.__new__(converted)


def convert_module(
    module: torch.nn.Module, kind: type[ConvertedModule] | None, recipe: Recipe, updates: ScaleUpdates, *, path: str
) -> tuple[str, ...]:
    """Let a module run a recipe, in place, or another one than before.

    Args:
        module: of a class that ``kind`` is for, or converted before.
        kind: how it multiplies.
        recipe: the casts and GEMMs.
        updates: when a delayed step ends.
        path: the module's path in its model.

    Returns:
        The names of the weights in the model.
    """
    if not isinstance(module, ConvertedModule):
        assert kind is not None, "a module that octavo knows"
        module.__class__ = _subclass(kind, type(module))
        assert isinstance(module, ConvertedModule)
        for weight in module.weights():
            module.add_module(f"{_PREFIX}{weight}", module.new_layer(weight))
    names = []
    for weight, layer in module.layers():
        names.append(f"{path}.{weight}" if path else weight)
        layer.set_recipe(recipe, updates, path=names[-1])
        layer.train(module.training)
    return tuple(names)


def restore_module(module: ConvertedModule) -> None:
    """Make a module what it was; its parameters are untouched, scaling state is dropped."""
    for weight, layer in list(module.layers()):
        stop_following(layer)
        del module._modules[f"{_PREFIX}{weight}"]  # noqa: SLF001 (an attribute's name may be any weight's)
    module.__class__ = type(module).restored_class  # type: ignore[assignment]


class OwnersProjection(ScaledLayer):
    """``y = x @ matrix.T + bias`` with another module's parameters; the matrix [N, K] is a view of its weight."""

    def __init__(self, owner: torch.nn.Module, view: Callable[[Tensor], Tensor], *, adds_bias: bool = True) -> None:
        super().__init__()
        self.__dict__["owner"] = owner  # it is no submodule of this one
        self.view, self.adds_bias = view, adds_bias
        self.out_features, self.in_features = view(self.stored_weight).shape

    @property
    def stored_weight(self) -> Tensor:
        """The owner's weight, as it is stored."""
        weight: Tensor = self.__dict__["owner"].weight
        return weight

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """The owner's, which an optimizer steps."""
        owner: torch.nn.Module = self.__dict__["owner"]
        return owner.parameters(recurse=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N]."""
        recipe, bias = self.recipe_now(), self.__dict__["owner"].bias if self.adds_bias else None
        check_float(x, f"the input of {self.called}")
        matrix = self.view(self.stored_weight)
        y = fp8_linear(in_autocast_dtype(x), matrix, bias, recipe, scaling=self._layer_scaling(recipe))
        self._watch_backward(y)
        return y

    def _layer_scaling(self, recipe: Recipe) -> Any:
        scaling = super()._layer_scaling(recipe)
        scaling.weight_is_parameter = True  # the matrix is a view
        return scaling


def linear_layers(model: torch.nn.Module) -> dict[str, ScaledLayer]:
    """Converted layers of one matrix, by the path of the module that has the weight: linear layers, Conv1D and others.

    Example:
        >>> import octavo
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Conv2d(4, 4, 1))
        >>> _ = octavo.convert(model, convolutions=True)
        >>> list(linear_layers(model))
        ['0', '1']
    """
    return {
        owner_name(path): module
        for path, module in model.named_modules()
        if isinstance(module, (Linear, OwnersProjection))
    }


def owner_name(name: str) -> str:
    """Name of a layer, or of something of it, by the module that has the layer's weight.

    Example:
        >>> owner_name("h.0.c_fc.fp8_weight.input")
        'h.0.c_fc.input'
    """
    return ".".join(part for part in name.split(".") if part != f"{_PREFIX}weight")


def weight_name(path: str) -> str:
    """Name of the weight that a layer of a converted module multiplies by; another layer's path stays as it is.

    Example:
        >>> weight_name("mlp.experts.fp8_down_proj")
        'mlp.experts.down_proj'
    """
    module, _, name = path.rpartition(".")
    return f"{module}.{name.removeprefix(_PREFIX)}" if module else name


class ConvertedConv1D(ConvertedModule):
    """transformers' ``Conv1D``."""

    is_transposed = True

    def weights(self) -> tuple[str, ...]:
        """Its one weight, [K, N]."""
        return ("weight",)

    def new_layer(self, weight: str) -> ScaledLayer:
        """A layer that multiplies by the transpose."""
        return OwnersProjection(self, torch.t)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N]."""
        if self.is_high_precision_now():
            return super().forward(x)  # type: ignore[no-any-return]
        return self.layer("weight")(x)  # type: ignore[no-any-return]


class ConvertedBilinear(ConvertedModule):
    """``nn.Bilinear``, y[n] = x1 W[n] x2 + b[n]: one GEMM of x2 by the weight [N · K1, K2], then sums over K1."""

    in1_features: int
    out_features: int
    bias: Tensor | None

    def weights(self) -> tuple[str, ...]:
        """Its one weight, [N, K1, K2]."""
        return ("weight",)

    def new_layer(self, weight: str) -> ScaledLayer:
        """A layer that multiplies by all matrices, one below the other."""
        return OwnersProjection(self, _stacked, adds_bias=False)

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """Map [..., K1] and [..., K2] to [..., N]."""
        if self.is_high_precision_now():
            return super().forward(input1, input2)  # type: ignore[no-any-return]
        mapped = self.layer("weight")(input2).unflatten(-1, (self.out_features, self.in1_features))
        y: Tensor = (mapped @ input1.to(mapped.dtype).unsqueeze(-1)).squeeze(-1)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def _stacked(weight: Tensor) -> Tensor:
    return weight.flatten(0, 1)
