from typing import Any, cast

import pytest
import torch
from torch import nn

import octavo
from octavo.compat.transformer_engine import pytorch as te
from octavo.compat.transformer_engine.common.recipe import DelayedScaling
from octavo.errors import CheckpointError, ConfigError
from octavo.nn.scaling_state import discard_step, rescale_gradient_history
from octavo.scaling import EMPTY, ROLES
from tests.recorded_state import end_step, recorded_state


def _model(*, manual: bool = False, **options) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    recipe = octavo.recipes.get("delayed", **options)
    octavo.convert(model, recipe, scale_updates="manual" if manual else "automatic")
    return model


def _batches(count: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(5, 8, generator=generator) * 1.5**step for step in range(count)]


def _train(model: nn.Module, batches: list[torch.Tensor], *, manual: bool = False) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if manual:
            octavo.update_scales(model)
        losses.append(loss.item())
    return losses


def test_keys_shapes_and_dtypes():
    state = octavo.scaling_state(_model(history_length=5))
    assert set(state) == {
        f"{path}.{role}.{key}" for path in "02" for role in ROLES for key in ("amax_history", "amax", "steps")
    }
    assert state["0.input.amax_history"].shape == (5,)
    assert state["0.input.amax_history"].dtype is state["0.input.amax"].dtype is torch.float32
    assert state["0.input.steps"].dtype is torch.int64
    assert state["0.input.amax"].shape == state["0.input.steps"].shape == ()


