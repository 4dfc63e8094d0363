"""Comparison of two implementations of one FP8 model, robust against casts that amplify rounding differences.

Casts are discontinuous. Two programs that sum in different orders differ by 1e-7; occasionally a value is rounded to
another code, which differs by 1/16, and a token later many codes differ: the last digit of an embedding changes the
logits of a random decoder of eight layers by up to 2e-2 (tests/unit/export/test_lockstep.py). A tolerance on logits
alone would have to allow that, and would not detect errors.

The two models are therefore compared **in lockstep**. The reference records the input of every FP8 layer. The other
model runs on the same tokens; at each FP8 layer its input is compared with the record and replaced by it. The layer
casts the record and multiplies by its own codes and scales. Errors cannot grow from one layer to the next, and every
part of the model lies between two comparisons: a wrong scale, code, granularity, norm or rotary angle appears at the
next layer, by name. The logits are the last comparison.

Replacement inputs are moved half-way to their decoded casts, away from rounding boundaries: they have the same codes
even if a scale is rounded differently. A model that does not cast them is off by half the rounding error, a hundred
times the tolerance.

Keys and values that an FP8 cache casts are in lockstep too, after rotary embedding: without that, a value beside a
rounding boundary gets another code in the other program, and if it is one of the first token's, the input of the next
layer differs by 1e-3 and more. The attention's module ``kv_cache`` receives both, and what it returns is compared with
the reference's, so that a wrong scale shows at the cache itself.

Greedy continuation is compared the same way: at each position of the reference's text both models must choose the same
next token. (The reference itself may choose another token when it reads its whole text at once, because the summation
order differs.)
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from octavo.errors import DataError
from octavo.export.emulation import CACHE, CacheCast
from octavo.functional import cast_operand
from octavo.nn import Linear
from octavo.numerics import QuantizedTensor
from octavo.parsing import library_errors, parse_json
from octavo.recipes import CastSpec
from octavo.scaling import OperandScaling

__all__ = ["LockstepAgreement", "ReferenceProbe", "compare", "load_probe", "make_probe", "relative_error", "save_probe"]

Logits = Callable[[Tensor], Tensor]
CACHED = ("keys", "values")  # arguments and results of a cache, in order


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceProbe:
    """Recorded computation of the reference.

    Attributes:
        tokens: int64 [B, T]: a prompt and the reference's continuation in the first row, text in the others.
        prompt: number of tokens of the prompt.
        logits: float32 [B, T, V].
        inputs: input of each FP8 layer, mostly [B, T, K], by path; also keys and values [B, kv, T, D] that reach an FP8
            cache, by the path of the cache with ".keys" or ".values".
        given: replacement of each input.
    """

    tokens: Tensor
    prompt: int
    logits: Tensor
    inputs: Mapping[str, Tensor]
    given: Mapping[str, Tensor]

    @property
    def flat_layers(self) -> tuple[str, ...]:
        """Paths of layers whose input is not [batch, tokens, K], but [tokens, K] or [B, heads, T, K]."""
        return tuple(name for name, x in self.inputs.items() if x.ndim != 3 and _argument(name)[0] == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class LockstepAgreement:
    """Difference between another model and a probe.

    Attributes:
        logits_error: ‖logits − reference‖ / ‖reference‖, in lockstep.
        worst_error: largest such error of a layer's input, or of keys or values before or after their cast.
        worst_layer: name of that input in the probe.
        greedy_tokens: number of generated tokens.
        greedy_equal: number of equal choices, in lockstep.
        free_error: error of the logits without lockstep, for information.
        free_equal: number of equal choices without lockstep.
    """

    logits_error: float
    worst_error: float
    worst_layer: str
    greedy_tokens: int
    greedy_equal: int
    free_error: float
    free_equal: int

    def within(self, tolerance: float) -> bool:
        """Report whether the model is the same within a relative tolerance."""
        near = self.logits_error <= tolerance and self.worst_error <= tolerance  # max() would ignore a NaN
        return near and math.isfinite(self.free_error) and self.greedy_equal == self.greedy_tokens

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


@torch.no_grad()
def make_probe(
    logits: Logits,
    model: nn.Module,
    paths: Iterable[str],
    text: Tensor,
    *,
    prompt: int,
    on_token: Callable[[int, int], None] = lambda _done, _total: None,
) -> ReferenceProbe:
    """Continue a prompt greedily with the reference and record what reaches the layers at ``paths``.

    Args:
        logits: token ids [B, T] → logits [B, T, V], by ``model``.
        model: the reference.
        paths: paths of its FP8 layers. Its modules :class:`~octavo.export.emulation.CacheCast` are added.
        text: int64 [B, T]. In the first row the tokens after the prompt are replaced by the reference's choices.
        prompt: number of tokens of the prompt.
        on_token: called after each token with (done, total).
    """
    tokens = text.clone()
    for position in range(prompt, tokens.shape[1]):
        tokens[0, position] = logits(tokens[:1, :position])[0, -1].argmax()
        on_token(position + 1 - prompt, tokens.shape[1] - prompt)
    inputs: dict[str, Tensor] = {}

    def record(path: str, arriving: Tensor) -> None:
        layer_input, last = arriving.detach().float(), next(reversed(inputs.values()), None)
        # q, k and v share one tensor; clone it, since later operations may modify it
        inputs[path] = last if last is not None and torch.equal(layer_input, last) else layer_input.clone()

    caches = (path for path, module in model.named_modules() if isinstance(module, CacheCast))
    names = [*paths, *(f"{path}.{name}" for path in caches for name in CACHED)]
    with _intercept_inputs(model, names, record):
        final_logits = logits(tokens)
    replacements = _move_off_boundaries(model, inputs)
    return ReferenceProbe(tokens=tokens, prompt=prompt, logits=final_logits.float(), inputs=inputs, given=replacements)


def _move_off_boundaries(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Move each input half-way to its decoded cast; computed once for layers that share an input."""
    replacements: dict[str, Tensor] = {}
    computed: dict[tuple[int, CastSpec | None, float | None], Tensor] = {}
    for path, x in inputs.items():
        module_path, index = _argument(path)
        layer = model.get_submodule(module_path)
        if isinstance(layer, CacheCast):
            replacements[path] = x + (layer.round_trip(x, index) - x) / 2
            continue
        assert isinstance(layer, Linear)
        spec = layer.recipe.output.a
        scale = layer.input_scale if layer.recipe.has_static_input else None
        key = x.data_ptr(), spec, None if scale is None else float(scale)
        if key not in computed:
            cast = cast_operand(x.flatten(0, -2), spec, OperandScaling(scale=scale))
            decoded = cast.dequantize().view_as(x) if isinstance(cast, QuantizedTensor) else x
            computed[key] = x + (decoded - x) / 2
        replacements[path] = computed[key]
    return replacements


