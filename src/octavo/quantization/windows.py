"""Token windows sampled from text, for calibration, tuning and evaluation.

A few windows have to represent a whole text, and the first ones would cover only its first documents. The text is
therefore cut into ``count`` equal parts, and one window is taken from each part at a position drawn from the seed:

    part i = [i · characters / count, (i + 1) · characters / count)        moved to the next space

Windows never overlap, for any seed. Only the sampled characters are tokenised, not the whole text. Documents are joined
with the tokenizer's end-of-text token, or with an empty line if it has none; no other token is added.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from octavo.errors import ConfigError, DataError
from octavo.language_model import LanguageModel
from octavo.parsing import parse_tokenizer
from octavo.text.corpus import Split
from octavo.text.sources import ALL, BUILTIN, check_split, divide, load_documents
from octavo.text.tokenizer import END_OF_TEXT
from octavo.training.config import MOST_SEED

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["CHARACTERS_A_TOKEN", "text_windows", "unbounded"]

CHARACTERS_A_TOKEN = 8  # above the average of most text; otherwise the whole part is tokenised
LONGEST_WORD = 256  # characters to look ahead for a space


def text_windows(
    model: LanguageModel, source: str | Path, split: str, *, count: int, length: int, seed: int = 0
) -> Tensor:
    """Windows spread evenly over a split's text.

    Args:
        model: source of the tokenizer.
        source: "builtin", a file, a folder or a data set (``octavo.text.sources``).
        split: "train", "validation", "test" or "all".
        count: number of windows.
        length: tokens per window; at most ``model.context``.
        seed: of each window's position in its part of the text; from 0 to 2^63 - 1.

    Returns:
        int64 [count, length], in the text's order, on the model's device; deterministic.

    Raises:
        ConfigError: an unknown split, a count or length below 1, a length above the model's context, or a seed
            out of range.
        DataError: the source has no text, or a part of it is shorter than a window.
    """
    _check(model, split, count, length, seed)
    documents = load_documents(source)
    selected = documents if split == ALL else divide(documents, by_file=str(source) == BUILTIN)[Split(split)]
    separator = END_OF_TEXT if model.tokenizer.token_to_id(END_OF_TEXT) is not None else "\n\n"
    text = separator.join(document.text for document in selected)
    if count > len(text):
        raise DataError(
            f"{str(source)!r} (split {split}) has {len(text)} characters, too few for {count} windows; ask for "
            "fewer, or give more text"
        )
    tokenizer = unbounded(model.tokenizer)
    fractions = np.random.default_rng(seed).random(count)
    bounds = [_next_space(text, i * len(text) // count) for i in range(count)] + [len(text)]
    windows = []
    for part, fraction in enumerate(fractions):
        ids = _window(tokenizer, text[bounds[part] : bounds[part + 1]], length, fraction)
        if ids is None:
            raise DataError(
                f"{str(source)!r} (split {split}) is too short for {count} windows of {length} tokens: part {part + 1} "
                f"of {count} is shorter than one, and each gives one; give more text, or ask for fewer or shorter"
            )
        windows.append(ids)
    return torch.tensor(windows, dtype=torch.int64, device=model.device)


def _check(model: LanguageModel, split: str, count: int, length: int, seed: int) -> None:
    check_split(split)
    if count < 1 or length < 1:
        raise ConfigError(f"windows and tokens a window must be at least 1, not {count} and {length}")
    if not 0 <= seed <= MOST_SEED:
        raise ConfigError(f"seed must be from 0 to {MOST_SEED}, not {seed}")
    if length > model.context:
        raise ConfigError(f"this model reads at most {model.context} tokens at once, not {length}; shorten the windows")


def _window(tokenizer: "Tokenizer", part: str, length: int, fraction: float) -> list[int] | None:
    """``length`` tokens of ``part``, starting at ``fraction`` of it; None if it has fewer."""
    reach = CHARACTERS_A_TOKEN * length
    start = _next_space(part, int(fraction * max(0, len(part) - reach)))
    for piece in (part[start : _next_space(part, start + reach)], part):  # the whole part is rarely needed
        ids: list[int] = tokenizer.encode(piece, add_special_tokens=False).ids
        if len(ids) >= length:
            return ids[:length]
    return None


def _next_space(text: str, position: int) -> int:
    """End of the word at ``position``, so that no word or end-of-text token is cut; 0 stays 0."""
    space = re.compile(r"\s").search(text, position, position + LONGEST_WORD) if position else None
    return space.start() if space else position


def unbounded(tokenizer: "Tokenizer") -> "Tokenizer":
    """Copy of the tokenizer without the truncation and padding that some files configure."""
    copied = parse_tokenizer(tokenizer.to_str())
    copied.no_truncation()
    copied.no_padding()
    return copied
