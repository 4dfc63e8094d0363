"""Which layers are converted: heads, first and last blocks, overrides, layers in several places."""

import re

import pytest
import torch
from torch import nn

import octavo
from octavo.convert import HEAD_NAMES
from octavo.errors import ConfigError
from tests.unit.convert.tiny_language_model import TinyLanguageModel


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16, bias=False), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.parametrize("name", HEAD_NAMES)
def test_head_is_recognised_by_name(name):
    report = octavo.convert(TinyLanguageModel(head=name))
    assert report.skipped[name] == "head: by its name"
    assert report.converted == ("up", "down")


def test_heads_in_a_list_are_recognised_and_parts_of_a_classifier_are_not():
    names = {"lm_heads": nn.ModuleList([nn.Linear(8, 30), nn.Linear(8, 30)]), "classifier": _mlp()}
    report = octavo.convert(nn.ModuleDict(names))
    assert report.skipped == dict.fromkeys(["lm_heads.0", "lm_heads.1"], "head: by its name")
    assert report.converted == ("classifier.0", "classifier.2", "classifier.4")


def test_head_is_recognised_by_shared_weight():
    model = TinyLanguageModel(tied=True, head="out")
    report = octavo.convert(model)
    assert report.skipped["out"] == "head: shares its weight with an embedding"
    assert model.get_submodule("out").weight is model.embed.weight


def test_head_is_recognised_by_shape_if_by_nothing_else():
    assert octavo.convert(TinyLanguageModel(head="out")).skipped["out"] == "head: has the shape of an embedding"


def test_a_position_table_as_large_as_a_projection_is_no_head():
    model = nn.ModuleDict({"positions": nn.Embedding(16, 16), "tokens": nn.Embedding(40, 16)})
    model.update({f"projection_{index}": nn.Linear(16, 16) for index in range(4)})
    model["lm_head"] = nn.Linear(16, 40)
    report = octavo.convert(model)
    assert len(report.converted) == 4
    assert list(report.skipped) == ["positions", "tokens", "lm_head"]


def test_convert_head_converts_tied_and_untied_heads():
    for tied in (False, True):
        model = TinyLanguageModel(tied=tied)
        report = octavo.convert(model, convert_head=True)
        assert report.converted == ("up", "down", "lm_head")
        model(torch.arange(6)).square().sum().backward()
        assert model.embed.weight.grad is not None
        if tied:
            assert model.get_submodule("lm_head").weight is model.embed.weight
            assert bool((model.embed.weight.grad[10:] != 0).any()), "the head's gradient reaches every row"


def _blocks(count: int = 4) -> nn.Module:
    class TwoLinears(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down_proj = nn.Linear(8, 16), nn.Linear(16, 8)

    class StackedModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inp = nn.Embedding(32, 8), nn.Sequential(nn.Linear(8, 8))
            self.layers = nn.ModuleList(TwoLinears() for _ in range(count))

    return StackedModel()


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
    assert "  layers.[1-2].down_proj (2): runs rowwise" in str(report).splitlines()
    assert "  layers.0.up: runs bf16" in str(report).splitlines()
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
def test_overrides_of_unconverted_layers_are_refused(options, pattern, reason):
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


def test_blocks_are_counted_by_place_not_by_name():
    model = nn.Sequential()
    for name in ("first", "second", "third"):
        model.add_module(name, nn.Linear(4, 4))
    octavo.convert(model, keep_first_blocks=1, keep_last_blocks=1)
    assert list(_recipes_of(model)) == ["second"]


def test_patterns_match_both_paths_of_a_shared_layer():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "c": nn.Linear(4, 4)})
    model["b"] = model["a"]
    assert octavo.convert(model, skip=["b"]).skipped == {"a": "skip pattern 'b'"}
    octavo.convert(model, overrides={"b": "rowwise"})
    assert _recipes_of(model) == {"a": "rowwise", "c": "tensorwise"}
