"""Every reader of a file or a request, with a whole example that the real writer made.

``LEFT_OUT`` names the public functions that look like a reader and are none, or are reached through another;
``test_every_reader_is_here`` compares both with the sources.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import octavo
from benchmarks.hopper.reading import load_report
from octavo import recipes
from octavo.bench.results import PartRecord, Report
from octavo.checkpoints import load_quantized
from octavo.checksums import write_sums
from octavo.cli.options import read_api_key
from octavo.doctor import Captures, load_capture
from octavo.doctor.trainer_settings import read_trainer_settings, write_trainer_settings
from octavo.engines import read_server_logprobs
from octavo.errors import DataError
from octavo.experiments.bars import Bars, read_bars, save_bars
from octavo.export.lockstep import load_probe, make_probe, save_probe
from octavo.inference import load_served_model, load_served_model_as
from octavo.language_model import load_language_model
from octavo.models import Llama, load_gguf
from octavo.models.llama_folder import read_llama, read_tokenizer, write_llama, write_tokenizer
from octavo.parsing import parse_json, read_tensors
from octavo.planning import find_hardware, fitted_constants, load_shape, predict_row, read_rows
from octavo.planning.calibration import calibrated, read_calibration
from octavo.planning.plan_comparison import compare_plans, read_plan
from octavo.quantization import Mix, load_calibration, load_mix, load_qat, run_qat, save_mix, save_qat
from octavo.recipes import from_toml, to_toml
from octavo.server.error_responses import ResponseError
from octavo.server.fields import FieldError, JsonObject
from octavo.server.tensors import INFER, unpack
from octavo.text.sources import load_documents
from octavo.text.tokens import open_data
from octavo.training.checkpoint import latest, load_checkpoint
from octavo.training.checkpoint_files import MODEL, StoredTensors, name_of_part
from octavo.training.comparison import Study
from octavo.training.config import load_config, save_config
from octavo.training.loop import train
from octavo.training.precision import apply_recipe
from octavo.training.run_folder import load_run
from octavo.training.setup import build_optimizer
from octavo.training.watched_run import read_run
from tests.unit.checkpoints.folders import ROW, dynamic, written
from tests.unit.doctor.test_capture import some_capture
from tests.unit.models import small_gguf
from tests.unit.quantization.qat.test_run import HELD_OUT, TRAINING, settings_of
from tests.unit.quantization.tiny_model import tiny_language_model
from tests.unit.quantization.tiny_models import windows
from tests.unit.training.synthetic_study import study
from tests.unit.training.tiny_runs import tiny_config, tiny_data

__all__ = ["LEFT_OUT", "READERS", "Reader"]

LEFT_OUT = {
    "load_name": "no file: the name of a load in bench serve",
    "load_graph_source": "a model, through load_language_model",
    "load_source": "a model, through load_language_model and load_quantized",
    "load_operands": "no file: what a forward pass saved for backward",
    "open_display": "no file",
    "read_bodies": "no file: requests of a server",
    "read_by_others": "no file: modules of other libraries",
    "load_layers": "tensors, through load_quantized",
    "read_configuration": "config.json, through load_quantized",
    "read_layout": "names and sizes of tensors, through load_quantized",
    "read_extra_state": "no file: tensors at hand",
    "read_names": "no file: tensors at hand",
    "read_folder": "a calibration's files, through load_calibration",
    "read_json": "in every reader of JSON",
    "read_lines": "metrics.jsonl, through read_run",
    "read_limits": "no user's file: control groups of the system",
    "read_metrics": "metrics.jsonl, through read_run",
    "read_object": "in every reader of JSON",
    "read_scaling_state": "no file: the state of a model in memory",
    "read_state": "a checkpoint's state.json, through load_checkpoint",
    "read_toml": "in every reader of TOML",
    "load_model": "a checkpoint's tensors, through load_checkpoint",
    "load_tokenizer": "tokenizer.json, through load_run",
    "parse_schedule": "an option's text",
    "parse_source": "an option's text",
    "parse_tensors": "in every reader of tensors",
    "parse_tokenizer": "in every reader of tokenizers",
    "parse_toml": "in every reader of TOML",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A reader and what it reads.

    Attributes:
        functions: of octavo, that are tried here.
        write: writes a whole example into an empty folder.
        read: reads it; raises OctavoError or OSError where it is damaged.
        damage: pattern of the files that are damaged.
        cost: how many times as long as most it takes, so that it gets fewer cases.
    """

    functions: tuple[Callable[..., Any], ...]
    write: Callable[[Path], object]
    read: Callable[[Path], object]
    damage: str = "**/*"
    cost: int = 1


