"""A row's logits are the same bits whatever else is read with it, and however a text is cut into calls."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

import octavo
from octavo.errors import BackendError
from octavo.formats import BF16, E4M3, FP32
from octavo.inference import ModelRunner, ServingRecipe
from octavo.kernels import native_bindings, native_gemm
from octavo.models import Llama
from tests.tiny_llama import tiny_llama_config

LEVELS = ("torch", *native_bindings.levels())
LENGTHS = (1, 64, 70, 97, 30)


@pytest.fixture(scope="module")
def model():
    config = tiny_llama_config(vocab_size=75, hidden_size=48, intermediate_size=80, max_positions=128)
    return Llama(config, seed=3)


def calibrated(model):
    """A copy with static scales, found on a text that is too short: some elements are clipped."""
    made = copy.deepcopy(model)
    octavo.calibrate(made, [torch.arange(8)[None]]).apply(made, hold_weights=True)
    return made


def cache_of(runner, fmt, generator):
    """Two pages a sequence, anywhere, full of what would be seen if it were read."""
    tensors = runner.new_batch(2 * len(LENGTHS), 64, fmt=fmt).tensors
    for x in (tensors.keys, tensors.values, tensors.key_scale, tensors.value_scale):
        if x is not None:
            x.view(torch.uint8).fill_(0x7F)
    order = torch.randperm(2 * len(LENGTHS), generator=generator)
    return replace(tensors, table=order.to(torch.int32).view(len(LENGTHS), 2))


def read(runner, texts, cuts, fmt, generator):
    """Logits after every token of every text, read in calls of any numbers of rows of each."""
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    tensors, done = cache_of(runner, fmt, generator), [0] * len(texts)
    while any(at < len(text) for at, text in zip(done, texts, strict=True)):
        rows = []
        for own, text in enumerate(texts):
            count = min(cuts(), len(text) - done[own])
            rows += [(own, done[own] + i) for i in range(count)]
            done[own] += count
        if not rows:
            continue
        sequence, position = (torch.tensor(column) for column in zip(*rows, strict=True))
        tokens = torch.tensor([texts[own][at] for own, at in rows])
        logits = runner.read_rows(tokens, tensors, sequence=sequence, position=position, num_logits=len(rows))
        for (own, _), row in zip(rows, logits, strict=True):
            found[own].append(row)
    return [torch.stack(rows) for rows in found]


CASES = [("fp8", E4M3), ("fp8", BF16), ("fp8", FP32), *((recipe, E4M3) for recipe in ServingRecipe if recipe != "fp8")]


@pytest.mark.long
@pytest.mark.parametrize(("recipe", "fmt"), CASES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_row_bits_do_not_depend_on_other_rows(model, level, recipe, fmt):
    own = calibrated(model) if recipe == "fp8-static" else model
    runner = ModelRunner(own, recipe=recipe, level=level)
    check_rows(runner, (3, 65) if level == "torch" else LENGTHS, fmt, most=(2,) if level == "torch" else (2, 20, 128))


def check_rows(runner, lengths, fmt, most=(2, 20, 128)):
    """Texts read a token at a time, each alone, beside the same in calls of up to so many rows of each."""
    generator = torch.Generator().manual_seed(7)
    texts = [torch.randint(0, 75, (length,), generator=generator).tolist() for length in lengths]
    alone = [read(runner, [text], lambda: 1, fmt, generator)[0] for text in texts]
    for count in most:
        cuts = [*torch.randint(0, count + 1, (1000,), generator=generator).tolist(), *[1] * 10**4]
        together = read(runner, texts, iter(cuts).__next__, fmt, generator)
        for one, other in zip(alone, together, strict=True):
            assert torch.equal(one.view(torch.int32), other.view(torch.int32))


MIXTURES: dict[str, dict[str, Any]] = {
    "normalized": {"num_experts": 6, "experts_per_token": 2, "normalize_shares": True, "qk_norm": "head"},
    "many": {"num_experts": 40, "experts_per_token": 5, "qk_norm": "row"},
    "shared": {"num_experts": 4, "experts_per_token": 2, "shared_size": 56, "dense_layers": (0,), "dense_size": 24},
    "one": {"num_experts": 3, "experts_per_token": 1, "head_size": 24},
}


@pytest.mark.parametrize("level", native_bindings.levels())
@pytest.mark.parametrize(
    ("recipe", "fmt"), [("fp8", E4M3), ("fp8-dynamic", FP32), ("int8", E4M3), ("bf16", BF16)], ids=str
)
@pytest.mark.parametrize("settings", MIXTURES)
def test_row_bits_of_a_mixture_do_not_depend_on_other_rows(level, recipe, fmt, settings):
    """Experts have any number of rows; those of one row are the same whichever other rows they have."""
    config = tiny_llama_config(
        vocab_size=75, hidden_size=48, intermediate_size=40, max_positions=128, **MIXTURES[settings]
    )
    check_rows(ModelRunner(Llama(config, seed=3), recipe=recipe, level=level), LENGTHS[2:], fmt)


@pytest.mark.parametrize("level", native_bindings.levels())
@pytest.mark.parametrize("recipe", ["fp8", "fp8-dynamic"])
def test_row_bits_of_codes_in_blocks_do_not_depend_on_other_rows(level, recipe):
    config = tiny_llama_config(vocab_size=75, hidden_size=144, intermediate_size=200, num_heads=4, max_positions=128)
    made = Llama(config, seed=3).requires_grad_(False)
    octavo.convert(made, recipe="blockwise", frozen="fp8")
    check_rows(ModelRunner(made, recipe=recipe, level=level), LENGTHS[2:], E4M3)


@pytest.mark.parametrize("level", native_bindings.levels())
@pytest.mark.parametrize("k", [1, 31, 32, 100, 577, 9001, 33000])
def test_many_row_gemm_matches_single_rows_bitwise(level, k):
    """Sums of few rows and of many, with codes and rows that are summed in the plain way among them."""
    generator = torch.Generator().manual_seed(k)
    weight = torch.randn(70, k, generator=generator).to(E4M3.torch_dtype)
    weight.view(torch.uint8)[40, k // 2] = 0x7F
    x = torch.randn(50, k, generator=generator) * 10.0 ** torch.randint(-9, 9, (50, 1), generator=generator)
    x[7, 0], x[8, k // 2], x[9] = 1e-38, torch.inf, 0
    scale = torch.rand(70, 1, generator=generator)
    many = torch.cat(
        [native_gemm.gemm(some, weight, b_scale=scale, out_dtype=torch.float32, level=level) for some in x.split(16)]
    )
    one = torch.cat(
        [native_gemm.gemm(row, weight, b_scale=scale, out_dtype=torch.float32, level=level) for row in x.split(1)]
    )
    assert torch.equal(many.view(torch.int32), one.view(torch.int32))
    usual = torch.tensor([row not in (7, 8, 9) for row in range(50)])
    exact = x.double() @ (weight.double() * scale.double()).t()
    near = (x.double().abs() @ (weight.double() * scale.double()).abs().t()) * k**0.5 * 2.0**-22
    gap = (many.double() - exact).abs()[usual]
    assert bool((gap <= near[usual])[~gap.isnan()].all())
    assert torch.equal(gap.isnan().any(0), torch.arange(70) == 40)


@pytest.mark.parametrize("level", native_bindings.levels())
@pytest.mark.parametrize("count", [2, 5, 16])
def test_extreme_scale_does_not_change_other_rows(level, count):
    generator = torch.Generator().manual_seed(count)
    weight = torch.randn(70, 96, generator=generator).to(E4M3.torch_dtype)
    x = torch.randn(count, 96, generator=generator).to(E4M3.torch_dtype)
    scale = torch.rand(count, 1, generator=generator)
    scale[-1] = 2.0**-70
    b_scale = torch.rand(70, 1, generator=generator)

    def product(rows):
        made = native_gemm.gemm(
            x[rows], weight, a_scale=scale[rows], b_scale=b_scale, out_dtype=torch.float32, level=level
        )
        return made.view(torch.int32)

    together = product(slice(None))
    for row in range(count):
        assert torch.equal(together[row], product(slice(row, row + 1))[0])


def test_logits_of_last_rows_match_all_rows(model):
    runner = ModelRunner(model)
    tensors = cache_of(runner, E4M3, torch.Generator().manual_seed(0))
    rows = {"sequence": torch.zeros(2, dtype=torch.int64), "position": torch.arange(2)}
    with pytest.raises(BackendError, match="the number of rows with logits must be from 1 to 2, not 3"):
        runner.read_rows(torch.tensor([1, 2]), tensors, **rows, num_logits=3)
    assert runner.read_rows(torch.tensor([1, 2]), tensors, **rows, num_logits=1).shape == (1, 75)
