"""What Transformer Engine saves beside the weights. Its side is written here: its roll of a history, its scales."""

import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import octavo
from octavo.compat.transformer_engine import pytorch as te
from octavo.compat.transformer_engine.common.recipe import DelayedScaling
from octavo.compat.transformer_engine.pytorch.extra_state import without_extra_state
from octavo.errors import CheckpointError
from octavo.scaling import AmaxHistory

LENGTH, STEPS = 4, 6
RECIPE = DelayedScaling(amax_history_len=LENGTH)
MAXIMA = {"fwd": 448.0, "bwd": 57344.0}


class Peer:
    """Amax histories and scales of one module as Transformer Engine keeps them."""

    def __init__(self, layers):
        self.histories = {"fwd": torch.zeros(LENGTH, 3 * layers), "bwd": torch.zeros(LENGTH, 2 * layers)}
        self.scales = {way: torch.ones(history.shape[1]) for way, history in self.histories.items()}

    def step(self, amaxes):
        """amaxes: of input, weight and grad_output, layer by layer; output and grad_input stay 0, as they are there."""
        for index, (x, weight, grad) in enumerate(amaxes):
            self.histories["fwd"][0, 3 * index : 3 * index + 2] = torch.stack([x, weight])
            self.histories["bwd"][0, 2 * index] = grad
        for way, history in self.histories.items():
            amax = history.max(dim=0).values
            self.scales[way] = torch.where(amax > 0, MAXIMA[way] / amax, self.scales[way])
            self.histories[way] = torch.roll(history, -1, 0)
            self.histories[way][0] = 0

    def named(self):
        ways = ("fwd", "bwd")
        return {f"amax_history_{way}": self.histories[way] for way in ways} | {
            f"scale_{way}": self.scales[way] for way in ways
        }


# A module, its linear layers, and what the checkpoint calls each group of them.
MODULES = {
    "Linear": (lambda: te.Linear(8, 12), {"": ["linear"]}),
    "LayerNormLinear": (lambda: te.LayerNormLinear(8, 12), {"": ["layer.linear"]}),
    "LayerNormMLP": (lambda: te.LayerNormMLP(8, 12), {"": ["layer.fc1", "layer.fc2"]}),
    "TransformerLayer": (
        lambda: te.TransformerLayer(8, 12, 2, hidden_dropout=0.0, attention_dropout=0.0),
        {
            "self_attention.layernorm_qkv.": ["layer.self_attention.qkv.linear"],
            "self_attention.proj.": ["layer.self_attention.out"],
            "layernorm_mlp.": ["layer.mlp.fc1", "layer.mlp.fc2"],
        },
    ),
}


def _step(model, seed):
    """One training step of growing and falling tensors; output and gradients."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(3, 2, 8, generator=generator) * 2.0 ** (3 - seed % 5)).requires_grad_()
    model.zero_grad()
    with te.autocast(recipe=RECIPE):
        y = model(x)
    (y.square().sum() * 2.0 ** (seed % 3)).backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def _trained(kind):
    """A trained module and what Transformer Engine would have of it, step by step from octavo's newest amaxes."""
    make, groups = MODULES[kind]
    torch.manual_seed(0)
    model = make()
    peers = {source: Peer(len(paths)) for source, paths in groups.items()}
    for seed in range(STEPS):
        _step(model, seed)
        octavo.update_scales(model)
        state = octavo.scaling_state(model)
        for source, paths in groups.items():
            roles = ("input", "weight", "grad_output")
            peers[source].step([[state[f"{path}.{role}.amax_history"][0] for role in roles] for path in paths])
    return model, peers


def _nested(source, peer):
    return {f"{source}_extra_state": peer.named()}


def _flat(source, peer):
    return {f"{source}_extra_state.{name}": tensor for name, tensor in peer.named().items()}


@pytest.mark.parametrize("written", [_nested, _flat])
@pytest.mark.parametrize("kind", MODULES)
def test_training_continues_bit_for_bit(kind, written):
    model, peers = _trained(kind)
    beside = {f"m.{key}": value for source, peer in peers.items() for key, value in written(source, peer).items()}
    weights = {f"m.{name}": tensor for name, tensor in model.state_dict().items()}
    other, fresh = MODULES[kind][0](), MODULES[kind][0]()
    nn.ModuleDict({"m": other}).load_state_dict(weights | beside)
    fresh.load_state_dict(model.state_dict())
    expected, found, anew = ([_step(one, seed) for seed in range(STEPS, STEPS + 5)] for one in (model, other, fresh))
    assert all(
        torch.equal(a, b) for one, two in zip(expected, found, strict=True) for a, b in zip(one, two, strict=True)
    )
    assert not all(torch.equal(a, b) for a, b in zip(expected[0], anew[0], strict=True)), "the history says something"


