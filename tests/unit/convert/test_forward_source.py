"""Names, look-ups and methods through which the reading of a forward's source follows a layer."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import octavo
from octavo.convert import layers_not_run
from octavo.convert.weight_readers import weight_readers
from tests.unit.convert.written_forward import with_forward


class TwoNames(nn.Module):
    """Holds layers under two names, and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.a: Any = nn.Linear(4, 4)
        self.b, self.c, self.d = self.a, nn.Linear(4, 4), nn.Linear(4, 4)
        self.layers, self.e = nn.ModuleList([self.a]), self.d
        self.flag = torch.zeros(1)


TWO_NAMES = {
    "other name": ("return self.d(x) @ self.e.weight", {"d": False}),
    "name in a list": ("return self.layers[0](x) @ self.a.weight", {"a": False}),
    "by a method": ("return self.e.forward(x) @ self.d.weight", {"d": False}),
    "only read": ("return x @ self.e.weight + self.d.bias", {"d": True}),
    "branches": (
        "if self.flag > 0: y = self.d\nelse: y = self.c\nreturn y(x @ self.d.weight @ self.c.weight)",
        {"d": False, "c": False},
    ),
    "read in branches": ("y = self.d\nif self.flag > 0: y = self.c\nreturn x @ y.weight", {"c": True, "d": True}),
    "ended branch": (
        "y = self.c\nif self.flag > 0:\n    y = self.d\n    return y(x)\nreturn x @ y.weight",
        {"c": True},
    ),
    "bound anew": ("y = self.c\nw = y.weight\ny = torch.relu(x)\nreturn torch.add(y, w)", {"c": True}),
    "unpacked": ("y = self.c\nw = y.weight\ny, z = x.split(2)\nreturn y @ w", {"c": True}),
    "loop": (
        "y = self.c\nfor _ in range(2):\n    x = y(x)\n    y = self.d\nreturn x @ self.d.weight @ self.c.weight",
        {"c": False, "d": False},
    ),
    "while": ("y = self.c\nwhile self.flag > 0:\n    x = y(x)\n    y = self.d\nreturn x @ self.d.weight", {"d": False}),
    "loop variable": (
        "for y in self.layers:\n    w = y.weight\nfor y in (x, x):\n    w = torch.add(y, w)\nreturn w",
        {"a": True},
    ),
    "exception": (
        "y = self.c\ntry:\n    y = x.T\nexcept ValueError:\n    x = y(x)\nreturn x @ self.c.weight",
        {"c": False},
    ),
    "match": (
        "match self.flag:\n    case 1: y = self.c\n    case _: y = self.d\nreturn y(x) @ self.c.weight @ self.d.weight",
        {"c": False, "d": False},
    ),
}

LOOK_UPS = {  # statements whose last line reads the weight of d, and whether d counts as called
    "return x @ getattr(self, 'd').weight": True,
    "return x @ getattr(self.d, 'weight')": True,
    "return x @ self.get_submodule('d').weight": True,
    "return x @ self.get_parameter('d.weight')": True,
    "return x @ self.d._parameters['weight'] @ self._modules['d'].weight": True,
    "w, b = self.d.parameters()\nreturn F.linear(x, w, b)": True,
    "return F.linear(x, *self.d.parameters())": True,
    "me = self\nreturn x @ me.d.weight": True,
    "if (y := self.d) is not None: x = x @ y.weight\nreturn x": True,
    "return x @ (y := self.d).weight + y.bias": True,
    "return self.read(self.d, x)": True,
    "return self.pass_on(x, layer=self.d)": True,
    "return self.called(self.d, x) + self.read(self.d, x)": False,
    "return self.dig(self.d, x) @ self.d.weight": False,
    "return (y := self.d)(x) @ y.weight": False,
    "return getattr(self, 'd')(x) @ self.d.weight": False,
    "for name in 'cd': x = getattr(self, name)(x)\nreturn x @ self.d.weight": False,
    "for name in 'cd': x = self.get_submodule(name)(x)\nreturn x @ self.d.weight": False,
    "for m in self.children(): x = m(x) if m is self.d else x\nreturn x @ self.d.weight": False,
    "for m in self.modules(): x = m(x) if m is self.d else x\nreturn x @ self.d.weight": False,
    "for _, m in self.named_modules(): x = m(x) if m is self.d else x\nreturn x @ self.d.weight": False,
    "for m in list(self.modules())[1:]: x = m(x) if m is self.d else x\nreturn x @ self.d.weight": False,
}


class Helped(TwoNames):
    """Passes layers to its own methods."""

    @staticmethod
    def read(layer: Any, x: Tensor) -> Tensor:
        return F.linear(x, layer.weight)

    def pass_on(self, x: Tensor, *, layer: Any) -> Tensor:
        return self.read(layer, x)

    def dig(self, layer: Any, x: Tensor) -> Tensor:
        return self.dig(layer[0], x) if isinstance(layer, nn.ModuleList) else layer(x)

    def called(self, layer: Any, x: Tensor) -> Tensor:
        y: Tensor = layer(x)
        return y


@pytest.mark.parametrize("body", LOOK_UPS)
def test_layer_is_traced_through_attribute_lookups_and_method_arguments(body, tmp_path):
    model = with_forward(Helped, body, tmp_path)
    assert weight_readers(model)[model.get_submodule("d")].replaces == LOOK_UPS[body]
    octavo.convert(model)
    model(torch.randn(4, 4))
    assert not {"d", "e"} & set(layers_not_run(model))


@pytest.mark.parametrize("case", TWO_NAMES)
def test_name_refers_to_every_child_it_may_be_bound_to(case, tmp_path):
    body, replaced = TWO_NAMES[case]
    model = with_forward(TwoNames, body, tmp_path)
    readers = weight_readers(model)
    assert {name: readers[getattr(model, name)].replaces for name in replaced} == replaced
