"""Report of an export: FP8 layers, reasons for the others, sizes and results of the checks."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from octavo.onnx.checks import EngineCheck
from octavo.onnx.layers import LayerNote
from octavo.onnx.lint import GraphBytes
from octavo.onnx.tensorrt_rtx import BuildCheck

__all__ = ["OnnxReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxReport:
    """Exported graph.

    Attributes:
        folder: folder of the graph.
        opset: of its operators.
        dtype: of its tensors, "fp32", "fp16" or "bf16".
        layers: a note for each linear layer.
        bytes: sizes of its constants.
        file_bytes: size of the files with the graph and its weights.
        compared_in: dtype that sets the tolerance of the next two: the least precise of the graph and the model.
        layer_error: ‖difference‖ / ‖model's‖ in torch of the worst layer, with equal inputs.
        lockstep_error: the same for the input of a layer, or the result, with the model's outputs of all layers.
        model_error: the same for the whole model, in which codes near a tie may differ.
        engines: checks of the file in other engines.
        build: build with TensorRT-RTX; None if not requested.
        files: names of all files, in the order written.
    """

    folder: Path
    opset: int
    dtype: str
    layers: tuple[LayerNote, ...]
    bytes: GraphBytes
    file_bytes: int
    compared_in: str
    layer_error: float
    lockstep_error: float
    model_error: float
    engines: tuple[EngineCheck, ...]
    build: BuildCheck | None = None
    files: tuple[str, ...] = field(default=())

    @property
    def fp8_layers(self) -> int:
        """Number of linear layers with FP8 input and weight."""
        return sum(note.is_fp8 for note in self.layers)

    def to_record(self) -> dict[str, Any]:
        """JSON-compatible record."""
        return {
            **asdict(self),
            "folder": self.folder.name,
            "bytes": {**asdict(self.bytes), "fp8_share": self.bytes.fp8_share},
            "fp8_layers": self.fp8_layers,
        }

    def __str__(self) -> str:
        summary = f"{self.fp8_layers} of {len(self.layers)} linear layers in FP8; opset {self.opset}, {self.dtype}"
        lines = [f"{summary}; {self.file_bytes / 1e6:.1f} MB, {self.bytes.fp8_share:.0%} of the constants' bytes FP8"]
        other_notes = [note for note in self.layers if not note.is_fp8]
        lines += [f"  {note.path}: input {note.input}, weight {note.weight}: {note.reason}" for note in other_notes]
        lines.append(
            f"in torch: layers within {self.layer_error:.1e} of the model's, what is between them "
            f"{self.lockstep_error:.1e} (by {self.compared_in}'s bar), results {self.model_error:.1e}"
        )
        checks = [*self.engines, *([self.build] if self.build else [])]
        return "\n".join(lines + [str(each) for each in checks])
