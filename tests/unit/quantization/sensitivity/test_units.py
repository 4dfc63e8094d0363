"""What may be chosen, and that its bytes are those of real tensors."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes
from octavo.convert import convert, unfuse_experts
from octavo.errors import ConfigError
from octavo.quantization.sensitivity.units import BF16, CHOICES, WEIGHT_ONLY, bytes_of, decoded_table, units_of
from tests.tiny_mixtures import EXPERTS, mixture
from tests.unit.quantization.sensitivity.small_models import WORDS, small_llama


def test_a_tied_head_is_one_unit_with_its_table_and_counts_once():
    model = small_llama(tied=True)
    units = {unit.path: unit for unit in units_of(model)}
    assert len(units) == 2 * 7 + 1
    table = units["model.embed_tokens"]
    assert table.paths == ("model.embed_tokens", "lm_head")
    assert (table.is_table, table.is_head, table.depth, table.role) == (True, True, None, "embed_tokens")
    assert table.choices[0] == WEIGHT_ONLY
    assert table.choices[-1] == BF16
    down = units["model.layers.1.mlp.down_proj"]
    assert (down.role, down.depth, down.choices, down.products) == ("down_proj", 1, CHOICES, 32 * 48)


def test_a_head_of_its_own_is_never_multiplied_in_fp8():
    units = {unit.path: unit for unit in units_of(small_llama(tied=False))}
    assert units["lm_head"].choices == (WEIGHT_ONLY, BF16)
    assert not units["model.embed_tokens"].is_head
    assert units["model.embed_tokens"].products == 0


@pytest.mark.parametrize("shape", [(5, 7), (130, 300), (1, 1), (128, 256)])
@pytest.mark.parametrize("choice", CHOICES)
def test_bytes_are_those_of_the_tensors(shape, choice):
    (unit,) = units_of(nn.Sequential(nn.Linear(shape[1], shape[0], bias=False)))
    spec = recipes.get(choice).output.b
    weight = torch.randn(shape)
    made = weight.bfloat16() if spec is None else octavo.quantize(weight, spec.format, granularity=spec.granularity)
    assert unit.bytes_as(choice) == made.nbytes


def test_bytes_of_a_table_of_codes_and_bf16_rows():
    table = next(unit for unit in units_of(small_llama()) if unit.is_table)
    weight = torch.randn(table.shape)
    for choice in table.choices[:-1]:
        kept = table.rows_in_bf16(choice)
        codes = octavo.quantize(weight[kept:], octavo.E4M3, granularity=octavo.PerRow())
        rest = weight[:kept].bfloat16().nbytes + torch.arange(kept, dtype=torch.int32).nbytes
        assert table.bytes_as(choice) == codes.nbytes + rest


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_of_a_model_are_those_of_what_it_would_hold(tied):
    model = small_llama(tied=tied)
    units = units_of(model)
    plain = sum(parameter.to(torch.bfloat16).nbytes for parameter in model.parameters())
    assert bytes_of(model, units, {}) == plain
    chosen = {unit.path: "rowwise" for unit in units if "rowwise" in unit.choices}
    held = small_llama(tied=tied).requires_grad_(False)
    report = convert(held, BF16, overrides=dict.fromkeys(chosen, "rowwise"), convert_head=True, frozen="fp8")
    assert set(report.stored) == set(chosen)
    real = sum(p.nbytes if p.itemsize == 1 else p.to(torch.bfloat16).nbytes for p in held.parameters())
    real += sum(scale.nbytes for name, scale in held.named_buffers() if name.endswith("weight_scale"))
    assert bytes_of(model, units, chosen) == real


def test_the_rows_that_stay_in_bf16_are_the_costliest():
    table = replace(units_of(small_llama())[0], row_order=torch.arange(WORDS).flip(0))
    assert table.kept_rows("weight_only:0.94").tolist() == [0, 1, 2, 3]
    assert table.kept_rows("weight_only").tolist() == []


def test_a_decoded_table_keeps_the_named_rows_in_bf16():
    table, rows = torch.randn(9, 5), torch.tensor([2, 7])
    decoded = decoded_table(table, rows)
    codes = octavo.quantize(table, octavo.E4M3, granularity=octavo.PerRow()).dequantize()
    codes[rows] = table[rows].bfloat16().float()
    assert torch.equal(decoded, codes)


def test_unknown_choices_and_models_without_linear_layers_are_refused():
    with pytest.raises(ConfigError, match=r"a choice must be one of tensorwise, .*, not 'mxfp8'"):
        units_of(small_llama(), ["mxfp8"])
    with pytest.raises(ConfigError, match=r"no nn\.Linear layer besides its head"):
        units_of(nn.Sequential(nn.Embedding(4, 4)))


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_without_linears_but_its_head_is_refused_by_the_class_that_holds_its_weights(tied):
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0, tie_word_embeddings=tied)
    with pytest.raises(ConfigError, match="nothing to quantize; its weights are in Conv1D; replace"):
        units_of(transformers.GPT2LMHeadModel(config))


@pytest.mark.parametrize(("name", "pairs"), [("Mixtral", []), ("Qwen2Moe", [2])])  # the shared expert's gate, up
def test_what_servers_run_by_one_scheme_is_one_group(name, pairs):
    """q, k, v; gate, up outside of experts; and every layer of every expert of a block, whatever its name."""
    pytest.importorskip("transformers", reason="transformers is not installed: no experts")
    model = mixture(name).model
    unfuse_experts(model)
    groups: dict[str, set[str]] = {}
    for unit in units_of(model, merged=True):
        groups.setdefault(unit.group, set()).add(unit.path)
    several = [members for members in groups.values() if len(members) > 1]
    assert sorted(map(len, several)) == sorted(2 * [3, 3 * EXPERTS, *pairs])
    for members in several:
        if len(members) == 3 * EXPERTS:
            assert len({path.rpartition(".experts.")[0] for path in members}) == 1
            assert {path.rsplit(".", 2)[1] for path in members} == set(map(str, range(EXPERTS)))
