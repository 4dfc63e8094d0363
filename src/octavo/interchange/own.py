"""octavo's own: every recipe, whole. The ``state_dict`` as it is, and recipes as ``octavo.recipes.to_toml`` has them.

    config.json           "model_type": "octavo",
                          "quantization_config": {"quant_method": "octavo", "version": 1, "model_type": "llama",
                           "recipes": {"recipe-1.toml": ["model.layers.0.self_attn.q_proj", …], …},
                           "tables": ["model.embed_tokens"]}
    recipe-1.toml         what those layers run

``tables`` are embeddings whose rows are codes (:mod:`octavo.interchange.tables`); most models have none.

The model's own type is in quantization_config. An unknown method alone is passed over: transformers warns and takes
codes for weights. An unknown model_type it refuses.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo import recipes
from octavo.errors import CheckpointError, ConfigError
from octavo.interchange.contents import Contents
from octavo.interchange.file_format import FileFormat, Layout, damaged, names_in
from octavo.interchange.names import NAMES
from octavo.recipes import Recipe

__all__ = ["OWN"]

METHOD, VERSION = "octavo", 1


def _grouped(contents: Contents) -> dict[str, list[str]]:
    """Paths by their recipe's text; layers of equal recipes share a file."""
    found: dict[str, list[str]] = {}
    for path, layer in contents.layers.items():
        found.setdefault(recipes.to_toml(layer.recipe), []).append(path)
    return found


def _file(index: int) -> str:
    return f"recipe-{index}.toml"


def _configuration(contents: Contents) -> dict[str, Any]:
    return {
        "quant_method": METHOD,
        "version": VERSION,
        "recipes": {_file(i): paths for i, paths in enumerate(_grouped(contents).values(), 1)},
        "kv_cache": bool(contents.kv_scales),
        "tables": list(contents.tables),
    }


def _other_files(contents: Contents) -> dict[str, str]:
    return {_file(i): text for i, text in enumerate(_grouped(contents), 1)}


def _layout(given: Mapping[str, Any], linears: Sequence[str], folder: Path) -> Layout:
    if given.get("version") != VERSION:
        raise damaged("version", given.get("version"), str(VERSION))
    groups = given.get("recipes")
    if not isinstance(groups, Mapping) or not groups:
        raise damaged("recipes", groups, "paths of layers by the file of their recipe")
    listed = {file: names_in(f"layers of {file}", paths) for file, paths in groups.items()}
    found = {path: recipe for file, paths in listed.items() for recipe in [_read(folder, file)] for path in paths}
    if unknown := sorted(found.keys() - set(linears)):
        raise CheckpointError(f"quantization_config names the layer {unknown[0]!r}, which the model has not")
    tables = tuple(names_in("tables", given.get("tables")))
    return Layout(recipes=found, has_kv_scales=bool(given.get("kv_cache")), tables=tables)


def _read(folder: Path, file: str) -> Recipe:
    try:
        return recipes.from_toml((folder / Path(file).name).read_text(encoding="utf-8"))
    except (OSError, ConfigError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{str(folder / file)!r} is no recipe: {error}; write the folder again") from error


OWN = FileFormat(
    name=METHOD,
    quant_method=METHOD,
    names=NAMES[METHOD],
    preset="rowwise",
    schemes=None,
    one_scheme=False,
    configuration=_configuration,
    layout=_layout,
    other_files=_other_files,
    model_type=METHOD,
)
