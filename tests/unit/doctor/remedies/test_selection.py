import numpy as np
import pytest

from octavo import recipes
from octavo.doctor import Remedy, Sample, Severity, Thresholds, diagnose, series_of
from octavo.doctor.findings import CAUSES, Finding
from octavo.doctor.remedies import remedies_for
from octavo.doctor.rules import slow_layers
from octavo.doctor.series import ProductKey
from tests.unit.doctor.one_layer import finding, found

LAYER = {"in_features": 8, "out_features": 24}
KEYS = {
    "recipe", "recipe_options", "overrides", "skip", "precision", "loss_scale", "lr", "warmup", "precision_schedule",
    "cache_weights",
}  # fmt: skip


def run_of(*, recipe="tensorwise", lines=(), products=None, parameters=None, layers=("mlp.0", "mlp.1"), **facts):
    sample = Sample(
        step=1,
        casts={},
        products=products or {},
        parameters=parameters or {},
        layers={path: LAYER | {"recipe": recipe} | facts for path in layers},
    )
    return series_of(lines, [sample])


def changes_of(code, series, **fields):
    return [dict(remedy.changes) for remedy in remedies_for(found(code, **({"path": "mlp.0"} | fields)), series)]


@pytest.mark.parametrize("code", CAUSES)
@pytest.mark.parametrize("path", ["mlp.0", "mlp", "", "elsewhere"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "own"])
def test_every_finding_has_a_remedy_in_one_sentence(code, path, recipe):
    series = run_of(recipe=recipe)
    remedies = remedies_for(found(code, path=path, evidence={"layers": 1.0}), series)
    assert remedies or (code == "slow-layer")
    for remedy in remedies:
        assert remedy.text.endswith(".")
        assert "\n" not in remedy.text
        assert remedy.changes.keys() <= KEYS
        assert remedy.error_removed is remedy.time_ratio is remedy.bytes_ratio is None
        for name in remedy.changes.get("overrides", {}).values():
            assert name in recipes.names()
    assert len(set(map(str, remedies))) == len(remedies)


@pytest.mark.parametrize("code", ["rank-mismatch", "nonfinite", "stale-weight", "zero-tensor", "nondeterministic"])
def test_finding_without_a_configuration_fix_gets_a_text_only_remedy(code):
    first = remedies_for(found(code, path="mlp.0", role="weight"), run_of())[0]
    assert not first.changes


def test_an_override_is_finer_than_what_the_layer_runs():
    assert changes_of("saturation", run_of(recipe="delayed"))[0] == {"overrides": {"mlp.0": "tensorwise"}}
    assert changes_of("saturation", run_of(recipe="tensorwise"))[0] == {"overrides": {"mlp.0": "blockwise"}}
    assert changes_of("saturation", run_of(recipe="mxfp8")) == [{"overrides": {"mlp.0": "bf16"}}]
    assert changes_of("saturation", run_of(recipe="bf16")) == []


@pytest.mark.parametrize("newest", ["bf16", "mxfp8"])
def test_remedy_follows_the_recipe_at_the_time_of_the_finding(newest):
    """A last phase of BF16, and a finer recipe: the remedy is for what the layer ran when it was found."""
    samples = [
        Sample(step=step, casts={}, products={}, parameters={}, layers={"mlp.0": LAYER | {"recipe": recipe}})
        for step, recipe in ((5, "delayed"), (30, "tensorwise"), (40, newest))
    ]
    series = series_of([], samples)
    assert changes_of("saturation", series, first_step=5, last_step=25)[0] == {"overrides": {"mlp.0": "tensorwise"}}
    assert changes_of("saturation", series, first_step=5, last_step=35)[0] == {"overrides": {"mlp.0": "blockwise"}}
    assert changes_of("gradient-underflow", series, first_step=30, last_step=35) == [{"overrides": {"mlp.0": "bf16"}}]
    merged = changes_of("saturation", series, path="", places=("mlp.0",), first_step=5, last_step=25)
    assert merged[0] == {"overrides": {"*": "tensorwise"}}
    assert changes_of("loss-gap", series, path="")[0] == {"recipe": "rowwise", "recipe_options": {}}


def test_module_finding_overrides_its_layers_and_run_finding_overrides_all():
    assert changes_of("saturation", run_of(), path="mlp")[-1] == {"overrides": {"mlp.*": "bf16"}}
    assert changes_of("saturation", run_of(), path="")[-1] == {"overrides": {"*": "bf16"}}


def test_remedy_for_most_layers_goes_beyond_their_current_recipe():
    places = ("mlp.1", "mlp.0")
    assert changes_of("saturation", run_of(recipe="blockwise"), path="", places=places) == [
        {"overrides": {"*": "bf16"}}
    ]
    assert changes_of("sensitive-module", run_of(), path="", places=places) == [{"skip": ["mlp.1", "mlp.0"]}]
    assert "all layers" in remedies_for(found("saturation", path="", places=places), run_of())[0].text


