"""Who executes quantize and scaled_mm: backends, and the choice between them."""

from octavo.kernels.dispatch import explain, scaled_mm, selections
from octavo.kernels.torch_native import high_precision_mm, needs_widening, probe_cpu
from octavo.numerics import quantize

__all__ = ["explain", "high_precision_mm", "needs_widening", "probe_cpu", "quantize", "scaled_mm", "selections"]
