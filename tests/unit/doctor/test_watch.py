"""The watcher in all kinds of training loops: its samples, and that it changes nothing."""

import copy
import math

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import octavo
import octavo.doctor
from octavo.doctor import Sample, watch
from octavo.doctor.layer_recorder import LayerRecorder
from octavo.doctor.series import CastKey, ProductKey
from octavo.doctor.statistics import CAST_FIELDS
from octavo.errors import ConfigError
from octavo.kernels import cast_statistics, dispatch, native_bindings
from octavo.models import Llama
from tests.tiny_llama import tiny_llama_config

TRAINED = [
    name
    for name in octavo.recipes.names()
    if octavo.recipes.get(name).output.a is not None and not octavo.recipes.get(name).has_static_input
]
TINY = tiny_llama_config(
    vocab_size=32, hidden_size=16, intermediate_size=48, num_heads=2, num_kv_heads=1, max_positions=8
)


def mlp(recipe="tensorwise", **options):
    torch.manual_seed(0)
    layers = torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)
    model = torch.nn.Sequential(*layers)
    octavo.convert(model, recipe, convert_head=True, **options)
    return model


def train(model, optimizer, watcher, *, steps=3, micro=1, around=None):
    """Losses of a few steps, each step's batch the same with and without a watcher."""
    losses = []
    for number in range(1, steps + 1):
        generator = torch.Generator().manual_seed(number)
        with watcher.step() if watcher else torch.enable_grad() as notes:
            for _ in range(micro):
                x = torch.randn(24, 16, generator=generator)
                with around() if around else torch.enable_grad():
                    loss = model(x).square().mean()
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            if notes:
                notes.loss = loss
        octavo.update_scales(model)
    return torch.stack(losses)


def number_of(sample, key, field):
    return sample.casts[CastKey(*key)][CAST_FIELDS.index(field)]


def llama_steps(recipe, *, watched, around):
    torch.manual_seed(0)
    model = Llama(TINY, seed=0)
    octavo.convert(model, recipe, scale_updates="manual", convert_head=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watcher, left = watch(model, optimizer, interval=2) if watched else None, []
    for number in range(1, 5):
        tokens = torch.randint(32, (3, 9), generator=torch.Generator().manual_seed(number))
        with watcher.step() if watcher else torch.enable_grad():
            with torch.autocast("cpu", torch.bfloat16, enabled=around):
                logits = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            left += [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
        octavo.update_scales(model)
    return [*left, *model.state_dict().values(), *octavo.scaling_state(model).values(), torch.get_rng_state()]


@pytest.mark.parametrize("around", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("recipe", TRAINED)
def test_watching_changes_no_bit(recipe, around):
    """Logits, gradients, weights, scaling state and the random generator, of watched steps and of those between."""
    plain, seen = (llama_steps(recipe, watched=watched, around=around) for watched in (False, True))
    assert len(plain) == len(seen) > 40
    for one, other in zip(plain, seen, strict=True):
        assert torch.equal(one.view(torch.uint8) if one.ndim else one, other.view(torch.uint8) if other.ndim else other)


def test_the_first_step_and_every_interval_are_sampled():
    model = mlp()
    watcher = watch(model, interval=4)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), watcher, steps=9)
    assert [sample.step for sample in watcher.samples] == [1, 4, 8]
    assert [line["step"] for line in watcher.steps] == list(range(1, 10))
    assert all(math.isfinite(line["loss"]) for line in watcher.steps)
    with watcher.step(21):
        pass
    with watcher.step(23, always=True):
        model(torch.ones(2, 16)).sum().backward()
    assert (watcher.samples[-1].step, watcher.number) == (23, 23)


def test_the_newest_samples_are_stored_and_each_is_passed_on():
    seen: list[Sample] = []
    model = mlp()
    watcher = watch(model, interval=1, keep=2, on_sample=seen.append)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), watcher, steps=5)
    assert [sample.step for sample in watcher.samples] == [4, 5]
    assert [sample.step for sample in seen] == [1, 2, 3, 4, 5]
    assert watcher.series().kept_from == 4


