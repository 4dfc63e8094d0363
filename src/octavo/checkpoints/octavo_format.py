"""octavo's own format, which stores whole recipes: the ``state_dict``, and recipes from ``octavo.recipes.to_toml``.

    config.json           "model_type": "octavo",
                          "quantization_config": {"quant_method": "octavo", "version": 1, "model_type": "llama",
                           "recipes": {"recipe-1.toml": ["model.layers.0.self_attn.q_proj", …], …},
                           "tables": ["model.embed_tokens"]}
    recipe-1.toml         the recipe of those layers

``tables`` are embeddings stored as rows of codes (:mod:`octavo.checkpoints.tables`); most models have none.

The model's own type is in quantization_config, because transformers only warns about an unknown quant_method and loads
codes as weights, but raises for an unknown model_type.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo import recipes
from octavo.checkpoints.contents import Contents
from octavo.checkpoints.file_format import FileFormat, Layout, damaged, names_in
from octavo.checkpoints.names import NAMES
from octavo.errors import CheckpointError, ConfigError
from octavo.recipes import Recipe

__all__ = ["OCTAVO_FORMAT"]

METHOD, VERSION = "octavo", 1


def _paths_by_recipe(contents: Contents) -> dict[str, list[str]]:
    """Paths by recipe text; layers with equal recipes share a file."""
    groups: dict[str, list[str]] = {}
    for path, layer in contents.layers.items():
        groups.setdefault(recipes.to_toml(layer.recipe), []).append(path)
    return groups


def _recipe_file(index: int) -> str:
    return f"recipe-{index}.toml"


def _configuration(contents: Contents) -> dict[str, Any]:
    return {
        "quant_method": METHOD,
        "version": VERSION,
        "recipes": {_recipe_file(i): paths for i, paths in enumerate(_paths_by_recipe(contents).values(), 1)},
        "kv_cache": bool(contents.kv_scales),
        "tables": list(contents.tables),
    }


def _other_files(contents: Contents) -> dict[str, str]:
    return {_recipe_file(i): text for i, text in enumerate(_paths_by_recipe(contents), 1)}


def _layout(config: Mapping[str, Any], linears: Sequence[str], folder: Path) -> Layout:
    if config.get("version") != VERSION:
        raise damaged("version", config.get("version"), str(VERSION))
    groups = config.get("recipes")
    if not isinstance(groups, Mapping) or not groups:
        raise damaged("recipes", groups, "paths of layers by the file of their recipe")
    listed = {file: names_in(f"layers of {file}", paths) for file, paths in groups.items()}
    layer_recipes = {
        path: recipe for file, paths in listed.items() for recipe in [_read_recipe(folder, file)] for path in paths
    }
    if unknown := sorted(layer_recipes.keys() - set(linears)):
        raise CheckpointError(f"quantization_config names the layer {unknown[0]!r}, which the model does not have")
    tables = tuple(names_in("tables", config.get("tables")))
    return Layout(recipes=layer_recipes, has_kv_scales=bool(config.get("kv_cache")), tables=tables)


def _read_recipe(folder: Path, file: str) -> Recipe:
    try:
        return recipes.from_toml((folder / Path(file).name).read_text(encoding="utf-8"))
    except (OSError, ConfigError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{str(folder / file)!r} is not a recipe: {error}; write the folder again") from error


OCTAVO_FORMAT = FileFormat(
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
