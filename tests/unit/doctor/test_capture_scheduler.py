import pytest
import torch
from torch import nn

import octavo
from octavo.doctor import Captures, Severity, load_capture, watch
from octavo.doctor.capture_scheduler import (
    DIAGNOSED_EVERY,
    LAYERS_PER_STEP,
    MAX_OUTPUTS,
    MAX_TOKENS,
    SAMPLES_BETWEEN_CAPTURES,
    CaptureScheduler,
)
from tests.unit.doctor.one_layer import captured, finding, found


class Two(nn.Module):
    """Two layers in a module, and one beside it."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.mlp(x))


def trained(folder, *findings, recipe="tensorwise", steps=4, interval=1, model=None):
    """The weights after some steps, and the captures."""
    torch.manual_seed(0)
    model = Two() if model is None else model
    octavo.convert(model, recipe, convert_head=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    watcher = watch(model, optimizer, interval=interval, captures=folder)
    with finding(*findings):
        for _ in range(steps):
            with watcher.step() as notes:
                loss = model(torch.randn(16, 8)).square().mean()
                loss.backward()
                notes.loss = loss
                optimizer.step()
                optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()], folder and Captures(folder).files()


def places(files):
    return [(capture.path, capture.step) for capture in map(load_capture, files)]


def test_layer_with_a_finding_is_captured_at_the_next_sample(tmp_path):
    _, files = trained(tmp_path, found(path="head"), steps=9, interval=3)
    assert places(files) == [("head", 3)]


def test_finding_of_a_module_captures_its_layers(tmp_path):
    _, files = trained(tmp_path, found("outlier-growth", path="mlp"))
    assert places(files) == [("mlp.1", 2), ("mlp.0", 2)]  # in the order of backward


@pytest.mark.parametrize("which", [found(severity=Severity.NOTE, path="head"), found("loss-scale", path="")])
def test_notes_and_findings_of_the_whole_run_capture_nothing(tmp_path, which):
    _, files = trained(tmp_path / "none", which)
    assert not files
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "static"])
def test_capturing_changes_no_bit_of_training(tmp_path, recipe):
    def model():
        made = Two()
        octavo.convert(made, recipe, convert_head=True)
        for layer in made.modules():
            if isinstance(layer, octavo.nn.Linear) and layer.recipe.has_static_input:
                layer.input_scale.fill_(0.01)
        return made

    torch.manual_seed(0)
    with_captures, files = trained(tmp_path, found(path="mlp"), found(path="head"), recipe=recipe, model=model())
    torch.manual_seed(0)
    without, _ = trained(None, recipe=recipe, model=model())
    assert len(files) == 3
    assert all(torch.equal(one, other) for one, other in zip(with_captures, without, strict=True))


def test_capture_holds_the_operands_and_amax_history_the_layer_used(tmp_path):
    x, gradient = torch.randn(20, 8), torch.randn(20, 6)
    capture = captured(tmp_path, "delayed", x=x, gradient=gradient, before=lambda _: 3.0)
    assert torch.equal(capture.input, x)
    assert torch.equal(capture.grad_output, gradient)
    assert capture.weight.shape == (6, 8)
    assert capture.recipe == octavo.recipes.get("delayed")
    assert capture.window is not None
    assert capture.amax is not None
    assert capture.window[0, 0] == (3 * x).abs().max() == capture.amax[0], "of the step before, not of this one"
    assert capture.window[2, 0] == gradient.abs().max() == capture.amax[2]
    assert (capture.window[:, 1:] == -1).all()


@pytest.mark.long
def test_a_large_layer_is_sampled_with_its_largest_elements(tmp_path):
    x, gradient = torch.randn(3 * MAX_TOKENS, 8), torch.randn(3 * MAX_TOKENS, 2 * MAX_OUTPUTS)
    x[777, 3], gradient[778, 4001] = 100.0, -200.0
    capture = captured(tmp_path, "tensorwise", x=x, gradient=gradient)
    m, n = capture.grad_output.shape
    assert m <= MAX_TOKENS
    assert n <= MAX_OUTPUTS
    assert capture.input.abs().max() == 100
    assert capture.grad_output.abs().max() == 200
    rows = [next(row for row in range(len(x)) if torch.equal(x[row], one)) for one in capture.input[:: m // 8]]
    assert rows == sorted(rows)
    assert rows[-1] - rows[0] > 2 * MAX_TOKENS, "rows come from everywhere"
    taken = [next(row for row in range(len(x)) if torch.equal(x[row], one)) for one in capture.input]
    where = [int((gradient[taken[0]] == value).nonzero()[0, 0]) for value in capture.grad_output[0, :20]]
    assert torch.equal(gradient[taken][:, where], capture.grad_output[:, :20]), "the rows and columns belong together"


def test_nonfinite_elements_are_captured_and_do_not_count_as_largest(tmp_path):
    x = torch.randn(3 * MAX_TOKENS, 8)
    x[1, 1], x[1001, 2], x[2, 2] = torch.nan, 50.0, torch.inf
    capture = captured(tmp_path, "tensorwise", x=x, gradient=torch.randn(3 * MAX_TOKENS, 4))
    assert (capture.input == 50).any()


def test_the_first_micro_batch_of_a_step_is_captured(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8))
    octavo.convert(model, "tensorwise")
    watcher = watch(model, interval=1, captures=tmp_path)
    inputs = [torch.full((4, 8), float(index), requires_grad=True) for index in range(4)]
    with finding(found()):
        for pair in (inputs[:2], inputs[2:]):
            with watcher.step():
                for x in pair:
                    model(x).sum().backward()
    (capture,) = Captures(tmp_path).of("0")
    assert torch.equal(capture.input, inputs[2])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_is_captured(tmp_path, reentrant):
    layer = octavo.nn.Linear(8, 8)
    watcher = watch(layer, interval=1, captures=tmp_path)
    x = torch.randn(4, 8, requires_grad=True)
    with finding(found(path="")):
        for _ in range(2):
            with watcher.step():
                torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    (capture,) = Captures(tmp_path).of("")
    assert torch.equal(capture.input, x)


def test_a_delayed_layer_that_only_evaluates_has_no_history(tmp_path):
    layer = octavo.nn.Linear(8, 8).eval()
    watcher = watch(layer, interval=1, captures=tmp_path)
    with finding(found(path="")), octavo.autocast("delayed"):
        for _ in range(2):
            with watcher.step():
                layer(torch.ones(4, 8, requires_grad=True)).sum().backward()
    (capture,) = Captures(tmp_path).of("")
    assert capture.recipe.is_delayed
    assert capture.window is None


def captor(count=10):
    return CaptureScheduler(Captures("nowhere"), {str(index): octavo.nn.Linear(2, 2) for index in range(count)})


def test_each_sample_captures_a_few_layers_worst_first():
    one = captor()
    findings = [found(path=str(index)) for index in range(10)]
    one.update(lambda: findings, 1)
    assert one.selected == tuple(map(str, range(LAYERS_PER_STEP)))
    one.update(lambda: findings, 2)
    assert one.selected == tuple(map(str, range(LAYERS_PER_STEP, 2 * LAYERS_PER_STEP)))


def test_repeated_finding_is_captured_again_after_some_samples():
    one = captor(1)
    wanted = []
    for step in range(1, 2 * SAMPLES_BETWEEN_CAPTURES + 1):
        one.update(lambda: [found(path="0")], step)
        wanted.append(bool(one.selected))
    first, second = (index for index, is_wanted in enumerate(wanted) if is_wanted)
    assert first == 0
    assert SAMPLES_BETWEEN_CAPTURES <= second < SAMPLES_BETWEEN_CAPTURES + DIAGNOSED_EVERY
    one = captor(1)
    one.update(lambda: [found(path="0")], 1)
    one.update(lambda: [found(path="0"), found("zero-tensor", path="0")], 2)
    assert one.selected == ("0",), "another finding of the same layer"


def test_rules_run_at_every_sample_of_a_short_run_and_rarely_in_a_long_one():
    one, asked = captor(1), []

    def findings(look):
        asked.append(look)
        return [found(path="0")] if look == 8 else []

    for look in range(1, 21):
        one.update(lambda look=look: findings(look), look)
        assert one.selected == (("0",) if look == 8 else ()), (
            "one look captures, not all until the rules are asked again"
        )
    assert asked == [1, 2, 3, 4, 5, 6, 7, 8, 16]


def test_resumed_training_counts_earlier_captures(tmp_path):
    """In steps, 3 from one look to the next; the layer without a file in the folder is captured at once."""
    left = captured(tmp_path, "tensorwise", x=torch.randn(4, 8), gradient=torch.randn(4, 2))
    one = CaptureScheduler(Captures(tmp_path), captor(2).layers, interval=3)
    wanted = {}
    for look in range(8):
        step = left.step + 9 * look
        one.update(lambda: [found(path="0"), found(path="1")], step)
        wanted[step - left.step] = one.selected
    assert wanted == {0: ("1",), 9: (), 18: (), 27: (), 36: (), 45: (), 54: (), 63: ("0", "1")}


def test_layers_are_captured_besides_the_steps(tmp_path):
    model = Two()
    octavo.convert(model, "tensorwise", convert_head=True)
    watcher = watch(model, interval=1, captures=tmp_path)
    with watcher.step(7):
        pass
    with watcher.capturing(["mlp", "nowhere"]):
        model(torch.randn(4, 8)).sum().backward()
    assert sorted(places(Captures(tmp_path).files())) == [("mlp.0", 7), ("mlp.1", 7)]
    assert [sample.step for sample in watcher.samples] == [7], "it is no look"
    assert all(layer.watch is None for layer in watcher.layers.values())
