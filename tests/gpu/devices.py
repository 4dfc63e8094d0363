"""Where the tests of this folder run, and what comes back from there."""

import torch

from octavo.numerics import QuantizedTensor
from tests.contract.gemm_oracle import Product

DEVICE = torch.device("cuda")


def on_cpu(q: QuantizedTensor) -> QuantizedTensor:
    """The same codes and scales in the CPU's memory."""
    return QuantizedTensor(q.data.cpu(), q.scale.cpu(), q.granularity, q.hp_dtype)


def rounded_through(product: Product) -> torch.dtype | None:
    """cuBLAS writes products with per-row scales in BF16 only; None where nothing is rounded on the way."""
    per_row = any(side.scale.ndim == 2 and side.scale.shape[1] == 1 for side in (product.a, product.b))
    return torch.bfloat16 if product.backend == "torch_cuda" and per_row else None
