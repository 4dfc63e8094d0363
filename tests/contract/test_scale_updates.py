"""What ends a step of delayed scaling by itself: an optimizer's step, in every way that training loops take one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.recipes import Close, History
from octavo.scaling import EMPTY, amax_history

RECIPE = octavo.recipes.get("delayed", history_length=4)
AMAXES = ((1.0, 8.0, 2.0), (4.0, 3.0, 5.0), (0.5, 0.25, 0.125))  # of the micro-batches of three steps
WINDOW = [0.5, 5.0, 8.0, EMPTY]


def _model(*, recipe: Any = RECIPE) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    octavo.convert(model, recipe)
    return model


def _batch(amax: float) -> Tensor:
    return torch.full((2, 4), amax)


def _window(model: nn.Module, key: str = "0.input") -> list[float]:
    return octavo.scaling_state(model)[f"{key}.amax_history"].tolist()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def _steps(model: nn.Module, update: Callable[[], object], zero: Callable[[], object], *, late: bool = False) -> None:
    for amaxes in AMAXES:
        for index, amax in enumerate(amaxes):
            loss = model(_batch(amax)).square().mean()
            if late and not index:
                zero()
            loss.backward()
        update()
        if not late:
            zero()


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "adamw, one by one": lambda model: torch.optim.AdamW(model.parameters(), foreach=False),
    "adamw, foreach": lambda model: torch.optim.AdamW(model.parameters(), foreach=True),
    "adamw, fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
}


@pytest.mark.parametrize("late", [False, True], ids=["zeroed before forward", "zeroed after forward"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_micro_batches_of_an_optimizers_step_are_one(name, late):
    model = _model()
    optimizer = OPTIMIZERS[name](model)
    _steps(model, optimizer.step, optimizer.zero_grad, late=late)
    assert _window(model) == WINDOW
    assert octavo.scaling_state(model)["2.grad_output.steps"].item() == 3


def test_every_micro_batch_of_a_step_meets_the_same_scales():
    model, seen = _model(), []
    optimizer = _sgd(model)
    for amaxes in AMAXES:
        for amax in amaxes:
            model(_batch(amax)).sum().backward()
            seen.append(model[0].amax_history.amax[0].item())
        optimizer.step()
    assert seen == [0.0] * 3 + [8.0] * 6


def _by_hand(model: nn.Module, *, through_data: bool) -> Callable[[], None]:
    @torch.no_grad()
    def update() -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            (parameter.data if through_data else parameter).add_(parameter.grad, alpha=-0.01)

    return update


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("through_data", [False, True])
def test_updates_written_by_hand_end_a_step(through_data, set_to_none):
    model = _model()
    _steps(model, _by_hand(model, through_data=through_data), lambda: model.zero_grad(set_to_none=set_to_none))
    assert _window(model) == WINDOW, "the last step counts as closed in what is read"
    model(_batch(1.0))
    assert model[0].amax_history.window[0].tolist() == WINDOW, "and the next training forward closes it"


def test_layers_before_the_written_one_are_in_the_new_step_too():
    model = _model()
    model[0].weight.requires_grad_(False)
    _steps(model, lambda: model[2].weight.data.mul_(0.99), model.zero_grad)
    model(_batch(100.0))
    assert model[0].amax_history.window[0].tolist() == WINDOW, "not yet the amax of the forward that found the end"


def test_an_update_by_hand_ends_a_step_after_a_forward_that_had_no_backward_pass():
    model = nn.ModuleDict({"student": nn.Linear(4, 4), "teacher": nn.Linear(4, 4)})
    octavo.convert(model, RECIPE)
    update = _by_hand(model["student"], through_data=False)
    for amax in (4.0, 2.0, 1.0):
        model["student"](_batch(amax)).sum().backward()
        with torch.no_grad():
            model["teacher"](_batch(1.0))
        update()
    assert _window(model, "student.input") == [1.0, 2.0, 4.0, EMPTY]


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_the_closures_of_an_optimizers_first_step_are_one(line_search):
    model, calls = _model(), []
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn=line_search)

    def closure() -> Tensor:
        optimizer.zero_grad()
        calls.append(loss := (model(_batch(2.0)) - 1).square().mean())
        loss.backward()
        return loss

    optimizer.step(closure)
    assert len(calls) > 1
    assert octavo.scaling_state(model)["0.input.steps"].item() == 1


def test_of_many_optimizers_of_one_model_the_first_computes_its_scales(monkeypatch):
    model, statistic = _model(), amax_history._statistic
    computed: list[list[int]] = []

    def counted(window: Tensor, *others: Any) -> Tensor:
        computed.append(list(window.shape))
        return statistic(window, *others)

    monkeypatch.setattr(amax_history, "_statistic", counted)
    optimizers = [torch.optim.SGD([parameter], lr=0.01) for parameter in model.parameters()]
    for amax in (2.0, 3.0):
        model(_batch(amax)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert _window(model) == [3.0, 2.0, EMPTY, EMPTY]
    assert computed == [[2, 3, 4]] * 2, "of both layers together, once a step of four optimizers'"


def _grown_inputs(model: nn.Module, update: Callable[[], None], *, steps: int = 4) -> list[float]:
    """The input's amax after each of some steps whose inputs grow tenfold."""
    amaxes = []
    for step in range(steps):
        model.zero_grad()
        model(_batch(10.0**step)).sum().backward()
        update()
        amaxes.append(octavo.scaling_state(model)["0.input.amax"].item())
    return amaxes


