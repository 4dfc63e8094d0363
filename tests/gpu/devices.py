"""Where the tests of this folder run, and what comes back from there."""

import torch

from octavo.numerics import QuantizedTensor

DEVICE = torch.device("cuda")


def on_cpu(q: QuantizedTensor) -> QuantizedTensor:
    """The same codes and scales in the CPU's memory."""
    return QuantizedTensor(q.data.cpu(), q.scale.cpu(), q.granularity, q.hp_dtype)
