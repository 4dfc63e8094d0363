"""A mix as a file, and applied."""

import pytest
import torch

import octavo
from octavo.errors import ConfigError
from octavo.nn import Linear
from octavo.quantization import Mix, load_mix, save_mix
from tests.unit.quantization.sensitivity.small_models import small_llama

MIX = Mix(
    overrides={"*.down_proj": "bf16", "model.layers.0.*": "weight_only", "*_proj": "tensorwise"},
    tables={"model.embed_tokens": (0, 3, 17)},
)


def test_a_file_is_the_mix_again(tmp_path):
    path = tmp_path / "mix.toml"
    save_mix(MIX, path, comment="found on Monday\nby search")
    assert load_mix(path) == MIX
    assert list(load_mix(path).overrides) == list(MIX.overrides), "the first pattern that matches counts"
    assert path.read_text().startswith("# found on Monday\n# by search\n\n")
    save_mix(Mix(overrides={"*": "rowwise"}), path)
    assert load_mix(path) == Mix(overrides={"*": "rowwise"})


def test_its_overrides_are_those_of_convert():
    model, other = small_llama(), small_llama()
    MIX.apply(model)
    octavo.convert(other, "bf16", overrides=dict(MIX.overrides))
    ran = {path: m.recipe.name for path, m in model.named_modules() if isinstance(m, Linear)}
    assert ran.pop("lm_head") == "bf16"
    assert ran == {path: m.recipe.name for path, m in other.named_modules() if isinstance(m, Linear)}
    assert set(ran.values()) == {"bf16", "weight_only", "tensorwise"}


def test_mix_of_another_model_is_refused_and_the_model_unchanged():
    model = small_llama()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for mix, said in (
        (Mix(overrides={"model.layers.7.*": "rowwise"}), "matches no layer"),
        (Mix(overrides={}, tables={"model.wte": ()}), "this model has no embedding 'model.wte'"),
        (Mix(overrides={}, tables={"model.embed_tokens": (64,)}), "has 64 rows, but the mix names row 64"),
    ):
        with pytest.raises(ConfigError, match=said):
            mix.apply(model)
    assert not any(isinstance(module, Linear) for module in model.modules())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


GOOD = 'format = "octavo mix"\nversion = 1\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("format = ", "is not TOML"),
        ('format = "another"\nversion = 1', "is not a mix of version 1"),
        ('format = "octavo mix"\nversion = 2', "is not a mix of version 1"),
        (GOOD + "layers = 3", "a mix has no key 'layers'"),
        (GOOD + "overrides = 3", "overrides of a mix must be a table with paths as keys, not 3"),
        (GOOD + '[overrides]\n"*" = "fp4"', r"the recipe of '\*' in a mix must be one of tensorwise, .*, not 'fp4'"),
        (GOOD + '[overrides]\n"*" = ["bf16"]', r"the recipe of '\*' in a mix must be one of"),
        (GOOD + "[tables]\nwte = 1", "table 'wte' of a mix must have exactly one key, bf16_rows"),
        (GOOD + "[tables.wte]\nbf16_rows = [-1]", "bf16_rows of table 'wte' must be whole numbers of at least 0"),
        (GOOD + "[tables.wte]\nbf16_rows = [true]", "bf16_rows of table 'wte' must be whole numbers of at least 0"),
    ],
)
def test_files_that_are_no_mix(tmp_path, text, said):
    path = tmp_path / "mix.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_mix(path)


def test_missing_mix_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no mix"):
        load_mix(tmp_path / "mix.toml")