def _warmed_up(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has taken a step."""
    optimizer = _sgd(model)
    model(_batch(0.5)).sum().backward()
    optimizer.step()
    return optimizer


def _left_behind(optimizer: torch.optim.Optimizer, how: str) -> list[object]:
    """An optimizer that takes no step any more; what must not be collected as garbage yet."""
    if how == "without parameters":
        optimizer.param_groups.clear()
    return [] if how == "collected" else [optimizer]


LEFT_BEHIND = ("collected", "not collected", "without parameters")


@pytest.mark.parametrize("how", LEFT_BEHIND)
def test_hand_written_updates_end_steps_after_100_backward_passes_without_the_optimizer(how):
    """Whether it is garbage, and whether that has been collected, differs between ranks that reduce together."""
    model = _model()
    kept, update = _left_behind(_warmed_up(model), how), _by_hand(model, through_data=False)
    for _ in range(98):
        model.zero_grad()
        model(_batch(2.0)).sum().backward()
        update()
    with pytest.warns(UserWarning, match=r"layer '[02]' has run 100 backward passes without a step") as told:
        # The second backward pass is the 100th, and the forward pass after it the first that looks for updates.
        assert _grown_inputs(model, update) == [0.5, 0.5, 100.0, 1000.0]
    assert len(told) == 1
    assert len(kept) == (how != "collected")


def _master_updates(model: nn.Module) -> Callable[[], None]:
    """Steps of an optimizer over copies of the parameters."""
    masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.01)

    @torch.no_grad()
    def update() -> None:
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.clone()
        optimizer.step()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.copy_(master)

    return update


@pytest.mark.parametrize("how", LEFT_BEHIND)
def test_an_optimizer_over_copies_ends_steps_after_100_backward_passes_without_the_models_own(how):
    model = _model()
    kept, update = _left_behind(_warmed_up(model), how), _master_updates(model)
    for _ in range(98):
        model(_batch(2.0)).sum().backward()
        update()
    with pytest.warns(UserWarning, match=r"layer '[02]' has run 100 backward passes without a step") as told:
        assert _grown_inputs(model, update) == [0.5, 10.0, 100.0, 1000.0]
    assert len(told) == 1
    assert len(kept) == (how != "collected")


def test_an_optimizer_over_new_parameters_ends_steps_at_once():
    """As FSDP1's flat ones: what an earlier optimizer held is no parameter of the model any more."""
    model = _model()
    _warmed_up(model)
    model.load_state_dict({name: value.detach().clone() for name, value in model.state_dict().items()}, assign=True)
    assert _grown_inputs(model, _master_updates(model)) == [1.0, 10.0, 100.0, 1000.0]


@pytest.mark.long
def test_calls_of_one_backward_pass_count_once():
    """150 calls and one step, three times: no warning, which would be an error here."""
    model = _model()
    optimizer = _sgd(model)
    for _ in range(3):
        sum(model(_batch(1.0)).sum() for _ in range(150)).backward()
        optimizer.step()


def test_training_one_model_through_another_keeps_their_steps_separate():
    generator, discriminator = _model(), _model()
    own, theirs = _sgd(generator), _sgd(discriminator)
    for _ in range(3):
        discriminator(generator(_batch(1.0)).detach()).sum().backward()
        theirs.step()
        theirs.zero_grad()
        discriminator(generator(_batch(2.0))).sum().backward()
        own.step()
        own.zero_grad()
        theirs.zero_grad()
    for model in (generator, discriminator):
        state = octavo.scaling_state(model)
        assert {int(value) for key, value in state.items() if key.endswith("steps")} == {3}
    assert _window(generator) == [2.0, 2.0, 2.0, EMPTY]


def test_frozen_layers_follow_the_optimizer_of_the_others():
    model = _model()
    model[0].requires_grad_(False)
    optimizer = _sgd(model[2])
    _steps(model, optimizer.step, optimizer.zero_grad)
    assert _window(model) == WINDOW
    assert set(_window(model, "0.weight")) == {EMPTY}


def test_a_frozen_model_follows_the_optimizer_of_its_adapters():
    model = _model().requires_grad_(False)
    adapter = nn.Linear(4, 4)
    optimizer = _sgd(adapter)
    _steps(nn.Sequential(model, adapter), optimizer.step, optimizer.zero_grad)
    assert _window(model) == WINDOW


def test_an_unused_layer_records_nothing():
    model = _model()
    optimizer = _sgd(model)
    _steps(model[0], optimizer.step, optimizer.zero_grad)
    assert _window(model) == WINDOW
    assert octavo.scaling_state(model)["2.input.steps"].item() == 0


def test_another_models_optimizer_ends_nothing():
    model, other = _model(), _model()
    mine, theirs = _sgd(model), _sgd(other)
    model(_batch(1.0)).sum().backward()
    mine.step()
    model(_batch(2.0)).sum().backward()
    other(_batch(3.0)).sum().backward()
    theirs.step()
    model(_batch(1.0)).sum().backward()
    mine.step()
    assert _window(model) == [2.0, 1.0, EMPTY, EMPTY]
    assert _window(other) == [3.0, EMPTY, EMPTY, EMPTY]


@pytest.mark.parametrize("fused", [False, True])
def test_step_skipped_by_a_gradient_scaler_continues(fused):
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for amax, broken in ((1.0, False), (8.0, True), (2.0, False)):
        loss = model(_batch(amax)).square().mean()
        scaler.scale(loss * (float("inf") if broken else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert _window(model) == [8.0, 1.0, EMPTY, EMPTY]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_ends_no_step(use_reentrant):
    model = _model()
    optimizer = _sgd(model)
    for amaxes in AMAXES:
        for amax in amaxes:
            x = _batch(amax).requires_grad_()
            checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
        optimizer.step()
    assert _window(model) == WINDOW
    assert octavo.scaling_state(model)["0.input.steps"].item() == 3


def test_evaluation_between_micro_batches_ends_no_step():
    model = _model()
    optimizer = _sgd(model)

    def evaluated(x: Tensor) -> Tensor:
        model.eval()
        with torch.no_grad():
            model(_batch(100.0))
        model.train()
        y: Tensor = model(x)
        return y

    for amaxes in AMAXES:
        for amax in amaxes:
            evaluated(_batch(amax)).sum().backward()
        optimizer.step()
    assert _window(model) == WINDOW


def test_optimizers_that_step_within_the_backward_pass_end_it_once():
    model = _model()
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.01)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    for amax, *_ in AMAXES:
        model(_batch(amax)).sum().backward()
    state = octavo.scaling_state(model)
    assert state["0.input.amax_history"].tolist() == [0.5, 4.0, 1.0, EMPTY]
    assert {int(value) for key, value in state.items() if key.endswith("steps")} == {3}


def test_an_optimizer_within_the_backward_pass_waits_for_every_gradient_of_a_layer():
    """The first layer runs twice, and the other's optimizer steps between its two gradients."""
    model = _model()
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.0)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    seen: list[float] = []
    for amax, *_ in AMAXES:
        grads: list[float] = []
        first = model[0](_batch(amax))
        second = model[0](model[2](first))
        for y in (first, second):
            y.register_hook(lambda grad, grads=grads: grads.append(grad.abs().max().item()))
        second.square().sum().backward()
        assert len(grads) == 2
        seen = [max(grads), *seen]
    state = octavo.scaling_state(model)
    assert state["0.grad_output.steps"].item() == 3
    assert state["0.grad_output.amax_history"].tolist() == [*seen, EMPTY]


def test_a_compiled_optimizer_ends_a_step():
    model = _model()
    optimizer = _sgd(model)
    _steps(model, torch.compile(optimizer.step, backend="eager"), optimizer.zero_grad)
    assert _window(model) == WINDOW


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_layers_keep_the_eager_histories(dynamic):
    """A graph records; what ends the step stands outside of it. Rows vary, so that shapes are symbols if dynamic."""
    eager, traced = _model(), _model()
    compiled = torch.compile(traced, fullgraph=True, dynamic=dynamic or None, backend="aot_eager")
    for model, run in ((eager, eager), (traced, compiled)):
        optimizer = _sgd(model)
        for rows, amaxes in enumerate(AMAXES, start=2):
            for amax in amaxes:
                run(torch.full((rows, 4), amax)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert _window(traced) == WINDOW
    state, same = octavo.scaling_state(eager), octavo.scaling_state(traced)
    assert all(torch.equal(state[key], same[key]) for key in state)


@pytest.mark.long
def test_compiled_layers_without_detected_steps_give_a_warning():
    """A graph compares no weights, so that hand-written updates close nothing there."""
    torch.compiler.reset()
    model = _model()
    compiled, update = torch.compile(model, fullgraph=True, backend="aot_eager"), _by_hand(model, through_data=False)
    for _ in range(99):
        compiled(_batch(1.0)).sum().backward()
        update()
    loss = compiled(_batch(1.0)).sum()
    with pytest.warns(UserWarning, match=r"layer '0' has run 100 backward passes without a step"):
        loss.backward()
    compiled(_batch(1.0)).sum().backward()  # a second warning would be an error


def test_a_copy_waits_for_an_optimizer_of_its_own():
    model = _model()
    optimizer = _sgd(model)
    _steps(model, optimizer.step, optimizer.zero_grad)
    twin = copy.deepcopy(model)
    twin(_batch(9.0)).sum().backward()
    model(_batch(1.0)).sum().backward()
    _sgd(twin).step()
    assert _window(twin) == [9.0, *WINDOW[:3]]
    assert _window(model) == WINDOW


@pytest.mark.parametrize("use_buffers", [False, True])
def test_a_running_average_of_a_model_keeps_histories_of_its_own(use_buffers):
    model = _model()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=use_buffers
    )
    optimizer = _sgd(model)

    def update() -> None:
        optimizer.step()
        average.update_parameters(model)

    _steps(model, update, optimizer.zero_grad)
    assert _window(model) == WINDOW
    assert set(_window(average.module)) == {EMPTY}
    average.eval()(_batch(1.0))


def test_buffers_that_wrappers_broadcast_cast_or_average_are_no_part_of_the_history():
    assert not list(_model().buffers())


def test_the_name_in_older_files_is_known():
    assert History(close=Close("backward")) == History()
