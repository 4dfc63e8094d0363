"""Conversion of a model to an ONNX file: a copy in the graph's dtype, with linears as operators, is exported by torch.

``copy.deepcopy`` receives the converted layers in its memo, so each is replaced at every occurrence without copying its
weight, and tied parameters stay tied. The model itself is not changed.
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

from octavo.checkpoints.contents import nothing_in_fp8
from octavo.errors import ConfigError
from octavo.language_model import LanguageModel, LogitsModule
from octavo.models import Llama
from octavo.nn import Linear
from octavo.nn.fp8_weight import is_own_linear, runs_in_fp8
from octavo.onnx.decoder import CacheNames, GraphDecoder, attention_casts
from octavo.onnx.layers import HIGH_PRECISION, GraphLinear, LayerNote, graph_linear
from octavo.onnx.operators import translations

__all__ = ["Graph", "graph_of_decoder", "graph_of_module", "write_graph"]

BATCH, SEQUENCE, PAST = "batch", "sequence", "past"
FEATURES = 3  # largest rank of an input whose second dimension is a sequence, [B, T, K]; rank 4 is an image
LARGEST_PROTOBUF = 2**31 - 2**20  # bytes; a message is limited to 2 GiB, including names and shapes
RAISED = re.compile(r'raised this error:\s+File "[^"]*", line \d+, in (\w+)\s+([^#\n]+)')  # torch's line reference
UNFOLDED = ("Transpose", "QuantizeLinear", "DequantizeLinear")
Shapes = Mapping[int, str]  # dynamic dimension → its name


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Model prepared for export.

    Attributes:
        name: class of the original model.
        module: takes ``inputs`` as positional arguments.
        inputs: example inputs of one call.
        given: dtype of each input of the original model.
        names: names of the inputs, in order.
        shapes: dynamic dimensions of each input.
        outputs: names of the outputs.
        notes: notes on the linear layers.
        linears: converted layers by path in the model.
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
class _ConvertedLinears:
    """Converted linear layers by path, and notes on all linear layers."""

    converted: dict[str, GraphLinear]
    notes: list[LayerNote]


def graph_of_decoder(model: LanguageModel, dtype: torch.dtype, *, has_cache: bool, attention: Tensor | None) -> Graph:
    """Prepare a language model: token ids, and optionally a cache, to logits.

    Args:
        model: octavo's Llama, or a transformers model.
        dtype: of the graph.
        has_cache: add inputs and outputs for keys and values; octavo's Llama only.
        attention: token ids [B, T] to calibrate the operands of FP8 attention; None keeps attention in ``dtype``.

    Raises:
        ConfigError: a cache or FP8 attention requested for another model than octavo's Llama, or a layer that cannot be
            exported.
    """
    tokens = torch.zeros(2, 3, dtype=torch.long)
    if not isinstance(model.model, Llama):
        if has_cache or attention is not None:
            raise ConfigError(
                f"{model.source!r} is a {type(model.model).__name__}; a cache and attention in FP8 need octavo's own "
                "Llama (a run or a .gguf file); leave them out"
            )
        module, linears = _convert_linears(model.model, dtype)
        return _graph_of_tokens(model, LogitsModule(module), {"input_ids": tokens}, ("logits",), linears, dtype=dtype)
    copied, linears = _convert_linears(model.model, dtype)
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
    linears: _ConvertedLinears,
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
        linears=linears.converted,
        dtype=dtype,
    )


def graph_of_module(
    model: nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype, *, varying: tuple[Shapes, ...] | None = None
) -> Graph:
    """Prepare any module; floating inputs are cast to the graph's dtype.

    Args:
        model: converted.
        inputs: tensors of one call.
        dtype: of the graph.
        varying: for each input the names, "batch" or "sequence", of its dynamic dimensions; None makes the first a
            batch, and the second of token ids [B, T] and of features [B, T, K] a sequence.

    Raises:
        ConfigError: a layer that cannot be exported, missing or empty inputs, or invalid dimensions.
    """
    _check_inputs(inputs)
    shapes = tuple(_varying(each) for each in inputs) if varying is None else varying
    _check_varying(shapes, inputs)
    module, linears = _convert_linears(model, dtype)
    parameters = list(inspect.signature(model.forward).parameters.values())[: len(inputs)]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if len(parameters) < len(inputs) or any(each.kind not in positional for each in parameters):
        raise ConfigError(
            f"forward of this {type(model).__name__} has no name for each of {len(inputs)} inputs; give it one "
            "parameter for each tensor (no *args)"
        )
    names = tuple(each.name for each in parameters)
    cast_inputs = tuple(each.to(dtype) if each.is_floating_point() else each for each in inputs)
    with torch.no_grad():
        result = module(*cast_inputs)
    if isinstance(result, dict):
        raise ConfigError(f"this {type(model).__name__} returns a dict; a graph needs a tensor or a tuple of tensors")
    count = 1 if isinstance(result, Tensor) else len(result)
    outputs = ("output",) if count == 1 else tuple(f"output_{index}" for index in range(count))
    while set(outputs) & set(names):  # names in a graph must be unique
        outputs = tuple(f"{name}_" for name in outputs)
    return Graph(
        name=type(model).__name__,
        module=module.eval(),
        inputs=cast_inputs,
        given=tuple(each.dtype for each in inputs),
        names=names,
        shapes=shapes,
        outputs=outputs,
        notes=tuple(linears.notes),
        linears=linears.converted,
        dtype=dtype,
    )


def _check_inputs(inputs: object) -> None:
    if not isinstance(inputs, tuple) or not inputs or not all(isinstance(each, Tensor) for each in inputs):
        raise ConfigError("exporting a module needs the tensors of one call; give inputs=(tensor, …)")
    for each in inputs:
        if not each.numel():
            raise ConfigError(f"an input is {list(each.shape)}, which is empty; give the tensors of a real call")


def _check_varying(varying: tuple[Shapes, ...], inputs: tuple[Tensor, ...]) -> None:
    if len(varying) != len(inputs):
        raise ConfigError(f"varying has dimensions for {len(varying)} inputs, but there are {len(inputs)}")
    for shape, each in zip(varying, inputs, strict=True):
        for dimension, name in shape.items():
            if not 0 <= dimension < each.ndim or name not in (BATCH, SEQUENCE):
                raise ConfigError(
                    f"varying has {name!r} as dimension {dimension} of an input {list(each.shape)}; name one of its "
                    f"dimensions, from 0, {BATCH!r} or {SEQUENCE!r}"
                )


def _varying(tensor: Tensor) -> Shapes:
    """Default dynamic dimensions: the first two, except a floating tensor's last and an image's channels."""
    count = 1 if tensor.ndim > FEATURES else tensor.ndim - (1 if tensor.is_floating_point() else 0)
    return dict(enumerate((BATCH, SEQUENCE)[:count]))


def _convert_linears(model: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, _ConvertedLinears]:
    """Copy a model to ``dtype`` with octavo linears replaced by :class:`GraphLinear`."""
    linears, replaced = _ConvertedLinears(converted={}, notes=[]), {}
    for path, layer in model.named_modules():
        if runs_in_fp8(layer):
            if not is_own_linear(layer):
                raise ConfigError(
                    f"layer {path!r} is a {type(layer).__name__}; make it a layer for inference first "
                    "(octavo.convert_qat)"
                )
            linears.converted[path], note = graph_linear(layer, dtype, path)
            linears.notes.append(note)
            replaced[id(layer)] = linears.converted[path]
        elif isinstance(layer, nn.Linear):
            reason = "recipe bf16" if isinstance(layer, Linear) else "not converted"
            linears.notes.append(LayerNote(path=path, input=HIGH_PRECISION, weight=HIGH_PRECISION, reason=reason))
    if not replaced:
        raise ConfigError(nothing_in_fp8(model))
    copied = copy.deepcopy(model, dict(replaced)).requires_grad_(False)
    _narrow(copied, dtype)
    return copied, linears


def _narrow(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters to ``dtype``; buffers, such as tables of angles, do not change."""
    for parameter in model.parameters():  # converted layers have buffers only
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def write_graph(graph: Graph, path: Path, *, opset: int, external_data: bool) -> None:
    """Write the graph as ONNX; weights go to ``model.onnx.data`` if requested or if they exceed 2 GB.

    Raises:
        ConfigError: torch cannot export the module.
    """
    with _suppress_output(), torch.no_grad():
        try:
            program: Any = torch.onnx.export(
                graph.module,
                graph.inputs,
                dynamo=True,
                opset_version=opset,
                input_names=list(graph.names),
                output_names=list(graph.outputs),
                dynamic_shapes=_dynamic_shapes(graph),
                optimize=False,
                custom_translation_table=translations(opset),
                verbose=False,
            )
        except torch.onnx.OnnxExporterError as error:
            raise ConfigError(f"torch cannot export this {graph.name}{_reason(graph, error)}") from error
    _optimise(program.model)
    size = sum(value.const_value.nbytes for value in program.model.graph.initializers.values())
    program.save(str(path), external_data=external_data or size > LARGEST_PROTOBUF)