def _run(folder: Path) -> None:
    config = tiny_config(recipe="delayed", steps=2, checkpoint_interval=2, statistics_interval=1, eval_interval=1)
    train(config, folder / "run", data=tiny_data(folder))


def _checkpoint(folder: Path) -> None:
    config = load_config(folder / "run" / "config.toml")
    path = latest(folder / "run")
    assert path is not None or not (folder / "run" / "checkpoints").exists()
    if path is None:
        return
    model = Llama(tiny_config().model.llama(vocab_size=300, max_positions=16))
    training = tiny_config(recipe="delayed").training
    apply_recipe(model, training)
    load_checkpoint(path, model=model, optimizer=build_optimizer(model, config.training))


def _parts(folder: Path) -> None:
    """A matrix of which each rank has two rows."""
    for rank in (0, 1):
        places = json.dumps({"weight": {"saved_offsets": [2 * rank, 0]}})
        file = folder / name_of_part(MODEL, rank, 2)
        save_file({"weight": torch.ones(2, 4)}, file, metadata={"DCP_SHARDING_INFO": places})


def _hugging_face(folder: Path) -> None:
    model = tiny_language_model()
    assert isinstance(model.model, Llama)
    write_llama(folder, model.model)
    write_tokenizer(folder, model.tokenizer, context=model.context, bos_id=0, eos_id=1)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")


def _folder(name: str) -> Callable[[Path], object]:
    return lambda folder: written(folder / "model", name)


