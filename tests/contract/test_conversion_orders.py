"""``octavo.convert`` before and after other libraries' wrappers: the same losses, or a warning that nothing changed."""

from functools import partial
from typing import Any

import pytest
import torch

import octavo

BATCHES = torch.randn(4, 16, 64, generator=torch.Generator().manual_seed(1))
RECIPES = ("tensorwise", "delayed")


def _model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 64))


def _train(model, optimizer=None, backward=torch.Tensor.backward):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for batch in BATCHES:
        loss = (model(batch) - batch).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(autouse=True)
def fresh_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _compiled_apart(model):
    return torch.compile(model, backend="aot_eager")


def _compiled_in_place(model):
    model.compile(backend="aot_eager")
    return model


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("wrap", [_compiled_apart, _compiled_in_place])
@pytest.mark.parametrize("recipe", RECIPES)
def test_conversion_after_compilation_trains_as_before_it(recipe, wrap):
    """Whether the compiled model was called before or is new."""
    model = _model()
    octavo.convert(model, recipe)
    first = _train(wrap(model))
    for called in (False, True):
        torch._dynamo.reset()
        model = wrap(_model())
        if called:
            model(BATCHES[0])
        octavo.convert(model, recipe)
        assert _train(model) == first, f"called before: {called}"
    assert first != _train(_model())


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_conversion_after_accelerate_s_prepare_trains_as_before_it(recipe, precision):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    losses = []
    for prepared_first in (False, True):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        steps = [partial(octavo.convert, model, recipe), partial(accelerator.prepare, model, optimizer)]
        results = [step() for step in (reversed(steps) if prepared_first else steps)]
        model, optimizer = results[0 if prepared_first else 1]
        losses.append(_train(model, optimizer, accelerator.backward))
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    assert losses[0] == losses[1]


def test_conversion_after_accelerate_s_offloading_warns_that_nothing_changed():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = _model()
    accelerate.cpu_offload(model, execution_device="cpu")
    with pytest.warns(UserWarning, match="convert changed nothing.*accelerate's hooks"):
        assert not octavo.convert(model).converted


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("recipe", RECIPES)
def test_conversion_in_any_of_lightning_s_hooks_trains_alike(recipe):
    lightning = pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")

    def convert_in_hook(module, *_, **__):
        octavo.convert(module, recipe)

    def fit(hook):
        class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
            def __init__(self):
                super().__init__()
                self.network, self.losses = _model(), []
                if hook is None:
                    octavo.convert(self.network, recipe)

            def training_step(self, batch, _):
                loss = (self.network(batch) - batch).square().mean()
                self.losses.append(loss.item())
                return loss

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.05)

        if hook is not None:
            setattr(Module, hook, convert_in_hook)
        module = Module()
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        data: Any = torch.utils.data.DataLoader(list(BATCHES), batch_size=None)  # type: ignore[arg-type]
        lightning.Trainer(max_epochs=1, accelerator="cpu", **quiet).fit(module, data)
        return module.losses

    first = fit(None)
    assert [fit(hook) for hook in ("configure_model", "setup", "on_fit_start", "on_train_start")] == [first] * 4
