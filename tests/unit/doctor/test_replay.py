"""Real layers, captured while they train with something wrong, and what a replay says of them."""

from dataclasses import replace

import pytest
import torch

from octavo import recipes
from octavo.doctor import Candidate, Capture, Trial, replay
from octavo.doctor.candidates import candidates_for
from octavo.doctor.replay import AS_IT_RAN, harm, score
from octavo.errors import DataError
from octavo.formats import E5M2
from octavo.numerics import quantize
from octavo.numerics.metrics import underflow_fraction
from tests.unit.doctor.one_layer import captured

M, K, N = 64, 128, 96


def gaussian(**more) -> dict:
    return {"x": torch.randn(M, K), "gradient": 1e-4 * torch.randn(M, N)} | more


def outlier_row() -> dict:
    x = torch.randn(M, K)
    x[5] *= 1e6
    return gaussian(x=x)


def log_normal() -> dict:
    return gaussian(gradient=torch.randn(M, N).sign() * torch.exp(4 * torch.randn(M, N)))


def by_name(trials: list[Trial]) -> dict[str, Trial]:
    return {trial.name: trial for trial in trials}


def tried(capture: Capture, *names: str) -> dict[str, Trial]:
    return by_name(replay(capture, [Candidate(name, recipes.get(name)) for name in names], rounds=1))


def test_a_healthy_layer_needs_nothing(tmp_path):
    ran, *others = replay(captured(tmp_path, "tensorwise", **gaussian()), rounds=1)
    assert ran.name == AS_IT_RAN
    assert ran.error < 0.06
    assert ran.error_removed == 0
    assert ran.time_ratio == ran.bytes_ratio == 1
    assert all(score(other, ran) <= 1e-9 for other in others), "nothing is bought where nothing is wrong"


def test_sqnr_is_that_of_the_products(tmp_path):
    """Against float64 products and a straightforward fake quantization."""
    capture = captured(tmp_path, "rowwise", **gaussian())
    (ran,) = replay(capture, [], rounds=1)

    def cast(tensor):
        spec = recipes.get("rowwise").output.a
        assert spec is not None
        return (
            quantize(tensor, spec.format, granularity=spec.granularity, scale_rounding=spec.scale_rounding)
            .dequantize()
            .double()
        )

    x, w, g = capture.input, capture.weight, capture.grad_output
    found = (cast(x) @ cast(w).t(), cast(g) @ cast(w.t()).t(), cast(g.t()) @ cast(x.t()).t())
    x, w, g = x.double(), w.double(), g.double()
    exact = (x @ w.t(), g @ w, g.t() @ x)
    squares = 0.0
    for name, product, wanted in zip(("output", "grad_input", "grad_weight"), found, exact, strict=True):
        noise = (product - wanted).square()
        assert ran.sqnr_db[name] == pytest.approx(float(10 * (wanted.square().sum() / noise.sum()).log10()), abs=0.01)
        squares += float((noise.sum(1) / wanted.square().sum(1)).mean())
    assert ran.error == pytest.approx((squares / 3) ** 0.5, rel=1e-3)


def test_replay_measures_error_against_float64_products(tmp_path):
    """The surrounding precision's own rounding counts: by FP32 products its own would be without an error."""
    capture = captured(tmp_path, "tensorwise", **gaussian())
    bf16 = tried(capture, "bf16")["bf16"]
    found = capture.input @ capture.weight.t()
    exact = capture.input.double() @ capture.weight.double().t()
    ratio = exact.square().sum() / (found - exact).square().sum()
    assert 100 < bf16.sqnr_db["output"] < 200
    assert bf16.sqnr_db["output"] == pytest.approx(float(10 * ratio.log10()), abs=0.5)


def test_rowwise_wins_over_tensorwise_where_one_row_is_loud(tmp_path):
    capture = captured(tmp_path, "tensorwise", **outlier_row())
    ran, *others = replay(capture, rounds=1)
    names = [trial.name for trial in others]
    rowwise = by_name(others)["rowwise"]
    assert ran.error > 0.5, "all other rows are lost"
    assert ran.sqnr_db["output"] > 25, "which the ratio of energies does not see"
    assert rowwise.error < 0.06
    assert rowwise.error_removed > 0.9
    assert names.index("rowwise") < names.index("bf16"), "nobody leaves FP8 where a finer recipe does"
    assert names.index("rowwise") < names.index("tensorwise, E4M3 gradients")


