"""Rounding by data, against least squares solved anew for every column, and against all roundings there are."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo import recipes
from octavo.errors import ConfigError, DataError
from octavo.functional import cast_operand
from octavo.numerics import QuantizedTensor
from octavo.quantization import compensate_rounding, prepare_qat
from octavo.quantization.calibration.compensated_rounding import DAMPING, rounded_by_data
from octavo.recipes import CastSpec
from tests.unit.quantization.tiny_model import tiny_language_model, windows

SPECS = {
    "tensor": recipes.get("tensorwise").output.b,
    "row": recipes.get("rowwise").output.b,
    "block": recipes.get("blockwise").output.b,
    "32": recipes.get("mxfp8").output.b,
}


def spec_of(name: str) -> CastSpec:
    spec = SPECS[name]
    assert spec is not None
    return spec


def alike(rows: int, columns: int, *, seed: int = 0) -> Tensor:
    """Inputs with something in common, of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(rows, 1, generator=generator) * torch.randn(columns, generator=generator)
    return (common + 0.3 * torch.randn(rows, columns, generator=generator)) * torch.linspace(0.2, 3, columns)


def cast(weight: Tensor, spec: CastSpec) -> QuantizedTensor:
    codes = cast_operand(weight, spec)
    assert isinstance(codes, QuantizedTensor)
    return codes


def error(difference: Tensor, moment: Tensor) -> float:
    return ((difference.double() @ moment.double()) * difference.double()).sum().item()


def by_least_squares(weight: Tensor, spec: CastSpec, moment: Tensor) -> Tensor:
    """Each column nearest to where the exact solution for all columns after it, given those before, wants it."""
    w, m = weight.double(), moment.double()
    m = m + DAMPING * m.diagonal().mean() * torch.eye(len(m), dtype=torch.float64)
    scale = cast(weight, spec).fp32_scale
    order = moment.diagonal().argsort(descending=True).tolist()
    q = w.clone()
    for place, j in enumerate(order):
        done, free = order[:place], order[place:]
        wanted = w[:, j]
        if done:
            moved = (q - w)[:, done] @ m[done][:, free] @ torch.linalg.inv(m[free][:, free])
            wanted = (w[:, free] - moved)[:, 0]
        wanted = torch.where(w[:, j].abs() == w.abs().max(), w[:, j], wanted)
        q[:, j] = octavo.quantize(wanted.float(), spec.format, scale=scale).dequantize().double()
    return q.float()


@pytest.mark.parametrize("seed", range(5))
def test_compensated_rounding_is_the_columnwise_least_squares_solution(seed):
    torch.manual_seed(seed)
    weight, x = torch.randn(6, 9), alike(40, 9, seed=seed)
    _, found = rounded_by_data(weight, spec_of("tensor"), x.t() @ x)
    wanted = by_least_squares(weight, spec_of("tensor"), x.t() @ x)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("seed", range(8))
