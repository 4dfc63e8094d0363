"""A small per-tensor FP8 product, of which the tests of each backend change what they need."""

import torch

from octavo.kernels.backend import MatmulProblem
from octavo.numerics import Accumulate, PerTensor

PROBLEM = MatmulProblem(
    m=2,
    n=3,
    k=8,
    device="cpu",
    a_dtype=torch.float8_e4m3fn,
    b_dtype=torch.float8_e5m2,
    a_granularity=PerTensor(),
    b_granularity=PerTensor(),
    out_dtype=torch.float32,
    bias=False,
    accumulate=Accumulate.FP32,
)