def test_replay_of_a_log_normal_gradient_prefers_more_range(tmp_path):
    recipe = recipes.get("tensorwise", gradient_format="E4M3")
    capture = captured(tmp_path, recipe, **log_normal())
    ran, *others = replay(capture, rounds=1)
    trials = by_name(others)
    assert ran.underflow["grad_output"] > 0.5
    assert ran.error < 0.06, "which no product's error shows"
    flushed = {name: trial.underflow["grad_output"] for name, trial in trials.items()}
    assert flushed["tensorwise"] < flushed["blockwise"] < ran.underflow["grad_output"]
    best = max(others, key=lambda trial: score(trial, ran, "grad_output"))
    assert {cast.format for cast in best.recipe.casts[2:5:2]} == {E5M2}, best.name


def test_underflow_and_bytes_are_those_of_the_casts(tmp_path):
    capture = captured(tmp_path, "tensorwise", **log_normal())
    trials = tried(capture, "rowwise", "bf16")
    ran = trials[AS_IT_RAN]
    gradient = capture.grad_output
    assert ran.underflow["grad_output"] == pytest.approx(underflow_fraction(gradient, quantize(gradient, E5M2)))
    assert ran.bytes == M * K + N * K + M * N + 3 * 4
    rows = M + N + M + K + N + K  # one scale for each row of each operand
    assert trials["rowwise"].bytes == 2 * (M * K + N * K + M * N) + 4 * rows
    assert trials["bf16"].bytes == 4 * (M * K + N * K + M * N), "in the surrounding precision"
    assert trials["bf16"].underflow == trials["bf16"].saturation == dict.fromkeys(ran.underflow, 0.0)


def test_replay_of_a_past_outlier_prefers_a_shorter_window(tmp_path):
    capture = captured(tmp_path, "delayed", **gaussian(), before=lambda step: 1e6 if step == 2 else 1.0, steps=9)
    ran, *others = replay(capture, rounds=1)
    trials = by_name(others)
    assert ran.underflow["input"] > 0.99
    assert trials["delayed, its own window"].error == ran.error
    for name in ("delayed, window 1", "delayed, window 4", "tensorwise"):
        assert trials[name].error < 0.06, name
    assert trials["delayed, window 4"].bytes_ratio == 1


def test_replay_of_a_grown_amax_prefers_dynamic_scaling(tmp_path):
    capture = captured(tmp_path, "delayed", **gaussian(), before=lambda _: 1 / 8, steps=6)
    ran, *others = replay(capture, rounds=1)
    trials = by_name(others)
    assert ran.saturation["input"] > 0.5
    assert trials["delayed, window 1"].error == ran.error, "the newest amax is as old as the oldest"
    assert trials["tensorwise"].error < 0.06 < trials["delayed, margin 1"].error < ran.error
    assert others[0].name == "tensorwise"


def test_the_scales_of_the_run_are_those_of_its_history(tmp_path):
    """A frozen amax differs from what the window says; both are replayed."""
    capture = captured(tmp_path, "delayed", **gaussian(), steps=4)
    assert capture.amax is not None
    frozen = replace(capture, amax=capture.amax / 16)
    trials = by_name(replay(frozen, rounds=1))
    assert trials[AS_IT_RAN].error > 0.5
    assert trials["delayed, its own window"].error < 0.06


def test_equally_effective_candidates_rank_by_cost(tmp_path):
    capture = captured(tmp_path, "delayed", **gaussian(), before=lambda _: 1 / 8)
    doubled = replace(recipes.get("tensorwise"), grad_weight=recipes.get("blockwise").grad_weight)
    given = [
        Candidate("dear", doubled),
        Candidate("cheap", recipes.get("tensorwise")),
        Candidate("bf16", recipes.get("bf16")),
    ]
    names = [trial.name for trial in replay(capture, given, rounds=1)]
    assert names == [AS_IT_RAN, "cheap", "dear", "bf16"]


def test_the_score_is_its_formula(tmp_path):
    capture = captured(tmp_path, "tensorwise", **outlier_row())
    trials = tried(capture, "bf16")
    ran, other = trials[AS_IT_RAN], trials["bf16"]
    assert harm(ran) == pytest.approx(ran.error / 0.06)
    assert harm(ran, "input") == pytest.approx(ran.underflow["input"] / 0.05)
    assert harm(ran, "") == harm(ran, "input")
    assert score(other, ran) == pytest.approx(1 - 1 / harm(ran) - 0.05 * (1 + 2), rel=1e-4)  # twice the time, FP32
    measured = replace(other, is_on_gpu=True, seconds=8.0), replace(ran, is_on_gpu=True, seconds=2.0)
    assert score(*measured) == pytest.approx(1 - 1 / harm(ran) - 0.05 * (2 + 2), rel=1e-4)


