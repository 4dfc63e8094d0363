from dataclasses import replace

import pytest

import octavo
from octavo.checkpoints import FORMATS, load_quantized
from octavo.engines import get
from octavo.errors import ConfigError
from octavo.export.checkpoint_writer import save_quantized
from octavo.export.sources import ONNX, ConversionOptions, load_source
from octavo.models import Llama
from octavo.models.llama_folder import write_llama, write_tokenizer
from octavo.nn import Linear
from octavo.quantization.sensitivity.mix import Mix, save_mix
from tests.unit.checkpoints.folders import LAYER, ROW, dynamic
from tests.unit.quantization.tiny_models import LINEARS, language_model, windows


@pytest.fixture
def plain(tmp_path):
    model, folder = language_model(), tmp_path / "plain"
    folder.mkdir()
    assert isinstance(model.model, Llama)
    write_llama(folder, model.model)
    write_tokenizer(folder, model.tokenizer, context=model.context)
    return folder


def layers_of(source):
    return {path: layer for path, layer in source.language_model.model.named_modules() if isinstance(layer, Linear)}


@pytest.mark.parametrize("fmt", [name for name in FORMATS if name != "modelopt"])
def test_by_default_the_format_decides(plain, fmt):
    layers = layers_of(load_source(str(plain), fmt, ConversionOptions()))
    assert len(layers) == LINEARS
    assert {layer.recipe.name for layer in layers.values()} == {FORMATS[fmt].preset}
    assert all(layer.codes_layout is not None for layer in layers.values())


def test_a_graph_has_a_default_too(plain):
    layers = layers_of(load_source(str(plain), ONNX, ConversionOptions()))
    assert {layer.recipe.name for layer in layers.values()} == {"tensorwise"}


def test_a_recipe_and_what_to_skip(plain):
    layers = layers_of(load_source(str(plain), "octavo", ConversionOptions(recipe="mxfp8", skip=("*.down_proj",))))
    assert len(layers) == LINEARS - 2
    for recipe in ("rowwise", None):  # which is the format's
        two = load_source(str(plain), "compressed-tensors", ConversionOptions(recipe=recipe, power_of_two=True))
        scale = layers_of(two)[LAYER].weight_scale
        assert (scale.frexp().mantissa == 0.5).all()


def test_a_calibration(plain, tmp_path):
    from octavo.language_model import load_language_model

    model = load_language_model(plain)
    octavo.calibrate(model, [windows()], kv_cache=True).save(tmp_path / "scales")
    source = load_source(str(plain), "modelopt", ConversionOptions(calibration=tmp_path / "scales"))
    assert set(source.kv_scales) == {0, 1}
    assert source.calibration is not None
    assert layers_of(source)[LAYER].input_scale > 0
    with pytest.raises(ConfigError, match="a calibration defines its layers"):
        load_source(str(plain), "modelopt", ConversionOptions(calibration=tmp_path / "scales", skip=("*.k_proj",)))


def test_a_recipe_takes_the_scales_of_a_cache_from_a_calibration(plain, tmp_path):
    from octavo.language_model import load_language_model

    model = load_language_model(plain)
    octavo.calibrate(model, [windows()], kv_cache=True).save(tmp_path / "scales")
    octavo.calibrate(load_language_model(plain), [windows()]).save(tmp_path / "none")
    options = ConversionOptions(recipe="rowwise", calibration=tmp_path / "scales", skip=("*.k_proj",))
    source = load_source(str(plain), "compressed-tensors", options)
    assert set(source.kv_scales) == {0, 1}
    assert source.calibration is None
    assert {layer.recipe.name for layer in layers_of(source).values()} == {"rowwise"}
    assert len(layers_of(source)) == LINEARS - 2
    saved = save_quantized(source.language_model, tmp_path / "out", kv_scales=source.kv_scales, verify_folder=False)
    assert any(note.startswith("keys and values of 2 layers have scales") for note in saved.notes)
    assert set(load_quantized(tmp_path / "out").kv_scales) == {0, 1}
    for folder, fmt, lacks in (("none", "modelopt", "has no scales of keys"), ("scales", ONNX, "has no FP8 cache")):
        with pytest.raises(ConfigError, match=f"--recipe rowwise .*{lacks}.*leave --calibration out"):
            load_source(str(plain), fmt, ConversionOptions(recipe="rowwise", calibration=tmp_path / folder))


