"""Profiles, one file for each project."""

from octavo.engines.profiles.huggingface import HUGGINGFACE
from octavo.engines.profiles.modelopt import MODELOPT
from octavo.engines.profiles.own import OWN, profile_of_recipe
from octavo.engines.profiles.sglang import SGLANG
from octavo.engines.profiles.torchao import TORCHAO
from octavo.engines.profiles.transformer_engine import TRANSFORMER_ENGINE
from octavo.engines.profiles.vllm import VLLM

__all__ = ["HUGGINGFACE", "MODELOPT", "OWN", "SGLANG", "TORCHAO", "TRANSFORMER_ENGINE", "VLLM", "profile_of_recipe"]
