"""Model of an origin and its first micro-batch, for measurements without training."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from octavo.experiments.origin import Origin
from octavo.nn.scaling_state import discard_step
from octavo.training.evaluate import token_loss
from octavo.training.precision import resolve_device, surroundings
from octavo.training.setup import build_model
from octavo.training.threads import using_threads

__all__ = ["Probe"]


class Probe:
    """Model whose state does not change between steps.

    Args:
        origin: configuration, weights and text.

    Raises:
        ConfigError: the device is missing, or the model does not fit in its memory.
    """

    def __init__(self, origin: Origin) -> None:
        training = origin.config.training
        self.training, self.device = training, resolve_device(training.device)
        self.model, _ = build_model(origin.config, origin.data.vocab_size)
        if origin.start is not None:
            self.model.load_state_dict(origin.start.weights)
        self.model.train()
        batch = origin.data.batch(
            origin.first_step * training.grad_accumulation,
            batch_size=training.batch_size,
            context=training.context,
            seed=training.seed,
        )
        self.inputs, self.targets = (part.to(self.device) for part in batch)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of one forward and backward pass from the same state, including random generators; then reset it."""
        with torch.random.fork_rng(), using_threads(self.training.threads):
            self.model.zero_grad(set_to_none=True)
            try:
                yield
            finally:
                discard_step(self.model)

    def loss(self) -> Tensor:
        """Loss of the micro-batch in nats: [], with its graph."""
        with surroundings(self.training, self.device, self.model):
            return token_loss(self.model(self.inputs), self.targets)
