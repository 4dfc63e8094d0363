"""Whether two ways to compute the same FP8 model agree, in spite of casts that amplify their last digits.

A cast is a staircase. Two programs that add in another order differ by 1e-7, now and then a value falls on the other
side of a step, that one code differs by 1/16, and a token later many codes do: the last digit of its embedding moves
the logits of a random decoder of eight layers by up to 2e-2 (tests/unit/export/test_agreement.py). Comparing logits
alone would have to allow all of that, and would see no mistake.

So the two are compared **in lockstep**. The reference records what reaches every FP8 layer. The other model runs on the
same tokens; at each FP8 layer what arrives is compared with the record, and the layer is given the record instead. It
casts it, multiplies by its own codes and scales, and hands on what it found. Errors cannot grow from one layer to the
next, and every part of the model stands between two comparisons: a wrong scale, code, granularity, norm or rotary angle
shows at the next layer, by name. The logits at the end are the last comparison.

What a layer is given is moved half-way to what its cast makes of it, off the steps' edges: it has the same codes, even
where a scale is rounded otherwise. A model that does not cast it is out by half the rounding error, which is a hundred
times what is allowed.

Text is continued greedily in the same way: at every place of what the reference wrote, both must choose the same next
token. (The reference may itself choose another one where it reads all of its text at once: it adds in another order.)
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from octavo.errors import DataError
from octavo.functional import cast_operand
from octavo.nn import Linear
from octavo.numerics import QuantizedTensor
from octavo.parsing import library_errors, parse_json
from octavo.recipes import CastSpec
from octavo.scaling import OperandScaling

__all__ = ["Agreement", "Probe", "compare", "load_probe", "make_probe", "relative_error", "save_probe"]

Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What the reference computed.

    Attributes:
        tokens: int64 [B, T]: in the first row a prompt and what the reference continues it with, text in the others.
        prompt: tokens of the prompt.
        logits: float32 [B, T, V].
        inputs: what reached each FP8 layer, [B, T, K], by path.
        given: what to give the layer instead.
    """

    tokens: Tensor
    prompt: int
    logits: Tensor
    inputs: Mapping[str, Tensor]
    given: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far another model is from a probe.

    Attributes:
        logits_error: ‖logits − reference‖ / ‖reference‖, in lockstep.
        worst_error: the largest such error of what reaches a layer.
        worst_layer: that layer's path.
        greedy_tokens: how many tokens were continued.
        greedy_equal: how many of them are the same, in lockstep.
        free_error: the logits' error when the model runs by itself, for information.
        free_equal: how many tokens it chooses alike then.
    """

    logits_error: float
    worst_error: float
    worst_layer: str
    greedy_tokens: int
    greedy_equal: int
    free_error: float
    free_equal: int

    def within(self, tolerance: float) -> bool:
        """Whether it is the same model."""
        near = self.logits_error <= tolerance and self.worst_error <= tolerance  # max() would pass over a NaN
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
) -> Probe:
    """Continue a prompt greedily with the reference and record what reaches the layers at ``paths``.

    Args:
        logits: token ids [B, T] → logits [B, T, V], by ``model``.
        model: the reference.
        paths: of its FP8 layers.
        text: int64 [B, T]. Of its first row the prompt is kept, and the rest chosen by the reference.
        prompt: how many tokens that is.
        on_token: called after each token with (done, total).
    """
    tokens = text.clone()
    for place in range(prompt, tokens.shape[1]):
        tokens[0, place] = logits(tokens[:1, :place])[0, -1].argmax()
        on_token(place + 1 - prompt, tokens.shape[1] - prompt)
    inputs: dict[str, Tensor] = {}

    def record(path: str, arriving: Tensor) -> None:
        seen, last = arriving.detach().float(), next(reversed(inputs.values()), None)
        # q, k and v share one; a copy, since what follows may write into it
        inputs[path] = last if last is not None and torch.equal(seen, last) else seen.clone()

    with _watched(model, paths, record):
        found = logits(tokens)
    moved = _moved(model, inputs)
    return Probe(tokens=tokens, prompt=prompt, logits=found.float(), inputs=inputs, given=moved)


def _moved(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Half-way to what each layer's cast makes of its input; computed once for layers that are given the same."""
    found: dict[str, Tensor] = {}
    known: dict[tuple[int, CastSpec | None, float], Tensor] = {}
    for path, x in inputs.items():
        layer = model.get_submodule(path)
        assert isinstance(layer, Linear)
        spec = layer.recipe.output.a
        key = x.data_ptr(), spec, float(layer.input_scale)
        if key not in known:
            cast = cast_operand(x.flatten(0, -2), spec, OperandScaling(scale=layer.input_scale))
            near = cast.dequantize().view_as(x) if isinstance(cast, QuantizedTensor) else x
            known[key] = x + (near - x) / 2
        found[path] = known[key]
    return found


