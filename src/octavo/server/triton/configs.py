"""config.pbtxt of each model in a repository: its tensors and how Triton runs it.

| model          | backend         | batches                                              | instances              |
|----------------|-----------------|------------------------------------------------------|------------------------|
| octavo         | python          | by octavo's engine, per step; decoupled              | one, with one cache    |
| octavo_whole   | python          | none; one request per instance                       | four small processes   |
| onnx           | python          | by Triton, of equal shapes                           | one                    |
| tensorrt       | tensorrt_plan   | by Triton, up to the engine's profile                | one per GPU            |
| vllm           | vllm            | by vLLM; decoupled                                   | vLLM selects the GPUs  |
| tensorrt_llm   | tensorrtllm     | by TensorRT-LLM (in-flight); decoupled               | one                    |

Triton serves only the newest version of each, and warms up octavo, onnx and tensorrt before they are ready.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from octavo.inference import EngineConfig
from octavo.onnx.signature import GraphTensor
from octavo.server.kserve_fields import DATATYPES, INPUT, OUTPUT
from octavo.server.triton.config_text import EnumValue

__all__ = [
    "engine_config",
    "onnx_config",
    "tensorrt_config",
    "tensorrt_llm_config",
    "vllm_config",
    "whole_config",
]

Message = dict[str, Any]
WAIT_US = 2000  # longest wait for more requests in a batch
WHOLE_INSTANCES = 4
NEWEST: Message = {"version_policy": {"latest": {"num_versions": 1}}}
DECOUPLED: Message = {"model_transaction_policy": {"decoupled": True}}


def engine_config(name: str) -> Message:
    """Configuration of octavo's engine, with the defaults of ``EngineConfig`` as parameters."""
    settings = {setting.name: str(setting.default) for setting in fields(EngineConfig) if setting.type is int}
    return {
        "name": name,
        "backend": "python",
        "max_batch_size": 0,
        **_texts(),
        **DECOUPLED,
        **NEWEST,
        "instance_group": _instances("KIND_CPU"),
        "parameters": _parameters(settings),
        "model_warmup": _warmup({INPUT: ("TYPE_STRING", (1,))}, {"input_data_file": INPUT}),
    }


def whole_config(name: str) -> Message:
    """Configuration of the model that returns the engine's answers in one piece."""
    return {
        "name": name,
        "backend": "python",
        "max_batch_size": 0,
        **_texts(),
        **NEWEST,
        "instance_group": _instances("KIND_CPU", count=WHOLE_INSTANCES),
    }


def onnx_config(
    name: str, inputs: Iterable[GraphTensor], outputs: Iterable[GraphTensor], *, largest_batch: int
) -> Message:
    """Configuration of a graph in onnxruntime on a CPU."""
    return {
        "name": name,
        "backend": "python",
        **_batched(inputs, outputs, largest_batch=largest_batch),
        "instance_group": _instances("KIND_CPU"),
    }


def tensorrt_config(
    name: str,
    inputs: Iterable[GraphTensor],
    outputs: Iterable[GraphTensor],
    *,
    largest_batch: int,
    usual_batch: int,
    file: str,
) -> Message:
    """Configuration of the same graph as a TensorRT engine.

    Args:
        name: name of the model.
        inputs: inputs of the graph.
        outputs: outputs of the graph.
        largest_batch: largest batch of the engine's profile.
        usual_batch: batch that the profile is tuned for.
        file: file name of the engine in the version's folder.
    """
    batched = _batched(inputs, outputs, largest_batch=largest_batch)
    batched["dynamic_batching"] = {"preferred_batch_size": [usual_batch], **batched["dynamic_batching"]}
    return {
        "name": name,
        "platform": "tensorrt_plan",
        "default_model_filename": file,
        **batched,
        "instance_group": _instances("KIND_GPU"),
    }


def vllm_config(name: str) -> Message:
    """Configuration of vLLM's backend; its engine's settings are in model.json."""
    return {
        "name": name,
        "backend": "vllm",
        "max_batch_size": 0,
        "input": [
            _tensor(INPUT, "TYPE_STRING", (1,)),
            _tensor("stream", "TYPE_BOOL", (1,), optional=True),
            _tensor("sampling_parameters", "TYPE_STRING", (1,), optional=True),
        ],
        "output": [_tensor(OUTPUT, "TYPE_STRING", (-1,))],
        **DECOUPLED,
        **NEWEST,
        "instance_group": _instances("KIND_MODEL"),
    }


