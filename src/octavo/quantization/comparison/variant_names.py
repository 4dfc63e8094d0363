"""Format variants by name, for ``octavo eval --compare bf16,int8,fp8-static``."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from octavo.errors import CheckpointError, ConfigError
from octavo.language_model import LanguageModel
from octavo.quantization.calibration.result import check_has_no_codes, shape_hash
from octavo.quantization.comparison.variants import (
    BF16,
    CACHE,
    CENTRED,
    FP32,
    INT8,
    RECIPES,
    STATIC,
    TUNED,
    FormatVariant,
    StaticScales,
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
    """Validate format names and add BF16, the reference, if it is missing.

    Raises:
        ConfigError: an unknown name, a duplicate, or no name.

    Example:
        >>> check_formats(["int8", "fp8-dynamic"])
        ('bf16', 'int8', 'fp8-dynamic')
    """
    for name in names:
        if name not in FORMATS:
            raise ConfigError(f"there is no format {name!r} to compare; use some of {', '.join(FORMATS)}")
    if not names or len({*names}) < len(names):
        raise ConfigError(f"compare needs one or more distinct formats, not {', '.join(names) or 'none'}")
    return tuple(names) if BF16 in names else (BF16, *names)


def line_up(
    model: LanguageModel,
    names: Sequence[str],
    *,
    calibration: StaticScales | None = None,
    tuned_model: LanguageModel | None = None,
    means: Mapping[int, Tensor] | None = None,
    advance: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[FormatVariant]:
    """Build a variant for each name, in order; the model is not changed.

    Args:
        model: in FP32.
        names: as returned by :func:`check_formats`.
        calibration: for "fp8-static".
        tuned_model: for "fp8-qat", as returned by ``load_qat``.
        means: mean keys for "fp8-kv-centred", as returned by ``key_means``.
        advance: called after each variant with (done, total).

    Raises:
        ConfigError: a format without its calibration, tuned model or library; a model that stores FP8 codes, which
            cannot serve as a BF16 reference.
        CheckpointError: a calibration or tuned model of another model.
    """
    check_has_no_codes(model.model, (path for path, _ in model.model.named_modules()))
    bf16 = high_precision(model, BF16)
    builders = {
        STATIC: lambda: with_scales(model, _required(calibration, STATIC, "a calibration")),
        TUNED: lambda: tuned(_check_tuned_model(model, _required(tuned_model, TUNED, "a model tuned by octavo qat"))),
        CENTRED: lambda: with_cache(bf16, CENTRED, _required(means, CENTRED, "the means of its keys")),
    }
    variants = []
    for name in names:
        variants.append(builders[name]() if name in builders else _variant(model, name, bf16))
        advance(len(variants), len(names))
    return variants


def _variant(model: LanguageModel, name: str, bf16: FormatVariant) -> FormatVariant:
    """Build a variant that needs only the model."""
    if name == FP32:
        return high_precision(model, FP32)
    if name == INT8:
        return int8(model)
    if name in RECIPES:
        return from_recipe(model, name)
    return with_cache(bf16, CACHE) if name == CACHE else bf16


def _check_tuned_model(model: LanguageModel, tuned_model: LanguageModel) -> LanguageModel:
    """Return ``tuned_model`` if its parameter shapes and vocabulary match ``model``."""
    advice = f"give the folder that octavo qat wrote for this model, or leave {TUNED} out"
    if shape_hash(tuned_model.model) != shape_hash(model.model):
        raise CheckpointError(f"the tuned model is another model: names or shapes of parameters differ; {advice}")
    if (
        tuned_model.tokenizer is not model.tokenizer
        and tuned_model.tokenizer.get_vocab() != model.tokenizer.get_vocab()
    ):
        raise CheckpointError(f"the tuned model is another model: its tokenizer has other tokens; {advice}")
    return tuned_model


def _required(value: T | None, name: str, what: str) -> T:
    if value is None:
        raise ConfigError(f"{name} needs {what}; give it, or leave {name} out")
    return value
