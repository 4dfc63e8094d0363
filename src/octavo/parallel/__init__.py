"""Training on several ranks: what octavo adds to PyTorch's own distributed engine."""

from octavo.parallel.gather_in_fp8 import gather_in_fp8

__all__ = ["gather_in_fp8"]
