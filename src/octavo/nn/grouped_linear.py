"""``octavo.nn.GroupedLinear``: the linear layers of a mixture's experts as one, with a recipe."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from octavo import recipes
from octavo.autocast import active_recipe
from octavo.errors import ConfigError
from octavo.functional import fp8_grouped_linear
from octavo.kernels.tracing import is_distributed
from octavo.nn.arguments import check_sizes
from octavo.nn.scaled_layer import ScaledLayer, in_autocast_dtype
from octavo.numerics.cast import check_float
from octavo.recipes import Recipe
from octavo.scaling import ExpertsWatch, LayerScaling, ScaleUpdates

__all__ = ["ExpertsProjection", "GroupedLinear"]


class GroupedLinear(ScaledLayer):
    """``y[t] = x[t] @ weight[e].T + bias[e]``: each row by its own expert, with the GEMMs in FP8.

    Each expert is a linear layer of its own, with the codes, scales and amaxes of :class:`octavo.nn.Linear`; one that
    gets no rows keeps its history as it is. A recipe's static input has a scale for each expert.

    Args:
        experts: E.
        in_features: K.
        out_features: N.
        bias: whether each expert has a bias [N].
        recipe: a preset's name or a recipe.
        manual_scale_updates: as for :class:`octavo.nn.Linear`.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ConfigError: a size below 1, an unknown recipe.

    Example:
        >>> layer = GroupedLinear(4, 16, 8, recipe="rowwise")
        >>> layer(torch.zeros(5, 16), torch.tensor([0, 2, 2, 2, 5])).shape
        torch.Size([5, 8])
    """

    experts: int
    experts_watch: ExpertsWatch | None = None  # set for the steps that the doctor inspects
    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        recipe: str | Recipe = "tensorwise",
        manual_scale_updates: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes(experts=experts, in_features=in_features, out_features=out_features)
        super().__init__()
        self.experts, self.in_features, self.out_features = experts, in_features, out_features
        shape = (experts, out_features, in_features)
        self.weight = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        biases = torch.nn.Parameter(torch.empty(shape[:2], device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", biases)
        self.reset_parameters()
        self.set_recipe(recipes.get(recipe), ScaleUpdates(manual=manual_scale_updates))

    def reset_parameters(self) -> None:
        """Initialize each expert as ``torch.nn.Linear`` does a layer."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -bound, bound)

    @property
    def stored_weight(self) -> Tensor:
        """The parameter that stores the weights."""
        return self.weight

    def matrices(self) -> tuple[Tensor, Tensor | None]:
        """The weights [E, N, K] and biases [E, N]."""
        return self.weight, self.bias

    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001 (the numbers of rows are read on the host)
    def forward(self, input: Tensor, offsets: Tensor) -> Tensor:  # noqa: A002 (as nn.Linear's)
        """Map [T, K] to [T, N]; expert e has the rows from ``offsets[e]`` to ``offsets[e + 1]``.

        Args:
            input: its rows sorted by expert.
            offsets: [E + 1], int32 or int64, rising from 0; rows beyond the last belong to no expert and become 0.
        """
        recipe = self.recipe_now()
        check_float(input, "the input of octavo.nn.GroupedLinear")
        weight, bias = self.matrices()
        if is_distributed(weight):
            raise ConfigError(
                f"{self.called} has experts whose weights are DTensors, which octavo cannot cast on several ranks "
                "yet; leave them out with convert's skip, or gather them first (FSDP2 does)"
            )
        x = in_autocast_dtype(input)
        if recipe.is_high_precision:
            return fp8_grouped_linear(x, weight.to(x.dtype), bias, offsets, recipe)
        y = fp8_grouped_linear(x, weight, bias, offsets, recipe, scaling=self._layer_scaling(recipe))
        self._watch_backward(y)
        return y

    def _layer_scaling(self, recipe: Recipe) -> LayerScaling:
        scaling = super()._layer_scaling(recipe)
        scaling.experts_watch = self.experts_watch
        return scaling

    def _checked_input_scale(self) -> Tensor | None:
        """The scales of a static input; the experts that have rows are checked when they are cast."""
        return self._buffers["input_scale"]

    def extra_repr(self) -> str:
        """The shape and the name of the recipe in force."""
        return (
            f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}, "
            f"recipe={active_recipe(self.recipe).name}"
        )


class ExpertsProjection(GroupedLinear):
    """A :class:`GroupedLinear` whose parameters are those of the module that it is part of.

    So the owner's ``state_dict``, and what optimizers hold, stay as they are.

    Args:
        owner: the experts.
        weight: name of its parameter [E, N, K].
        bias: name of its parameter [E, N], if there is one.
        transposed: whether the parameter is [E, K, N] instead.
    """

    def __init__(self, owner: torch.nn.Module, weight: str, bias: str | None, *, transposed: bool) -> None:
        torch.nn.Module.__init__(self)
        self.__dict__["owner"] = owner  # it is no submodule of this one
        self.weight_name, self.bias_name, self.is_transposed = weight, bias, transposed
        self.experts, *sizes = getattr(owner, weight).shape
        self.in_features, self.out_features = sizes if transposed else reversed(sizes)

    @property
    def stored_weight(self) -> Tensor:
        """The owner's parameter."""
        weight: Tensor = getattr(self.__dict__["owner"], self.weight_name)
        return weight

    def matrices(self) -> tuple[Tensor, Tensor | None]:
        """The weights [E, N, K], a transposed view where the owner stores [E, K, N], and biases [E, N]."""
        weight, bias = self.stored_weight, self.bias_name
        return (
            weight.transpose(1, 2) if self.is_transposed else weight,
            None if bias is None else getattr(self.__dict__["owner"], bias),
        )

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """The owner's parameters that this layer multiplies by and adds."""
        for name in (self.weight_name, self.bias_name):
            if name is not None:
                yield getattr(self.__dict__["owner"], name)
