"""Training on several ranks: what octavo adds to PyTorch's own distributed engine."""

from octavo.parallel.gather_in_fp8 import gather_in_fp8
from octavo.parallel.gather_input_in_fp8 import gather_input_in_fp8
from octavo.parallel.gradients import GradientReduction, reduce_gradients_in_fp8

__all__ = ["GradientReduction", "gather_in_fp8", "gather_input_in_fp8", "reduce_gradients_in_fp8"]
