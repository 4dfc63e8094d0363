"""Layers whose owner multiplies by their weight itself: left alone, named, and never stored as codes."""

import re
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import octavo
from octavo.convert import layers_not_run, read_by_others
from octavo.convert.weight_readers import weight_readers
from tests.unit.convert.written_forward import with_forward


class Attention(nn.Module):
    """One packed projection with a bias of its own, whose weight alone is read, as vision transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24, bias=False), nn.Linear(8, 8)
        self.q_bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat((self.q_bias, torch.zeros(8), self.q_bias))
        q, k, v = F.linear(x, weight=self.qkv.weight, bias=bias).chunk(3, -1)
        return self.proj(F.scaled_dot_product_attention(q, k, v))


def test_layer_whose_weight_only_is_read_is_not_converted_and_reported():
    model = nn.Sequential(Attention(), Attention())
    report = octavo.convert(model, "rowwise")
    assert report.converted == ("0.proj", "1.proj")
    reason = "Attention reads its weight and never calls the layer"
    assert report.skipped == {"0.qkv": reason, "1.qkv": reason}
    assert type(model[0].qkv) is nn.Linear
    model(torch.randn(2, 3, 8)).sum().backward()
    assert layers_not_run(model) == ()


class OneWay(nn.Module):
    """Reads a weight by ways of its own in ``forward`` and the methods that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.direct, self.in_method, self.renamed, self.both, self.asked, self.called = (
            nn.Linear(4, 4) for _ in range(6)
        )
        self.by_key: Any = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        self.inner: Any = nn.ModuleDict({"deep": nn.Linear(4, 4)})

    @property
    def product(self) -> Tensor:
        return self.in_method.weight.T

    def _keyed(self, x: Tensor) -> Tensor:
        product: Tensor = x @ self.by_key["a"].weight if "a" in self.by_key else x
        return product

    def merge(self) -> Tensor:
        """Not reached from ``forward``."""
        return self.called.weight @ self.asked.weight

    def forward(self, x: Tensor) -> Tensor:
        layer = self.renamed
        y = x @ self.direct.weight.t() + F.linear(x, layer.weight) + self._keyed(x) @ self.product
        y = y @ self.inner.deep.weight
        assert isinstance(self.asked.weight, Tensor)
        assert self.called.weight is not None
        y = self.both(y) if self.training else F.linear(y, self.both.weight)
        return self.called(self.asked(y.to(self.asked.weight.dtype)))


def test_reads_are_followed_through_methods_names_keys_and_children():
    model = OneWay()
    readers = weight_readers(model)
    never = {model.direct, model.in_method, model.renamed, *model.by_key.values(), model.inner["deep"]}
    assert {layer for layer, reader in readers.items() if reader.replaces} == never
    assert {layer for layer, reader in readers.items() if reader.calls} == {model.both}
    report = octavo.convert(model)
    assert report.converted == ("both", "asked", "called")
    assert report.notes == {
        "": "reads the weights of both itself where it does not call them, and runs no recipe there"
    }


class BranchingReader(nn.Module):
    """Vision transformers' way: with a bias of its own it reads the weight, unless a flag says otherwise."""

    def __init__(self, *, biased: bool, separate: bool = False) -> None:
        super().__init__()
        self.qkv, self.fc = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.bias = nn.Parameter(torch.zeros(4)) if biased else None
        self.separate = separate

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return self.fc(self.qkv(x))
        if self.separate and self.bias is not None:
            x = self.qkv(x) + self.bias
        else:
            x = F.linear(x, self.qkv.weight, self.bias)
        if not self.separate:
            return self.fc(x)
        return self.fc(x) @ self.qkv.weight if self.training else self.fc(x)


@pytest.mark.parametrize(
    ("options", "reads", "calls"),
    [
        ({"biased": False}, False, True),
        ({"biased": True}, True, False),
        ({"biased": True, "separate": True}, True, True),
    ],
)
def test_a_modules_flags_choose_the_branch_that_counts(options, reads, calls):
    model = BranchingReader(**options)
    reader = weight_readers(model)[model.qkv]
    assert (reader.reads, reader.calls) == (reads, calls)
    report = octavo.convert(model.requires_grad_(False), frozen="fp8")
    assert ("qkv" in report.converted) == calls
    assert ("" in report.notes) == (reads and calls)
    assert "qkv" not in report.stored, "a flag may be changed, and codes must never be read as weights"
    model.train()(torch.randn(2, 4, requires_grad=True))
    assert layers_not_run(model) == ()


class Child(OneWay):
    """Calls what its base reads."""

    def forward(self, x: Tensor) -> Tensor:
        return self.direct(x)


