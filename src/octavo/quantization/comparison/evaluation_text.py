"""The text a comparison is made on, as windows of a model's own tokens.

``language-topics``, Python's language reference, is read as published figures of SmolLM2 are: all topics joined
without anything between them, from the beginning, in windows that follow each other. Of any other source the windows
are spread evenly over the split, so that forty of them stand for all of it.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.errors import ConfigError, DataError
from octavo.language_model import LanguageModel
from octavo.quantization.windows import CHARACTERS_A_TOKEN, text_windows, unbounded
from octavo.training.text import ALL, TOPICS, load_documents

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["evaluation_windows", "topic_tokens"]


def evaluation_windows(model: LanguageModel, source: str, split: str, *, count: int, length: int) -> Tensor:
    """Windows of held-out text, int64 [count, length], on the model's device.

    Args:
        model: whose tokenizer to use.
        source: see ``octavo.training.text``.
        split: "train", "validation", "test" or "all"; of ``language-topics`` there is only "all".
        count: how many windows.
        length: tokens of each, from 2 to ``model.context``.

    Raises:
        ConfigError: a split, count or length that is not allowed.
        DataError: the source holds too little text.
    """
    if not 2 <= length <= model.context:
        raise ConfigError(f"a window has from 2 to {model.context} tokens, what this model reads at once, not {length}")
    if source != TOPICS:
        return text_windows(model, source, split, count=count, length=length)
    if split != ALL:
        raise ConfigError(f"{TOPICS} has no splits; leave --split {split} out, or evaluate on 'builtin'")
    if count < 1:
        raise ConfigError(f"windows must be at least 1, not {count}")
    ids = topic_tokens(model.tokenizer, count * length)
    return torch.tensor(ids, dtype=torch.int64, device=model.device).view(count, length)


def topic_tokens(tokenizer: "Tokenizer", count: int) -> list[int]:
    """The first ``count`` tokens of the language topics, whatever length the tokenizer itself cuts at.

    Raises:
        DataError: they have fewer.
    """
    text = "".join(document.text for document in load_documents(TOPICS))
    whole = unbounded(tokenizer)
    ids: list[int] = []
    for part in (text[: CHARACTERS_A_TOKEN * count], text):  # seldom all of it
        ids = whole.encode(part, add_special_tokens=False).ids
        if len(ids) > count:
            break
    if len(ids) < count:
        raise DataError(f"{TOPICS} has {len(ids)} tokens, and not {count}; ask for fewer or shorter windows")
    return ids[:count]
