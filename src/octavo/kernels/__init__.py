"""Who executes quantize and scaled_mm: backends, and the choice between them."""

from octavo.kernels.backends.torch_cpu import high_precision_mm, needs_widening, probe_cpu
from octavo.kernels.casting import fake_quantize, quantize, quantize_and_measure, quantize_both_ways
from octavo.kernels.dispatch import explain, scaled_mm, selections
from octavo.kernels.grouped import scaled_grouped_mm
from octavo.kernels.native_bindings import ScaleRule

__all__ = [
    "ScaleRule",
    "explain",
    "fake_quantize",
    "high_precision_mm",
    "needs_widening",
    "probe_cpu",
    "quantize",
    "quantize_and_measure",
    "quantize_both_ways",
    "scaled_grouped_mm",
    "scaled_mm",
    "selections",
]
