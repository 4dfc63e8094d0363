"""Token files and batches, against the text they came from."""

import json

import numpy as np
import pytest
import torch

from octavo.errors import ConfigError, DataError
from octavo.text.corpus import Document, Split
from octavo.text.sources import divide
from octavo.text.tokenizer import END_OF_TEXT
from octavo.text.tokens import open_data, prepare, preparing
from tests.unit.training.tiny_runs import some_text, tiny_data


def test_tokens_decode_to_the_text(data):
    expected = divide([Document("text.txt", some_text())], by_file=False)
    for split in Split:
        text = data.tokenizer().decode(data.splits[split].tolist(), skip_special_tokens=False)
        assert text == "".join(document.text + END_OF_TEXT for document in expected[split])


def test_manifest_counts(data):
    for split in Split:
        counts = data.manifest["splits"][split]
        assert counts["tokens"] == len(data.splits[split])
    assert sum(c["bytes"] for c in data.manifest["splits"].values()) == len(some_text().encode())


def test_batches_are_windows_of_the_text_shifted_by_one(data):
    inputs, targets = data.batch(3, batch_size=5, context=16, seed=1)
    assert inputs.shape == targets.shape == (5, 16)
    assert inputs.dtype == torch.int64
    train = data.splits[Split.TRAIN].astype(np.int64)
    places = np.lib.stride_tricks.sliding_window_view(train, 17)
    for row, following in zip(inputs.tolist(), targets.tolist(), strict=True):
        assert any(np.array_equal(place, [*row, following[-1]]) for place in places)
        assert row[1:] == following[:-1]


def test_a_batch_depends_on_seed_and_step_alone(data):
    def tokens(step, seed):
        return data.batch(step, batch_size=4, context=16, seed=seed)[0].tolist()

    first = tokens(7, 0)
    tokens(8, 0)
    torch.manual_seed(99)
    np.random.seed(99)  # noqa: NPY002 -- the generator a batch must not depend on
    assert tokens(7, 0) == first
    assert tokens(8, 0) != first
    assert tokens(7, 1) != first


@pytest.mark.long
def test_batches_reach_every_start(data):
    count = len(data.splits[Split.VALIDATION]) - 16
    firsts = data.splits[Split.VALIDATION][:-16]
    drawn, _ = data.batch(0, batch_size=40 * count, context=16, seed=0, split=Split.VALIDATION)
    frequencies = np.bincount(drawn[:, 0].numpy(), minlength=300) / (40 * count)
    expected = np.bincount(firsts, minlength=300) / count
    np.testing.assert_allclose(frequencies, expected, atol=0.01)


def test_windows_predict_every_token_once(data):
    tokens = data.splits[Split.VALIDATION].astype(np.int64)
    inputs, targets = data.windows(10)
    count = (len(tokens) - 1) // 10
    assert targets.flatten().tolist() == tokens[1 : 1 + 10 * count].tolist()
    assert inputs.flatten().tolist() == tokens[: 10 * count].tolist()


