"""Loading of a model to serve: its runner, tokenizer, end tokens and chat template.

| MODEL (see octavo.language_model)          | end of an answer                       |
|--------------------------------------------|----------------------------------------|
| .gguf file with the Llama layout           | end-of-text token                      |
| folder of a run                            | only max_tokens                        |
| Hugging Face folder or hub name            | eos tokens of the generation config    |
| folder in FP8 (``octavo export``)          | eos tokens of the generation config    |

Supported Hugging Face models are listed in octavo.inference.llama_layout: Llama, Qwen2 and the mixtures Mixtral,
Qwen2-MoE, Qwen3-MoE and OLMoE, with default rotary positions and no sliding window. Others are refused rather than
computed without their features.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import nn

from octavo.checkpoints.tensor_files import read_json
from octavo.convert import unfuse_experts
from octavo.engines.folder_fit import check_folder_fits
from octavo.errors import CheckpointError, ConfigError
from octavo.inference.engine import Runner
from octavo.inference.llama_layout import as_llama, check_configuration
from octavo.inference.model_runner import ModelRunner
from octavo.inference.profile_runner import ProfileRunner
from octavo.inference.recipes import ServingRecipe, has_static_scales
from octavo.language_model import LanguageModel, load_language_model
from octavo.models import Llama
from octavo.models.sources import HF_CONFIG, SourceKind, kind_of, located
from octavo.nn.arguments import check_choice
from octavo.quantization import load_calibration
from octavo.recipes.engines import EngineProfile
from octavo.recipes.engines.catalog import resolved

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["ServedModel", "load_served_model", "load_served_model_as"]

R = TypeVar("R", bound=Runner)
R_co = TypeVar("R_co", bound=Runner, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel(Generic[R_co]):
    """Model with everything that an engine and a server need.

    Attributes:
        runner: model with its weights in the recipe's format, or under a profile.
        tokenizer: converts text to token ids and back.
        end_ids: tokens that end an answer; may be empty.
        chat_template: Jinja template that renders messages as text, or None.
        template_tokens: text of the tokens that a template may use: bos_token, eos_token.
    """

    runner: R_co
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
) -> ServedModel[ModelRunner]:
    """Load a model and convert its weights to a recipe.

    Args:
        source: see the table above.
        recipe: see octavo.inference.recipes.
        calibration: folder that ``octavo calibrate`` wrote for this model. "fp8-static" needs it unless the source has
            static scales (``octavo export``); its key means are used as well.
        hub: download a model with a Hugging Face hub name first.

    Raises:
        ConfigError: there is no such model or recipe, a library to read it is missing, or a calibration is missing or
            given for another recipe.
        CheckpointError: the model is damaged or not of the Llama layout, or the calibration is of another model.
    """
    check_choice("recipe", recipe, tuple(ServingRecipe))
    if calibration is not None and recipe != ServingRecipe.FP8_STATIC:
        raise ConfigError(f"a calibration is for the recipe {ServingRecipe.FP8_STATIC}, not for {recipe}; leave it out")
    loaded = _loaded(source, hub=hub)
    return _served(loaded, _runner(loaded.model, loaded.source, recipe, calibration))


def load_served_model_as(
    source: str | Path, profile: str | EngineProfile, *, hub: bool = False
) -> ServedModel[ProfileRunner]:
    """Load a model to serve it as another engine computes; ``EngineConfig`` takes the runner's ``cache_format``.

    Args:
        source: see the table above; codes of a folder in FP8 are kept.
        profile: the engine or its name.
        hub: download a model with a Hugging Face hub name first.

    Raises:
        ConfigError: as for :func:`load_served_model`, as for :class:`octavo.inference.ProfileRunner`, or a folder in
            FP8 that the engine casts otherwise.
        CheckpointError: the model is damaged or not of the Llama layout.
    """
    engine = resolved(profile)
    loaded = _loaded(source, hub=hub)
    runner = ProfileRunner(_llama(loaded.model, loaded.source), engine)
    check_folder_fits(loaded, engine)
    return _served(loaded, runner)


def _loaded(source: str | Path, *, hub: bool) -> LanguageModel:
    path = located(source, hub=hub, files=(HF_CONFIG,))
    if kind_of(path) is SourceKind.HUGGING_FACE:
        check_configuration(path)
    return load_language_model(located(source, hub=hub))


def _llama(model: nn.Module, source: str) -> Llama:
    return model if isinstance(model, Llama) else as_llama(model, source)


def _served(loaded: LanguageModel, runner: R) -> ServedModel[R]:
    return ServedModel(
        runner=runner,
        tokenizer=loaded.tokenizer,
        end_ids=_end_ids(loaded),
        chat_template=loaded.chat_template or _chat_template(Path(loaded.source)),
        template_tokens=_template_tokens(loaded),
    )


def _runner(model: nn.Module, source: str, recipe: str, calibration: str | Path | None) -> ModelRunner:
    """Create the runner, with the scales of a calibration if given."""
    key_means = None
    if calibration is not None:
        loaded = load_calibration(calibration)
        unfuse_experts(model)  # as for calibrating it
        loaded.apply(model, hold_weights=True)
        key_means = loaded.key_means or None
    llama = _llama(model, source)
    if recipe == ServingRecipe.FP8_STATIC and not has_static_scales(llama):
        raise ConfigError(
            f"{recipe} needs input scales, and this model has none; give the folder that octavo calibrate wrote for it "
            "as the calibration"
        )
    return ModelRunner(llama, recipe=recipe, key_means=key_means)


def _end_ids(loaded: LanguageModel) -> tuple[int, ...]:
    """End tokens from a GGUF file, transformers or a folder in FP8; the source has one id, a list or none."""
    model: Any = loaded.model
    ends: Any = loaded.eos_id
    if ends is None and not isinstance(model, Llama):
        ends = model.generation_config.eos_token_id
    elif ends is None:  # may be a folder in FP8, which octavo reads without transformers
        path = Path(loaded.source) / "generation_config.json"
        ends = read_json(path).get("eos_token_id") if path.is_file() else None
    ids = () if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)
    if not all(isinstance(each, int) for each in ids):
        raise CheckpointError(
            f"{loaded.source!r} has eos_token_id {ends!r}, which is not an id or a list of ids; fix the file"
        )
    return ids


def _chat_template(folder: Path) -> str | None:
    """Read the chat template from chat_template.jinja or from the tokenizer's settings."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{str(path)!r} is not UTF-8 at byte {error.start}; write it again") from error
    template = _tokenizer_settings(folder).get("chat_template")
    return template if isinstance(template, str) else None


def _template_tokens(loaded: LanguageModel) -> dict[str, str]:
    """Text of bos_token and eos_token: from a GGUF file's ids, or from strings or records in a folder's settings."""
    ids = {"bos_token": loaded.bos_id, "eos_token": loaded.eos_id}
    settings = _tokenizer_settings(Path(loaded.source))
    tokens = {name: settings.get(name) for name in ids}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    texts |= {name: str(loaded.tokenizer.id_to_token(i)) for name, i in ids.items() if i is not None}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _tokenizer_settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}
