"""Text sources, read as documents: ``load_documents(source)``.

| source                                 | documents                                                        |
|----------------------------------------|------------------------------------------------------------------|
| ``builtin``                            | the corpus of :mod:`octavo.text.corpus`                      |
| ``language-topics``                    | its language reference alone, topic by topic                     |
| ``library-sources``                    | the corpus without the language reference, in the same splits    |
| a .txt, .md or other text file         | the file                                                         |
| a .jsonl or .parquet file              | one per row, from its column ``text`` or only column of strings  |
| a folder                               | all .txt, .md, .jsonl and .parquet files below it, in name order |
| a data set name of Hugging Face's hub  | one per row, in the data set's own splits; see                   |
|                                        | :mod:`octavo.text.named_datasets`                                |

Settings may follow the name (:mod:`octavo.text.source_settings`). An existing path takes precedence over a data set of
that name. The hub is used only for OWNER/NAME where OWNER is not
a folder, and for names that begin with "wikitext". Text must be UTF-8; a file in another encoding raises an error.

``divide`` assigns every document to a split. The built-in corpus is divided by file. Other text is first cut into
pieces at line ends, so that part of a single file can be held out; the pieces with the lowest hashes are held out until
their share is reached.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from octavo.errors import ConfigError, DataError
from octavo.memory import check_fits
from octavo.models.sources import HUB_NAME
from octavo.parsing import parse_json
from octavo.text.corpus import (
    Document,
    Split,
    builtin_documents,
    library_documents,
    path_fraction,
    split_of,
    topic_documents,
)
from octavo.text.named_datasets import HUB_FAMILIES, dataset_documents
from octavo.text.source_settings import TEXT_COLUMN, SourceSettings, parse_source, text_column

__all__ = [
    "ALL",
    "BUILTIN",
    "LIBRARY_SOURCES",
    "TOPICS",
    "check_split",
    "divide",
    "is_unicode",
    "load_documents",
    "same_source",
    "unseen_split",
]

BUILTIN, TOPICS, LIBRARY_SOURCES = "builtin", "language-topics", "library-sources"
ALL = "all"  # of a source's splits
PLAIN = {".txt", ".md"}
SUFFIXES = {*PLAIN, ".jsonl", ".parquet"}

PIECE_CHARACTERS = 16_384
PIECES_AT_LEAST = 100  # of a small text, so that the held-out part is not one block
HELD_OUT_CHARACTERS = 262_144  # enough for a stable loss; at most a tenth of the text, at least a fiftieth


def same_source(this: str, other: str) -> bool:
    """Return True if two names are the same source, or paths of the same file or folder."""
    return _resolved(this) == _resolved(other)


def _resolved(source: str) -> tuple[str, SourceSettings]:
    name, settings = parse_source(source)
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name, settings


def unseen_split(source: str, known: str) -> str:
    """Split of a source to measure on, if the training split of ``known`` was used before.

    "test" for the same source, and for the built-in corpus and its library sources, which have the same splits; "all"
    for another source. Only names and resolved paths are compared; ``octavo.text.overlap.shared_share`` measures how
    much of one text occurs in another, such as the language topics in the built-in corpus.

    Example:
        >>> unseen_split("builtin", "library-sources"), unseen_split("language-topics", "library-sources")
        ('test', 'all')
    """
    corpus = {BUILTIN, LIBRARY_SOURCES}
    return str(Split.TEST) if same_source(source, known) or {source, known} <= corpus else ALL


def load_documents(source: str | Path) -> list[Document]:
    """Load all documents of a source.

    Args:
        source: see the table above.

    Raises:
        DataError: a path or data set that does not exist, is empty or is not text; a path that is not a regular file.
        ConfigError: the files are larger than this machine's memory, or settings that the source does not have.
    """
    included = {BUILTIN: builtin_documents, TOPICS: topic_documents, LIBRARY_SOURCES: library_documents}
    if str(source) in included:
        return included[str(source)]()
    if not str(source):
        raise DataError("the source is empty; give a file, a folder or a data set, or 'builtin'")
    name, settings = parse_source(str(source))
    if name in included:
        raise ConfigError(f"{name!r} is text of octavo's own and has no columns or other settings; leave them out")
    path = Path(name).expanduser()
    if path.exists():
        documents = _from_path(path, settings)
    elif _is_on_hub(name):
        documents = dataset_documents(name, settings)
    else:
        raise DataError(
            f"there is no file or folder {name!r}; give an existing path, 'builtin', or a data set of Hugging "
            "Face's hub as OWNER/NAME with --hub"
        )
    if not any(document.text.strip() for document in documents):
        raise DataError(f"{str(source)!r} holds no text; give a file, a folder or a data set with some")
    return documents


def _from_path(path: Path, settings: SourceSettings) -> list[Document]:
    if settings != SourceSettings(column=settings.column):
        raise ConfigError(f"config, split and mb are for named data sets, and {str(path)!r} is a path; leave them out")
    files = _files_below(path) if path.is_dir() else [path]
    _check_size(path, files)
    root = path if path.is_dir() else path.parent
    return [document for file in files for document in _read(file, file.relative_to(root), settings.column)]


def is_unicode(text: str) -> bool:
    """Return True if UTF-8 can encode the text, that is, if it has no unpaired surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_split(split: str) -> None:
    """Raise ConfigError unless ``split`` is a split of a source, or "all"."""
    if split not in (*Split, ALL):
        raise ConfigError(f"split must be one of {', '.join(Split)}, {ALL}, not {split!r}")