def test_hopper_sums_lose_what_a_tensor_core_loses(tmp_path):
    capture = captured(tmp_path, "tensorwise", x=torch.rand(32, 2048) + 0.5, gradient=torch.rand(32, 16))
    capture = replace(capture, weight=capture.weight.abs())
    trials = by_name(replay(capture, rounds=1))
    fast = trials["tensorwise, Hopper's sums"]
    assert fast.error > 1.5 * trials[AS_IT_RAN].error
    emulating = replace(capture, recipe=fast.recipe)
    trials = by_name(replay(emulating, rounds=1))
    assert trials[AS_IT_RAN].error == fast.error
    assert trials["blockwise"].recipe.emulate_tensor_cores
    assert trials["blockwise"].error < fast.error
    assert trials["tensorwise, FP32 sums"].error < fast.error


def test_broken_tokens_and_features_are_left_out(tmp_path):
    data = gaussian()
    clean = captured(tmp_path / "clean", "rowwise", **data)
    x, gradient, weight = clean.input.clone(), clean.grad_output.clone(), clean.weight.clone()
    x[3, 1], gradient[4, 2], weight[5, 3] = torch.nan, torch.inf, torch.nan
    rows, outputs = torch.arange(M) - 3, torch.arange(N)
    rows, outputs = (rows != 0) & (rows != 1), outputs != 5
    broken = replace(clean, input=x, grad_output=gradient, weight=weight)
    kept = replace(clean, input=x[rows], grad_output=gradient[rows][:, outputs], weight=weight[outputs])
    (one,), (other,) = replay(broken, [], rounds=1), replay(kept, [], rounds=1)
    assert one.error == other.error < 0.06
    assert one.sqnr_db == other.sqnr_db


def test_a_capture_without_a_finite_token_is_refused(tmp_path):
    capture = captured(tmp_path, "tensorwise", **gaussian())
    with pytest.raises(
        DataError, match=r"layer '0' at step 2 has NaN or infinity in every token; no recipe fixes that"
    ):
        replay(replace(capture, weight=torch.full_like(capture.weight, torch.nan)))


def test_a_layer_without_signal_has_no_error():
    zeros = Capture(
        path="0",
        step=1,
        recipe=recipes.get("tensorwise"),
        input=torch.zeros(4, 8),
        weight=torch.zeros(2, 8),
        grad_output=torch.zeros(4, 2),
    )
    assert {trial.error for trial in replay(zeros, rounds=1)} == {0.0}
    assert {trial.error_removed for trial in replay(zeros, rounds=1)} == {0.0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_tensors_beside_a_master_weight(tmp_path, dtype):
    capture = captured(tmp_path, "tensorwise", **gaussian())
    capture = replace(capture, input=capture.input.to(dtype), grad_output=capture.grad_output.to(dtype))
    trials = tried(capture, "bf16", "rowwise")
    assert trials[AS_IT_RAN].error < 0.06
    assert trials["bf16"].bytes_ratio == pytest.approx(2, rel=0.01)


def test_replay_computes_where_gradients_are_off(tmp_path):
    capture = captured(tmp_path, "tensorwise", **gaussian())
    with torch.no_grad():
        assert replay(capture, [], rounds=1)[0].error < 0.06


def test_static_layers_replay_with_their_scale(tmp_path):
    capture = captured(tmp_path, "tensorwise", **gaussian())
    static = replace(capture, recipe=recipes.get("static"), input_scale=capture.input.abs().max() / 448 / 16)
    trials = tried(static, "tensorwise")
    assert trials[AS_IT_RAN].saturation["input"] > 0.5
    assert trials["tensorwise"].error < trials[AS_IT_RAN].error


@pytest.mark.parametrize("name", recipes.names())
def test_candidates_are_not_what_ran(name):
    recipe = recipes.get(name)
    history = {"window": torch.ones(3, 4), "amax": torch.ones(3)} if recipe.is_delayed else {}
    capture = Capture(
        path="0",
        step=1,
        recipe=recipe,
        input=torch.ones(4, 8),
        weight=torch.ones(2, 8),
        grad_output=torch.ones(4, 2),
        **history,
    )
    found = candidates_for(capture)
    assert len({candidate.name for candidate in found}) == len(found)
    assert {"tensorwise", "rowwise", "blockwise", "mxfp8", "bf16"} <= {c.name for c in found} | {name}
    if not recipe.is_delayed:
        assert all(candidate.recipe != recipe for candidate in found)
        assert not any(candidate.recipe.is_delayed for candidate in found)


def test_token_whose_output_cancels_counts_as_fully_lost_at_most(tmp_path):
    """Its exact output is far below the noise of its products, whatever casts them."""
    capture = captured(tmp_path, "tensorwise", **gaussian())
    x = capture.input.clone()
    x[3] -= torch.linalg.pinv(capture.weight.double()).matmul(capture.weight.double() @ x[3].double()).float()
    trials = tried(replace(capture, input=x), "bf16")
    assert (x[3].double() @ capture.weight.double().t()).norm() < 1e-4
    share = (1 / M / 3) ** 0.5
    assert share < trials[AS_IT_RAN].error < share + 0.06
