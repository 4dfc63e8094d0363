"""``torch.ao.quantization``'s training for FP8: a ``QConfig``, and nothing else of the program changes.

    model.qconfig = fp8_qconfig()
    model = torch.ao.quantization.prepare_qat(model)      # octavo.prepare_qat
    ...                                                   # train
    model = torch.ao.quantization.convert(model)          # octavo.convert_qat

``QConfig``'s own parts cannot say this. torch.ao's layer casts a weight and an output, where FP8 casts the two operands
of a product; ``convert`` takes weights of qint8 alone; and ``prepare_qat`` fails on ``nn.MultiheadAttention``, whose
``out_proj`` its layer refuses. So octavo's layers do the work, which torch.ao does not know and leaves alone:

- ``prepare_qat`` hands the ``QConfig`` from module to module, from the outermost inwards, and tells its constructors
  which module they are for. The first module of a part of the model has that part prepared, and the ``qconfig`` of all
  within set to None: no observers, no layers of torch.ao's.
- ``convert`` ends by deleting every module's ``qconfig``. A layer whose own goes away is converted.

A module's own ``qconfig`` counts, as torch.ao has it: None leaves out the module and what is within.

torch.ao.quantization is deprecated in favour of torchao, and is there in torch 2.13.
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
    """A ``QConfig`` with which ``torch.ao.quantization`` trains and converts as octavo does, to the bit.

    Args:
        recipe: as in :func:`octavo.prepare_qat`.
        options: its other arguments; ``layer_filter`` is called with paths within the module that has the ``qconfig``.

    Raises:
        TypeError: no such argument.
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
    """The constructor of an observer, as far as ``prepare_qat`` asks one."""

    recipe: Any
    options: dict[str, Any]

    def __call__(self) -> nn.Module:
        """An observer that does nothing."""
        return nn.Identity()

    def with_args(self, **_: Any) -> "_Preparing":
        """Accept ``factory_kwargs``, so that :meth:`with_callable_args` is called."""
        return self

    def with_callable_args(self, factory_kwargs: Callable[[], Any]) -> "_Preparing":
        """Prepare the module that the function closes over; torch.ao passes it to find that module's device."""
        module = inspect.getclosurevars(factory_kwargs).nonlocals.get("module")
        if not isinstance(module, nn.Module):
            raise ConfigError(
                "this torch's prepare_qat does not say which module a QConfig is for; call octavo.prepare_qat(model) "
                "and octavo.convert_qat(model) instead of torch.ao.quantization's"
            )
        if not any(isinstance(each, QATLinear) for each in module.modules()):  # prepare_qat asks twice
            try:
                _prepare(module, self.recipe, **self.options)
            except (AttributeError, TypeError) as error:  # which torch.ao would take for an answer, and go on
                raise ConfigError(f"this model cannot be prepared with octavo's QConfig: {error}") from error
        return self


class _TorchAOLinear(QATLinear):
    """A layer in training that is converted when torch.ao deletes its ``qconfig``."""

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
        raise ConfigError(f"{type(module).__name__} is no layer that trains for FP8; leave its qconfig out")
    part = cache(lambda: set(_part(module)))  # first asked for when attention's projections are layers
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
    """A module and what is within, up to modules that have a ``qconfig`` of their own."""
    yield module
    for child in module.children():
        if not hasattr(child, "qconfig"):
            yield from _part(child)
