"""Triton model repository of a language model, for several backends.

    REPO/
      README.md                     content and usage
      client.py                     client that generates text (client.py)
      models/                       folder that Triton is started on; all of it loads on a CPU
        octavo/                     octavo's engine (engine_model.py), streaming
          config.pbtxt  1/model.py  1/model/  warmup/text_input
        octavo_whole/               the same answers without streaming (whole_model.py)
          config.pbtxt  1/model.py
        onnx/                       the graph in onnxruntime (graph_model.py), and scripts that build TensorRT's engine
          config.pbtxt  1/model.py  1/model.onnx  1/build.sh …
      other_backends/               models for servers that have these backends; move them to models/ when complete
        tensorrt/  vllm/  tensorrt_llm/

``1/model`` is a checkpoint of ``octavo.save_quantized`` in the compressed-tensors format. octavo's engine reads its
codes unchanged, and vLLM reads the same folder. Other tensors are exact: in BF16 if that loses nothing, else in FP32.
So the engine computes the same as ``octavo serve MODEL``.
"""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from octavo.checksums import write_sums
from octavo.errors import ConfigError
from octavo.export import SavedCheckpoint, save_quantized
from octavo.export.sources import ExportSource
from octavo.files import claimed_folder, replacing_folder
from octavo.inference import load_served_model
from octavo.language_model import LanguageModel
from octavo.nn import Linear
from octavo.onnx import OnnxOptions, OnnxReport, export_onnx
from octavo.onnx.signature import graph_tensors
from octavo.onnx.tensorrt import ENGINE, LARGEST_BATCH, MODEL, USUAL_BATCH
from octavo.server.kserve_fields import INPUT
from octavo.server.triton import configs
from octavo.server.triton.config_text import config_text
from octavo.server.triton.engine_model import FOLDER
from octavo.server.triton.readme import readme
from octavo.server.triton.running import MODELS

__all__ = ["Repository", "write_repository"]

