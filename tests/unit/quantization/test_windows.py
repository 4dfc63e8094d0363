import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError, DataError
from octavo.language_model import LanguageModel
from octavo.quantization import text_windows
from octavo.text.corpus import Split
from octavo.text.sources import divide, load_documents
from octavo.text.tokenizer import END_OF_TEXT, train_tokenizer

WORDS = " ".join(f"w{i:05d}" for i in range(6000))


@pytest.fixture(scope="module")
def model():
    return LanguageModel(
        model=torch.nn.Linear(1, 1),
        tokenizer=train_tokenizer([WORDS], vocab_size=400),
        context=64,
        source="none",
    )


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(WORDS)
    return path


def numbers(model, window):
    """The word numbers that stand whole in a window."""
    return [int(n) for n in re.findall(r"w(\d{5})", model.tokenizer.decode(window.tolist()))]


@given(count=st.integers(1, 60), seed=st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_each_part_of_the_text_gives_one_window(model, file, count, seed):
    windows = text_windows(model, file, "all", count=count, length=40, seed=seed)
    assert windows.shape == (count, 40)
    assert windows.dtype is torch.int64
    for part, window in enumerate(windows):
        found = numbers(model, window)
        assert found == list(range(found[0], found[0] + len(found)))
        assert part * 6000 / count - 1 <= found[0]
        assert found[-1] <= (part + 1) * 6000 / count + 1  # and so no two overlap


def test_the_seed_draws_the_places(model, file):
    first, again, other = (text_windows(model, file, "all", count=5, length=40, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    places = torch.tensor(
        [numbers(model, text_windows(model, file, "all", count=1, length=40, seed=seed)[0])[0] for seed in range(40)]
    )
    assert places.min() < 1500
    assert places.max() > 4000


def test_a_window_may_hold_a_whole_text(model, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("w00001 w00002 w00003")
    ids = model.tokenizer.encode(path.read_text(), add_special_tokens=False).ids
    window = text_windows(model, path, "all", count=1, length=len(ids))
    assert window.tolist() == [ids]
    with pytest.raises(DataError, match=r"too short for 1 windows of \d+ tokens: part 1 of 1"):
        text_windows(model, path, "all", count=1, length=len(ids) + 1)


def test_documents_follow_each_other_with_the_mark_between_them(model, tmp_path):
    (tmp_path / "a.txt").write_text("w00001 w00002")
    (tmp_path / "b.txt").write_text("w00003 w00004")
    expected = model.tokenizer.encode(f"w00001 w00002{END_OF_TEXT}w00003 w00004", add_special_tokens=False).ids
    assert model.tokenizer.token_to_id(END_OF_TEXT) in expected
    assert text_windows(model, tmp_path, "all", count=1, length=len(expected)).tolist() == [expected]


def test_windows_are_where_the_model_is(model, file):
    elsewhere = replace(model, model=torch.nn.Linear(1, 1, device="meta"))
    assert text_windows(elsewhere, file, "all", count=2, length=8).device == torch.device("meta")
    assert text_windows(model, file, "all", count=2, length=8).device == torch.device("cpu")


@pytest.mark.parametrize("split", list(Split))
def test_a_split_holds_its_own_text(model, file, split):
    window = text_windows(model, file, split, count=1, length=60)[0]
    own = "".join(document.text for document in divide(load_documents(file), by_file=False)[split])
    assert set(numbers(model, window)) <= {int(n) for n in re.findall(r"w(\d{5})", own)}


def test_tokenizer_truncation_and_padding_do_not_affect_windows(model, file):
    expected = text_windows(model, file, "all", count=3, length=40)
    model.tokenizer.enable_truncation(8)
    model.tokenizer.enable_padding(length=64)
    try:
        assert torch.equal(text_windows(model, file, "all", count=3, length=40), expected)
        assert model.tokenizer.truncation is not None  # the caller's own is as it was
    finally:
        model.tokenizer.no_truncation()
        model.tokenizer.no_padding()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"split": "tset"}, "split must be one of train, validation, test, all, not 'tset'"),
        ({"count": 0}, "must be at least 1, not 0 and 8"),
        ({"length": 0}, "must be at least 1, not 3 and 0"),
        ({"seed": -1}, "seed must be from 0 to"),
        ({"seed": 2**63}, "seed must be from 0 to"),
        ({"length": 65}, "this model reads at most 64 tokens at once, not 65"),
    ],
)
def test_impossible_windows_are_refused(model, file, given, message):
    arguments = {"split": "all", "count": 3, "length": 8} | given
    with pytest.raises(ConfigError, match=message):
        text_windows(model, file, arguments.pop("split"), **arguments)


def test_more_windows_than_characters_are_refused_at_once(model, file):
    with pytest.raises(DataError, match=r"has \d+ characters, too few for 1000000000000 windows; ask for fewer"):
        text_windows(model, file, "train", count=10**12, length=2)
