"""Names to contestants: what ``octavo eval --compare bf16,int8,fp8-static`` lines up."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from octavo.errors import CheckpointError, ConfigError
from octavo.language_model import LanguageModel
from octavo.quantization.calibration.result import check_holds_no_codes, shape_hash
from octavo.quantization.comparison.contestants import (
    BF16,
    CACHE,
    CENTRED,
    FP32,
    INT8,
    RECIPES,
    STATIC,
    TUNED,
    Contestant,
    Scales,
    from_recipe,
    high_precision,
    int8,
    tuned,
    with_cache,
    with_scales,
)

__all__ = ["FORMATS", "check_formats", "line_up"]

T = TypeVar("T")
FORMATS = (FP32, BF16, INT8, *RECIPES, STATIC, TUNED, CACHE, CENTRED)


def check_formats(names: Sequence[str]) -> tuple[str, ...]:
    """The formats to compare, each once and BF16 among them, which the others are compared with.

    Raises:
        ConfigError: an unknown name, one that stands twice, or none.

    Example:
        >>> check_formats(["int8", "fp8-dynamic"])
        ('bf16', 'int8', 'fp8-dynamic')
    """
    for name in names:
        if name not in FORMATS:
            raise ConfigError(f"there is no format {name!r} to compare; use some of {', '.join(FORMATS)}")
    if not names or len({*names}) < len(names):
        raise ConfigError(f"compare takes different formats, at least one, not {', '.join(names) or 'none'}")
    return tuple(names) if BF16 in names else (BF16, *names)


def line_up(
    model: LanguageModel,
    names: Sequence[str],
    *,
    calibration: Scales | None = None,
    tuned_model: LanguageModel | None = None,
    means: Mapping[int, Tensor] | None = None,
    advance: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[Contestant]:
    """A contestant for each name, in order; the model stays as it is.

    Args:
        model: in FP32.
        names: what :func:`check_formats` gives.
        calibration: for "fp8-static".
        tuned_model: for "fp8-qat", as ``load_qat`` gives it.
        means: of keys, for "fp8-kv-centred", as ``key_means`` gives them.
        advance: called after each with (done, total).

    Raises:
        ConfigError: a format that lacks its calibration, tuned model or library; a model that holds FP8 codes, whose
            BF16 would be those codes and no reference.
        CheckpointError: a calibration or tuned model of another model.
    """
    check_holds_no_codes(model.model, (path for path, _ in model.model.named_modules()))
    bf16 = high_precision(model, BF16)
    given = {
        STATIC: lambda: with_scales(model, _needed(calibration, STATIC, "a calibration")),
        TUNED: lambda: tuned(_tuned_from(model, _needed(tuned_model, TUNED, "a model that octavo qat has tuned"))),
        CENTRED: lambda: with_cache(bf16, CENTRED, _needed(means, CENTRED, "the means of its keys")),
    }
    made = []
    for name in names:
        made.append(given[name]() if name in given else _contestant(model, name, bf16))
        advance(len(made), len(names))
    return made


def _contestant(model: LanguageModel, name: str, bf16: Contestant) -> Contestant:
    """One that needs nothing but the model."""
    if name == FP32:
        return high_precision(model, FP32)
    if name == INT8:
        return int8(model)
    if name in RECIPES:
        return from_recipe(model, name)
    return with_cache(bf16, CACHE) if name == CACHE else bf16


def _tuned_from(model: LanguageModel, made: LanguageModel) -> LanguageModel:
    """``made``, if it may be the model tuned: the same shapes and words."""
    advice = f"name the folder that octavo qat made of this model, or leave {TUNED} out"
    if shape_hash(made.model) != shape_hash(model.model):
        raise CheckpointError(f"what octavo qat tuned is another model: names or shapes of parameters differ; {advice}")
    if made.tokenizer is not model.tokenizer and made.tokenizer.get_vocab() != model.tokenizer.get_vocab():
        raise CheckpointError(f"what octavo qat tuned is another model: its tokenizer has other tokens; {advice}")
    return made


def _needed(given: T | None, name: str, what: str) -> T:
    if given is None:
        raise ConfigError(f"{name} needs {what}; give it, or leave {name} out")
    return given
