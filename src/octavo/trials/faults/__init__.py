"""Faults to inject into a training run, and what the doctor has to say of each."""

from octavo.trials.faults.catalogue import FAULTS
from octavo.trials.faults.fault import Fault, Injection, nothing
from octavo.trials.faults.modules import adding_batch_norm
from octavo.trials.faults.settings import LEARNING_RATE, restarting_rate, switching_precision
from octavo.trials.faults.values import add_adapter

__all__ = [
    "FAULTS",
    "LEARNING_RATE",
    "Fault",
    "Injection",
    "add_adapter",
    "adding_batch_norm",
    "nothing",
    "restarting_rate",
    "switching_precision",
]
