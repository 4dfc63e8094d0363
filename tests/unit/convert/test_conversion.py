import copy
import io
import pickle

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import ConfigError
from tests.contract.gemm_oracle import recorded_products
from tests.recorded_state import end_step
from tests.unit.convert.tiny_language_model import TinyLanguageModel

OUT_PROJ = "NonDynamicallyQuantizableLinear"
PARAMETER = "stays as it is: a parameter of nn.MultiheadAttention, which multiplies by it without nn.Linear"


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16, bias=False), nn.ReLU(), nn.Linear(16, 4))


def _bytes(model: nn.Module) -> dict[str, bytes]:
    return {key: value.numpy().tobytes() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("recipe", octavo.recipes.names())
def test_state_dict_keys_and_bytes_are_unchanged_and_restore_is_exact(recipe):
    model = _mlp()
    before, order, x = _bytes(model), list(model.state_dict()), torch.randn(3, 8)
    parameters, exact = list(model.parameters()), model(x)
    report = octavo.convert(model, recipe)
    if recipe == "static":
        octavo.load_scaling_state(model, {key: torch.tensor(0.01) for key in octavo.scaling_state(model)})
    assert report.recipe == recipe
    assert report.converted == ("0", "2", "4")
    assert {type(model[index]) for index in (0, 2, 4)} == {octavo.nn.Linear}
    assert list(model.state_dict()) == order
    assert _bytes(model) == before
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    nn.Sequential(*_mlp()).load_state_dict(model.state_dict())
    model.load_state_dict(_mlp().state_dict())
    model.load_state_dict(_tensors(before, model))
    model(x).sum().backward()
    assert octavo.restore(model) == ("0", "2", "4")
    assert {type(model[index]) for index in (0, 2, 4)} == {nn.Linear}
    assert _bytes(model) == before
    assert torch.equal(model(x), exact)
    assert set(vars(model[0])) == set(vars(nn.Linear(1, 1))), "nothing of octavo is left behind"
    assert [name for name, _ in model.named_modules()] == [name for name, _ in _mlp().named_modules()]


def _tensors(raw: dict[str, bytes], model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        key: torch.frombuffer(bytearray(raw[key]), dtype=value.dtype).reshape(value.shape)
        for key, value in model.state_dict().items()
    }


def test_layers_keep_their_identity_hooks_and_optimizer():
    model, calls = _mlp(), []
    layer = model.get_submodule("0")
    assert isinstance(layer, nn.Linear)
    optimizer = torch.optim.AdamW(model.parameters())
    layer.register_forward_hook(lambda *_: calls.append("forward"))
    layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    octavo.convert(model)
    assert model[0] is layer
    before = layer.weight.detach().clone()
    model(torch.randn(4, 8, requires_grad=True)).square().sum().backward()
    optimizer.step()
    assert calls == ["forward", "backward"]
    assert not torch.equal(layer.weight, before)
    octavo.restore(model)
    model(torch.randn(4, 8))
    assert calls[2:] == ["forward"]


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_deepcopy_and_pickle_give_models_of_their_own(recipe):
    model, x = _mlp(), torch.randn(4, 8)
    octavo.convert(model, recipe)
    model(x).sum().backward()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin[0]) is octavo.nn.Linear
        assert twin[0].recipe == model[0].recipe
        state, same = octavo.scaling_state(model), octavo.scaling_state(twin)
        assert state.keys() == same.keys()
        assert all(torch.equal(state[key], same[key]) for key in state)
        assert torch.equal(twin(x), model(x))
        before = octavo.scaling_state(model)
        twin(x * 9).sum().backward()
        octavo.update_scales(twin)
        after = octavo.scaling_state(model)
        assert all(torch.equal(before[key], after[key]) for key in before), "they share state"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", octavo.recipes.names())
def test_a_converted_model_can_be_cast(recipe, dtype):
    model = _mlp()
    octavo.convert(model, recipe)
    if recipe == "static":
        octavo.load_scaling_state(model, {key: torch.tensor(0.01) for key in octavo.scaling_state(model)})
    model.to(dtype)
    y = model(torch.randn(4, 8, dtype=dtype))
    y.float().sum().backward()
    assert y.dtype is dtype
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {dtype}


