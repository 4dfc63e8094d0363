import pytest
import torch

import octavo
from octavo.export.agreement import relative_error
from octavo.export.onnx.decoder import CacheNames, attention_casts
from octavo.export.onnx.graph import graph_of_decoder
from tests.unit.quantization.tiny_models import HEAD_DIM, HEADS, SHAPE, language_model, windows

EMPTY = [torch.zeros(3, HEADS, 0, HEAD_DIM)] * (2 * SHAPE.num_layers)


@pytest.fixture(scope="module")
def source():
    model = language_model()
    octavo.convert(model.model, "rowwise")
    return model


def graph(source, **options):
    return graph_of_decoder(source, torch.float32, **{"has_cache": False, "attention": None} | options)


@torch.no_grad()
def test_it_computes_what_the_model_does(source):
    assert relative_error(graph(source).module(windows()), source.logits(windows())) < 1e-6


@torch.no_grad()
def test_a_cache_continues(source):
    tokens, module = windows(), graph(source, has_cache=True).module
    logits, *past = module(tokens[:, :7], *EMPTY)
    pieces = [logits]
    for start, end in ((7, 8), (8, 20), (20, 24)):
        logits, *past = module(tokens[:, start:end], *past)
        pieces.append(logits)
    assert relative_error(torch.cat(pieces, 1), source.logits(tokens)) < 1e-6
    assert [each.shape for each in past] == [(3, HEADS, 24, HEAD_DIM)] * (2 * SHAPE.num_layers)


def test_names_go_layer_by_layer():
    assert [*CacheNames.past(1), *CacheNames.present(2)] == [
        "past_key_values.0.key", "past_key_values.0.value",
        "present.0.key", "present.0.value", "present.1.key", "present.1.value",
    ]  # fmt: skip


@torch.no_grad()
def test_attention_in_fp8_has_the_scales_of_what_it_saw(source):
    made = graph(source, attention=windows())
    plain = graph(source)
    casts = made.module.attention_casts
    assert len(casts) == SHAPE.num_layers
    assert all(layer[2].encode_scale == 448 for layer in casts)

    layer = source.model.model.layers[0]
    normed = layer.input_layernorm(source.model.model.embed_tokens(windows()))
    values_amax = layer.self_attn.v_proj(normed).abs().max()
    assert casts[0][3].encode_scale == octavo.numerics.encode_scale_from_amax(values_amax, octavo.E4M3)

    error = relative_error(made.module(windows()), plain.module(windows()))
    assert 1e-4 < error < 0.2  # FP8's, no more
    assert plain.module.attention_casts is None


def test_the_model_is_left_as_it_was(source):
    before = {name: tensor.clone() for name, tensor in source.model.state_dict().items()}
    classes = [type(module) for module in source.model.modules()]
    graph_of_decoder(source, torch.bfloat16, has_cache=True, attention=windows())
    assert [type(module) for module in source.model.modules()] == classes
    assert all(torch.equal(tensor, before[name]) for name, tensor in source.model.state_dict().items())


def test_measuring_puts_nothing_in_its_place(source):
    decoder = graph(source).module
    attention_casts(decoder, windows(), torch.float32)
    assert decoder.attention_casts is None
