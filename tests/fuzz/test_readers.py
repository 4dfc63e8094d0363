"""Some hundreds of damaged examples for every reader: octavo's own errors leave it, and no others.

By hand, for as long as you like and from any seed: ``python -m tests.fuzz --seconds 600 --seed 7``.
"""

import ast
import json
import random

import pytest

from octavo.checksums import SUMS, check_sums, write_sums
from octavo.errors import CheckpointError
from octavo.parsing import parse_json
from tests.fuzz import cases
from tests.fuzz.cases import ReaderError, run_case
from tests.fuzz.mutations import damaged, hostile_list
from tests.fuzz.readers import LEFT_OUT, READERS, Reader
from tests.policy.source_tree import modules

CASES = 200
PREFIXES = ("load_", "read_", "open_", "parse_")
NOT_OURS = ("kernels.", "numerics.")


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_damage_is_refused_or_read_and_nothing_else(name):
    count = max(2, CASES // READERS[name].cost)
    refused = sum(run_case(name, seed) for seed in range(count))
    assert refused > 0 or count < 10, "the damage reaches nothing that is read"


def public_readers():
    """Functions in an ``__all__`` whose names say that they read."""
    found = set()
    for name, path in modules().items():
        if path.suffix != ".py" or name.startswith(tuple(f"octavo.{room}" for room in NOT_OURS)):
            continue
        tree = ast.parse(path.read_text())
        exported = {
            item.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "__all__"
            and isinstance(node.value, ast.List)
            for item in node.value.elts
            if isinstance(item, ast.Constant) and isinstance(item.value, str)
        }
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        found |= {each for each in exported & defined if each.startswith(PREFIXES)}
    return found


@pytest.mark.long
def test_every_reader_is_here():
    tried = {function.__name__ for reader in READERS.values() for function in reader.functions}
    assert len(public_readers()) > 20, "nearly none is found: are the sources where this test looks?"
    assert public_readers() - tried == set(LEFT_OUT), "put it into the table, or say why it is left out"


def test_a_case_is_repeated_by_its_seed(tmp_path):
    contents = set()
    for _ in range(2):
        path = tmp_path / "some.json"
        path.write_text(json.dumps({"a": [1, 2, {"b": "text"}]}))
        damaged(path, random.Random(3))
        contents.add(path.read_bytes())
    assert len(contents) == 1


def test_hangs_and_exhaustion_of_a_reader_are_detected(monkeypatch):
    def reader(read):
        return Reader(functions=(), write=lambda folder: (folder / "a.json").write_text("{}"), read=read)

    def spin(_):
        while True:
            pass

    def fill(folder):
        return (folder / "a.json").read_bytes() != b"{}" and bytearray(1 << 40)

    def deep(folder):
        text = (folder / "a.json").read_bytes()
        return text != b"{}" and parse_json(b"[" * 10_000)

    bad = {"spin": lambda folder: (folder / "a.json").read_bytes() != b"{}" and spin(folder), "fill": fill}
    monkeypatch.setattr(cases, "SECONDS", 0.2)
    monkeypatch.setattr(cases, "READERS", {name: reader(read) for name, read in (bad | {"deep": deep}).items()})
    for name, error in (("spin", "TooLongError"), ("fill", "MemoryError")):
        with pytest.raises(ReaderError, match=rf"({error}) left '{name}' after a.json.*--first \d+ --cases 1"):
            any(run_case(name, seed) for seed in range(5))
    assert any(run_case("deep", seed) for seed in range(5))


@pytest.mark.parametrize("seed", range(20))
def test_a_hostile_list_of_sums_is_refused(tmp_path, seed):
    (tmp_path / "config.json").write_text("{}")
    write_sums(tmp_path)
    what = hostile_list(tmp_path / SUMS, random.Random(seed))
    if "nowhere" in what:
        assert not check_sums(tmp_path)
        return
    with pytest.raises(CheckpointError):
        check_sums(tmp_path)
