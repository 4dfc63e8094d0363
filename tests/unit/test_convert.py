import copy
import pickle
import re

import pytest
import torch
from torch import nn

import octavo
from octavo.convert import HEAD_NAMES
from octavo.errors import ConfigError
from tests.contract.gemm_oracle import recorded_products
from tests.recorded_state import end_step


class TinyLanguageModel(nn.Module):
    """Embedding, two projections, a head; the head may share the embedding's weight."""

    def __init__(self, *, tied: bool = False, head: str = "lm_head") -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16, bias=False)
        self.head = head
        setattr(self, head, nn.Linear(16, 40, bias=False))
        if tied:
            self.get_submodule(head).weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.get_submodule(self.head)(self.down(self.up(self.embed(tokens)).relu()))
        return logits


PARAMETER = "stays as it is: a parameter of nn.MultiheadAttention, which multiplies by it, and no layer"


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


def test_two_recipes_in_one_model_and_a_report_that_says_so():
    model = _mlp()
    octavo.convert(model, "rowwise", layer_filter=lambda path, _: path == "0")
    report = octavo.convert(model, "tensorwise", skip=["0"])
    assert report.converted == ("2", "4")
    assert report.skipped == {"0": "skip pattern '0'; keeps its recipe rowwise"}
    with recorded_products() as products:
        model(torch.randn(4, 8))
    assert [product.a.scale.ndim for product in products] == [2, 0, 0]


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
        "attention.out_proj": "subclass NonDynamicallyQuantizableLinear of nn.Linear may compute something else",
    }
    lines = str(report).splitlines()
    assert lines[0] == "1 layers run tensorwise, 8 stay as they are"
    assert lines[1:] == [f"  {path}: {reason}" for path, reason in (report.skipped | report.parameters).items()]
    assert report.parameters == {"attention.in_proj_weight": PARAMETER}


@pytest.mark.parametrize("name", HEAD_NAMES)
def test_a_head_is_known_by_its_name(name):
    report = octavo.convert(TinyLanguageModel(head=name))
    assert report.skipped[name] == "head: by its name"
    assert report.converted == ("up", "down")


def test_a_head_is_known_by_its_weight():
    model = TinyLanguageModel(tied=True, head="out")
    report = octavo.convert(model)
    assert report.skipped["out"] == "head: shares its weight with an embedding"
    assert model.get_submodule("out").weight is model.embed.weight


def test_a_head_is_known_by_its_shape_where_nothing_better_is():
    assert octavo.convert(TinyLanguageModel(head="out")).skipped["out"] == "head: has the shape of an embedding"


def test_a_position_table_as_large_as_a_projection_is_no_head():
    model = nn.ModuleDict({"positions": nn.Embedding(16, 16), "tokens": nn.Embedding(40, 16)})
    model.update({f"projection_{index}": nn.Linear(16, 16) for index in range(4)})
    model["lm_head"] = nn.Linear(16, 40)
    report = octavo.convert(model)
    assert len(report.converted) == 4
    assert list(report.skipped) == ["positions", "tokens", "lm_head"]


def test_convert_head_takes_it_along_tied_or_not():
    for tied in (False, True):
        model = TinyLanguageModel(tied=tied)
        report = octavo.convert(model, convert_head=True)
        assert report.converted == ("up", "down", "lm_head")
        model(torch.arange(6)).square().sum().backward()
        assert model.embed.weight.grad is not None
        if tied:
            assert model.get_submodule("lm_head").weight is model.embed.weight
            assert bool((model.embed.weight.grad[10:] != 0).any()), "the head's gradient reaches every row"


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
    small = octavo.convert(nn.Linear(2, 2), min_weight_elements=5)
    assert "(the model itself): shape: 4 weights, fewer than 5" in str(small)


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


def test_a_model_without_linear_layers_is_no_error():
    report = octavo.convert(nn.Sequential(nn.Conv1d(2, 2, 1), nn.ReLU()))
    assert (report.converted, report.skipped) == ((), {})
    assert octavo.restore(nn.ReLU()) == ()


def test_restore_leaves_subclasses_alone():
    class Special(octavo.nn.Linear):
        pass

    layer = Special(4, 4)
    assert octavo.restore(nn.Sequential(layer)) == ()
    assert octavo.convert(nn.Sequential(layer)).skipped["0"].startswith("subclass Special of nn.Linear")


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


def _blocks(count: int = 4) -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down_proj = nn.Linear(8, 16), nn.Linear(16, 8)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inp = nn.Embedding(32, 8), nn.Sequential(nn.Linear(8, 8))
            self.layers = nn.ModuleList(Block() for _ in range(count))

    return Model()


def _recipes_of(model: nn.Module) -> dict[str, str]:
    return {path: layer.recipe.name for path, layer in model.named_modules() if isinstance(layer, octavo.nn.Linear)}


def test_overrides_give_layers_their_own_recipe_first_match_first():
    model = _blocks(3)
    report = octavo.convert(model, "tensorwise", overrides={"layers.0.*": "bf16", "*.down_proj": "rowwise"})
    assert _recipes_of(model) == {
        "inp.0": "tensorwise",
        "layers.0.up": "bf16",
        "layers.0.down_proj": "bf16",
        "layers.1.up": "tensorwise",
        "layers.1.down_proj": "rowwise",
        "layers.2.up": "tensorwise",
        "layers.2.down_proj": "rowwise",
    }
    assert report.overridden == {
        "layers.0.up": "bf16",
        "layers.0.down_proj": "bf16",
        "layers.1.down_proj": "rowwise",
        "layers.2.down_proj": "rowwise",
    }
    assert "3 layers run tensorwise" in str(report)
    assert "  layers.1.down_proj: runs rowwise" in str(report)
    own = octavo.recipes.get("delayed", history_length=3)
    octavo.convert(model, "bf16", overrides={"inp.*": own})
    assert _recipes_of(model)["inp.0"] == "delayed"
    assert octavo.scaling_state(model)["inp.0.input.amax_history"].shape == (3,)


