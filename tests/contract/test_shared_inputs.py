"""q, k and v of a block, gate and up: what is given to several layers is cast once, and nothing else changes."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.models import Llama
from octavo.nn import Linear
from tests.contract.gemm_oracle import Product, recorded_products
from tests.recorded_state import recorded_state
from tests.tiny_llama import tiny_hugging_face_config, tiny_llama_config

LAYERS = 2
DYNAMIC = [
    name
    for name in octavo.recipes.names()
    if (recipe := octavo.recipes.get(name)).output.a is not None
    and not recipe.is_delayed
    and not recipe.has_static_input
]


def _ours() -> nn.Module:
    return Llama(tiny_llama_config(vocab_size=64, intermediate_size=48, num_layers=LAYERS, max_positions=32))


def _hugging_faces() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers", reason="transformers is not installed: no Llama to convert")
        config = tiny_hugging_face_config(
            vocab_size=64, intermediate_size=48, num_hidden_layers=LAYERS, max_position_embeddings=32
        )
        model: nn.Module = transformers.LlamaForCausalLM(config)
        return model


MODELS: dict[str, Callable[[], nn.Module]] = {"octavo": _ours, "transformers": _hugging_faces}


def _converted(name: str, recipe: str, *, shared: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]()
    octavo.convert(model, recipe)
    for layer in model.modules():
        if isinstance(layer, Linear) and not shared:
            layer.shared_input = None
    return model


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    found = model(tokens)
    logits = found if isinstance(found, Tensor) else found.logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def _tokens(step: int = 0) -> Tensor:
    return torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(step))


def _codes(products: list[Product], side: str) -> set[int]:
    return {getattr(product, side).data.untyped_storage().data_ptr() for product in products}


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("recipe", DYNAMIC)
@pytest.mark.parametrize("name", MODELS)
def test_four_casts_serve_the_seven_layers_of_a_block(name, recipe, autocast):
    model = _converted(name, recipe)
    with recorded_products() as products, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = _loss(model, _tokens())
        assert len(products) == 7 * LAYERS
        assert len(_codes(products, "a")) == 4 * LAYERS
        loss.backward()


@pytest.mark.parametrize("name", MODELS)
def test_backward_multiplies_the_same_codes(name):
    model = _converted(name, "tensorwise")
    with recorded_products() as products:
        loss = _loss(model, _tokens())
        inputs = _codes(products, "a")
        forward = len(products)
        loss.backward()
    of_inputs = [product for product in products[forward:] if _codes([product], "b") <= inputs]
    assert len(of_inputs) == 7 * LAYERS
    assert _codes(of_inputs, "b") == inputs


def _called(model: nn.Module, tokens: Tensor) -> Tensor:
    return _loss(model, tokens)


def _checkpointed(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = checkpoint(_loss, model, tokens, use_reentrant=False)
    return loss


def _training(model: nn.Module, run: Callable[[nn.Module, Tensor], Tensor], *, autocast: bool) -> list[Tensor]:
    """Losses, gradients and weights of three steps of two micro-batches, and what the layers record."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(3):
        for micro in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = run(model, _tokens(2 * step + micro))
            loss.backward()
            found.append(loss.detach())
        found += [each.grad.clone() for each in model.parameters() if each.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(each.detach().clone() for each in model.parameters()), *recorded_state(model).values()]


@pytest.mark.parametrize("run", [_called, _checkpointed], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("recipe", [*DYNAMIC, "delayed"])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_same_to_the_bit(name, recipe, autocast, run):
    found, expected = (
        _training(_converted(name, recipe, shared=shared), run, autocast=autocast) for shared in (True, False)
    )
    assert len(found) == len(expected)
    assert all(torch.equal(own, wanted) for own, wanted in zip(found, expected, strict=True))


def _kept_bytes(model: nn.Module) -> int:
    """Bytes of the distinct storages of codes that backward keeps."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.itemsize == 1:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _loss(model, _tokens())
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("name", MODELS)
def test_backward_keeps_the_codes_of_an_input_once(name):
    rows, hidden, intermediate = _tokens().numel(), 32, 48
    found = {shared: _kept_bytes(_converted(name, "rowwise", shared=shared)) for shared in (True, False)}
    assert found == {
        True: LAYERS * rows * (3 * hidden + intermediate),
        False: LAYERS * rows * (6 * hidden + intermediate),
    }