class Grandchild(Child):
    """Its base's forward counts where it is called."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.called.weight


def test_an_overridden_forward_counts_only_where_it_is_called():
    assert weight_readers(Child()) == {}
    model = Grandchild()
    assert list(weight_readers(model)) == [model.called]


def test_class_without_source_counts_as_calling_its_layers():
    names: dict[str, type[nn.Module]] = {}
    exec(  # what a notebook's or a generated class is
        "class NoSource(nn.Module):\n    def forward(self, x):\n        return x @ self.layer.weight\n",
        {"nn": nn},
        names,
    )
    model = names["NoSource"]()
    model.layer = nn.Linear(4, 4)
    report = octavo.convert(model)
    assert report.converted == ("layer",)
    model(torch.randn(2, 4))
    assert layers_not_run(model) == ("layer",), "running it tells what its source could not"


def test_weight_that_its_owner_also_reads_is_not_stored_as_codes():
    model = OneWay().requires_grad_(False)
    report = octavo.convert(model, frozen="fp8")
    assert report.stored == ("asked", "called")
    assert report.not_stored == {"both": "OneWay reads it in high precision"}


def test_octavos_modules_read_no_weights_of_their_layers():
    model = octavo.nn.TransformerLayer(16, 32, 2)
    assert weight_readers(model) == {}
    assert weight_readers(octavo.nn.LayerNormMLP(16, 32)) == {}


class Loops(nn.Module):
    """Layers in containers, for a forward that goes through them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.keyed = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)
        self.plain = [self.q, self.k]


LOOPS = {  # statements that read the weights of the layers named
    "for layer in self.layers: x = x @ layer.weight.t()": ["layers.0", "layers.1"],
    "for layer in self.layers[:1]: x = x @ layer.weight.t()": ["layers.0", "layers.1"],
    "for layer in reversed(self.layers): x = x @ layer.weight.t()": ["layers.0", "layers.1"],
    "for i, layer in enumerate(self.layers): x = x @ layer.weight.t() + i": ["layers.0", "layers.1"],
    "for a, b in zip(self.layers, self.keyed.values()): x = b(x @ a.weight)": ["layers.0", "layers.1"],
    "for i, (a, b) in enumerate(zip(self.layers, self.plain)): x = a(x) @ b.weight": ["q", "k"],
    "for layer in self.keyed.values(): x = x @ layer.weight.t()": ["keyed.a", "keyed.b"],
    "for key, layer in self.keyed.items(): x = x @ layer.weight.t()": ["keyed.a", "keyed.b"],
    "for i in range(len(self.layers)): x = x @ self.layers[i].weight": ["layers.0", "layers.1"],
    "for layer in self.plain: x = x @ layer.weight": ["q", "k"],
    "for layer in (self.q, self.k): x = x @ layer.weight": ["q", "k"],
    "for name, layer in [('q', self.q), ('k', self.k)]: x = x @ layer.weight": ["q", "k"],
    "x = sum(x @ layer.weight.t() for layer in self.layers)": ["layers.0", "layers.1"],
    "x = sum([F.linear(x, layer.weight) for _, layer in self.keyed.items() if layer is not None])": [
        "keyed.a",
        "keyed.b",
    ],
    "x = sum({i: x @ layer.weight for i, layer in enumerate(self.layers)}.values())": ["layers.0", "layers.1"],
    "q, k = self.q, self.k; x = x @ q.weight @ k.weight": ["q", "k"],
    "layer: nn.Linear = self.q; x = x @ layer.weight": ["q"],
    "a = b = self.q; x = x @ a.weight @ b.weight": ["q"],
    "a = b = self.q; x = b(x) @ a.weight": [],
    "for layer in self.layers: x = layer(x)": [],
    "for layer in [*self.children()][0]: x = layer(x) @ self.layers[0].weight": [],
    "for layer in self.layers: x = layer(x) @ layer.weight": [],
    "for layer in self.keyed.values(): x = layer(x) @ self.keyed['a'].weight": [],
    "x = sum(layer(x) for layer in self.layers) @ self.layers[0].weight": [],
    "for pair in enumerate(self.layers): x = pair[1](x) @ self.layers[0].weight": [],
    "x = sum(map(lambda f: f(x), self.keyed.values())) @ self.keyed['a'].weight": [],
}


@pytest.mark.parametrize("statement", LOOPS)
def test_reads_are_followed_through_loops(statement, tmp_path):
    model, x = with_forward(Loops, f"{statement}\nreturn x", tmp_path), torch.randn(4, 4)
    report = octavo.convert(model, "rowwise")
    assert [path for path, reason in report.skipped.items() if reason.endswith("never calls the layer")] == LOOPS[
        statement
    ]
    model(x)
    named = set(re.findall(r"self\.(\w+)", statement))
    not_run = [path for path in layers_not_run(model) if path.split(".")[0] in named]
    assert not_run == [], "what the loop names and convert takes, runs"