def test_a_mix(plain, tmp_path):
    save_mix(
        Mix(overrides={"*.down_proj": "weight_only", "*.k_proj": "bf16", "*_proj": "rowwise"}), tmp_path / "m.toml"
    )
    source = load_source(str(plain), "compressed-tensors", ConversionOptions(mix=tmp_path / "m.toml"))
    held = {path: layer.recipe.name for path, layer in layers_of(source).items() if layer.codes_layout is not None}
    assert held["model.layers.0.mlp.down_proj"] == "weight_only"
    assert held[LAYER] == "rowwise"
    assert "model.layers.0.self_attn.k_proj" not in held
    saved = save_quantized(source.language_model, tmp_path / "out", verify_folder=False)
    assert set(saved.left_out) == {"lm_head", *(f"model.layers.{i}.self_attn.k_proj" for i in (0, 1))}
    save_mix(Mix(overrides={"*_proj": "rowwise"}, tables={"model.embed_tokens": (0,)}), tmp_path / "t.toml")
    for fmt in ("compressed-tensors", "hf-fp8", "modelopt", "onnx"):
        with pytest.raises(ConfigError, match="which only the format octavo supports; leave its"):
            load_source(str(plain), fmt, ConversionOptions(mix=tmp_path / "t.toml"))


def test_a_mix_brings_its_tables_and_a_folder_too(plain, tmp_path):
    save_mix(Mix(overrides={"*_proj": "rowwise"}, tables={"model.embed_tokens": (0, 5)}), tmp_path / "t.toml")
    source = load_source(str(plain), "octavo", ConversionOptions(mix=tmp_path / "t.toml"))
    assert source.tables["model.embed_tokens"].bf16_rows.tolist() == [0, 5]
    model, tables = source.language_model, source.tables
    save_quantized(model, tmp_path / "m", format="octavo", tables=tables, verify_folder=False)
    again = load_source(str(tmp_path / "m"), "octavo", ConversionOptions())
    assert again.tables["model.embed_tokens"].bf16_rows.tolist() == [0, 5]


def test_a_folder_in_fp8(tmp_path):
    save_quantized(dynamic(ROW), tmp_path / "m", verify_folder=False)
    source = load_source(str(tmp_path / "m"), "octavo", ConversionOptions())
    assert layers_of(source)[LAYER].codes_layout is not None
    with pytest.raises(ConfigError, match="already in FP8"):
        load_source(str(tmp_path / "m"), "octavo", ConversionOptions(recipe="rowwise"))


def test_static_needs_scales(plain):
    with pytest.raises(ConfigError, match=r"modelopt has static inputs.*octavo calibrate"):
        load_source(str(plain), "modelopt", ConversionOptions())


def test_options_that_contradict_each_other(tmp_path):
    with pytest.raises(ConfigError, match="--recipe and --mix"):
        ConversionOptions(recipe="rowwise", mix=tmp_path)
    for layers in ({"skip": ("*.k_proj",)}, {"convert_head": True}):
        with pytest.raises(ConfigError, match="a mix defines its layers"):
            ConversionOptions(mix=tmp_path, **layers)
    for other in ({"calibration": tmp_path}, {"mix": tmp_path}):
        with pytest.raises(ConfigError, match="goes with a recipe"):
            ConversionOptions(power_of_two=True, **other)
    ConversionOptions(recipe="static", calibration=tmp_path)


def test_powers_of_two_are_no_choice_of_every_recipe(plain):
    with pytest.raises(ConfigError, match="goes with rowwise"):
        load_source(str(plain), "octavo", ConversionOptions(recipe="mxfp8", power_of_two=True))


def test_an_engine_with_its_head_in_high_precision():
    with pytest.raises(ConfigError, match="--head casts the head, which vllm-token keeps in high precision; leave"):
        ConversionOptions(engine=get("vllm-token"), convert_head=True)
    ConversionOptions(engine=replace(get("vllm-token"), head=True), convert_head=True)


def test_an_engine_takes_the_scales_of_a_cache_from_a_calibration(plain, tmp_path):
    from octavo.language_model import load_language_model

    octavo.calibrate(load_language_model(plain), [windows()]).save(tmp_path / "none")
    options = ConversionOptions(engine=get("vllm-token"), calibration=tmp_path / "none")
    says = "--for vllm-token casts inputs by scales of its own.*has no scales of keys and values; leave --calibration"
    with pytest.raises(ConfigError, match=f"{says} out, name an engine with static scales, or calibrate with"):
        load_source(str(plain), "compressed-tensors", options)


@pytest.mark.parametrize(
    ("engine", "command"),
    [
        (None, "modelopt has static inputs, .*: octavo calibrate MODEL --out SCALES, then --calibration SCALES"),
        ("vllm-tensor", "--for vllm-tensor has static inputs, .*: octavo calibrate MODEL --out SCALES, then"),
        ("compressed-tensors-static", "-static has .*: octavo calibrate MODEL --granularity row --out SCALES, then"),
    ],
)
def test_an_engine_of_static_scales_needs_a_calibration(plain, engine, command):
    request = ConversionOptions(engine=None if engine is None else get(engine))
    with pytest.raises(ConfigError, match=command):
        load_source(str(plain), "modelopt", request)
