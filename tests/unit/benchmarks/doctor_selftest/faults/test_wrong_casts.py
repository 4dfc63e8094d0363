import pytest
import torch

import octavo
from benchmarks.doctor_selftest.faults.wrong_casts import requantizing, scaling_by
from octavo.doctor.layer_recorder import LayerRecorder
from octavo.doctor.series import CastKey
from octavo.doctor.statistics import CAST_FIELDS, cast_numbers
from octavo.functional import saved_operands
from octavo.scaling import GRAD_OUTPUT, INPUT, ROLES, WEIGHT


def looked_at(layer: octavo.nn.Linear, name: str) -> dict[tuple[str, str], float]:
    casts: dict[CastKey, torch.Tensor] = {}
    layer.watch = LayerRecorder("layer", casts, {})
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 32, generator=generator).exp().requires_grad_()
    y = layer(x)
    y.backward(torch.randn(y.shape, generator=generator))
    layer.watch = None
    of = CAST_FIELDS.index(name)
    return {(key.role, key.gemm): float(cast_numbers(sums.numpy())[of]) for key, sums in casts.items()}


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return lambda recipe: octavo.nn.Linear(32, 16, bias=False, recipe=recipe)


@pytest.mark.parametrize("role", [INPUT, WEIGHT, GRAD_OUTPUT])
def test_one_role_is_scaled_by_another_amax(layer, role):
    chosen = layer("tensorwise")
    with scaling_by(chosen, role, lambda amax: amax / 4):
        stale = looked_at(chosen, "stale_ratio")
    for (name, _), ratio in stale.items():
        assert ratio == pytest.approx(4.0 if name == ROLES[role] else 1.0, rel=1e-6)
    assert all(ratio == pytest.approx(1.0, rel=1e-6) for ratio in looked_at(chosen, "stale_ratio").values())


def test_only_the_layer_itself_is_misled(layer):
    chosen, other = layer("tensorwise"), layer("tensorwise")
    with scaling_by(chosen, INPUT, lambda amax: amax / 4):
        assert all(ratio == pytest.approx(1.0, rel=1e-6) for ratio in looked_at(other, "stale_ratio").values())


def test_a_transpose_made_of_codes_has_the_scales_of_rounded_amaxes(layer):
    chosen = layer("rowwise")
    with requantizing(chosen, INPUT):
        wrong = looked_at(chosen, "stale_ratio")
    assert wrong["input", "grad_weight"] > 1.001
    assert all(ratio <= 1 for key, ratio in wrong.items() if key != ("input", "grad_weight"))
    assert all(ratio <= 1 for ratio in looked_at(chosen, "stale_ratio").values())


def test_injected_cast_fault_is_removed_even_after_an_error(layer):
    chosen, before = layer("tensorwise"), (saved_operands.cast_operand, saved_operands.cast_both_ways)
    with pytest.raises(ZeroDivisionError), scaling_by(chosen, INPUT, lambda amax: amax):
        raise ZeroDivisionError
    assert (saved_operands.cast_operand, saved_operands.cast_both_ways) == before
    assert "_layer_scaling" not in vars(chosen)