def test_converting_again_takes_the_new_recipe():
    model = _mlp()
    octavo.convert(model, "delayed")
    assert octavo.scaling_state(model)
    octavo.convert(model, "rowwise")
    assert not octavo.scaling_state(model)
    with recorded_products() as products:
        model(torch.randn(4, 8))
    assert {product.a.scale.shape for product in products} == {(4, 1)}


def test_the_same_delayed_recipe_again_keeps_the_history():
    model = _mlp()
    octavo.convert(model, "delayed")
    model(torch.randn(4, 8)).sum().backward()
    end_step()
    state = octavo.scaling_state(model)
    for scale_updates in ("automatic", "manual"):
        octavo.convert(model, "delayed", scale_updates=scale_updates)
        if scale_updates == "manual":
            octavo.update_scales(model)
        kept = octavo.scaling_state(model)
        assert all(torch.equal(state[key], kept[key]) for key in state)
    octavo.convert(model, octavo.recipes.get("delayed", history_length=3))
    assert octavo.scaling_state(model)["0.input.steps"].item() == 0


@pytest.mark.parametrize(("scale_updates", "steps"), [("automatic", [1, 2, 3]), ("manual", [0, 0, 0])])
def test_manual_updates_leave_closing_to_the_loop(scale_updates, steps):
    model = _mlp()
    octavo.convert(model, "delayed", scale_updates=scale_updates)
    seen = []
    for _ in steps:
        model(torch.randn(4, 8)).sum().backward()
        end_step()
        seen.append(octavo.scaling_state(model)["0.input.steps"].item())
    assert seen == steps
    if scale_updates == "manual":
        octavo.update_scales(model)
        assert octavo.scaling_state(model)["0.input.steps"].item() == 1


def test_report_lists_both_recipes_of_a_model():
    model = _mlp()
    octavo.convert(model, "rowwise", layer_filter=lambda path, _: path == "0")
    report = octavo.convert(model, "tensorwise", skip=["0"])
    assert report.converted == ("2", "4")
    assert report.skipped == {"0": "skip pattern '0'; keeps its recipe rowwise"}
    assert report.shares.multiplications == 1.0
    assert report.shares.by_path == {}
    assert "  0: skip pattern '0'; keeps its recipe rowwise\n" in f"{report}\n"
    with recorded_products() as products:
        model(torch.randn(4, 8))
    assert [product.a.scale.ndim for product in products] == [2, 0, 0]
    octavo.convert(model, "bf16", skip=["0"])
    assert octavo.convert(model, "bf16", skip=["2", "4"]).shares.by_path.keys() == {"2", "4"}


def test_every_layer_that_stays_has_its_reason():
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(10, 8),
            "named": nn.Linear(8, 8),
            "filtered": nn.Linear(8, 8),
            "small": nn.Linear(2, 3),
            "lm_head": nn.Linear(8, 10),
            "parametrized": nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
            "lazy": nn.LazyLinear(8),
            "attention": nn.MultiheadAttention(8, 2),
            "taken": nn.Linear(8, 8),
        }
    )
    report = octavo.convert(
        model, skip=["nam*"], layer_filter=lambda path, layer: path != "filtered", min_weight_elements=7
    )
    assert report.converted == ("taken",)
    assert report.skipped == {
        "embed": "embedding: a look-up, not a product",
        "named": "skip pattern 'nam*'",
        "filtered": "filter",
        "small": "shape: 6 weights, fewer than 7",
        "lm_head": "head: by its name",
        "parametrized": "subclass ParametrizedLinear of nn.Linear may compute something else",
        "lazy": "subclass LazyLinear of nn.Linear may compute something else",
        "attention.out_proj": f"subclass {OUT_PROJ} of nn.Linear may compute something else",
    }
    assert report.parameters == {"attention.in_proj_weight": PARAMETER}
    lines = str(report).splitlines()
    assert lines[0] == "1 layer runs tensorwise, 8 stay as they are"
    assert lines[1].startswith("in FP8: ")
    assert lines[-1].startswith("more would run in FP8 with attention_projections=True (")
    assert lines[2:-1] == [
        f"  {path}: {reason} ({100 * parameters:.1f} % of the parameters, "
        f"{100 * products:.1f} % of the multiplications)"
        for path, reason in (report.skipped | report.parameters).items()
        for parameters, products in [report.shares.by_path[path]]
    ]


