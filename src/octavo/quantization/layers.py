"""Check that a model has layers to quantize: ``nn.Linear``, and no other class that holds a weight matrix.

Transformers' GPT-2 keeps its weights, transposed, in a class ``Conv1D``. Only its head would be quantized, and its
results would look as good as BF16's, so such a model is refused with an error that names the class.
"""

from collections.abc import Collection

from torch import nn

from octavo.errors import ConfigError

__all__ = ["check_has_layers"]


def check_has_layers(model: nn.Module, paths: Collection[str]) -> None:
    """Raise if a model has no layer to quantize.

    Args:
        model: any module.
        paths: paths of the layers that would be quantized.

    Raises:
        ConfigError: ``paths`` is empty; the message names the classes that hold the model's weight matrices.

    Example:
        >>> check_has_layers(nn.Sequential(nn.Conv1d(4, 4, 1)), ())
        Traceback (most recent call last):
        ...
        octavo.errors.ConfigError: this model has no nn.Linear layer ...; its weights are in Conv1d; ...
    """
    if paths:
        return
    owners = {
        type(module).__name__: None
        for module in model.modules()
        if type(module) is not nn.Linear and not isinstance(module, nn.Embedding)
        if any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
    }
    remedy = f"its weights are in {', '.join(owners)}; replace those by nn.Linear, or give" if owners else "give"
    raise ConfigError(
        f"this model has no nn.Linear layer besides its head, so there is nothing to quantize; {remedy} another model"
    )
