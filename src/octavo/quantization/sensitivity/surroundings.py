"""A model as its own BF16 reference (octavo.quantization.bf16), and forward passes that begin in its middle.

A layer that changes leaves all before it as they were, so the reference's residual stream at the changed layer's block
is where its forward pass begins: half the blocks on average, and for the head none. octavo's own Llama can be entered
there; any other model runs from its first token.
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

__all__ = ["Stages", "in_bf16"]


@contextmanager
def in_bf16(model: nn.Module) -> Iterator[None]:
    """Inside the block ``model`` is its own BF16 reference, in evaluation, without gradients of parameters.

    Afterwards it is what it was, to the bit.

    Raises:
        ConfigError: some layers are octavo's already.
    """
    taken = [path for path, module in model.named_modules() if isinstance(module, Linear)]
    if taken:
        raise ConfigError(f"layer {taken[0]!r} is octavo's already; call octavo.restore(model) first")
    known = {parameter: (parameter.data, parameter.requires_grad) for parameter in model.parameters()}
    was_training = model.training
    try:
        for parameter in known:
            parameter.requires_grad_(False)
        round_to_bf16(model)
        convert(model, BF16, convert_head=True)
        with bf16_autocast(next(model.eval().parameters()).device):
            yield
    finally:
        restore(model)
        for parameter, (data, learns) in known.items():
            parameter.data = data
            parameter.requires_grad_(learns)
        model.train(was_training)


class Stages:
    """One sequence through the reference, and again from where a unit changes it.

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

    def again(self, unit: Unit) -> Tensor:
        """Logits [1, T, V] now, computed from the block on that ``unit`` belongs to."""
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
