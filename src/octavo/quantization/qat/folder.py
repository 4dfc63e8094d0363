"""Folder written by ``octavo qat``: a tuned model, its recipe and its scales.

| file                                  | content                                                             |
|---------------------------------------|---------------------------------------------------------------------|
| config.json, model.safetensors,       | the tuned model in high precision, as a Hugging Face folder;        |
| tokenizer.json, tokenizer_config.json,| generation_config.json only if the end-of-text tokens are known, as |
| generation_config.json                | from a .gguf file                                                   |
| recipe.toml                           | the recipe used in training (``octavo.recipes.from_toml``)          |
| scales.safetensors                    | ``octavo.scaling_state``: the static inputs' scales                 |
| metrics.jsonl                         | one line for each step and each evaluation                          |
| qat.json                              | converted layers, settings, sources of the model and the text       |
| octavo.sha256                         | SHA-256 of all files (:mod:`octavo.checksums`)                      |

The folder is written under a hidden name next to its destination, synced and renamed: it is complete or absent.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from octavo import recipes
from octavo.checksums import check_sums, write_sums
from octavo.convert import convert, unfuse_experts
from octavo.errors import CheckpointError, ConfigError, DataError
from octavo.files import disk_errors, replacing_folder
from octavo.language_model import LanguageModel, load_language_model
from octavo.models import Llama
from octavo.models.llama_folder import read_llama, read_tokenizer, write_llama, write_tokenizer
from octavo.nn.scaling_state import load_scaling_state, scaling_state
from octavo.parsing import read_object, read_tensors
from octavo.quantization.qat.run import QATResult, QATSettings

__all__ = ["MARK", "bytes_of_qat", "load_qat", "save_qat", "text_of_qat"]

FORMAT = 1
MARK, RECIPE, SCALES, METRICS = "qat.json", "recipe.toml", "scales.safetensors", "metrics.jsonl"


def save_qat(folder: Path, result: QATResult, *, source: str = "", split: str = "") -> None:
    """Write the result of a run; the folder must be absent or empty.

    Args:
        folder: destination; see the module's table.
        result: of ``run_qat``.
        source: source of the training text, as for ``octavo.text.sources``.
        split: split of that source.

    Raises:
        ConfigError: the folder is not empty.
        OSError: the disk is full or not writable; nothing is left behind.
    """
    with replacing_folder(folder) as temporary:
        _write(temporary, result, {"source": source, "split": split})


def bytes_of_qat(model: LanguageModel) -> int:
    """Disk space of :func:`save_qat` in bytes: weights, tokenizer, and 1 MiB for the other files."""
    weights = {parameter.data_ptr(): parameter.nbytes for parameter in model.model.parameters()}
    return sum(weights.values()) + len(model.tokenizer.to_str().encode()) + (1 << 20)


def text_of_qat(folder: str | Path) -> tuple[str, str]:
    """Source and split of the training text passed to :func:`save_qat`; empty if unknown.

    Raises:
        CheckpointError: as for :func:`load_qat`.
    """
    text = _read_mark(Path(folder) / MARK).get("text", {})
    return text.get("source", ""), text.get("split", "")


def load_qat(folder: str | Path) -> LanguageModel:
    """Load and convert a model written by :func:`save_qat`; bitwise identical to the trained model.

    Raises:
        CheckpointError: the folder was not written by ``octavo qat``, or is damaged.
    """
    path = Path(folder)
    mark = _read_mark(path / MARK)
    loaded = _read_llama(path) if mark["layout"] == "llama" else load_language_model(path)
    try:
        recipe = recipes.from_toml((path / RECIPE).read_text(encoding="utf-8"))
        scales = read_tensors(path / SCALES)
    except (OSError, UnicodeDecodeError, DataError, ConfigError) as error:
        raise CheckpointError(f"{str(path)!r} is damaged: {error}; tune the model again") from error
    unfuse_experts(loaded.model)  # as for tuning it
    layers = set(mark["layers"])
    report = convert(loaded.model, recipe, layer_filter=lambda name, _: name in layers, convert_head=True)
    if missing := sorted(layers - set(report.converted)):
        raise CheckpointError(f"the model in {str(path)!r} has no layer {missing[0]!r}; tune it again")
    load_scaling_state(loaded.model, scales)
    return loaded


def _write(folder: Path, result: QATResult, text: dict[str, str]) -> None:
    language_model, model = result.language_model, result.language_model.model
    if isinstance(model, Llama):
        write_llama(folder, model)
    else:
        writer: Any = model
        with disk_errors(folder):
            writer.save_pretrained(folder)
    write_tokenizer(
        folder,
        language_model.tokenizer,
        context=language_model.context,
        bos_id=language_model.bos_id,
        eos_id=language_model.eos_id,
    )
    (folder / RECIPE).write_text(recipes.to_toml(result.settings.recipe), encoding="utf-8")
    with disk_errors(folder / SCALES):
        save_file(scaling_state(model), folder / SCALES)
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in _lines(result)), encoding="utf-8")
    mark = {
        "format": FORMAT,
        "layout": "llama" if isinstance(model, Llama) else "transformers",
        "source": language_model.source,
        "text": text,
        "layers": list(result.report.converted),
        "settings": _plain(result.settings),
    }
    (folder / MARK).write_text(json.dumps(mark, indent=2) + "\n", encoding="utf-8")
    write_sums(folder)


def _lines(result: QATResult) -> Iterator[dict[str, Any]]:
    for name, steps in result.steps.items():
        yield from ({"kind": "step", "model": name, **asdict(step)} for step in steps)
    for name, losses in result.windows.items():
        perplexity = result.perplexity(name)
        finite = perplexity if math.isfinite(perplexity) else None
        yield {"kind": "evaluation", "model": name, "perplexity": finite, "window_nats": losses}


def _plain(settings: QATSettings) -> dict[str, Any]:
    engine = None if settings.engine is None else settings.engine.name
    plain = {"recipe": settings.recipe.name, "scales": str(settings.scales), "engine": engine}
    return {**asdict(replace(settings, engine=None)), **plain}


def _read_mark(path: Path) -> dict[str, Any]:
    try:
        mark = read_object(path)
        if mark["format"] != FORMAT or mark["layout"] not in ("llama", "transformers"):
            raise ValueError(f"format {mark['format']!r}, layout {mark['layout']!r}")
        if not all(isinstance(layer, str) for layer in mark["layers"]):
            raise ValueError("layers are no paths")
        return mark
    except FileNotFoundError as error:
        raise CheckpointError(f"{str(path.parent)!r} has no {MARK}; name a folder that octavo qat wrote") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}; tune the model again") from error


def _read_llama(folder: Path) -> LanguageModel:
    check_sums(folder)
    model = read_llama(folder)
    tokenizer = read_tokenizer(folder)
    return LanguageModel(model=model, tokenizer=tokenizer, context=model.config.max_positions, source=str(folder))