def test_compensated_rounding_is_near_the_best_of_all_roundings(seed):
    """Of a row of six: every choice of the code below or above, but for the largest weight, which sets the scale."""
    torch.manual_seed(seed)
    weight, x = torch.randn(1, 6), alike(30, 6, seed=seed)
    spec, moment = spec_of("tensor"), x.t() @ x
    scale = cast(weight, spec).fp32_scale
    grid = torch.arange(256).byte().view(spec.format.torch_dtype).float()
    grid = grid[grid.isfinite()].unique() * scale
    choices = []
    for value in weight[0]:
        above = int((grid < value).sum())
        choices.append(grid[[max(above - 1, 0), min(above, len(grid) - 1)]].tolist())
    largest = int(weight.abs().argmax())
    choices[largest] = [float(cast(weight, spec).dequantize()[0, largest])]
    best = min(error(torch.tensor([each]) - weight, moment) for each in itertools.product(*choices))
    nearest = error(cast(weight, spec).dequantize() - weight, moment)
    _, found = rounded_by_data(weight, spec, moment)
    reached = error(found - weight, moment)
    assert reached <= best + 0.5 * (nearest - best) + 1e-9 * nearest


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("shape", [(7, 33), (130, 200), (5, 1)])
def test_the_weights_own_cast_finds_what_was_chosen(name, shape):
    """Scales to the bit, values to the bit; a second pass changes nothing that was chosen."""
    torch.manual_seed(1)
    weight, x = torch.randn(shape) * torch.logspace(-2, 2, shape[0])[:, None], alike(300, shape[1])
    weight[0] = 0
    moved, chosen = rounded_by_data(weight, spec_of(name), x.t() @ x)
    before, after = cast(weight, spec_of(name)), cast(moved, spec_of(name))
    assert torch.equal(after.dequantize(), chosen)
    assert torch.equal(after.scale.float(), before.scale.float())
    assert not chosen[0].any()
    if shape[1] > 1:
        moment = x.t() @ x
        assert error(chosen - weight, moment) < 0.7 * error(before.dequantize() - weight, moment)


def test_inputs_without_anything_in_common_leave_rounding_to_the_nearest():
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    _, chosen = rounded_by_data(weight, spec_of("tensor"), torch.eye(16))
    assert torch.equal(chosen, cast(weight, spec_of("tensor")).dequantize())


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "weight_only", "static"])
def test_a_models_outputs_come_nearer(recipe):
    """On text that was not seen, too; and training starts at those weights."""
    model, text = tiny_language_model(), windows(64)
    octavo.convert(model.model, "bf16", convert_head=True)
    with torch.no_grad():
        wanted = model.logits(windows(8, seed=1))
    shifts = {}
    for compensated in (False, True):
        made = tiny_language_model()
        if recipe == "static":
            octavo.calibrate(made, [text]).apply(made.model)
        else:
            prepare_qat(made.model, recipe)
        if compensated:
            left = compensate_rounding(made, [text[:32], text[32:]])
            assert len(left) == 14
            assert all(0 < share < 1 for share in left.values())
        with torch.no_grad():
            shifts[compensated] = (made.model.eval()(windows(8, seed=1)) - wanted).square().mean().item()
    assert shifts[True] < shifts[False]


def test_batches_may_be_whatever_the_module_takes_and_add_up():
    """One batch or several, positional or by name: the same weights."""
    made = []
    x = alike(64, 12)
    for batches in ([x], [x[:32], x[32:]], [(x,)], [{"input": x}]):
        torch.manual_seed(0)
        layer = nn.Linear(12, 8)
        model = nn.Sequential(layer)
        octavo.convert(model, "tensorwise")
        compensate_rounding(model, batches)
        made.append(layer.weight.detach().clone())
    assert all(torch.equal(weight, made[0]) for weight in made[2:])
    torch.testing.assert_close(made[1], made[0], rtol=0.2, atol=1e-3)  # sums of another order may tip a tie


def test_autocast_around_narrows_what_layers_are_given_and_nothing_else():
    """Inputs that BF16 holds exactly: the same weights as without."""
    made, x = [], alike(64, 12).bfloat16().float()
    for narrow in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(12, 8)
        model = nn.Sequential(layer)
        octavo.convert(model, "tensorwise")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrow):
            compensate_rounding(model, [x])
        made.append(layer.weight.detach())
    assert torch.equal(*made)