def test_fewer_windows_are_spread_over_the_split(data):
    everything, _ = data.windows(10)
    some, _ = data.windows(10, max_tokens=40)
    assert len(some) == 4
    rows = everything.tolist()
    assert [rows.index(row) for row in some.tolist()] == [i * len(rows) // 4 for i in range(4)]
    assert len(data.windows(10, max_tokens=1)[0]) == 1


def test_refuses_a_context_longer_than_the_split(data):
    with pytest.raises(DataError, match="too few for a context of 100000"):
        data.windows(100_000)
    with pytest.raises(DataError, match=r"train split .* too few"):
        data.batch(0, batch_size=1, context=100_000, seed=0)
    with pytest.raises(ConfigError, match="context must be at least 1"):
        data.windows(0)


def test_data_folder_is_reused_if_nothing_changed(tmp_path):
    tiny_data(tmp_path)
    phases = []
    prepare(tmp_path / "text.txt", tmp_path / "data", vocab_size=300, progress=lambda phase, *_: phases.append(phase))
    assert set(phases) == {"read"}


@pytest.mark.parametrize("change", ["text", "vocab_size", "manifest", "tokens", "bytes"])
def test_data_folder_is_rebuilt_if_text_or_vocabulary_changed(tmp_path, change):
    before = tiny_data(tmp_path)
    folder, vocab_size = tmp_path / "data", 300
    if change == "text":
        (tmp_path / "text.txt").write_text(some_text() + "more")
    elif change == "vocab_size":
        vocab_size = 280
    elif change == "manifest":
        (folder / "manifest.json").write_text('{"format": 1, "content_hash": "", "vocab_size": 300}')
    elif change == "bytes":
        (folder / "train.bin").write_bytes(b"\xff" * (folder / "train.bin").stat().st_size)
    else:
        with (folder / "train.bin").open("r+b") as file:
            file.truncate(10)
    phases = []
    data = prepare(
        tmp_path / "text.txt", folder, vocab_size=vocab_size, progress=lambda phase, *_: phases.append(phase)
    )
    assert "encode" in phases
    assert (data.content_hash != before.content_hash) == (change == "text")
    assert not [path for path in folder.iterdir() if path.suffix == ".tmp"]


def test_a_damaged_folder_is_refused_by_name(tmp_path):
    data = tiny_data(tmp_path)
    (data.folder / "test.bin").unlink()
    with pytest.raises(DataError, match="not a complete data folder"):
        open_data(data.folder)
    manifest = json.loads((data.folder / "manifest.json").read_text())
    del manifest["splits"]
    (data.folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="splits"):
        open_data(data.folder)


@pytest.mark.parametrize("split", Split)
def test_tokens_damaged_in_place_are_refused_by_name(tmp_path, split):
    """One bit, and the id may still be one of the vocabulary."""
    path = tiny_data(tmp_path).folder / f"{split}.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{split}.bin was changed") as caught:
        open_data(path.parent)
    assert "prepare the data again" in str(caught.value)


def test_a_tokenizer_damaged_in_place_is_refused_by_name_and_made_again(tmp_path):
    data = tiny_data(tmp_path)
    path = data.folder / "tokenizer.json"
    before = path.read_text()
    path.write_text(before.replace(END_OF_TEXT, "<|endoftexT|>"))
    with pytest.raises(DataError, match=r"tokenizer\.json was changed.*prepare the data again"):
        open_data(data.folder)
    tiny_data(tmp_path)
    assert path.read_text() == before


def test_a_failed_preparation_leaves_no_complete_folder(tmp_path):
    (tmp_path / "text.txt").write_text(some_text())
    with pytest.raises(ConfigError):
        prepare(tmp_path / "text.txt", tmp_path / "data", vocab_size=10)
    with pytest.raises(DataError, match="not a complete data folder"):
        open_data(tmp_path / "data")
    assert prepare(tmp_path / "text.txt", tmp_path / "data", vocab_size=300).vocab_size == 300


def test_error_inside_preparing_changes_nothing(tmp_path):
    tiny_data(tmp_path)
    (tmp_path / "data" / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for folder in (tmp_path / "data", tmp_path / "new" / "data"):
        with (
            pytest.raises(DataError, match="too few for a context of 100000"),
            preparing(tmp_path / "text.txt", folder, vocab_size=280) as tokens,
        ):
            tokens.windows(100_000)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "new").exists()


def test_successful_preparing_replaces_only_its_own_files(tmp_path):
    tiny_data(tmp_path)
    (tmp_path / "data" / "notes.txt").write_text("mine")
    with preparing(tmp_path / "text.txt", tmp_path / "data", vocab_size=280) as tokens:
        assert open_data(tmp_path / "data").vocab_size == 300
        seen = tokens.splits[Split.TEST].tolist()
    after = open_data(tmp_path / "data")
    assert after.splits[Split.TEST].tolist() == seen
    assert after.vocab_size == 280
    assert (tmp_path / "data" / "notes.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"data", "text.txt"}


def test_progress_reaches_its_total(tmp_path):
    (tmp_path / "text.txt").write_text(some_text())
    seen = []
    prepare(tmp_path / "text.txt", tmp_path / "data", vocab_size=300, progress=lambda *report: seen.append(report))
    last = {phase: (done, total) for phase, done, total in seen}
    assert set(last) == {"read", "tokenizer", "encode"}
    assert all(done == total > 0 for done, total in last.values())
