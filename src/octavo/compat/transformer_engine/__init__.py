"""Transformer Engine's names. ``import octavo.compat.transformer_engine.pytorch as te`` takes the place of its own."""
