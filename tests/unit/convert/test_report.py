"""Every weight that multiplies and stays is in the report, with its share; the printed form is short."""

import pytest
import torch
from torch import nn

import octavo
from octavo.convert import ConversionReport
from octavo.convert.report import Shares, WeightShare


class Experts(nn.Module):
    """All matrices of four experts in one parameter, and a router, as sparse models keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 8, 16))
        self.router = nn.Parameter(torch.randn(4, 8))
        self.scale, self.token = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(1, 1, 8))


def _model() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "table": nn.Embedding(30, 8),
            "bag": nn.EmbeddingBag(10, 8),
            "norm": nn.LayerNorm(8),
            "experts": Experts(),
            "pointwise": nn.Conv1d(8, 6, 1, bias=False),
            "patches": nn.Conv2d(3, 8, (2, 4), bias=False),
            "pair": nn.Bilinear(3, 4, 5, bias=False),
            "attention": nn.MultiheadAttention(8, 2, bias=False),
            "memory": nn.GRU(8, 4, bias=False),
            "taken": nn.Linear(8, 32, bias=False),
        }
    )


IN_FP8 = 32 * 8 + 5 * 3 * 4
STAYS = {  # name: elements, by hand
    "experts.up": 4 * 8 * 16,
    "experts.router": 4 * 8,
    "experts.token": 8,
    "pointwise.weight": 6 * 8,
    "patches.weight": 8 * 3 * 2 * 4,
    "attention.in_proj_weight": 3 * 8 * 8,
    "memory.weight_ih_l0": 3 * 4 * 8,
    "memory.weight_hh_l0": 3 * 4 * 4,
}


def test_every_weight_that_multiplies_and_is_no_linear_layers_is_named():
    report = octavo.convert(_model())
    assert set(report.parameters) == STAYS.keys() | {"bag.weight"}
    assert report.skipped.keys() == {"table", "attention.out_proj"}
    assert report.parameters["bag.weight"] == "embedding: a look-up, not a product"
    assert (
        report.parameters["pointwise.weight"]
        == "stays as it is: the kernel of a convolution (1), one product of patches"
    )
    assert report.parameters["patches.weight"] == "stays as it is: the kernel of a convolution (2x4)"
    assert report.parameters["experts.up"].endswith("a parameter of Experts, 4 matrices in one, which is not nn.Linear")
    assert report.parameters["memory.weight_hh_l0"].endswith("a parameter of GRU, which is not nn.Linear")


def test_shares_are_those_counted_by_hand():
    model = _model()
    report = octavo.convert(model)
    total = sum(parameter.numel() for parameter in model.parameters())
    products = IN_FP8 + 8 * 8 + sum(STAYS.values())  # no look-ups, no norms
    assert report.shares.by_path == {
        **{name: WeightShare(elements / total, elements / products) for name, elements in STAYS.items()},
        "table": WeightShare(30 * 8 / total, 0.0),
        "bag.weight": WeightShare(10 * 8 / total, 0.0),
        "attention.out_proj": WeightShare(8 * 8 / total, 8 * 8 / products),
    }
    assert report.shares.parameters == IN_FP8 / total
    assert report.shares.multiplications == IN_FP8 / products
    lines = str(report).splitlines()
    assert (
        f"  table: embedding: a look-up, not a product ({100 * 240 / total:.1f} % of the parameters, 0.0 % of the "
        "multiplications)" in lines
    )


def test_a_head_that_shares_the_tables_weight_multiplies():
    model = nn.ModuleDict(
        {"table": nn.Embedding(30, 8), "up": nn.Linear(8, 10), "lm_head": nn.Linear(8, 30, bias=False)}
    )
    model["lm_head"].weight = model["table"].weight
    shares = octavo.convert(model).shares
    assert shares.parameters == 80 / (240 + 80 + 10)
    assert shares.multiplications == 80 / (240 + 80)
    assert shares.by_path == {"table": WeightShare(240 / 330, 0.0), "lm_head": WeightShare(240 / 330, 240 / 320)}


def test_layers_in_high_precision_are_not_in_fp8():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 24, bias=False))
    quarter = Shares(parameters=0.25, multiplications=0.25, training=0.25)
    assert octavo.convert(model, overrides={"1": "bf16"}).shares == quarter
    assert octavo.convert(model, "bf16").shares == Shares()


def test_backward_counts_two_products_of_a_weight_that_takes_a_gradient():
    """rowwise_hp_grad_weight casts for two of three products; a frozen weight has no grad_weight."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 24, bias=False), nn.Conv1d(8, 4, 1, bias=False))
    report = octavo.convert(model, "rowwise_hp_grad_weight")
    assert report.shares.multiplications == 256 / 288
    assert report.shares.training == 2 * 256 / (3 * 288)
    assert "88.9 % of the multiplications (59.3 % with backward's), counting" in str(report)
    model[1].requires_grad_(False)
    assert octavo.convert(model, "tensorwise").shares.training == (3 * 64 + 2 * 192) / (3 * 64 + 2 * 192 + 3 * 32)


class Subclass(nn.Linear):
    pass


