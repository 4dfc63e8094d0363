"""Scaling state in the checkpoints of other libraries; each library is imported by the one file that is named after it.

- ``octavo.integrations.ScalingState``: accelerate, ``torch.distributed.checkpoint``, and whatever else takes an object
  with ``state_dict`` and ``load_state_dict``.
- ``octavo.integrations.huggingface.ScalingStateCallback``: transformers' ``Trainer``.
- ``octavo.integrations.lightning.ScalingStateCallback``: Lightning's ``Trainer``.
"""

from octavo.integrations.scaling_state import ScalingState

__all__ = ["ScalingState"]
