"""Verification of an exported graph in two engines, compared with torch and octavo's casts.

| engine                       | purpose                                                                            |
|------------------------------|------------------------------------------------------------------------------------|
| onnxruntime, on the CPU      | the file loads and runs in a deployed engine, without bfloat16. Its Q/DQ fusions,  |
|                              | which support only INT8, are off (``session.disable_quant_qdq``)                   |
| ONNX's ReferenceEvaluator    | the semantics of the standard, for all operators and dtypes                        |

Shapes differ from those used in tracing. At every QuantizeLinear the input tensor, the encode scale and the codes are
read out: the codes must be bitwise those of ``octavo.numerics`` for that tensor and scale, and the scale that of the
corresponding layer: its constant, or the one that octavo computes from the tensor.

Results are compared with torch's, as ‖difference‖ / ‖torch's‖, in two ways. Another summation order changes the last
digit of FP32, which eventually moves a value across a tie between two codes, 6 % apart, and later layers amplify it.
That is no error of the graph. Torch therefore runs again *with the engine's codes*: the remaining difference is the
engine's arithmetic, which must be small. The free-running difference is reported too.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.export.lockstep import relative_error
from octavo.formats import E4M3
from octavo.numerics.cast import cast_nearest
from octavo.onnx.casts import RecordedCast, ReplayCodes, match_nodes, record_casts
from octavo.onnx.graph import BATCH, PAST, SEQUENCE, Graph

__all__ = ["MOST_ERROR", "SIZES", "EngineCheck", "check_engines", "sample_inputs"]

# With the same codes: about a hundred times the rounding of 2^-24, 2^-11 and 2^-8.
MOST_ERROR = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
SIZES = {BATCH: 3, SEQUENCE: 7, PAST: 5}  # different from those in torch.export
PROBE = "probe.onnx"
Feeds = Mapping[str, Any]
Results = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCheck:
    """Result of one engine.

    Attributes:
        engine: name and version.
        skipped: reason why it did not run; empty if it did.
        casts: number of QuantizeLinear nodes.
        codes: number of compared codes.
        wrong_codes: number of codes that differ from octavo's.
        wrong_scales: number of scales that differ from their layer's.
        error: ‖result - torch's‖ / ‖torch's‖ with the engine's codes, for the worst output.
        allowed: tolerance of ``error``.
        free_error: the same with torch's own codes.
        choices: rows of the first output, such as next tokens.
        same_choices: number of rows with the same argmax as torch's, with the engine's codes.
    """

    engine: str
    skipped: str = ""
    casts: int = 0
    codes: int = 0
    wrong_codes: int = 0
    wrong_scales: int = 0
    error: float = 0.0
    allowed: float = 0.0
    free_error: float = 0.0
    choices: int = 0
    same_choices: int = 0

    @property
    def passed(self) -> bool:
        """True if the engine was skipped or found no error."""
        return bool(self.skipped) or (not self.wrong_codes and not self.wrong_scales and self.error <= self.allowed)

    def __str__(self) -> str:
        if self.skipped:
            return f"{self.engine}: not run: {self.skipped}"
        return (
            f"{self.engine}: {self.casts} casts, {self.wrong_codes} of {self.codes} codes and {self.wrong_scales} "
            f"scales are not octavo's; relative error with the same codes {self.error:.1e} (at most "
            f"{self.allowed:.0e}), free-running {self.free_error:.1e}"
        )


@dataclass(frozen=True, slots=True)
class _CastNames:
    """Names of the values of one QuantizeLinear."""

    x: str
    encode_scale: str
    codes: str


def sample_inputs(graph: Graph, *, vocabulary: int | None) -> tuple[Tensor, ...]:
    """Deterministic inputs with other shapes than in tracing.

    Args:
        graph: the exported graph.
        vocabulary: number of token ids; None repeats the first element of the graph's own inputs in each dynamic
            dimension.
    """
    if vocabulary is None:
        pairs = zip(graph.inputs, graph.shapes, strict=True)
        return tuple(_one_more(each, varying) for each, varying in pairs)
    generator = torch.Generator().manual_seed(0)
    samples = []
    for each, varying in zip(graph.inputs, graph.shapes, strict=True):
        shape = [SIZES[varying[i]] if i in varying else size for i, size in enumerate(each.shape)]
        if each.is_floating_point():
            samples.append(torch.randn(shape, generator=generator).to(each.dtype))
        else:
            samples.append(torch.randint(vocabulary, shape, generator=generator))
    return tuple(samples)


def _one_more(tensor: Tensor, dimensions: Iterable[int]) -> Tensor:
    for dimension in dimensions:
        tensor = torch.cat([tensor, tensor.narrow(dimension, 0, 1)], dimension)
    return tensor


def check_engines(graph: Graph, path: Path, inputs: tuple[Tensor, ...]) -> tuple[EngineCheck, ...]:
    """Run the file in both engines.

    Args:
        graph: the exported graph.
        path: the ONNX file; a temporary one is written next to it.
        inputs: of one call.
    """
    import onnx
    import onnxruntime

    probe, casts = _add_cast_outputs(onnx.load(path, load_external_data=False))
    _remove_default_types(probe)
    probe_path = path.with_name(PROBE)
    onnx.save(probe, probe_path)
    feeds = {name: _array(tensor) for name, tensor in zip(graph.names, inputs, strict=True)}
    output_names = sorted(
        {*graph.outputs, *(name for cast in casts for name in (cast.x, cast.encode_scale, cast.codes))}
    )
    engines: dict[str, Callable[[Path, Feeds, list[str]], Results]] = {
        f"onnxruntime {onnxruntime.__version__}": _run_onnxruntime,
        f"ReferenceEvaluator of onnx {onnx.__version__}": _run_reference,
    }
    checks = []
    try:
        for name, run in engines.items():
            if graph.dtype is torch.bfloat16 and run is _run_onnxruntime:
                checks.append(EngineCheck(engine=name, skipped="it has no bfloat16 on a CPU"))
            else:
                checks.append(_compare(name, graph, inputs, casts, run(probe_path, feeds, output_names)))
    finally:
        probe_path.unlink()
    return tuple(checks)


def _compare(
    engine: str, graph: Graph, inputs: tuple[Tensor, ...], casts: list[_CastNames], results: Results
) -> EngineCheck:
    with record_casts(graph.module) as recorded:
        free = _run_torch(graph, inputs)
    nodes = [RecordedCast(_tensor(results[cast.x]), _tensor(results[cast.encode_scale])) for cast in casts]
    engine_codes = [_tensor(results[cast.codes]) for cast in casts]
    matches = match_nodes([cast for _, cast in recorded], nodes)
    codes = wrong_codes = wrong_scales = 0
    for node, codes_of_node in zip(nodes, engine_codes, strict=True):
        octavo_codes = cast_nearest(node.x, E4M3, node.encode_scale).float()
        codes += octavo_codes.numel()
        wrong_codes += int((codes_of_node.view(torch.int32) != octavo_codes.view(torch.int32)).sum())
    for (module, _), node_index in zip(recorded, matches, strict=True):
        wrong_scales += int((module.encode(nodes[node_index].x) != nodes[node_index].encode_scale).sum())
    with ReplayCodes([engine_codes[node_index] for node_index in matches]):
        torch_results = _run_torch(graph, inputs)
    first = graph.outputs[0]
    torch_choices, choices = torch_results[first].argmax(-1), _tensor(results[first]).argmax(-1)
    return EngineCheck(
        engine=engine,
        casts=len(casts),
        codes=codes,
        wrong_codes=wrong_codes,
        wrong_scales=wrong_scales,
        error=_worst_error(torch_results, results),
        allowed=MOST_ERROR[graph.dtype],
        free_error=_worst_error(free, results),
        choices=choices.numel(),
        same_choices=int((choices == torch_choices).sum()),
    )


@torch.no_grad()
def _run_torch(graph: Graph, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    result = graph.module(*inputs)
    return dict(zip(graph.outputs, [result] if isinstance(result, Tensor) else result, strict=True))


def _worst_error(torch_results: dict[str, Tensor], results: Results) -> float:
    """Largest relative error of the engine's results against torch's."""
    return max(relative_error(_tensor(results[name]), tensor) for name, tensor in torch_results.items())


def _add_cast_outputs(model: Any) -> tuple[Any, list[_CastNames]]:
    """Add each cast's tensor, encode scale and codes to the model's outputs; codes as FP32, which is exact."""
    import onnx

    made_by = {name: node for node in model.graph.node for name in node.output}
    casts = []
    for node in [each for each in model.graph.node if each.op_type == "QuantizeLinear"]:
        product, decoded = made_by[node.input[0]], f"{node.output[0]}_as_fp32"
        model.graph.node.append(onnx.helper.make_node("Cast", node.output, [decoded], to=onnx.TensorProto.FLOAT))
        x, encode = product.input
        cast = _CastNames(x, f"{encode}_{node.output[0]}", decoded)
        model.graph.node.append(onnx.helper.make_node("Identity", [encode], [cast.encode_scale]))
        casts.append(cast)
    existing = {each.name for each in model.graph.output}
    for name in {name for cast in casts for name in (cast.x, cast.encode_scale, cast.codes)} - existing:
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return model, casts


def _remove_default_types(model: Any) -> None:
    """Remove attributes of casts that are 0, their default.

    The reference evaluator of onnx 1.21 and 1.22 runs the operators of opset 23 with code that does not know them.
    """
    for node in model.graph.node:
        if node.op_type in {"QuantizeLinear", "DequantizeLinear"}:
            for attribute in [each for each in node.attribute if each.name in {"precision", "output_dtype"}]:
                if not attribute.i:
                    node.attribute.remove(attribute)


def _run_onnxruntime(path: Path, feeds: Feeds, output_names: list[str]) -> Results:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return dict(zip(output_names, session.run(output_names, feeds), strict=True))


def _run_reference(path: Path, feeds: Feeds, output_names: list[str]) -> Results:
    import onnx
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(onnx.load(path))
    return dict(zip(output_names, evaluator.run(output_names, dict(feeds)), strict=True))


def _array(tensor: Tensor) -> Any:
    """Convert to numpy; bfloat16 is a type of ml_dtypes."""
    if tensor.dtype is not torch.bfloat16:
        return tensor.numpy()
    import ml_dtypes

    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)).reshape(np.shape(array))