def test_what_more_could_run_in_fp8_is_said_with_its_share():
    model = nn.ModuleDict(
        {"up": nn.Linear(8, 8, bias=False), "own": Subclass(8, 24, bias=False), "lm_head": nn.Linear(8, 32, bias=False)}
    )
    report = octavo.convert(model)
    assert report.gains == {"convert_head=True": 256 / 512, "linear_classes=[Subclass]": 192 / 512}
    assert str(report).splitlines()[-1] == (
        "more would run in FP8 with convert_head=True (50.0 % of the multiplications), linear_classes=[Subclass] "
        "(37.5 % of the multiplications)"
    )
    report = octavo.convert(model, convert_head=True, linear_classes=[Subclass])
    assert report.gains == {}
    assert report.shares.multiplications == 1


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor.*:UserWarning")
def test_layers_quantized_by_torch_are_listed_in_the_report():
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with pytest.warns(DeprecationWarning, match=r"torch\.ao\.quantization is deprecated"):
        model = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear})
    model.append(nn.Linear(8, 8))
    report = octavo.convert(model)
    assert report.converted == ("3",)
    assert set(report.parameters) == {"0._packed_params._packed_params", "2._packed_params._packed_params"}
    assert model(torch.randn(2, 8)).shape == (2, 8)


def test_former_names_of_stored_weights_warn():
    report = ConversionReport(recipe="rowwise", converted=("a", "b"), stored=("a",), not_stored={"b": "is read"})
    with pytest.warns(DeprecationWarning, match="stored"):
        assert report.held == report.stored
    with pytest.warns(DeprecationWarning, match="not_stored"):
        assert report.not_held == report.not_stored


def test_the_printed_form_has_a_line_for_all_layers_that_differ_in_numbers_alone():
    report = ConversionReport(
        recipe="rowwise",
        converted=("a",),
        skipped={f"h.{i}.fc{j}": "filter" for i in (0, 1, 2, 5) for j in (1, 2)},
        parameters={f"h.{i}.experts.{j}.up": "bare" for i in (3, 7) for j in (0, 1)},
        notes={"x.0": "is read", "x.1": "is read", "x.y": "is read"},
        shares=Shares(
            parameters=0.5,
            multiplications=0.75,
            training=0.75,
            by_path={f"h.{i}.fc1": WeightShare(0.1, 0.05) for i in (0, 1, 2, 5)}
            | {"h.3.experts.0.up": WeightShare(0.004, 0.006)},
        ),
    )
    assert str(report).splitlines() == [
        "1 layer runs rowwise, 8 stay as they are",
        "in FP8: 50.0 % of the parameters and 75.0 % of the multiplications, counting each weight once a token",
        "  h.[0-2,5].fc1 (4): filter (40.0 % of the parameters, 20.0 % of the multiplications)",
        "  h.[0-2,5].fc2 (4): filter",
        "  h.[3,7].experts.[0-1].up (4): bare (0.4 % of the parameters, 0.6 % of the multiplications)",
        "note: x.[0-1] (2) is read",
        "note: x.y is read",
    ]


class Adapted(nn.Linear):
    """A linear layer that adds a product of its own, as adapters in one module have it."""

    def __init__(self) -> None:
        super().__init__(8, 16, bias=False)
        self.lora_a, self.lora_b = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.zeros(16, 2))
        self.mix, self.rows = nn.Conv1d(3, 5, 3, bias=False), nn.Linear(4, 6, bias=False)


class Projected(nn.Embedding):
    """A table whose rows are projected."""

    def __init__(self) -> None:
        super().__init__(9, 8)
        self.projection = nn.Parameter(torch.randn(8, 8))


def test_weights_in_and_beside_the_weight_of_other_layers_are_named():
    model = nn.ModuleDict({"adapted": Adapted(), "table": Projected(), "taken": nn.Linear(8, 32, bias=False)})
    nn.utils.parametrizations.weight_norm(model["taken"])
    report = octavo.convert(model)
    assert report.converted == ("adapted.rows",)
    assert report.skipped.keys() == {"adapted", "table", "taken"}
    assert set(report.parameters) == {"adapted.lora_a", "adapted.lora_b", "adapted.mix.weight", "table.projection"}
    assert report.parameters["adapted.lora_a"] == "stays as it is: a parameter of Adapted besides its weight"
    products = 16 * 8 + 2 * 8 + 16 * 2 + 5 * 3 * 3 + 6 * 4 + 8 * 8 + 32 * 8
    assert report.shares.multiplications == 6 * 4 / products
    assert report.shares.by_path["taken"].multiplications == 32 * 8 / products
    assert report.shares.by_path["table.projection"].multiplications == 64 / products


@pytest.mark.parametrize("shape", [(1, 4096), (4096, 1), (1, 1)], ids=str)
def test_a_weight_of_one_row_or_one_column_is_named(shape):
    model = nn.ModuleDict({"taken": nn.Linear(8, 32)})
    model.register_parameter("score", nn.Parameter(torch.zeros(shape)))
    report = octavo.convert(model)
    assert report.parameters == {"score": "stays as it is: a parameter of ModuleDict, which is not nn.Linear"}
    assert report.shares.by_path["score"].multiplications == torch.Size(shape).numel() / (
        torch.Size(shape).numel() + 8 * 32
    )
