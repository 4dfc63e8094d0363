"""Evaluation text as windows of a model's own tokens.

``language-topics``, Python's language reference, is read as in published results of SmolLM2: all topics concatenated
without a separator, from the beginning, in consecutive windows. For any other source the windows are spread evenly over
the split, so that forty of them represent all of it.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.errors import ConfigError, DataError
from octavo.language_model import LanguageModel
from octavo.quantization.windows import CHARACTERS_A_TOKEN, text_windows, unbounded
from octavo.text.sources import ALL, TOPICS, load_documents

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["evaluation_windows", "topic_tokens"]


def evaluation_windows(model: LanguageModel, source: str, split: str, *, count: int, length: int) -> Tensor:
    """Windows of held-out text, int64 [count, length], on the model's device.

    Args:
        model: source of the tokenizer.
        source: see ``octavo.text.sources``.
        split: "train", "validation", "test" or "all"; ``language-topics`` has only "all".
        count: number of windows.
        length: tokens per window, from 2 to ``model.context``.

    Raises:
        ConfigError: a split, count or length that is not allowed.
        DataError: the source has too little text.
    """
    if not 2 <= length <= model.context:
        raise ConfigError(f"a window must have from 2 to {model.context} tokens, this model's context, not {length}")
    if source != TOPICS:
        return text_windows(model, source, split, count=count, length=length)
    if split != ALL:
        raise ConfigError(f"{TOPICS} has no splits; leave --split {split} out, or evaluate on 'builtin'")
    if count < 1:
        raise ConfigError(f"windows must be at least 1, not {count}")
    ids = topic_tokens(model.tokenizer, count * length)
    return torch.tensor(ids, dtype=torch.int64, device=model.device).view(count, length)


def topic_tokens(tokenizer: "Tokenizer", count: int) -> list[int]:
    """First ``count`` tokens of the language topics, ignoring the tokenizer's own truncation.

    Raises:
        DataError: the topics have fewer tokens.
    """
    text = "".join(document.text for document in load_documents(TOPICS))
    untruncated = unbounded(tokenizer)
    ids: list[int] = []
    for part in (text[: CHARACTERS_A_TOKEN * count], text):  # the whole text is rarely needed
        ids = untruncated.encode(part, add_special_tokens=False).ids
        if len(ids) > count:
            break
    if len(ids) < count:
        raise DataError(f"{TOPICS} has {len(ids)} tokens, not {count}; ask for fewer or shorter windows")
    return ids[:count]