class Stack(nn.Sequential):
    """Goes through itself."""

    def forward(self, x: Tensor) -> Tensor:
        layer: Any
        for layer in self:
            x = F.linear(x, layer.weight)
        return x


def test_a_container_that_reads_its_own_layers_never_calls_them():
    model = nn.Sequential(Stack(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    assert octavo.convert(model, "rowwise").converted == ("1",)


class Caller(nn.Module):
    """Calls a layer that it shares, alone or in a list."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer[0](x) if isinstance(self.layer, nn.ModuleList) else self.layer(x)
        return y


class HoldsAndReads(nn.Module):
    """Reads the weight of a layer, alone or in a list, and hands the input to another module."""

    def __init__(self, layer: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.head: Any = layer
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        head = self.head
        if isinstance(head, nn.ModuleList):
            return self.other(x) @ self.head[0].weight
        return self.other(x) @ head.weight


@pytest.mark.parametrize("shared", [nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)])])
def test_layer_that_another_module_may_call_is_converted(shared):
    model = HoldsAndReads(shared, Caller(shared))
    report = octavo.convert(model, "rowwise")
    assert len(report.converted) == 1
    assert "reads the weights of" in report.notes[""]
    model(torch.randn(2, 4))
    assert layers_not_run(model) == ()


def test_layer_that_all_its_parents_only_read_is_not_converted():
    shared = nn.Linear(4, 4)
    model = HoldsAndReads(shared, HoldsAndReads(shared, nn.Linear(4, 4)))
    report = octavo.convert(model, "rowwise")
    assert (report.converted, list(report.skipped)) == (("other.other",), ["head"])


def test_layer_with_a_replaced_forward_is_reported():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: no hooks to look at")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    accelerate.hooks.add_hook_to_module(model[0], accelerate.hooks.ModelHook())
    report = octavo.convert(model)
    assert report.converted == ("1",)
    assert report.skipped["0"].startswith("its forward was replaced by another library's (accelerate's hooks)")


class Hidden(nn.Module):
    """Hands itself to a function that reads a weight: no source of its class shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.called = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.called(_product(self, x))


def _product(module: Any, x: Tensor) -> Tensor:
    product: Tensor = x @ module.read.weight
    return product


def _train(model: nn.Module, steps: int) -> list[str]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(each.message) for each in caught if "have not been called" in str(each.message)]


@pytest.fixture
def _no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch._dynamo.utils.counters, "stats", Counter())


@pytest.mark.usefixtures("_no_graphs")
@pytest.mark.parametrize("scale_updates", ["automatic", "manual"])
def test_a_layer_that_training_never_calls_is_named_once(scale_updates):
    model = nn.Sequential(Hidden(), Hidden())
    assert len(octavo.convert(model, "rowwise", scale_updates=scale_updates).converted) == 4
    assert _train(model, 99) == []
    (said,) = _train(model, 101)
    assert said.startswith("2 converted layers have not been called in 100 steps and run no recipe (0.read, 1.read):")
    assert layers_not_run(model) == ("0.read", "1.read")


@pytest.mark.long
@pytest.mark.usefixtures("_no_graphs")
def test_no_warning_if_all_layers_run_or_none_or_in_a_graph():
    model = nn.Sequential(nn.Linear(4, 4))
    octavo.convert(model, "rowwise")
    assert _train(model, 101) == []
    partly = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    octavo.convert(partly, "rowwise")
    partly[0].compile(backend="eager")
    assert _train(partly, 101) == []


class CustomBlock(torch.nn.Module):
    """A layer for torch's encoder that calls a linear layer, and multiplies by its weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.linear1, self.linear2 = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x, **_):
        return self.linear2(self.linear1(x)) + x @ self.linear1.weight


def test_a_reader_inside_torchs_encoder_is_found():
    block: Any = CustomBlock()
    encoder = torch.nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    reader = weight_readers(encoder)[encoder.layers[0].linear1]
    assert (reader.path, reader.reads, reader.calls) == ("layers.0", True, True)
    assert set(read_by_others(encoder)) >= {"layers.0.linear1", "layers.1.linear1"}


class Sliced(torch.nn.Sequential):
    def forward(self, x):
        last: Any = self[-1]
        return F.linear(self[:-1](x), last.weight)


def test_a_slice_of_a_module_that_is_called_is_a_call():
    readers = weight_readers(Sliced(*(nn.Linear(4, 4) for _ in range(3))))
    assert readers
    assert not any(reader.replaces for reader in readers.values())
