"""From a model to an ONNX file: a copy in the graph's dtype, its linears as operators, ``torch.onnx.export``.

The copy is made by ``copy.deepcopy`` with the converted layers already in its memo: each is replaced wherever it
stands, nothing of its weight is copied, and tied parameters stay tied. The model itself is not changed.
"""

import copy
import inspect
import logging
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError
from octavo.export.onnx.decoder import CacheNames, GraphDecoder, attention_casts
from octavo.export.onnx.layers import HIGH_PRECISION, GraphLinear, LayerNote, graph_linear
from octavo.export.onnx.operators import translations
from octavo.interchange.contents import nothing_in_fp8
from octavo.language_model import LanguageModel
from octavo.models import Llama
from octavo.nn import Linear
from octavo.nn.fp8_weight import is_own_linear

__all__ = ["Graph", "graph_of_decoder", "graph_of_module", "write_graph"]

BATCH, SEQUENCE, PAST = "batch", "sequence", "past"
FEATURES = 3  # the most dimensions of an input whose second one is a sequence: [B, T, K]; a fourth makes it an image
LARGEST_PROTOBUF = 2**31 - 2**20  # bytes; a message of 2 GiB cannot be written, and names and shapes need some
RAISED = re.compile(r'raised this error:\s+File "[^"]*", line \d+, in (\w+)\s+([^#\n]+)')  # how torch names a line
UNFOLDED = ("Transpose", "QuantizeLinear", "DequantizeLinear")
Shapes = Mapping[int, str]  # dimension → its name, of those that may vary


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A model in the form that is exported.

    Attributes:
        name: the model's class, as its user knows it.
        module: takes ``inputs`` as positional arguments.
        inputs: of one call.
        given: the dtype of each input as the model takes it.
        names: of the input tensors, in order.
        shapes: of each input tensor, the dimensions that may vary.
        outputs: names.
        notes: of the linear layers.
        linears: those that are operators now, by their paths in the model.
        dtype: of the graph's tensors.
    """

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    given: tuple[torch.dtype, ...]
    names: tuple[str, ...]
    shapes: tuple[Shapes, ...]
    outputs: tuple[str, ...]
    notes: tuple[LayerNote, ...]
    linears: Mapping[str, GraphLinear]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class _Linears:
    """What became of a model's linear layers: the operators by path, and a note of each."""

    made: dict[str, GraphLinear]
    notes: list[LayerNote]


def graph_of_decoder(model: LanguageModel, dtype: torch.dtype, *, has_cache: bool, attention: Tensor | None) -> Graph:
    """A language model's graph: token ids, and perhaps a cache, to logits.

    Args:
        model: octavo's Llama, or one of transformers'.
        dtype: of the graph.
        has_cache: with inputs and outputs for keys and values; octavo's Llama only.
        attention: token ids [B, T] that the scales of attention's operands are taken from; None leaves it in ``dtype``.

    Raises:
        ConfigError: a cache or attention in FP8 of a model that is not octavo's Llama; a layer without such a form.
    """
    tokens = torch.zeros(2, 3, dtype=torch.long)
    if not isinstance(model.model, Llama):
        if has_cache or attention is not None:
            raise ConfigError(
                f"{model.source!r} is a {type(model.model).__name__}; a cache and attention in FP8 are exported of "
                "octavo's own Llama (a run or a .gguf file); leave them out"
            )
        module, linears = _with_graph_linears(model.model, dtype)
        return _graph_of_tokens(model, _Logits(module), {"input_ids": tokens}, ("logits",), linears, dtype=dtype)
    copied, linears = _with_graph_linears(model.model, dtype)
    assert isinstance(copied, Llama)
    decoder = GraphDecoder(copied, has_cache=has_cache)
    if attention is not None:
        decoder.attention_casts = attention_casts(decoder, attention, dtype)
    config = model.model.config
    layers = config.num_layers if has_cache else 0
    past = [torch.zeros(2, config.num_kv_heads, 4, config.head_dim, dtype=dtype) for _ in range(2 * layers)]
    names, outputs = ("input_ids", *CacheNames.past(layers)), ("logits", *CacheNames.present(layers))
    return _graph_of_tokens(
        model, decoder, dict(zip(names, (tokens, *past), strict=True)), outputs, linears, dtype=dtype
    )


