"""What is written, loaded by other software: one small graph with every kind of cast, and a decoder with a cache."""

import builtins
import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import octavo
from octavo.errors import CheckpointError, ConfigError
from octavo.export.lockstep import relative_error
from octavo.language_model import LanguageModel
from octavo.models import Llama
from octavo.onnx import OnnxOptions, export_onnx
from octavo.onnx import export as module_under_test
from octavo.onnx.graph import write_graph
from tests.tiny_llama import tiny_llama_config
from tests.unit.quantization.tiny_models import HEAD_DIM, HEADS, VOCABULARY, language_model, windows

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

K, WIDTH, N = 24, 40, 6
LAYERS = {"0": "tensorwise", "2": "rowwise", "4": "static", "6": "weight_only", "8": "bf16"}


def mlp() -> nn.Sequential:
    """Five layers with biases, each with another cast."""
    torch.manual_seed(0)
    sizes = [K, WIDTH, WIDTH, WIDTH, WIDTH, N]
    parts: list[nn.Module] = []
    for wide, narrow in pairwise(sizes):
        parts += [nn.Linear(wide, narrow), nn.ReLU()]
    model = nn.Sequential(*parts[:-1]).eval()
    octavo.convert(model, "tensorwise", overrides=LAYERS)
    model.get_submodule("4").get_buffer("input_scale").copy_(torch.tensor(0.0031))
    with torch.no_grad():
        model.get_submodule("2").get_parameter("weight")[5] = 0
    return model


def rewritten(monkeypatch, change):
    """The next graph is changed by ``change(ModelProto)`` after it is written."""
    real = write_graph

    def write(graph, path, **options):
        real(graph, path, **options)
        loaded = onnx.load(path)
        change(loaded)
        onnx.save(loaded, path)

    monkeypatch.setattr(module_under_test, "write_graph", write)


def session(path):
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    model = mlp()
    folder = tmp_path_factory.mktemp("mlp") / "onnx"
    return model, export_onnx(model, folder, inputs=(torch.randn(2, 5, K),))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    shape = tiny_llama_config(
        vocab_size=VOCABULARY,
        hidden_size=4 * HEAD_DIM,
        intermediate_size=96,
        num_layers=1,
        num_kv_heads=HEADS,
        tie_embeddings=True,
    )
    model = Llama(shape, seed=3).eval()
    octavo.convert(model, "rowwise")
    source = LanguageModel(model=model, tokenizer=language_model().tokenizer, context=64, source="a test")
    options = OnnxOptions(opset=23, dtype="fp16", kv_cache=True, attention=windows(), tensorrt=True, external_data=True)
    return source, export_onnx(source, tmp_path_factory.mktemp("decoder") / "onnx", options=options)


@pytest.mark.long
def test_report_has_a_note_for_every_layer(exported):
    _, report = exported
    notes = {note.path: (note.input, note.weight) for note in report.layers}
    assert notes == {
        "0": ("dynamic", "per tensor"),
        "2": ("dynamic per row", "per channel"),
        "4": ("static", "per tensor"),
        "6": ("high precision", "per channel"),
        "8": ("high precision", "high precision"),
    }
    assert report.fp8_layers == 3
    assert "8: input high precision, weight high precision: recipe bf16" in str(report)


@pytest.mark.long
def test_both_engines_give_octavos_codes(exported):
    _, report = exported
    assert len(report.engines) == 2
    for each in report.engines:
        assert (each.casts, each.wrong_codes, each.wrong_scales) == (3, 0, 0)
        assert each.codes == 3 * 6 * (K + 2 * WIDTH)  # one more of the batch and of the sequence
        assert each.error < 1e-6
    assert report.layer_error < 1e-6
    assert report.model_error < 1e-6


@pytest.mark.parametrize("shape", [(1, 1), (7, 3)])
@torch.no_grad()
def test_exported_graph_runs_at_other_shapes(exported, shape):
    model, report = exported
    x = torch.randn(*shape, K)
    (y,) = session(report.folder / "model.onnx").run(None, {"input": x.numpy()})
    assert relative_error(torch.from_numpy(y), model(x)) < 1e-6


