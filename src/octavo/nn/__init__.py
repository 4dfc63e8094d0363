"""Modules whose GEMMs run in FP8."""

from octavo.nn.linear import Linear

__all__ = ["Linear"]
