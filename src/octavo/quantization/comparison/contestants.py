"""The formats that a language model is compared in, each made from the same weights.

| name            | the linears that ``octavo.convert`` takes             | their inputs                        |
|-----------------|-------------------------------------------------------|-------------------------------------|
| fp32            | FP32                                                  | FP32                                |
| bf16            | BF16                                                  | BF16                                |
| int8            | torchao's INT8, a scale a row                         | INT8, a scale a token               |
| fp8-dynamic     | E4M3, a scale a tensor (recipe tensorwise)            | the same, from this tensor          |
| fp8-rowwise     | E4M3, a power-of-two scale a row (recipe rowwise)     | the same, a scale a token           |
| fp8-blockwise   | E4M3, a power-of-two scale for 128x128 (blockwise)    | the same for 1x128                  |
| fp8-static      | E4M3 as a calibration says                            | E4M3, its frozen scale a tensor     |
| fp8-qat         | E4M3 as quantisation-aware training left them         | as it was trained                   |
| fp8-kv          | BF16; keys and values as octavo's FP8 cache has them  | BF16                                |
| fp8-kv-centred  | BF16; the same, with a calibration's means of keys    | BF16                                |

All but fp32 are made of weights rounded to BF16 (octavo.quantization.bf16) and run in the same surroundings: head,
embedding and norms hold those values, everything runs under BF16 autocast, the residual stream stays FP32, and logits
are BF16. So what separates them is the format of those linears alone. fp8-qat is the one exception: its codes are those
that training ended with, made of the weights that it moved; the rest of it is rounded like the others'.

A contestant is a copy whose codes really take one byte; the model it is made from is left as it was.
"""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from octavo.convert import choose_layers, convert, restore
from octavo.language_model import KVTransform, LanguageModel
from octavo.nn import Linear
from octavo.nn.fp8_weight import hold_weight_as_codes
from octavo.quantization.bf16 import bf16_autocast, round_to_bf16
from octavo.quantization.comparison.cache_formats import cached
from octavo.quantization.comparison.integers import ExactIntegerProducts, quantize_to_int8
from octavo.quantization.comparison.storage import Storage, storage_of
from octavo.quantization.layers import check_has_layers

__all__ = [
    "AS_IT_IS",
    "BF16",
    "CACHE",
    "CENTRED",
    "FP32",
    "INT8",
    "RECIPES",
    "STATIC",
    "TUNED",
    "Contestant",
    "Scales",
    "as_it_is",
    "from_recipe",
    "high_precision",
    "int8",
    "tuned",
    "with_cache",
    "with_scales",
]

FP32, BF16, AS_IT_IS = "fp32", "bf16", "as it is"
INT8, STATIC, TUNED = "int8", "fp8-static", "fp8-qat"
CACHE, CENTRED = "fp8-kv", "fp8-kv-centred"
RECIPES = {"fp8-dynamic": "tensorwise", "fp8-rowwise": "rowwise", "fp8-blockwise": "blockwise"}


class Scales(Protocol):
    """What a calibration found."""

    def apply(self, model: nn.Module, *, hold_weights: bool | None = None) -> object:
        """Convert the model, in place, to a static recipe with those scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A language model in one format.

    Attributes:
        name: of the format.
        language_model: the copy.
        surrounding: the dtype of everything but the linears in that format.
        quantized: paths of those linears.
        cache: how keys and values are kept; None is as they are.
    """

    name: str
    language_model: LanguageModel
    surrounding: torch.dtype = torch.bfloat16
    quantized: tuple[str, ...] = ()
    cache: KVTransform | None = None

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] → logits [B, T, V] as this format computes them."""
        with self._surroundings(tokens.device), ExactIntegerProducts() if self._has_integers else nullcontext():
            return self.language_model.logits(tokens, self.cache)

    @property
    def storage(self) -> Storage:
        """Bytes of its weights."""
        return storage_of(self.language_model.model, self.surrounding)

    @property
    def _has_integers(self) -> bool:
        return self.name == INT8

    def _surroundings(self, device: torch.device) -> AbstractContextManager[object]:
        if self.surrounding == torch.float32:
            return nullcontext()
        return bf16_autocast(device)


def as_it_is(model: LanguageModel) -> Contestant:
    """The model itself, in FP32 but for layers that hold FP8 codes, which compute as their recipes say."""
    return Contestant(name=AS_IT_IS, language_model=model, surrounding=torch.float32, quantized=_in_codes(model))


def high_precision(model: LanguageModel, name: str) -> Contestant:
    """The model as it is ("fp32"; no copy), or a copy in BF16 ("bf16")."""
    if name == FP32:
        return Contestant(name=name, language_model=model, surrounding=torch.float32)
    return _finished(_rounded_copy_of(model), name, ())


def from_recipe(model: LanguageModel, name: str) -> Contestant:
    """A copy whose linears run the recipe of that name in :data:`RECIPES`, its weights held as codes."""
    check_has_layers(model.model, tuple(choose_layers(model.model)[0]))
    return _in_fp8(_rounded_copy_of(model), name, lambda inner: convert(inner, RECIPES[name], frozen="fp8"))


def with_cache(bf16: Contestant, name: str, means: Mapping[int, Tensor] | None = None) -> Contestant:
    """The BF16 contestant, whose weights it shares, with generation's FP8 cache, and means of keys or none."""
    return replace(bf16, name=name, cache=cached(means))


