"""A bound on how many bytes a token stands for: never too small, and none where a tokenizer may leave text out."""

import random
import unicodedata

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from octavo.server.token_bytes import NFC_SHRINKS, bytes_per_token
from octavo.text.tokenizer import train_tokenizer

TEXT = ["the quick brown fox, the quick brown dog: 12345 Grüße 각", "     spaces     and\n\n\n\nlines"] * 20


@pytest.fixture
def tokenizer():
    return train_tokenizer(TEXT, vocab_size=400)


def whole_bytes(**settings):
    made = Tokenizer(
        models.BPE(vocab={a: i for i, a in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[], **settings)
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def test_no_token_exceeds_the_bound(tokenizer):
    chance = random.Random(1)
    most = bytes_per_token(tokenizer)
    assert most is not None
    assert most >= max(map(len, tokenizer.get_vocab()))
    words = [*TEXT, " ", "the quick brown fox", "é", "각", "\u212a", "🦊", "\n\n\n\n"]
    for _ in range(200):
        text = "".join(chance.choices(words, k=chance.randrange(1, 30)))
        for normalizer in (None, normalizers.NFC()):
            tokenizer.normalizer = normalizer
            bound = bytes_per_token(tokenizer)
            assert bound is not None
            assert len(text.encode()) <= bound * len(tokenizer.encode(text).ids)


@pytest.mark.long
def test_nfc_shortens_at_most_by_its_factor():
    """Every character by itself, and every composed one from its parts, which is all that NFC does."""
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]

    def size(text):
        return len(text.encode())

    replaced = max(size(c) / size(unicodedata.normalize("NFD", c)) for c in characters)
    stable = [c for c in characters if unicodedata.normalize("NFC", c) == c]
    composed = max(size(unicodedata.normalize("NFD", c)) / size(c) for c in stable)
    assert replaced * composed <= NFC_SHRINKS


def test_lossy_tokenizers_have_no_bound():
    assert bytes_per_token(whole_bytes()) == 2  # of the alphabet's letters, as UTF-8
    for normalizer in (normalizers.Strip(), normalizers.Replace("a", ""), normalizers.NFKC()):
        made = whole_bytes()
        made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizer])
        assert bytes_per_token(made) is None
    for splitter in (pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(" ", "removed")):
        made = whole_bytes()
        made.pre_tokenizer = pre_tokenizers.Sequence([splitter, pre_tokenizers.ByteLevel()])
        assert bytes_per_token(made) is None
    made = whole_bytes()
    made.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert bytes_per_token(made) is None
    made = whole_bytes()
    made.enable_truncation(8)
    assert bytes_per_token(made) is None
    assert bytes_per_token(Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))) is None
    assert bytes_per_token(Tokenizer(models.WordPiece(vocab={"[UNK]": 0}, unk_token="[UNK]"))) is None


def test_added_tokens_count_toward_the_bound():
    made = whole_bytes()
    made.add_tokens(["x" * 50])
    assert bytes_per_token(made) == 50
