"""Transformer Engine's API; ``import octavo.compat.transformer_engine.pytorch as te`` replaces its own module."""