def test_scales_of_a_byte_that_are_rounded_down_are_rounded_up():
    casts = {"input output": {"scale_rounding": "floor"}}
    first = changes_of("saturation", run_of(recipe="mxfp8", casts=casts))[0]
    assert first == {"recipe_options": {"scale_rounding": "rceil"}}
    casts = {"input output": {"scale_rounding": "rceil"}}
    assert changes_of("saturation", run_of(recipe="mxfp8", casts=casts)) == [{"overrides": {"mlp.0": "bf16"}}]


def test_gradients_get_range_before_they_get_precision():
    e4m3 = {"casts": {"grad_output grad_input": {"format": "E4M3"}}}
    wider = {"recipe_options": {"gradient_format": "E5M2"}}
    assert changes_of("gradient-underflow", run_of(recipe="rowwise"))[0] == wider
    assert changes_of("gradient-underflow", run_of(recipe="tensorwise, E4M3 gradients", **e4m3))[0] == wider
    own = run_of(recipe="narrow gradients", **e4m3)
    assert changes_of("gradient-underflow", own)[0] == {"overrides": {"mlp.0": "tensorwise"}}
    assert changes_of("gradient-underflow", run_of()) == [{"overrides": {"mlp.0": "bf16"}}], "no FP8 has more range"


def test_a_history_is_shortened_or_given_room():
    series = run_of(recipe="delayed", history_length=1024, statistic="max")
    loose = changes_of("stale-scale", series, evidence={"stale_ratio": 0.01})
    assert loose[:2] == [{"overrides": {"mlp.0": "tensorwise"}}, {"recipe_options": {"history_length": 4}}]
    outgrown = changes_of("stale-scale", series, evidence={"stale_ratio": 5.0})
    assert {"recipe_options": {"margin": 1}} in outgrown
    assert not any("history_length" in change.get("recipe_options", {}) for change in outgrown)
    mean = run_of(recipe="delayed", history_length=32, statistic="mean")
    assert {"recipe_options": {"statistic": "max"}} in changes_of("stale-scale", mean)
    one = run_of(recipe="delayed", history_length=1, statistic="latest")
    assert {"recipe_options": {"statistic": "max", "history_length": 16}} in changes_of("scale-oscillation", one)


def test_weights_are_cached_no_more_only_where_they_were():
    assert changes_of("stale-weight", run_of(caches_weight=True))[0] == {"cache_weights": False}
    assert not any("cache_weights" in change for change in changes_of("stale-weight", run_of()))


def test_the_down_projection_of_a_gated_mlp_is_meant():
    sample = Sample(
        step=1,
        casts={},
        products={},
        parameters={},
        layers={
            "mlp.gate": {"recipe": "tensorwise", "in_features": 8, "out_features": 24},
            "mlp.up": {"recipe": "tensorwise", "in_features": 8, "out_features": 24},
            "mlp.down": {"recipe": "tensorwise", "in_features": 24, "out_features": 8},
        },
    )
    assert changes_of("outlier-growth", series_of([], [sample]), path="mlp")[0] == {"overrides": {"mlp.down": "bf16"}}


def outlier_advice(shapes, path, **evidence):
    """What is said of outliers that grow at a path, in a model of layers of such shapes, (in, out)."""
    layers = {
        name: {"recipe": "tensorwise", "in_features": inputs, "out_features": outputs}
        for name, (inputs, outputs) in shapes.items()
    }
    series = series_of([], [Sample(step=1, casts={}, products={}, parameters={}, layers=layers)])
    grown = Finding(code="outlier-growth", severity=Severity.WARN, path=path, role="input", evidence=evidence)
    return " ".join(remedy.text for remedy in remedies_for(grown, series))


GATED = {"mlp.gate": (8, 24), "mlp.up": (8, 24), "mlp.down": (24, 8)}
PLAIN = {"mlp.fc1": (8, 32), "mlp.fc2": (32, 8)}


def test_outlier_advice_mentions_gates_only_for_gated_layers():
    """An input whose peak climbs may be anybody's: only what gate and up projection make hangs on them."""
    assert "gate and up" in outlier_advice(GATED, "mlp", alignment=0.99)
    assert "gate and up" in outlier_advice(GATED, "mlp.down")
    for shapes, path in ((GATED, "mlp.gate"), (PLAIN, "mlp.fc2"), (PLAIN, "mlp.fc1")):
        advice = outlier_advice(shapes, path)
        assert "gate" not in advice.replace(path, "")
        assert "Raise the weight decay of the layers before it" in advice