def _graph_of_tokens(
    model: LanguageModel,
    module: nn.Module,
    inputs: dict[str, Tensor],
    outputs: tuple[str, ...],
    linears: _Linears,
    *,
    dtype: torch.dtype,
) -> Graph:
    return Graph(
        name=type(model.model).__name__,
        module=module.eval(),
        inputs=tuple(inputs.values()),
        given=tuple(tensor.dtype for tensor in inputs.values()),
        names=tuple(inputs),
        shapes=tuple({0: BATCH, 2: PAST} if _is_cache(name) else {0: BATCH, 1: SEQUENCE} for name in inputs),
        outputs=outputs,
        notes=tuple(linears.notes),
        linears=linears.made,
        dtype=dtype,
    )


def graph_of_module(
    model: nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype, *, varying: tuple[Shapes, ...] | None = None
) -> Graph:
    """Any module's graph; floating inputs are taken in the graph's dtype.

    Args:
        model: converted.
        inputs: the tensors of one call.
        dtype: of the graph.
        varying: for each input the names, "batch" or "sequence", of the dimensions that may vary; None takes the first
            as a batch, and the second of token ids [B, T] and of features [B, T, K] as a sequence.

    Raises:
        ConfigError: a layer without such a form, no inputs or empty ones, or dimensions that they do not have.
    """
    _check_inputs(inputs)
    shapes = tuple(_varying(each) for each in inputs) if varying is None else varying
    _check_varying(shapes, inputs)
    module, linears = _with_graph_linears(model, dtype)
    parameters = list(inspect.signature(model.forward).parameters.values())[: len(inputs)]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if len(parameters) < len(inputs) or any(each.kind not in positional for each in parameters):
        raise ConfigError(
            f"forward of this {type(model).__name__} has no name for each of {len(inputs)} inputs; give it one "
            "parameter for each tensor (no *args)"
        )
    names = tuple(each.name for each in parameters)
    given = tuple(each.to(dtype) if each.is_floating_point() else each for each in inputs)
    with torch.no_grad():
        made = module(*given)
    if isinstance(made, dict):
        raise ConfigError(f"this {type(model).__name__} gives a dict; a graph gives a tensor or a tuple of them")
    count = 1 if isinstance(made, Tensor) else len(made)
    outputs = ("output",) if count == 1 else tuple(f"output_{index}" for index in range(count))
    while set(outputs) & set(names):  # a graph has one name for one tensor
        outputs = tuple(f"{name}_" for name in outputs)
    return Graph(
        name=type(model).__name__,
        module=module.eval(),
        inputs=given,
        given=tuple(each.dtype for each in inputs),
        names=names,
        shapes=shapes,
        outputs=outputs,
        notes=tuple(linears.notes),
        linears=linears.made,
        dtype=dtype,
    )


def _check_inputs(inputs: object) -> None:
    if not isinstance(inputs, tuple) or not inputs or not all(isinstance(each, Tensor) for each in inputs):
        raise ConfigError("a module is exported with the tensors of one call; give inputs=(tensor, …)")
    for each in inputs:
        if not each.numel():
            raise ConfigError(f"an input is {list(each.shape)}, which is empty; give the tensors of a real call")


def _check_varying(varying: tuple[Shapes, ...], inputs: tuple[Tensor, ...]) -> None:
    if len(varying) != len(inputs):
        raise ConfigError(f"varying names the dimensions of {len(varying)} inputs, and there are {len(inputs)}")
    for shape, each in zip(varying, inputs, strict=True):
        for dimension, name in shape.items():
            if not 0 <= dimension < each.ndim or name not in (BATCH, SEQUENCE):
                raise ConfigError(
                    f"varying has {name!r} as dimension {dimension} of an input {list(each.shape)}; name one of its "
                    f"dimensions, from 0, {BATCH!r} or {SEQUENCE!r}"
                )


def _varying(tensor: Tensor) -> Shapes:
    """Batch and sequence: the first two dimensions, but not a floating tensor's last one, nor an image's channels."""
    count = 1 if tensor.ndim > FEATURES else tensor.ndim - (1 if tensor.is_floating_point() else 0)
    return dict(enumerate((BATCH, SEQUENCE)[:count]))


