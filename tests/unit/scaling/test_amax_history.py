"""The amax history against a model of its semantics in plain Python: lists and floats, no tensors."""

import copy
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import octavo
from octavo.recipes import History, Statistic
from octavo.scaling import EMPTY, GRAD_OUTPUT, INPUT, ROLES, WEIGHT, AmaxHistory
from octavo.scaling.amax_history import ScaleUpdates, close_histories
from tests.recorded_state import end_step

amaxes = st.one_of(st.just(0.0), st.floats(2.0**-126, 2.0**100, width=32))
events = st.lists(st.one_of(st.just("close"), st.tuples(st.sampled_from(range(3)), amaxes, st.booleans())), max_size=40)
backoffs = st.sampled_from([1.0, 0.99, 0.5])
specifications = st.builds(
    History,
    length=st.integers(1, 5),
    statistic=st.sampled_from(Statistic),
    update_interval=st.integers(1, 4),
    backoff=backoffs,
)
LARGEST = torch.finfo(torch.float32).max


@dataclass
class PlainRole:
    """One role's history as the documentation describes it."""

    spec: History
    window: list[float] = field(default_factory=list)  # newest first
    amax: float | None = None  # what scales are made from
    pending: float | None = None
    overflowed: bool = False  # the running step
    steps: int = 0

    def record(self, amax: float, *, overflowed: bool = False) -> None:
        self.pending = amax if self.pending is None else max(self.pending, amax)
        self.overflowed = self.overflowed or overflowed

    def close(self) -> None:
        if self.pending is None:
            return
        entering, self.pending = self.pending, None
        overflowed, self.overflowed = self.overflowed, False
        if entering > 0:
            self.window = [entering, *self.window][: self.spec.length]
            self.steps += 1
        if overflowed and self.spec.backoff < 1 and self.amax is not None:
            self.amax = min(float(np.float32(self.amax / self.spec.backoff)), LARGEST)
            return
        if entering == 0 or (self.steps % self.spec.update_interval and self.amax is not None):
            return
        candidate = self._statistic()
        if candidate > 0:
            self.amax = candidate

    def _statistic(self) -> float:
        match Statistic(str(self.spec.statistic)):
            case Statistic.MAX:
                return max(self.window)
            case Statistic.LATEST:
                return self.window[0]
            case Statistic.MEAN:  # the amax whose encode scale is the mean of the encode scales
                positive = [amax for amax in self.window if amax > 0]
                return len(positive) / sum(1 / amax for amax in positive) if positive else 0.0


def _assert_equal(history: AmaxHistory, roles: list[PlainRole]) -> None:
    for index, role in enumerate(roles):
        padded = role.window + [EMPTY] * (role.spec.length - len(role.window))
        assert history.window[index].tolist() == padded
        assert history.pending[index].item() == (EMPTY if role.pending is None else role.pending)
        assert history.steps[index].item() == role.steps
        expected = role.amax or 0.0
        assert history.overflowed[index].item() == role.overflowed
        exact = role.spec.statistic is not Statistic.MEAN  # a mean is rounded once to float32
        assert history.amax[index].item() == (expected if exact else pytest.approx(expected, rel=2**-23, abs=0))


def _record(history: AmaxHistory, role: int, amax: float, overflowed: bool) -> None:
    history.record(role, torch.tensor(amax))
    history.overflowed[role] |= overflowed


@given(specifications, events)
def test_history_follows_the_plain_model(spec, sequence):
    history, roles = AmaxHistory(spec), [PlainRole(spec) for _ in ROLES]
    for event in sequence:
        if event == "close":
            history.close()
            for role in roles:
                role.close()
        else:
            index, amax, overflowed = event
            _record(history, *event)
            roles[index].record(amax, overflowed=overflowed)
        _assert_equal(history, roles)


@given(specifications, events)
def test_a_step_that_is_not_to_be_closed_stays_open(spec, sequence):
    history = AmaxHistory(spec)
    for event in sequence:
        if event != "close":
            _record(history, *event)
    before = {name: buffer.clone() for name, buffer in history.named_buffers()}
    history.close(condition=torch.tensor(False))
    assert all(torch.equal(buffer, before[name]) for name, buffer in history.named_buffers())


