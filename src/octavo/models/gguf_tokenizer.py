"""Tokenizers of GGUF files: lists of tokens and merges, and the name of a pre-tokenizer.

Only byte-level byte-pair encoding (model "gpt2") with a pre-tokenizer in ``SPLITS_DIGITS`` is supported, because a
wrong pre-tokenizer would silently cost accuracy. Tokens of type control or user-defined are matched in the text before
merging. Bytes without a token are dropped.
"""

from typing import TYPE_CHECKING, Any

from octavo.errors import CheckpointError
from octavo.models.gguf_file import GGUFFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer, models

__all__ = ["VOCABULARY", "read_tokenizer", "token_id"]

PREFIX = "tokenizer.ggml."
VOCABULARY = f"{PREFIX}tokens"
CONTROL, USER_DEFINED = 3, 4  # types of tokens
SPLITS_DIGITS = {"gpt-2": False, "smollm": True}  # GPT-2's words; whether each digit is a token


def read_tokenizer(file: GGUFFile) -> "Tokenizer":
    """Read the tokenizer, which adds the begin and end tokens if the file says so.

    Raises:
        CheckpointError: the tokenizer is missing, damaged or unsupported.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    model, split = (file.get(f"{PREFIX}{name}", str) for name in ("model", "pre"))
    if model != "gpt2" or split not in SPLITS_DIGITS:
        raise CheckpointError(
            f"{file.path} has a tokenizer of model {model!r} that splits text as {split!r}; octavo reads 'gpt2' with "
            + " or ".join(map(repr, SPLITS_DIGITS))
        )
    tokenizer = Tokenizer(_bpe_model(file))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if SPLITS_DIGITS[split] else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    _add_special_tokens(file, tokenizer)
    _add_end_tokens(file, tokenizer)
    return tokenizer


def token_id(file: GGUFFile, which: str) -> int | None:
    """Id of the token that begins ("bos") or ends ("eos") a text; None if the file has none."""
    name = f"{PREFIX}{which}_token_id"
    if name not in file.values:
        return None
    token, size = file.get(name, int), len(file.get(VOCABULARY, list))
    if not 0 <= token < size:
        raise CheckpointError(f"{file.path} has {token} as {name}, but its tokens go from 0 to {size - 1}")
    return token


def _bpe_model(file: GGUFFile) -> "models.BPE":
    from tokenizers import models

    tokens, merges = file.get(VOCABULARY, list), file.get(f"{PREFIX}merges", list)
    if {*map(type, tokens), *map(type, merges)} - {str} or len({*tokens}) < len(tokens):
        raise CheckpointError(f"{file.path} has a damaged tokenizer: a token is duplicated or not text")
    try:
        return models.BPE({token: i for i, token in enumerate(tokens)}, [merge.partition(" ")[::2] for merge in merges])
    except Exception as error:  # the library raises bare Exception for a merge of unknown tokens
        raise CheckpointError(f"{file.path} has a damaged tokenizer: {error}") from error


def _add_special_tokens(file: GGUFFile, tokenizer: "Tokenizer") -> None:
    from tokenizers import AddedToken

    tokens, kinds = file.get(VOCABULARY, list), file.get(f"{PREFIX}token_type", list, [])
    if kinds and len(kinds) != len(tokens):
        raise CheckpointError(f"{file.path} has a damaged tokenizer: {len(tokens)} tokens and {len(kinds)} token types")
    typed = list(zip(tokens, kinds, strict=False))  # a file may have no types
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token, kind in typed if kind == CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in typed if kind == USER_DEFINED])


def _add_end_tokens(file: GGUFFile, tokenizer: "Tokenizer") -> None:
    from tokenizers import processors

    parts, end_tokens = ["$A"], []
    for which, place in (("bos", 0), ("eos", len(parts) + 1)):
        if not file.get(f"{PREFIX}add_{which}_token", bool, False):
            continue
        if (end_id := token_id(file, which)) is None:
            raise CheckpointError(f"{file.path} sets add_{which}_token but has no {which}_token_id")
        token = file.get(VOCABULARY, list)[end_id]
        parts.insert(place, token)
        end_tokens.append((token, end_id))
    if end_tokens:
        tokenizer.post_processor = processors.TemplateProcessing(parts, special_tokens=end_tokens)
