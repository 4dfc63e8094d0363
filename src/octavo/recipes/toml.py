"""A recipe as a TOML text, and back.

    name = "rowwise"
    emulate_tensor_cores = false

    [output]
    accumulate = "hopper-fast"

    [output.a]
    format = "E4M3"
    granularity = "row"                   "tensor", "row", or a block such as "1x128"
    ...

A GEMM in high precision is a table without ``a`` and ``b``, one that casts its weight alone has no ``a``. Everything is
written out, and everything but the names and formats has its default when read. The cast of another engine is written
as its profile and role, such as ``engine = "vllm-block.input"``.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from octavo.errors import ConfigError, DataError
from octavo.formats import FORMATS, Format
from octavo.numerics import (
    Accumulate,
    CastSpec,
    EngineCast,
    Granularity,
    Nonfinite,
    PerBlock,
    PerRow,
    PerTensor,
    Rounding,
    ScaleRounding,
    Scaling,
)
from octavo.parsing import parse_toml
from octavo.recipes.engines.catalog import PROFILES
from octavo.recipes.engines.profile import EngineProfile
from octavo.recipes.specs import Close, GemmSpec, History, Recipe, Statistic

__all__ = ["GEMMS", "from_toml", "to_toml"]

ROLES = ("weight", "input")
GEMMS = ("output", "grad_input", "grad_weight")


def to_toml(recipe: Recipe) -> str:
    """The recipe as TOML; :func:`from_toml` gives an equal one back.

    Raises:
        ConfigError: ``recipe`` is something else, such as a name; or its history's statistic is a function.

    Example:
        >>> from octavo import recipes
        >>> recipe = recipes.get("blockwise")
        >>> recipes.from_toml(recipes.to_toml(recipe)) == recipe
        True
    """
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"to_toml writes a Recipe, not {recipe!r}; octavo.recipes.get makes one of a preset's name")
    import tomli_w  # here, so that "import octavo" needs torch alone

    table: dict[str, Any] = {"name": recipe.name, "emulate_tensor_cores": recipe.emulate_tensor_cores}
    if recipe.history is not None:
        if not isinstance(recipe.history.statistic, Statistic):
            raise ConfigError(
                f"recipe {recipe.name!r} takes its amaxes by a function, {recipe.history.statistic!r}, which a file "
                f"cannot hold; give its history one of the statistics {', '.join(Statistic)}"
            )
        table["history"] = _plain(recipe.history)
    for name in GEMMS:
        gemm: GemmSpec = getattr(recipe, name)
        table[name] = {"accumulate": str(gemm.accumulate)}
        table[name] |= {side: _plain(cast) for side, cast in (("a", gemm.a), ("b", gemm.b)) if cast is not None}
    return tomli_w.dumps(table)


def from_toml(text: str) -> Recipe:
    """The recipe that a TOML text describes.

    Raises:
        ConfigError: it is no text or not TOML, a name is unknown or missing, or a value is not allowed.
    """
    if not isinstance(text, str):
        raise ConfigError(f"a recipe is read from a TOML text, not from {text!r}; read the file first")
    try:
        table = parse_toml(text)
    except DataError as error:
        raise ConfigError(f"this recipe is not TOML: {error}") from error
    _check_keys(table, {"name", "emulate_tensor_cores", "history", *GEMMS}, "a recipe")
    missing = [key for key in ("name", *GEMMS) if key not in table]
    if missing:
        raise ConfigError(f"a recipe needs {', '.join(missing)}; octavo.recipes.to_toml writes a complete one")
    history = table.get("history")
    return Recipe(
        name=table["name"],
        output=_gemm(table["output"]),
        grad_input=_gemm(table["grad_input"]),
        grad_weight=_gemm(table["grad_weight"]),
        history=None if history is None else _history(history),
        emulate_tensor_cores=table.get("emulate_tensor_cores", False),
    )


def _plain(spec: CastSpec | History) -> dict[str, Any]:
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return {name: _word(value) for name, value in values.items() if value is not None}


def _word(value: object) -> object:
    match value:
        case Format():
            return value.name
        case PerTensor():
            return "tensor"
        case PerRow():
            return "row"
        case PerBlock(rows, columns):
            return f"{rows}x{columns}"
        case EngineCast():
            return _engine_name(value)
    return str(value) if isinstance(value, str) else value


def _engine_name(cast: EngineCast) -> str:
    for profile in PROFILES.values():
        for role in ROLES:
            if _cast_of(profile, role) == cast:
                return f"{profile.name}.{role}"
    raise ConfigError(
        "a file holds the casts of named engines, octavo.engines.names(), and this one is of none of them"
    )


def _gemm(given: Any) -> GemmSpec:
    _check_keys(given, {"a", "b", "accumulate"}, "a GEMM")
    accumulate = _one_of(Accumulate, given.get("accumulate", Accumulate.HOPPER_SLOW), "accumulate")
    a, b = (_cast(given[side]) if side in given else None for side in ("a", "b"))
    return GemmSpec(a=a, b=b, accumulate=accumulate)


def _cast(given: Any) -> CastSpec:
    _check_keys(given, {field.name for field in fields(CastSpec)}, "a cast")
    if "format" not in given:
        raise ConfigError("a cast needs a format, such as E4M3")
    read: dict[str, Any] = dict(given)
    for key, reader in _CAST_READERS.items():
        if key in read:
            read[key] = reader(read[key])
    return CastSpec(**read)


def _history(given: Any) -> History:
    _check_keys(given, {field.name for field in fields(History)}, "a history")
    read: dict[str, Any] = dict(given)
    for key, enum in (("statistic", Statistic), ("close", Close)):
        if key in read:
            read[key] = _one_of(enum, read[key], key)
    return History(**read)


def _format(name: object) -> Format:
    for row in FORMATS:
        if row.name == name:
            return row
    raise ConfigError(f"there is no format {name!r}; use one of {', '.join(row.name for row in FORMATS)}")


def _granularity(word: object) -> Granularity:
    if word == "tensor":
        return PerTensor()
    if word == "row":
        return PerRow()
    block = re.fullmatch(r"(\d+)x(\d+)", str(word))
    if block is None:
        raise ConfigError(f"a granularity is 'tensor', 'row' or a block such as '1x128', not {word!r}")
    return PerBlock(int(block[1]), int(block[2]))


def _engine(name: object) -> EngineCast:
    profile, _, role = str(name).rpartition(".")
    cast = _cast_of(PROFILES[profile], role) if profile in PROFILES and role in ROLES else None
    if cast is None:
        raise ConfigError(f"an engine's cast is a profile and its role, such as 'vllm-block.input', not {name!r}")
    return cast


def _cast_of(profile: EngineProfile, role: str) -> EngineCast | None:
    cast: EngineCast | None = getattr(profile, role)
    return None if cast is None else cast.of_tensors_in(profile.activations)


def _one_of(enum: Any, value: object, name: str) -> Any:
    if value not in list(enum):
        raise ConfigError(f"{name} must be one of {', '.join(enum)}, not {value!r}")
    return enum(value)


def _check_keys(given: object, allowed: set[str], what: str) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{what} is a table, not {given!r}")
    unknown = sorted(given.keys() - allowed)
    if unknown:
        raise ConfigError(f"{what} has no {unknown[0]!r}; it has {', '.join(sorted(allowed))}")


_CAST_READERS: dict[str, Callable[[object], object]] = {
    "format": _format,
    "granularity": _granularity,
    "scaling": lambda value: _one_of(Scaling, value, "scaling"),
    "rounding": lambda value: _one_of(Rounding, value, "rounding"),
    "scale_rounding": lambda value: _one_of(ScaleRounding, value, "scale_rounding"),
    "scale_format": _format,
    "nonfinite": lambda value: _one_of(Nonfinite, value, "nonfinite"),
    "engine": _engine,
}
