"""Triton Inference Server: model repositories, their Python models, and running the server without a container."""
