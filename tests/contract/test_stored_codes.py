"""``frozen="fp8"``: a base at one byte a weight that a LoRA fine-tune trains on, gradients right."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import octavo
from octavo.errors import ConfigError
from octavo.kernels import high_precision_mm
from octavo.nn import Linear
from octavo.nn.fp8_weight import store_weight_as_codes
from octavo.recipes import Recipe
from tests.contract.gemm_oracle import assert_same_operand, recorded_products
from tests.tiny_llama import tiny_hugging_face_config

RECIPES = [name for name in octavo.recipes.names() if name not in ("bf16", "static")]


def _stored(recipe: str | Recipe, *, dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, Linear]:
    """A frozen layer as it was, and stored as codes."""
    torch.manual_seed(0)
    plain = nn.Linear(48, 40, dtype=dtype).requires_grad_(False)
    model = nn.Sequential(nn.Linear(48, 40, dtype=dtype))
    model[0].load_state_dict(plain.state_dict())
    model.requires_grad_(False)
    report = octavo.convert(model, recipe, frozen="fp8")
    assert report.stored == ("0",)
    layer = model[0]
    assert isinstance(layer, Linear)
    return plain, layer


@pytest.mark.parametrize("recipe", RECIPES)
def test_output_and_input_gradient_are_those_of_the_decoded_weight(recipe):
    plain, layer = _stored(recipe)
    stored = layer.stored_codes()
    assert stored is not None
    assert layer.weight_codes.dtype is octavo.E4M3.torch_dtype
    assert layer.weight_codes.nbytes == plain.weight.numel()
    decoded = Linear(48, 40, recipe=recipe).requires_grad_(False)
    decoded.load_state_dict({"weight": stored.dequantize(), "bias": plain.bias})
    results = []
    for module in (layer, decoded):
        x = torch.randn(6, 48, generator=torch.Generator().manual_seed(1), requires_grad=True)
        y = module(x)
        y.backward(torch.randn(6, 40, generator=torch.Generator().manual_seed(2)))
        results.append((y.detach(), x.grad))
    for one, other in zip(*results, strict=True):  # the decoded weight's codes are the same up to one step of a code
        assert other is not None
        assert (one - other).norm() <= 0.02 * other.norm()
    exact = nn.functional.linear(x.detach().double(), plain.weight.double(), plain.bias.double())
    assert (results[0][0].double() - exact).norm() <= 0.06 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stored_codes_compute_what_weight_only_computes_of_the_weight(dtype):
    """The codes decode in FP32 and are rounded once, to the input's dtype, whatever they were made of."""
    plain, layer = _stored("weight_only", dtype=torch.bfloat16)
    unheld = Linear(48, 40, recipe="weight_only", dtype=torch.bfloat16)
    unheld.load_state_dict(plain.state_dict())
    x, stored = torch.randn(6, 48, dtype=dtype), layer.stored_codes()
    assert stored is not None
    assert torch.equal(layer(x), unheld(x))
    decoded = (stored.data.float() * stored.scale).to(dtype)
    assert torch.equal(layer(x), high_precision_mm(x, decoded, plain.bias))


@pytest.mark.parametrize("surroundings", ["autocast", "disabled", "rowwise inside"])
def test_forward_and_backward_run_under_every_precision(surroundings):
    plain, layer = _stored("tensorwise")
    x = torch.randn(6, 48, requires_grad=True)
    stored = layer.stored_codes()
    assert stored is not None
    if surroundings == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        assert y.dtype is torch.bfloat16
    elif surroundings == "disabled":
        with octavo.autocast(enabled=False):
            y = layer(x)
        torch.testing.assert_close(y, nn.functional.linear(x, stored.dequantize(), plain.bias))
    else:
        with octavo.autocast("rowwise"):
            y = layer(x)
    y.float().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, stored.dequantize().sum(0).expand(6, 48), rtol=0.07, atol=0.05)