class _Logits(nn.Module):
    """One of transformers' models as token ids → logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits


def _with_graph_linears(model: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, _Linears]:
    """A copy in ``dtype`` whose octavo linears are :class:`GraphLinear`, and what became of every linear."""
    linears, replaced = _Linears(made={}, notes=[]), {}
    for path, layer in model.named_modules():
        if isinstance(layer, Linear) and not (layer.recipe.is_high_precision and layer.held is None):
            if not is_own_linear(layer):
                raise ConfigError(
                    f"layer {path!r} is a {type(layer).__name__}; make it a layer for inference first "
                    "(octavo.convert_qat)"
                )
            linears.made[path], note = graph_linear(layer, dtype, path)
            linears.notes.append(note)
            replaced[id(layer)] = linears.made[path]
        elif isinstance(layer, nn.Linear):
            why = "recipe bf16" if isinstance(layer, Linear) else "not converted"
            linears.notes.append(LayerNote(path=path, input=HIGH_PRECISION, weight=HIGH_PRECISION, reason=why))
    if not replaced:
        raise ConfigError(nothing_in_fp8(model))
    copied = copy.deepcopy(model, dict(replaced)).requires_grad_(False)
    _narrow(copied, dtype)
    return copied, linears


def _narrow(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters in ``dtype``; buffers, such as tables of angles, stay as they are."""
    for parameter in model.parameters():  # operators have none
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def write_graph(graph: Graph, path: Path, *, opset: int, external_data: bool) -> None:
    """Write the graph as ONNX, its weights beside it (``model.onnx.data``) if asked or if it is above 2 GB.

    Raises:
        ConfigError: torch cannot export the module.
    """
    with _quiet(), torch.no_grad():
        try:
            program: Any = torch.onnx.export(
                graph.module,
                graph.inputs,
                dynamo=True,
                opset_version=opset,
                input_names=list(graph.names),
                output_names=list(graph.outputs),
                dynamic_shapes=_nested(graph),
                optimize=False,
                custom_translation_table=translations(opset),
                verbose=False,
            )
        except torch.onnx.OnnxExporterError as error:
            raise ConfigError(f"torch cannot export this {graph.name}{_reason(graph, error)}") from error
    _tidy(program.model)
    size = sum(value.const_value.nbytes for value in program.model.graph.initializers.values())
    program.save(str(path), external_data=external_data or size > LARGEST_PROTOBUF)


def _reason(graph: Graph, error: Exception) -> str:
    """Why torch cannot export a graph, and what to do."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    cause = error.__cause__ or error
    if isinstance(cause, GuardOnDataDependentSymNode):
        place = RAISED.search(str(cause))
        where = f" ({place[1]}: {place[2].strip().rstrip(':')})" if place else ""
        return (
            f": what it does depends on the numbers in a tensor{where}, and a graph does the same whatever they are; "
            "write a checkpoint, or let forward decide without them"
        )
    first = str(cause).strip().splitlines()[0]
    return (
        f", whose inputs are to vary as {dict(zip(graph.names, graph.shapes, strict=True))}: {first.rstrip(':')}; "
        "varying says which of a module's dimensions do"
    )


def _tidy(model: Any) -> None:
    """Fold constants and share what is computed twice; leave weights as they are, and drop the exporter's notes.

    A transposed copy of a head that is tied to its embedding would double its bytes, and stack traces name the paths of
    the machine that exported. The optimizer tries each of its patterns on each node, constants too, which takes it
    longest; so it is given what is left of them.
    """
    from onnx_ir.passes import common
    from onnxscript import optimizer

    def should_fold(node: Any) -> bool | None:
        return False if node.op_type in UNFOLDED else None

    optimizer.fold_constants_ir(model, should_fold=should_fold)
    for tidy in (
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
    ):
        tidy(model)
    optimizer.optimize_ir(model, should_fold=should_fold)
    common.ClearMetadataAndDocStringPass()(model)


def _nested(graph: Graph) -> tuple[Any, ...]:
    """The varying dimensions in the structure of forward's arguments, where the cache is one (``*past``)."""
    plain = [dict(shape) for name, shape in zip(graph.names, graph.shapes, strict=True) if not _is_cache(name)]
    cache = tuple(dict(shape) for name, shape in zip(graph.names, graph.shapes, strict=True) if _is_cache(name))
    return (*plain, cache) if cache else tuple(plain)


def _is_cache(name: str) -> bool:
    return name.startswith("past_key_values.")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says of itself: deprecations in torch, libraries that it looked for, half a graph."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        silent: Any = _Silent(sys.stderr)
        with warnings.catch_warnings(), redirect_stderr(silent):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class _Silent:
    """A stream without what the thread that made this writes; a progress bar's goes on.

    Args:
        stream: whose every other attribute it has.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        """Of another thread only."""
        return len(text) if threading.get_ident() == self._thread else int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