class Halves(nn.Module):
    """One layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        return self.used(x)


def test_unreached_layers_and_training_mode_stay_unchanged():
    model = Halves().train()
    octavo.convert(model, "tensorwise")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    left = compensate_rounding(model, [alike(50, 6)])
    assert list(left) == ["used"]
    assert model.training
    assert torch.equal(model.unused.weight, before["unused.weight"])
    assert not torch.equal(model.used.weight, before["used.weight"])
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("recipe", "batches", "error_type", "words"),
    [
        ("bf16", [torch.ones(2, 6)], ConfigError, "no layer of this model casts an unshared weight"),
        ("tensorwise", [], DataError, "needs at least one batch"),
        ("tensorwise", [torch.full((2, 6), float("nan"))], DataError, "layer 'used' received NaN"),
    ],
)
def test_unsupported_compensation_is_refused_and_leaves_the_weights_unchanged(recipe, batches, error_type, words):
    model = Halves()
    octavo.convert(model, recipe)
    before = model.used.weight.detach().clone()
    with pytest.raises(error_type, match=words):
        compensate_rounding(model, batches)
    assert torch.equal(model.used.weight, before)


def test_weights_held_as_codes_are_no_longer_moved():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[0].requires_grad_(False)
    octavo.convert(model, "tensorwise", frozen="fp8")
    assert list(compensate_rounding(model, [alike(50, 6)])) == ["1"]


@pytest.mark.parametrize("seed", [31, 120, 228])
def test_a_weight_that_would_come_off_worse_stays(seed):
    """Nothing is known beforehand of the columns to come: here the chosen codes disturb the output more."""
    torch.manual_seed(seed)
    weight, x = torch.randn(1, 4), torch.randn(6, 4)
    nearest = cast(weight, spec_of("tensor")).dequantize()
    _, chosen = rounded_by_data(weight, spec_of("tensor"), x.t() @ x)
    assert error(chosen - weight, x.t() @ x) > 1.1 * error(nearest - weight, x.t() @ x)
    model = nn.Sequential(nn.Linear(4, 1))
    own = model.get_parameter("0.weight")
    own.data.copy_(weight)
    octavo.convert(model, "tensorwise")
    assert compensate_rounding(model, [x]) == {"0": 1.0}
    assert torch.equal(own, weight)


class Head(nn.Module):
    """A head that is the embedding, after a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.head = nn.Embedding(20, 6), nn.Linear(6, 6), nn.Linear(6, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.up(self.table(tokens)))


def test_a_weight_that_others_read_stays():
    torch.manual_seed(0)
    model = Head()
    octavo.convert(model, "tensorwise", convert_head=True)
    before = model.table.weight.detach().clone()
    assert list(compensate_rounding(model, [torch.arange(20)[None]])) == ["up"]
    assert torch.equal(model.table.weight, before)
    octavo.restore(model.up)
    with pytest.raises(ConfigError, match="unshared weight"):
        compensate_rounding(model, [torch.arange(20)[None]])


class InPlace(nn.Module):
    """The second layer is given the first one's tensor, with other values in it by then; both by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 8), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Any:
        y = self.first(input=x)
        x.mul_(torch.linspace(0, 4, x.shape[-1]).roll(5)).add_(x.roll(1, -1))
        return y, self.second(input=x)


def test_a_tensor_that_was_written_to_is_another_input():
    torch.manual_seed(0)
    model, alone, x = InPlace(), nn.Sequential(nn.Linear(12, 8)), alike(64, 12)
    alone.get_submodule("0").load_state_dict(model.second.state_dict())
    octavo.convert(model, "tensorwise")
    octavo.convert(alone, "tensorwise")
    given = x.clone()
    compensate_rounding(model, [given])
    compensate_rounding(alone, [given])
    assert torch.equal(model.second.weight, alone.get_parameter("0.weight"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(value):
    model = nn.Sequential(nn.Linear(6, 6))
    model.get_parameter("0.weight").data[2, 3] = value
    octavo.convert(model, "tensorwise")
    with pytest.raises(ConfigError, match="weight of layer '0' contains NaN or infinity"):
        compensate_rounding(model, [alike(50, 6)])


def test_inputs_whose_squares_overflow_are_not_called_nan():
    model = nn.Sequential(nn.Linear(6, 6))
    octavo.convert(model, "tensorwise")
    with pytest.raises(DataError, match="sum of squares overflows FP32"):
        compensate_rounding(model, [torch.full((2, 6), 1e30)])
