"""Text to tokens on disk, and tokens to batches.

``prepare`` writes a data folder:

| file                                | content                                                               |
|-------------------------------------|-----------------------------------------------------------------------|
| tokenizer.json                      | trained on the training split                                         |
| train.bin, validation.bin, test.bin | token ids, little-endian uint16 (uint32 for vocabularies over 65,536) |
| manifest.json                       | where the text came from, its content hash; the counts, the token     |
|                                     | files' and the tokenizer's SHA-256, written last                      |

The folder is used again when text and vocabulary size are those of the manifest and its files are as they were
written. Otherwise it is rebuilt, in a hidden folder beside it whose files take their places at the end. A folder that
holds files and no manifest of this kind is somebody else's and refused.

``TokenData`` maps the token files into memory. A training batch is a pure function of (seed, step): its windows start
at positions drawn by a counter-based key, not by an iterator, so a resumed run reads what the uninterrupted one would
have read. Evaluation reads the split in order, in windows that do not overlap, so that every token is predicted once.
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
from octavo.files import hidden_folder, remove_if_empty, replacing, sync_folder, write_atomically
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
    """Tokenise a source into a data folder, or open the folder if it already holds just that.

    Args:
        source: see :func:`octavo.text.sources.load_documents`.
        out_dir: the data folder; made if missing.
        vocab_size: tokens wanted, 257 or more.
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
    """``prepare`` with a last look: what is in the folder stays until the block ends, and for good if it raises.

    Read the tokens inside the block only; :func:`open_data` opens them in their place.
    """
    report = progress or _silent
    folder = Path(out_dir)
    _check_own(folder)
    report("read", 0, 1)
    documents = load_documents(source)
    identity = {"format": FORMAT_VERSION, "content_hash": content_hash(documents), "vocab_size": vocab_size}
    report("read", 1, 1)
    if (found := _matching(folder, identity)) is not None:
        yield found
        return
    splits = divide(documents, by_file=str(source) == BUILTIN)
    with _replacing_files_of(folder, identity) as temporary:
        _write(temporary, {**identity, "source": str(source)}, splits, report)
        yield open_data(temporary)


def open_data(folder: str | Path) -> "TokenData":
    """Open a data folder that ``prepare`` wrote.

    Raises:
        DataError: it is missing, incomplete or damaged.
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
    """The tokens of a source, by split.

    Attributes:
        folder: where they are.
        manifest: what manifest.json says.
        vocab_size: ids run from 0 to this, exclusive.
        splits: token ids, memory-mapped.
    """

    folder: Path
    manifest: dict[str, Any]
    vocab_size: int
    splits: dict[Split, NDArray[Any]]

    @property
    def content_hash(self) -> str:
        """Hash of the text the tokens came from."""
        return str(self.manifest["content_hash"])

    def tokenizer(self) -> "Tokenizer":
        """The tokenizer that made the tokens."""
        return load_tokenizer(self.folder / TOKENIZER)

    def batch(
        self, step: int, *, batch_size: int, context: int, seed: int, split: Split = Split.TRAIN
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets [batch_size, context] int64 of a step; the targets are the inputs one token on.

        Raises:
            DataError: the split is shorter than the context.
        """
        tokens = self._long_enough(split, context)
        starts = np.random.default_rng([seed, step]).integers(0, len(tokens) - context, size=batch_size)
        return _shifted(np.stack([tokens[start : start + context + 1] for start in starts]))

    def windows(
        self, context: int, *, split: Split = Split.VALIDATION, max_tokens: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Non-overlapping windows: inputs and targets [count, context] int64; a rest shorter than a window is left out.

        Args:
            context: tokens a window predicts.
            split: which tokens.
            max_tokens: take at most so many, as windows spread evenly over the split; at least one window; None for
                all.

        Raises:
            DataError: the split is shorter than the context.
        """
        tokens = self._long_enough(split, context)
        count = (len(tokens) - 1) // context
        wanted = count if max_tokens is None else min(count, max(1, max_tokens // context))
        chosen = np.arange(wanted) * count // wanted
        return _shifted(np.stack([tokens[i * context : (i + 1) * context + 1] for i in chosen]))

    def _long_enough(self, split: Split, context: int) -> NDArray[Any]:
        if context < 1:
            raise ConfigError(f"context must be at least 1, not {context}")
        tokens = self.splits[split]
        if len(tokens) <= context:
            chosen = self.manifest.get("split", split)
            part = chosen if chosen == "all" else f"the {chosen} split"
            raise DataError(
                f"{part} of {self.manifest['source']!r} has {len(tokens)} tokens, too few for a context of "
                f"{context}; give more text or a shorter context"
            )
        return tokens


def _shifted(rows: NDArray[Any]) -> tuple[Tensor, Tensor]:
    block = torch.from_numpy(rows.astype(np.int64))
    return block[:, :-1].contiguous(), block[:, 1:].contiguous()


def _silent(phase: str, done: int, total: int) -> None:
    """Report nothing."""


def _check_own(folder: Path) -> None:
    """Refuse a folder with files in it that ``prepare`` did not begin."""
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
    """A folder to write to; its files take their places in ``folder``, where others stay, when the block ends."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with hidden_folder(folder, "data") as temporary:
            yield temporary
            # without counts the folder is not complete
            write_atomically(folder / MANIFEST, json.dumps(identity) + "\n")
            for path in sorted(temporary.iterdir(), key=lambda path: path.name == MANIFEST):
                path.replace(folder / path.name)
            sync_folder(folder)
    finally:
        for path in made:
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
    """The data in the folder, if it is whole and made from that text with that vocabulary size."""
    try:
        data = open_data(folder)
    except DataError:
        return None
    return data if all(data.manifest.get(key) == value for key, value in identity.items()) else None


def _check_digest(path: Path, expected: str | None) -> None:
    """Refuse a changed file; a manifest of before 2026-11-24 has no digest of the tokenizer."""
    if expected is not None and file_digest(path) != expected:
        raise ValueError(f"{path.name} is not what was written: its SHA-256 is not the manifest's")


def _dtype_for(vocab_size: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def _map(path: Path, counts: dict[str, Any], vocab_size: int) -> NDArray[Any]:
    dtype, tokens = _dtype_for(vocab_size), int(counts["tokens"])
    if path.stat().st_size != tokens * dtype.itemsize:
        raise ValueError(
            f"{path.name} has {path.stat().st_size} bytes, the manifest promises {tokens * dtype.itemsize}"
        )
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
    """Ids of the texts, each followed by the end-of-text token."""
    end = end_of_text_id(tokenizer)
    rows = [[*encoding.ids, end] for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    return np.concatenate(rows).astype(_dtype_for(tokenizer.get_vocab_size()))


def _groups(documents: list[Document]) -> Iterator[list[str]]:
    """Texts in runs of about a million characters."""
    group: list[str] = []
    held = 0
    for document in documents:
        group.append(document.text)
        held += len(document.text)
        if held >= ENCODE_CHARACTERS:
            yield group
            group, held = [], 0
    if group:
        yield group
