"""BF16 reference of a model (octavo.quantization.bf16), and forward passes that start at a changed layer.

A change of a layer does not affect the layers before it, so a forward pass can start from the reference's residual
stream at the changed layer's block: it runs half the blocks on average, and none for the head. This needs octavo's own
Llama; any other model runs from the beginning.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from octavo.convert import convert, restore
from octavo.errors import ConfigError
from octavo.language_model import logits_of
from octavo.models import Llama
from octavo.nn import Linear
from octavo.quantization.bf16 import bf16_autocast, round_to_bf16
from octavo.quantization.sensitivity.units import BF16, Unit

__all__ = ["ResumableForward", "in_bf16"]


@contextmanager
def in_bf16(model: nn.Module) -> Iterator[None]:
    """Context manager that turns ``model`` into its BF16 reference, in evaluation mode, with frozen parameters.

    The model is restored bit for bit afterwards.

    Raises:
        ConfigError: some layers are already octavo's.
    """
    converted = [path for path, module in model.named_modules() if isinstance(module, Linear)]
    if converted:
        raise ConfigError(f"layer {converted[0]!r} is already octavo's; call octavo.restore(model) first")
    originals = {parameter: (parameter.data, parameter.requires_grad) for parameter in model.parameters()}
    was_training = model.training
    try:
        for parameter in originals:
            parameter.requires_grad_(False)
        round_to_bf16(model)
        convert(model, BF16, convert_head=True)
        with bf16_autocast(next(model.eval().parameters()).device):
            yield
    finally:
        restore(model)
        for parameter, (data, requires_grad) in originals.items():
            parameter.data = data
            parameter.requires_grad_(requires_grad)
        model.train(was_training)


class ResumableForward:
    """Forward pass of one sequence, repeatable from the block of a changed unit.

    Args:
        model: see :func:`in_bf16`.
        tokens: [1, T].
    """

    def __init__(self, model: nn.Module, tokens: Tensor) -> None:
        self.model, self.tokens = model, tokens
        self.streams: list[Tensor] = []
        if isinstance(model, Llama):
            stream = model.model.embed_tokens(tokens)
            self.streams = [stream, *model.model.streams(stream)]
            self.logits = self._from_stream(len(self.streams) - 1)
        else:
            self.logits = logits_of(model, tokens)

    def recompute(self, unit: Unit) -> Tensor:
        """Recompute the logits [1, T, V], starting at the block of ``unit``."""
        first = self._first_block(unit)
        return logits_of(self.model, self.tokens) if first is None else self._from_stream(first)

    def _first_block(self, unit: Unit) -> int | None:
        if not isinstance(self.model, Llama) or unit.is_table:
            return None
        module = self.model.get_submodule(unit.path)
        blocks = self.model.model.layers
        inside = (index for index, block in enumerate(blocks) if any(module is one for one in block.modules()))
        return next(inside, len(blocks))

    def _from_stream(self, first: int) -> Tensor:
        assert isinstance(self.model, Llama)
        *_, last = (self.streams[first], *self.model.model.streams(self.streams[first], first=first))
        logits: Tensor = self.model.lm_head(self.model.model.norm(last))
        return logits
