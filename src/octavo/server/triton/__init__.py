"""Triton Inference Server: a model repository, the models in it, and the server itself without a container."""
