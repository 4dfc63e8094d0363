"""``load_served_model``: a runner, its tokenizer and the tokens that end an answer, from where the user has a model.

| MODEL (see octavo.language_model)        | answers end at                    |
|------------------------------------------|-----------------------------------|
| a .gguf file of the Llama layout         | its end-of-text token             |
| a run's folder                           | nothing but max_tokens            |
| a Hugging Face folder, or a hub's name   | its generation's eos tokens       |
| one in FP8 (``octavo export``)           | its generation's eos tokens       |

Of Hugging Face's models those of the types "llama" and "qwen2" are served, with the biases that they have: rotary
positions as they come, heads of hidden_size / num_heads, no sliding window. Another one is refused, since what octavo
leaves out would be left out silently.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from octavo.checkpoints.tensor_files import read_json
from octavo.errors import CheckpointError, ConfigError
from octavo.inference.model_runner import ModelRunner
from octavo.inference.recipes import ServingRecipe, has_static_scales
from octavo.language_model import LanguageModel, load_language_model
from octavo.models import Llama
from octavo.models.llama_folder import shape_from_record
from octavo.nn.arguments import check_choice
from octavo.quantization import load_calibration

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["ServedModel", "load_served_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What an engine is made of.

    Attributes:
        runner: the model, its weights as the recipe has them.
        tokenizer: text to ids and back.
        end_ids: tokens with which the model ends an answer; perhaps none.
        chat_template: the Jinja template that turns messages into text, or None.
        template_tokens: texts of tokens that a template may name: bos_token, eos_token.
    """

    runner: ModelRunner
    tokenizer: "Tokenizer"
    end_ids: tuple[int, ...]
    chat_template: str | None
    template_tokens: Mapping[str, str] = field(default_factory=dict)


def load_served_model(
    source: str | Path,
    *,
    recipe: str = ServingRecipe.FP8,
    calibration: str | Path | None = None,
    hub: bool = False,
) -> ServedModel:
    """Read a model and make its weights what a recipe says.

    Args:
        source: see the table above.
        recipe: of octavo.inference.recipes' table.
        calibration: the folder that ``octavo calibrate`` wrote of this model. "fp8-static" needs it, unless the source
            holds static scales itself (``octavo export``); the means of keys in it are used, too.
        hub: download a model that is named as on Hugging Face's hub first.

    Raises:
        ConfigError: there is no such model or recipe, a library is missing that would read it, or a calibration is
            missing or given to another recipe.
        CheckpointError: it is damaged, or no Llama, or the calibration is another model's.
    """
    check_choice("recipe", recipe, tuple(ServingRecipe))
    if calibration is not None and recipe != ServingRecipe.FP8_STATIC:
        raise ConfigError(f"a calibration is for {ServingRecipe.FP8_STATIC}, and not for {recipe}; leave it out")
    loaded = load_language_model(source, hub=hub)
    model: Any = loaded.model
    return ServedModel(
        runner=_runner(model if isinstance(model, Llama) else _as_llama(model, loaded.source), recipe, calibration),
        tokenizer=loaded.tokenizer,
        end_ids=_end_ids(loaded),
        chat_template=loaded.chat_template or _chat_template(Path(loaded.source)),
        template_tokens=_template_tokens(loaded),
    )


def _runner(model: Llama, recipe: str, calibration: str | Path | None) -> ModelRunner:
    """The model with its calibration's scales, where there is one."""
    if calibration is None:
        if recipe == ServingRecipe.FP8_STATIC and not has_static_scales(model):
            raise ConfigError(
                f"{recipe} needs the scales of inputs, and this model has none; give the folder that octavo calibrate "
                "wrote of it as the calibration"
            )
        return ModelRunner(model, recipe=recipe)
    found = load_calibration(calibration)
    found.apply(model, hold_weights=True)
    return ModelRunner(model, recipe=recipe, key_means=found.key_means or None)


def _as_llama(model: nn.Module, source: str) -> Llama:
    """A model of transformers as octavo's."""
    theirs: Any = model.config
    refused, shape = _unsupported_reason(theirs), shape_from_record(theirs.to_dict())
    if shape is None:
        refused = refused or "its configuration asks for more than octavo's Llama has"
    else:
        made = Llama(shape)
        given, wanted = model.state_dict(), made.state_dict()
        if {name: x.shape for name, x in given.items()} == {name: x.shape for name, x in wanted.items()}:
            made.load_state_dict(given)
            return made.eval()
        others = sorted(given.keys() ^ wanted.keys())
        refused = f"it has other tensors, such as {others[0]}" if others else "its tensors have other shapes"
    raise CheckpointError(f"{source!r} cannot be served: {refused}; octavo serves models of the Llama layout alone")


def _unsupported_reason(config: Any) -> str | None:
    """What of a model's settings octavo's Llama does not do."""
    if config.model_type not in {"llama", "qwen2"}:
        return f"its type is {config.model_type!r}, not 'llama' or 'qwen2'"
    if config.hidden_act != "silu":
        return f"its MLP has {config.hidden_act!r}, not 'silu'"
    if config.rope_parameters.get("rope_type", "default") != "default":
        return f"its rotary positions are {config.rope_parameters['rope_type']!r}, not 'default'"
    width = config.hidden_size // config.num_attention_heads
    if config.to_dict().get("head_dim") not in (None, width):
        return f"its heads are {config.head_dim} wide, not hidden_size / num_attention_heads, {width}"
    return None


def _end_ids(loaded: LanguageModel) -> tuple[int, ...]:
    """End tokens: one id, a list of them, or none, as a GGUF file, transformers or a folder in FP8 names them."""
    model: Any = loaded.model
    ends: Any = loaded.eos_id
    if ends is None and not isinstance(model, Llama):
        ends = model.generation_config.eos_token_id
    elif ends is None:  # perhaps a folder in FP8, which octavo reads without transformers
        path = Path(loaded.source) / "generation_config.json"
        ends = read_json(path).get("eos_token_id") if path.is_file() else None
    ids = () if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)
    if not all(isinstance(each, int) for each in ids):
        raise CheckpointError(
            f"{loaded.source!r} has {ends!r} as eos_token_id, which is no id or list of ids; mend its file"
        )
    return ids


def _chat_template(folder: Path) -> str | None:
    """From the file of its own that transformers writes, or from the tokenizer's settings."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        try:
            return own.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{str(own)!r} is not UTF-8 at byte {error.start}; write it again") from error
    found = _tokenizer_settings(folder).get("chat_template")
    return found if isinstance(found, str) else None


def _template_tokens(loaded: LanguageModel) -> dict[str, str]:
    """The tokens at the ends of a text: a GGUF file's ids, or texts or records of a token in a folder's settings."""
    ids = {"bos_token": loaded.bos_id, "eos_token": loaded.eos_id}
    settings = _tokenizer_settings(Path(loaded.source))
    tokens = {name: settings.get(name) for name in ids}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    texts |= {name: str(loaded.tokenizer.id_to_token(i)) for name, i in ids.items() if i is not None}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _tokenizer_settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}
