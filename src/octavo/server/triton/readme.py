"""README.md of a repository: its content, how to use it, and how to complete the models of other backends."""

from string import Template

from octavo.export import SavedCheckpoint
from octavo.onnx import OnnxReport

__all__ = ["readme"]


def readme(saved: SavedCheckpoint, report: OnnxReport, *, models: str, others: str) -> str:
    """Text of README.md.

    Args:
        saved: checkpoint of octavo's engine.
        report: report of the exported graph.
        models: folder that Triton is started on.
        others: folder of models that need other backends.
    """
    layers = ", ".join(f"{count} layers with {scheme}" for scheme, count in saved.schemes.items())
    return Template(_TEXT).substitute(
        models=models, others=others, layers=layers, fp8=report.fp8_layers, all=len(report.layers), dtype=report.dtype
    )


_TEXT = """# A model repository for Triton Inference Server

Written by `octavo export --format triton`. Start Triton in this folder, to which the models' paths are relative.

    octavo triton setup                        # once: Triton itself, without a container
    octavo serve . --engine triton

or, with tritonserver, octavo and NumPy 1 installed:

    tritonserver --model-repository=$models

| $models/ | runs | requests |
|---|---|---|
| octavo | octavo's engine: $layers | HTTP `generate_stream`, gRPC `ModelStreamInfer` |
| octavo_whole | the same, without streaming | HTTP and gRPC `infer`, HTTP `generate` |
| onnx | the graph in onnxruntime on a CPU: $fp8 of $all layers in FP8, the others in $dtype | `infer` |

    python client.py "Once upon a time"        # --whole, --max-tokens, --temperature, --url …; needs only Python
    curl localhost:8000/v2/models/octavo/generate_stream -d '{"text_input": "Once", "max_tokens": 32, "temperature": 0}'

`octavo` and `octavo_whole` take the tensors of `octavo serve` under /v2 and return the same text. The engine's limits
(max_running, max_waiting, cache_positions, step_rows) are parameters in octavo/config.pbtxt.

## Other backends

$others/ holds models for servers that have these backends. Complete one on the machine with the GPU, then move it:

- **tensorrt** (tensorrt_plan): `(cd $models/onnx/1 && sh build.sh)`, then
  `mv $models/onnx/1/model.engine $others/tensorrt/1/` and `mv $others/tensorrt $models/`.
- **vllm**: `mv $others/vllm $models/`. It reads $models/octavo/1/model; 1/model.json has its settings.
- **tensorrt_llm** (tensorrtllm): put an engine of `trtllm-build` into $others/tensorrt_llm/1, then
  `mv $others/tensorrt_llm $models/`. It takes token ids; servers whose TensorRT-LLM no longer has such engines have
  their own model, for which `octavo export MODEL --format modelopt` writes the checkpoint.

These three are not tested by octavo.
"""
