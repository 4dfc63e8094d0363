"""GGUF files read in place: what the library's own reader finds in them, and damage of every kind."""

import random
import struct
import sys

import pytest
import torch

from octavo.errors import CheckpointError, ConfigError
from octavo.models.gguf_file import GGUFFile
from tests.unit.models.small_gguf import ENCODINGS, gguf, write

SETTINGS = {
    "a.negative": -3.5,
    "a.list.of.numbers": [1, -2, 3],
    "a.list.of.floats": [0.5, -1.25],
    "a.list.of.text": ["", "Ünï"],
    "a.list.of.truths": [True, False],
    "a.truth": True,
}


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "model.gguf")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_values_and_tensors_are_the_library_readers(tmp_path, encoding):
    path = write(tmp_path / "model.gguf", encoding=encoding, settings=SETTINGS | {"general.alignment": 64})
    theirs, ours = gguf.GGUFReader(path), GGUFFile(path)
    assert ours.values == {
        name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")
    }
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        assert torch.equal(ours.tensor(tensor.name, torch.float32), expected)


@pytest.mark.parametrize("at_once", [1, 100, 130])
def test_rows_are_decoded_in_any_portions(path, monkeypatch, at_once):
    name = "token_embd.weight"
    whole = GGUFFile(path).tensor(name, torch.float32)
    monkeypatch.setattr("octavo.models.gguf_file.DECODED_AT_ONCE", at_once)
    assert torch.equal(GGUFFile(path).tensor(name, torch.float32), whole)


def test_a_file_that_ends_early_is_refused_wherever_it_ends(path):
    whole = path.read_bytes()
    rng = random.Random(0)
    for length in [*range(40), *(rng.randrange(len(whole)) for _ in range(300)), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"ends before its last tensor|does not begin with GGUF"):
            GGUFFile(path)


def test_a_damaged_head_is_refused_or_read_and_nothing_else(path):
    whole = path.read_bytes()
    rng, refused = random.Random(0), []
    for _ in range(600):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 8])):
            damaged[rng.randrange(8 * 1024)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            GGUFFile(path)
        except CheckpointError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all(str(path) in message for message in refused)


def changed_at(offset, code, value):
    def change(whole):
        changed = bytearray(whole)
        struct.pack_into(f"<{code}", changed, offset, value)
        return bytes(changed)

    return change


def first_tensor(offset, code, value):
    """A change ``offset`` bytes behind the name of the first tensor: dimensions (uint32), sizes (uint64), encoding."""
    name = b"token_embd.weight"
    return lambda whole: changed_at(whole.rindex(name) + len(name) + offset, code, value)(whole)


DAMAGE = {
    "empty": (lambda whole: b"", "does not begin with GGUF"),
    "another file": (lambda whole: b"PK" + whole, "does not begin with GGUF"),
    "version 1": (changed_at(4, "I", 1), "has GGUF version 1; octavo reads versions 2 and 3"),
    "big-endian": (
        lambda whole: whole[:4] + struct.pack(">I", 3) + whole[8:],
        "has GGUF version 50331648; octavo reads",
    ),
    "values without end": (changed_at(16, "Q", 2**63), "ends before its last tensor"),
    "tensors without end": (changed_at(8, "Q", 2**63), "ends before its last tensor"),
    "a name without end": (changed_at(24, "Q", 2**63), "ends before its last tensor"),
    "two values of a name": (lambda whole: whole.replace(b"bos_token_id", b"eos_token_id"), "it has two entries named"),
    "two tensors of a name": (
        lambda whole: whole.replace(b"blk.1.attn_q", b"blk.0.attn_q"),
        "two entries named 'blk.0",
    ),
    "text that is none": (lambda whole: whole.replace(b"gpt2", b"\xff\xff\xff\xff"), "in place of UTF-8 text"),
    "no dimension": (first_tensor(0, "I", 0), "a tensor of 0 dimensions"),
    "five dimensions": (first_tensor(0, "I", 5), "a tensor of 5 dimensions"),
    "no row": (first_tensor(12, "Q", 0), r"a tensor of shape \(0, 64\)"),
    "rows without end": (first_tensor(12, "Q", 2**63), "ends before its last tensor"),
    "unknown encoding": (first_tensor(20, "I", 999), "token_embd.weight in encoding 999"),
    "a tensor behind the end": (first_tensor(24, "Q", 2**40), "ends before its last tensor"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named(path, what):
    change, message = DAMAGE[what]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(path)


def offset_of(name, value):
    """A change of the offset of a matrix: behind its name, its dimensions and its encoding."""
    return lambda whole: changed_at(whole.rindex(name) + len(name) + 24, "Q", value)(whole)


@pytest.mark.parametrize("offset", [1, 16, 63])
def test_a_tensor_off_the_alignment_is_refused(tmp_path, offset):
    path = write(tmp_path / "model.gguf", settings={"general.alignment": 64})
    path.write_bytes(offset_of(b"blk.1.attn_q.weight", offset)(path.read_bytes()))
    with pytest.raises(CheckpointError, match=rf"blk.1.attn_q.weight at offset {offset}, .* multiple of .* 64"):
        GGUFFile(path)


def test_tensors_that_share_bytes_are_refused(path):
    stored = GGUFFile(path).tensors
    first = min(tensor.start for tensor in stored.values())
    neighbour = stored["blk.1.attn_k.weight"]
    whole = path.read_bytes()
    for start in (neighbour.start, neighbour.start + 32, neighbour.end - 32):
        path.write_bytes(offset_of(b"blk.1.attn_v.weight", start - first)(whole))
        with pytest.raises(CheckpointError, match=r"blk.1.attn_[kv].weight and blk.1.attn_[kv].weight in the same byt"):
            GGUFFile(path)


@pytest.mark.parametrize("alignment", [0, 4, 12, 2**31 + 8])
def test_an_alignment_that_the_format_has_not_is_refused(tmp_path, alignment):
    path = write(tmp_path / "model.gguf", settings={"general.alignment": 64})
    whole, name = path.read_bytes(), b"general.alignment"
    path.write_bytes(changed_at(whole.index(name) + len(name) + 4, "I", alignment)(whole))
    with pytest.raises(CheckpointError, match=f"{alignment} as general.alignment"):
        GGUFFile(path)


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path):
    path = write(tmp_path / "model.gguf", encoding="Q8_0")
    path.write_bytes(first_tensor(4, "Q", 65)(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"rows of 65 numbers of token_embd.weight as Q8_0, in blocks of 32"):
        GGUFFile(path)


def test_a_value_of_an_unknown_type_is_refused(tmp_path):
    path = write(tmp_path / "model.gguf", settings={"a.truth": True})
    whole, name = path.read_bytes(), b"a.truth"
    path.write_bytes(changed_at(whole.index(name) + len(name), "I", 13)(whole))
    with pytest.raises(CheckpointError, match="a value of type 13"):
        GGUFFile(path)


def test_missing_file_is_refused(tmp_path):
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(CheckpointError, match="cannot read '"):
            GGUFFile(path)


def test_missing_library_names_the_package_to_install(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[gguf\]'"):
        GGUFFile(path)
