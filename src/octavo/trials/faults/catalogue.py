"""Every fault, by family."""

from octavo.trials.faults.codes import CODE_FAULTS
from octavo.trials.faults.fault import Fault
from octavo.trials.faults.modules import MODULE_FAULTS
from octavo.trials.faults.ranks import RANK_FAULTS
from octavo.trials.faults.scales import SCALE_FAULTS
from octavo.trials.faults.settings import SETTING_FAULTS
from octavo.trials.faults.values import VALUE_FAULTS

__all__ = ["FAULTS"]

FAULTS: tuple[Fault, ...] = (
    *SCALE_FAULTS,
    *VALUE_FAULTS,
    *MODULE_FAULTS,
    *CODE_FAULTS,
    *SETTING_FAULTS,
    *RANK_FAULTS,
)
