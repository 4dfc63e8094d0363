"""The pass by which a stage of ``torch.distributed.pipelining`` infers shapes, whose tensors hold no values.

A ``PipelineStage`` without ``input_args`` and ``output_args`` runs forward and backward in its schedule's first step to
learn what its stages exchange: the first on a micro-batch, the others on ``torch.empty``. What memory held is no input
of the model, so a layer records nothing of such a pass, and it ends no step.

Nothing public tells of the pass (torch 2.13, ``torch/distributed/pipelining/stage.py``,
``PipelineStage._forward_metadata_inference``), but the interpreter's frames do. A graph of ``torch.compile`` would have
to look at each call, and cannot: compiled layers with an amax history have to be given ``input_args`` and
``output_args``, and refuse to be traced in this pass. A graph that was traced before it does not notice.
"""

import sys
from types import CodeType
from typing import Any

from octavo.errors import ConfigError

__all__ = ["infers_shapes", "refuse_graph"]

_STAGE = "torch.distributed.pipelining.stage"


def infers_shapes() -> bool:
    """Return whether a stage of a pipeline infers shapes by the running forward pass."""
    stage: Any = sys.modules.get(_STAGE)
    inference = None if stage is None else getattr(stage.PipelineStage, "_forward_metadata_inference", None)
    return inference is not None and _runs(inference.__code__)


def refuse_graph() -> None:
    """While torch.compile traces a layer with an amax history: refuse a pass that infers shapes.

    Raises:
        ConfigError: it is such a pass.
    """
    if infers_shapes():
        raise ConfigError(
            "a compiled layer with an amax history would record what memory held before, where PipelineStage runs it "
            "on tensors without values to infer their shapes; give PipelineStage its input_args and output_args, "
            "which require a gradient where stages exchange one"
        )


# As torch.compiler.assume_constant_result, which imports dynamo: it runs while a graph is traced, outside of it.
refuse_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001


def _runs(code: CodeType) -> bool:
    """Return whether a function is running on this thread."""
    frame = sys._getframe()  # noqa: SLF001 (the documented way to the caller's frame)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is code:
            return True
    return False