def test_scaling_state_is_empty_unless_delayed_and_not_in_the_state_dict():
    model = _model()
    keys = list(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).state_dict())
    assert list(model.state_dict()) == keys
    for recipe in ("tensorwise", "rowwise", "bf16"):
        octavo.convert(model, recipe)
        assert octavo.scaling_state(model) == {}
        octavo.load_scaling_state(model, {})
    root = octavo.nn.Linear(2, 2, recipe="delayed")
    assert "weight.amax" in octavo.scaling_state(root)


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("options", [{}, {"statistic": "mean", "update_interval": 3, "history_length": 4}], ids=str)
def test_resuming_goes_on_bit_for_bit(manual, options):
    """Two models in lockstep: one that runs through, one rebuilt from the saved tensors half-way."""
    first, second = _batches(7, seed=1), _batches(6, seed=2)
    through = _model(manual=manual, **options)
    _train(through, first, manual=manual)
    weights = {key: value.clone() for key, value in through.state_dict().items()}
    scaling = octavo.scaling_state(through)
    resumed = _model(manual=manual, **options)
    resumed.load_state_dict(weights)
    octavo.load_scaling_state(resumed, scaling)
    losses = _train(through, second, manual=manual)
    assert _train(resumed, second, manual=manual) == losses
    for one, other in zip(through.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    after, same = octavo.scaling_state(through), octavo.scaling_state(resumed)
    assert all(torch.equal(after[key], same[key]) for key in after)
    fresh = _model(manual=manual, **options)
    fresh.load_state_dict(weights)
    assert _train(fresh, second, manual=manual) != losses, "the scaling state matters here"


def test_saving_does_not_disturb_the_run():
    batches = _batches(6, seed=4)
    undisturbed, observed = _model(), _model()
    losses = _train(undisturbed, batches)
    seen = []
    for batch in batches:
        octavo.scaling_state(observed)
        seen += _train(observed, [batch])
        octavo.scaling_state(observed)
    assert seen == losses


@pytest.mark.parametrize("recipe", ["delayed", "delayed_te"])
def test_reading_the_scaling_state_does_not_change_the_model(recipe):
    """The step that is over is closed in what is read; the next training forward closes the model's own."""
    model = octavo.nn.Linear(8, 4, recipe=recipe)
    for batch in _batches(2, seed=4):
        with octavo.autocast():
            model(batch).sum().backward()
        with torch.no_grad():
            model.weight.mul_(2)  # by hand: no optimizer says that the step is over
    before = {name: buffer.clone() for name, buffer in recorded_state(model).items()}
    x = torch.randn(3, 8)
    outputs = [_evaluated(model, x)]
    state = octavo.scaling_state(model)
    outputs.append(_evaluated(model, x))
    assert torch.equal(*outputs)
    assert all(torch.equal(buffer, before[name]) for name, buffer in recorded_state(model).items())
    assert state["input.steps"].item() == 2
    assert state["input.amax"] == _batches(2, seed=4)[-1].abs().max()


@torch.no_grad()
def _evaluated(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.eval()
    y: torch.Tensor = model(x)
    model.train()
    return y


def test_saved_tensors_are_copies():
    model = _model()
    _train(model, _batches(2, seed=0))
    state = octavo.scaling_state(model)
    before = {key: value.clone() for key, value in state.items()}
    _train(model, _batches(3, seed=9))
    assert all(torch.equal(state[key], before[key]) for key in state)


def test_a_shorter_window_keeps_the_newest_and_a_longer_one_is_filled_with_none():
    model = _model(history_length=4)
    _train(model, _batches(4, seed=5))
    state = octavo.scaling_state(model)
    newest = state["0.input.amax_history"]
    assert newest[0] == _batches(4, seed=5)[-1].abs().max()
    shorter, longer = _model(history_length=2), _model(history_length=6)
    for other in (shorter, longer):
        octavo.load_scaling_state(other, state)
        assert octavo.scaling_state(other)["0.input.amax"] == state["0.input.amax"]
    assert torch.equal(octavo.scaling_state(shorter)["0.input.amax_history"], newest[:2])
    padded = octavo.scaling_state(longer)["0.input.amax_history"]
    assert torch.equal(padded[:4], newest)
    assert padded[4:].tolist() == [EMPTY, EMPTY]


@pytest.mark.parametrize(("statistic", "amax"), [("max", 3.0), ("latest", 3.0), ("mean", 2 / (1 / 3 + 1 / 2))], ids=str)
def test_a_window_that_is_cut_gives_the_scale_of_what_is_kept(statistic, amax):
    donor = octavo.nn.Linear(2, 2, recipe=octavo.recipes.get("delayed", history_length=6, statistic=statistic))
    for value in (9.0, 2.0, 3.0):
        donor(torch.full((1, 2), value)).sum().backward()
        end_step()
    layer = octavo.nn.Linear(2, 2, recipe=octavo.recipes.get("delayed", history_length=2, statistic=statistic))
    octavo.load_scaling_state(layer, octavo.scaling_state(donor))
    state = octavo.scaling_state(layer)
    assert state["input.amax_history"].tolist() == [3.0, 2.0]
    assert state["input.amax"].item() == pytest.approx(amax)


def test_a_window_that_loses_nothing_keeps_the_scale_it_was_saved_with():
    """One that does not follow the window: of a step that backed off, or between two updates."""
    donor = octavo.nn.Linear(2, 2, recipe=octavo.recipes.get("delayed", history_length=6, update_interval=5))
    for value in (9.0, 2.0):
        donor(torch.full((1, 2), value)).sum().backward()
        end_step()
    state = octavo.scaling_state(donor)
    state["input.amax"].fill_(36.0)
    for length in (2, 6, 9):
        layer = octavo.nn.Linear(2, 2, recipe=octavo.recipes.get("delayed", history_length=length, update_interval=5))
        octavo.load_scaling_state(layer, state)
        assert octavo.scaling_state(layer)["input.amax"].item() == 36.0


def test_a_window_that_is_cut_to_zeros_keeps_the_scale():
    donor = octavo.nn.Linear(2, 2, recipe=octavo.recipes.get("delayed", history_length=3))
    donor(torch.full((1, 2), 9.0)).sum().backward()
    end_step()
    state = octavo.scaling_state(donor)
    state["input.amax_history"].copy_(torch.tensor([0.0, 0.0, 9.0]))  # as older versions recorded two steps of zeros
    layer = octavo.nn.Linear(2, 2, recipe=octavo.recipes.get("delayed", history_length=2))
    octavo.load_scaling_state(layer, state)
    assert octavo.scaling_state(layer)["input.amax"].item() == 9.0


@pytest.mark.parametrize("forget", ["load", "discard"])
def test_the_running_step_is_forgotten(forget):
    """Its amaxes, its overflows and its backward passes: then the model is its undisturbed twin."""
    model, twin = _model(manual=True, backoff=0.5), _model(manual=True, backoff=0.5)
    for each in (model, twin):
        _train(each, _batches(2, seed=1), manual=True)
    broken = torch.full((1, 8), 1e4)
    broken[0, 0] = float("inf")
    for _ in range(99):
        model(broken).sum().backward()
    if forget == "load":
        octavo.load_scaling_state(model, octavo.scaling_state(twin))
    else:
        discard_step(model)
    for each in (model, twin):
        each.zero_grad()
        assert _train(each, _batches(3, seed=2)[2:], manual=True)  # a hundredth backward pass would be told of
    one, other = octavo.scaling_state(model), octavo.scaling_state(twin)
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert one["0.input.steps"].item() == 3


def _octavo_layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(octavo.nn.Linear(8, 16), nn.ReLU(), octavo.nn.Linear(16, 4), octavo.nn.Linear(4, 4))


def _compat_layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(te.LayerNormMLP(8, 16), te.Linear(8, 4), te.Linear(4, 4))


def _train_under(recipe, model: nn.Sequential, batches: list[torch.Tensor]) -> list[float]:
    """All layers but the last, which never runs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for batch in batches:
        with te.autocast(recipe=recipe) if isinstance(recipe, DelayedScaling) else octavo.autocast(recipe):
            loss = model[:-1](batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("make", [_octavo_layers, _compat_layers])
@pytest.mark.parametrize("recipe", ["delayed", "delayed_te", DelayedScaling(amax_history_len=3)], ids=str)
def test_resuming_what_only_autocast_delays_goes_on_bit_for_bit(make, recipe):
    first, second = _batches(5, seed=1), _batches(4, seed=2)
    own = recipe.octavo_recipe() if isinstance(recipe, DelayedScaling) else recipe
    through, resumed, fresh = make(), make(), make()
    _train_under(recipe, through, first)
    weights = {key: value.clone() for key, value in through.state_dict().items() if value is not None}
    scaling = octavo.scaling_state(through)
    assert scaling
    assert not any(key.startswith(f"{len(through) - 1}.") for key in scaling), "what never ran has none"
    for model in (resumed, fresh):
        model.load_state_dict(weights)
    with pytest.raises(CheckpointError, match=r"if that was octavo.autocast's, name it: .*recipe=\.\.\.\)"):
        octavo.load_scaling_state(resumed, scaling)
    assert octavo.scaling_state(resumed) == {}
    octavo.load_scaling_state(resumed, scaling, recipe=own)
    loaded = octavo.scaling_state(resumed)
    assert loaded.keys() == scaling.keys()
    assert all(torch.equal(loaded[key], scaling[key]) for key in scaling)
    losses = _train_under(recipe, through, second)
    assert _train_under(recipe, resumed, second) == losses
    after, same = octavo.scaling_state(through), octavo.scaling_state(resumed)
    assert all(torch.equal(after[key], same[key]) for key in after)
    assert _train_under(recipe, fresh, second) != losses, "the scaling state matters here"


def test_a_recipe_to_load_with_is_a_delayed_one_and_what_is_refused_leaves_no_history():
    model = _octavo_layers()
    _train_under("delayed", model, _batches(2, seed=1))
    state = octavo.scaling_state(model)
    other = _octavo_layers()
    with pytest.raises(
        ConfigError, match="'rowwise' keeps no history, but the scaling state has one; name the delayed"
    ):
        octavo.load_scaling_state(other, state, recipe="rowwise")
    state["2.input.amax"].fill_(-1.0)
    with pytest.raises(CheckpointError, match="not negative"):
        octavo.load_scaling_state(other, state, recipe="delayed")
    assert octavo.scaling_state(other) == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: state.pop("2.weight.amax"),
            r"model: 1 entry \('2.weight.amax'\) is missing that this model has; convert",
        ),
        (
            lambda state: state.update({"9.input.amax": torch.tensor(1.0)}),
            r"model: 1 entry \('9.input.amax'\) has no layer in this model; convert",
        ),
        (
            lambda state: state.update({"0.input.amax": torch.ones(3)}),
            r"'0.input.amax' has shape \(3,\), expected \(\)",
        ),
        (lambda state: state.update({"0.input.amax_history": torch.tensor(1.0)}), r"amax_history' has shape \(\)"),
        (dict.clear, r"18 entries \('0.grad_output.amax', .*, \.\.\.\) are missing"),
        (
            lambda state: state.update({"0.input.amax_history": torch.ones(0)}),
            r"amax_history' has shape \(0,\), expected \(16,\)",
        ),
        (
            lambda state: state.update({"0.input.amax_history": torch.tensor([-1.0, 5.0, -1.0, 5.0])}),
            r"amax_history' holds an amax that is older than none; the newest comes first",
        ),
        (
            lambda state: state.update({"0.input.amax": torch.tensor(float("nan"))}),
            r"amax' holds nan; an amax",
        ),
        (lambda state: state["2.weight.amax_history"].fill_(-3.0), r"holds -3.0; an amax is finite and .*, or -1.0"),
        (lambda state: state.update({"0.input.steps": torch.tensor(-1)}), r"steps' holds -1; a number of steps"),
        (
            lambda state: state.update({"0.input.steps": torch.tensor(1.5)}),
            r"torch.float32, expected torch.int64",
        ),
        (
            lambda state: state.update({"0.input.amax": torch.tensor(1.0).half()}),
            r"expected torch.float32",
        ),
    ],
    ids=[
        "missing",
        "unexpected",
        "wrong shape",
        "no window",
        "empty",
        "an empty window",
        "a window with gaps",
        "nan amax",
        "negative amax",
        "negative steps",
        "fractional steps",
        "half amax",
    ],
)
def test_a_state_that_does_not_fit_is_refused_whole(change, message):
    model, donor = _model(), _model()
    _train(donor, _batches(3, seed=6))
    state = octavo.scaling_state(donor)
    change(state)
    before = octavo.scaling_state(model)
    with pytest.raises(CheckpointError, match=message):
        octavo.load_scaling_state(model, state)
    after = octavo.scaling_state(model)
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_casting_and_moving_the_model_keeps_the_history():
    model = _model()
    _train(model, _batches(3, seed=7))
    before = octavo.scaling_state(model)
    model.to(torch.bfloat16).half().to(torch.float32)
    after = octavo.scaling_state(model)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert {value.dtype for value in after.values()} == {torch.float32, torch.int64}


def test_update_scales_leaves_models_without_state_alone():
    for model in (nn.Linear(2, 2), octavo.nn.Linear(2, 2, recipe="tensorwise")):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        octavo.update_scales(model)
        assert not octavo.scaling_state(model)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_safetensors_take_the_state(tmp_path):
    from safetensors.torch import load_file, save_file

    model = _model()
    _train(model, _batches(2, seed=8))
    state = octavo.scaling_state(model)
    save_file(state, tmp_path / "scaling.safetensors")
    loaded = load_file(tmp_path / "scaling.safetensors")
    other = _model()
    octavo.load_scaling_state(other, loaded)
    again = octavo.scaling_state(other)
    assert all(torch.equal(again[key], state[key]) for key in state)


def test_a_loop_with_grad_scaler_is_one_without_if_the_history_follows_the_scale():
    """As in docs/concepts/delayed-scaling.md; a batch whose gradients overflow is one that the other loop never saw."""
    batches = _batches(9, seed=3)
    broken = batches[4].clone()
    broken[0, 0] = float("inf")
    plain, scaled = _model(manual=True, backoff=0.5), _model(manual=True, backoff=0.5)
    expected = _train(plain, batches, manual=True)
    optimizer = torch.optim.SGD(scaled.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    losses, scales = [], []
    for batch in [*batches[:4], broken, *batches[4:]]:
        optimizer.zero_grad()
        loss = scaled(batch).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        after = scaler.get_scale()
        if after < before:
            discard_step(scaled)
        else:
            octavo.update_scales(scaled)
            losses.append(loss.item())
        if after != before:
            rescale_gradient_history(scaled, after / before)
        scales.append(after / 2**10)
    assert scales == [1, 2, 2, 4, 2, 2, 4, 4, 8, 8]
    assert losses == expected


def test_a_state_loaded_in_inference_mode_can_be_trained_with():
    layer, resumed = (octavo.nn.Linear(4, 4) for _ in range(2))
    with octavo.autocast("delayed"):
        layer(torch.ones(1, 4)).sum().backward()
    with torch.inference_mode():
        octavo.load_scaling_state(resumed, octavo.scaling_state(layer), recipe="delayed")
    with octavo.autocast("delayed"):
        resumed(torch.ones(1, 4)).sum().backward()
    octavo.update_scales(resumed)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_a_model_converted_in_inference_mode_trains_as_any_other(recipe):
    states = []
    for mode in (False, True):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        torch.nn.init.ones_(next(model.parameters()))
        with torch.inference_mode(mode=mode):
            octavo.convert(model, recipe, convert_head=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model(torch.tensor([[1.0, 2.0, 3.0, float("nan")]])).sum().backward()
        optimizer.step()
        assert octavo.nonfinite_counts(model) == {"0.input": 1}
        states.append({key: value.tolist() for key, value in octavo.scaling_state(model).items()})
    assert states[0] == states[1]


def test_ranks_close_a_step_with_the_largest_of_their_amaxes(tmp_path):
    """One rank stands for two: the other's amaxes come in through the collective."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        alone, together = _model(manual=True), _model(manual=True)
        for model in (alone, together):
            model(torch.full((1, 8), 3.0)).sum().backward()
        octavo.update_scales(alone)
        octavo.update_scales(together, group=torch.distributed.group.WORLD)
        for key, tensor in octavo.scaling_state(alone).items():
            assert torch.equal(octavo.scaling_state(together)[key], tensor)
    finally:
        torch.distributed.destroy_process_group()


def test_the_largest_amax_and_any_overflow_win(monkeypatch):
    model: Any = _model(manual=True, backoff=0.5)
    other, group = torch.tensor([[9.0, EMPTY, 0.5, 1.0, 0.0, 0.0]] * 2), cast("Any", nn.Identity())
    calls = []

    def all_reduce(tensor, op, group):
        calls.append((op, group))
        rows = tensor[4:].narrow(0, 0, other.numel())  # behind the digest
        rows.copy_(torch.maximum(rows, other.flatten()))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    model(torch.full((1, 8), 3.0))
    weight = model[0].weight.detach().abs().amax()
    octavo.update_scales(model, group=group)
    state = octavo.scaling_state(model)
    assert calls == [(torch.distributed.ReduceOp.MAX, group)]
    assert [state[f"0.{role}.amax"].item() for role in ROLES] == [9.0, weight.item(), 0.5]
    assert not model[0].amax_history.overflowed.any()
    octavo.update_scales(nn.Sequential(nn.Linear(2, 2)), group=group)
    assert len(calls) == 1