@torch.no_grad()
def test_exported_graph_of_zero_input(exported):
    model, report = exported
    x = torch.zeros(2, 3, K)
    (y,) = session(report.folder / "model.onnx").run(None, {"input": x.numpy()})
    assert relative_error(torch.from_numpy(y), model(x)) < 1e-6


def test_the_weights_are_the_layers_codes(exported):
    model, report = exported
    graph = onnx.load(report.folder / "model.onnx").graph
    codes = [
        each for each in graph.initializer if each.data_type == onnx.TensorProto.FLOAT8E4M3FN and len(each.dims) == 2
    ]
    wanted = {
        path: octavo.quantize(model[int(path)].weight, octavo.E4M3, granularity=granularity)
        for path, granularity in (("0", octavo.PerTensor()), ("4", octavo.PerTensor()), ("6", octavo.PerRow()))
    }
    for path, own in wanted.items():
        found = next(each for each in codes if each.name == f"{path}.codes")
        assert found.raw_data == own.data.t().contiguous().view(torch.uint8).numpy().tobytes()
        scale = next(each for each in graph.initializer if each.name == f"{path}.scale")
        assert np.array_equal(onnx.numpy_helper.to_array(scale), own.scale.flatten().squeeze().numpy())
    assert not any(node.op_type == "Cast" for node in graph.node)
    assert all(not node.metadata_props and not node.doc_string for node in graph.node)


def test_the_report_is_written(exported):
    _, report = exported
    record = json.loads((report.folder / "report.json").read_text())
    assert record["fp8_layers"] == 3
    assert record["files"] == ["model.onnx", "report.json", "octavo.sha256"]
    assert 0 < record["bytes"]["fp8_share"] < 1


@pytest.mark.long
def test_decoder_with_cache_and_fp8_attention(decoder):
    _, report = decoder
    assert report.files == (
        "benchmark.sh", "build.sh", "build_engine.py", "model.onnx", "model.onnx.data", "tokenizer.json", "report.json",
        "octavo.sha256",
    )  # fmt: skip
    assert all((report.folder / name).is_file() for name in report.files)
    assert (report.folder / "model.onnx").stat().st_size < (report.folder / "model.onnx.data").stat().st_size
    assert report.fp8_layers == 7
    # A layer's q, k and v share a cast, gate and up too; attention has four.
    assert all(each.casts == 4 + 4 and each.passed for each in report.engines)
    assert report.build.skipped or report.build.fp8_products == 7 + 2


@pytest.mark.long
@torch.no_grad()
def test_exported_cache_continues_a_sequence(decoder):
    source, report = decoder
    run = session(report.folder / "model.onnx")
    names = [each.name for each in run.get_inputs()]
    outputs = [each.name for each in run.get_outputs()]
    assert [name.replace("past_key_values", "present") for name in names[1:]] == outputs[1:]
    assert run.get_inputs()[1].shape == ["batch", HEADS, "past", HEAD_DIM]

    tokens = windows()
    past = [np.zeros((3, HEADS, 0, HEAD_DIM), np.float16)] * len(names[1:])
    pieces = []
    for start, end in ((0, 10), (10, 11), (11, 24)):
        feeds = {"input_ids": tokens[:, start:end].numpy(), **dict(zip(names[1:], past, strict=True))}
        logits, *past = run.run(None, feeds)
        pieces.append(torch.from_numpy(logits))
    assert relative_error(torch.cat(pieces, 1), source.logits(tokens)) < 0.15  # attention is FP8 too


@pytest.mark.long
def test_sixteen_bits_without_an_engine(tmp_path):
    """bfloat16 runs in ONNX's reference alone."""
    model = nn.Sequential(nn.Linear(K, N))
    octavo.convert(model, "tensorwise")
    report = export_onnx(model, tmp_path / "a", inputs=(torch.randn(2, K),), options=OnnxOptions(dtype="bf16"))
    skipped, reference = report.engines
    assert skipped.skipped == "it has no bfloat16 on a CPU"
    assert reference.passed
    assert (reference.casts, reference.wrong_codes, reference.wrong_scales) == (1, 0, 0)