class Matmul(nn.Linear):
    """As transformers' FalconLinear writes a linear layer."""

    def forward(self, x):
        return x @ self.weight.T + self.bias


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class LowRank(nn.Linear):
    """Its correction is zero until it is trained, so that no output shows it."""

    def __init__(self, k, n):
        super().__init__(k, n)
        self.a, self.b = nn.Parameter(torch.randn(2, k)), nn.Parameter(torch.zeros(n, 2))

    def forward(self, x):
        return super().forward(x) + x @ self.a.T @ self.b.T


class DoubledZeros(Doubled):
    """Its weight and bias are zero, as the last layer of a residual branch may begin."""

    def __init__(self, k, n):
        super().__init__(k, n)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class Dropping(nn.Linear):
    """It leaves out half of its inputs in training."""

    def forward(self, x):
        return super().forward(nn.functional.dropout(x, training=self.training))


@pytest.mark.parametrize("frozen", [None, "fp8"])
def test_named_subclasses_are_converted_and_restored(frozen):
    torch.manual_seed(0)
    model, plain = nn.Sequential(Matmul(8, 16), Doubled(16, 4)), nn.Sequential(nn.Linear(8, 16))
    plain.load_state_dict({"0.weight": model[0].weight, "0.bias": model[0].bias})
    model[0].weight.requires_grad_(False)
    plain[0].weight.requires_grad_(False)
    left = vars(model[0]).keys() | {"training"}
    report = octavo.convert(model, frozen=frozen, linear_classes=[Matmul])
    octavo.convert(plain, frozen=frozen)
    assert report.converted == ("0",)
    assert report.skipped["1"].startswith("subclass Doubled of nn.Linear")
    x = torch.randn(3, 8)
    assert torch.equal(model[0](x), plain[0](x))
    assert octavo.convert(model, frozen=frozen).converted == ("0",), "it is octavo's layer now"
    saved = io.BytesIO()
    torch.save(copy.deepcopy(model), saved)
    saved.seek(0)
    copied = torch.load(saved, weights_only=False)
    for each in (model, copied):
        assert octavo.restore(each) == ("0",)
        assert type(each[0]) is Matmul
        assert vars(each[0]).keys() == left, "nothing of octavo is left behind"
        assert torch.allclose(each[0](x), plain[0](x), atol=0.2)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", [Doubled, DoubledZeros, Dropping, LowRank, Matmul, nn.Linear])
def test_a_class_that_is_no_plain_linear_layer_is_refused(kind, training):
    model = nn.Sequential(*(one(4, 4) for one in (Doubled, DoubledZeros, Dropping, LowRank, nn.Linear)))
    model.train(training)
    kept, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    with pytest.raises(
        ConfigError, match=rf"^linear_classes names .*{kind.__name__}.*(leave the class out|no layer)"
    ) as error:
        octavo.convert(model, linear_classes=[kind])
    assert "raised" not in str(error.value)
    assert [type(layer) for layer in model] == [Doubled, DoubledZeros, Dropping, LowRank, nn.Linear]
    assert all(layer.training is training for layer in model)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state), "a user's seed gives what it gave"


