"""Export of an FP8 model to a folder with a verified ONNX file (``export_onnx``).

| file              | content                                                                                    |
|-------------------|--------------------------------------------------------------------------------------------|
| model.onnx        | the graph with its weights                                                                 |
| model.onnx.data   | the weights, if they exceed 2 GB or with ``external_data``                                 |
| tokenizer.json    | of a language model                                                                        |
| report.json       | the layers, sizes and checks (:class:`OnnxReport`)                                         |
| TensorRT scripts  | on request (``tensorrt.py``)                                                               |
| octavo.sha256     | SHA-256 of all files (``octavo.checksums``)                                                |

The folder appears only after every check has passed.
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
from octavo.export.lockstep import relative_error
from octavo.files import claimed_folder, replacing_folder
from octavo.language_model import LanguageModel
from octavo.models import Llama
from octavo.nn.arguments import check_sizes
from octavo.numerics.cast_spec import check_member
from octavo.onnx.agreement import MOST_LAYER_ERROR, coarsest_dtype, layer_errors, lockstep_errors
from octavo.onnx.checks import MOST_ERROR, SIZES, check_engines, sample_inputs
from octavo.onnx.graph import PAST, SEQUENCE, Graph, graph_of_decoder, graph_of_module, write_graph
from octavo.onnx.lint import graph_bytes, lint
from octavo.onnx.report import OnnxReport
from octavo.onnx.tensorrt import MODEL, ShapeRange, shape_ranges, tensorrt_files
from octavo.onnx.tensorrt_rtx import BuildCheck, check_build
from octavo.quantization.calibration.observers import evaluating

if TYPE_CHECKING:
    from octavo.quantization import Calibration

__all__ = ["DTYPES", "OPSETS", "OnnxOptions", "check_packages", "export_onnx"]

OPSETS = (21, 23)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
REPORT, TOKENIZER, CALIBRATION = "report.json", "tokenizer.json", "calibration.json"
INSTALL = "pip install 'octavo[export]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxOptions:
    """Options of an ONNX export.

    Attributes:
        opset: 21, for TensorRT 10, or 23.
        dtype: of everything that is not FP8: "fp32", "fp16" or "bf16".
        kv_cache: add inputs and outputs for keys and values; octavo's Llama only.
        attention: token ids [B, T] to calibrate the operands of FP8 attention; None keeps attention in ``dtype``.
            Octavo's Llama only.
        tensorrt: write commands and a script to build an engine; if TensorRT-RTX is installed, also build one as a
            check.
        max_batch: largest batch of that engine; the default is 16.
        max_length: largest number of tokens; the default is 1,024 or the model's context, if smaller.
        external_data: store the weights in a separate file at any size.

    Raises:
        ConfigError: an unsupported opset or dtype, a size below 1, or engine sizes without ``tensorrt``.
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
        check_member("opset", self.opset, OPSETS)
        check_member("dtype", self.dtype, tuple(DTYPES))
        check_sizes(max_batch=self.max_batch, max_length=self.max_length)
        if not self.tensorrt and (self.max_batch, self.max_length) != (None, None):
            raise ConfigError("max_batch and max_length apply to TensorRT's engine; set tensorrt, or leave them out")


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
    """Export a converted or calibrated model to ONNX and verify the file.

    Codes and scales are the model's own. The model is not changed; it is exported and compared in evaluation mode.

    Args:
        model: a language model (token ids to logits), or any module.
        folder: new or empty.
        options: see :class:`OnnxOptions`.
        inputs: for a module, the tensors of one call.
        varying: for each input its dynamic dimensions, "batch" or "sequence". None: the first is a batch, the second of
            [B, T, K] and of token ids [B, T] a sequence; a floating vector and all other dimensions are static.
        calibration: source of the model's scales; its summary is written with TensorRT's scripts.
        on_step: called with a description of each step before it starts.

    Raises:
        ConfigError: a package is missing, the folder is not empty, or a layer cannot be exported.
        CheckpointError: the graph violates a rule of TensorRT or gives other results; no folder is left.

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
            report = _verify_file(model, graph, temporary / MODEL, options, on_step)
            if options.tensorrt:
                on_step("asking TensorRT-RTX")
                report = replace(report, build=_write_tensorrt(temporary, ranges, calibration))
            if isinstance(model, LanguageModel):
                model.tokenizer.save(str(temporary / TOKENIZER))
            report = replace(report, folder=folder, files=_file_names(temporary))
            (temporary / REPORT).write_text(json.dumps(report.to_record(), indent=2) + "\n", encoding="utf-8")
            write_sums(temporary)
    return report


def check_packages() -> None:
    """Check that the packages for an export are installed.

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
            raise ConfigError(
                "the inputs of a LanguageModel are token ids with dynamic sizes; leave inputs and varying out"
            )
        least = SIZES[SEQUENCE] + (SIZES[PAST] if options.kv_cache else 0)
        if model.context < least:
            raise ConfigError(
                f"this model reads at most {model.context} tokens, but checking a graph takes {least}; export a model "
                "with a longer context"
            )
        return graph_of_decoder(model, dtype, has_cache=options.kv_cache, attention=options.attention)
    if options.kv_cache or options.attention is not None:
        raise ConfigError("a cache and attention in FP8 need a LanguageModel; leave them out")
    return graph_of_module(model, inputs, dtype, varying=varying)