def test_nothing_is_dropped_before_the_last_place_is_taken():
    model = mlp()
    watcher = watch(model, interval=1, keep=5)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), watcher, steps=5)
    assert watcher.series().kept_from is None


def test_contents_of_a_sample():
    model = mlp("delayed")
    optimizer = torch.optim.AdamW(model.parameters())
    watcher = watch(model, optimizer, interval=1)
    train(model, optimizer, watcher, steps=2)
    sample = watcher.samples[-1]
    assert [tuple(key) for key in sample.casts] == [
        ("0", "input", "output"),
        ("0", "weight", "output"),
        ("2", "input", "output"),
        ("2", "weight", "output"),
        ("2", "grad_output", "grad_input"),
        ("0", "grad_output", "grad_weight"),
    ], "as they ran; the first layer's input takes no gradient"
    assert {tuple(key) for key in sample.products} == {
        ("0", "output"), ("2", "output"), ("2", "grad_input"), ("0", "grad_weight"), ("2", "grad_weight")
    }  # fmt: skip
    assert sample.parameters.keys() == {"0.weight", "2.weight"}
    assert sample.layers["0"]["recipe"] == "delayed"
    assert (sample.layers["0"]["in_features"], sample.layers["0"]["out_features"]) == (16, 32)
    assert 1 < sample.scalars["gradient_to_noise"] < 1000