def tensorrt_llm_config(name: str, *, engine: str, largest_batch: int) -> Message:
    """Configuration of TensorRT-LLM's backend with an engine of trtllm-build; inputs and outputs are token ids."""
    scalars = {
        "end_id": "TYPE_INT32",
        "pad_id": "TYPE_INT32",
        "beam_width": "TYPE_INT32",
        "temperature": "TYPE_FP32",
        "runtime_top_k": "TYPE_INT32",
        "runtime_top_p": "TYPE_FP32",
        "random_seed": "TYPE_UINT64",
    }
    scalar: Message = {"reshape": {"shape": []}}
    return {
        "name": name,
        "backend": "tensorrtllm",
        "max_batch_size": largest_batch,
        "input": [
            _tensor("input_ids", "TYPE_INT32", (-1,)) | {"allow_ragged_batch": True},
            _tensor("input_lengths", "TYPE_INT32", (1,)) | scalar,
            _tensor("request_output_len", "TYPE_INT32", (1,)),
            *(_tensor(field, kind, (1,), optional=True) | scalar for field, kind in scalars.items()),
            _tensor("stop", "TYPE_BOOL", (1,), optional=True),
            _tensor("streaming", "TYPE_BOOL", (1,), optional=True),
        ],
        "output": [_tensor("output_ids", "TYPE_INT32", (-1, -1)), _tensor("sequence_length", "TYPE_INT32", (-1,))],
        **DECOUPLED,
        **NEWEST,
        "dynamic_batching": {"max_queue_delay_microseconds": 0},
        "instance_group": _instances("KIND_CPU"),
        "parameters": _parameters(
            {"gpt_model_type": "inflight_fused_batching", "gpt_model_path": engine, "max_beam_width": "1"}
        ),
    }


def _texts() -> Message:
    """Inputs and outputs of octavo's server."""
    datatypes = {"BYTES": "TYPE_STRING"}
    inputs = [
        _tensor(name, datatypes.get(kind, f"TYPE_{kind}"), (-1,), optional=name != INPUT)
        for name, kind in DATATYPES.items()
    ]
    return {"input": inputs, "output": [_tensor(OUTPUT, "TYPE_STRING", (-1,))]}


def _batched(inputs: Iterable[GraphTensor], outputs: Iterable[GraphTensor], *, largest_batch: int) -> Message:
    """Configuration of a graph whose first dimension is batched by Triton."""
    inputs = [*inputs]
    dims = {each.name: tuple(1 if size < 0 else size for size in each.dims) for each in inputs}
    sample = {each.name: (f"TYPE_{each.datatype}", dims[each.name]) for each in inputs}
    return {
        "max_batch_size": largest_batch,
        "input": [_tensor(each.name, f"TYPE_{each.datatype}", each.dims) for each in inputs],
        "output": [_tensor(each.name, f"TYPE_{each.datatype}", each.dims) for each in outputs],
        **NEWEST,
        "dynamic_batching": {"max_queue_delay_microseconds": WAIT_US},
        "model_warmup": _warmup(sample, {"zero_data": True}),
    }


def _tensor(name: str, datatype: str, dims: tuple[int, ...], *, optional: bool = False) -> Message:
    tensor: Message = {"name": name, "data_type": EnumValue(datatype), "dims": [*dims]}
    return tensor | ({"optional": True} if optional else {})


def _instances(kind: str, *, count: int = 1) -> list[Message]:
    return [{"count": count, "kind": EnumValue(kind)}]


def _parameters(texts: Mapping[str, str]) -> list[Message]:
    return [{"key": key, "value": {"string_value": text}} for key, text in texts.items()]


def _warmup(inputs: Mapping[str, tuple[str, tuple[int, ...]]], data: Message) -> Message:
    entries = [
        {"key": name, "value": {"data_type": EnumValue(kind), "dims": [*dims], **data}}
        for name, (kind, dims) in inputs.items()
    ]
    return {"name": "first", "batch_size": 1, "inputs": entries}