@pytest.mark.long
def test_wrong_graph_leaves_no_folder(tmp_path, monkeypatch):
    def wrong(loaded):
        scale = next(each for each in loaded.graph.initializer if each.name.endswith(".scale"))
        scale.CopyFrom(onnx.numpy_helper.from_array(2 * onnx.numpy_helper.to_array(scale), scale.name))

    rewritten(monkeypatch, wrong)
    model = nn.Sequential(nn.Linear(K, N))
    octavo.convert(model, "tensorwise")
    with pytest.raises(CheckpointError, match=r"gives other results than torch: onnxruntime .* same codes 9"):
        export_onnx(model, tmp_path / "a", inputs=(torch.randn(2, K),))
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_one_folded_weight_leaves_no_folder(tmp_path, monkeypatch):
    model = mlp()
    folded_back = model.get_parameter("2.weight")
    weight = octavo.quantize(folded_back, octavo.E4M3, granularity=octavo.PerRow()).dequantize()

    def folded(loaded):
        node = next(each for each in loaded.graph.node if each.input[0] == "2.codes")
        loaded.graph.initializer.append(onnx.numpy_helper.from_array(weight.t().contiguous().numpy(), node.output[0]))
        loaded.graph.node.remove(node)

    rewritten(monkeypatch, folded)
    with pytest.raises(CheckpointError, match=r"violates 1 rules.* no product reads the codes of layer '2'"):
        export_onnx(model, tmp_path / "a", inputs=(torch.randn(2, 5, K),))
    assert not list(tmp_path.iterdir())


def two_static_layers():
    model = nn.Sequential(nn.Linear(K, WIDTH), nn.ReLU(), nn.Linear(WIDTH, N)).eval()
    octavo.convert(model, "static")
    for layer, scale in (("0", 0.0031), ("2", 0.0057)):
        model.get_submodule(layer).get_buffer("input_scale").copy_(torch.tensor(scale))
    return model


@pytest.mark.long
def test_swapped_encode_scales_are_detected(tmp_path, monkeypatch):
    def swap(loaded):
        first, second = (each for each in loaded.graph.initializer if each.name.endswith("encode_scale"))
        first.raw_data, second.raw_data = second.raw_data, first.raw_data

    rewritten(monkeypatch, swap)
    with pytest.raises(CheckpointError, match=r"0 of \d+ codes and 2 scales are not octavo's"):
        export_onnx(two_static_layers(), tmp_path / "a", inputs=(torch.randn(2, K),))


@pytest.mark.long
def test_missing_cast_is_detected(tmp_path, monkeypatch):
    def drop(loaded):
        nodes = loaded.graph.node
        quantize = next(each for each in nodes if each.op_type == "QuantizeLinear")
        decode = next(each for each in nodes if quantize.output[0] in each.input)
        product = next(each for each in nodes if decode.output[0] in each.input)
        product.input[0] = loaded.graph.input[0].name
        nodes.remove(quantize)
        nodes.remove(decode)

    rewritten(monkeypatch, drop)
    with pytest.raises(CheckpointError, match="the graph has 1 casts to FP8, the model 2"):
        export_onnx(two_static_layers(), tmp_path / "a", inputs=(torch.randn(2, K),))


