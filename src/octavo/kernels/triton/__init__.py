"""Triton kernels for NVIDIA GPUs. Importing a file here imports Triton; octavo does so at the first CUDA tensor."""