@torch.no_grad()
def compare(logits: Logits, model: nn.Module, probe: ReferenceProbe) -> LockstepAgreement:
    """Run another model on a probe's tokens, in lockstep and freely."""
    free_logits = logits(probe.tokens)
    errors = dict.fromkeys(probe.inputs, float("inf"))  # stays infinite for a layer that does not run

    def replace(path: str, arriving: Tensor) -> Tensor:
        expected = probe.inputs[path]
        errors[path] = relative_error(arriving, expected)
        return probe.given[path].to(arriving.dtype)

    def check_cast(name: str, returned: Tensor) -> None:
        decoded = 2 * probe.given[name] - probe.inputs[name]  # the replacement is half-way
        errors[name] = max(errors[name], relative_error(returned, decoded))

    with _intercept_inputs(model, probe.inputs, replace), _intercept_caches(model, probe.inputs, check_cast):
        lockstep_logits = logits(probe.tokens)
    worst = max(errors, key=lambda path: errors[path], default="")
    return LockstepAgreement(
        logits_error=relative_error(lockstep_logits, probe.logits),
        worst_error=errors.get(worst, 0.0),
        worst_layer=worst,
        greedy_tokens=probe.tokens.shape[1] - probe.prompt,
        greedy_equal=_equal_choices(lockstep_logits, probe),
        free_error=relative_error(free_logits, probe.logits),
        free_equal=_equal_choices(free_logits, probe),
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖ in float64; infinite for different shapes or nonfinite values.

    Example:
        >>> relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
        0.1
    """
    if actual.shape != expected.shape:
        return float("inf")
    expected = expected.double()
    error = (actual.double() - expected).norm() / expected.norm().clamp(min=torch.finfo(torch.float64).tiny)
    return float(error) if error.isfinite() else float("inf")


def save_probe(probe: ReferenceProbe, path: Path) -> None:
    """Write a probe; a tensor shared by several layers is written once."""
    names: dict[int, str] = {}
    tensors = {"tokens": probe.tokens.contiguous(), "logits": probe.logits.contiguous()}
    metadata = {"prompt": str(probe.prompt)}
    for kind, layer_inputs in (("inputs", probe.inputs), ("given", probe.given)):
        tensor_names = {
            layer: names.setdefault(x.data_ptr(), f"input.{len(names)}") for layer, x in layer_inputs.items()
        }
        tensors |= {tensor_names[layer]: x.contiguous() for layer, x in layer_inputs.items()}
        metadata[kind] = json.dumps(tensor_names)
    save_file(tensors, path, metadata=metadata)


def load_probe(path: Path) -> ReferenceProbe:
    """Read a probe written by :func:`save_probe`.

    Raises:
        OSError: the file cannot be opened.
        DataError: the file is damaged.
    """
    with library_errors(), safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- no mapping
    try:
        inputs, replacements = (
            {layer: tensors[name] for layer, name in parse_json(metadata[kind]).items()} for kind in ("inputs", "given")
        )
        prompt, tokens, logits = int(metadata["prompt"]), tensors["tokens"], tensors["logits"]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"{str(path)!r} is not a probe written by octavo: {error!r}; export again") from error
    return ReferenceProbe(tokens=tokens, prompt=prompt, logits=logits, inputs=inputs, given=replacements)


def _argument(name: str) -> tuple[str, int]:
    """Path of the module and index of the argument that a probe's name stands for."""
    path, _, last = name.rpartition(".")
    return (path, CACHED.index(last)) if path.endswith(f".{CACHE}") else (name, 0)


@contextmanager
def _intercept_inputs(
    model: nn.Module, names: Iterable[str], replace: Callable[[str, Tensor], Tensor | None]
) -> Iterator[None]:
    """Context manager that calls ``replace`` with each input's name and value; it may return another."""

    def hook(name: str, index: int) -> Any:
        def before(_: nn.Module, arguments: tuple[Any, ...]) -> Any:
            replacement = replace(name, arguments[index])
            return None if replacement is None else (*arguments[:index], replacement, *arguments[index + 1 :])

        return before

    with ExitStack() as hooks:
        for name in names:
            path, index = _argument(name)
            hooks.enter_context(model.get_submodule(path).register_forward_pre_hook(hook(name, index)))
        yield


@contextmanager
def _intercept_caches(model: nn.Module, names: Iterable[str], check: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Context manager that calls ``check`` with the name and value of keys and values that a cache returns."""

    def hook(name: str, index: int) -> Any:
        return lambda _, __, results: check(name, results[index])

    with ExitStack() as hooks:
        for name in names:
            path, index = _argument(name)
            if path != name:
                hooks.enter_context(model.get_submodule(path).register_forward_hook(hook(name, index)))
        yield


def _equal_choices(logits: Tensor, probe: ReferenceProbe) -> int:
    """Number of positions of the generated text where the next token equals the reference's."""
    ours, theirs = (each[0, probe.prompt - 1 : -1].argmax(-1) for each in (logits, probe.logits))
    return int((ours == theirs).sum())