def with_scales(model: LanguageModel, calibration: Scales) -> Contestant:
    """A copy whose linears have the frozen input scales of a calibration ("fp8-static")."""
    return _in_fp8(_rounded_copy_of(model), STATIC, lambda inner: calibration.apply(inner, hold_weights=True))


def tuned(model: LanguageModel) -> Contestant:
    """A model that quantisation-aware training has made, in FP8 already ("fp8-qat")."""
    return _in_fp8(_copy_of(model), TUNED, _hold_and_round)


def int8(model: LanguageModel) -> Contestant:
    """A copy whose linears, the ones that FP8 takes, run torchao's INT8."""
    made = _rounded_copy_of(model)
    paths = convert(made.model, BF16).converted
    restore(made.model)
    check_has_layers(made.model, paths)
    _hold_in_bf16(made.model)
    quantize_to_int8(made.model, paths)
    _run_rest_in_bf16(made.model, paths)
    return Contestant(name=INT8, language_model=made, quantized=paths)


def _in_fp8(made: LanguageModel, name: str, quantize: Callable[[nn.Module], object]) -> Contestant:
    """Of a copy, in place."""
    quantize(made.model)
    paths = _in_codes(made)
    check_has_layers(made.model, paths)
    return _finished(made, name, paths)


def _in_codes(model: LanguageModel) -> tuple[str, ...]:
    """Paths of the layers that multiply codes."""
    return tuple(
        path
        for path, layer in model.model.named_modules()
        if isinstance(layer, Linear) and not (layer.recipe.is_high_precision and layer.held is None)
    )


def _hold_and_round(model: nn.Module) -> None:
    """Make codes of weights as they are, and round what is left: the order that training needs."""
    for layer in model.modules():
        if isinstance(layer, Linear) and not layer.recipe.is_high_precision:
            hold_weight_as_codes(layer)
    round_to_bf16(model)


def _copy_of(model: LanguageModel) -> LanguageModel:
    """Frozen, so that weights may be held as codes."""
    return replace(model, model=copy.deepcopy(model.model).requires_grad_(False))


def _rounded_copy_of(model: LanguageModel) -> LanguageModel:
    made = _copy_of(model)
    round_to_bf16(made.model)
    return made


def _finished(made: LanguageModel, name: str, quantized: tuple[str, ...]) -> Contestant:
    """A rounded copy whose layers at ``quantized`` are what they are to be; the others become BF16."""
    _run_rest_in_bf16(made.model, quantized)
    _hold_in_bf16(made.model)
    return Contestant(name=name, language_model=made, quantized=quantized)


def _run_rest_in_bf16(model: nn.Module, quantized: tuple[str, ...]) -> None:
    """Let every other linear run octavo's "bf16": the same numbers, faster where a CPU has no BF16 instructions."""
    convert(model, BF16, convert_head=True, layer_filter=lambda path, _: path not in quantized)


def _hold_in_bf16(model: nn.Module) -> None:
    """Let rounded matrices, where they are no codes, be BF16 tensors; vectors stay FP32, which norms may insist on.

    An embedding hands on FP32, so that the residual stream is as wide as under autocast with FP32 weights.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.element_size() > 1 and parameter.ndim > 1:
            parameter.data = parameter.data.to(torch.bfloat16)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda _module, _inputs, output: output.float())