def noisy(*ratios):
    """Looks at steps 10, 20 and so on: the SQNRs of two layers' grad_weight, whose gradients have norms 1 and 2."""
    keys = [ProductKey("mlp.0", "grad_weight"), ProductKey("mlp.1", "grad_weight"), ProductKey("mlp.1", "output")]
    samples = [
        Sample(
            step=10 * (look + 1),
            casts={},
            products=dict(zip(keys, np.array([[first, np.nan], [second, np.nan], [-50.0, np.nan]]), strict=True)),
            parameters={"mlp.0.weight": np.array([1.0, 0, 0]), "mlp.1.weight": np.array([2.0, 0, 0])},
            layers={path: LAYER | {"recipe": "tensorwise"} for path in ("mlp.0", "mlp.1")},
        )
        for look, (first, second) in enumerate(ratios)
    ]
    return series_of([], samples)


@pytest.mark.parametrize(
    ("ratios", "noisiest"),
    [
        ([(20, 10)], "mlp.1"),
        ([(20, 26.1)], "mlp.0"),
        ([(20, 25.9)], "mlp.1"),
        ([(20, 10), (20, 10), (0, 40)], "mlp.0"),  # 1.02 to 0.8
        ([(20, 10), (20, 10), (3, 40)], "mlp.1"),  # 0.52 to 0.8
        ([(20, 10), (20, 10), (20, np.nan)], "mlp.0"),  # the other has left FP8
        ([(np.nan, np.nan)], None),
    ],
)
def test_the_noisiest_layer_leaves_fp8(ratios, noisiest):
    """In all of the finding's steps and no others."""
    last = 10 * len(ratios)
    series = noisy(*ratios, (-60, 40))
    first = changes_of("gradient-below-noise", series, path="", first_step=10, last_step=last)[0]
    assert first.get("overrides") == (noisiest and {noisiest: "bf16"})
    assert noisiest or "precision_schedule" in first


def test_remedy_for_most_layers_is_finer_than_the_worst_layer_still_in_fp8():
    """The autopilot may have given the worst one BF16 while the others went on as they were."""
    recipes_of = {5: ("delayed", "delayed", "delayed"), 30: ("bf16", "tensorwise", "delayed"), 60: ("bf16",) * 3}
    samples = [
        Sample(
            step=step,
            casts={},
            products={},
            parameters={},
            layers={f"mlp.{index}": LAYER | {"recipe": recipe} for index, recipe in enumerate(ran)},
        )
        for step, ran in recipes_of.items()
    ]
    series, places = series_of([], samples), ("mlp.0", "mlp.1", "mlp.2")

    def first_of(last_step):
        found = changes_of("saturation", series, path="", places=places, first_step=5, last_step=last_step)
        return found[0]["overrides"] if found else None

    assert first_of(25) == {"*": "tensorwise"}
    assert first_of(50) == {"*": "blockwise"}
    assert first_of(70) is None


def test_learning_rate_remedy_restores_the_previous_rate_and_lengthens_warmup():
    rates = [0.001, 0.002, 0.003, 0.003, 0.03, 0.03]
    lines = [{"kind": "step", "step": step, "lr": lr} for step, lr in enumerate(rates, start=1)]
    changes = changes_of("learning-rate", run_of(lines=lines), path="", first_step=5)
    assert changes == [{"lr": 0.003}, {"warmup": 10}]
    updates = changes_of("learning-rate", run_of(lines=lines[:4]), path="", first_step=4)
    assert updates == [{"lr": 0.0015}, {"warmup": 6}]
    assert changes_of("learning-rate", run_of(), path="", first_step=5) == [{}]


def test_an_fp16_gradient_that_is_not_finite_follows_the_loss_scale():
    lines = [{"kind": "step", "step": 1, "loss_scale": 2.0**24}]
    assert changes_of("nonfinite", run_of(lines=lines), role="grad_output")[0] == {"loss_scale": "dynamic"}
    assert changes_of("nonfinite", run_of(lines=lines), role="input")[0] == {}


def test_slow_layers_leave_fp8_smallest_first():
    sizes = {"a": 100, "b": 1, "c": 10}
    layers = {path: {"recipe": "rowwise", "in_features": 1, "out_features": size} for path, size in sizes.items()}
    series = series_of([], [Sample(step=1, casts={}, products={}, parameters={}, layers=layers)])
    (finding,) = slow_layers({p: facts | {"casts": ["E4M3"]} for p, facts in layers.items()}, Thresholds())
    assert [dict(one.changes) for one in remedies_for(finding, series)] == [{"skip": ["b", "c", "a"]}]


def test_diagnosis_includes_remedies():
    with finding(found("sensitive-module", path="lm_head", severity=Severity.FAIL)):
        (one,) = diagnose(run_of())
    assert one.remedies == (Remedy(text="Keep lm_head out of FP8.", changes={"skip": ["lm_head"]}),)
