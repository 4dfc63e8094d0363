"""Models that people bring: torch's own transformer, Hugging Face's Llama, ours; and what FP8 must keep of them."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.convert import ConversionReport
from octavo.models import Llama
from octavo.numerics import sqnr_db
from tests.contract.gemm_oracle import recorded_products
from tests.tiny_llama import tiny_hugging_face_config, tiny_llama_config

RECIPES = octavo.recipes.names()
STATIC_SCALE = torch.tensor(0.02)  # inputs up to 9

# dB of output, grad_input and grad_weight that a Linear(1024, 512) on 512 rows of normal data must keep.
SQNR_BARS = {"tensorwise": (28.5, 24.5, 24.4), "delayed": (28.5, 24.5, 24.4), "rowwise": (28.8, 28.8, 28.3)}

# Of what bfloat16 autocast keeps for backward. One byte an element is half; blocks and weights add their scales.
BYTES_BARS = dict.fromkeys(("tensorwise", "delayed", "delayed_te", "article", "rowwise"), 0.505)
BYTES_BARS |= dict.fromkeys(("blockwise", "mxfp8"), 0.52)
# grad_weight needs the input itself
BYTES_BARS |= dict.fromkeys(("rowwise_hp_grad_weight", "static", "weight_only"), 1.0)


def _convert(model: nn.Module, recipe: str) -> ConversionReport:
    report = octavo.convert(model, recipe)
    if octavo.recipes.get(recipe).has_static_input:
        octavo.load_scaling_state(model, dict.fromkeys(octavo.scaling_state(model), STATIC_SCALE))
    return report


@pytest.mark.parametrize("recipe", SQNR_BARS)
def test_signal_to_noise(recipe):
    layer = nn.Linear(1024, 512)
    x, grad = torch.randn(512, 1024, requires_grad=True), torch.randn(512, 512)
    exact = torch.autograd.grad(y := layer(x), (x, layer.weight), grad)
    octavo.convert(layer, recipe)
    actual = torch.autograd.grad(y_fp8 := layer(x), (x, layer.weight), grad)
    measured = [sqnr_db(a.detach(), b.detach()) for a, b in zip((y, *exact), (y_fp8, *actual), strict=True)]
    print(f"{recipe}: {', '.join(f'{value:.2f}' for value in measured)} dB")
    assert all(value >= bar for value, bar in zip(measured, SQNR_BARS[recipe], strict=True)), measured


def _kept_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes of the distinct tensors that backward keeps, parameters not counted."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_every_recipe_has_its_bar():
    assert BYTES_BARS.keys() == {*RECIPES} - {"bf16"}


@pytest.mark.parametrize("recipe", BYTES_BARS)
def test_tensors_saved_for_backward_stay_within_the_recipes_share_of_bf16(recipe):
    model = nn.Sequential(nn.Linear(128, 256, bias=False), nn.Linear(256, 128, bias=False))
    x = torch.randn(4096, 128)
    with torch.autocast("cpu", torch.bfloat16):
        bf16 = _kept_bytes(model, x)
        _convert(model, recipe)
        fp8 = _kept_bytes(model, x)
    print(f"{recipe}: {fp8 / bf16:.3f} of bfloat16's {bf16} bytes")
    assert bf16 >= 2 * 4096 * (128 + 256)
    assert fp8 <= BYTES_BARS[recipe] * bf16


def _encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


@pytest.mark.parametrize("recipe", RECIPES)
def test_torchs_transformer_encoder_trains(recipe):
    model = _encoder()
    report = _convert(model, recipe)
    assert report.converted == tuple(f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2))
    assert set(report.skipped) == {"layers.0.self_attn.out_proj", "layers.1.self_attn.out_proj"}
    x, target = torch.randn(4, 6, 32), torch.randn(4, 6, 32)
    assert _trains(model, lambda: (model(x) - target).square().mean())


def test_report_notes_torchs_fast_path_and_it_can_be_disabled():
    model, x = _encoder(), torch.randn(4, 6, 32)
    report = octavo.convert(model)
    assert list(report.notes) == ["layers.0", "layers.1"]
    assert "note: layers.[0-1] (2) evaluates without gradients on torch's fast path" in str(report)
    model.eval()
    with torch.no_grad(), recorded_products() as products:
        model(x)
        assert not products, "the fast path has gone: take the note away"
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            model(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert len(products) == 4


def _trains(model: nn.Module, loss_of) -> bool:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert all(torch.tensor(losses).isfinite())
    return losses[-1] < 0.9 * losses[0]


def _next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_our_llama_trains_under_autocast(recipe, tied):
    config = tiny_llama_config(vocab_size=64, intermediate_size=48, max_positions=16, tie_embeddings=tied)
    model = Llama(config)
    report = _convert(model, recipe)
    assert len(report.converted) == 14
    assert set(report.skipped) == {"model.embed_tokens", "lm_head"}
    tokens = torch.randint(64, (2, 16))

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens)
        return _next_token_loss(logits, tokens)

    assert _trains(model, loss)


@pytest.mark.parametrize("recipe", RECIPES)
def test_hugging_faces_llama_trains(recipe):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers", reason="transformers is not installed: no Llama to convert")
        config = tiny_hugging_face_config(vocab_size=64, intermediate_size=48, max_position_embeddings=32)
        model = transformers.LlamaForCausalLM(config)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        report = _convert(model, recipe)
        assert len(report.converted) == 14
        assert report.skipped["lm_head"] == "head: by its name"
        tokens = torch.randint(64, (2, 16))
        with recorded_products() as products:
            model(tokens)
        assert len(products) == (0 if recipe in ("bf16", "weight_only") else 14)
        assert _trains(model, lambda: model(tokens, labels=tokens).loss)
        octavo.restore(model)
        assert list(model.state_dict()) == list(before)
