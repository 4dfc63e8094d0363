"""Arithmetic of other engines as data: casts, GEMMs, and the source and proof of each property."""

from octavo.engines.catalog import PROFILES, get, names
from octavo.engines.linear import linear_as, weight_as
from octavo.engines.profile import NOT_RUN, EngineProfile, Products, Source, properties_of, source_of
from octavo.engines.profiles import profile_of_recipe
from octavo.engines.tensor_cast import (
    AmaxOf,
    Application,
    Division,
    EngineCast,
    PowerOfTwo,
    Saturation,
    quantize_as,
)

__all__ = [
    "NOT_RUN",
    "PROFILES",
    "AmaxOf",
    "Application",
    "Division",
    "EngineCast",
    "EngineProfile",
    "PowerOfTwo",
    "Products",
    "Saturation",
    "Source",
    "get",
    "linear_as",
    "names",
    "profile_of_recipe",
    "properties_of",
    "quantize_as",
    "source_of",
    "weight_as",
]
