"""An exported graph, run by two engines and compared with torch and with octavo's casts.

| engine                       | what it says                                                                       |
|------------------------------|------------------------------------------------------------------------------------|
| onnxruntime, on the CPU      | that the file loads and runs elsewhere; no bfloat16 there. Its own fusions of Q    |
|                              | and DQ are off (``session.disable_quant_qdq``): they know INT8 only                |
| ONNX's ReferenceEvaluator    | what the standard says, every operator and dtype                                   |

Shapes are other ones than the graph was traced with. At every QuantizeLinear the tensor that was cast, the encode scale
and the codes are read out: the codes must be those of ``octavo.numerics`` for just that tensor and scale, and the scale
that of the very layer whose cast it is: its constant, or what octavo computes of that tensor; all to the bit.

Results are compared with torch's, by ‖difference‖ / ‖torch's‖, in two ways. Sums in another order move a last digit of
FP32; sooner or later that moves a value across a tie between two codes, 6 % apart, and the layers behind amplify it.
That says nothing about the graph. So torch runs once more *with the codes that the engine made*: what then remains is
the engine's arithmetic, and has to be small. The free-running difference is reported beside it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.export.agreement import relative_error
from octavo.export.onnx.casts import GivenCodes, MadeCast, nodes_of, noted_casts
from octavo.export.onnx.graph import BATCH, PAST, SEQUENCE, Graph
from octavo.formats import E4M3
from octavo.numerics.cast import cast_nearest

__all__ = ["MOST_ERROR", "SIZES", "EngineCheck", "check_engines", "sample_inputs"]

# With the same codes; from 2^-24, 2^-11 and 2^-8, each rounded some hundred times on the way.
MOST_ERROR = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
SIZES = {BATCH: 3, SEQUENCE: 7, PAST: 5}  # torch.export was shown other ones
PROBE = "probe.onnx"
Feeds = Mapping[str, Any]
Results = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCheck:
    """One engine's answer.

    Attributes:
        engine: its name and version.
        skipped: why it did not run; empty where it did.
        casts: QuantizeLinear nodes.
        codes: compared.
        wrong_codes: that are not octavo's.
        wrong_scales: that are not those of the layer whose cast it is.
        error: ‖result - torch's‖ / ‖torch's‖ with the engine's codes, of the worst output.
        allowed: of ``error``.
        free_error: the same with torch's own codes.
        choices: rows of the first output, such as next tokens.
        same_choices: whose largest element stands where torch's does, with the engine's codes.
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
        """Whether nothing it found speaks against the graph."""
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
class _Cast:
    """The names of what one QuantizeLinear reads and writes."""

    x: str
    encode_scale: str
    codes: str


def sample_inputs(graph: Graph, *, vocabulary: int | None) -> tuple[Tensor, ...]:
    """Inputs of shapes that the graph was not traced with, always the same ones.

    Args:
        graph: as it is exported.
        vocabulary: number of token ids; None takes the graph's own inputs, with the first of what may vary once more.
    """
    if vocabulary is None:
        pairs = zip(graph.inputs, graph.shapes, strict=True)
        return tuple(_one_more(each, varying) for each, varying in pairs)
    generator = torch.Generator().manual_seed(0)
    made = []
    for each, varying in zip(graph.inputs, graph.shapes, strict=True):
        shape = [SIZES[varying[i]] if i in varying else size for i, size in enumerate(each.shape)]
        if each.is_floating_point():
            made.append(torch.randn(shape, generator=generator).to(each.dtype))
        else:
            made.append(torch.randint(vocabulary, shape, generator=generator))
    return tuple(made)


def _one_more(given: Tensor, dimensions: Iterable[int]) -> Tensor:
    for dimension in dimensions:
        given = torch.cat([given, given.narrow(dimension, 0, 1)], dimension)
    return given


