"""Text from a ModelRunner: the prompt at once, then a token at a time."""

from collections.abc import Iterator

import torch

from octavo.errors import ConfigError
from octavo.inference.model_runner import ModelRunner
from octavo.models.generation import check_request, sample

__all__ = ["generate"]


def generate(
    runner: ModelRunner,
    prompt_ids: list[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    stop_id: int | None = None,
) -> Iterator[int]:
    """The tokens that follow ``prompt_ids``, each as soon as it is known.

    Args:
        runner: what runs.
        prompt_ids: at least one token.
        max_new_tokens: how many at most; fewer where the model has no more positions.
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: sample among the k likeliest only; None for all.
        generator: where the randomness comes from, on a CPU; None for torch's global one.
        stop_id: end before this token; None to never end early.

    Raises:
        TypeError: a prompt that is no list.
        ConfigError: an empty prompt or one longer than the model's positions, a token outside the vocabulary, a
            negative temperature, top_k or max_new_tokens out of range, or a model whose logits are not finite.

    Example:
        >>> from octavo.models import Llama, LlamaConfig
        >>> config = LlamaConfig(
        ...     vocab_size=64,
        ...     hidden_size=32,
        ...     intermediate_size=64,
        ...     num_layers=1,
        ...     num_heads=2,
        ...     num_kv_heads=1,
        ...     max_positions=16,
        ... )
        >>> runner = ModelRunner(Llama(config))
        >>> len(list(generate(runner, [1, 2, 3], max_new_tokens=5, temperature=0)))
        5
    """
    check_request(prompt_ids, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k)
    positions = runner.config.max_positions
    if len(prompt_ids) > positions:
        raise ConfigError(
            f"the prompt has {len(prompt_ids)} tokens, and this model knows {positions} positions; shorten it"
        )
    count = min(max_new_tokens, positions - len(prompt_ids) + 1)  # what follows the last position can still be told
    cache = runner.new_cache(len(prompt_ids) + max(count - 1, 0))
    tokens = prompt_ids
    for _ in range(count):
        logits = runner(torch.tensor(tokens, device="cpu"), cache)
        token = sample(logits, temperature=temperature, top_k=top_k, generator=generator)
        if token == stop_id:
            return
        yield token
        tokens = [token]
