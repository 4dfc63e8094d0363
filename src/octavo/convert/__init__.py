"""Plain linear layers to octavo's and back, in any model: what is converted, what stays, and a report of both."""

from octavo.convert.choice import HEAD_NAMES, choose_layers, heads_of
from octavo.convert.conversion import convert, restore
from octavo.convert.experts import left_as_they_are, other_modules
from octavo.convert.fp8_storage import read_by_others, store_weights_as_codes
from octavo.convert.other_modules import linear_layers, owner_name
from octavo.convert.plain_checkpoint import guard_save_pretrained
from octavo.convert.report import ConversionReport
from octavo.convert.routers import routers
from octavo.convert.unfused_experts import (
    TensorNames,
    UnfusedExperts,
    expert_layers,
    file_names,
    undivided_experts,
    unfuse_experts,
)
from octavo.convert.weight_readers import layers_not_run

__all__ = [
    "HEAD_NAMES",
    "ConversionReport",
    "TensorNames",
    "UnfusedExperts",
    "choose_layers",
    "convert",
    "expert_layers",
    "file_names",
    "guard_save_pretrained",
    "heads_of",
    "layers_not_run",
    "left_as_they_are",
    "linear_layers",
    "other_modules",
    "owner_name",
    "read_by_others",
    "restore",
    "routers",
    "store_weights_as_codes",
    "undivided_experts",
    "unfuse_experts",
]
