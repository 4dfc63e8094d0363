"""A model of a billion parameters, made on the GPU; and the plain decoder that FP8 generation is compared with.

The plain decoder has one weight for queries, keys and values and one for gate and up, keeps its keys and values in two
tensors of a layer and always reads at one position, so that a CUDA graph of it can be replayed: as fast as torch's own
operations get.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.bench.session import Session
from octavo.models.llama import DecoderLayer, Llama, LlamaConfig
from octavo.nn import rotary_table, rotate

__all__ = ["PlainDecoder", "Product", "bf16_product", "int8_product", "random_llama"]

Product = Callable[[Tensor], Tensor]  # x to x @ weight.T
Products = tuple[Product, Product, Product, Product]  # queries, keys and values; output; gate and up; down
Norms = tuple[Tensor, Tensor]  # gains before attention and before the MLP
LayerStep = Callable[[Tensor, Norms, Products, Tensor], Tensor]  # hidden and the layer's cache


def random_llama(session: Session, *, layers: int | None = None) -> Llama:
    """A Llama of BF16 parameters drawn on the device; the head shares the embedding's weight."""
    size = session.sizes.model
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_layers=layers or size.layers,
        num_heads=size.heads,
        num_kv_heads=size.kv_heads,
        max_positions=max(size.length, *(prompt + 1 for prompt in size.prompts), size.context + 1),
        rope_theta=500000.0,
        tie_embeddings=True,
    )
    with torch.device("meta"):
        model = Llama(config)
    model.to(torch.bfloat16).to_empty(device=session.device)
    model.lm_head.weight = model.model.embed_tokens.weight
    model.model.cos, model.model.sin = rotary_table(
        config.head_dim, config.max_positions, config.rope_theta, device=session.device
    )
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02) if parameter.ndim == 2 else nn.init.ones_(parameter)
    return model


def bf16_product(weight: Tensor) -> Product:
    """In BF16."""
    return lambda x: F.linear(x, weight)


def int8_product(session: Session, weight: Tensor) -> Product:
    """The weight as 8-bit integers with a scale a row; compiled, so that one row's product widens them as it reads."""
    scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
    codes = (weight.float() / scale).round().to(torch.int8)
    row = scale.to(weight.dtype)[:, 0]
    multiply = session.compiled(_times_integers, tuned=True)
    return lambda x: multiply(x, codes, row)


def _times_integers(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    if x.numel() == codes.shape[1]:  # [1, 1, K]: a sum, which is fused with the widening
        return ((x * codes).sum(dim=-1, dtype=torch.float32) * scale).to(x.dtype)[None]
    return F.linear(x, codes.to(x.dtype)) * scale


class PlainDecoder:
    """Next-token logits of every sequence of a batch, all at the same position.

    Args:
        model: whose weights it has.
        batch: sequences, B.
        position: how many positions lie before.
        product: makes a product of a weight.
        compiled: compiles the function of a layer, which all layers share.
    """

    def __init__(
        self,
        model: Llama,
        *,
        batch: int,
        position: int,
        product: Callable[[Tensor], Product],
        compiled: Callable[[LayerStep], LayerStep] = lambda step: step,
    ) -> None:
        self.config, self.position, self.body = model.config, position, model.model
        self.products = [_products(layer, product) for layer in _layers(model)]
        self.head = product(model.lm_head.weight.detach())
        shape = (2, batch, position + 1, self.config.num_kv_heads, self.config.head_dim)
        self.step = compiled(self._step)
        self.caches = [torch.randn(shape, device=self.body.cos.device).bfloat16() for _ in self.products]

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Tokens [B] to logits [B, V]."""
        hidden = self.body.embed_tokens(tokens)[:, None]
        for norms, products, cache in zip(self._norms(), self.products, self.caches, strict=True):
            hidden = self.step(hidden, norms, products, cache)
        return self.head(self._norm(hidden, self.body.norm.weight))[:, 0]

    def _step(self, hidden: Tensor, norms: Norms, products: Products, cache: Tensor) -> Tensor:
        before_attention, before_mlp = norms
        qkv, out, gate_up, down = products
        hidden = hidden + out(self._attend(qkv(self._norm(hidden, before_attention)), cache))
        gate, up = gate_up(self._norm(hidden, before_mlp)).chunk(2, dim=-1)
        return hidden + down(F.silu(gate) * up)

    def _norms(self) -> list[Norms]:
        layers = [layer for layer in self.body.layers if isinstance(layer, DecoderLayer)]
        return [(layer.input_layernorm.weight, layer.post_attention_layernorm.weight) for layer in layers]

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, (self.config.hidden_size,), weight, self.config.rms_norm_eps)

    def _attend(self, heads: Tensor, cache: Tensor) -> Tensor:
        config = self.config
        split = heads.unflatten(-1, (-1, config.head_dim))
        queries, keys, values = split.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=-2)
        here = slice(self.position, self.position + 1)
        queries, keys = (rotate(x, self.body.cos[here], self.body.sin[here]) for x in (queries, keys))
        cache[0, :, here], cache[1, :, here] = keys, values
        queries, keys, values = (x.transpose(1, 2) for x in (queries, cache[0], cache[1]))
        found = F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)
        return found.transpose(1, 2).flatten(2)


def _layers(model: Llama) -> list[DecoderLayer]:
    return [layer for layer in model.model.layers if isinstance(layer, DecoderLayer)]


def _products(layer: DecoderLayer, product: Callable[[Tensor], Product]) -> Products:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]).detach()
    gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach()
    return (
        product(qkv),
        product(attention.o_proj.weight.detach()),
        product(gate_up),
        product(mlp.down_proj.weight.detach()),
    )
