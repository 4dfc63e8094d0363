"""Text comes out whole, whatever the tokens cut in two."""

import hypothesis.strategies as st
from hypothesis import given, settings
from tokenizers import Tokenizer, models

from octavo.serving.text_stream import TextStream

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
def test_the_text_is_what_was_encoded_up_to_the_first_stop(byte_tokenizer, text, stop):
    text = text.rstrip("\ufffd")
    pieces = pieces_of(byte_tokenizer, text, tuple(stop))
    ends = [end for s in stop if (at := text.find(s)) >= 0 for end in [(at + len(s), at)]]
    # of stops that overlap, the one that is complete first ends the answer
    wanted = text[: min(at for end, at in ends if end == min(ends)[0])] if ends else text
    assert "".join(pieces) == wanted
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


def test_half_a_character_is_held_back_and_never_said(byte_tokenizer):
    ids = byte_tokenizer.encode("a€b").ids
    stream = TextStream(byte_tokenizer)
    assert [stream.add(token) for token in ids] == ["a", "", "", "€", "b"]
    stream = TextStream(byte_tokenizer)
    assert [stream.add(token) for token in ids[:3]] == ["a", "", ""]
    assert stream.finish() == ""


def test_what_may_begin_a_stop_text_waits_for_it(byte_tokenizer):
    assert pieces_of(byte_tokenizer, "xaaab!", ("aab",)) == ["x", "", "", "a", ""]
    assert pieces_of(byte_tokenizer, "xaa", ("aab",)) == ["x", "", "", "aa"]
    assert pieces_of(byte_tokenizer, "aac", ("aab",)) == ["", "", "aac", ""]


def test_spaces_between_words_stay():
    words = Tokenizer(models.WordLevel({"one": 0, "two": 1}, unk_token="one"))
    stream = TextStream(words)
    assert [stream.add(token) for token in (0, 1, 1)] == ["one", " two", " two"]
