"""Parsing of JSON, TOML and files that Rust libraries read; all texts from users are parsed here.

A file may be truncated, edited by hand, or malicious. For some of these Python's parsers raise ``RecursionError`` (deep
nesting) or a bare ``ValueError`` (an integer of 5,000 digits) or return infinity (``1e999``), and the Rust libraries
raise ``PanicException``, which is not an ``Exception``. All become a :class:`~octavo.errors.DataError` whose text is
the reason alone; the caller adds the file's name and what to do:

    try:
        record = read_json(path)
    except (OSError, DataError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}; calibrate again") from error

``tests/policy/test_one_reader.py`` keeps ``json.loads``, ``tomllib`` and the Rust readers out of every other file.
"""

import json
import math
import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from octavo.errors import DataError, OctavoError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

__all__ = [
    "did_you_mean",
    "library_errors",
    "parse_json",
    "parse_tensors",
    "parse_tokenizer",
    "parse_toml",
    "read_json",
    "read_object",
    "read_tensors",
    "read_tokenizer",
    "read_toml",
]

MOST_BYTES = 256 << 20  # of a file that is read at once; the largest tokenizer.json on the hub has about 35 MB
READ_BYTES = 1 << 20
MOST_TOML_BYTES = 4 << 20
MOST_LEVELS = 100
KEY_PART = re.compile(r"""(?<![\w-])(?=((?:[\w-]++|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*))""")  # wherever one may begin
MOST_DIGITS = 308  # of an integer that is still a float64; transformers writes 10^30 for "no limit"
TOML_INTEGERS = range(-(2**63), 2**63)  # by TOML's definition


def read_json(path: Path, *, allow_nan: bool = False) -> Any:
    """Read the value in a JSON file.

    Args:
        path: the file.
        allow_nan: accept NaN and infinities, which Python writes although JSON does not have them.

    Raises:
        OSError: the file cannot be opened.
        DataError: see :func:`parse_json`; or the file is too large.
    """
    return parse_json(_content(path, MOST_BYTES), allow_nan=allow_nan)


def read_object(path: Path, *, allow_nan: bool = False) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        OSError: the file cannot be opened.
        DataError: see :func:`read_json`; or the value is not an object.
    """
    value = read_json(path, allow_nan=allow_nan)
    if not isinstance(value, dict):
        raise DataError(f"it holds a {type(value).__name__} where a JSON object belongs")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        OSError: the file cannot be opened.
        DataError: see :func:`parse_toml`; or the file is too large.
    """
    return parse_toml(_content(path, MOST_TOML_BYTES))


def read_tokenizer(path: Path) -> "Tokenizer":
    """Read a tokenizer.json.

    Raises:
        OSError: the file cannot be opened.
        DataError: the library ``tokenizers`` does not read it.
    """
    return parse_tokenizer(_content(path, MOST_BYTES))


def read_tensors(path: Path) -> "dict[str, Tensor]":
    """Read all tensors of a safetensors file.

    Raises:
        OSError: the file cannot be opened.
        DataError: the library ``safetensors`` does not read it.
    """
    from safetensors.torch import load_file

    with library_errors():
        return load_file(path)


def parse_json(text: str | bytes, *, allow_nan: bool = False, largest: int | None = None) -> Any:
    """Return the value in a JSON text.

    Args:
        text: JSON; bytes are UTF-8, and a byte order mark is skipped.
        allow_nan: accept NaN and infinities.
        largest: largest absolute value of an integer; None for the range of float64.

    Raises:
        DataError: it is not JSON in UTF-8, nests too deeply, or has a number out of range or an unpaired surrogate.

    Example:
        >>> parse_json('{"step": 3}')
        {'step': 3}
        >>> parse_json("[" * 100_000)
        Traceback (most recent call last):
        octavo.errors.DataError: it nests deeper than 100 levels
    """
    text = _decoded(text)
    try:
        value = _decoder(allow_nan, largest).decode(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise DataError(str(error)) from None
    if text.count("[") + text.count("{") > MOST_LEVELS or "\\u" in text:
        _check(value)
    return value


def parse_toml(text: str | bytes) -> dict[str, Any]:
    """Return the table in a TOML text.

    Raises:
        DataError: it is not TOML in UTF-8, nests too deeply, or holds an integer beyond 64 bits.

    Example:
        >>> parse_toml("steps = 3")
        {'steps': 3}
    """
    text = _decoded(text)
    if _has_long_key(text):  # tomllib takes quadratic time for them: half a minute for 30,000 parts
        raise _too_deep()
    try:
        value = tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except tomllib.TOMLDecodeError as error:
        raise DataError(str(error)) from None
    except ValueError:  # Python converts at most 4,300 digits
        raise DataError("an integer has thousands of digits; TOML's have 64 bits") from None
    _check(value, integers=TOML_INTEGERS)
    return value


def parse_tokenizer(text: str | bytes) -> "Tokenizer":
    """Return the tokenizer in the text of a tokenizer.json.

    Raises:
        DataError: the library ``tokenizers`` does not read it.
    """
    from tokenizers import Tokenizer

    text = _decoded(text)
    with library_errors():
        return Tokenizer.from_str(text)


def parse_tensors(content: bytes) -> "dict[str, Tensor]":
    """Return all tensors in the content of a safetensors file.

    Raises:
        DataError: the library ``safetensors`` does not read it.
    """
    from safetensors.torch import load

    with library_errors():
        return load(content)


@contextmanager
def library_errors() -> Iterator[None]:
    """Convert all errors of a Rust library in the block to DataError.

    Such libraries raise ``Exception`` itself, their own errors, KeyError for an unknown type and, if an assertion
    fails, pyo3's ``PanicException``, which is not an ``Exception`` and cannot be imported.
    """
    try:
        yield
    except (OSError, OctavoError):
        raise
    except Exception as error:
        raise DataError(f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)) from error
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise DataError(f"the library that reads it broke down ({str(error).splitlines()[0]})") from error


