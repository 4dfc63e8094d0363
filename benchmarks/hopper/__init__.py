"""Measurements on a Hopper GPU, in one command: ``python -m benchmarks.hopper``."""
