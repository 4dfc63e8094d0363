"""Forward passes of other engines as data, a file for each project, and recipes made of them."""

from octavo.recipes.engines.catalog import PROFILES, get, names
from octavo.recipes.engines.own import profile_of_recipe
from octavo.recipes.engines.profile import EngineProfile
from octavo.recipes.engines.served import forward_recipe, served_recipe

__all__ = ["PROFILES", "EngineProfile", "forward_recipe", "get", "names", "profile_of_recipe", "served_recipe"]