def _verify_file(
    model: LanguageModel | nn.Module, graph: Graph, path: Path, options: OnnxOptions, on_step: Callable[[str], None]
) -> OnnxReport:
    """Verify the file and create the report; raises CheckpointError if a check fails."""
    import onnx

    on_step("checking the graph")
    vocabulary = _vocabulary(model) if isinstance(model, LanguageModel) else None
    inputs = sample_inputs(graph, vocabulary=vocabulary)
    inner = model.model if isinstance(model, LanguageModel) else model
    coarsest = coarsest_dtype(inner, graph, lambda: _run_model(model, graph, inputs))
    layer_error = _worst_layer(model, graph, inputs, coarsest)
    lockstep_error = _worst_lockstep(model, graph, inputs, coarsest)
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        message = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"the graph is not valid ONNX, opset {options.opset}, {options.dtype}: {message}"
        ) from error
    loaded = onnx.load(path)
    faults = lint(loaded, weights={path: linear.codes for path, linear in graph.linears.items()})
    if faults:
        raise CheckpointError(f"the graph violates {len(faults)} rules of TensorRT; the first: {faults[0]}")
    sizes = graph_bytes(loaded)
    del loaded
    on_step("running it in onnxruntime and in ONNX's reference")
    engines = check_engines(graph, path, inputs)
    for each in engines:
        if not each.passed:
            raise CheckpointError(f"the written graph gives other results than torch: {each}")
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
        model_error=relative_error(_run_graph(model, graph, inputs), _run_model(model, graph, inputs)),
        engines=engines,
    )


def _worst_layer(
    model: LanguageModel | nn.Module, graph: Graph, inputs: tuple[Tensor, ...], coarsest: torch.dtype
) -> float:
    """Largest error of the graph's layers in torch; raises CheckpointError if it is out of tolerance."""
    inner = model.model if isinstance(model, LanguageModel) else model
    errors = layer_errors(inner, graph, lambda: _run_model(model, graph, inputs))
    for path in graph.linears:
        if path not in errors:
            raise CheckpointError(
                f"layer {path!r} is not called with these inputs, so it cannot be verified; give inputs that reach it, "
                "or leave it out of the conversion (skip)"
            )
    path, error = max(errors.items(), key=lambda item: item[1])
    if error > MOST_LAYER_ERROR[coarsest]:
        raise CheckpointError(
            f"layer {path!r} differs by {error:.1e} (relative) from the model's in a graph of {graph.dtype}"
        )
    return error


def _worst_lockstep(
    model: LanguageModel | nn.Module, graph: Graph, inputs: tuple[Tensor, ...], coarsest: torch.dtype
) -> float:
    """Largest lockstep error between the layers; raises CheckpointError if it is out of tolerance."""
    inner = model.model if isinstance(model, LanguageModel) else model
    errors = lockstep_errors(
        inner, graph, lambda: _run_model(model, graph, inputs), lambda: _run_graph(model, graph, inputs)
    )
    path, error = max(errors.items(), key=lambda item: item[1])
    if error > MOST_ERROR[coarsest]:
        where = f"the input of layer {path!r}" if path else "the result"
        raise CheckpointError(f"{where} differs by {error:.1e} (relative) from the model's in a graph of {graph.dtype}")
    return error


@torch.no_grad()
def _run_graph(model: LanguageModel | nn.Module, graph: Graph, inputs: tuple[Tensor, ...]) -> Tensor:
    """First output of the graph's torch module, with an empty cache, as the model has none."""
    args = (inputs[0], *(past[:, :, :0] for past in inputs[1:])) if isinstance(model, LanguageModel) else inputs
    return _first(graph.module(*args))


@torch.no_grad()
def _run_model(model: LanguageModel | nn.Module, graph: Graph, inputs: tuple[Tensor, ...]) -> Tensor:
    """First output of the model for a graph's inputs, cast to their original dtypes."""
    if isinstance(model, LanguageModel):
        return model.logits(inputs[0])
    return _first(model(*(each.to(dtype) for each, dtype in zip(inputs, graph.given, strict=True))))


def _first(result: Any) -> Tensor:
    first: Tensor = result if isinstance(result, Tensor) else result[0]
    return first


def _vocabulary(model: LanguageModel) -> int:
    inner: Any = model.model
    return int((inner.model.embed_tokens if isinstance(inner, Llama) else inner.get_input_embeddings()).num_embeddings)


def _ranges(model: LanguageModel | nn.Module, graph: Graph, options: OnnxOptions) -> tuple[ShapeRange, ...]:
    context = model.context if isinstance(model, LanguageModel) else None
    return shape_ranges(graph, context=context, max_batch=options.max_batch, max_length=options.max_length)


def _write_tensorrt(folder: Path, ranges: tuple[ShapeRange, ...], calibration: "Calibration | None") -> BuildCheck:
    """Build with TensorRT-RTX and write the scripts; raises CheckpointError if the build fails."""
    build = check_build(folder / MODEL, ranges)
    if build.problem:
        raise CheckpointError(f"{build.engine} rejects the graph: {build.problem}")
    for name, text in tensorrt_files(ranges).items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    if calibration is not None:
        summary: dict[str, Any] = {"recipe": calibration.recipe.name, **calibration.to_record()}
        (folder / CALIBRATION).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return build


def _file_names(folder: Path) -> tuple[str, ...]:
    return (*sorted(path.name for path in folder.iterdir()), REPORT, SUMS)
