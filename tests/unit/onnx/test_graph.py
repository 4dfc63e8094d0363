"""How a model becomes a graph: what it is called, what is refused, and where its weights go."""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import ConfigError
from octavo.onnx import export_onnx
from octavo.onnx import graph as graph_module
from octavo.onnx.graph import graph_of_decoder, graph_of_module, write_graph
from tests.unit.quantization.tiny_models import language_model

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

K, N = 24, 6


class Chooses(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(K, N)

    def forward(self, x):
        y = self.one(x)
        if x.sum() > 0:
            y = y + 1
        return y


@pytest.mark.long
def test_a_choice_by_numbers_is_refused_in_one_sentence_and_nothing_is_printed(tmp_path, capfd):
    model = Chooses()
    octavo.convert(model, "tensorwise")
    words = r"cannot export this Chooses: its control flow depends on tensor values \(forward: if x\.sum\(\) > 0\)"
    with pytest.raises(ConfigError, match=words):
        export_onnx(model, tmp_path / "a", inputs=(torch.randn(2, K),))
    assert capfd.readouterr() == ("", "")


def test_a_progress_bar_goes_on_while_the_exporter_is_silent(capsys):
    with graph_module._suppress_output(), ThreadPoolExecutor(1) as pool:
        print("half a graph", file=sys.stderr)
        pool.submit(print, "tracing …", file=sys.stderr).result()
    assert capsys.readouterr().err == "tracing …\n"


def test_graph_has_the_name_of_the_language_model():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8, num_hidden_layers=1, **sizes))
    for model in (theirs, language_model().model):
        octavo.convert(model, "tensorwise")
        source = replace(language_model(), model=model)
        graph = graph_of_decoder(source, torch.float32, has_cache=False, attention=None)
        assert graph.name == type(model).__name__


class OneInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(K, N)

    def forward(self, output):
        return self.one(output)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(K, N)

    def forward(self, output, output_1):
        return self.one(output), self.one(output_1)


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2])
def test_inputs_that_are_called_as_outputs_are(tmp_path, count):
    model = OneInput() if count == 1 else TwoInputs()
    octavo.convert(model, "tensorwise")
    report = export_onnx(model, tmp_path / "a", inputs=tuple(torch.randn(2, K) for _ in range(count)))
    graph = onnx.load(report.folder / "model.onnx").graph
    assert [each.name for each in graph.input] == ["output", "output_1"][:count]
    assert [each.name for each in graph.output] == [["output_"], ["output_0_", "output_1_"]][count - 1]


@pytest.mark.long
@pytest.mark.parametrize(("room", "files"), [(0, ["model.onnx", "model.onnx.data"]), (-1, ["model.onnx"])])
def test_weights_that_do_not_fit_into_a_message_go_beside_it(tmp_path, monkeypatch, *, room, files):
    """By a limit that the weights exceed by a byte or just keep."""
    model = nn.Sequential(nn.Linear(K, N, bias=False))
    octavo.convert(model, "weight_only")
    graph = graph_of_module(model, (torch.randn(2, K),), torch.float32)
    (tmp_path / "measured").mkdir()
    write_graph(graph, tmp_path / "measured" / "model.onnx", opset=21, external_data=False)
    initializers = onnx.load(tmp_path / "measured" / "model.onnx").graph.initializer
    size = sum(onnx.numpy_helper.to_array(each).nbytes for each in initializers)
    monkeypatch.setattr(graph_module, "LARGEST_PROTOBUF", size - 1 - room)
    (tmp_path / "a").mkdir()
    write_graph(graph, tmp_path / "a" / "model.onnx", opset=21, external_data=False)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == files
