"""Where a model lies and what it is: a run of octavo's, a Hugging Face folder or a GGUF file.

| kind         | recognised by                                              |
|--------------|------------------------------------------------------------|
| GGUF         | a name that ends in .gguf                                  |
| Hugging Face | a folder with a config.json, in high precision or in FP8   |
| run          | a folder with a config.toml, metrics or checkpoints        |

An existing path wins over a name on Hugging Face's hub. The network is used only where :func:`located` is told so
(``--hub``): a path with a typing error is not looked up anywhere.
"""

import re
from enum import StrEnum
from pathlib import Path

from octavo.errors import CheckpointError, ConfigError

__all__ = [
    "HF_CONFIG",
    "HUB_NAME",
    "INSTALL",
    "RUN_CONFIG",
    "RUN_TOKENIZER",
    "SourceKind",
    "check_is_run",
    "has_run",
    "is_gguf",
    "kind_of",
    "located",
    "runs_in",
]

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # ORG/NAME
HF_CONFIG, RUN_CONFIG, RUN_TOKENIZER, RUN_METRICS = "config.json", "config.toml", "tokenizer.json", "metrics.jsonl"
CHECKPOINTS = "checkpoints"
INSTALL = "pip install 'octavo[hf]'"
FROM_HUB = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")  # of a model's files those that are read
NOT_FROM_HUB = ("*/*", "consolidated*")  # the same weights again, as other programs name them


class SourceKind(StrEnum):
    """Kinds of the table above."""

    RUN = "run"
    HUGGING_FACE = "hugging face"
    GGUF = "gguf"


def located(source: str | Path, *, hub: bool = False) -> Path:
    """Where a model lies: at a path, or in the hub's cache.

    Args:
        source: a path, or a name on the hub.
        hub: download a name's files into the cache; without it only those that are there already count.

    Raises:
        ConfigError: there is no such path, and no model of that name in the cache or on the hub.
    """
    path = Path(source)
    if path.exists() or is_gguf(path):
        return path
    refused = f"there is no {str(source)!r}; give a run's folder, a Hugging Face folder or a .gguf file"
    if not HUB_NAME.fullmatch(str(source)):
        raise ConfigError(f"{refused}, or ORG/NAME with --hub, which downloads a model from Hugging Face's hub")
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(f"{refused}; a name on Hugging Face's hub needs transformers, {INSTALL}") from error
    try:
        folder: str = huggingface_hub.snapshot_download(
            str(source), local_files_only=not hub, allow_patterns=[*FROM_HUB], ignore_patterns=[*NOT_FROM_HUB]
        )
    except Exception as error:  # the hub's, the network's and the disk's errors alike
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        more = (
            f"the hub did not give a model of that name: {reason}"
            if hub
            else "--hub downloads ORG/NAME from Hugging Face's hub"
        )
        raise ConfigError(f"{refused}; {more}") from error
    return Path(folder)


def kind_of(source: str | Path) -> SourceKind:
    """Kind of a model's source; no other function decides it.

    A Hugging Face folder, of ``octavo qat`` too, may hold files named as a run's; its config.json decides.

    Raises:
        ConfigError: see :func:`located`; or it is a study's folder, which has several models.
        CheckpointError: what is there is no language model.
    """
    path = located(source)
    if is_gguf(path):
        return SourceKind.GGUF
    if path.is_dir() and (path / HF_CONFIG).is_file():
        return SourceKind.HUGGING_FACE
    check_is_run(path)
    if has_run(path):
        return SourceKind.RUN
    raise CheckpointError(
        f"{str(path)!r} is no model; give a run's folder (it has a {RUN_CONFIG}), a Hugging Face folder (it has a "
        f"{HF_CONFIG}) or a .gguf file"
    )


def is_gguf(path: str | Path) -> bool:
    """Whether a path names a GGUF file, by its ending."""
    return Path(path).suffix.lower() == ".gguf"


def has_run(run_dir: str | Path) -> bool:
    """Whether a run was started in the folder."""
    return any((Path(run_dir) / name).exists() for name in (RUN_CONFIG, RUN_TOKENIZER, RUN_METRICS, CHECKPOINTS))


def check_is_run(path: Path) -> None:
    """Point from a folder of runs to these. A study's has a configuration too, but trains nothing itself.

    Raises:
        ConfigError: the folder holds several runs, or a study.
    """
    if inside := runs_in(path):
        kind = "holds a study of several runs" if (path / RUN_CONFIG).exists() else "is a folder of runs"
        raise ConfigError(f"{str(path)!r} {kind}; name one of {', '.join(inside)}")


def runs_in(path: Path) -> list[str]:
    """The runs inside a folder that is none itself."""
    if any((path / name).exists() for name in (RUN_METRICS, CHECKPOINTS)):
        return []
    return sorted(str(child.parent) for child in path.glob(f"*/{RUN_CONFIG}"))
