"""Variants of a language model in the formats under comparison, all made from the same weights.

| name            | weights of the linears that ``octavo.convert`` takes  | their inputs                        |
|-----------------|-------------------------------------------------------|-------------------------------------|
| fp32            | FP32                                                  | FP32                                |
| bf16            | BF16                                                  | BF16                                |
| int8            | torchao's INT8, a scale a row                         | INT8, a scale a token               |
| fp8-dynamic     | E4M3, a scale a tensor (recipe tensorwise)            | the same, from this tensor          |
| fp8-rowwise     | E4M3, a power-of-two scale a row (recipe rowwise)     | the same, a scale a token           |
| fp8-blockwise   | E4M3, a power-of-two scale for 128x128 (blockwise)    | the same for 1x128                  |
| fp8-static      | E4M3 with a calibration's scales                      | E4M3, its frozen scale a tensor     |
| fp8-qat         | E4M3 after quantization-aware training                | as in training                      |
| fp8-kv          | BF16; keys and values through octavo's FP8 cache      | BF16                                |
| fp8-kv-centred  | BF16; the same, with a calibration's mean keys        | BF16                                |

All but fp32 start from weights rounded to BF16 (octavo.quantization.bf16) and run the same way: head, embedding and
norms hold the rounded values, everything runs under BF16 autocast, the residual stream stays FP32, and logits are BF16.
They therefore differ only in the format of those linears. The exception is fp8-qat, whose codes come from the weights
that training changed; its other parameters are rounded as in the other variants.

A variant is a copy whose codes take one byte an element; the original model is not changed. ``octavo eval --compare``
selects variants by these names.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from octavo.convert import choose_layers, convert, other_modules, restore
from octavo.errors import CheckpointError, ConfigError
from octavo.language_model import KVTransform, LanguageModel
from octavo.nn import Linear
from octavo.nn.fp8_weight import runs_in_fp8, store_weight_as_codes
from octavo.quantization.bf16 import bf16_autocast, round_to_bf16
from octavo.quantization.calibration.result import check_has_no_codes, shape_hash
from octavo.quantization.comparison.int8_baseline import ExactIntegerProducts, quantize_to_int8
from octavo.quantization.comparison.kv_cache_round_trip import cached
from octavo.quantization.comparison.storage import Storage, storage_of
from octavo.quantization.layers import check_has_layers

__all__ = [
    "AS_IT_IS",
    "BF16",
    "CACHE",
    "CENTRED",
    "FORMATS",
    "FP32",
    "INT8",
    "RECIPES",
    "STATIC",
    "TUNED",
    "FormatVariant",
    "StaticScales",
    "as_it_is",
    "check_formats",
    "from_recipe",
    "high_precision",
    "int8",
    "line_up",
    "tuned",
    "with_cache",
    "with_scales",
]

FP32 = "fp32"
BF16 = "bf16"
AS_IT_IS = "as it is"
INT8 = "int8"
STATIC = "fp8-static"
TUNED = "fp8-qat"
CACHE = "fp8-kv"
CENTRED = "fp8-kv-centred"
RECIPES = {"fp8-dynamic": "tensorwise", "fp8-rowwise": "rowwise", "fp8-blockwise": "blockwise"}
FORMATS = (FP32, BF16, INT8, *RECIPES, STATIC, TUNED, CACHE, CENTRED)
T = TypeVar("T")


class StaticScales(Protocol):
    """Static scales that can be applied to a model, such as a ``Calibration``."""

    def apply(self, model: nn.Module, *, hold_weights: bool | None = None) -> object:
        """Convert the model in place to a static recipe with these scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatVariant:
    """A language model in one format.

    Attributes:
        name: of the format.
        language_model: the converted copy.
        surrounding: the dtype of everything except the linears in that format.
        quantized: paths of those linears.
        cache: transformation of keys and values; None leaves them unchanged.
    """

    name: str
    language_model: LanguageModel
    surrounding: torch.dtype = torch.bfloat16
    quantized: tuple[str, ...] = ()
    cache: KVTransform | None = None

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Compute logits [B, T, V] from token ids [B, T] in this format."""
        with self._autocast(tokens.device), ExactIntegerProducts() if self._has_integers else nullcontext():
            return self.language_model.logits(tokens, self.cache)

    @property
    def storage(self) -> Storage:
        """Bytes of the weights."""
        return storage_of(self.language_model.model, self.surrounding)

    @property
    def _has_integers(self) -> bool:
        return self.name == INT8

    def _autocast(self, device: torch.device) -> AbstractContextManager[object]:
        if self.surrounding == torch.float32:
            return nullcontext()
        return bf16_autocast(device)


def as_it_is(model: LanguageModel) -> FormatVariant:
    """Variant that is the model itself: FP32, except layers that store FP8 codes, which follow their recipes."""
    return FormatVariant(
        name=AS_IT_IS, language_model=model, surrounding=torch.float32, quantized=_quantized_paths(model)
    )


def high_precision(model: LanguageModel, name: str) -> FormatVariant:
    """FP32 variant, which shares the model ("fp32"), or a copy in BF16 ("bf16")."""
    if name == FP32:
        return FormatVariant(name=name, language_model=model, surrounding=torch.float32)
    return _finish_variant(_bf16_rounded_copy(model), name, ())


def from_recipe(model: LanguageModel, name: str) -> FormatVariant:
    """Copy whose linears run the recipe ``RECIPES[name]``, with weights stored as codes."""
    check_has_layers(model.model, tuple(choose_layers(model.model)[0]))
    return _quantized_variant(
        _bf16_rounded_copy(model),
        name,
        lambda inner: convert(inner, RECIPES[name], skip=list(other_modules(inner)), frozen="fp8"),
    )


def with_cache(bf16: FormatVariant, name: str, means: Mapping[int, Tensor] | None = None) -> FormatVariant:
    """BF16 variant with the FP8 KV cache, optionally with mean keys; shares the weights of ``bf16``."""
    return replace(bf16, name=name, cache=cached(means))


def with_scales(model: LanguageModel, calibration: StaticScales) -> FormatVariant:
    """Copy whose linears use the static scales of a calibration ("fp8-static")."""
    return _quantized_variant(
        _bf16_rounded_copy(model), STATIC, lambda inner: calibration.apply(inner, hold_weights=True)
    )


def tuned(model: LanguageModel) -> FormatVariant:
    """Copy of a model after quantization-aware training ("fp8-qat")."""
    return _quantized_variant(_frozen_copy(model), TUNED, _quantize_then_round)


def int8(model: LanguageModel) -> FormatVariant:
    """Copy whose linears, the same as in FP8, run torchao's INT8."""
    copied = _bf16_rounded_copy(model)
    paths = convert(copied.model, BF16).converted
    restore(copied.model)
    check_has_layers(copied.model, paths)
    _store_as_bf16(copied.model)
    quantize_to_int8(copied.model, paths)
    _convert_others_to_bf16(copied.model, paths)
    return FormatVariant(name=INT8, language_model=copied, quantized=paths)


