"""Text from a model: one token after another, each from a full forward pass over what stands so far.

Every new token costs a pass over the whole context; a cache of keys and values would make it a pass over one token.
For the few lines that show what a small model learned, the plain loop is enough and has no state to get wrong.
"""

import math

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError
from octavo.nn.arguments import check_whole

__all__ = ["check_request", "check_sampling", "generate", "probabilities", "sample"]


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt_ids: list[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    context: int,
    stop_id: int | None = None,
) -> list[int]:
    """Continue ``prompt_ids``; returns the new tokens alone.

    Args:
        model: tokens [1, T] to logits [1, T, V].
        prompt_ids: at least one token.
        max_new_tokens: how many to add at most.
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: sample among the k likeliest only, and those as likely as the last of them; None for all.
        generator: where the randomness comes from, on the CPU; None for torch's global one.
        context: how many of the last tokens the model sees.
        stop_id: end before this token; None to never end early.

    Raises:
        TypeError: a prompt that is no list.
        ConfigError: an empty prompt, a negative temperature, top_k, context or max_new_tokens out of range, or a model
            whose logits are not finite.
    """
    check_request(prompt_ids, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k)
    check_whole("context", context, least=1)
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    ids = list(prompt_ids)
    try:
        for _ in range(max_new_tokens):
            logits = model(torch.tensor([ids[-context:]], device=device))[0, -1].float().cpu()
            token = sample(logits, temperature=temperature, top_k=top_k, generator=generator)
            if token == stop_id:
                break
            ids.append(token)
    finally:
        model.train(was_training)
    return ids[len(prompt_ids) :]


def sample(
    logits: Tensor,
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    generator: torch.Generator | None = None,
) -> int:
    """One token id from logits [V].

    Args:
        logits: of every token.
        temperature: divides them; 0 takes the likeliest.
        top_k: sample among the k likeliest only, and those as likely as the last of them; None for all.
        top_p: then among the fewest that have this probability together; 1 for all.
        min_p: then among those at least so probable as this times the likeliest.
        generator: where the randomness comes from, on the CPU; None for torch's global one.

    Raises:
        ConfigError: logits among which none is the largest, or it is infinite.

    Example:
        >>> sample(torch.tensor([1.0, 3.0, 2.0]), temperature=1.0, top_p=0.5)
        1
    """
    likeliest = int(logits.argmax())  # a NaN, if there is one
    if not math.isfinite(logits[likeliest]):
        raise ConfigError(
            f"the model's largest logit is {float(logits[likeliest])}, so no token can be chosen; look for NaN or "
            "infinite numbers in its weights"
        )
    if temperature == 0:
        return likeliest
    kept = probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    reached = kept.cumsum_(0)
    total, drawn = float(reached[-1]), float(torch.rand((), dtype=torch.float64, generator=generator))
    # One number a token: torch.multinomial draws one for every token of the vocabulary, which takes a millisecond.
    return int(torch.searchsorted(reached, min(drawn * total, math.nextafter(total, 0)), right=True))


def probabilities(
    logits: Tensor, *, temperature: float, top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """How likely :func:`sample` takes each token, float64 [V], up to a factor; the temperature is above 0.

    Example:
        >>> probabilities(torch.tensor([0.0, 0.0, -9.0, 0.0]), temperature=1.0, top_k=3, top_p=0.5).count_nonzero()
        tensor(2)
    """
    if top_k is not None and top_k < logits.numel():
        lowest_kept = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < lowest_kept, -torch.inf)
    below_most = (logits - logits.max()).double()  # in FP64 a tiny temperature is not 0, and 0 / temperature is 0
    kept = torch.softmax(below_most.div_(temperature), dim=-1)
    if top_p < 1:
        kept = _nucleus(kept, top_p)
    return kept.masked_fill(kept < min_p * kept.max(), 0) if min_p > 0 else kept


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """0 for what follows the fewest likeliest that reach ``top_p`` together; of equals the first ids are likelier."""
    # All that are less likely than this would not reach 1 - top_p together, so none is needed; and sorting takes long.
    ids = (probabilities >= (1 - top_p) / 2 / len(probabilities)).nonzero()[:, 0]
    values, order = probabilities[ids].sort(descending=True, stable=True)
    needed = values.cumsum(0) - values < top_p
    needed[0] = True
    return torch.zeros_like(probabilities).scatter(0, ids[order[needed]], values[needed])


def check_sampling(*, temperature: float, top_k: int | None, top_p: float = 1.0, min_p: float = 0.0) -> None:
    """Raise ConfigError for numbers out of range."""
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature must be 0 or more, not {temperature}")
    check_whole("top_k", top_k, least=1)
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p must be above 0 and at most 1, not {top_p}")
    if not 0 <= min_p <= 1:
        raise ConfigError(f"min_p must be from 0 to 1, not {min_p}")


def check_request(prompt_ids: list[int], *, max_new_tokens: int, temperature: float, top_k: int | None) -> None:
    """Raise TypeError for a prompt that is no list, ConfigError for an empty one, and for numbers out of range."""
    if not isinstance(prompt_ids, (list, tuple)):
        raise TypeError(f"prompt_ids is a list of token ids, not {type(prompt_ids).__name__}")
    if not prompt_ids:
        raise ConfigError("the prompt is empty; give at least one token to continue from")
    check_sampling(temperature=temperature, top_k=top_k)
    check_whole("max_new_tokens", max_new_tokens, least=0)
