"""Benchmarks of octavo: one module each, with their result files in results/."""
