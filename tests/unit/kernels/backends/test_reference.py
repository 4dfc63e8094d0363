import pytest
import torch

from octavo.formats import E4M3, E5M2
from octavo.kernels import scaled_mm
from octavo.numerics import PerBlock, PerRow, PerTensor, quantize
from octavo.numerics.reference import decode


@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(2, 3)], ids=str)
def test_reference_gemm_is_the_sum_of_decoded_products(granularity):
    """A loop over elements with the scalar oracle's decode: nothing shared with the backend but the codes."""
    a = quantize(torch.randn(3, 5), E4M3, granularity=granularity)
    b = quantize(torch.randn(4, 5), E5M2, granularity=granularity)
    bias = torch.randn(4)

    def value(q, row: int, column: int) -> float:
        if isinstance(granularity, PerTensor):
            scale = q.scale
        elif isinstance(granularity, PerRow):
            scale = q.scale[row, 0]
        else:
            scale = q.scale[row // 2, column // 3]
        return decode(int(q.data.view(torch.uint8)[row, column]), q.format) * float(scale)

    expected = [
        [sum(value(a, i, k) * value(b, j, k) for k in range(5)) + float(bias[j]) for j in range(4)] for i in range(3)
    ]
    result = scaled_mm(a, b, bias=bias, out_dtype=torch.float32, backend="reference")
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64).float(), rtol=2**-23, atol=0)
