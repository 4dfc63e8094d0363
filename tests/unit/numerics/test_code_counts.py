"""Codes are counted and ordered as torch decodes them."""

import collections

import pytest
import torch

from octavo.formats import FP8_FORMATS
from octavo.numerics.code_counts import code_counts, codes_by_binade, codes_by_value

EVERY = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("fmt", FP8_FORMATS, ids=str)
def test_codes_are_ordered_by_the_values_that_torch_decodes(fmt):
    values = EVERY.view(fmt.torch_dtype).float()
    ordered = values[codes_by_value(fmt)]
    assert ordered.tolist() == sorted(set(values[values.isfinite()].tolist()))


@pytest.mark.parametrize("fmt", FP8_FORMATS, ids=str)
def test_binades_hold_every_finite_code_once_in_order_of_value(fmt):
    values = EVERY.view(fmt.torch_dtype).float()
    groups = codes_by_binade(fmt)
    assert sorted(code for group in groups for code in group) == values.isfinite().nonzero().flatten().tolist()
    exponents = [
        {max(torch.frexp(values[code]).exponent.item(), torch.frexp(torch.tensor(fmt.min_normal)).exponent.item() - 1)
         for code in group if values[code]}
        for group in groups
    ]  # fmt: skip
    assert all(len(binade) == 1 for binade in exponents if binade)
    assert [min(values[list(group)]) for group in groups] == sorted(min(values[list(group)]) for group in groups)


@pytest.mark.parametrize("fmt", FP8_FORMATS, ids=str)
def test_counts_are_those_of_the_bytes_also_of_a_transpose(fmt):
    raw = torch.randint(0, 256, (37, 53), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    counted = collections.Counter(raw.flatten().tolist())
    for codes in (raw.view(fmt.torch_dtype), raw.view(fmt.torch_dtype).t()):
        assert code_counts(codes) == [counted[code] for code in range(256)]