def test_tied_weights_stay_tied_through_training():
    model = TinyLanguageModel(tied=True)
    octavo.convert(model, "delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.arange(6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.get_submodule("lm_head").weight is model.embed.weight
    assert "lm_head.weight" in model.state_dict()


def test_a_module_used_twice_is_converted_once_and_sums_its_gradients():
    shared = nn.Linear(8, 8, bias=False)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    report = octavo.convert(model)
    assert report.converted == ("0",)
    x = torch.randn(4, 8)
    with recorded_products() as products:
        y = model(x)
        y.sum().backward()
    assert len(products) == 5, "two outputs, two grad_weights, one grad_input: x takes no gradient"
    assert shared.weight.grad is not None
    octavo.restore(model)
    assert type(shared) is nn.Linear


def test_the_model_itself_may_be_the_layer():
    layer = nn.Linear(8, 4)
    report = octavo.convert(layer)
    assert report.converted == ("",)
    assert type(layer) is octavo.nn.Linear
    assert octavo.restore(layer) == ("",)
    with pytest.warns(
        UserWarning, match=r"changed nothing.*\(the model itself\), the largest: shape: 4 weights, fewer"
    ):
        small = octavo.convert(nn.Linear(2, 2), min_weight_elements=5)
    shares = "66.7 % of the parameters, 100.0 % of the multiplications"
    assert str(small).splitlines()[2:] == [f"  (the model itself): shape: 4 weights, fewer than 5 ({shares})"]


def test_models_on_the_meta_device_convert():
    with torch.device("meta"):
        model = _mlp()
    octavo.convert(model, "delayed")
    assert {tensor.device.type for tensor in octavo.scaling_state(model).values()} == {"meta"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "fp8"}, r"there is no recipe 'fp8'; use one of"),
        ({"skip": "0"}, r"skip takes a list of patterns; write skip=\['0'\]"),
        ({"skip": ["0", "head"]}, r"pattern 'head' matches no layer; the first linear layers are 0, 2, 4"),
        ({"scale_updates": "sometimes"}, r"scale_updates must be 'automatic' or 'manual', not 'sometimes'"),
    ],
)
def test_bad_arguments_change_nothing(options, message):
    model = _mlp()
    with pytest.raises(ConfigError, match=message):
        octavo.convert(model, **options)
    assert type(model[0]) is nn.Linear


def test_a_model_without_linear_layers_is_no_error_but_a_warning():
    with pytest.warns(UserWarning, match=r"^convert changed nothing: .*\(0\.weight, the largest: .* kernel"):
        report = octavo.convert(nn.Sequential(nn.Conv1d(2, 2, 1), nn.ReLU()))
    assert (report.converted, report.skipped) == ((), {})
    assert octavo.restore(nn.ReLU()) == ()


@pytest.mark.filterwarnings("error")
def test_converting_to_high_precision_or_again_does_not_warn():
    octavo.convert(nn.ReLU(), "bf16")
    model = _mlp()
    for _ in range(2):
        assert octavo.convert(model).converted == ("0", "2", "4")


def test_restore_leaves_subclasses_alone():
    class Special(octavo.nn.Linear):
        pass

    layer = Special(4, 4)
    assert octavo.restore(nn.Sequential(layer)) == ()
    with pytest.warns(UserWarning, match="changed nothing"):
        report = octavo.convert(nn.Sequential(layer))
    assert report.skipped["0"].startswith("subclass Special of nn.Linear")


def test_a_filter_that_raises_changes_nothing():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))

    def broken(path, _layer):
        if path == "1":
            raise RuntimeError("broken filter")
        return True

    with pytest.raises(RuntimeError, match="broken filter"):
        octavo.convert(model, layer_filter=broken)
    assert [type(layer) for layer in model] == [torch.nn.Linear, torch.nn.Linear]


def test_a_model_without_memory_behind_it_still_runs():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, device="meta"))
    octavo.convert(model)
    assert model(torch.empty(2, 8, device="meta")).shape == (2, 8)


