"""What an export has made: which layers are FP8 and why others are not, its size, what the checks found."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from octavo.export.onnx.checks import EngineCheck
from octavo.export.onnx.layers import LayerNote
from octavo.export.onnx.lint import GraphBytes
from octavo.export.onnx.tensorrt_rtx import BuildCheck

__all__ = ["OnnxReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxReport:
    """An exported graph.

    Attributes:
        folder: that it lies in.
        opset: of its operators.
        dtype: of its tensors, "fp32", "fp16" or "bf16".
        layers: what became of each linear layer.
        bytes: of its constants.
        file_bytes: of the files with the graph and its weights.
        compared_in: the dtype that bounds the next two: of the graph's and those that the model computes in, the one
            with the fewest digits.
        layer_error: ‖difference‖ / ‖model's‖ in torch of the worst layer, each given the same input.
        lockstep_error: the same of what reaches a layer, or of the result, with the model's results of all layers.
        model_error: the same of the whole model, where codes beside a tie may differ.
        engines: what ran the file.
        build: what TensorRT-RTX made of it; None where that was not asked for.
        files: names of all the files, in the order they were written.
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
        """How many linear layers multiply codes by codes."""
        return sum(note.is_fp8 for note in self.layers)

    def to_record(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            **asdict(self),
            "folder": self.folder.name,
            "bytes": {**asdict(self.bytes), "fp8_share": self.bytes.fp8_share},
            "fp8_layers": self.fp8_layers,
        }

    def __str__(self) -> str:
        how = f"{self.fp8_layers} of {len(self.layers)} linear layers in FP8; opset {self.opset}, {self.dtype}"
        lines = [f"{how}; {self.file_bytes / 1e6:.1f} MB, {self.bytes.fp8_share:.0%} of the constants' bytes FP8"]
        kept = [note for note in self.layers if not note.is_fp8]
        lines += [f"  {note.path}: input {note.input}, weight {note.weight}: {note.reason}" for note in kept]
        lines.append(
            f"in torch: layers within {self.layer_error:.1e} of the model's, what is between them "
            f"{self.lockstep_error:.1e} (by {self.compared_in}'s bar), results {self.model_error:.1e}"
        )
        checks = [*self.engines, *([self.build] if self.build else [])]
        return "\n".join(lines + [str(each) for each in checks])