def test_overrides_that_match_nothing_or_name_nothing_change_nothing():
    model = _blocks(1)
    for overrides, message in (
        ({"*.gate": "bf16"}, r"pattern '\*\.gate' matches no layer; the first linear layers are inp\.0, layers\.0\.up"),
        ({"*": "fp4"}, "there is no recipe 'fp4'"),
    ):
        with pytest.raises(ConfigError, match=message):
            octavo.convert(model, overrides=overrides)
        assert not _recipes_of(model)


@pytest.mark.parametrize(
    ("options", "pattern", "reason"),
    [
        ({}, "lm_head", "lm_head: head: by its name"),
        ({"skip": ["up"]}, "up", "up: skip pattern 'up'"),
        ({}, "embed", "embed: embedding: a look-up, not a product"),
        ({"layer_filter": lambda path, _: path != "down"}, "do*", "down: filter"),
    ],
)
def test_overrides_of_layers_that_stay_anyway_are_refused(options, pattern, reason):
    model = TinyLanguageModel()
    with pytest.raises(ConfigError, match=re.escape(f"override {pattern!r} has no effect") + rf".*\({reason}\)"):
        octavo.convert(model, overrides={pattern: "rowwise"}, **options)
    assert not _recipes_of(model)
    blocks = _blocks(2)
    with pytest.raises(ConfigError, match=r"layers\.0\.up: block 0 of 2 is kept"):
        octavo.convert(blocks, keep_first_blocks=1, overrides={"layers.0.*": "rowwise"})
    assert octavo.convert(blocks, keep_first_blocks=1, overrides={"layers.*": "rowwise"}).overridden


def test_overrides_must_be_a_mapping():
    with pytest.raises(ConfigError, match=r"overrides takes a mapping .* not \['0'\]"):
        octavo.convert(_mlp(), overrides=["0"])  # type: ignore[arg-type]


def test_first_and_last_blocks_are_kept():
    model = _blocks(4)
    report = octavo.convert(model, keep_first_blocks=1, keep_last_blocks=2)
    assert set(_recipes_of(model)) == {"inp.0", "layers.1.up", "layers.1.down_proj"}
    assert report.skipped["layers.0.up"] == "block 0 of 4 is kept"
    assert report.skipped["layers.3.down_proj"] == "block 3 of 4 is kept"
    with pytest.raises(ConfigError, match=r"keep_first_blocks=3 and .*=2 .* more together than the 4 blocks of layers"):
        octavo.convert(model, keep_first_blocks=3, keep_last_blocks=2)
    with pytest.raises(ConfigError, match="this model has no ModuleList or Sequential"):
        octavo.convert(nn.Linear(2, 2), keep_last_blocks=1)


@pytest.mark.parametrize("name", ["keep_first_blocks", "keep_last_blocks"])
@pytest.mark.parametrize("count", [-1, 1.5, "1", True, None])
def test_blocks_are_counted_in_whole_numbers(name, count):
    model = _blocks(4)
    with pytest.raises(ConfigError, match=f"{name} must be a whole number of at least 0, not {count!r}"):
        octavo.convert(model, **{name: count})
    assert not _recipes_of(model)


def test_an_encoder_decoder_keeps_the_ends_of_both():
    model = nn.Transformer(8, 2, num_encoder_layers=3, num_decoder_layers=2, dim_feedforward=12, batch_first=True)
    octavo.convert(model, keep_first_blocks=1)
    assert {path.rpartition(".")[0] for path in _recipes_of(model)} == {
        "encoder.layers.1",
        "encoder.layers.2",
        "decoder.layers.1",
    }
    with pytest.raises(ConfigError, match=r"more together than the 2 blocks of decoder\.layers"):
        octavo.convert(model, keep_first_blocks=3)


def test_the_projections_that_torchs_attention_has_as_parameters_are_in_the_report():
    model = nn.ModuleDict({"one": nn.MultiheadAttention(8, 2), "other": nn.MultiheadAttention(8, 2, kdim=4)})
    assert octavo.convert(model).parameters == dict.fromkeys(
        ("one.in_proj_weight", "other.q_proj_weight", "other.k_proj_weight", "other.v_proj_weight"), PARAMETER
    )
    report = octavo.convert(nn.TransformerEncoderLayer(8, 2, 12))
    assert f"  self_attn.in_proj_weight: {PARAMETER}" in str(report).splitlines()


def test_blocks_are_counted_by_place_not_by_name():
    model = nn.Sequential()
    for name in ("first", "second", "third"):
        model.add_module(name, nn.Linear(4, 4))
    octavo.convert(model, keep_first_blocks=1, keep_last_blocks=1)
    assert list(_recipes_of(model)) == ["second"]


def test_a_layer_in_two_places_answers_to_both_paths():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "c": nn.Linear(4, 4)})
    model["b"] = model["a"]
    assert octavo.convert(model, skip=["b"]).skipped == {"a": "skip pattern 'b'"}
    octavo.convert(model, overrides={"b": "rowwise"})
    assert _recipes_of(model) == {"a": "rowwise", "c": "tensorwise"}