def test_the_projections_that_torchs_attention_has_as_parameters_are_in_the_report():
    model = nn.ModuleDict({"one": nn.MultiheadAttention(8, 2), "other": nn.MultiheadAttention(8, 2, kdim=4)})
    with pytest.warns(UserWarning, match="changed nothing"):
        report = octavo.convert(model)
    other = dict.fromkeys(
        (f"other.{name}_proj_weight" for name in "qkv"), f"{PARAMETER}, with sizes, biases or zeros of its own"
    )
    assert report.parameters == {"one.in_proj_weight": PARAMETER} | other
    report = octavo.convert(nn.TransformerEncoderLayer(8, 2, 12))
    total = sum(parameter.numel() for parameter in nn.TransformerEncoderLayer(8, 2, 12).parameters())
    products = 24 * 8 + 8 * 8 + 2 * 8 * 12  # in_proj, out_proj, linear1 and linear2
    share = f"({100 * 24 * 8 / total:.1f} % of the parameters, {100 * 24 * 8 / products:.1f} % of the multiplications)"
    assert f"  self_attn.in_proj_weight: {PARAMETER} {share}" in str(report).splitlines()
    assert report.gains == {"attention_projections=True": (24 * 8 + 8 * 8) / products}


@pytest.mark.parametrize("frozen", [None, "fp8"])
def test_projections_of_torchs_attention_run_in_fp8_and_are_restored(frozen):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2)
    model.requires_grad_(frozen is None)
    before, parameters, x = _bytes(model), list(model.parameters()), torch.randn(2, 5, 16)
    plain, exact = vars(model.layers[0].self_attn).keys() | set(), model(x)
    report = octavo.convert(model, attention_projections=True, frozen=frozen)
    assert report.shares.multiplications == 1
    assert not report.notes
    assert not report.gains
    if frozen is None:
        assert {id(parameter) for parameter in model.parameters()} == {id(parameter) for parameter in parameters}
        assert _bytes(model) == before
        assert list(model.state_dict()) == list(before)
        model.load_state_dict(_tensors(before, model))
        with recorded_products() as products:
            model(x).square().sum().backward()
        assert len(products) == 2 * 4 * 3 - 1, "four layers a block; x takes no gradient"
    assert torch.allclose(model.eval()(x), exact, atol=0.3)
    octavo.restore(model)
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention
    assert vars(model.layers[0].self_attn).keys() == plain
    if frozen is None:
        assert _bytes(model) == before
        assert torch.equal(model.train()(x), exact)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
def test_an_encoder_with_projections_in_fp8_takes_padding_in_its_default_setting(recipe):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    x, padding = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        exact = model(x, src_key_padding_mask=padding)[~padding]
    octavo.convert(model, recipe, attention_projections=True)
    for with_gradients in (False, True):
        with torch.set_grad_enabled(with_gradients):
            assert torch.allclose(model(x, src_key_padding_mask=padding)[~padding], exact, atol=0.3)


def test_a_refused_conversion_leaves_attention_as_it_was():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    for refused in ({"skip": ["nothing.*"]}, {"strict": 1.0, "skip": ["*.linear1"]}):
        with pytest.raises(ConfigError):
            octavo.convert(model, attention_projections=True, **refused)
        assert type(model.layers[1].self_attn) is nn.MultiheadAttention


def test_frozen_without_a_frozen_weight_warns():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    with pytest.warns(UserWarning, match=r"^frozen='fp8' stored none of the 1 weights as codes: .*requires_grad_"):
        report = octavo.convert(model, frozen="fp8")
    assert report.stored == ()
    model.requires_grad_(False)
    assert octavo.convert(model, frozen="fp8").stored == ("0",)


def test_frozen_with_a_recipe_without_casts_warns():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16)).requires_grad_(False)
    with pytest.warns(UserWarning, match="stored none of the 1 weights as codes: 0: bf16 casts no weight"):
        octavo.convert(model, "bf16", frozen="fp8")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("nested", [False, True])
def test_traced_model_is_refused(nested):
    model = torch.jit.trace(torch.nn.Sequential(torch.nn.Linear(16, 16)), torch.ones(1, 16))
    place = "block" if nested else r"\(the model itself\)"
    with pytest.raises(ConfigError, match=f"^{place} is a .* of torch.jit, .* convert the model first, then trace"):
        octavo.convert(torch.nn.ModuleDict({"block": model}) if nested else model)
