"""The tokenizer: any text survives it, and training is a function of the text."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ConfigError, DataError
from octavo.text.tokenizer import END_OF_TEXT, end_of_text_id, load_tokenizer, train_tokenizer
from tests.policy.source_tree import SOURCE
from tests.unit.training.tiny_runs import some_text

TOKENIZER = train_tokenizer([some_text()], vocab_size=400)


@given(st.text())
def test_every_text_decodes_to_itself(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_vocabulary_is_full_and_ids_are_dense():
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(400))
    assert end_of_text_id(TOKENIZER) == TOKENIZER.get_vocab()[END_OF_TEXT]


def test_frequent_words_become_tokens():
    text = some_text()
    assert len(TOKENIZER.encode(text).ids) < 0.6 * len(text.encode())
    assert "Ġself" in train_tokenizer([some_text()], vocab_size=1000).get_vocab()


@pytest.mark.long
def test_training_is_reproducible_in_another_process():
    program = (
        "from octavo.text.tokenizer import train_tokenizer; import dataclasses, pathlib; "
        "text = pathlib.Path(dataclasses.__file__).read_text(encoding='utf-8')[:20000]; "
        "import sys; sys.stdout.write(train_tokenizer([text], vocab_size=400).to_str())"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=True)
    assert done.stdout == TOKENIZER.to_str()


def test_saved_and_loaded(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(TOKENIZER.to_str(), encoding="utf-8")
    assert load_tokenizer(path).encode("for x in range").ids == TOKENIZER.encode("for x in range").ids


def test_refuses_a_vocabulary_without_room_for_the_bytes():
    with pytest.raises(ConfigError, match=r"at least 257.*not 256"):
        train_tokenizer(["a"], vocab_size=256)


@pytest.mark.parametrize(("content", "words"), [(None, "No such file"), ("{", "not a tokenizer.json")])
def test_refuses_a_missing_or_damaged_file(tmp_path, content, words):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=words):
        load_tokenizer(path)


def test_refuses_a_foreign_tokenizer_without_the_mark(tmp_path):
    from tokenizers import Tokenizer, models

    path = tmp_path / "tokenizer.json"
    path.write_text(Tokenizer(models.BPE()).to_str())
    with pytest.raises(DataError, match="endoftext"):
        load_tokenizer(path)
