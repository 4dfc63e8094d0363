"""A model whose training forward pass is an engine's, for loops of one's own."""

import torch
from torch import nn

from octavo.convert import convert
from octavo.errors import ConfigError
from octavo.kernels import needs_widening
from octavo.models.served_forward import check_linear_layers, served_forward
from octavo.recipes import Recipe
from octavo.recipes.engines import EngineProfile, served_recipe
from octavo.recipes.engines.catalog import resolved

__all__ = ["convert_as_served"]


def convert_as_served(
    model: nn.Module, profile: str | EngineProfile, *, gradients: str | Recipe = "bf16"
) -> served_forward:
    """Convert a decoder in place, and return the context in which its forward pass is the engine's, bit for bit.

    Args:
        model: octavo's Llama or a model of transformers, in high precision. Its parameters stay FP32 for the optimizer.
        profile: the engine or its name.
        gradients: as for :func:`octavo.engines.served_recipe`.

    Raises:
        ConfigError: as for :func:`octavo.engines.served_recipe`; or inputs with static scales, which
            :func:`octavo.prepare_qat` with that recipe trains; or experts that are not linear layers of their own, as
            :func:`octavo.convert.unfuse_experts` makes them.

    Example:
        >>> from octavo import engines
        >>> from octavo.models import Llama, LlamaConfig
        >>> sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_layers": 1}
        >>> llama = Llama(LlamaConfig(**sizes, num_heads=2, num_kv_heads=1, max_positions=16))
        >>> tokens, vllm = torch.zeros(1, 4, dtype=torch.long), engines.get("vllm-token")
        >>> served = engines.model_as(llama, vllm)(tokens)
        >>> with engines.convert_as_served(llama, vllm):
        ...     logits = llama(tokens)
        >>> logits.float().sum().backward()
        >>> torch.equal(logits, served), llama.lm_head.weight.grad.dtype
        (True, torch.float32)
    """
    profile = resolved(profile)
    recipe = served_recipe(profile, gradients)
    if recipe.has_static_input:
        raise ConfigError(
            f"{profile.name} takes its inputs' scales from calibration; use octavo.prepare_qat, or octavo qat"
        )
    check_linear_layers(model, profile)
    convert(model, recipe, skip=profile.skipped, convert_head=profile.head)
    if needs_widening(torch.empty(0, dtype=profile.activations)):  # other linears round once, as an engine's
        convert(model, "bf16", convert_head=True, layer_filter=lambda _, layer: type(layer) is nn.Linear)
    return served_forward(model, profile)