@pytest.mark.long
@given(specifications, st.lists(events, min_size=2, max_size=5), st.sampled_from([None, True, False]), st.booleans())
def test_histories_that_are_closed_together_are_closed_each(spec, sequences, condition, others):
    """To the last bit, those of another length among them."""
    specs = [replace(spec, length=spec.length + (others and index == 1)) for index in range(len(sequences))]
    together, alone = [AmaxHistory(each) for each in specs], [AmaxHistory(each) for each in specs]
    decided = None if condition is None else torch.tensor(condition)
    for step in range(max(map(len, sequences))):
        for histories in (together, alone):
            for history, sequence in zip(histories, sequences, strict=True):
                for event in sequence[step : step + 1]:
                    if event != "close":
                        _record(history, *event)
        close_histories(together, condition=decided)
        for each in alone:
            each.close(condition=decided)
        for one, other in zip(together, alone, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one.buffers(), other.buffers(), strict=True))


def _closed(spec: History, *values: float, role: int = INPUT) -> AmaxHistory:
    history = AmaxHistory(spec)
    for value in values:
        history.record(role, torch.tensor(value))
        history.close()
    return history


@pytest.mark.parametrize(
    ("statistic", "amax"), [("max", 8.0), ("latest", 2.0), ("mean", 3 / (1 / 8 + 1 / 4 + 1 / 2))], ids=str
)
def test_statistics_of_the_last_three_steps(statistic, amax):
    history = _closed(History(length=3, statistic=Statistic(statistic)), 100.0, 8.0, 4.0, 2.0)
    assert history.amax[INPUT].item() == pytest.approx(amax)


def test_mean_is_that_of_the_encode_scales_and_so_overflows_while_amax_grows():
    history = _closed(History(length=32, statistic=Statistic.MEAN), *(2.0**step for step in range(8)))
    assert history.amax[INPUT].item() < 2.0**7 / 8, "the mean of scales is dominated by the smallest amaxes"


@pytest.mark.parametrize("statistic", list(Statistic))
def test_zero_amax_keeps_window_and_scale(statistic):
    history = _closed(History(length=2, statistic=statistic), 3.0, 0.0, 0.0, 0.0)
    assert history.window[INPUT].tolist() == [3.0, EMPTY], "it pushes nothing out"
    assert history.amax[INPUT].item() == 3.0
    assert history.steps[INPUT].item() == 1


def test_roles_that_did_not_run_are_masked_not_zero():
    history = _closed(History(length=2), 5.0, role=WEIGHT)
    for _ in range(3):
        history.record(INPUT, torch.tensor(1.0))
        history.close()
    assert history.window[WEIGHT].tolist() == [5.0, EMPTY]
    assert history.amax[WEIGHT].item() == 5.0
    assert history.steps.tolist() == [3, 1, 0]
    assert history.window[GRAD_OUTPUT].tolist() == [EMPTY, EMPTY]


def test_update_interval_holds_the_scale_between_updates():
    history = AmaxHistory(History(length=8, update_interval=3))
    seen = []
    for value in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0):
        history.record(INPUT, torch.tensor(value))
        history.close()
        seen.append(history.amax[INPUT].item())
    assert seen == [1.0, 1.0, 3.0, 3.0, 3.0, 6.0, 6.0], "the first step is used at once"


def test_a_discarded_step_has_not_begun():
    history, fresh = AmaxHistory(History()), AmaxHistory(History()).fresh_state(None)
    for role in range(3):
        _record(history, role, 3.0, overflowed=True)
    history.region.fill_(7)
    history.discard()
    assert all(torch.equal(buffer, fresh[name]) for name, buffer in history.named_buffers())


def test_backing_off_for_ever_stops_at_the_largest_float32():
    """Halved 300 times an encode scale would be that of an infinite amax, which no state may hold."""
    layer = octavo.nn.Linear(2, 2, bias=False, recipe=octavo.recipes.get("delayed", backoff=0.5))
    broken = torch.tensor([[float("inf"), 1.0]])
    layer(torch.ones(1, 2)).sum().backward()
    end_step()
    for _ in range(300):
        layer(broken).backward(broken)
        end_step()
    state = octavo.scaling_state(layer)
    assert state["input.amax"].item() == state["grad_output.amax"].item() == LARGEST
    octavo.load_scaling_state(layer, state)
    layer(torch.ones(1, 2, requires_grad=True)).sum().backward()
    end_step()
    assert octavo.scaling_state(layer)["input.amax"].item() == 1.0, "a clean step follows the window again"


@given(specifications, events, st.integers(-3, 3))
def test_rescaling_one_role_is_having_seen_it_scaled(spec, sequence, exponent):
    """By powers of two, to the bit (a mean is rounded, and so is what leaves FP32's range: both left out)."""
    factor = 2.0**exponent
    rescaled, scaled = AmaxHistory(spec), AmaxHistory(spec)
    for event in sequence:
        for history, by in ((rescaled, 1.0), (scaled, factor)):
            if event == "close":
                history.close()
            else:
                role, amax, overflowed = event
                amax = max(amax, 2.0**-90) if amax else amax
                _record(history, role, amax * (by if role == GRAD_OUTPUT else 1.0), overflowed)
    rescaled.rescale(GRAD_OUTPUT, factor)
    for (name, one), other in zip(rescaled.named_buffers(), scaled.buffers(), strict=True):
        if spec.statistic is Statistic.MEAN and name == "amax":
            torch.testing.assert_close(one, other)
        else:
            assert torch.equal(one, other), name