def test_nonempty_folder_is_refused(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(ConfigError, match="not empty"):
        export_onnx(mlp(), tmp_path, inputs=(torch.randn(2, K),))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_missing_package_is_refused(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name == "onnxscript":
            raise ImportError(name=name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"needs onnxscript, which is not installed; pip install 'octavo\[export\]'"):
        export_onnx(mlp(), tmp_path / "a", inputs=(torch.randn(2, K),))


def test_invalid_options_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="opset must be one of 21, 23, not 22"):
        OnnxOptions(opset=22)
    with pytest.raises(ConfigError, match="dtype must be one of fp32, fp16, bf16, not 'fp8'"):
        OnnxOptions(dtype="fp8")
    with pytest.raises(ConfigError, match="needs the tensors of one call"):
        export_onnx(mlp(), tmp_path / "a")
    with pytest.raises(ConfigError, match="need a LanguageModel"):
        export_onnx(mlp(), tmp_path / "a", options=OnnxOptions(kv_cache=True))
    with pytest.raises(ConfigError, match="inputs of a LanguageModel are token ids"):
        export_onnx(language_model(), tmp_path / "a", inputs=(torch.zeros(2, 3, dtype=torch.long),))
    with pytest.raises(ConfigError, match="set tensorrt, or leave them out"):
        OnnxOptions(max_batch=4)
    with pytest.raises(ConfigError, match="max_length must be a whole number of at least 1, not 0"):
        OnnxOptions(max_length=0, tensorrt=True)
    with pytest.raises(ConfigError, match="no layer of this model is in FP8"):
        export_onnx(nn.Sequential(nn.Linear(2, 2)), tmp_path / "a", inputs=(torch.zeros(1, 2),))
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_model_in_training_mode_is_exported_for_evaluation_and_unchanged(tmp_path):
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 8)).train()
    octavo.convert(model, "tensorwise")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    export_onnx(model, tmp_path / "m", inputs=(torch.randn(4, 16),))
    assert all(module.training for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class SameInputTwice(nn.Module):
    """Queries, keys and values, each from a norm of its own call: three casts in torch, one in the graph."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(K)
        self.q, self.k, self.v = (nn.Linear(K, N) for _ in range(3))

    def forward(self, x):
        return self.q(self.norm(x)).softmax(-1) * self.k(self.norm(x)) + self.v(self.norm(x))


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "static"])
def test_casts_that_the_optimiser_merges_are_counted_as_one(tmp_path, recipe):
    model = SameInputTwice()
    octavo.convert(model, recipe)
    if recipe == "static":
        octavo.load_scaling_state(model, dict.fromkeys(octavo.scaling_state(model), torch.tensor(0.0031)))
    report = export_onnx(model, tmp_path / "a", inputs=(torch.randn(2, 5, K),))
    assert [each.casts for each in report.engines] == [1, 1]
    assert all(each.passed and each.wrong_scales == 0 for each in report.engines)


@pytest.mark.long
def test_of_merged_casts_each_layers_scale_is_checked(tmp_path, monkeypatch):
    """A graph in which a cast of another scale is merged with its neighbour's."""
    model = SameInputTwice()
    octavo.convert(model, "static")
    for layer, scale in ((model.q, 0.0031), (model.k, 0.0062), (model.v, 0.0031)):
        layer.get_buffer("input_scale").copy_(torch.tensor(scale))

    def merge(loaded):
        for each in loaded.graph.initializer:
            if each.name.endswith("encode_scale"):
                each.CopyFrom(onnx.numpy_helper.from_array(np.float32(1 / 0.0031), each.name))

    rewritten(monkeypatch, merge)
    with pytest.raises(CheckpointError, match=r"[1-9]\d* scales are not octavo's"):
        export_onnx(model, tmp_path / "a", inputs=(torch.randn(2, 5, K),))


class Convolutions(nn.Module):
    """Images [B, 3, H, W]; its linear layers see features."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.second = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.wide, self.head = nn.Linear(12 * 2 * 3, 20), nn.Linear(20, N)

    def forward(self, image):
        features = self.second(self.first(image).relu()).relu()
        return self.head(self.wide(features.flatten(1)).relu())


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@torch.no_grad()
def test_a_convolutional_net(tmp_path, dtype):
    model = Convolutions().eval()
    octavo.convert(model, "tensorwise")
    options = OnnxOptions(dtype={dtype: name for name, dtype in module_under_test.DTYPES.items()}[dtype])
    report = export_onnx(model, tmp_path / "a", inputs=(torch.randn(2, 3, 8, 12),), options=options)
    assert report.fp8_layers == 2
    run, images = session(report.folder / "model.onnx"), torch.randn(5, 3, 8, 12)
    assert run.get_inputs()[0].shape == ["batch", 3, 8, 12]
    (y,) = run.run(None, {"image": images.to(dtype).numpy()})
    assert relative_error(torch.from_numpy(y), model(images)) < (1e-5 if dtype is torch.float32 else 0.1)


@pytest.mark.long
def test_operator_missing_from_the_opset_is_refused(tmp_path):
    model = Convolutions().eval()
    octavo.convert(model, "tensorwise")
    with pytest.raises(CheckpointError, match=r"not valid ONNX, opset 21, bf16: .*Conv"):
        export_onnx(
            model, tmp_path / "a", inputs=(torch.randn(2, 3, 8, 12),), options=OnnxOptions(dtype="bf16", opset=21)
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_static_channels_are_set_with_varying(tmp_path):
    """[B, C, L] looks like [B, T, K]: torch refuses, and the sentence says what to do."""
    model = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 7, N))
    octavo.convert(model, "tensorwise")
    inputs = (torch.randn(2, 4, 7),)
    with pytest.raises(ConfigError, match=r"1: 'sequence'.*set a module's dynamic dimensions with varying"):
        export_onnx(model, tmp_path / "a", inputs=inputs)
    assert export_onnx(model, tmp_path / "a", inputs=inputs, varying=({0: "batch"},)).fp8_layers == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("inner", "outer", "held"),
    [(torch.bfloat16, "fp32", True), (torch.float16, "fp32", False), (torch.bfloat16, "fp16", False)],
)
def test_a_module_in_sixteen_bits_is_compared_by_what_it_computes_in(tmp_path, inner, outer, held):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(inner)
    octavo.calibrate(model, [torch.randn(8, 64).to(inner)]).apply(model, hold_weights=held)
    inputs = (torch.randn(2, 64).to(inner),)
    report = export_onnx(model, tmp_path / "a", inputs=inputs, options=OnnxOptions(dtype=outer))
    assert report.compared_in == str(inner).removeprefix("torch.")
    assert report.layer_error > 1e-5  # FP32's bar
    assert report.fp8_layers == 2


@pytest.mark.long
def test_fp32_module_is_compared_with_fp32_tolerance(exported, tmp_path):
    assert exported[1].compared_in == "float32"
    model = nn.Sequential(nn.Linear(64, 8))
    octavo.calibrate(model, [torch.randn(8, 64)]).apply(model, hold_weights=True)
    assert model[0].weight_codes.dtype == torch.float8_e4m3fn  # which parameters are in says nothing
    assert export_onnx(model, tmp_path / "a", inputs=(torch.randn(2, 64),)).compared_in == "float32"


def test_context_too_short_to_verify_is_refused(tmp_path):
    source = language_model()
    octavo.convert(source.model, "tensorwise")
    for options, context, least in ((OnnxOptions(), 6, 7), (OnnxOptions(kv_cache=True), 11, 12)):
        with pytest.raises(ConfigError, match=f"at most {context} tokens, but checking a graph takes {least}"):
            export_onnx(replace(source, context=context), tmp_path / "a", options=options)


def test_attention_is_written_in_the_form_that_tensorrt_fuses(decoder):
    """Q(scaled queries) by Q(transposed keys), softmax, Q(probabilities) by Q(values): nothing stands behind a DQ."""
    _, report = decoder
    graph = onnx.load(report.folder / "model.onnx", load_external_data=False).graph
    made_by = {name: node for node in graph.node for name in node.output}
    weights = {each.name for each in graph.initializer}

    def path(name):
        """From a product's operand back to what is cast, by the kinds of its nodes; and the node before the cast."""
        kinds = []
        while name in made_by and made_by[name].op_type in ("DequantizeLinear", "QuantizeLinear", "Mul", "Cast"):
            kinds.append(made_by[name].op_type)
            name = made_by[name].input[0]
            if kinds[-1] == "Cast" and "QuantizeLinear" in kinds:
                break
        return kinds, made_by[name]

    products = [
        node
        for node in graph.node
        if node.op_type == "MatMul" and not any(made_by[name].input[0] in weights for name in node.input)
    ]
    assert len(products) == 2
    (queries, keys), (probabilities, values) = ([path(name) for name in node.input] for node in products)
    cast = ["DequantizeLinear", "QuantizeLinear", "Mul", "Cast"]
    assert [kinds for kinds, _ in (queries, keys, probabilities, values)] == [cast] * 4
    constant = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer if not each.dims}
    assert queries[1].op_type == "Mul"
    assert constant[queries[1].input[1]] == HEAD_DIM**-0.5
    assert keys[1].op_type == "Transpose"
    assert probabilities[1].op_type in ("Softmax", "Where")
    assert values[1].op_type in ("Reshape", "Concat")
