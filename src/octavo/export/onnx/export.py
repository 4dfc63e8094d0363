"""``export_onnx``: a model in FP8 as a checked ONNX file in a folder of its own.

| file              | content                                                                                    |
|-------------------|--------------------------------------------------------------------------------------------|
| model.onnx        | the graph, and its weights                                                                 |
| model.onnx.data   | the weights, where they are above 2 GB or ``external_data`` asks for it                    |
| tokenizer.json    | of a language model                                                                        |
| report.json       | the layers, bytes and checks (:class:`OnnxReport`)                                         |
| tensorrt scripts  | where asked for (``tensorrt.py``)                                                          |
| octavo.sha256     | the SHA-256 of all of them (``octavo.checksums``)                                          |

The folder is there when every check has passed, and not before.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from octavo.checksums import SUMS, write_sums
from octavo.errors import CheckpointError, ConfigError
from octavo.export.agreement import relative_error
from octavo.export.onnx.agreement import MOST_LAYER_ERROR, coarsest_dtype, layer_errors, lockstep_errors
from octavo.export.onnx.checks import MOST_ERROR, SIZES, check_engines, sample_inputs
from octavo.export.onnx.graph import PAST, SEQUENCE, Graph, graph_of_decoder, graph_of_module, write_graph
from octavo.export.onnx.lint import graph_bytes, lint
from octavo.export.onnx.report import OnnxReport
from octavo.export.onnx.tensorrt import MODEL, ShapeRange, shape_ranges, tensorrt_files
from octavo.export.onnx.tensorrt_rtx import BuildCheck, check_build
from octavo.files import claimed_folder, replacing_folder
from octavo.language_model import LanguageModel
from octavo.models import Llama
from octavo.nn.arguments import check_sizes
from octavo.quantization.calibration.observing import evaluating

if TYPE_CHECKING:
    from octavo.quantization import Calibration

__all__ = ["DTYPES", "OPSETS", "OnnxOptions", "check_packages", "export_onnx"]

OPSETS = (21, 23)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
REPORT, TOKENIZER, CALIBRATION = "report.json", "tokenizer.json", "calibration.json"
INSTALL = "pip install 'octavo[export]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxOptions:
    """How a graph is written.

    Attributes:
        opset: 21, which TensorRT 10 reads, or 23.
        dtype: of everything that is not FP8: "fp32", "fp16" or "bf16".
        kv_cache: inputs and outputs for keys and values; octavo's Llama only.
        attention: token ids [B, T] to take the scales of attention's operands from, which are FP8 then; None leaves
            attention in ``dtype``. Octavo's Llama only.
        tensorrt: write the commands and the script that build an engine; where TensorRT-RTX is installed, build one
            as a check.
        max_batch: the largest batch of that engine; None takes 16.
        max_length: the most tokens of a text in it; None takes 1,024, or the model's context where that is less.
        external_data: keep the weights in a file of their own, whatever their size.

    Raises:
        ConfigError: another opset or dtype, a size below 1, or sizes of an engine without ``tensorrt``.
    """

    opset: int = 21
    dtype: str = "fp32"
    kv_cache: bool = False
    attention: Tensor | None = None
    tensorrt: bool = False
    max_batch: int | None = None
    max_length: int | None = None
    external_data: bool = False

    def __post_init__(self) -> None:
        if self.opset not in OPSETS:
            raise ConfigError(f"opset must be one of {', '.join(map(str, OPSETS))}, not {self.opset!r}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        check_sizes(max_batch=self.max_batch, max_length=self.max_length)
        if not self.tensorrt and (self.max_batch, self.max_length) != (None, None):
            raise ConfigError("max_batch and max_length are of TensorRT's engine; ask for tensorrt, or leave them out")


def export_onnx(
    model: LanguageModel | nn.Module,
    folder: str | Path,
    *,
    options: OnnxOptions | None = None,
    inputs: tuple[Tensor, ...] = (),
    varying: tuple[Mapping[int, str], ...] | None = None,
    calibration: "Calibration | None" = None,
    on_step: Callable[[str], None] = lambda _: None,
) -> OnnxReport:
    """Write a model whose layers octavo has converted or calibrated as ONNX, and check what was written.

    Codes and scales are those that the model multiplies. The model is not changed; it is exported, and compared, as it
    computes in evaluation mode.

    Args:
        model: a language model (token ids to logits), or any module.
        folder: new or empty.
        options: see :class:`OnnxOptions`.
        inputs: for a module, the tensors of one call.
        varying: for each of them the dimensions that may vary, "batch" or "sequence". None: the first is a batch; the
            second of [B, T, K] and of token ids [B, T] a sequence; a floating vector, and all else, keep their sizes.
        calibration: whose scales the model has; its summary is written beside TensorRT's scripts.
        on_step: told what is being done, before it is.

    Raises:
        ConfigError: a package is missing, the folder is not empty, or a layer has no form in a graph.
        CheckpointError: what was written breaks a rule of TensorRT's or computes something else; no folder is left.

    Example:
        >>> import tempfile, octavo
        >>> model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> _ = octavo.convert(model, "tensorwise")
        >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +SKIP
        ...     print(export_onnx(model, f"{folder}/onnx", inputs=(torch.randn(2, 16),)))
        2 of 2 linear layers in FP8; opset 21, fp32; …
    """
    check_packages()
    options, folder = options or OnnxOptions(), Path(folder)
    with claimed_folder(folder), evaluating(model.model if isinstance(model, LanguageModel) else model):
        on_step("casting weights")
        graph = _graph(model, options, inputs, varying)
        ranges = _ranges(model, graph, options)
        with replacing_folder(folder) as temporary:
            on_step("tracing the graph")
            write_graph(graph, temporary / MODEL, opset=options.opset, external_data=options.external_data)
            report = _checked(model, graph, temporary / MODEL, options, on_step)
            if options.tensorrt:
                on_step("asking TensorRT-RTX")
                report = replace(report, build=_for_tensorrt(temporary, ranges, calibration))
            if isinstance(model, LanguageModel):
                model.tokenizer.save(str(temporary / TOKENIZER))
            report = replace(report, folder=folder, files=_names(temporary))
            (temporary / REPORT).write_text(json.dumps(report.to_record(), indent=2) + "\n", encoding="utf-8")
            write_sums(temporary)
    return report


def check_packages() -> None:
    """Refuse to begin without what an export needs.

    Raises:
        ConfigError: onnx, onnxscript or onnxruntime is not installed.
    """
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"export to ONNX needs {error.name}, which is not installed; {INSTALL}") from error


def _graph(
    model: LanguageModel | nn.Module,
    options: OnnxOptions,
    inputs: tuple[Tensor, ...],
    varying: tuple[Mapping[int, str], ...] | None,
) -> Graph:
    dtype = DTYPES[options.dtype]
    if isinstance(model, LanguageModel):
        if inputs != () or varying is not None:
            raise ConfigError("a LanguageModel takes token ids, which vary as they may; leave inputs and varying out")
        least = SIZES[SEQUENCE] + (SIZES[PAST] if options.kv_cache else 0)
        if model.context < least:
            raise ConfigError(
                f"this model reads at most {model.context} tokens, and a graph is checked with {least}; one with so "
                "short a context is not exported"
            )
        return graph_of_decoder(model, dtype, has_cache=options.kv_cache, attention=options.attention)
    if options.kv_cache or options.attention is not None:
        raise ConfigError("a cache and attention in FP8 are exported of a LanguageModel; leave them out")
    return graph_of_module(model, inputs, dtype, varying=varying)


def _checked(
    model: LanguageModel | nn.Module, graph: Graph, path: Path, options: OnnxOptions, on_step: Callable[[str], None]
) -> OnnxReport:
    """The report; raises CheckpointError where something speaks against the file."""
    import onnx

    on_step("checking the graph")
    vocabulary = _vocabulary(model) if isinstance(model, LanguageModel) else None
    given = sample_inputs(graph, vocabulary=vocabulary)
    inner = model.model if isinstance(model, LanguageModel) else model
    coarsest = coarsest_dtype(inner, graph, lambda: _source(model, graph, given))
    layer_error = _worst_layer(model, graph, given, coarsest)
    lockstep_error = _worst_place(model, graph, given, coarsest)
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        said = str(error).strip().splitlines()[0]
        raise CheckpointError(f"the graph is no valid ONNX, opset {options.opset}, {options.dtype}: {said}") from error
    loaded = onnx.load(path)
    faults = lint(loaded, weights={path: linear.codes for path, linear in graph.linears.items()})
    if faults:
        raise CheckpointError(f"the graph breaks {len(faults)} rules of TensorRT's; the first: {faults[0]}")
    sizes = graph_bytes(loaded)
    del loaded
    on_step("running it in onnxruntime and in ONNX's reference")
    engines = check_engines(graph, path, given)
    for each in engines:
        if not each.passed:
            raise CheckpointError(f"the written graph does not compute what torch does: {each}")
    return OnnxReport(
        folder=path.parent,
        opset=options.opset,
        dtype=options.dtype,
        layers=graph.notes,
        bytes=sizes,
        file_bytes=sum(each.stat().st_size for each in path.parent.glob(f"{MODEL}*")),
        compared_in=str(coarsest).removeprefix("torch."),
        layer_error=layer_error,
        lockstep_error=lockstep_error,
        model_error=relative_error(_torchs(model, graph, given), _source(model, graph, given)),
        engines=engines,
    )


def _worst_layer(
    model: LanguageModel | nn.Module, graph: Graph, inputs: tuple[Tensor, ...], coarsest: torch.dtype
) -> float:
    """How far the graph's layers are from the model's in torch; raises CheckpointError where one is too far."""
    inner = model.model if isinstance(model, LanguageModel) else model
    errors = layer_errors(inner, graph, lambda: _source(model, graph, inputs))
    for path in graph.linears:
        if path not in errors:
            raise CheckpointError(
                f"layer {path!r} is not called with these inputs, so nothing says whether it is right; give inputs "
                "that reach it, or leave it out of the conversion (skip)"
            )
    path, error = max(errors.items(), key=lambda item: item[1])
    if error > MOST_LAYER_ERROR[coarsest]:
        raise CheckpointError(f"layer {path!r} is {error:.1e} (relative) from the model's in a graph of {graph.dtype}")
    return error


def _worst_place(
    model: LanguageModel | nn.Module, graph: Graph, inputs: tuple[Tensor, ...], coarsest: torch.dtype
) -> float:
    """How far they are between the layers, in lockstep; raises CheckpointError where it is too far."""
    inner = model.model if isinstance(model, LanguageModel) else model
    errors = lockstep_errors(inner, graph, lambda: _source(model, graph, inputs), lambda: _torchs(model, graph, inputs))
    path, error = max(errors.items(), key=lambda item: item[1])
    if error > MOST_ERROR[coarsest]:
        where = f"what reaches layer {path!r}" if path else "the result"
        raise CheckpointError(f"{where} is {error:.1e} (relative) from the model's in a graph of {graph.dtype}")
    return error


@torch.no_grad()
def _torchs(model: LanguageModel | nn.Module, graph: Graph, inputs: tuple[Tensor, ...]) -> Tensor:
    """The first output of the graph's form in torch; a cache is empty for that, as the model has none."""
    given = (inputs[0], *(past[:, :, :0] for past in inputs[1:])) if isinstance(model, LanguageModel) else inputs
    return _first(graph.module(*given))


