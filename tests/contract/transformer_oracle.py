"""A transformer layer in float64, written from the papers: einsum, explicit softmax, masks made position by position.

It reads a layer's parameters by their names and shares no code with ``octavo.nn``.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Weights = dict[str, Tensor]

FUNCTIONS = {
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "qgelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "srelu": lambda x: torch.where(x > 0, x * x, 0.0),
}
GATED = {
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "qgeglu": "qgelu",
    "reglu": "relu",
    "sreglu": "srelu",
    "swiglu": "silu",
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the parameters do not say."""

    heads: int
    kv_heads: int
    activation: str = "gelu"
    normalization: str = "layernorm"
    zero_centered: bool = False
    eps: float = 1e-5
    post: bool = False
    parallel: bool = False
    causal: bool = True
    window: int | None = None
    theta: float | None = None


def weights_of(module: torch.nn.Module) -> Weights:
    """Its parameters as float64 leaves."""
    return {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}


def act(name: str, x: Tensor) -> Tensor:
    if name not in GATED:
        return FUNCTIONS[name](x)
    half = x.shape[-1] // 2
    return FUNCTIONS[GATED[name]](x[..., :half]) * x[..., half:]


def norm(w: Weights, at: str, x: Tensor, shape: Shape) -> Tensor:
    """The norm whose parameters stand at ``at``; none where there are none."""
    if f"{at}.weight" not in w:
        return x
    if shape.normalization == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    gain = w[f"{at}.weight"] + (1 if shape.zero_centered else 0)
    y = x / (x.square().mean(-1, keepdim=True) + shape.eps).sqrt() * gain
    return y + w[f"{at}.bias"] if f"{at}.bias" in w else y


def linear(w: Weights, at: str, x: Tensor) -> Tensor:
    y = torch.einsum("...k,nk->...n", x, w[f"{at}.weight"])
    return y + w[f"{at}.bias"] if f"{at}.bias" in w else y


def seen(shape: Shape, lengths: list[int], asked: int, known: int) -> Tensor:
    """bool [B, T, S], position by position."""
    table = [
        [
            [
                s < length and (not shape.causal or s <= t) and (shape.window is None or abs(t - s) <= shape.window)
                for s in range(known)
            ]
            for t in range(known - asked, known)
        ]
        for length in lengths
    ]
    return torch.tensor(table, dtype=torch.bool).reshape(len(lengths), asked, known)


def turn(x: Tensor, theta: float) -> Tensor:
    """Rotary positions as complex numbers; x: [B, T, heads, D]."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


def scores_to_values(q: Tensor, k: Tensor, v: Tensor, *, visible: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """[B, T, heads, D], one key head for each group of query heads; queries that see nothing give 0.

    ``visible`` is [B, T, S] or [B, heads, T, S]; ``bias`` is added to the scores.
    """
    visible = visible if visible.ndim == 4 else visible[:, None]
    group = q.shape[2] // k.shape[2]
    k, v = (torch.stack([x[:, :, head // group] for head in range(q.shape[2])], dim=2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1]) + bias
    weights = torch.exp(scores - scores.detach().amax(-1, keepdim=True)) * visible
    total = weights.sum(-1, keepdim=True)
    return torch.einsum("bhts,bshd->bthd", weights / torch.where(total > 0, total, 1.0), v)


def attention(w: Weights, at: str, x: Tensor, shape: Shape, *, visible: Tensor, memory: Tensor | None = None) -> Tensor:
    """Self-attention, or cross-attention to ``memory``."""
    width = w[f"{at}out.weight"].shape[1]
    if memory is None:
        qkv = linear(w, f"{at}qkv.linear", norm(w, f"{at}qkv.norm", x, shape))
        q, kv = qkv[..., :width], qkv[..., width:]
    else:
        q, kv = linear(w, f"{at}q.linear", norm(w, f"{at}q.norm", x, shape)), linear(w, f"{at}kv", memory)
    head = width // shape.heads
    q = q.reshape(*q.shape[:2], shape.heads, head)
    k, v = (part.reshape(*part.shape[:2], shape.kv_heads, head) for part in kv.tensor_split(2, dim=-1))
    root = Shape(heads=0, kv_heads=0, normalization="rmsnorm", zero_centered=shape.zero_centered, eps=shape.eps)
    q, k = norm(w, f"{at}q_norm", q, root), norm(w, f"{at}k_norm", k, root)
    if shape.theta is not None and memory is None:
        q, k = turn(q, shape.theta), turn(k, shape.theta)
    return linear(w, f"{at}out", scores_to_values(q, k, v, visible=visible).flatten(2))


def mlp(w: Weights, at: str, x: Tensor, shape: Shape) -> Tensor:
    return linear(w, f"{at}fc2", act(shape.activation, linear(w, f"{at}fc1", norm(w, f"{at}norm", x, shape))))


def layer(
    w: Weights,
    x: Tensor,
    shape: Shape,
    *,
    lengths: list[int] | None = None,
    memory: Tensor | None = None,
    memory_lengths: list[int] | None = None,
) -> Tensor:
    """The whole layer."""
    batch, count = x.shape[:2]
    visible = seen(shape, lengths or [count] * batch, count, count)
    h = norm(w, "attention_norm", x + attention(w, "self_attention.", x, shape, visible=visible), shape)
    if memory is not None:
        free = Shape(heads=0, kv_heads=0, causal=False)
        real = seen(free, memory_lengths or [memory.shape[1]] * batch, memory.shape[1], memory.shape[1])[:, :1]
        found = attention(w, "cross_attention.", h, shape, visible=real, memory=memory)
        h = norm(w, "cross_attention_norm", h + found, shape)
    return norm(w, "mlp_norm", h + mlp(w, "mlp.", x if shape.parallel else h, shape), shape)


def assert_close(actual: Tensor, exact: Tensor, *, relative: float, what: str = "") -> None:
    """Every element within ``relative`` of the largest exact one: sums err by their terms' sizes, not their own."""
    assert actual.shape == exact.shape, what
    bound = relative * max(exact.abs().max().item(), 0.1) if exact.numel() else 0.0
    torch.testing.assert_close(actual.double(), exact.double(), rtol=0, atol=bound, msg=lambda text: f"{what}: {text}")


def spread_out(module: torch.nn.Module) -> None:
    """Parameters away from their initial values, so that no term is too small to be missed."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, p in module.named_parameters():
            width = p.shape[-1] if p.ndim == 2 else 9
            drawn = torch.empty_like(p, device="cpu").normal_(0.0, 1.5 / math.sqrt(width), generator=generator)
            p.copy_(drawn)
            if "norm" in name and name.endswith("weight"):
                p.add_(1)