def check_engines(graph: Graph, path: Path, inputs: tuple[Tensor, ...]) -> tuple[EngineCheck, ...]:
    """Run the file in both engines.

    Args:
        graph: what was exported.
        path: the ONNX file; a second one is written beside it for the time of the check.
        inputs: of one call.
    """
    import onnx
    import onnxruntime

    probe, casts = _probe(onnx.load(path, load_external_data=False))
    at = path.with_name(PROBE)
    onnx.save(probe, at)
    feeds = {name: _array(tensor) for name, tensor in zip(graph.names, inputs, strict=True)}
    wanted = sorted({*graph.outputs, *(name for cast in casts for name in (cast.x, cast.encode_scale, cast.codes))})
    engines: dict[str, Callable[[Path, Feeds, list[str]], Results]] = {
        f"onnxruntime {onnxruntime.__version__}": _by_onnxruntime,
        f"ReferenceEvaluator of onnx {onnx.__version__}": _by_reference,
    }
    found = []
    try:
        for name, run in engines.items():
            if graph.dtype is torch.bfloat16 and run is _by_onnxruntime:
                found.append(EngineCheck(engine=name, skipped="it has no bfloat16 on a CPU"))
            else:
                found.append(_compare(name, graph, inputs, casts, run(at, feeds, wanted)))
    finally:
        at.unlink()
    return tuple(found)


def _compare(
    engine: str, graph: Graph, inputs: tuple[Tensor, ...], casts: list[_Cast], results: Results
) -> EngineCheck:
    with noted_casts(graph.module) as noted:
        free = _torchs(graph, inputs)
    nodes = [MadeCast(_tensor(results[cast.x]), _tensor(results[cast.encode_scale])) for cast in casts]
    given = [_tensor(results[cast.codes]) for cast in casts]
    places = nodes_of([made for _, made in noted], nodes)
    codes = wrong_codes = wrong_scales = 0
    for node, found in zip(nodes, given, strict=True):
        own = cast_nearest(node.x, E4M3, node.encode_scale).float()
        codes += own.numel()
        wrong_codes += int((found.view(torch.int32) != own.view(torch.int32)).sum())
    for (own_cast, _), place in zip(noted, places, strict=True):
        wrong_scales += int((own_cast.encode(nodes[place].x) != nodes[place].encode_scale).sum())
    with GivenCodes([given[place] for place in places]):
        wanted = _torchs(graph, inputs)
    first = graph.outputs[0]
    chosen, choices = wanted[first].argmax(-1), _tensor(results[first]).argmax(-1)
    return EngineCheck(
        engine=engine,
        casts=len(casts),
        codes=codes,
        wrong_codes=wrong_codes,
        wrong_scales=wrong_scales,
        error=_worst_error(wanted, results),
        allowed=MOST_ERROR[graph.dtype],
        free_error=_worst_error(free, results),
        choices=choices.numel(),
        same_choices=int((choices == chosen).sum()),
    )


@torch.no_grad()
def _torchs(graph: Graph, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    made = graph.module(*inputs)
    return dict(zip(graph.outputs, [made] if isinstance(made, Tensor) else made, strict=True))


def _worst_error(wanted: dict[str, Tensor], results: Results) -> float:
    """Of the engine's results against torch's."""
    return max(relative_error(_tensor(results[name]), tensor) for name, tensor in wanted.items())


def _probe(model: Any) -> tuple[Any, list[_Cast]]:
    """The model with every cast's tensor, encode scale and codes among its outputs; codes as FP32, which is exact."""
    import onnx

    made_by = {name: node for node in model.graph.node for name in node.output}
    casts = []
    for node in [each for each in model.graph.node if each.op_type == "QuantizeLinear"]:
        product, decoded = made_by[node.input[0]], f"{node.output[0]}_as_fp32"
        model.graph.node.append(onnx.helper.make_node("Cast", node.output, [decoded], to=onnx.TensorProto.FLOAT))
        x, encode = product.input
        cast = _Cast(x, f"{encode}_{node.output[0]}", decoded)
        model.graph.node.append(onnx.helper.make_node("Identity", [encode], [cast.encode_scale]))
        casts.append(cast)
    known = {each.name for each in model.graph.output}
    for name in {name for cast in casts for name in (cast.x, cast.encode_scale, cast.codes)} - known:
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return model, casts


def _by_onnxruntime(path: Path, feeds: Feeds, wanted: list[str]) -> Results:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return dict(zip(wanted, session.run(wanted, feeds), strict=True))


def _by_reference(path: Path, feeds: Feeds, wanted: list[str]) -> Results:
    import onnx
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(onnx.load(path))
    return dict(zip(wanted, evaluator.run(wanted, dict(feeds)), strict=True))


def _array(tensor: Tensor) -> Any:
    """As numpy has it; bfloat16 is a type of ml_dtypes there."""
    if tensor.dtype is not torch.bfloat16:
        return tensor.numpy()
    import ml_dtypes

    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)).reshape(np.shape(array))
