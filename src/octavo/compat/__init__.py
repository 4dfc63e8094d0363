"""APIs and checkpoints of other software, built from octavo: see docs/reference/transformer-engine.md.

- :class:`ScalingState`: scaling state for accelerate, ``torch.distributed.checkpoint`` and others that save an
  object with ``state_dict`` and ``load_state_dict``.
- ``octavo.compat.huggingface.FP8Callback``: FP8 training in transformers' ``Trainer``, scaling state included.
- ``octavo.compat.lightning.ScalingStateCallback``: the same for Lightning's ``Trainer``.
"""

from octavo.compat.checkpointing import ScalingState
from octavo.compat.dynamic_scaler import DynamicScaler

__all__ = ["DynamicScaler", "ScalingState"]
