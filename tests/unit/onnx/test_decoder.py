import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import octavo
from octavo.export.lockstep import relative_error
from octavo.onnx.decoder import CacheNames, attention_casts, exported_attention
from octavo.onnx.graph import graph_of_decoder
from octavo.onnx.layers import StaticCast
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
def test_graph_decoder_matches_the_model(source):
    assert relative_error(graph(source).module(windows()), source.logits(windows())) < 1e-6


@torch.no_grad()
def test_cache_continues_a_sequence(source):
    tokens, module = windows(), graph(source, has_cache=True).module
    logits, *past = module(tokens[:, :7], *EMPTY)
    pieces = [logits]
    for start, end in ((7, 8), (8, 20), (20, 24)):
        logits, *past = module(tokens[:, start:end], *past)
        pieces.append(logits)
    assert relative_error(torch.cat(pieces, 1), source.logits(tokens)) < 1e-6
    assert [each.shape for each in past] == [(3, HEADS, 24, HEAD_DIM)] * (2 * SHAPE.num_layers)


def test_cache_names_are_ordered_by_layer():
    assert [*CacheNames.past(1), *CacheNames.present(2)] == [
        "past_key_values.0.key", "past_key_values.0.value",
        "present.0.key", "present.0.value", "present.1.key", "present.1.value",
    ]  # fmt: skip


@torch.no_grad()
def test_fp8_attention_scales_come_from_observed_amaxes(source):
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


def test_model_is_not_changed(source):
    before = {name: tensor.clone() for name, tensor in source.model.state_dict().items()}
    classes = [type(module) for module in source.model.modules()]
    graph_of_decoder(source, torch.bfloat16, has_cache=True, attention=windows())
    assert [type(module) for module in source.model.modules()] == classes
    assert all(torch.equal(tensor, before[name]) for name, tensor in source.model.state_dict().items())


def test_calibration_leaves_no_recorder(source):
    decoder = graph(source).module
    attention_casts(decoder, windows(), torch.float32)
    assert decoder.attention_casts is None


ROWS, PAST, D = 5, 3, 8  # 1 / sqrt(8) is no power of two: whether it is multiplied before the cast shows in the codes


def cast(x, amax):
    """What E4M3 keeps of an array by the scale of a largest magnitude; numpy and ml_dtypes alone."""
    scale = np.float32(448) / np.float32(amax)
    codes = np.clip(np.float32(x) * scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float32) * (np.float32(1) / scale)


def attention_in_fp8(q, k, v, seen):
    """Q / sqrt(D) in codes by K in codes, softmax in codes by V in codes; a group of heads has a head of keys."""
    q = q * np.float32(1 / np.sqrt(D))
    amaxes = [np.abs(each).max() for each in (q, k, v)]
    out = np.empty_like(q)
    for batch, head in np.ndindex(q.shape[:2]):
        kv = head // (q.shape[1] // k.shape[1])
        scores = cast(q[batch, head], amaxes[0]) @ cast(k[batch, kv], amaxes[1]).T
        exp = np.where(seen, np.exp(scores - np.where(seen, scores, -np.inf).max(-1, keepdims=True)), 0)
        probabilities = exp / exp.sum(-1, keepdims=True)
        out[batch, head] = cast(probabilities, 1) @ cast(v[batch, kv], amaxes[2])
    return out


@torch.no_grad()
def test_attention_in_fp8_is_what_numpy_computes():
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, 4, ROWS, D)).astype(np.float32) * 4
    k, v = (rng.normal(size=(2, HEADS, PAST + ROWS, D)).astype(np.float32) * 4 for _ in range(2))
    seen = np.tril(np.ones((ROWS, PAST + ROWS), bool), PAST)
    amaxes = [np.abs(q).max() * np.float32(1 / np.sqrt(D)), np.abs(k).max(), 1, np.abs(v).max()]
    layer_casts = [StaticCast(torch.tensor(448 / amax), torch.tensor(amax / 448)) for amax in map(np.float32, amaxes)]
    queries, keys, values, unseen = map(torch.from_numpy, (q, k, v, ~seen))
    found = exported_attention(queries, keys, values, unseen, nn.ModuleList(layer_casts)).numpy()
    wanted = attention_in_fp8(q, k, v, seen)
    off = np.abs(found - wanted) > 1e-4 * np.abs(wanted).max()
    assert off.mean() < 0.02  # a probability beside a tie may have the next code
    plain = np.abs(found - wanted).mean() / np.abs(wanted).mean()
    assert plain < 1e-3


@torch.no_grad()
def test_fp8_attention_scales_fit_the_cast_operands(source):
    """Queries with 1 / sqrt(D) in them and with their rotary positions, keys and values as they are cached."""
    decoder = graph(source, has_cache=True).module
    found = attention_casts(decoder, windows(), torch.float32)[0]
    layer = source.model.model.layers[0]
    normed = layer.input_layernorm(source.model.model.embed_tokens(windows()))
    _, keys, values = (each.numpy() for each in decoder(windows(), *EMPTY)[:3])
    q = layer.self_attn.q_proj(normed).numpy().reshape(3, -1, 4, HEAD_DIM).swapaxes(1, 2)
    half = HEAD_DIM // 2
    angles = np.arange(q.shape[2])[:, None] * 10000.0 ** (-np.arange(half) / half)
    first, second = q[..., :half], q[..., half:]
    turned = np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], -1
    )
    amaxes = [np.abs(turned).max() / np.sqrt(HEAD_DIM), np.abs(keys).max(), 1, np.abs(values).max()]
    scales = {name: scale.item() for name, scale in found.named_buffers()}
    for index, amax in enumerate(amaxes):
        assert scales[f"{index}.encode_scale"] == pytest.approx(448 / amax, rel=1e-5)
        assert scales[f"{index}.scale"] == pytest.approx(amax / 448, rel=1e-5)