def _quantized_variant(copied: LanguageModel, name: str, quantize: Callable[[nn.Module], object]) -> FormatVariant:
    """Quantize a copy in place and finish it as a variant."""
    quantize(copied.model)
    paths = _quantized_paths(copied)
    check_has_layers(copied.model, paths)
    return _finish_variant(copied, name, paths)


def _quantized_paths(model: LanguageModel) -> tuple[str, ...]:
    """Paths of the layers whose GEMMs use codes."""
    return tuple(path for path, layer in model.model.named_modules() if runs_in_fp8(layer))


def _quantize_then_round(model: nn.Module) -> None:
    """Quantize the trained weights before rounding the other parameters to BF16, so that the codes do not change."""
    for layer in model.modules():
        if isinstance(layer, Linear) and not layer.recipe.is_high_precision:
            store_weight_as_codes(layer)
    round_to_bf16(model)


def _frozen_copy(model: LanguageModel) -> LanguageModel:
    """Frozen copy, whose weights may be stored as codes."""
    return replace(model, model=copy.deepcopy(model.model).requires_grad_(False))


def _bf16_rounded_copy(model: LanguageModel) -> LanguageModel:
    copied = _frozen_copy(model)
    round_to_bf16(copied.model)
    return copied


def _finish_variant(copied: LanguageModel, name: str, quantized: tuple[str, ...]) -> FormatVariant:
    """Turn a rounded copy into a variant: layers outside ``quantized`` become BF16."""
    _convert_others_to_bf16(copied.model, quantized)
    _store_as_bf16(copied.model)
    return FormatVariant(name=name, language_model=copied, quantized=quantized)


def _convert_others_to_bf16(model: nn.Module, quantized: tuple[str, ...]) -> None:
    """Convert all other linears to octavo's "bf16": the same results, faster on a CPU without BF16 instructions."""
    convert(model, BF16, convert_head=True, layer_filter=lambda path, _: path not in quantized)


def _store_as_bf16(model: nn.Module) -> None:
    """Store rounded matrices as BF16 tensors, except codes; vectors stay FP32, which some norms require.

    Embeddings output FP32, so that the residual stream is FP32 as under autocast with FP32 weights.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.element_size() > 1 and parameter.ndim > 1:
            parameter.data = parameter.data.to(torch.bfloat16)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda _module, _inputs, output: output.float())


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
    builders: dict[str, Callable[[], FormatVariant]] = {
        FP32: lambda: high_precision(model, FP32),
        BF16: lambda: bf16,
        INT8: lambda: int8(model),
        **{name: partial(from_recipe, model, name) for name in RECIPES},
        STATIC: lambda: with_scales(model, _required(calibration, STATIC, "a calibration")),
        TUNED: lambda: tuned(_check_tuned_model(model, _required(tuned_model, TUNED, "a model tuned by octavo qat"))),
        CACHE: lambda: with_cache(bf16, CACHE),
        CENTRED: lambda: with_cache(bf16, CENTRED, _required(means, CENTRED, "the means of its keys")),
    }
    variants = []
    for name in names:
        variants.append(builders[name]())
        advance(len(variants), len(names))
    return variants


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