@torch.no_grad()
def compare(logits: Logits, model: nn.Module, probe: Probe) -> Agreement:
    """Run another model on a probe's tokens, in lockstep and by itself."""
    free = logits(probe.tokens)
    errors = dict.fromkeys(probe.inputs, float("inf"))  # of a layer that never runs

    def replace(path: str, arriving: Tensor) -> Tensor:
        expected = probe.inputs[path]
        errors[path] = relative_error(arriving, expected)
        return probe.given[path].to(arriving.dtype)

    with _watched(model, probe.inputs, replace):
        found = logits(probe.tokens)
    worst = max(errors, key=lambda path: errors[path], default="")
    return Agreement(
        logits_error=relative_error(found, probe.logits),
        worst_error=errors.get(worst, 0.0),
        worst_layer=worst,
        greedy_tokens=probe.tokens.shape[1] - probe.prompt,
        greedy_equal=_equal_choices(found, probe),
        free_error=relative_error(free, probe.logits),
        free_equal=_equal_choices(free, probe),
    )


def relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖ in float64; infinite of another shape, or where one of them is not finite.

    Example:
        >>> relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
        0.1
    """
    if found.shape != expected.shape:
        return float("inf")
    expected = expected.double()
    error = (found.double() - expected).norm() / expected.norm().clamp(min=torch.finfo(torch.float64).tiny)
    return float(error) if error.isfinite() else float("inf")


def save_probe(probe: Probe, path: Path) -> None:
    """Write a probe; a tensor that reaches several layers is written once."""
    names: dict[int, str] = {}
    tensors = {"tokens": probe.tokens.contiguous(), "logits": probe.logits.contiguous()}
    said = {"prompt": str(probe.prompt)}
    for kind, found in (("inputs", probe.inputs), ("given", probe.given)):
        where = {layer: names.setdefault(x.data_ptr(), f"input.{len(names)}") for layer, x in found.items()}
        tensors |= {where[layer]: x.contiguous() for layer, x in found.items()}
        said[kind] = json.dumps(where)
    save_file(tensors, path, metadata=said)


def load_probe(path: Path) -> Probe:
    """Read what :func:`save_probe` wrote.

    Raises:
        OSError: the file cannot be opened.
        DataError: it is damaged.
    """
    with library_errors(), safe_open(path, framework="pt") as file:
        said = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- no mapping
    try:
        inputs, given = (
            {layer: tensors[name] for layer, name in parse_json(said[kind]).items()} for kind in ("inputs", "given")
        )
        prompt, tokens, logits = int(said["prompt"]), tensors["tokens"], tensors["logits"]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"{str(path)!r} is no probe that octavo wrote: {error!r}; export again") from error
    return Probe(tokens=tokens, prompt=prompt, logits=logits, inputs=inputs, given=given)


@contextmanager
def _watched(model: nn.Module, paths: Iterable[str], see: Callable[[str, Tensor], Tensor | None]) -> Iterator[None]:
    """Inside the block ``see`` is shown what reaches each layer, and may give it something else."""

    def hook(path: str) -> Any:
        def before(_: nn.Module, arguments: tuple[Any, ...]) -> Any:
            given = see(path, arguments[0])
            return None if given is None else (given, *arguments[1:])

        return before

    handles = [model.get_submodule(path).register_forward_pre_hook(hook(path)) for path in paths]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _equal_choices(logits: Tensor, probe: Probe) -> int:
    """At how many places of the continued text the next token is the reference's."""
    ours, theirs = (each[0, probe.prompt - 1 : -1].argmax(-1) for each in (logits, probe.logits))
    return int((ours == theirs).sum())