def _served(folder: Path) -> None:
    """With what only a server reads: how messages become text, and which tokens end one."""
    written(folder / "model", "rows")
    (folder / "model" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (folder / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    write_sums(folder / "model")


def _qat(folder: Path) -> None:
    result = run_qat(tiny_language_model(), settings_of(), training=TRAINING, held_out=HELD_OUT)
    save_qat(folder / "qat", result)


def _calibration(folder: Path) -> None:
    model = tiny_language_model()
    octavo.calibrate(model, [windows()[:, :16] % 300], kv_cache=True).save(folder / "calibration")


def _probe(folder: Path) -> None:
    model = dynamic(ROW)
    paths = [path for path, layer in model.model.named_modules() if isinstance(layer, octavo.nn.Linear)]
    save_probe(make_probe(model.logits, model.model, paths, windows(2), prompt=8), folder / "probe.safetensors")


def _small() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    octavo.convert(model, "delayed")
    return model


def _documents(folder: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    (folder / "a.jsonl").write_text("".join(json.dumps({"text": f"row {i}", "n": i}) + "\n" for i in range(20)))
    (folder / "b.txt").write_text("some text äöü\n" * 20)
    parquet.write_table(pa.table({"text": ["one", "two", None]}), folder / "c.parquet")


BODY = {
    "id": "a",
    "inputs": [
        {"name": "n", "datatype": "INT32", "shape": [1], "data": [7]},
        {"name": "x", "datatype": "FP32", "shape": [2, 1], "parameters": {"binary_data_size": 8}},
        {"name": "t", "datatype": "BYTES", "shape": [1], "data": ["text"]},
    ],
    "outputs": [{"name": "text", "parameters": {"binary_data": False}}],
}


@contextmanager
def _refusals() -> Iterator[None]:
    """Let the server's two ways to refuse a request leave as octavo's own."""
    try:
        yield
    except (ResponseError, FieldError) as error:
        raise DataError(str(error)) from error


def _infer(path: Path) -> None:
    head, _, behind = path.read_bytes().partition(b"\n")
    with _refusals():
        unpack(head + behind, str(len(head)))


def _json_record(path: Path) -> None:
    with _refusals():
        INFER.read(parse_json(path.read_bytes()))


READERS: dict[str, Reader] = {
    "run configuration": Reader(
        functions=(load_config,),
        write=lambda folder: save_config(
            tiny_config(recipe="delayed", recipe_options={"history_length": 4}, overrides={"*.q_proj": "bf16"}),
            folder / "config.toml",
        ),
        read=lambda folder: load_config(folder / "config.toml"),
    ),
    "a server's log-probabilities": Reader(
        functions=(read_server_logprobs,),
        write=lambda folder: (folder / "server.jsonl").write_text("[null, -0.5, -1]\n[null, -0.25, -3e-7]\n"),
        read=lambda folder: read_server_logprobs(folder / "server.jsonl"),
    ),
    "bars of a study": Reader(
        functions=(read_bars,),
        write=lambda folder: save_bars(Bars(targets=(0.5, 0.9)), folder / "bars.toml"),
        read=lambda folder: read_bars(folder / "bars.toml"),
    ),
    "recipe": Reader(
        functions=(from_toml,),
        write=lambda folder: (folder / "recipe.toml").write_text(to_toml(recipes.get("blockwise"))),
        read=lambda folder: from_toml((folder / "recipe.toml").read_bytes().decode("utf-8", "replace")),
    ),
    "run": Reader(
        functions=(load_run,), write=_run, read=lambda folder: load_run(folder / "run"), damage="run/**/*", cost=8
    ),
    "run's metrics": Reader(
        functions=(read_run,), write=_run, read=lambda folder: read_run(folder / "run"), damage="run/*[lt]"
    ),
    "settings of a Trainer's run": Reader(
        functions=(read_trainer_settings,),
        write=lambda folder: write_trainer_settings(folder, SimpleNamespace(seed=42, learning_rate=1e-3, bf16=True)),
        read=read_trainer_settings,
    ),
    "checkpoint": Reader(
        functions=(load_checkpoint,), write=_run, read=_checkpoint, damage="run/checkpoints/**/*", cost=8
    ),
    "tensors of two ranks": Reader(
        functions=(StoredTensors,),
        write=_parts,
        read=lambda folder: dict(StoredTensors(sorted(folder.glob("*.safetensors")))),
    ),
    "tokens": Reader(
        functions=(open_data,),
        write=tiny_data,
        read=lambda folder: open_data(folder / "data").tokenizer(),
        damage="data/*",
    ),
    "text": Reader(
        functions=(load_documents,), write=_documents, read=lambda folder: load_documents(folder), damage="*"
    ),
    "study": Reader(
        functions=(Study.from_json,),
        write=lambda folder: (folder / "study.json").write_text(study().to_json()),
        read=lambda folder: Study.from_json((folder / "study.json").read_bytes().decode("utf-8", "replace")),
    ),
    "capture": Reader(
        functions=(load_capture,),
        write=lambda folder: Captures(folder).add(some_capture()),
        read=lambda folder: [load_capture(file) for file in folder.glob("*")],
    ),
    "calibration": Reader(
        functions=(load_calibration,), write=_calibration, read=lambda folder: load_calibration(folder / "calibration")
    ),
    "scaling state": Reader(
        functions=(octavo.load_scaling_state, read_tensors),
        write=lambda folder: save_file(octavo.scaling_state(_small()), folder / "scaling.safetensors"),
        read=lambda folder: octavo.load_scaling_state(_small(), read_tensors(folder / "scaling.safetensors")),
    ),
    "measurements": Reader(
        functions=(read_rows,),
        write=lambda folder: (folder / "rows.csv").write_text(
            "id,kind,model,hardware,gpus,tp,seq,micro_batch,precision,metric,notes\n"
            "a,train,Llama-3-8B,H100,8,2,8192,1,fp8 current,tokens_per_s_per_gpu,group=a; VP 2; full AC\n"
            "b,infer,Qwen3-30B-A3B,GB200,2,2,128/2048,,fp8,output_tokens_per_s,EP 2\n"
            "c,gemm,linear M=64 N=128 K=256 fwd+bwd,B200,1,,,,mxfp8,time_us,\n"
        ),
        read=lambda folder: [predict_row(row, fitted_constants()) for row in read_rows(folder / "rows.csv")],
    ),
    "plan": Reader(
        functions=(read_plan,),
        write=lambda folder: (folder / "plan.json").write_text(
            '{"gpus": 8, "options": [{"recipe": "bf16", "step_time_s": 2.0, "days": 3.5, "memory_gb": 60.0,'
            ' "tokens_per_s_per_gpu": 900.0},'
            ' {"recipe": "mxfp8", "reason": "no MX scales"}]}'
        ),
        read=lambda folder: compare_plans(read_plan(folder / "plan.json"), read_plan(folder / "plan.json")),
    ),
    "calibration of a plan": Reader(
        functions=(read_calibration,),
        write=lambda folder: (folder / "result.json").write_text(
            '{"facts": {"device": "NVIDIA H100"},'
            ' "parts": [{"sections": [{"title": "Linear, eager, forward and backward, 4096×4096×4096",'
            ' "raw": {"seconds": {"bf16, eager": [6e-4, 5e-4], "tensorwise, eager": [4e-4]}}}]}]}'
        ),
        read=lambda folder: calibrated(
            fitted_constants(),
            read_calibration(folder / "result.json", find_hardware("h100")),
            find_hardware("h100"),
            file="result.json",
        ),
    ),
    "model's configuration": Reader(
        functions=(load_shape,),
        write=lambda folder: (folder / "config.json").write_text(
            '{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,'
            ' "vocab_size": 100, "intermediate_size": 256, "num_local_experts": 4, "num_experts_per_tok": 2}'
        ),
        read=lambda folder: load_shape(str(folder)).parameters,
    ),
    "mix": Reader(
        functions=(load_mix,),
        write=lambda folder: save_mix(
            Mix(overrides={"*.down_proj": "bf16", "*": "rowwise"}, tables={"model.embed_tokens": (0, 3)}),
            folder / "mix.toml",
        ),
        read=lambda folder: load_mix(folder / "mix.toml"),
    ),
    "qat folder": Reader(functions=(load_qat,), write=_qat, read=lambda folder: load_qat(folder / "qat"), cost=8),
    "llama folder": Reader(
        functions=(read_llama, read_tokenizer),
        write=_hugging_face,
        read=lambda folder: (read_llama(folder), read_tokenizer(folder)),
        cost=2,
    ),
    "hugging face folder": Reader(
        functions=(load_language_model,), write=_hugging_face, read=lambda folder: load_language_model(folder), cost=40
    ),
    "served folder": Reader(
        functions=(load_served_model,),
        write=_hugging_face,
        read=lambda folder: load_served_model(folder, recipe="bf16"),
        damage="[cgt]*[na]",
        cost=40,
    ),
    "gguf": Reader(
        functions=(load_gguf,),
        write=lambda folder: small_gguf.write(folder / "model.gguf"),
        read=lambda folder: load_gguf(folder / "model.gguf"),
        cost=4,
    ),
    "served fp8 folder": Reader(
        functions=(load_served_model,),
        write=_served,
        read=lambda folder: load_served_model(folder / "model", recipe="fp8"),
        damage="model/*[na]",
        cost=20,
    ),
    "folder served as an engine": Reader(
        functions=(load_served_model_as,),
        write=_served,
        read=lambda folder: load_served_model_as(folder / "model", "vllm-token"),
        damage="model/*[na]",
        cost=20,
    ),
    **{
        f"folder of {name}": Reader(
            functions=(load_quantized,),
            write=_folder(name),
            read=lambda folder: load_quantized(folder / "model"),
            cost=8,
        )
        for name in ("rows", "blocks", "modelopt", "own groups")
    },
    "probe": Reader(
        functions=(load_probe,), write=_probe, read=lambda folder: load_probe(folder / "probe.safetensors")
    ),
    "bench result": Reader(
        functions=(load_report,),
        write=lambda folder: (folder / "result.json").write_text(
            Report(
                facts={"device": "H200"},
                command="octavo",
                is_rehearsal=False,
                parts=[PartRecord(name="casts", sections=[], owed=())],
            ).to_json()
        ),
        read=lambda folder: load_report(folder / "result.json"),
    ),
    "key": Reader(
        functions=(read_api_key,),
        write=lambda folder: (folder / "key").write_text("a key\n"),
        read=lambda folder: read_api_key(folder / "key"),
    ),
    "request": Reader(
        functions=(JsonObject.read, parse_json),
        write=lambda folder: (folder / "body.json").write_text(json.dumps(BODY)),
        read=lambda folder: _json_record(folder / "body.json"),
    ),
    "request with tensors": Reader(
        functions=(unpack,),
        write=lambda folder: (folder / "body.bin").write_bytes(json.dumps(BODY).encode() + b"\n" + bytes(8)),
        read=lambda folder: _infer(folder / "body.bin"),
    ),
}
