"""Faults to inject into a training run, and the findings that the doctor must report."""

from benchmarks.doctor_selftest.faults.catalogue import FAULTS
from benchmarks.doctor_selftest.faults.fault import Fault, Injection, nothing
from benchmarks.doctor_selftest.faults.modules import adding_batch_norm
from benchmarks.doctor_selftest.faults.settings import LEARNING_RATE, restarting_rate, switching_precision
from benchmarks.doctor_selftest.faults.values import add_adapter

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
