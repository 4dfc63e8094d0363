"""The tokenizer in a GGUF file: lists of tokens and merges, and a name for how text is split before them.

Byte-level byte-pair encoding, the model named "gpt2", is read; how text is split is one of ``SPLITS_DIGITS``, since a
wrong guess costs accuracy and shows nowhere. Tokens of type control or user-defined are never made by merging: they
are found in the text first. A byte that the file has no token for is left out of what is encoded.
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
SPLITS_DIGITS = {"gpt-2": False, "smollm": True}  # at words as GPT-2 does, and each digit by itself or not


def read_tokenizer(file: GGUFFile) -> "Tokenizer":
    """Text to token ids and back; adds the tokens at the ends that the file asks for.

    Raises:
        CheckpointError: it is missing, damaged, or of a kind that is not read.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    model, split = (file.get(f"{PREFIX}{name}", str) for name in ("model", "pre"))
    if model != "gpt2" or split not in SPLITS_DIGITS:
        raise CheckpointError(
            f"{file.path} has a tokenizer of model {model!r} that splits text as {split!r}; octavo reads 'gpt2' with "
            + " or ".join(map(repr, SPLITS_DIGITS))
        )
    tokenizer = Tokenizer(_merging(file))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if SPLITS_DIGITS[split] else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    _add_whole_tokens(file, tokenizer)
    _add_ends(file, tokenizer)
    return tokenizer


def token_id(file: GGUFFile, which: str) -> int | None:
    """The id of the token that begins ("bos") or ends ("eos") a text; None where the file names none."""
    name = f"{PREFIX}{which}_token_id"
    if name not in file.values:
        return None
    found, size = file.get(name, int), len(file.get(VOCABULARY, list))
    if not 0 <= found < size:
        raise CheckpointError(f"{file.path} has {found} as {name}, and its tokens go from 0 to {size - 1}")
    return found


def _merging(file: GGUFFile) -> "models.BPE":
    from tokenizers import models

    tokens, merges = file.get(VOCABULARY, list), file.get(f"{PREFIX}merges", list)
    if {*map(type, tokens), *map(type, merges)} - {str} or len({*tokens}) < len(tokens):
        raise CheckpointError(f"{file.path} has a damaged tokenizer: a token stands there twice or is no text")
    try:
        return models.BPE({token: i for i, token in enumerate(tokens)}, [merge.partition(" ")[::2] for merge in merges])
    except Exception as error:  # the library raises bare Exception for a merge of unknown tokens
        raise CheckpointError(f"{file.path} has a damaged tokenizer: {error}") from error


def _add_whole_tokens(file: GGUFFile, tokenizer: "Tokenizer") -> None:
    from tokenizers import AddedToken

    tokens, kinds = file.get(VOCABULARY, list), file.get(f"{PREFIX}token_type", list, [])
    if kinds and len(kinds) != len(tokens):
        raise CheckpointError(f"{file.path} has a damaged tokenizer: {len(tokens)} tokens and {len(kinds)} token types")
    typed = list(zip(tokens, kinds, strict=False))  # a file may have no types
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token, kind in typed if kind == CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in typed if kind == USER_DEFINED])


def _add_ends(file: GGUFFile, tokenizer: "Tokenizer") -> None:
    from tokenizers import processors

    parts, used = ["$A"], []
    for which, place in (("bos", 0), ("eos", len(parts) + 1)):
        if not file.get(f"{PREFIX}add_{which}_token", bool, False):
            continue
        if (found := token_id(file, which)) is None:
            raise CheckpointError(f"{file.path} asks for a token at the ends of a text and does not say which")
        token = file.get(VOCABULARY, list)[found]
        parts.insert(place, token)
        used.append((token, found))
    if used:
        tokenizer.post_processor = processors.TemplateProcessing(parts, special_tokens=used)
