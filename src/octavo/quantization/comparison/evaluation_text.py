"""The text a comparison is made on, as windows of a model's own tokens.

``language-topics``, Python's language reference, is read as published figures of SmolLM2 are: all topics joined
without anything between them, from the beginning, in windows that follow each other. Of any other source the windows
are spread evenly over the split, so that forty of them stand for all of it.
"""

from copy import deepcopy

import torch
from torch import Tensor

from octavo.errors import ConfigError, DataError
from octavo.language_model import LanguageModel
from octavo.quantization.windows import text_windows
from octavo.training.held_out import ALL
from octavo.training.text import TOPICS, load_documents

__all__ = ["evaluation_windows"]

CHARACTERS_A_TOKEN = 8  # more than text has; what is beyond is not tokenised


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
    ids = _first_tokens(model, "".join(document.text for document in load_documents(source)), count * length)
    if len(ids) < count * length:
        raise DataError(
            f"{TOPICS} has {len(ids)} tokens, too few for {count} windows of {length}; ask for fewer or shorter ones"
        )
    return torch.tensor(ids[: count * length], dtype=torch.int64, device=model.device).view(count, length)


def _first_tokens(model: LanguageModel, text: str, wanted: int) -> list[int]:
    """At least as many tokens as wanted, if the text has them; whatever length the tokenizer itself cuts at."""
    tokenizer = deepcopy(model.tokenizer)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for part in (text[: CHARACTERS_A_TOKEN * wanted], text):
        ids: list[int] = tokenizer.encode(part, add_special_tokens=False).ids
        if len(ids) > wanted:
            break
    return ids
