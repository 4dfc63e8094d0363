"""Quantization-aware training: prepare and convert a model, fine-tune it, and compare it with baselines."""
