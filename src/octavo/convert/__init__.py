"""Plain linear layers to octavo's and back, in any model: what is converted, what stays, and a report of both."""

from octavo.convert.choice import HEAD_NAMES, choose_layers, heads_of
from octavo.convert.conversion import convert, restore
from octavo.convert.fp8_storage import guard_save_pretrained, hold_weights, read_by_others
from octavo.convert.report import ConversionReport
from octavo.convert.weight_readers import layers_not_run

__all__ = [
    "HEAD_NAMES",
    "ConversionReport",
    "choose_layers",
    "convert",
    "guard_save_pretrained",
    "heads_of",
    "hold_weights",
    "layers_not_run",
    "read_by_others",
    "restore",
]