def test_casting_the_model_keeps_codes_and_scale():
    _, layer = _stored("tensorwise")
    before = layer.stored_codes()
    assert before is not None
    layer.to(torch.bfloat16)
    after = layer.stored_codes()
    assert after is not None
    assert torch.equal(before.data.view(torch.uint8), after.data.view(torch.uint8))
    assert after.scale.dtype is torch.float32
    assert layer.bias.dtype is torch.bfloat16
    assert layer(torch.randn(2, 48, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_the_state_dict_has_the_codes_and_loads_back():
    _, layer = _stored("tensorwise")
    _, other = _stored("tensorwise")
    with torch.no_grad():
        other.weight_codes.view(torch.uint8).zero_()
        other.weight_scale.fill_(9.0)
    state = layer.state_dict()
    assert sorted(state) == ["bias", "weight", "weight_codes", "weight_scale"]
    assert not state["weight"].numel()
    assert torch.equal(layer.weight_codes.view(torch.uint8), state["weight_codes"].view(torch.uint8))
    assert other.load_state_dict(state) == ([], [])
    x = torch.randn(3, 48)
    assert torch.equal(layer(x), other(x))
    for strict in (True, False):
        with pytest.raises(
            RuntimeError, match=r"weight is torch.float32, .* stores FP8 codes; load weights before .*convert"
        ):
            other.load_state_dict(nn.Linear(48, 40).state_dict(), strict=strict)
        plain = Linear(48, 40)
        kept = plain.weight.detach().clone()
        for codes in (state, {"weight": state["weight_codes"], "bias": state["bias"]}):
            with pytest.raises(RuntimeError, match=r"FP8 codes, and this layer a weight in high precision; .*restore"):
                plain.load_state_dict(codes, strict=strict)
        assert torch.equal(plain.weight, kept)
    assert not hasattr(plain, "weight_codes")
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "weight_codes"'):
        other.load_state_dict({"bias": state["bias"], "weight_scale": state["weight_scale"]})
    assert torch.equal(layer(x), other(x)), "nothing was copied"


def test_codes_under_the_parameters_name_load_too():
    """As earlier versions saved them."""
    (_, layer), (_, other) = _stored("rowwise"), _stored("rowwise")
    state = layer.state_dict()
    for strict in (True, False):
        with torch.no_grad():
            other.weight_codes.view(torch.uint8).zero_()
        earlier = {"weight": state["weight_codes"], "weight_scale": state["weight_scale"], "bias": state["bias"]}
        assert other.load_state_dict(earlier, strict=strict) == ([], [])
        assert torch.equal(layer.weight_codes.view(torch.uint8), other.weight_codes.view(torch.uint8))


@pytest.mark.parametrize("assign", [False, True])
def test_unconverted_model_refuses_codes_as_weights(assign):
    _, layer = _stored("tensorwise")
    state, plain = nn.Sequential(layer).state_dict(), nn.Sequential(nn.Linear(48, 40))
    kept = plain.get_parameter("0.weight").detach().clone()
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight: .* torch.Size\(\[0, 4, 0\]\) from"):
            plain.load_state_dict(state, strict=strict, assign=assign)
    assert torch.equal(plain.get_parameter("0.weight"), kept)


def test_scale_that_was_cast_is_refused_as_that():
    model = nn.Sequential(nn.Linear(16, 16)).requires_grad_(False)
    octavo.convert(model, "rowwise", frozen="fp8")
    state = model.state_dict()
    state["0.weight_scale"] = state["0.weight_scale"].bfloat16()
    with pytest.raises(RuntimeError, match=r"0.weight_scale is torch.bfloat16.* the scale was cast after it was saved"):
        model.load_state_dict(state)


@pytest.mark.parametrize(("saved", "other"), [("mxfp8", "rowwise"), ("rowwise", "mxfp8")])
def test_codes_and_scales_of_another_format_are_refused(saved, other):
    """With 16 columns both have scales [N, 1]; copied, the exponent 127 would be read as the scale 127."""
    models = [nn.Sequential(nn.Linear(16, 64)).requires_grad_(False) for _ in range(2)]
    for model, recipe in zip(models, (saved, other), strict=True):
        assert octavo.convert(model, recipe, frozen="fp8").stored
    state, before = models[0].state_dict(), models[1](torch.ones(1, 16))
    assert state["0.weight"].shape != models[1].state_dict()["0.weight"].shape, "a checkpoint in shards sees it too"
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"0.weight_scale is torch.*stored with another recipe"):
            models[1].load_state_dict(state, strict=strict)
    assert torch.equal(models[1](torch.ones(1, 16)), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_that_was_cast_decodes_to_its_dtype(dtype):
    _, layer = _stored("rowwise")
    model = nn.Sequential(layer).to(dtype)
    x = torch.randn(2, 48, dtype=dtype)
    assert nn.functional.linear(x, layer.weight, layer.bias).dtype is dtype
    octavo.restore(model)
    assert model(x).dtype is dtype


def _project(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    return nn.functional.linear(x, layer.weight.to(x.dtype), layer.bias)


class _Reader(nn.Module):
    """Reads a layer's weight where no source that octavo looks at says so."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(_project(x, self.q))


@pytest.mark.long
def test_undetected_reader_gets_decoded_weights():
    torch.manual_seed(0)
    model, x = _Reader().requires_grad_(False).eval(), torch.randn(4, 48)
    exact = model(x)
    assert octavo.convert(model, "rowwise", frozen="fp8").stored == ("q", "out")
    assert (model(x) - exact).norm() <= 0.06 * exact.norm()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), model(x))
    assert isinstance(model.q, Linear)
    codes = model.q.stored_codes()
    assert codes is not None
    assert torch.equal(model.q.weight, codes.dequantize())


def test_a_decoded_weight_cannot_be_written():
    """As merging an adapter does; the codes would stay as they are."""
    _, layer = _stored("tensorwise")
    writes = (
        lambda: layer.weight.add_(1.0),
        lambda: layer.weight.data.add_(1.0),
        lambda: layer.weight[:, :4].zero_(),
        lambda: layer.weight.T.add_(1.0),
        lambda: layer.weight.chunk(2)[0].zero_(),
        lambda: layer.weight.detach().fill_(0.0),
        lambda: torch.add(layer.weight, 1.0, out=layer.weight),
        lambda: nn.functional.relu(layer.weight, inplace=True),
    )
    for write in writes:
        with pytest.raises(ConfigError, match=r"written into its decoded values would be lost; call octavo\.restore"):
            write()
    assert not layer.weight.requires_grad_(False).requires_grad
    for unfreeze in (lambda: layer.weight.requires_grad_(True), lambda: setattr(layer.weight, "requires_grad", True)):
        with pytest.raises(ConfigError, match=r"takes no gradient; octavo\.restore"):
            unfreeze()
    with pytest.raises(ConfigError, match=r"layer '0' is stored as FP8 codes and cannot be set or tied; call octavo"):
        layer.weight = nn.Parameter(torch.zeros(40, 48))


def test_weights_that_cannot_be_stored_or_trained_are_refused():
    layer = Linear(4, 4).requires_grad_(False)
    layer.weight[1, 1] = float("nan")
    model = nn.Sequential(layer)
    with pytest.raises(ConfigError, match="the weight of layer '0' holds NaN or infinity"):
        octavo.convert(model, frozen="fp8")
    both = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), layer)
    with pytest.raises(ConfigError, match="the weight of layer '1' holds NaN or infinity"):
        octavo.convert(both, frozen="fp8")
    assert isinstance(both[0], Linear)
    assert both[0].codes_layout is None, "all or none"
    _, layer = _stored("tensorwise")
    layer.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"takes no gradient; octavo\.restore"):
        layer(torch.randn(2, 48))


def test_converting_again_reports_the_stored_layers():
    _, layer = _stored("tensorwise")
    report = octavo.convert(nn.Sequential(layer), "rowwise")
    assert report.stored == ("0",)


def test_restoring_gives_the_decoded_weight():
    plain, layer = _stored("tensorwise", dtype=torch.bfloat16)
    stored = layer.stored_codes()
    assert stored is not None
    model = nn.Sequential(layer)
    octavo.restore(model)
    restored = model.get_parameter("0.weight")
    assert torch.equal(restored, stored.dequantize())
    assert restored.dtype is torch.bfloat16
    assert set(vars(model[0])) == set(vars(nn.Linear(1, 1)))
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    assert (restored.float() - plain.weight.float()).abs().max() <= 2**-4 * plain.weight.float().abs().max()


def test_only_unshared_frozen_weights_are_stored():
    class FrozenAndTrained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trained, self.frozen, self.one, self.two = (nn.Linear(4, 4) for _ in range(4))
            self.two.weight = self.one.weight

    model = FrozenAndTrained().requires_grad_(False)
    model.trained.requires_grad_(True)
    report = octavo.convert(model, frozen="fp8")
    assert report.stored == ("frozen",)
    assert "1 store their weight as FP8 codes" in str(report)
    with pytest.raises(ConfigError, match="only a frozen weight can be stored as FP8 codes"):
        store_weight_as_codes(model.trained)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="recipe 'bf16' casts no weight"):
        store_weight_as_codes(Linear(2, 2, recipe="bf16").requires_grad_(False))
    with pytest.raises(ConfigError, match="frozen must be None or 'fp8', not 'int8'"):
        octavo.convert(model, frozen="int8")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("gradients", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("norm_first", [False, True])
def test_weights_that_torchs_fast_path_reads_are_not_stored(gradients, norm_first):
    """In evaluation torch's encoder multiplies by its layers' weights itself; with codes there it fails."""
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=norm_first)
    model = nn.Sequential(nn.Linear(16, 16), nn.TransformerEncoder(encoder, 2, enable_nested_tensor=not norm_first))
    model.requires_grad_(False).eval()
    x, hides = torch.randn(2, 5, 16), torch.arange(5) >= torch.tensor([[5], [3]])
    with gradients():
        expected = model[1](x, src_key_padding_mask=hides)
    report = octavo.convert(model, frozen="fp8")
    assert report.stored == ("0",)
    reason = "torch's fast path of nn.TransformerEncoderLayer reads it in high precision"
    assert report.not_stored == {f"1.layers.{i}.linear{j}": reason for i in (0, 1) for j in (1, 2)}
    assert f"  1.layers.[0-1].linear1 (2): its weight is not stored as codes: {reason}" in str(report).splitlines()
    with gradients():
        for options in ({}, {"src_key_padding_mask": hides}, {"mask": hides.new_zeros(5, 5)}):
            assert model[1](x, **options).isfinite().all()
        y = model[1](x, src_key_padding_mask=hides)
    assert (y - expected)[~hides].norm() < 0.1 * expected[~hides].norm()


def test_encoder_weights_inside_an_adapter_are_not_stored():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).requires_grad_(False)
    layer.linear2 = nn.Sequential(layer.linear2)  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="stored none of the 2 weights as codes: linear1: torch's fast path"):
        report = octavo.convert(layer, frozen="fp8")
    assert list(report.not_stored) == ["linear1", "linear2.0"]


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (nn.utils.spectral_norm, "weight"),
        (nn.utils.weight_norm, "weight"),
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), "weight"),
        (lambda layer: prune.l1_unstructured(layer, "bias", 0.5), "bias"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_weight_that_a_hook_computes_is_not_stored(compute, name):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)).requires_grad_(False)
    compute(model[0])
    compute(model[1].requires_grad_(True))
    model[0].requires_grad_(False)
    report = octavo.convert(model, frozen="fp8")
    assert report.stored == ("2",)
    reason = f"its {name} is computed at every call (torch.nn.utils' weight_norm, prune or similar)"
    assert report.not_stored == {"0": reason}
    assert model(torch.randn(4, 16)).isfinite().all()


def test_codes_with_one_scale_serve_both_gemms():
    """Stored codes do not change: decoding and casting them again for grad_input would round twice."""
    base = octavo.recipes.get("tensorwise")
    spec = base.grad_input.b
    assert spec is not None
    unlike = replace(base.grad_input, b=replace(spec, margin=3, format=octavo.E5M2))
    _, layer = _stored(replace(base, name="unlike", grad_input=unlike))
    stored = layer.stored_codes()
    assert stored is not None
    with recorded_products() as products:
        layer(torch.randn(6, 48, requires_grad=True)).sum().backward()
    for product, codes in zip(products, (stored, stored.t()), strict=True):
        assert_same_operand(product.b, codes)


@pytest.mark.long
def test_compiled_layer_computes_the_same():
    _, layer = _stored("tensorwise")
    x = torch.randn(4, 48, requires_grad=True)
    eager = layer(x)
    compiled = torch.compile(layer, fullgraph=True)(x)
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)
    compiled.sum().backward()
    assert x.grad is not None


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers the old way
class TestLora:
    """peft over a converted base, on a small Hugging Face Llama."""

    @staticmethod
    def _losses(*, stored: bool, steps: int = 30) -> tuple[list[float], nn.Module]:
        peft = pytest.importorskip("peft", reason="peft is not installed")
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        torch.manual_seed(0)
        config = tiny_hugging_face_config(vocab_size=64, max_position_embeddings=32)
        model = transformers.LlamaForCausalLM(config)
        if stored:
            model.requires_grad_(False)
            octavo.convert(model, "tensorwise", frozen="fp8")
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
        optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=2e-2)
        tokens = (torch.arange(16) * 3 % 8).expand(4, 16)
        losses = []
        for _ in range(steps):
            loss = adapted(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, adapted

    @pytest.mark.long
    def test_base_takes_one_byte_a_weight_and_the_loss_follows_the_unquantized_one(self):
        exact, _ = self._losses(stored=False)
        losses, model = self._losses(stored=True)
        assert losses[-1] < losses[0] - 0.5
        assert abs(losses[-1] - exact[-1]) < 0.1 * (exact[0] - exact[-1])
        layers = [module for module in model.modules() if isinstance(module, Linear)]
        stored = [layer for layer in layers if layer.codes_layout is not None]
        assert len(stored) == 14
        assert all(layer.weight_codes.nbytes == layer.weight_codes.numel() for layer in stored)
        adapters = [p for name, p in model.named_parameters() if "lora_" in name]
        assert adapters
        assert all(p.requires_grad and p.dtype is torch.float32 for p in adapters)

    def test_adapter_gradients_are_those_of_the_decoded_base(self):
        _, model = self._losses(stored=True, steps=2)
        tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(2))
        gradients = []
        for enabled in (True, False):
            model.zero_grad()
            with octavo.autocast(enabled=enabled):
                model(input_ids=tokens, labels=tokens).loss.backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        fp8, exact = gradients
        assert torch.nn.functional.cosine_similarity(fp8, exact, dim=0) > 0.99

    def test_adapters_merge_once_the_base_is_restored(self):
        _, model = self._losses(stored=True, steps=2)
        tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(2))
        with pytest.raises(ConfigError, match="such as by merging an adapter"):
            copy.deepcopy(model).merge_and_unload()  # type: ignore[operator]
        assert len(octavo.restore(model)) == 14
        with torch.no_grad():
            adapted = model(input_ids=tokens).logits
            merged = model.merge_and_unload()  # type: ignore[operator]
            torch.testing.assert_close(merged(input_ids=tokens).logits, adapted, rtol=1e-4, atol=1e-4)
        assert not [name for name, _ in merged.named_parameters() if "lora_" in name]
