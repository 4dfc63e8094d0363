"""Which layers can be quantised at all: ``nn.Linear``, and no class that multiplies by a matrix of its own.

Transformers' GPT-2 keeps its weights, transposed, in a class ``Conv1D``. Nothing of it would be quantised but its head,
and its figures beside BF16's would look perfect: so such a model is refused, by the name of that class.
"""

from collections.abc import Collection

from torch import nn

from octavo.errors import ConfigError

__all__ = ["check_has_layers"]


def check_has_layers(model: nn.Module, paths: Collection[str]) -> None:
    """Refuse a model without a layer to quantise.

    Args:
        model: any.
        paths: of the layers that would be quantised.

    Raises:
        ConfigError: there are none; it names the classes that hold the model's matrices.

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
    mend = f"its weights are in {', '.join(owners)}; replace those by nn.Linear, or give" if owners else "give"
    raise ConfigError(
        f"this model has no nn.Linear layer besides its head, so there is nothing to quantise; {mend} another model"
    )