def divide(documents: list[Document], *, by_file: bool) -> dict[Split, list[Document]]:
    """Divide documents into splits, in order.

    Args:
        documents: if any has a split, all keep theirs.
        by_file: choose by the hash of each document's path; otherwise cut the text into pieces and hold out an exact
            share.
    """
    if any(document.split for document in documents):
        return {split: [d for d in documents if (d.split or Split.TRAIN) is split] for split in Split}
    if by_file:
        return {split: [d for d in documents if split_of(d.path) is split] for split in Split}
    return _divide_pieces(documents)


def _divide_pieces(documents: list[Document]) -> dict[Split, list[Document]]:
    total = sum(len(document.text) for document in documents)
    size = max(1, min(PIECE_CHARACTERS, total // PIECES_AT_LEAST))
    pieces = [piece for document in documents for piece in _pieces(document, size)]
    held_out_characters = max(total // 50, min(total // 10, HELD_OUT_CHARACTERS))
    held_out: dict[str, Split] = {}
    in_hash_order = iter(sorted(pieces, key=lambda piece: path_fraction(piece.path)))
    for split in (Split.VALIDATION, Split.TEST):
        characters = 0
        while characters < held_out_characters and (piece := next(in_hash_order, None)) is not None:
            held_out[piece.path] = split
            characters += len(piece.text)
    return {split: [p for p in pieces if held_out.get(p.path, Split.TRAIN) is split] for split in Split}


def _pieces(document: Document, size: int) -> Iterator[Document]:
    """Yield pieces of about ``size`` characters, cut at line ends and inside longer lines."""
    lines: list[str] = []
    characters = count = 0
    for line in _short_lines(document.text, size):
        lines.append(line)
        characters += len(line)
        if characters >= size:
            yield Document(f"{document.path}#{count}", "".join(lines))
            lines, characters, count = [], 0, count + 1
    if lines:
        yield Document(f"{document.path}#{count}", "".join(lines))


def _short_lines(text: str, size: int) -> Iterator[str]:
    for line in text.splitlines(keepends=True):
        yield from (line[start : start + size] for start in range(0, len(line), size))


def _files_below(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not files:
        raise DataError(
            f"the folder {str(folder)!r} holds no {', '.join(sorted(SUFFIXES))} file; add some or name another"
        )
    return files


def _check_size(source: Path, files: list[Path]) -> None:
    """Raise an error for pipes and devices, and for more text than fits in memory."""
    if special := [file for file in files if not file.is_file()]:
        raise DataError(f"{str(special[0])!r} is not a regular file; copy its content to a file, and name that file")
    sizes = [file.stat().st_size for file in files]  # while a file is decoded, both its bytes and text are in memory
    check_fits(f"the text in {str(source)!r}", sum(sizes) + max(sizes), torch.device("cpu"), remedy="give a part of it")


def _is_on_hub(name: str) -> bool:
    """Return True for a known family, and for OWNER/NAME where OWNER is not a folder."""
    if name.partition("-")[0] in HUB_FAMILIES and "/" not in name:
        return True
    path = Path(name)
    return bool(HUB_NAME.fullmatch(name)) and path.suffix.lower() not in SUFFIXES and not path.parent.is_dir()


def _read(path: Path, name: Path, column: str | None) -> Iterator[Document]:
    if not is_unicode(str(path)):
        raise DataError(f"the file name {str(path)!r} is not UTF-8; rename the file or its folder, or leave it out")
    if path.suffix.lower() == ".parquet":
        yield from _read_parquet(path, name, column)
        return
    text = _read_text(path)
    if path.suffix.lower() == ".jsonl":
        yield from _read_jsonl(path, name, text, column)
    else:
        yield Document(name.as_posix(), text)


def _read_text(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r}: {error.strerror}; choose a file you may read") from error
    if not raw.strip():
        raise DataError(f"{str(path)!r} is empty; give a file with text")
    advice = "give plain UTF-8 text, or convert the file to it"
    if b"\0" in raw:
        raise DataError(f"{str(path)!r} is not text: there is a NUL byte at offset {raw.index(0)}; {advice}")
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{str(path)!r} is not text: invalid UTF-8 at offset {error.start}; {advice}") from error


def _read_jsonl(path: Path, name: Path, text: str, column: str | None) -> Iterator[Document]:
    chosen = None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except DataError as error:
            raise DataError(f"line {number} of {str(path)!r} is not JSON: {error}; fix or remove it") from error
        chosen = chosen or _column_of(path, row, column)
        value = row.get(chosen) if isinstance(row, dict) else None
        if not isinstance(value, str):
            raise DataError(f"line {number} of {str(path)!r} has no string {chosen!r}; every line needs one")
        if not is_unicode(value):
            raise DataError(f"line {number} of {str(path)!r} holds half of a surrogate pair; fix or remove it")
        yield Document(f"{name.as_posix()}:{number}", value)


def _column_of(path: Path, row: object, column: str | None) -> str:
    """The column to read of a file's rows, by the first."""
    columns = [key for key, value in row.items() if isinstance(value, str)] if isinstance(row, dict) else []
    return text_column(str(path), columns, column) if columns else column or TEXT_COLUMN


def _read_parquet(path: Path, name: Path, column: str | None) -> Iterator[Document]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise DataError(f"reading {str(path)!r} needs pyarrow; install octavo[hf]") from error
    try:
        with parquet.ParquetFile(path) as file:
            strings = [field.name for field in file.schema_arrow if field.type in (pa.string(), pa.large_string())]
            chosen = text_column(str(path), strings, column)
            for batch in file.iter_batches(columns=[chosen]):
                rows = batch.column(0).to_pylist()
                yield from (Document(f"{name.as_posix()}:{i}", row) for i, row in enumerate(rows) if row)
    except pa.ArrowException as error:
        raise DataError(
            f"{str(path)!r} is not a parquet file that can be read: {str(error).splitlines()[0]}"
        ) from error