def test_history_stays_float32_and_out_of_the_state_dict():
    history = _closed(History(length=2), 3.0)
    history.to(torch.bfloat16).half().double()
    assert {buffer.dtype for buffer in (history.window, history.amax, history.pending)} == {torch.float32}
    assert history.steps.dtype is torch.int64
    assert history.amax[INPUT].item() == 3.0
    assert not history.state_dict()
    history.to("meta")
    assert {buffer.device.type for buffer in history.buffers()} == {"meta"}


def _backwards(model: torch.nn.Module, count: int) -> None:
    for _ in range(count):
        model(torch.ones(1, 2)).sum().backward()


def _two_layers(scale_updates: str) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    octavo.convert(model, "delayed", scale_updates=scale_updates)
    return model


@pytest.mark.long
def test_missing_manual_updates_give_one_warning_per_model_naming_a_layer():
    model = _two_layers("manual")
    _backwards(model, 99)
    for _ in range(5):  # a forward alone closes nothing and is not counted
        model(torch.ones(1, 2))
    with pytest.warns(
        UserWarning, match=r"layer '[01]' has run 100 backward passes without octavo.update_scales"
    ) as told:
        _backwards(model, 1)
    assert len(told) == 1
    _backwards(model, 150)  # a second warning would be an error here
    assert copy.deepcopy(model).get_submodule("0").scale_updates.reminded  # type: ignore[union-attr]


def test_missing_manual_updates_of_a_single_layer_give_a_warning():
    layer = octavo.nn.Linear(2, 2, recipe="delayed", manual_scale_updates=True)
    with pytest.warns(UserWarning, match="a layer has run 100 backward passes"):
        _backwards(layer, 100)


def test_manual_updates_that_come_never_warn():
    model = _two_layers("manual")
    for _ in range(4):
        _backwards(model, 60)
        octavo.update_scales(model)


def test_automatic_updates_never_warn():
    _backwards(_two_layers("automatic"), 150)


def test_leaving_the_meta_device_resets_the_history():
    """``to_empty`` leaves whatever the memory held: what a history must not begin with."""
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        octavo.convert(model, "delayed")
    with torch.no_grad():
        model.to_empty(device="cpu")
    history, fresh = model[0].amax_history, AmaxHistory(History())
    assert isinstance(history, AmaxHistory)
    for name, buffer in fresh.named_buffers():
        assert torch.equal(history.get_buffer(name), buffer)
    assert octavo.nonfinite_counts(model) == {}


def test_a_function_of_the_window_gives_the_next_amaxes():
    seen = []

    def half_of_the_newest(window, amaxes):
        seen.append((window.tolist(), amaxes.tolist()))
        return torch.where(window[:, 0] == 3, 0.0, window[:, 0] / 2)

    history = AmaxHistory(History(length=2, statistic=half_of_the_newest))
    for amax in (8.0, 3.0):
        history.record(INPUT, torch.tensor(amax))
        history.close()
    empty = [EMPTY, EMPTY]
    assert seen == [([[8.0, EMPTY], empty, empty], [0.0] * 3), ([[3.0, 8.0], empty, empty], [4.0, 0.0, 0.0])]
    assert history.amax.tolist() == [4.0, 0.0, 0.0], "one that is not above 0 leaves the amax in force"


@pytest.mark.parametrize("collected", [True, False])
def test_what_optimizers_have_held_at_steps_stays_held(collected):
    """Ranks reduce amaxes by it, and one may have freed an optimizer that another rank still has."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    octavo.convert(model, "rowwise")
    updates = model[0].scale_updates
    assert isinstance(updates, ScaleUpdates)

    def held() -> list[bool]:
        return [all(map(updates.is_held, layer.parameters())) for layer in model]

    optimizers: list[torch.optim.Optimizer] = []
    for index, after in enumerate(([True, False, False], [True, True, False])):
        optimizers.append(torch.optim.SGD(model[index].parameters(), lr=0.1))
        assert updates.has_optimizer == updates.was_held == bool(index)
        model(torch.ones(2, 16)).sum().backward()
        optimizers[-1].step()
        if collected:
            optimizers.clear()
        assert held() == after
        assert updates.has_optimizer
        assert updates.was_held
