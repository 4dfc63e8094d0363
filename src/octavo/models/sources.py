"""Model sources: find a model and its kind (a run of octavo, a Hugging Face folder or a GGUF file).

| kind         | recognised by                                              |
|--------------|------------------------------------------------------------|
| GGUF         | a name that ends in .gguf                                  |
| Hugging Face | a folder with a config.json, in high precision or in FP8   |
| run          | a folder with a run's configuration, metrics or tokenizer  |

An existing path takes precedence over a name on the Hugging Face Hub. The network is used only with ``hub=True``
(``--hub``), so that a mistyped path is not looked up there.
"""

import re
from collections.abc import Sequence
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
    "check_run_folder",
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
FROM_HUB = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")  # the files of a model that octavo reads
NOT_FROM_HUB = ("*/*", "consolidated*")  # copies of the weights for other programs


class SourceKind(StrEnum):
    """Kind of a model source; see the table above."""

    RUN = "run"
    HUGGING_FACE = "hugging face"
    GGUF = "gguf"


def located(source: str | Path, *, hub: bool = False, files: Sequence[str] = FROM_HUB) -> Path:
    """Return the path of a model, which may be in the Hub's cache.

    Args:
        source: a path, or a name on the Hub.
        hub: download the model's files into the cache; otherwise only cached files are used.
        files: patterns of the files to download; the configuration alone tells a model that cannot be read.

    Raises:
        ConfigError: there is no such path, and no model of that name in the cache or on the Hub.
    """
    path = Path(source)
    if path.exists() or is_gguf(path):
        return path
    message = f"there is no {str(source)!r}; give a run's folder, a Hugging Face folder or a .gguf file"
    if not HUB_NAME.fullmatch(str(source)):
        raise ConfigError(f"{message}, or ORG/NAME with --hub to download a model from the Hugging Face Hub")
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(f"{message}; a name on the Hugging Face Hub needs transformers, {INSTALL}") from error
    try:
        folder: str = huggingface_hub.snapshot_download(
            str(source), local_files_only=not hub, allow_patterns=[*files], ignore_patterns=[*NOT_FROM_HUB]
        )
    except Exception as error:  # errors of the Hub, the network or the disk
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        hint = (
            f"the Hub has no model of that name or cannot be reached: {reason}"
            if hub
            else "--hub downloads ORG/NAME from the Hugging Face Hub"
        )
        raise ConfigError(f"{message}; {hint}") from error
    return Path(folder)


def kind_of(source: str | Path) -> SourceKind:
    """Return the kind of a model source.

    A folder with a config.json is a Hugging Face folder, even if it also has files named as a run's.

    Raises:
        ConfigError: see :func:`located`; or the folder of a study, which has several models.
        CheckpointError: the path is not a language model.
    """
    path = located(source)
    if is_gguf(path):
        return SourceKind.GGUF
    if path.is_dir() and (path / HF_CONFIG).is_file():
        return SourceKind.HUGGING_FACE
    check_run_folder(path)
    if has_run(path):
        return SourceKind.RUN
    raise CheckpointError(
        f"{str(path)!r} is not a model; give a run's folder (it has a {RUN_CONFIG}), a Hugging Face folder (it has a "
        f"{HF_CONFIG}) or a .gguf file"
    )


def is_gguf(path: str | Path) -> bool:
    """Return True for a path with the suffix of a GGUF file."""
    return Path(path).suffix.lower() == ".gguf"


def has_run(run_dir: str | Path) -> bool:
    """Return True if a run was started in the folder."""
    return any((Path(run_dir) / name).exists() for name in (RUN_CONFIG, RUN_TOKENIZER, RUN_METRICS, CHECKPOINTS))


def check_run_folder(path: Path) -> None:
    """Check that a folder is not a study or another folder of several runs.

    Raises:
        ConfigError: the folder holds several runs, or a study.
    """
    if run_folders := runs_in(path):
        kind = "holds a study of several runs" if (path / RUN_CONFIG).exists() else "is a folder of runs"
        raise ConfigError(f"{str(path)!r} {kind}; name one of {', '.join(run_folders)}")


def runs_in(path: Path) -> list[str]:
    """List the runs inside a folder that is not a run itself."""
    if any((path / name).exists() for name in (RUN_METRICS, CHECKPOINTS)):
        return []
    return sorted(str(child.parent) for child in path.glob(f"*/{RUN_CONFIG}"))
