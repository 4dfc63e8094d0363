"""Byte-level byte-pair encoding, trained on the text of a run.

The alphabet is all bytes, so every text can be encoded and decodes to itself; the most frequent pairs are merged until
the vocabulary is full. Training breaks ties by token id, so the same text gives the same tokenizer. The file is a
tokenizer.json of the library ``tokenizers``, which Hugging Face's classes can load.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import ConfigError, DataError
from octavo.parsing import read_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = [
    "END_OF_TEXT",
    "LARGEST_VOCABULARY",
    "SMALLEST_VOCABULARY",
    "end_of_text_id",
    "load_tokenizer",
    "train_tokenizer",
]

END_OF_TEXT = "<|endoftext|>"
LARGEST_VOCABULARY = 1 << 20  # four times the largest model's; more aborts the library, which allocates all at once
SMALLEST_VOCABULARY = 257  # every byte and the end-of-text token
SAMPLE_CHARACTERS = 8_000_000  # more text changes few merges of a small vocabulary, and needs memory


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> "Tokenizer":
    """Train on the first eight million characters of ``texts``.

    Args:
        texts: documents of the training split.
        vocab_size: tokens, 257 to 1,048,576; a short text may yield fewer.

    Raises:
        ConfigError: vocab_size is too small to hold every byte, or too large.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(
            f"vocab_size must be at least {SMALLEST_VOCABULARY}, one token a byte and {END_OF_TEXT}, not {vocab_size}"
        )
    if vocab_size > LARGEST_VOCABULARY:
        raise ConfigError(f"vocab_size must be at most {LARGEST_VOCABULARY:,}, not {vocab_size:,}")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(texts), trainer)
    return tokenizer


def load_tokenizer(path: Path) -> "Tokenizer":
    """Read a tokenizer.json.

    Raises:
        DataError: the file is missing, damaged, or has no end-of-text token.
    """
    try:
        tokenizer = read_tokenizer(path)
    except OSError as error:
        raise DataError(f"cannot read the tokenizer {str(path)!r}: {error.strerror}; prepare the data again") from error
    except DataError as error:
        raise DataError(f"{str(path)!r} is not a tokenizer.json: {error}; prepare the data again") from error
    end_of_text_id(tokenizer)
    return tokenizer


def end_of_text_id(tokenizer: "Tokenizer") -> int:
    """Return the id of the token between documents."""
    token = tokenizer.token_to_id(END_OF_TEXT)
    if token is None:
        raise DataError(f"the tokenizer has no {END_OF_TEXT} token; train one with octavo, or add the token")
    return int(token)


def _sample(texts: Iterable[str]) -> Iterator[str]:
    remaining = SAMPLE_CHARACTERS
    for text in texts:
        if remaining <= 0:
            return
        yield text[:remaining]
        remaining -= len(text)
