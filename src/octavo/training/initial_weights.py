"""Changes of the initial weights that a study trains from.

**Width** (``mu_base_width``; µP, Yang et al., arXiv 2203.03466, table 3). With m = hidden_size / mu_base_width:

| weights               | initial std | learning rate | weight decay | decay in a step |
|-----------------------|-------------|---------------|--------------|-----------------|
| layers' matrices      | usual / √m  | usual / m     | usual · m    | usual           |
| head                  | usual / m   | usual / m     | usual · m    | usual           |
| embedding and vectors | usual       | usual         | usual        | usual           |

At the base width nothing changes. Widths of one study should have heads of one size, and so its divisor of the logits.

**Aligned channels** (``aligned_channels``): the first channels of every MLP begin with equal rows of gate and up, 16
times as large as drawn. Their product grows with the square of the input: the outliers that arXiv 2409.12517 found
after 200 billion tokens.
"""

from typing import Any

import torch
from torch import nn

from octavo.models import Llama
from octavo.models.llama import MLP

__all__ = ["align_channels", "parameter_groups", "scale_to_width"]

ALIGNED_FACTOR = 16.0


@torch.no_grad()
def scale_to_width(model: Llama, base_width: int) -> None:
    """Divide the initial weights of layers by √m, and those of the head by m; nothing for a ``base_width`` of 0."""
    if not base_width:
        return
    ratio = model.config.hidden_size / base_width
    for parameter in _matrices(model):
        parameter.div_(ratio if parameter is model.lm_head.weight else ratio**0.5)


def parameter_groups(model: nn.Module, *, weight_decay: float, base_width: int) -> list[dict[str, Any]]:
    """AdamW's groups: matrices decay, vectors do not; with a ``base_width``, matrices by width have a group too.

    ``lr_factor`` of a group multiplies the learning rate; a group without it has the factor 1.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    vectors = {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}
    matrices = [p for p in parameters if p.ndim >= 2]
    if not base_width:
        return [{"params": matrices, "weight_decay": weight_decay}, vectors]
    assert isinstance(model, Llama)
    ratio, scaled = model.config.hidden_size / base_width, set(map(id, _matrices(model)))
    return [
        {"params": [p for p in matrices if id(p) not in scaled], "weight_decay": weight_decay},
        {
            "params": [p for p in matrices if id(p) in scaled],
            "weight_decay": weight_decay * ratio,
            "lr_factor": 1 / ratio,
        },
        vectors,
    ]


@torch.no_grad()
def align_channels(model: Llama, count: int) -> None:
    """Begin the first ``count`` channels of every MLP with equal, large rows of gate and up."""
    for module in model.modules():
        if isinstance(module, MLP):
            module.gate_proj.weight[:count] *= ALIGNED_FACTOR
            module.up_proj.weight[:count] = module.gate_proj.weight[:count]


def _matrices(model: Llama) -> list[nn.Parameter]:
    """Weights of layers and head."""
    embedding = model.model.embed_tokens.weight
    return [parameter for parameter in model.parameters() if parameter.ndim >= 2 and parameter is not embedding]
