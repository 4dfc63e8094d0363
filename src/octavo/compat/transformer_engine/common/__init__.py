"""Transformer Engine's recipes."""

from octavo.compat.transformer_engine.common import recipe

__all__ = ["recipe"]
