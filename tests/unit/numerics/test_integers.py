"""INT8 rows beside torchao's."""

import math

import pytest
import torch

from octavo.errors import ConfigError
from octavo.numerics.integers import HALF_RANGE, LEAST_SCALE, MOST_TERMS, quantize_int8


def test_codes_and_scales_are_torchaos():
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    layer = torch.nn.Linear(96, 40, bias=False)
    with torch.no_grad():
        layer.weight.mul_(10.0 ** torch.arange(-20, 20)[:, None])
        layer.weight[7] = 0
    found = quantize_int8(layer.weight.detach())
    quantize_(layer, Int8DynamicActivationInt8WeightConfig())
    theirs: object = layer.weight
    assert torch.equal(found.data, theirs.qdata)  # type: ignore[attr-defined]
    assert torch.equal(found.scale, theirs.scale)  # type: ignore[attr-defined]


def test_numbers_of_the_definition():
    assert (HALF_RANGE, LEAST_SCALE, MOST_TERMS) == (127.5, 2.0**-23, 131071)
    assert MOST_TERMS * 128 * 128 < 2**31 <= (MOST_TERMS + 1) * 128 * 128
    found = quantize_int8(torch.tensor([[0.0, 0.0], [255.0, -255.0], [1e-30, 0.0]]))
    assert found.scale.flatten().tolist() == [2.0**-23, 2.0, 2.0**-23]
    assert found.data.tolist() == [[0, 0], [127, -128], [0, 0]]
    assert found.dequantize()[1].tolist() == [254.0, -256.0]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_nan(number):
    found = quantize_int8(torch.tensor([[1.0, number], [1.0, 2.0]])).dequantize()
    assert found.isnan().tolist() == [[True, True], [False, False]]


def test_rows_without_elements_are_refused():
    with pytest.raises(ConfigError, match="at least one element"):
        quantize_int8(torch.zeros(3, 0))
