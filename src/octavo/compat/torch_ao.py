"""FP8 training by ``torch.ao.quantization``: a program changes only its ``QConfig``.

    model.qconfig = fp8_qconfig()
    model = torch.ao.quantization.prepare_qat(model)      # octavo.prepare_qat
    ...                                                   # train
    model = torch.ao.quantization.convert(model)          # octavo.convert_qat

A ``QConfig`` of torch.ao's observers cannot express FP8 training. torch.ao's layer casts a weight and an output, where
FP8 casts both operands of a GEMM; ``convert`` supports only qint8 weights; and ``prepare_qat`` fails on
``nn.MultiheadAttention``, because of its ``out_proj``. So octavo's layers are used, which torch.ao does not modify:

- ``prepare_qat`` visits modules from the outermost inwards and passes each to the constructors of its ``QConfig``. At
  the first module of a part of the model octavo prepares that part and sets the ``qconfig`` of its submodules to None,
  so that torch.ao adds no observers or layers.
- ``convert`` ends by deleting every module's ``qconfig``. A layer is converted when its ``qconfig`` is deleted.

As in torch.ao, a module's ``qconfig`` of None excludes the module and its submodules.

torch.ao.quantization is deprecated in favour of torchao, and still part of torch 2.13.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn
from torch.ao.quantization import QConfig

from octavo import recipes
from octavo.errors import ConfigError
from octavo.nn import Linear
from octavo.quantization.qat.linear import QATLinear
from octavo.quantization.qat.prepare import check_recipe, convert_qat, prepare_qat

__all__ = ["fp8_qconfig"]


def fp8_qconfig(recipe: Any = "static", **options: Any) -> QConfig:
    """``QConfig`` with which ``torch.ao.quantization`` trains and converts bit for bit as octavo.

    Args:
        recipe: see :func:`octavo.prepare_qat`.
        options: its other arguments; ``layer_filter`` gets paths relative to the module that has the ``qconfig``.

    Raises:
        TypeError: unknown argument.
        ConfigError: a recipe that :func:`octavo.prepare_qat` refuses.

    Example:
        >>> import torch, warnings
        >>> from torch.ao.quantization import convert, prepare_qat
        >>> warnings.filterwarnings("ignore", "torch.ao.quantization is deprecated")
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> model.qconfig = fp8_qconfig("static", scales="tracked")
        >>> model = prepare_qat(model)
        >>> model(torch.randn(4, 8)).sum().backward()  # a training step, and its optimizer's
        >>> convert(model)[0]
        Linear(in_features=8, out_features=8, bias=True, recipe=static)
    """
    inspect.signature(prepare_qat).bind(None, recipe, **options)
    check_recipe(recipes.get(recipe))
    return QConfig(activation=_Preparing(recipe, options), weight=nn.Identity)


@dataclass(eq=False, slots=True)
class _Preparing:
    """Observer constructor with the interface that ``prepare_qat`` uses."""

    recipe: Any
    options: dict[str, Any]

    def __call__(self) -> nn.Module:
        """Return an observer that does nothing."""
        return nn.Identity()

    def with_args(self, **_: Any) -> "_Preparing":
        """Accept ``factory_kwargs``, so that :meth:`with_callable_args` is called."""
        return self

    def with_callable_args(self, factory_kwargs: Callable[[], Any]) -> "_Preparing":
        """Prepare the module that the function closes over; torch.ao passes it to find that module's device."""
        module = inspect.getclosurevars(factory_kwargs).nonlocals.get("module")
        if not isinstance(module, nn.Module):
            raise ConfigError(
                "prepare_qat of this torch does not pass the module of a QConfig; call octavo.prepare_qat(model) "
                "and octavo.convert_qat(model) instead of torch.ao.quantization's"
            )
        if not any(isinstance(each, QATLinear) for each in module.modules()):  # prepare_qat calls this twice
            try:
                _prepare(module, self.recipe, **self.options)
            except (AttributeError, TypeError) as error:  # torch.ao would suppress these
                raise ConfigError(f"this model cannot be prepared with octavo's QConfig: {error}") from error
        return self


class _TorchAOLinear(QATLinear):
    """Layer in training that is converted when torch.ao deletes its ``qconfig``."""

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name == "qconfig":
            path = self.path
            self.__class__ = QATLinear  # type: ignore[assignment]
            for reason in convert_qat(self).skipped.values():
                warnings.warn(f"layer {path!r} is {reason}", stacklevel=2)
            if isinstance(self, Linear):
                self.path = path


def _prepare(module: nn.Module, recipe: Any, *, layer_filter: Any = None, **options: Any) -> None:
    """Prepare the part of a model whose ``qconfig`` is this module's."""
    if not isinstance(module, nn.Linear) and not list(module.children()):
        raise ConfigError(f"{type(module).__name__} is not a layer that octavo trains for FP8; remove its qconfig")
    part = cache(lambda: set(_part(module)))  # evaluated after prepare_qat replaced attention's projections
    report = prepare_qat(
        module,
        recipe,
        layer_filter=lambda path, layer: layer in part() and (layer_filter is None or layer_filter(path, layer)),
        **options,
    )
    for each in part() - {module}:
        each.qconfig = None  # type: ignore[assignment]
    for path in report.converted:
        layer = module.get_submodule(path)
        if type(layer) is QATLinear:
            layer.__class__ = _TorchAOLinear


def _part(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and its submodules, except those that have a ``qconfig`` and their submodules."""
    yield module
    for child in module.children():
        if not hasattr(child, "qconfig"):
            yield from _part(child)
