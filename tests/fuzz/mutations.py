"""Damage to files, drawn from a seed: to their bytes, and to what JSON, TOML and safetensors say with them."""

import json
import random
import struct
import tomllib
from pathlib import Path
from typing import Any

import tomli_w

HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 10**6, 2**31, 2**63 - 1, 10**30, -(2**63), 0.5, -0.0, 1e308, float("inf"),
    float("nan"), "", "a", "../x", "\0", "é" * 40, "9" * 400, [], [[]], [0] * 50, {}, {"": {}}, {"a": [1, "b", None]},
)  # fmt: skip
NESTED = 3000


def damaged(path: Path, rng: random.Random) -> str:
    """Damage a file in place, and say how."""
    content = path.read_bytes()
    ways = [_bytes_flipped, _cut, _spliced, _number_written]
    structured = {".json": _json, ".jsonl": _lines, ".toml": _toml, ".safetensors": _safetensors}.get(path.suffix)
    if structured is not None:
        ways = [*ways, *[structured] * 8]
    way = rng.choice(ways)
    try:
        changed = way(content, rng)
    except (ValueError, LookupError, struct.error, TypeError, AttributeError, RecursionError):  # damaged already
        way, changed = _bytes_flipped, _bytes_flipped(content, rng)
    path.write_bytes(changed)
    return f"{path.name}: {way.__name__.strip('_')}"


def hostile_list(record: Path, rng: random.Random) -> str:
    """Write a list of sums that names what lies elsewhere, or what has no end, or nothing; and say how."""
    if rng.random() < 0.2:
        record.unlink()
        record.symlink_to(rng.choice(("/dev/zero", "/dev/null", ".", "nowhere")))
        return f"{record.name}: a link to {record.readlink()}"
    names = rng.choice(
        ([], ["/dev/zero"], ["../" * 9 + "dev/zero"], ["zeros"], ["/etc/hostname"], ["./.././config.json"], ["."], [""])
    )
    (record.parent / "zeros").unlink(missing_ok=True)
    (record.parent / "zeros").symlink_to("/dev/zero")
    head = f"# {len(names) if rng.random() < 0.8 else 10**30} files; sha256sum -c {record.name}"
    record.write_text("\n".join([head, *(f"{'0' * 64}  {name}" for name in names), ""]))
    return f"{record.name}: lists {names}"


def _bytes_flipped(content: bytes, rng: random.Random) -> bytes:
    flipped = bytearray(content or b"\0")
    reach = len(flipped) if rng.random() < 0.3 else min(len(flipped), 2048)  # heads are where lengths and names are
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        flipped[rng.randrange(reach)] = rng.choice((0, 0xFF, 0x80, rng.randrange(256)))
    return bytes(flipped)


def _cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def _spliced(content: bytes, rng: random.Random) -> bytes:
    """A piece taken out, repeated, or moved."""
    start, end, to = sorted(rng.randrange(len(content) + 1) for _ in range(3))
    piece = content[start:end]
    return rng.choice((content[:start] + content[end:], content[:to] + piece + content[to:], content + piece))


def _number_written(content: bytes, rng: random.Random) -> bytes:
    """A length, a count or an offset of 32 or 64 bits."""
    written = bytearray(content.ljust(8, b"\0"))
    value = rng.choice((0, 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1))
    code = rng.choice("IQ")
    where = rng.randrange(min(len(written), 4096) - 7)
    struct.pack_into(f"<{code}", written, where, value % 2 ** (32 if code == "I" else 64))
    return bytes(written)


def _json(content: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.1:
        return _text_trick(content, rng)
    return json.dumps(_changed(json.loads(content), rng)).encode()


def _lines(content: bytes, rng: random.Random) -> bytes:
    lines = content.splitlines() or [b"{}"]
    which = rng.randrange(len(lines))
    lines[which] = _json(lines[which], rng)
    return b"\n".join(lines) + b"\n"


def _toml(content: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.1:
        return _text_trick(content, rng)
    return tomli_w.dumps(_changed(tomllib.loads(content.decode()), rng)).encode()


def _safetensors(content: bytes, rng: random.Random) -> bytes:
    """Its header changed, with a length that is right again."""
    (length,) = struct.unpack_from("<Q", content)
    header = json.dumps(_changed(json.loads(content[8 : 8 + length]), rng)).encode()
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def _text_trick(content: bytes, rng: random.Random) -> bytes:
    """Deep nesting, long numbers, a key twice, and bytes that are no UTF-8."""
    deep = NESTED * rng.choice((b"[", b'{"a":', b"a."))
    long = b"9" * 5000
    where = rng.randrange(len(content) + 1)
    trick = rng.choice((deep, long, b"1e999", b"NaN", b"\xff\xfe", b'"\\ud800"', content))
    return content[:where] + trick + content[where:]


def _changed(value: Any, rng: random.Random) -> Any:
    """The value with one to three places put otherwise."""
    holder = [value]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        container, key = rng.choice(_places(holder))
        _change(container, key, rng)
    return holder[0]


def _change(container: Any, key: Any, rng: random.Random) -> None:
    action = rng.randrange(5)
    if action == 0 and isinstance(container, dict):
        del container[key]
    elif action == 1 and isinstance(container, dict):
        container[f"{key}x"] = container.pop(key)
    elif action == 2 and isinstance(container[key], list) and container[key]:
        container[key] = container[key] * 2 if rng.random() < 0.5 else container[key][:-1]
    elif action == 3 and isinstance(container[key], int | float) and not isinstance(container[key], bool):
        container[key] = rng.choice((container[key] + 1, -container[key], container[key] * 10**9, str(container[key])))
    else:
        container[key] = rng.choice(HOSTILE)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in nested dicts and lists, as its container and key; of long lists the first."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else list(enumerate(value))[:20] if isinstance(value, list) else ()
    for key, inner in items:
        found += [(value, key), *_places(inner)]
    return found
