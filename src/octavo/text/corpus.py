"""The built-in corpus: text written by people, available offline on every machine.

A study of precisions needs real text, since random tokens cannot be learned. Every Python includes some: the sources of
its standard library, and the language reference that ``help("for")`` prints (``pydoc_data.topics``), both under the PSF
licence. The corpus is that of the running interpreter, so two machines with the same Python train on the same bytes,
which the content hash verifies.

Excluded are tests; generated tables (code pages, sysconfig's build data, the topics' own source); third-party packages;
and parts that distributions package separately (idlelib, tkinter, turtle, lib2to3, distutils, ensurepip), so that the
corpus does not depend on other installed packages.

A document's split depends only on a hash of its path: it is stable when other files change, and no file is in two
splits.
"""

import hashlib
import importlib
import platform
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from octavo.errors import DataError

__all__ = [
    "CorpusSummary",
    "Document",
    "Split",
    "builtin_documents",
    "content_hash",
    "corpus_summary",
    "library_documents",
    "split_of",
    "topic_documents",
]

LICENCE = "PSF-2.0 (Python Software Foundation License)"
HELD_OUT_SHARE = 0.03  # of the paths, for validation and for test each
TOPICS = "pydoc_data/topics"

NOT_WRITTEN_FOR_THIS = {"__pycache__", "site-packages", "dist-packages", "lib-dynload", "test", "tests", "pydoc_data"}
PACKAGED_APART = {"idlelib", "tkinter", "lib2to3", "distutils", "ensurepip", "turtle.py", "turtledemo"}
BUILD_DATA = ("_sysconfigdata", "_sysconfig_vars", "_distutils_system_mod", "sitecustomize")
GENERATED_MARKS = ("generated from", "auto-generated", "do not edit")
CODE_PAGE_MARKS = ("decoding_table", "decoding_map")


class Split(StrEnum):
    """Use of a document."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


@dataclass(frozen=True, slots=True)
class Document:
    """A text and its origin.

    Attributes:
        path: path relative to the source; identifies the document.
        text: the decoded text.
        split: split given by the source, or None.
    """

    path: str
    text: str
    split: Split | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSummary:
    """Contents of the built-in corpus on this machine.

    Attributes:
        python: version of the interpreter.
        licence: licence of the text.
        content_hash: hash of all paths and texts.
        documents: number of documents by (split, kind).
        bytes: UTF-8 bytes by (split, kind).
    """

    python: str
    licence: str
    content_hash: str
    documents: dict[tuple[str, str], int]
    bytes: dict[tuple[str, str], int]


def builtin_documents() -> list[Document]:
    """List the documents of the corpus, sorted by path.

    Raises:
        DataError: the interpreter has no readable library sources (a zipped or frozen Python).
    """
    root = Path(sysconfig.get_path("stdlib"))
    documents = [*_sources(root), *_topics()]
    if not documents:
        raise DataError(
            f"the Python library at {root} holds no .py sources; "
            "train on your own text with --data, or use a Python that is not zipped"
        )
    return sorted(documents, key=lambda document: document.path)


def topic_documents() -> list[Document]:
    """List the topics of the language reference, in the order of ``pydoc_data.topics``.

    Raises:
        DataError: this Python has no language reference.
    """
    topics = list(_topics())
    if not topics:
        raise DataError(f"this Python has no {TOPICS}; evaluate on your own text with --data")
    return topics


def library_documents() -> list[Document]:
    """List the corpus without its language reference, each document with its split.

    For training before an evaluation on the topics, most of which are in the whole corpus's training split.
    """
    found = (document for document in builtin_documents() if not document.path.startswith(f"{TOPICS}/"))
    return [replace(document, split=split_of(document.path)) for document in found]


def split_of(path: str, held_out_share: float = HELD_OUT_SHARE) -> Split:
    """Return the split of a path, by its BLAKE2b hash as a fraction; the lowest fractions are held out.

    Example:
        >>> split_of("json/decoder.py")
        <Split.TRAIN: 'train'>
    """
    fraction = path_fraction(path)
    if fraction < held_out_share:
        return Split.VALIDATION
    return Split.TEST if fraction < 2 * held_out_share else Split.TRAIN


def path_fraction(path: str) -> float:
    """Hash of a path as a number in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=6).digest()) / 2**48


def kind_of(path: str) -> str:
    """Kind of text of a document of the built-in corpus."""
    return "language reference" if path.startswith(f"{TOPICS}/") else "library source"


def content_hash(documents: Iterable[Document]) -> str:
    """BLAKE2b over paths, given splits and texts, in order; 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for document in documents:
        for part in (document.path, document.split or "", document.text):
            encoded = part.encode()
            digest.update(len(encoded).to_bytes(8) + encoded)
    return digest.hexdigest()


def corpus_summary() -> CorpusSummary:
    """Counts and sizes of the built-in corpus by split and kind."""
    documents = builtin_documents()
    counts, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for document in documents:
        key = (str(split_of(document.path)), kind_of(document.path))
        counts[key] += 1
        sizes[key] += len(document.text.encode())
    return CorpusSummary(
        python=platform.python_version(),
        licence=LICENCE,
        content_hash=content_hash(documents),
        documents=dict(counts),
        bytes=dict(sizes),
    )


def _sources(root: Path) -> Iterator[Document]:
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _is_left_out(relative):
            continue
        try:
            with tokenize.open(path) as file:  # decodes by the file's coding line
                text = file.read()
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue  # not readable as Python source
        if text.strip() and not _is_generated(relative, text):
            yield Document(relative.as_posix(), text)


def _is_left_out(relative: Path) -> bool:
    folders = set(relative.parts[:-1])
    if folders & NOT_WRITTEN_FOR_THIS or relative.parts[0] in PACKAGED_APART:
        return True
    return relative.name.startswith(BUILD_DATA) or relative.parts[0].startswith("config-")


def _is_generated(relative: Path, text: str) -> bool:
    """Return True for a file marked as generated in its first lines, and for a code page's table."""
    head = text[:400].lower()
    is_code_page = relative.parts[0] == "encodings" and any(mark in text for mark in CODE_PAGE_MARKS)
    return is_code_page or any(mark in head for mark in GENERATED_MARKS)


def _topics() -> Iterator[Document]:
    try:
        topics = importlib.import_module(TOPICS.replace("/", ".")).topics
    except ModuleNotFoundError:
        return  # some distributions exclude it; the summary then lacks this kind
    for name, text in topics.items():
        yield Document(f"{TOPICS}/{name}", text)
