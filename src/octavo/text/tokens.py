"""Tokenization of text to files, and batches of tokens.

``prepare`` writes a data folder:

| file                                | content                                                               |
|-------------------------------------|-----------------------------------------------------------------------|
| tokenizer.json                      | tokenizer trained on the training split                               |
| train.bin, validation.bin, test.bin | token ids, little-endian uint16 (uint32 for vocabularies over 65,536) |
| manifest.json                       | source and content hash of the text, counts, and SHA-256 of the token |
|                                     | files and the tokenizer; written last                                 |

The folder is reused if text and vocabulary size match its manifest and its files match their checksums. Otherwise it is
rebuilt in a hidden folder, whose files are moved at the end. A folder with files but without such a manifest raises
ConfigError.

``TokenData`` maps the token files into memory. A training batch is a pure function of (seed, step), so a resumed run
reads the same batches as an uninterrupted one. Evaluation reads the split in order, in windows that do not overlap, so
that every token is predicted once.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.checksums import file_digest
from octavo.errors import ConfigError, DataError
from octavo.files import hidden_path, remove_if_empty, replacing, sync, write_atomically
from octavo.parsing import read_object
from octavo.text.corpus import Document, Split, content_hash
from octavo.text.sources import BUILTIN, divide, load_documents
from octavo.text.tokenizer import end_of_text_id, load_tokenizer, train_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Progress", "TokenData", "open_data", "prepare", "preparing"]

Progress = Callable[[str, int, int], None]  # phase, done, total

FORMAT_VERSION = 1
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
ENCODE_CHARACTERS = 1_000_000  # between two reports of progress


def prepare(
    source: str | Path, out_dir: str | Path, *, vocab_size: int, progress: Progress | None = None
) -> "TokenData":
    """Tokenize a source into a data folder, or open the folder if it already holds those tokens.

    Args:
        source: see :func:`octavo.text.sources.load_documents`.
        out_dir: the data folder; created if missing.
        vocab_size: size of the vocabulary, 257 or more.
        progress: called with (phase, done, total); phases are "read", "tokenizer" and "encode".

    Raises:
        DataError: the source holds no usable text.
        ConfigError: vocab_size is too small, or the folder holds files that ``prepare`` did not write.
    """
    with preparing(source, out_dir, vocab_size=vocab_size, progress=progress):
        pass
    return open_data(out_dir)


@contextmanager
def preparing(
    source: str | Path, out_dir: str | Path, *, vocab_size: int, progress: Progress | None = None
) -> "Iterator[TokenData]":
    """Context of ``prepare`` that replaces the folder's files at the end of the block, unless it raises.

    The yielded tokens are valid only inside the block; afterwards, open them with :func:`open_data`.
    """
    report = progress or (lambda _phase, _done, _total: None)
    folder = Path(out_dir)
    _check_ownership(folder)
    report("read", 0, 1)
    documents = load_documents(source)
    identity = {"format": FORMAT_VERSION, "content_hash": content_hash(documents), "vocab_size": vocab_size}
    report("read", 1, 1)
    if (existing_data := _matching(folder, identity)) is not None:
        yield existing_data
        return
    splits = divide(documents, by_file=str(source) == BUILTIN)
    with _replacing_files_of(folder, identity) as temporary:
        _write(temporary, {**identity, "source": str(source)}, splits, report)
        yield open_data(temporary)


def open_data(folder: str | Path) -> "TokenData":
    """Open a data folder that ``prepare`` wrote.

    Raises:
        DataError: the folder is missing, incomplete or damaged.
    """
    folder = Path(folder)
    try:
        manifest = read_object(folder / MANIFEST)
        vocab_size, counts = int(manifest["tokens_in_vocabulary"]), manifest["splits"]
        _check_digest(folder / TOKENIZER, manifest.get("tokenizer_sha256"))
        splits = {split: _map(folder / f"{split}.bin", counts[split], vocab_size) for split in Split}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{str(folder)!r} is not a complete data folder ({error}); prepare the data again") from error
    return TokenData(folder=folder, manifest=manifest, vocab_size=vocab_size, splits=splits)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenData:
    """Tokens of a source, by split.

    Attributes:
        folder: the data folder.
        manifest: content of manifest.json.
        vocab_size: number of token ids.
        splits: memory-mapped token ids.
    """

    folder: Path
    manifest: dict[str, Any]
    vocab_size: int
    splits: dict[Split, NDArray[Any]]

    @property
    def content_hash(self) -> str:
        """Hash of the tokenized text."""
        return str(self.manifest["content_hash"])

    def tokenizer(self) -> "Tokenizer":
        """Load the tokenizer of the tokens."""
        return load_tokenizer(self.folder / TOKENIZER)

    def batch(
        self, step: int, *, batch_size: int, context: int, seed: int, split: Split = Split.TRAIN
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets [batch_size, context] int64 of a step; the targets are the inputs shifted by one token.

        Raises:
            DataError: the split is shorter than the context.
        """
        tokens = self._long_enough(split, context)
        starts = np.random.default_rng([seed, step]).integers(0, len(tokens) - context, size=batch_size)
        return _shifted(np.stack([tokens[start : start + context + 1] for start in starts]))

    def windows(
        self, context: int, *, split: Split = Split.VALIDATION, max_tokens: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Non-overlapping windows: inputs and targets [count, context] int64; an incomplete last window is dropped.

        Args:
            context: predicted tokens per window.
            split: split to read.
            max_tokens: most tokens, in windows spread evenly over the split, at least one window; None for all.

        Raises:
            DataError: the split is shorter than the context.
        """
        tokens = self._long_enough(split, context)
        count = (len(tokens) - 1) // context
        window_count = count if max_tokens is None else min(count, max(1, max_tokens // context))
        window_indices = np.arange(window_count) * count // window_count
        return _shifted(np.stack([tokens[i * context : (i + 1) * context + 1] for i in window_indices]))

    def _long_enough(self, split: Split, context: int) -> NDArray[Any]:
        if context < 1:
            raise ConfigError(f"context must be at least 1, not {context}")
        tokens = self.splits[split]
        if len(tokens) <= context:
            split_name = self.manifest.get("split", split)
            part = split_name if split_name == "all" else f"the {split_name} split"
            raise DataError(
                f"{part} of {self.manifest['source']!r} has {len(tokens)} tokens, too few for a context of "
                f"{context}; give more text or a shorter context"
            )
        return tokens


def _shifted(rows: NDArray[Any]) -> tuple[Tensor, Tensor]:
    block = torch.from_numpy(rows.astype(np.int64))
    return block[:, :-1].contiguous(), block[:, 1:].contiguous()


def _check_ownership(folder: Path) -> None:
    """Raise ConfigError for a folder with files that ``prepare`` did not write."""
    if not folder.is_dir() or all(path.name.startswith(".") for path in folder.iterdir()):
        return
    try:
        manifest = read_object(folder / MANIFEST)
    except (FileNotFoundError, DataError):
        manifest = {}
    if not manifest.keys() >= {"format", "content_hash", "vocab_size"}:
        raise ConfigError(
            f"the tokens would go to {str(folder)!r}, which holds other files; move them, or name another folder"
        )


@contextmanager
def _replacing_files_of(folder: Path, identity: dict[str, Any]) -> Iterator[Path]:
    """Yield a temporary folder whose files replace those in ``folder`` when the block ends."""
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with hidden_path(folder, "data") as temporary:
            yield temporary
            # without counts the folder is not complete
            write_atomically(folder / MANIFEST, json.dumps(identity) + "\n")
            for path in sorted(temporary.iterdir(), key=lambda path: path.name == MANIFEST):
                path.replace(folder / path.name)
            sync(folder)
    finally:
        for path in new_folders:
            remove_if_empty(path)


def _write(folder: Path, identity: dict[str, Any], splits: dict[Split, list[Document]], report: Progress) -> None:
    report("tokenizer", 0, 1)
    tokenizer = train_tokenizer(
        (document.text for document in splits[Split.TRAIN]), vocab_size=int(identity["vocab_size"])
    )
    write_atomically(folder / TOKENIZER, tokenizer.to_str())
    report("tokenizer", 1, 1)
    counts = _encode_splits(folder, tokenizer, splits, report)
    actual = {
        "tokens_in_vocabulary": tokenizer.get_vocab_size(),
        "tokenizer_sha256": file_digest(folder / TOKENIZER),
        "splits": counts,
    }
    write_atomically(folder / MANIFEST, json.dumps({**identity, **actual}, indent=2) + "\n")


def _matching(folder: Path, identity: dict[str, Any]) -> "TokenData | None":
    """Return the data in the folder if it is complete and matches text and vocabulary size, else None."""
    try:
        data = open_data(folder)
    except DataError:
        return None
    return data if all(data.manifest.get(key) == value for key, value in identity.items()) else None


def _check_digest(path: Path, expected: str | None) -> None:
    """Check a file's SHA-256; manifests from before 2026-11-24 have none for the tokenizer."""
    if expected is not None and file_digest(path) != expected:
        raise ValueError(f"{path.name} was changed: its SHA-256 differs from the manifest's")


def _dtype_for(vocab_size: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def _map(path: Path, counts: dict[str, Any], vocab_size: int) -> NDArray[Any]:
    dtype, tokens = _dtype_for(vocab_size), int(counts["tokens"])
    if path.stat().st_size != tokens * dtype.itemsize:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes, but {tokens * dtype.itemsize} by the manifest")
    _check_digest(path, counts["sha256"])
    if not tokens:
        return np.zeros(0, dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r")


def _encode_splits(
    folder: Path, tokenizer: "Tokenizer", splits: dict[Split, list[Document]], report: Progress
) -> dict[str, dict[str, Any]]:
    total = sum(len(document.text) for documents in splits.values() for document in documents)
    done, counts = 0, dict[str, dict[str, Any]]()
    for split, documents in splits.items():
        tokens = 0
        with replacing(folder / f"{split}.bin") as temporary, temporary.open("wb") as file:
            for texts in _groups(documents):
                done += sum(map(len, texts))
                ids = _encode(tokenizer, texts)
                file.write(ids.tobytes())
                tokens += len(ids)
                report("encode", done, total)
        size = sum(len(document.text.encode()) for document in documents)
        written = file_digest(folder / f"{split}.bin")
        counts[str(split)] = {"tokens": tokens, "documents": len(documents), "bytes": size, "sha256": written}
    return counts


def _encode(tokenizer: "Tokenizer", texts: list[str]) -> NDArray[Any]:
    """Encode texts, each followed by the end-of-text token."""
    end = end_of_text_id(tokenizer)
    rows = [[*encoding.ids, end] for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    return np.concatenate(rows).astype(_dtype_for(tokenizer.get_vocab_size()))


def _groups(documents: list[Document]) -> Iterator[list[str]]:
    """Yield groups of texts of about a million characters."""
    group: list[str] = []
    characters = 0
    for document in documents:
        group.append(document.text)
        characters += len(document.text)
        if characters >= ENCODE_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group
