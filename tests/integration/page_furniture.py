"""What the pages assume that their reader has: texts, models, runs and results, all small."""

import itertools
import json
import shutil
from pathlib import Path

from octavo.bench.results import Report, write_result
from octavo.models.llama_folder import write_tokenizer
from octavo.text.tokenizer import end_of_text_id, train_tokenizer
from tests.documented_blocks import PAGES, blocks
from tests.policy.source_tree import ROOT
from tests.unit.models import small_gguf

SMALL = """
[model]
hidden_size = 32
intermediate_size = 64
num_layers = 1
num_heads = 4
num_kv_heads = 2
[data]
source = "own.txt"
vocab_size = 300
[training]
recipe = "delayed"
recipe_options = { margin = 20 }  # the fault of runs/mine
statistics_interval = 1
threads = 1
steps = 6
batch_size = 2
context = 32
warmup = 2
eval_interval = 3
checkpoint_interval = 3
"""
TEXT = "".join(f"{n} times {n % 7} makes {n * (n % 7)}, of course.\n" for n in range(2000))
OTHER = "".join(f"Who adds {n} and {n % 11} has got {n + n % 11}; nobody doubts it.\n" for n in range(2000))


def write_files(folder):
    """Write what all pages share."""
    (folder / "my-texts").mkdir()
    for name, text in (("own.txt", TEXT), ("my-texts/one.txt", TEXT), ("held-out.txt", OTHER), ("novel.txt", TEXT)):
        (folder / name).write_text(text)
    rows = (f'{{"question": "why {n}?", "answer": "{n} times {n % 7} makes {n * (n % 7)}"}}\n' for n in range(2000))
    (folder / "answers.jsonl").write_text("".join(rows))
    for name in ("small.toml", "long.toml"):
        (folder / name).write_text(SMALL)
    plain = [line for line in SMALL.splitlines() if not line.startswith("recipe")]
    (folder / "plain.toml").write_text("\n".join(plain))
    (folder / "run.toml").write_text("\n".join([*plain, "grad_accumulation = 2"]))
    small_gguf.write(folder / "model.gguf", settings={"llama.context_length": 64})


def remove(run):
    """A run that the page trains itself."""
    return lambda: shutil.rmtree(run)


def copy(run):
    """A run that has another name on the page."""
    return lambda: shutil.copytree("runs/mine", run)


def for_plan():
    """Measurements: of GEMMs on a GPU, and published ones."""
    seconds = {"bf16, CUDA graph": [0.036], "tensorwise, CUDA graph": [0.0205]}
    section = {"title": "Linear, CUDA graph, forward and backward, 16384³", "raw": {"seconds": seconds}}
    Path("results").mkdir()
    result = {"facts": {"device": "NVIDIA H100 80GB HBM3"}, "parts": [{"sections": [section]}]}
    Path("results/hopper.json").write_text(json.dumps(result))
    with (ROOT / "benchmarks/planner_rows.csv").open() as rows, Path("measurements.csv").open("w") as few:
        few.writelines(itertools.islice(rows, 4))


def for_trainer():
    """The page's own program, and once more without FP8, in another folder."""
    program = first_python("docs/how-to/huggingface-trainer.md")
    exec(program, {"__name__": "__main__"})
    for found, written in (('"output"', '"output-bf16"'), ('FP8Callback("tensorwise"', 'FP8Callback("bf16"')):
        assert program.count(found) == 1
        program = program.replace(found, written)
    exec(program, {"__name__": "__main__"})


def for_several_devices():
    """The page's first program, changed for several ranks as the page says."""
    program = first_python("docs/how-to/train-on-several-devices.md")
    for found, written in (
        ('init_process_group("gloo", store=store, rank=0, world_size=1)', "init_process_group()"),
        ("(1,)", "(distributed.get_world_size(),)"),
    ):
        assert program.count(found) == 1
        program = program.replace(found, written)
    Path("loop.py").write_text(program)


def first_python(name):
    """The first block of Python of a page."""
    return next(block for language, _, block in blocks(PAGES[name]) if language == "python")


def write_hugging_face_folder(folder, family, **sizes):
    """A tiny model in high precision, and a tokenizer."""
    import transformers

    sizes |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{family}Config")(vocab_size=300, num_key_value_heads=1, **sizes)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    tokenizer = train_tokenizer(TEXT.splitlines(), vocab_size=300)
    end = end_of_text_id(tokenizer)
    write_tokenizer(Path(folder), tokenizer, context=config.max_position_embeddings, bos_id=end, eos_id=end)


def for_experts():
    """A mixture of experts."""
    write_hugging_face_folder("mixtral", "Mixtral", max_position_embeddings=64)


def for_serve():
    """Models with room for the page's answers, and a key."""
    small_gguf.write(Path("model.gguf"), settings={"llama.context_length": 512})
    write_hugging_face_folder("SmolLM2-135M", "Llama", max_position_embeddings=512)
    Path("SmolLM2-135M/chat_template.jinja").write_text("{{ messages }}")
    Path("key.txt").write_text("a-key-of-some-length\n")


def for_gpu():
    """Results of a GPU; the benchmark names them by device and date."""
    facts = {"device": "NVIDIA H100 80GB HBM3", "torch": "2.13.0"}
    for folder in (".", "one", "two"):
        write_result(Path(folder), "RESULT", {".json": Report(facts=facts, command="", is_rehearsal=False).to_json()})


FURNITURE = {
    "docs/concepts/precision-schedules.md": remove("runs/mine"),
    "docs/how-to/choose-a-recipe.md": copy("runs/fp8"),
    "docs/how-to/compare-formats.md": copy("runs/demo/tensorwise"),
    "docs/how-to/compare-precisions.md": remove("runs/mine"),
    "docs/how-to/debug-a-loss-spike.md": remove("runs/bf16"),
    "docs/how-to/huggingface-trainer.md": for_trainer,
    "docs/how-to/measure-on-a-gpu.md": for_gpu,
    "docs/how-to/plan.md": for_plan,
    "docs/how-to/serve.md": for_serve,
    "docs/how-to/train-as-served.md": remove("runs/mine"),
    "docs/how-to/deploy-mixtures-of-experts.md": for_experts,
    "docs/how-to/train-on-several-devices.md": for_several_devices,
    "docs/how-to/use-the-autopilot.md": remove("runs/mine"),
}
