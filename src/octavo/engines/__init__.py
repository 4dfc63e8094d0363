"""Arithmetic of other engines as data, models under it, and the agreement of two engines."""

from octavo.engines.agreement import Agreement, LayerAgreement, agree
from octavo.engines.attribution import Attribution, Change, PropertyEffect, attribute
from octavo.engines.linear import linear_as, weight_as
from octavo.engines.model import EngineCopies, EngineModel, input_amaxes, model_as
from octavo.engines.properties import differences, neighbours, with_property
from octavo.engines.self_agreement import SelfAgreement, WayAgreement, agree_with_itself
from octavo.engines.suspects import (
    Suspect,
    Suspects,
    TriedChanges,
    find_suspects,
    read_server_logprobs,
    server_settings,
    try_changes,
)
from octavo.engines.training import convert_as_served
from octavo.kernels.row_by_row import RowByRow
from octavo.numerics import EngineCast, quantize_as
from octavo.numerics.engine_cast import AmaxOf, Application, Division, PowerOfTwo, Saturation
from octavo.recipes.engines import profile_of_recipe, served_recipe
from octavo.recipes.engines.catalog import FP8_CACHE, PROFILES, get, names
from octavo.recipes.engines.profile import NOT_RUN, EngineProfile, Products, Source, properties_of, source_of

__all__ = [
    "FP8_CACHE",
    "NOT_RUN",
    "PROFILES",
    "Agreement",
    "AmaxOf",
    "Application",
    "Attribution",
    "Change",
    "Division",
    "EngineCast",
    "EngineCopies",
    "EngineModel",
    "EngineProfile",
    "LayerAgreement",
    "PowerOfTwo",
    "Products",
    "PropertyEffect",
    "RowByRow",
    "Saturation",
    "SelfAgreement",
    "Source",
    "Suspect",
    "Suspects",
    "TriedChanges",
    "WayAgreement",
    "agree",
    "agree_with_itself",
    "attribute",
    "convert_as_served",
    "differences",
    "find_suspects",
    "get",
    "input_amaxes",
    "linear_as",
    "model_as",
    "names",
    "neighbours",
    "profile_of_recipe",
    "properties_of",
    "quantize_as",
    "read_server_logprobs",
    "served_recipe",
    "server_settings",
    "source_of",
    "try_changes",
    "weight_as",
    "with_property",
]