OTHERS, VERSION = "other_backends", "1"
OCTAVO, WHOLE, ONNX = "octavo", "octavo_whole", "onnx"
TENSORRT, VLLM, TENSORRT_LLM = "tensorrt", "vllm", "tensorrt_llm"
ENGINE_SCRIPT = "from octavo.server.triton.engine_model import TritonPythonModel  # noqa: F401\n"
CLIENT = "client.py"
FIRST_PROMPT = "Hello"  # of the warm-up
OnPhase = Callable[[str, float, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """Written repository.

    Attributes:
        folder: folder of the repository.
        engine: checkpoint that octavo's engine and vLLM read.
        graph: report of the graph that onnxruntime and TensorRT run.
        models: models that Triton loads.
        others: models for servers with other backends.
    """

    folder: Path
    engine: SavedCheckpoint
    graph: OnnxReport
    models: tuple[str, ...] = (OCTAVO, WHOLE, ONNX)
    others: tuple[str, ...] = (TENSORRT, VLLM, TENSORRT_LLM)


def write_repository(
    folder: Path,
    *,
    engine: Callable[[], ExportSource],
    graph: Callable[[], tuple[ExportSource, OnnxOptions]],
    max_shard_bytes: int,
    verify: bool,
    on_phase: OnPhase = lambda _label, _done, _total: None,
) -> Repository:
    """Write a repository; the folder appears only after everything in it was checked.

    Args:
        folder: new or empty folder.
        engine: loads the model for octavo's engine, in a recipe that compressed-tensors supports.
        graph: loads the model for the graph and its options; called after the other model is freed.
        max_shard_bytes: largest file of the checkpoint.
        verify: read the checkpoint back in a fresh process and compare.
        on_phase: called with a phase, the steps done and the total.

    Raises:
        ConfigError: the folder is not empty, or a model cannot be written in this format.
        CheckpointError: the written model computes something else, or the engine cannot serve it.
    """
    with claimed_folder(folder), replacing_folder(folder) as temporary:
        saved = _write_engine(temporary, engine(), max_shard_bytes=max_shard_bytes, verify=verify, on_phase=on_phase)
        source, options = graph()
        report = _write_graph(temporary, source, options, on_phase)
        (temporary / CLIENT).write_bytes(_source_of(CLIENT))
        (temporary / "README.md").write_text(readme(saved, report, models=MODELS, others=OTHERS), encoding="utf-8")
    return Repository(folder=folder, engine=saved, graph=report)


def _write_engine(
    folder: Path, source: ExportSource, *, max_shard_bytes: int, verify: bool, on_phase: OnPhase
) -> SavedCheckpoint:
    """Write the checkpoint and all models that use it."""
    place = folder / MODELS / OCTAVO
    saved = save_quantized(
        source.language_model,
        place / VERSION / FOLDER,
        kv_scales=source.kv_scales,
        dtype=_exact_dtype(source.language_model),
        max_shard_bytes=max_shard_bytes,
        verify_folder=verify,
        on_phase=on_phase,
    )
    on_phase("load it as the engine does", 0, 1)
    load_served_model(saved.folder)
    (place / VERSION / "model.py").write_text(ENGINE_SCRIPT, encoding="utf-8")
    (place / "warmup").mkdir()
    prompt = FIRST_PROMPT.encode()
    (place / "warmup" / INPUT).write_bytes(struct.pack("<I", len(prompt)) + prompt)
    _write_config(place, configs.engine_config(OCTAVO))
    _write_script(folder / MODELS / WHOLE, "whole_model.py")
    _write_config(folder / MODELS / WHOLE, configs.whole_config(WHOLE))
    others = folder / OTHERS
    path = f"{MODELS}/{OCTAVO}/{VERSION}/{FOLDER}"
    _write_config(others / VLLM, configs.vllm_config(VLLM))
    settings = {"model": path, "dtype": "bfloat16", "gpu_memory_utilization": 0.9}
    (others / VLLM / VERSION / "model.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    built = f"{MODELS}/{TENSORRT_LLM}/{VERSION}"
    config = configs.tensorrt_llm_config(TENSORRT_LLM, engine=built, largest_batch=LARGEST_BATCH)
    _write_config(others / TENSORRT_LLM, config)
    return saved


def _write_graph(folder: Path, source: ExportSource, options: OnnxOptions, on_phase: OnPhase) -> OnnxReport:
    """Write the graph and all models that use it."""
    if options.dtype == "bf16":
        raise ConfigError("onnxruntime's Python API does not support bf16 tensors; give --dtype fp16 or fp32")
    place = folder / MODELS / ONNX
    report = export_onnx(
        source.language_model,
        place / VERSION,
        options=options,
        calibration=source.calibration,
        on_step=lambda step: on_phase(step, 0, 1),
    )
    _write_script(place, "graph_model.py")
    write_sums(place / VERSION)  # with the program
    inputs, outputs = graph_tensors(place / VERSION / MODEL)
    _write_config(place, configs.onnx_config(ONNX, inputs, outputs, largest_batch=LARGEST_BATCH))
    config = configs.tensorrt_config(
        TENSORRT, inputs, outputs, largest_batch=LARGEST_BATCH, usual_batch=USUAL_BATCH, file=ENGINE
    )
    _write_config(folder / OTHERS / TENSORRT, config)
    return report


def _write_script(place: Path, name: str) -> None:
    """Copy a module of this package as a model's model.py."""
    (place / VERSION).mkdir(parents=True, exist_ok=True)
    (place / VERSION / "model.py").write_bytes(_source_of(name))


def _source_of(name: str) -> bytes:
    return files("octavo.server.triton").joinpath(name).read_bytes()


def _write_config(place: Path, config: Mapping[str, Any]) -> None:
    (place / VERSION).mkdir(parents=True, exist_ok=True)  # Triton needs the version's folder even if it is empty
    (place / "config.pbtxt").write_text(config_text(config), encoding="utf-8")


def _exact_dtype(model: LanguageModel) -> str:
    """Smallest dtype that represents every tensor not stored as codes exactly: "bf16" or "fp32"."""
    layers = (path for path, layer in model.model.named_modules() if isinstance(layer, Linear))
    coded = {f"{path}.{name}" for path in layers for name in ("weight", "weight_codes")}
    others = (tensor for name, tensor in model.model.state_dict().items() if name not in coded)
    return "bf16" if all(torch.equal(tensor.bfloat16().to(tensor.dtype), tensor) for tensor in others) else "fp32"