def test_a_history_without_a_name_is_known_by_its_shape():
    model, peers = _trained("LayerNormMLP")
    other = MODULES["LayerNormMLP"][0]()
    other.load_state_dict(model.state_dict() | {"_extra_state": peers[""].histories["fwd"]})
    state = octavo.scaling_state(other)
    wanted = octavo.scaling_state(model)
    for path in ("layer.fc1", "layer.fc2"):
        for role in ("input", "weight"):
            key = f"{path}.{role}.amax_history"
            assert torch.equal(state[key][: LENGTH - 1], wanted[key][: LENGTH - 1])
            assert state[f"{path}.{role}.amax"] == state[key].max()
        assert state[f"{path}.grad_output.steps"] == 0


def test_scales_without_amaxes_are_inverted():
    layer = te.Linear(4, 4)
    layer.load_state_dict(layer.state_dict() | {"_extra_state": {"scale_fwd": torch.tensor([64.0, 1.0, 1.0])}})
    state = octavo.scaling_state(layer)
    assert state["linear.input.amax"] == 448 / 64
    assert state["linear.weight.amax"] == 0, "1 is where a scale starts"
    assert state["linear.input.amax_history"].shape == (1024,)


def test_the_surrounding_blocks_recipe_decides_over_the_history():
    _, peers = _trained("Linear")
    layer = te.Linear(8, 12)
    recipe = DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent", margin=1)
    with te.autocast(recipe=recipe):
        layer.load_state_dict(layer.state_dict() | {"_extra_state": peers[""].named()})
        layer(torch.ones(2, 8)).sum().backward()
    history = layer.linear.amax_history
    assert isinstance(history, AmaxHistory)
    assert history.spec == recipe.octavo_recipe().history


class Explosive:
    """What a hostile pickle does: call something when it is opened."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was opened",))


PICKLE = pickle.dumps(Explosive())


def test_empty_extra_state_is_left_out_silently():
    layer = te.TransformerLayer(8, 8, 2)
    state = layer.state_dict() | {
        "self_attention.layernorm_qkv._extra_state": torch.empty(0, dtype=torch.uint8),
        "self_attention.core_attention._extra_state": torch.empty(0),
        "layernorm_mlp._extra_state": None,
        "self_attention.proj._extra_state": {},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.load_state_dict(state)
    assert not octavo.scaling_state(layer)


@pytest.mark.parametrize(
    "value",
    [
        PICKLE,
        bytearray(PICKLE),
        io.BytesIO(PICKLE),
        torch.frombuffer(bytearray(PICKLE), dtype=torch.uint8),
        torch.frombuffer(bytearray(PICKLE), dtype=torch.int8),
        {"amax_history_fwd": io.BytesIO(PICKLE)},
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("at", ["layernorm_mlp", "self_attention.core_attention"])
def test_a_pickle_is_refused_with_the_reason_and_left_out_on_request(value, at):
    layer = te.TransformerLayer(8, 8, 2)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    other = te.TransformerLayer(8, 8, 2).state_dict() | {f"{at}._extra_state": value}
    with pytest.raises(CheckpointError, match=r"is a pickle .* could run any code.*without_extra_state\(checkpoint\)"):
        layer.load_state_dict(other)
    assert all(torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())
    layer.load_state_dict(without_extra_state(other))
    assert torch.equal(layer.layer.mlp.fc1.weight, other["layer.mlp.fc1.weight"])
    assert not octavo.scaling_state(layer)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(4, 5), r"is an unknown tensor \(4, 5\); octavo reads amax_history_fwd"),
        (torch.ones(3), r"is an unknown tensor \(3,\)"),
        ({"amax": torch.ones(4, 3)}, r"\['amax'\].* is an unknown tensor"),
        ({"recipe": object()}, r"\['recipe'\].* is object, and octavo reads only plain tensors"),
        ({"amax_history_fwd": torch.ones(4, 1)}, r"amax_history_fwd is \(4, 1\), too small for column 1"),
        ({"amax_history_fwd": torch.ones(4)}, r"amax_history_fwd is \(4,\)"),
        ({"amax_history_bwd": torch.full((2, 2), float("nan"))}, r"amax_history_bwd holds .*not negative"),
        ({"scale_fwd": -torch.ones(3)}, r"scale_fwd holds -1\.0"),
    ],
)
def test_tensors_that_say_something_else_are_refused(value, message):
    layer = te.Linear(4, 4)
    with pytest.raises(CheckpointError, match=message):
        layer.load_state_dict(layer.state_dict() | {"_extra_state": value})
    assert not octavo.scaling_state(layer)
