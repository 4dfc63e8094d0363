"""Text comes out whole, whatever the tokens cut in two."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo.inference.text_stream import TextStream

STOPS = ("stop", "to", "\n\n", "öß", "aab")


def pieces_of(tokenizer, text, stop=()):
    stream, pieces = TextStream(tokenizer, stop), []
    for token in tokenizer.encode(text).ids:
        pieces.append(stream.add(token))
        if stream.stopped:
            return pieces
    return [*pieces, stream.finish()]


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab stop\n öß€😀\ufffd"), st.lists(st.sampled_from(STOPS), max_size=3))
def test_text_matches_encoded_text_up_to_stop(byte_tokenizer, text, stop):
    text = text.rstrip("\ufffd")
    pieces = pieces_of(byte_tokenizer, text, tuple(stop))
    ends = [end for s in stop if (at := text.find(s)) >= 0 for end in [(at + len(s), at)]]
    # of stops that overlap, the one that is complete first ends the answer
    wanted = text[: min(at for end, at in ends if end == min(ends)[0])] if ends else text
    assert "".join(pieces) == wanted
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


def test_incomplete_character_is_held_back(byte_tokenizer):
    ids = byte_tokenizer.encode("a€b").ids
    stream = TextStream(byte_tokenizer)
    assert [stream.add(token) for token in ids] == ["a", "", "", "€", "b"]
    stream = TextStream(byte_tokenizer)
    assert [stream.add(token) for token in ids[:3]] == ["a", "", ""]
    assert stream.finish() == ""


def test_possible_stop_text_is_held_back(byte_tokenizer):
    assert pieces_of(byte_tokenizer, "xaaab!", ("aab",)) == ["x", "", "", "a", ""]
    assert pieces_of(byte_tokenizer, "xaa", ("aab",)) == ["x", "", "", "aa"]
    assert pieces_of(byte_tokenizer, "aac", ("aab",)) == ["", "", "aac", ""]


def test_spaces_between_words_stay():
    words = Tokenizer(models.WordLevel({"one": 0, "two": 1}, unk_token="one"))
    stream = TextStream(words)
    assert [stream.add(token) for token in (0, 1, 1)] == ["one", " two", " two"]


def specials_added(tokenizer):
    tokenizer.add_special_tokens(["<end>", "▁", "<s>"])
    tokenizer.add_tokens(["<plain>", " padded "])
    return tokenizer


def byte_level():
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa", "Ġ", "Ã", "âĤ", "¬a", "ðŁĺ", "Ģ", ""]
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(dict.fromkeys(letters))}, merges=[]))
    made.decoder = decoders.ByteLevel()
    return made


def words(decoder):
    vocabulary = {word: i for i, word in enumerate(["one", "##two", "▁", "▁▁", "▁three", "four", "▁'s", ".", "é"])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="one"))
    if decoder is not None:
        made.decoder = decoder
    return made


LLAMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
TOKENIZERS = {
    "byte-level": byte_level,
    "metaspace": lambda: words(decoders.Metaspace()),
    "llama": lambda: words(LLAMA),
    "word pieces": lambda: words(decoders.WordPiece(cleanup=False)),
    "no decoder": lambda: words(None),
}


@pytest.mark.long
@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_incremental_text_matches_decoding_at_once(name, data):
    """Also of special tokens, of tokens that a tokenizer has not, and of those that are empty only at the beginning."""
    tokenizer = specials_added(TOKENIZERS[name]())
    size = tokenizer.get_vocab_size()
    tokens = data.draw(st.lists(st.integers(max(0, size - 14), size + 2) | st.integers(0, size + 2), max_size=30))
    stream = TextStream(tokenizer)
    text = "".join([*map(stream.add, tokens), stream.finish()])
    assert text == tokenizer.decode(tokens).rstrip("\ufffd")


class Counting:
    """A tokenizer, and how many tokens it has decoded."""

    def __init__(self, tokenizer):
        self.tokenizer, self.decoded = tokenizer, 0
        self.id_to_token = tokenizer.id_to_token

    def decode(self, ids, **settings):
        self.decoded += len(ids)
        return self.tokenizer.decode(ids, **settings)


def test_tokens_without_text_are_decoded_once():
    tokenizer = specials_added(byte_level())
    special, unknown, first_byte = tokenizer.token_to_id("<end>"), 9999, tokenizer.token_to_id("Ã")
    counting: Any = Counting(tokenizer)
    stream = TextStream(counting)
    for token in [first_byte, *[special, unknown] * 500]:
        assert stream.add(token) == ""
    assert counting.decoded < 5 * 1000
    assert stream.add(tokenizer.token_to_id("©")) == "é"


def test_invalid_bytes_are_released_after_patience():
    tokenizer = byte_level()
    counting: Any = Counting(tokenizer)
    stream = TextStream(counting)
    pieces = [stream.add(tokenizer.token_to_id("Ã")) for _ in range(1000)]
    text = "".join([*pieces, stream.add(tokenizer.token_to_id("©"))])
    assert text == "\ufffd" * 999 + "é"
    assert not any(pieces[:60])
    assert counting.decoded < 200 * 1000