def _content(path: Path, most: int) -> bytes:
    content = bytearray()
    with path.open("rb") as file:  # in parts: a read takes the memory of what is asked for, and a device has no size
        while len(content) <= most and (part := file.read(READ_BYTES)):
            content += part
    if len(content) > most:
        raise DataError(f"it is larger than {most >> 20} MiB")
    return bytes(content)


def _decoded(text: str | bytes) -> str:
    try:
        return text.removeprefix("\ufeff") if isinstance(text, str) else text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"it is not UTF-8 at byte {error.start}") from None


@cache
def _decoder(allow_nan: bool, largest: int | None) -> json.JSONDecoder:
    def integer(digits: str) -> int:
        if len(digits) > MOST_DIGITS or (largest is not None and abs(int(digits)) > largest):
            raise ValueError(f"the number {_shortened(digits)} is too large")
        return int(digits)

    def number(digits: str) -> float:
        value = float(digits)
        if math.isinf(value):
            raise ValueError(f"the number {_shortened(digits)} is too large")
        return value

    if allow_nan:
        return json.JSONDecoder(parse_int=integer)
    return json.JSONDecoder(parse_int=integer, parse_float=number, parse_constant=_refuse_constant)


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number in JSON")


def _check(value: Any, *, integers: range | None = None) -> None:
    """Check depth, surrogates and integers level by level, since recursion would exceed Python's limit as well."""
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        if not level:
            return
        for item in level:
            if isinstance(item, str):
                _check_text(item)
            elif integers is not None and isinstance(item, int) and item not in integers:
                raise DataError(f"an integer of {item.bit_length()} bits is too large; TOML's have 64")
        level = [part for item in level for part in _parts(item)]
    raise _too_deep()


def _parts(item: Any) -> list[Any]:
    if isinstance(item, dict):
        return [*item.keys(), *item.values()]
    return item if isinstance(item, list) else []


def _has_long_key(text: str) -> bool:
    """Return whether a TOML text may hold a key of more than ``MOST_LEVELS`` parts; reads each part once."""
    if text.count(".") < MOST_LEVELS:
        return False
    parts_before: dict[int, int] = {}  # of the longest key so far that goes on at a place
    for part in KEY_PART.finditer(text):
        count = parts_before.pop(part.start(), 0) + 1
        if count >= MOST_LEVELS:
            return True
        parts_before[part.end(1)] = max(count, parts_before.get(part.end(1), 0))
    return False


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError("it holds half of a surrogate pair, which is no character") from None


def _too_deep() -> DataError:
    return DataError(f"it nests deeper than {MOST_LEVELS} levels")


def _shortened(digits: str) -> str:
    return digits if len(digits) <= 20 else f"{digits[:12]}… of {len(digits)} digits"


def did_you_mean(given: str, allowed: Sequence[str]) -> str:
    """Return a suggestion of a similar allowed word for the end of a message, or "".

    Example:
        >>> did_you_mean("rowwize", ["rowwise", "delayed"])
        " (did you mean 'rowwise'?)"
    """
    close = get_close_matches(given, allowed, n=1)
    return f" (did you mean {str(close[0])!r}?)" if close else ""
