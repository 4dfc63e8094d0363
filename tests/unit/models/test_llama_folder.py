"""A Llama's folder as transformers reads it."""

from dataclasses import replace
from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from octavo.models import Llama
from octavo.models.llama_folder import write_llama, write_tokenizer
from tests.unit.quantization.tiny_model import tiny_language_model


def test_the_tokens_at_the_ends_of_a_text_are_written_where_they_are_known(tmp_path):
    """Transformers' own reading of the folder: its tokenizer's and its generation's."""
    model = tiny_language_model()
    begins, ends = (model.tokenizer.id_to_token(number) for number in (5, 7))
    known = replace(model, bos_id=5, eos_id=7)
    for name, given in (("known", known), ("unknown", model)):
        (tmp_path / name).mkdir()
        assert isinstance(given.model, Llama)
        write_llama(tmp_path / name, given.model)
        write_tokenizer(tmp_path / name, given.tokenizer, context=32, bos_id=given.bos_id, eos_id=given.eos_id)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "known")
    generation = GenerationConfig.from_pretrained(tmp_path / "known")
    assert (tokenizer.bos_token, tokenizer.eos_token) == (begins, ends)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (5, 7)
    assert (generation.bos_token_id, generation.eos_token_id) == (5, 7)
    assert not (tmp_path / "unknown" / "generation_config.json").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "unknown").eos_token is None
