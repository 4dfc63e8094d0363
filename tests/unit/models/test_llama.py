"""The decoder against a second one written in NumPy, and against Hugging Face's."""

import math

import numpy as np
import pytest
import torch

from octavo.errors import ConfigError
from octavo.models import Llama, LlamaConfig
from octavo.nn.attention import attend

SHAPE = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "max_positions": 16,
}  # fmt: skip


def config(**changes):
    return LlamaConfig(**{**SHAPE, **changes})


def spread_out(model):
    """Weights far from their small initial values, norms away from 1, so that no term is too small to be missed."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.3, 0.3, generator=generator)
    return model


def norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def turned(x, theta):
    """Rotary positions as complex numbers: element i is the real, i + D/2 the imaginary part. x: [T, D]."""
    length, size = x.shape
    pairs = x[:, : size // 2] + 1j * x[:, size // 2 :]
    angles = np.arange(length)[:, None] * theta ** (-2 * np.arange(size // 2) / size)
    pairs = pairs * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag], axis=1)


def oracle_logits(model, tokens):
    """The same decoder in FP64 NumPy, one head and one position at a time; tokens: [T]."""
    c = model.config
    w = {name: tensor.detach().double().numpy() for name, tensor in model.state_dict().items()}
    hidden = w["model.embed_tokens.weight"][tokens]
    for layer in range(c.num_layers):
        p = f"model.layers.{layer}."
        x = norm(hidden, w[p + "input_layernorm.weight"], c.rms_norm_eps)
        q, k, v = (x @ w[f"{p}self_attn.{name}_proj.weight"].T for name in "qkv")
        heads = []
        for head in range(c.num_heads):
            group = head // (c.num_heads // c.num_kv_heads)
            own = slice(head * c.head_dim, (head + 1) * c.head_dim)
            shared = slice(group * c.head_dim, (group + 1) * c.head_dim)
            qh, kh, vh = turned(q[:, own], c.rope_theta), turned(k[:, shared], c.rope_theta), v[:, shared]
            rows = []
            for t in range(len(tokens)):
                scores = kh[: t + 1] @ qh[t] / math.sqrt(c.head_dim)
                weights = np.exp(scores - scores.max())
                rows.append(weights / weights.sum() @ vh[: t + 1])
            heads.append(np.stack(rows))
        hidden = hidden + np.concatenate(heads, axis=1) @ w[p + "self_attn.o_proj.weight"].T
        x = norm(hidden, w[p + "post_attention_layernorm.weight"], c.rms_norm_eps)
        gate, up = (x @ w[f"{p}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ w[p + "mlp.down_proj.weight"].T
    return norm(hidden, w["model.norm.weight"], c.rms_norm_eps) @ w["lm_head.weight"].T


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_forward_equals_the_oracle(num_kv_heads):
    model = spread_out(Llama(config(num_kv_heads=num_kv_heads, rope_theta=100.0))).double()
    model.model.cos, model.model.sin = model.model.cos.double(), model.model.sin.double()
    tokens = torch.randint(0, 50, (2, 11))
    logits = model(tokens).detach().numpy()
    for row in range(2):
        # RMSNorm and the rotation tables are FP32 by design; the rest is FP64 here.
        np.testing.assert_allclose(logits[row], oracle_logits(model, tokens[row].numpy()), rtol=2e-5, atol=2e-5)


def test_logits_equal_hugging_face():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed; nothing to compare with")
    c = config(rms_norm_eps=1e-6, rope_theta=500.0)
    model = spread_out(Llama(c))
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
            max_position_embeddings=c.max_positions, rms_norm_eps=c.rms_norm_eps, tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}, rope_theta=c.rope_theta,
        )
    )  # fmt: skip
    theirs.load_state_dict(model.state_dict(), strict=True)
    tokens = torch.randint(0, c.vocab_size, (3, 13))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_parameter_names_are_those_of_hugging_face():
    layer = ["input_layernorm", "post_attention_layernorm", *(f"self_attn.{x}_proj" for x in "qkvo")]
    layer += [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    expected = {f"model.layers.{i}.{name}.weight" for i in range(2) for name in layer}
    expected |= {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert set(Llama(config()).state_dict()) == expected


MIXTURE = {
    "num_experts": 5,
    "experts_per_token": 2,
    "qk_norm": "head",
    "head_size": 6,
    "qkv_bias": True,
    "mlp_bias": True,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qk_norm": "row"},
        {"num_experts": None, "experts_per_token": None},
        {"shared_size": 24, "dense_layers": (1,), "dense_size": 40},
    ],
)
def test_parameters_of_mixtures_are_counted(changes):
    c = config(**MIXTURE | changes)
    assert c.parameters == sum(parameter.numel() for parameter in Llama(c).parameters())


@pytest.mark.parametrize("normalize", [True, False])
def test_experts_add_their_outputs_by_their_shares(normalize):
    """One token and one expert at a time."""
    c = config(num_experts=5, experts_per_token=2, normalize_shares=normalize)
    experts, hidden = spread_out(Llama(c)).requires_grad_(False).model.layers[0].mlp, torch.randn(2, 3, 32)
    for token, found in zip(hidden.flatten(0, 1), experts(hidden).flatten(0, 1), strict=True):
        logits = [float(row @ token) for row in experts.gate.weight]
        powers = [math.exp(logit - max(logits)) for logit in logits]
        chosen = sorted(range(5), key=lambda expert: -powers[expert])[:2]
        total = sum(powers[expert] for expert in (chosen if normalize else range(5)))
        wanted = sum(powers[expert] / total * experts.experts[expert](token) for expert in chosen)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 2}, "experts_per_token must be from 1 to num_experts, or None if that is None; None"),
        ({"experts_per_token": 2}, "2 does not fit None"),
        ({"num_experts": 2, "experts_per_token": 3}, "3 does not fit 2"),
        ({"num_experts": 20_000, "experts_per_token": 1}, "num_experts must be at most 10,000"),
        ({"num_experts": 0, "experts_per_token": 1}, "num_experts must be a whole number of at least 1, not 0"),
        ({"qk_norm": "all"}, "qk_norm must be one of head, row or None, not 'all'"),
        ({"head_size": 7}, "head_size must be even"),
        ({"shared_size": 8}, "dense_layers and shared_size are of a mixture; give num_experts"),
        ({**MIXTURE, "dense_layers": (0,)}, "dense_layers and dense_size go together"),
        ({**MIXTURE, "dense_size": 8}, "dense_layers and dense_size go together"),
        ({**MIXTURE, "dense_layers": (2,), "dense_size": 8}, r"dense_layers must be from 0 to 1, not \(2,\)"),
    ],
)
def test_impossible_mixtures_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        config(**changes)


def test_attention_is_causal():
    model = spread_out(Llama(config()))
    tokens = torch.randint(0, 50, (1, 12))
    changed = tokens.clone()
    changed[0, 7:] = (changed[0, 7:] + 1) % 50
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_weights_depend_on_seed_and_shape_alone():
    torch.manual_seed(5)
    first = Llama(config(), seed=3).state_dict()
    torch.manual_seed(6)
    second = Llama(config(), seed=3).state_dict()
    other = Llama(config(), seed=4).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_initial_spread():
    model = Llama(config(hidden_size=256, intermediate_size=512, vocab_size=500, num_layers=2))
    state = model.state_dict()
    assert state["model.layers.0.self_attn.q_proj.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert state[f"model.layers.1.{name}.weight"].std().item() == pytest.approx(0.02 / 2, rel=0.02)
    assert torch.equal(state["model.norm.weight"], torch.ones(256))


def test_tied_embeddings_are_one_parameter():
    model = Llama(config(tie_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


@pytest.mark.long
def test_traces_into_one_graph():
    model = Llama(config())
    tokens = torch.randint(0, 50, (2, 8))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(tokens), model(tokens))


def test_autocast_keeps_the_residual_stream_in_fp32():
    model = Llama(config())
    tokens = torch.randint(0, 50, (2, 8))
    with torch.autocast("cpu", torch.bfloat16):
        hidden, logits = model.model(tokens), model(tokens)
    assert hidden.dtype == torch.float32
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), model(tokens), rtol=0.02, atol=0.01)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 0}, "num_layers must be a whole number of at least 1, not 0"),
        ({"num_layers": True}, "num_layers must be a whole number of at least 1, not True"),
        ({"intermediate_size": 64.0}, "intermediate_size must be a whole number"),
        ({"rope_theta": "1e4"}, "rope_theta must be a positive number"),
        ({"tie_embeddings": 1}, "tie_embeddings must be true or false"),
        ({"hidden_size": 36}, "36 is not a multiple of 8"),
        ({"num_kv_heads": 3}, "3 does not divide 4"),
        ({"rope_theta": float("nan")}, "rope_theta must be a positive number"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a positive number"),
    ],
)
def test_refuses_impossible_shapes(changes, words):
    with pytest.raises(ConfigError, match=words):
        config(**changes)


def test_refuses_more_tokens_than_positions():
    with pytest.raises(ConfigError, match="at most 16 tokens at once, not 17"):
        Llama(config())(torch.zeros(1, 17, dtype=torch.long))


class GrowingCache:
    """Keys and values of all positions so far, joined."""

    def __init__(self, layers):
        self.keys, self.values = [torch.empty(2, 0, 2, 8)] * layers, [torch.empty(2, 0, 2, 8)] * layers
        self.length = 0

    def attend(self, layer, queries, keys, values):
        self.keys[layer] = torch.cat([self.keys[layer], keys], 1)
        self.values[layer] = torch.cat([self.values[layer], values], 1)
        return attend(queries, self.keys[layer], self.values[layer], causal=True)


@torch.no_grad()
def test_tokens_read_in_pieces_through_a_cache_match_the_whole_text():
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        max_positions=12,
    )
    model, tokens = Llama(config, seed=1), torch.randint(0, 50, (2, 12))
    cache, pieces = GrowingCache(3), []
    for part in tokens.split([5, 1, 4, 2], dim=1):
        pieces.append(model(part, cache))
        cache.length += part.shape[1]
    torch.testing.assert_close(torch.cat(pieces, 1), model(tokens), rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="at most 12 tokens at once, not 13"):
        model(tokens[:, :1], cache)
