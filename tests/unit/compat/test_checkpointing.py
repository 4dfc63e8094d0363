"""Training that resumes from a checkpoint goes on bit for bit, with delayed scaling too."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import octavo
from octavo.compat import ScalingState
from octavo.errors import CheckpointError

BATCHES = [torch.randn(5, 8, generator=torch.Generator().manual_seed(seed)) * 1.5**seed for seed in range(8)]
FIRST, SECOND = BATCHES[:5], BATCHES[5:]


def _model(*, seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    octavo.convert(model, "delayed")
    return model


def _train(model: nn.Module, optimizer: Any, batches: list[torch.Tensor]) -> list[float]:
    losses = []
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def test_torch_save_of_the_scaling_state_resumes_bit_for_bit(tmp_path):
    model = _model()
    optimizer = _adam(model)
    _train(model, optimizer, FIRST)
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaling": octavo.scaling_state(model)}
    torch.save(parts, tmp_path / "checkpoint.pt")
    losses = _train(model, optimizer, SECOND)
    loaded = torch.load(tmp_path / "checkpoint.pt")
    resumed = _model(seed=9)
    optimizer = _adam(resumed)
    resumed.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    without = _model(seed=9)
    without.load_state_dict(loaded["model"])
    octavo.load_scaling_state(resumed, loaded["scaling"])
    assert _train(resumed, optimizer, SECOND) == losses
    assert _train(without, _adam(without), SECOND)[0] != losses[0], "the scaling state matters here"


def test_accelerate_saves_and_loads_it_as_a_registered_object(tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

    def prepared(seed: int) -> tuple[Any, Any, Any]:
        accelerator, model = accelerate.Accelerator(cpu=True), _model(seed=seed)
        accelerator.register_for_checkpointing(ScalingState(model))
        return accelerator, *accelerator.prepare(model, _adam(model))

    accelerator, model, optimizer = prepared(3)
    _train(model, optimizer, FIRST)
    accelerator.save_state(str(tmp_path))
    losses = _train(model, optimizer, SECOND)
    accelerator, model, optimizer = prepared(9)
    accelerator.load_state(str(tmp_path))
    assert _train(model, optimizer, SECOND) == losses


def _parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "scaling": ScalingState(model)}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
def test_torchs_distributed_checkpoint_saves_and_loads_it(tmp_path):
    """Two ranks do so in ``tests/contract/test_ranks.py``."""
    from torch.distributed.checkpoint.state_dict import set_state_dict

    model = _model()
    optimizer = _adam(model)
    _train(model, optimizer, FIRST)
    save(_parts(model, optimizer), checkpoint_id=tmp_path)
    losses = _train(model, optimizer, SECOND)
    resumed = _model(seed=9)
    optimizer = _adam(resumed)
    parts = _parts(resumed, optimizer)
    load(parts, checkpoint_id=tmp_path)
    set_state_dict(resumed, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
    assert _train(resumed, optimizer, SECOND) == losses


def test_tensors_left_out_by_a_library_are_detected():
    """``torch.distributed.checkpoint`` loads the keys that the model has before it is loaded."""
    model = nn.Sequential(octavo.nn.Linear(8, 4))
    with octavo.autocast("delayed"):
        model(BATCHES[0]).sum().backward()
    saved = ScalingState(model).state_dict()
    fresh = ScalingState(nn.Sequential(octavo.nn.Linear(8, 4)), recipe="delayed")
    with pytest.raises(CheckpointError, match=r"9 tensors of scaling state and 0 of them .* one training step"):
        fresh.load_state_dict({key: saved[key] for key in fresh.state_dict()})
    fresh.load_state_dict(saved)
    assert octavo.scaling_state(fresh.model)["0.input.amax"] == saved["0.input.amax"]


def test_checkpoint_without_scaling_state_warns_once():
    """The optimizer's state is read to be resumed from; by the next step the scaling state should have been too."""
    model = _model()
    optimizer = _adam(model)
    _train(model, optimizer, FIRST[:2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.state_dict()  # as for an average, or to look at
        _train(model, optimizer, FIRST[:1])
        optimizer.state_dict()
        octavo.scaling_state(model)
        _train(model, optimizer, FIRST[:1])
        octavo.scaling_state(model)
        optimizer.state_dict()
        _train(model, optimizer, FIRST[:1])
    optimizer.state_dict()
    with pytest.warns(UserWarning, match=r"saved without the scaling state.*octavo.compat") as told:
        _train(model, optimizer, FIRST[:2])
    assert len(told) == 1
    optimizer.state_dict()
    _train(model, optimizer, FIRST)  # a second warning would be an error here


@pytest.mark.parametrize("recipe", ["tensorwise", "bf16"])
def test_model_without_histories_does_not_warn(recipe):
    model = _model()
    octavo.convert(model, recipe)
    optimizer = _adam(model)
    for batch in FIRST:
        optimizer.state_dict()
        _train(model, optimizer, [batch])


@pytest.mark.parametrize("count", ["x", None, 2, torch.tensor([1, 2]), torch.tensor(2.5), torch.tensor(True)])
def test_invalid_number_of_tensors_is_refused(count):
    model = _model()
    before = octavo.scaling_state(model)
    with pytest.raises(CheckpointError, match="'tensors' must be a tensor of one whole number, not"):
        ScalingState(model).load_state_dict({**before, "tensors": count})


def resumed(recipe, *, loads, steps=2):
    """A model whose optimizer has steps behind it, before its first step in this process."""
    model, optimizer = small_loop(recipe)
    for _ in range(steps):
        step_of(model, optimizer)
    again, other = small_loop(recipe)
    again.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    if loads:
        octavo.load_scaling_state(again, octavo.scaling_state(model))
    return again, other


def small_loop(recipe):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    octavo.convert(model, recipe)
    return model, torch.optim.AdamW(model.parameters())


def step_of(model, optimizer):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_state_that_was_not_loaded_is_warned_of_at_the_first_step_and_its_line():
    model, optimizer = resumed("delayed", loads=False)
    with pytest.warns(UserWarning, match=r"has taken 2 steps before this one.*octavo\.load_scaling_state") as told:
        step_of(model, optimizer)
    assert [one.filename for one in told] == [__file__]  # not torch's, whose hook warns
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_of(model, optimizer)


@pytest.mark.parametrize(
    ("recipe", "loads", "steps"),
    [("delayed", True, 2), ("tensorwise", False, 2), ("delayed", False, 0)],
)
def test_a_state_that_was_loaded_or_does_not_exist_is_not_missed(recipe, loads, steps):
    model, optimizer = resumed(recipe, loads=loads, steps=steps)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_of(model, optimizer)


def test_a_plain_phase_before_delayed_scaling_in_one_process_is_not_resumed():
    model, optimizer = small_loop("bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_of(model, optimizer)
        octavo.convert(model, "delayed")
        step_of(model, optimizer)
