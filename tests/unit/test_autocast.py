import threading

import pytest
import torch

import octavo
from octavo.autocast import active_recipe
from octavo.errors import ConfigError
from tests.contract.gemm_oracle import recorded_products

OWN = octavo.recipes.get("tensorwise")


def _active() -> str:
    return active_recipe(OWN).name


def test_blocks_nest_and_the_innermost_decides():
    assert _active() == "tensorwise"
    with octavo.autocast("rowwise"):
        assert _active() == "rowwise"
        with octavo.autocast(enabled=False):
            assert _active() == "bf16"
            with octavo.autocast():
                assert _active() == "tensorwise", "None re-enables each layer's own"
            assert _active() == "bf16"
        assert _active() == "rowwise"
    assert _active() == "tensorwise"


def test_disabled_wins_over_the_recipe():
    with octavo.autocast("rowwise", enabled=False):
        assert _active() == "bf16"


def test_an_exception_ends_the_block():
    with pytest.raises(KeyError), octavo.autocast("rowwise"):
        raise KeyError
    assert _active() == "tensorwise"


def test_a_recipe_object_will_do():
    with octavo.autocast(octavo.recipes.get("delayed", margin=2)):
        assert active_recipe(OWN) == octavo.recipes.get("delayed", margin=2)


def test_an_unknown_recipe_changes_nothing():
    with pytest.raises(ConfigError, match="there is no recipe 'fp7'"), octavo.autocast("fp7"):
        pass
    assert _active() == "tensorwise"


def test_each_thread_has_its_own_override():
    inside, done, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        inside.wait()
        seen.append(_active())
        with octavo.autocast(enabled=False):
            seen.append(_active())
            done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with octavo.autocast("rowwise"):
        inside.set()
        done.wait()
        assert _active() == "rowwise"
    thread.join()
    assert seen == ["tensorwise", "bf16"]


def test_autocast_selects_the_recipe_of_a_layer():
    layer, x = octavo.nn.Linear(16, 8), torch.randn(4, 16)
    with recorded_products() as products:
        layer(x)
        with octavo.autocast("rowwise"):
            layer(x)
        with octavo.autocast(enabled=False):
            exact = layer(x)
    tensorwise, rowwise = products
    assert tensorwise.a.scale.shape == ()
    assert rowwise.a.scale.shape == (4, 1)
    assert torch.equal(exact, torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_backward_uses_the_recipe_of_its_forward():
    layer, x = octavo.nn.Linear(16, 8), torch.randn(4, 16, requires_grad=True)
    with octavo.autocast("rowwise"):
        y = layer(x)
    with recorded_products() as products:
        y.sum().backward()
    assert {product.a.data.dtype for product in products} == {torch.float8_e4m3fn}
    assert {product.a.scale.ndim for product in products} == {2}


def test_plain_linear_layers_are_not_touched():
    layer, x = torch.nn.Linear(16, 8), torch.randn(4, 16)
    expected = layer(x)
    with octavo.autocast("rowwise"):
        assert torch.equal(layer(x), expected)
