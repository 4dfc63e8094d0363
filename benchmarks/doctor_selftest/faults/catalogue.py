"""Every fault, by family."""

from benchmarks.doctor_selftest.faults.attention import ATTENTION_FAULTS
from benchmarks.doctor_selftest.faults.codes import CODE_FAULTS
from benchmarks.doctor_selftest.faults.fault import Fault
from benchmarks.doctor_selftest.faults.losses import LOSS_FAULTS
from benchmarks.doctor_selftest.faults.modules import MODULE_FAULTS
from benchmarks.doctor_selftest.faults.ranks import RANK_FAULTS
from benchmarks.doctor_selftest.faults.scales import SCALE_FAULTS
from benchmarks.doctor_selftest.faults.settings import SETTING_FAULTS
from benchmarks.doctor_selftest.faults.values import VALUE_FAULTS
from benchmarks.doctor_selftest.faults.weights import WEIGHT_FAULTS

__all__ = ["FAULTS"]

FAULTS: tuple[Fault, ...] = (
    *SCALE_FAULTS,
    *VALUE_FAULTS,
    *MODULE_FAULTS,
    *CODE_FAULTS,
    *WEIGHT_FAULTS,
    *ATTENTION_FAULTS,
    *SETTING_FAULTS,
    *LOSS_FAULTS,
    *RANK_FAULTS,
)