def test_the_gradient_over_its_noise():
    """sqrt(Σ |g|² / Σ |g|² 10^(-sqnr/10)) over the weights whose GEMM was measured."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    watcher = watch(model, optimizer, interval=1)
    train(model, optimizer, watcher, steps=1)
    sample = watcher.samples[-1]
    signal = noise = 0.0
    for path in ("0", "2"):
        norm, ratio = sample.parameters[f"{path}.weight"][0], sample.products[ProductKey(path, "grad_weight")][0]
        signal, noise = signal + norm**2, noise + norm**2 * 10 ** (-ratio / 10)
    assert sample.scalars["gradient_to_noise"] == pytest.approx(math.sqrt(signal / noise))


def test_micro_batches_leave_the_last_ones_numbers():
    model = mlp()
    watcher = watch(model, interval=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watcher.step():
        for factor in (1.0, 4.0, 2.0):
            model(torch.full((4, 16), factor)).sum().backward()
        optimizer.step()
    assert number_of(watcher.samples[-1], ("0", "input", "output"), "amax") == 2.0


def test_nonfinite_elements_of_every_micro_batch_are_counted():
    model = mlp()
    watcher = watch(model, interval=3)
    broken = torch.ones(4, 16)
    broken[0, :3] = math.nan
    model(broken)  # before the watched steps, and not of theirs
    later = watch(model, interval=3)
    for number in range(1, 4):
        for watching in (watcher, later):
            with watching.step():
                model(broken if number == 2 else torch.ones(4, 16)).sum().backward()
    assert number_of(later.samples[0], ("0", "input", "output"), "nonfinite") == 0, "older than the watcher"
    assert number_of(later.samples[1], ("0", "input", "output"), "nonfinite") == 6, "of both passes of step 2"
    assert number_of(later.samples[1], ("0", "weight", "output"), "nonfinite") == 0


@pytest.mark.parametrize("interval", [1, 10])
def test_a_loop_that_continues_after_nan_gets_a_true_origin(interval):
    """NaN in one weight's gradient at step 13: from step 14 on everything is NaN, the first layer's weight too."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher = watch(model, optimizer, interval=interval)
    for number in range(1, 21):
        with watcher.step() as notes:
            loss = model(torch.ones(4, 16)).square().mean()
            loss.backward()
            if number == 13:
                model[2].weight.grad[0] = math.nan
            optimizer.step()
            optimizer.zero_grad()
            notes.loss = loss
    found = next(one for one in watcher.findings() if one.code == "nonfinite")
    if interval == 1:
        assert (found.path, found.role, found.first_step) == ("2", "weight", 14)
    else:
        assert (found.path, found.first_step) == ("", 20)
        assert "steps 11-20" in found.cause
        assert "the loss is not finite from step 14 on" in found.cause


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("noted", [False, True])
def test_a_loss_scale_that_settles_is_healthy(fused, noted):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    watcher = watch(model, optimizer, interval=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    scales = []
    for number in range(1, 13):
        with watcher.step() as notes:
            loss = model(torch.randn(24, 16, generator=torch.Generator().manual_seed(number))).square().mean() * 100
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            notes.loss = loss
            if noted:
                notes.values["loss_scale"] = scales[-1]
    skipped = [1 + index for index, scale in enumerate(scales) if scale < [2.0**127, *scales][index]]
    assert 2 < len(skipped) < 8
    assert [line["step"] for line in watcher.overflows.lines] == skipped
    assert watcher.overflows.lines[-1]["loss_scale"] == (2 * scales[-1] if noted else None)
    bad = CAST_FIELDS.index("nonfinite")
    assert any(numbers[bad] for sample in watcher.samples for numbers in sample.casts.values())
    assert not watcher.findings()


def test_a_gradient_that_is_not_finite_and_taken_is_no_overflow():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher = watch(model, optimizer, interval=1)
    with watcher.step() as notes:
        loss = notes.loss = model(torch.ones(4, 16)).square().mean()
        (loss * math.inf).backward()
        optimizer.step()
    assert [(one.code, one.role) for one in watcher.findings()] == [("nonfinite", "grad_output")]
    skipping = watch(mlp(), interval=1)
    with skipping.step() as notes:
        loss = notes.loss = skipping.model(torch.ones(4, 16)).square().mean()
        (loss * math.inf).backward()
    assert [one.code for one in skipping.findings()] == ["nonfinite"], (
        "without an optimizer the step may have been taken"
    )


def watching(model):
    return [layer.watch for layer in model.modules() if isinstance(layer, octavo.nn.Linear) and layer.watch is not None]


def break_within(watcher, model):
    with watcher.step():
        assert len(watching(model)) == 2
        model(torch.ones(2, 16)).sum().backward()
        raise ZeroDivisionError


def test_an_exception_in_a_step_leaves_no_layer_watched():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher = watch(model, optimizer, interval=1)
    with pytest.raises(ZeroDivisionError):
        break_within(watcher, model)
    assert not watching(model)
    assert not optimizer._optimizer_step_pre_hooks
    assert (len(watcher.samples), len(watcher.steps)) == (0, 0)
    train(model, optimizer, watcher, steps=1)
    assert [sample.step for sample in watcher.samples] == [2]


class Outer(torch.nn.Module):
    """A graph of its own: torch compiles the children of a Sequential one by one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@pytest.mark.long
def test_a_compiled_model_is_sampled_eagerly_and_stays_compiled():
    plain, model = Outer(mlp()), Outer(mlp())
    seen = []

    def backend(graph, _):
        def run(*inputs):
            seen.append(graph)
            return graph(*inputs)

        return run

    model.compile(backend=backend, fullgraph=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    watchers = [watch(m, o, interval=2) for m, o in zip((plain, model), optimizers, strict=True)]
    losses = [train(m, o, w, steps=4) for m, o, w in zip((plain, model), optimizers, watchers, strict=True)]
    assert seen, "steps between samples run compiled"
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-6)
    for one, other in zip(*(w.samples for w in watchers), strict=True):
        assert one.casts.keys() == other.casts.keys()
        key = ("inner.0", "input", "output")
        assert number_of(one, key, "sqnr_db") == number_of(other, key, "sqnr_db")


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    def checkpointed(inner):
        module = torch.nn.Module()
        module.inner = inner
        module.forward = lambda x: checkpoint(inner, x.requires_grad_(), use_reentrant=reentrant)
        return module

    plain, model = mlp(), mlp()
    samples = []
    for one in (plain, checkpointed(model)):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        watcher = watch(one, optimizer, interval=1)
        train(one, optimizer, watcher, steps=1)
        samples.append(watcher.samples[-1])
    assert len(samples[0].casts) == len(samples[1].casts) > 0
    for key, numbers in samples[0].casts.items():
        other = samples[1].casts[
            CastKey(f"inner.{key.path}", key.role, "grad_input" if "grad" in key.role else key.gemm)
        ]
        torch.testing.assert_close(torch.from_numpy(numbers), torch.from_numpy(other), equal_nan=True)


def test_another_recipe_inside_autocast_is_measured():
    model = mlp("tensorwise")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher = watch(model, optimizer, interval=1)
    train(model, optimizer, watcher, steps=3, around=lambda: octavo.autocast("delayed_te"))
    sample = watcher.samples[-1]
    assert sample.layers["0"]["recipe"] == "delayed_te"
    assert number_of(sample, ("0", "input", "output"), "stale_ratio") != 1
    train(model, optimizer, watcher, steps=1, around=lambda: octavo.autocast("rowwise"))
    assert CastKey("0", "input", "grad_weight") in watcher.samples[-1].casts
    train(model, optimizer, watcher, steps=1, around=lambda: octavo.autocast(enabled=False))
    assert not watcher.samples[-1].casts


def test_layers_that_do_not_run_have_no_casts():
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(8, 8), "left": torch.nn.Linear(8, 8)})
    octavo.convert(model, "delayed", convert_head=True)
    watcher = watch(model, interval=1)
    for _ in range(2):
        with watcher.step():
            model["used"](torch.ones(2, 8)).sum().backward()
    assert {key.path for key in watcher.samples[-1].casts} == {"used"}
    assert watcher.samples[-1].layers.keys() == {"used", "left"}
    with watcher.step():
        pass
    assert not watcher.samples[-1].casts
    assert math.isnan(watcher.samples[-1].scalars["gradient_to_noise"])
    assert watcher.findings() == []


def test_tied_layers_are_one():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.ReLU())
    model.append(model[0])
    octavo.convert(model, "tensorwise", convert_head=True)
    watcher = watch(model, interval=1)
    with watcher.step():
        model(torch.randn(16, 8)).square().sum().backward()
    sample = watcher.samples[-1]
    assert {key.path for key in sample.casts} == {"0"}
    assert sample.products[ProductKey("0", "grad_weight")][0] > 20
    shared = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    shared[1].weight = shared[0].weight
    octavo.convert(shared, "tensorwise", convert_head=True)
    optimizer = torch.optim.SGD(shared.parameters(), lr=0.1)
    watcher = watch(shared, optimizer, interval=1)
    with watcher.step():
        shared(torch.randn(16, 8)).square().sum().backward()
        optimizer.step()
    assert {key.path for key in watcher.samples[-1].casts} == {"0", "1"}
    assert watcher.samples[-1].parameters.keys() == {"0.weight"}


@pytest.mark.parametrize("strided", [torch.randn(16, 40).t(), torch.randn(40, 32)[:, ::2]], ids=["columns", "apart"])
def test_statistics_of_a_strided_input_match_those_of_its_copy(strided, monkeypatch):
    found, strides, measured = [], [], LayerRecorder.forward

    def forward(self, recipe, x, *operands):
        strides.append(x.stride())
        measured(self, recipe, x, *operands)

    monkeypatch.setattr(LayerRecorder, "forward", forward)
    for view in (strided, strided.contiguous()):
        model = mlp()
        watcher = watch(model, interval=1)
        with watcher.step():
            model(view).sum().backward()  # a gradient of ones is one number, expanded
        found.append(watcher.samples[-1])
    assert (strides[0], strides[2]) == (strided.stride(), (16, 1)), "not copied before it is measured"
    assert found[0].casts.keys() == found[1].casts.keys()
    for key, numbers in found[0].casts.items():
        torch.testing.assert_close(torch.from_numpy(numbers), torch.from_numpy(found[1].casts[key]), equal_nan=True)


def test_without_native_kernels_the_numbers_are_the_same(monkeypatch):
    """Casts to 1e-9; gradients and GEMMs, which are summed in another order, to a tolerance."""
    found = []
    for absence in (native_bindings.why_absent(), "not built"):
        monkeypatch.setattr(native_bindings, "_absence", absence)
        monkeypatch.setattr(dispatch, "_gemm_choices", {})
        monkeypatch.setattr(dispatch, "_cast_choices", {})
        model = mlp("rowwise")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        watcher = watch(model, optimizer, interval=1)
        train(model, optimizer, watcher, steps=1)
        found.append(watcher.samples[-1])
    for key, numbers in found[0].casts.items():
        fields = slice(2) if key.role == "grad_output" else slice(None)
        tolerance = 1e-3 if key.role == "grad_output" else 1e-9
        np.testing.assert_allclose(numbers[fields], found[1].casts[key][fields], rtol=tolerance, atol=1e-12)
    for product, three in found[0].products.items():
        assert three[0] == pytest.approx(found[1].products[product][0], abs=0.3)


@pytest.mark.parametrize("native", [True, False])
def test_a_step_inside_autocast_is_sampled_alike(native, monkeypatch):
    if not native:
        monkeypatch.setattr(cast_statistics, "sums", lambda *_: False)
    found = []
    for around in (False, True):
        model = mlp()
        watcher = watch(model, interval=1)
        with torch.autocast("cpu", torch.bfloat16, enabled=around), watcher.step():
            model(torch.ones(4, 16).bfloat16()).float().sum().backward()
        found.append(watcher.samples[-1].products[ProductKey("0", "output")][0])
    assert found[0] == found[1]


@pytest.mark.parametrize("options", [{"interval": 0}, {"interval": 2.5}, {"interval": True}, {"keep": 1}], ids=str)
def test_numbers_out_of_range_are_rejected(options):
    (name,) = options
    with pytest.raises(ConfigError, match=f"watch's {name} must be a whole number of at least"):
        watch(mlp(), **options)


def test_models_without_octavo_layers_or_weights_are_rejected():
    with pytest.raises(ConfigError, match=r"no layer of this model is octavo's; call octavo.convert"):
        watch(torch.nn.Linear(4, 4))
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        octavo.convert(model, "delayed", convert_head=True)
    with pytest.raises(ConfigError, match=r"layer '0' is on the meta device and has no numbers.*to_empty"):
        watch(model)
    model.to_empty(device="cpu")
    torch.nn.init.normal_(model.get_parameter("0.weight"))
    watcher = watch(model)
    with watcher.step():
        model(torch.ones(2, 8)).sum().backward()
    assert [sample.step for sample in watcher.samples] == [1]


def test_a_state_dict_saved_in_a_sampled_step_is_that_of_an_unwatched_model():
    model, never_watched = mlp("delayed"), mlp("delayed")
    watcher = watch(model, interval=1)
    with watcher.step():
        model(torch.ones(2, 16)).sum().backward()
        saved = copy.deepcopy(model.state_dict())
    never_watched(torch.ones(2, 16)).sum().backward()
    assert not watching(model)
    assert saved.keys() == never_watched.state_dict().keys()
    assert all(torch.equal(tensor, never_watched.state_dict()[name]) for name, tensor in saved.items())


def test_learning_rate_is_the_one_that_the_optimizers_step_used():
    model = mlp()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[2].parameters()}], 1e-4
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    watcher = watch(model, optimizer, interval=2)
    for noted in (None, None, 7.0):
        with watcher.step() as notes:
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
            schedule.step()
            if noted is not None:
                notes.values["lr"] = noted
    assert [line["lr"] for line in watcher.steps] == [1e-3, 5e-4, 7.0]
