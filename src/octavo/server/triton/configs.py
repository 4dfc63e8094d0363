"""config.pbtxt of every model in a repository: its tensors, and how Triton runs it.

| model          | backend         | batches                                              | instances              |
|----------------|-----------------|------------------------------------------------------|------------------------|
| octavo         | python          | the engine's own, a step at a time; decoupled        | one, with one cache    |
| octavo_whole   | python          | –; as many requests at once as there are instances   | four small processes   |
| onnx           | python          | Triton's, of equal shapes                            | one                    |
| tensorrt       | tensorrt_plan   | Triton's, up to the engine's profile                 | one a GPU              |
| vllm           | vllm            | vLLM's own; decoupled                                | vLLM chooses the GPUs  |
| tensorrt_llm   | tensorrtllm     | TensorRT-LLM's own (in-flight); decoupled            | one                    |

Each serves its newest version alone. A model that computes is asked once before it is ready, where Triton can do that.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from octavo.inference import EngineConfig
from octavo.onnx.signature import GraphTensor
from octavo.server.kserve_fields import DATATYPES, INPUT, OUTPUT
from octavo.server.triton.config_text import Word

__all__ = [
    "engine_config",
    "onnx_config",
    "tensorrt_config",
    "tensorrt_llm_config",
    "vllm_config",
    "whole_config",
]

Message = dict[str, Any]
WAIT_US = 2000  # for others to come into a batch
WHOLE_INSTANCES = 4
NEWEST: Message = {"version_policy": {"latest": {"num_versions": 1}}}
DECOUPLED: Message = {"model_transaction_policy": {"decoupled": True}}


def engine_config(name: str) -> Message:
    """Octavo's engine, with as much taken on as ``EngineConfig`` does by default."""
    settings = {own.name: str(own.default) for own in fields(EngineConfig) if own.type is int}
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
    """The same answers, whole."""
    group = _instances("KIND_CPU", count=WHOLE_INSTANCES)
    return {
        "name": name,
        "backend": "python",
        "max_batch_size": 0,
        **_texts(),
        **NEWEST,
        "instance_group": group,
    }


def onnx_config(
    name: str, inputs: Iterable[GraphTensor], outputs: Iterable[GraphTensor], *, largest_batch: int
) -> Message:
    """A graph in onnxruntime, on a CPU."""
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
    """The same graph as TensorRT's engine.

    Args:
        name: of the model.
        inputs: of the graph.
        outputs: of the graph.
        largest_batch: of the engine's profile.
        usual_batch: that the profile is tuned for.
        file: the engine, beside the version's other files.
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
    """VLLM's backend, whose engine's settings are in model.json."""
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
    """TensorRT-LLM's backend on an engine of trtllm-build: token ids in, token ids out."""
    scalars = {
        "end_id": "TYPE_INT32",
        "pad_id": "TYPE_INT32",
        "beam_width": "TYPE_INT32",
        "temperature": "TYPE_FP32",
        "runtime_top_k": "TYPE_INT32",
        "runtime_top_p": "TYPE_FP32",
        "random_seed": "TYPE_UINT64",
    }
    whole: Message = {"reshape": {"shape": []}}
    return {
        "name": name,
        "backend": "tensorrtllm",
        "max_batch_size": largest_batch,
        "input": [
            _tensor("input_ids", "TYPE_INT32", (-1,)) | {"allow_ragged_batch": True},
            _tensor("input_lengths", "TYPE_INT32", (1,)) | whole,
            _tensor("request_output_len", "TYPE_INT32", (1,)),
            *(_tensor(own, kind, (1,), optional=True) | whole for own, kind in scalars.items()),
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
    """The tensors that octavo's server takes and gives."""
    words = {"BYTES": "TYPE_STRING"}
    inputs = [
        _tensor(name, words.get(kind, f"TYPE_{kind}"), (-1,), optional=name != INPUT)
        for name, kind in DATATYPES.items()
    ]
    return {"input": inputs, "output": [_tensor(OUTPUT, "TYPE_STRING", (-1,))]}


def _batched(inputs: Iterable[GraphTensor], outputs: Iterable[GraphTensor], *, largest_batch: int) -> Message:
    """A graph whose first dimensions are a batch that Triton puts together."""
    taken = [*inputs]
    sample = {own.name: (f"TYPE_{own.datatype}", tuple(1 if size < 0 else size for size in own.dims)) for own in taken}
    return {
        "max_batch_size": largest_batch,
        "input": [_tensor(own.name, f"TYPE_{own.datatype}", own.dims) for own in taken],
        "output": [_tensor(own.name, f"TYPE_{own.datatype}", own.dims) for own in outputs],
        **NEWEST,
        "dynamic_batching": {"max_queue_delay_microseconds": WAIT_US},
        "model_warmup": _warmup(sample, {"zero_data": True}),
    }


def _tensor(name: str, datatype: str, dims: tuple[int, ...], *, optional: bool = False) -> Message:
    own: Message = {"name": name, "data_type": Word(datatype), "dims": [*dims]}
    return own | ({"optional": True} if optional else {})


def _instances(kind: str, *, count: int = 1) -> list[Message]:
    return [{"count": count, "kind": Word(kind)}]


def _parameters(texts: Mapping[str, str]) -> list[Message]:
    return [{"key": key, "value": {"string_value": text}} for key, text in texts.items()]


def _warmup(inputs: Mapping[str, tuple[str, tuple[int, ...]]], data: Message) -> Message:
    own = [
        {"key": name, "value": {"data_type": Word(kind), "dims": [*dims], **data}}
        for name, (kind, dims) in inputs.items()
    ]
    return {"name": "first", "batch_size": 1, "inputs": own}
