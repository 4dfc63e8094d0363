"""Model files other than weights: tokenizer, chat template, end-of-answer token and model configuration.

| source                 | origin of the files                                                           |
|------------------------|-------------------------------------------------------------------------------|
| a Hugging Face folder  | its own files, byte for byte; config.json without quantization                |
| a .gguf file           | the file's values                                                             |
| a model on the hub     | transformers                                                                  |
| a run, or anything else | the tokenizer; its end-of-text token ends an answer                           |
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from octavo.checkpoints import plain_configuration
from octavo.language_model import LanguageModel
from octavo.models import Llama
from octavo.models.gguf import CHAT_TEMPLATE
from octavo.models.gguf_file import GGUFFile
from octavo.models.gguf_tokenizer import token_id
from octavo.models.llama_folder import config_record
from octavo.models.sources import is_gguf
from octavo.parsing import parse_json
from octavo.text.tokenizer import END_OF_TEXT

__all__ = ["Companions", "companions_of"]

CONFIG, TOKENIZER, SETTINGS, GENERATION = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
)
COPIED = (
    TOKENIZER,
    SETTINGS,
    GENERATION,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Companions:
    """Model files other than weights.

    Attributes:
        config: config.json of the model in high precision.
        files: contents of the other files, by name.
    """

    config: Mapping[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict)


def companions_of(model: LanguageModel) -> Companions:
    """Collect the files from the model's source."""
    source = Path(model.source)
    tokenizer_file = {TOKENIZER: model.tokenizer.to_str().encode()}
    if (source / CONFIG).is_file():
        copied = {name: (source / name).read_bytes() for name in COPIED if (source / name).is_file()}
        return Companions(config=plain_configuration(source), files=_settings(model, {}) | tokenizer_file | copied)
    if is_gguf(source) and source.is_file():
        return _from_gguf(model, GGUFFile(source), tokenizer_file)
    if isinstance(model.model, Llama):
        ends = model.tokenizer.token_to_id(END_OF_TEXT)
        return _of_llama(
            model, tokenizer_file, {"eos_token_id": ends}, {} if ends is None else {"eos_token": END_OF_TEXT}
        )
    return _from_transformers(model, tokenizer_file)


def _from_gguf(model: LanguageModel, file: GGUFFile, tokenizer_file: dict[str, bytes]) -> Companions:
    ids = {f"{which}_token_id": token_id(file, which) for which in ("bos", "eos")}
    names = {
        key.removesuffix("_id"): str(model.tokenizer.id_to_token(token))
        for key, token in ids.items()
        if token is not None
    }
    if CHAT_TEMPLATE in file.values:
        tokenizer_file = tokenizer_file | {"chat_template.jinja": file.get(CHAT_TEMPLATE, str).encode()}
    return _of_llama(model, tokenizer_file, ids, names)


def _of_llama(
    model: LanguageModel, tokenizer_file: dict[str, bytes], ids: Mapping[str, int | None], names: Mapping[str, str]
) -> Companions:
    """Files of an octavo Llama, with special tokens from its source."""
    assert isinstance(model.model, Llama)
    known_ids = {key: token for key, token in ids.items() if token is not None}
    files = tokenizer_file | _settings(model, names) | ({GENERATION: _json(known_ids)} if known_ids else {})
    return Companions(
        config=config_record(model.model.config, model.model.lm_head.weight.dtype) | known_ids, files=files
    )


def _settings(model: LanguageModel, names: Mapping[str, str]) -> dict[str, bytes]:
    return {SETTINGS: _json({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.context, **names})}


def _from_transformers(model: LanguageModel, tokenizer_file: dict[str, bytes]) -> Companions:
    """Files of a model from the hub or one built in memory, written by transformers."""
    hf_model: Any = model.model
    with TemporaryDirectory() as folder:
        hf_model.config.save_pretrained(folder)
        if hf_model.can_generate():
            hf_model.generation_config.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    config = parse_json(files.pop(CONFIG), allow_nan=True)
    return Companions(config=config, files=_settings(model, {}) | tokenizer_file | files)


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