def _reason(graph: Graph, error: Exception) -> str:
    """Describe why torch cannot export a graph, and the remedy."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    cause = error.__cause__ or error
    if isinstance(cause, GuardOnDataDependentSymNode):
        place = RAISED.search(str(cause))
        where = f" ({place[1]}: {place[2].strip().rstrip(':')})" if place else ""
        return (
            f": its control flow depends on tensor values{where}, which a graph does not support; write a "
            "checkpoint, or remove the dependence from forward"
        )
    first = str(cause).strip().splitlines()[0]
    return (
        f" with dynamic dimensions {dict(zip(graph.names, graph.shapes, strict=True))}: {first.rstrip(':')}; "
        "set a module's dynamic dimensions with varying"
    )


def _optimise(model: Any) -> None:
    """Fold constants, merge common subexpressions, and remove the exporter's metadata, without folding weights.

    Folding would store a transposed copy of a head tied to its embedding, and stack traces contain paths of the
    exporting machine. The optimiser tries each pattern on each node, including constants, so it runs last.
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


def _dynamic_shapes(graph: Graph) -> tuple[Any, ...]:
    """Dynamic dimensions in the structure of forward's arguments, with the cache as one (``*past``)."""
    plain = [dict(shape) for name, shape in zip(graph.names, graph.shapes, strict=True) if not _is_cache(name)]
    cache = tuple(dict(shape) for name, shape in zip(graph.names, graph.shapes, strict=True) if _is_cache(name))
    return (*plain, cache) if cache else tuple(plain)


def _is_cache(name: str) -> bool:
    return name.startswith("past_key_values.")


@contextmanager
def _suppress_output() -> Iterator[None]:
    """Suppress the exporter's own output: deprecation warnings, missing optional libraries, partial graphs."""
    disabled_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        filtered: Any = _ThreadFilter(sys.stderr)
        with warnings.catch_warnings(), redirect_stderr(filtered):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled_level)


class _ThreadFilter:
    """Stream that drops text from the thread that created it; other threads, such as a progress bar's, still write.

    Args:
        stream: the wrapped stream.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        """Write text from other threads; drop the creating thread's."""
        return len(text) if threading.get_ident() == self._thread else int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