@torch.no_grad()
def _source(model: LanguageModel | nn.Module, graph: Graph, inputs: tuple[Tensor, ...]) -> Tensor:
    """What the model makes of a graph's inputs, in the dtypes that it was given: its first output."""
    if isinstance(model, LanguageModel):
        return model.logits(inputs[0])
    return _first(model(*(each.to(dtype) for each, dtype in zip(inputs, graph.given, strict=True))))


def _first(made: Any) -> Tensor:
    first: Tensor = made if isinstance(made, Tensor) else made[0]
    return first


def _vocabulary(model: LanguageModel) -> int:
    inner: Any = model.model
    return int((inner.model.embed_tokens if isinstance(inner, Llama) else inner.get_input_embeddings()).num_embeddings)


def _ranges(model: LanguageModel | nn.Module, graph: Graph, options: OnnxOptions) -> tuple[ShapeRange, ...]:
    context = model.context if isinstance(model, LanguageModel) else None
    return shape_ranges(graph, context=context, max_batch=options.max_batch, max_length=options.max_length)


def _for_tensorrt(folder: Path, ranges: tuple[ShapeRange, ...], calibration: "Calibration | None") -> BuildCheck:
    """What TensorRT-RTX made of the graph; scripts are beside it then. Raises CheckpointError where it is refused."""
    found = check_build(folder / MODEL, ranges)
    if found.problem:
        raise CheckpointError(f"{found.engine} refuses the graph: {found.problem}")
    for name, text in tensorrt_files(ranges).items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    if calibration is not None:
        summary: dict[str, Any] = {"recipe": calibration.recipe.name, **calibration.to_record()}
        (folder / CALIBRATION).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return found


def _names(folder: Path) -> tuple[str, ...]:
    return (*sorted(path.name for path in folder.iterdir()), REPORT, SUMS)
