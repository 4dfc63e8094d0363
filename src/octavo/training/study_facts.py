"""Facts about a study for its report: machine, versions, model and text."""

import platform
from datetime import UTC, datetime
from pathlib import Path

import torch

from octavo._lazy import own_version
from octavo.html.wording import counted
from octavo.text.corpus import Split
from octavo.text.sources import BUILTIN
from octavo.text.tokens import TokenData
from octavo.training.config import RunConfig
from octavo.training.precision import resolve_device

__all__ = ["facts_of", "processor_name"]

CPUINFO = Path("/proc/cpuinfo")


def facts_of(config: RunConfig, data: TokenData, *, parameters: int) -> dict[str, str]:
    """Facts by name, in the order of the report."""
    return _model_facts(config, data, parameters) | _data_facts(data) | _machine_facts(config)


def processor_name() -> str:
    """CPU model name from /proc/cpuinfo, or the architecture on other systems."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _model_facts(config: RunConfig, data: TokenData, parameters: int) -> dict[str, str]:
    model, training = config.model, config.training
    shape = f"{counted(model.num_layers, 'layer')} of width {model.hidden_size}"
    heads = f"{model.num_heads} query and {model.num_kv_heads} key-value heads"
    return {
        "model": f"a Llama-style decoder of {parameters / 1e6:.1f} M parameters ({shape}, {heads})",
        "batches": f"{training.tokens_per_step:,} tokens a step, context {training.context}",
        "optimizer": f"AdamW, learning rate {training.lr:g} to {training.min_lr:g}, warm-up {training.warmup} steps",
        "seed": str(training.seed),
        "vocabulary": f"{data.vocab_size:,} tokens, byte-level BPE",
    }


def _data_facts(data: TokenData) -> dict[str, str]:
    source = str(data.manifest["source"])
    name = f"the library of Python {platform.python_version()}, PSF licence" if source == BUILTIN else source
    tokens = ", ".join(f"{len(data.splits[split]):,} {split}" for split in Split)
    return {"text": name, "tokens": tokens, "content hash": data.content_hash}


def _machine_facts(config: RunConfig) -> dict[str, str]:
    on_cuda = resolve_device(config.training.device).type == "cuda"
    threads = counted(config.training.threads or torch.get_num_threads(), "thread")
    return {
        "device": torch.cuda.get_device_name() if on_cuda else f"{processor_name()}, {threads}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "octavo": own_version(),
        "measured": datetime.now(tz=UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
