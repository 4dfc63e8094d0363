"""Casts and GEMMs: backends, and the dispatch that selects among them."""

from octavo.kernels.backend import CastResult
from octavo.kernels.backends.torch_cpu import high_precision_mm, needs_widening, probe_cpu
from octavo.kernels.casting import fake_quantize, quantize
from octavo.kernels.dispatch import cast, explain, scaled_mm, selections
from octavo.kernels.each import EachRecord, cast_each, scaled_mm_each
from octavo.kernels.grouped import scaled_grouped_mm

__all__ = [
    "CastResult",
    "EachRecord",
    "cast",
    "cast_each",
    "explain",
    "fake_quantize",
    "high_precision_mm",
    "needs_widening",
    "probe_cpu",
    "quantize",
    "scaled_grouped_mm",
    "scaled_mm",
    "scaled_mm_each",
    "selections",
]
