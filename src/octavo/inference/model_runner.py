"""Llama-style model or mixture of experts for generation on a CPU, with quantized weights and a key-value cache.

Every weight, including the head's, is stored as E4M3 codes with one scale per output row, or in the format of another
recipe (octavo.inference.recipes). An embedding that shares the head's weight reads the head's codes. Activations are
FP32. The native kernels run all layers in one call; without them octavo.inference.reference computes the same, many
times slower. On a GPU use other servers, with files from ``octavo export``.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from octavo.errors import BackendError, ConfigError
from octavo.formats import E4M3, Format
from octavo.inference.decoder_weights import DecoderWeight, Saturation
from octavo.inference.kv_cache import KVCacheBatch, PagedKVCache
from octavo.inference.native_decoder import (
    MAX_HEAD_DIM,
    CacheTensors,
    DecoderLayerTensors,
    DecoderTensors,
    MLPWeights,
    NativeDecoder,
)
from octavo.inference.recipes import ServingRecipe, decoder_weight
from octavo.inference.reference import ReferenceDecoder
from octavo.kernels import native_bindings
from octavo.models import Llama, LlamaConfig, llama
from octavo.nn.arguments import check_choice

__all__ = ["ON_A_GPU", "ModelRunner", "check_on_cpu"]

ON_A_GPU = "serve on a GPU with vLLM, TensorRT-LLM or Triton, from files that octavo export writes"

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class ModelRunner:
    """Next-token logits of a model.

    Args:
        model: decoder on a CPU; its weights are copied.
        recipe: format of the weights and their inputs; "fp8-static" reads the scales of a model to which a calibration
            was applied (``Calibration.apply(model, hold_weights=True)``).
        key_means: mean of the rotated keys by layer, float32 [kv heads, D], from ``octavo calibrate --kv-cache``. It is
            subtracted from the keys before they are rounded, which cancels in the softmax. None subtracts nothing.
        level: instruction-set level of the native kernels; None is the best, "torch" uses no native kernels.

    Raises:
        ConfigError: the model is not on a CPU, has heads wider than 512, or codes that the recipe does not support; the
            means have other layers, another shape or values that are not finite; or the recipe is unknown.
        BackendError: the level is not available.

    Example:
        >>> from octavo.models import LlamaConfig
        >>> config = LlamaConfig(
        ...     vocab_size=64,
        ...     hidden_size=32,
        ...     intermediate_size=64,
        ...     num_layers=1,
        ...     num_heads=2,
        ...     num_kv_heads=1,
        ...     max_positions=16,
        ... )
        >>> runner = ModelRunner(Llama(config))
        >>> cache = runner.new_cache()
        >>> runner(torch.tensor([1, 2, 3]), cache).shape, runner(torch.tensor([4]), cache).shape, cache.length
        (torch.Size([64]), torch.Size([64]), 4)
        >>> batch = runner.new_batch(2)
        >>> _ = runner(torch.tensor([1, 2, 3]), batch.sequences[0])
        >>> runner.step(torch.tensor([4, 5]), batch).shape, batch.lengths
        (torch.Size([2, 64]), [4, 1])
    """

    def __init__(
        self,
        model: Llama,
        *,
        recipe: str = ServingRecipe.FP8,
        key_means: Mapping[int, Tensor] | None = None,
        level: str | None = None,
    ) -> None:
        config = model.config
        check_choice("recipe", recipe, tuple(ServingRecipe))
        check_on_cpu(model)
        if config.head_dim > MAX_HEAD_DIM:
            raise ConfigError(f"heads may be at most {MAX_HEAD_DIM} wide, not {config.head_dim}")
        self.config = config
        means = _key_means(config, key_means)
        self._decoder = _decoder(model, ServingRecipe(recipe), means)
        embedding = model.model.embed_tokens.weight
        self._embedding = None if model.lm_head.weight is embedding else _narrowed(embedding.detach())
        self._native: NativeDecoder | None = None
        self._reference: ReferenceDecoder | None = None
        if level != "torch" and (level is not None or native_bindings.why_absent() is None):
            self._native = NativeDecoder(self._decoder, level=level)
        else:
            self._reference = ReferenceDecoder(config, self._decoder, self._embed)

    @property
    def max_length(self) -> int:
        """Number of positions that the model supports."""
        return self.config.max_positions

    def reader(self, length: int) -> Callable[[list[int]], Tensor]:
        """Start a text of at most ``length`` tokens, for :func:`octavo.models.generate`.

        Returns:
            Function from all token ids so far to the logits [V] of the next; it reads those not in its cache.
        """
        cache = self.new_cache(length)
        return lambda ids: self(torch.tensor(ids[cache.length :], device="cpu"), cache)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights, scales and biases that a token reads, of experts those of its own.

        A separate embedding and routers are not included.
        """
        return self._decoder.head.nbytes + sum(
            layer.qkv.nbytes + layer.out.nbytes + self._mlp_bytes(layer) for layer in self._decoder.layers
        )

    def _mlp_bytes(self, layer: DecoderLayerTensors) -> int:
        """Bytes that a token reads of a layer's MLPs."""
        own = 1 if layer.router is None else self.config.experts_per_token or 0
        shared = 0 if layer.shared_gate is None else layer.mlps[-1].nbytes
        return own * layer.mlps[0].nbytes + shared

    @property
    def resident_bytes(self) -> int:
        """Bytes of the whole model: weights, embedding, norms, routers, rotary tables and key means."""
        decoder = self._decoder
        tensors = [decoder.cos, decoder.sin, decoder.norm, *([] if self._embedding is None else [self._embedding])]
        weights: list[DecoderWeight | MLPWeights] = [decoder.head]
        for layer in decoder.layers:
            tensors += layer.numbers
            weights += [layer.qkv, layer.out, *layer.mlps]
        return sum(weight.nbytes for weight in weights) + sum(x.nbytes for x in tensors)

    @property
    def saturation(self) -> Saturation:
        """Counts of input elements cast with static scales; zeros for other recipes."""
        return self._decoder.saturation

    def new_cache(self, max_positions: int | None = None, *, fmt: Format = E4M3) -> PagedKVCache:
        """Create an empty cache for one sequence; None is the model's number of positions."""
        return PagedKVCache(*self._sizes(), max_positions=self._room(max_positions), fmt=fmt)

    def new_batch(self, sequences: int, max_positions: int | None = None, *, fmt: Format = E4M3) -> KVCacheBatch:
        """Create empty caches for several sequences, for :meth:`step`."""
        room = self._room(max_positions)
        return KVCacheBatch(*self._sizes(), sequences=sequences, max_positions=room, fmt=fmt)

    def _sizes(self) -> tuple[int, int, int]:
        return self.config.num_layers, self.config.num_kv_heads, self.config.head_dim

    def _room(self, max_positions: int | None) -> int:
        return self.config.max_positions if max_positions is None else max_positions

    @torch.no_grad()
    def __call__(self, tokens: Tensor, cache: PagedKVCache, *, every: bool = False) -> Tensor:
        """Read the next tokens, add their keys and values to the cache and return the logits.

        Args:
            tokens: int64 [T], at least one: the tokens after those in the cache.
            cache: from :meth:`new_cache`.
            every: return the logits after every token instead of the last.

        Returns:
            float32 [V], or [T, V].

        Raises:
            TypeError: the tokens are not a tensor of integers, or the cache is not of one sequence.
            BackendError: the cache is of another model, or the tokens are not on a CPU.
            ConfigError: no tokens, a token outside the vocabulary, or more positions than the cache or the model has.
                The cache is unchanged after any error.
        """
        self._check(tokens, cache)
        tokens = tokens.long()  # torch treats uint8 indices as a mask
        cache.check_room(len(tokens))
        logits = self._read(tokens, cache, every=every)
        cache.advance(len(tokens))
        return logits if every else logits[0]

    @torch.no_grad()
    def step(self, tokens: Tensor, batch: KVCacheBatch) -> Tensor:
        """Read the next token of every sequence of a batch, add its keys and values and return the logits.

        Call the runner with ``batch.sequences[i]`` to read the first tokens of a sequence.

        Args:
            tokens: int64 [sequences].
            batch: from :meth:`new_batch`.

        Returns:
            float32 [sequences, V].

        Raises:
            TypeError: the tokens are not a tensor of integers, or ``batch`` is not a batch.
            BackendError: the batch is of another model, or the tokens are not on a CPU.
            ConfigError: a wrong number of tokens, a token outside the vocabulary, or a full sequence.
        """
        if not isinstance(batch, KVCacheBatch):
            raise TypeError(f"step() takes a batch from new_batch(), not a {type(batch).__name__}")
        _check_integers(tokens)
        if tokens.shape != (len(batch.sequences),):
            raise ConfigError(
                f"step() takes a token of each of {len(batch.sequences)} sequences, not {tuple(tokens.shape)} tokens"
            )
        for token, cache in zip(tokens.split(1), batch.sequences, strict=True):
            self._check(token, cache)
        batch.check_room()
        tokens, positions = tokens.long(), batch.lengths
        if self._native is not None:
            sequence, position = (torch.tensor(x, device="cpu") for x in (range(len(tokens)), positions))
            logits = self._native.run(self._embed(tokens), batch.tensors, sequence, position, num_logits=len(tokens))
        else:
            pairs = zip(tokens.split(1), batch.sequences, strict=True)
            logits = torch.cat([self._read(token, cache) for token, cache in pairs])
        batch.advance()
        return logits

    @torch.no_grad()
    def read_rows(
        self, tokens: Tensor, tensors: CacheTensors, *, sequence: Tensor, position: Tensor, num_logits: int
    ) -> Tensor:
        """Read tokens of several sequences of a cache in one call, for a step of the engine.

        The logits of a row depend only on its own sequence, bit for bit: not on other rows, nor on how the tokens of a
        sequence are split into calls. Without native kernels rows are read one by one to ensure this.

        Args:
            tokens: int64 [R], within the vocabulary.
            tensors: pages of all sequences; the table has a row for each.
            sequence: int64 [R], row of the table for each token.
            position: int64 [R]; positions of a sequence ascend and follow those in the cache.
            num_logits: number of last rows that get logits.

        Returns:
            float32 [num_logits, V].

        Raises:
            BackendError: rows, table and positions do not match.
        """
        if not 1 <= num_logits <= len(tokens):
            raise BackendError(f"the number of rows with logits must be from 1 to {len(tokens)}, not {num_logits}")
        if self._native is not None:
            return self._native.run(self._embed(tokens), tensors, sequence, position, num_logits=num_logits)
        assert self._reference is not None
        rows = []
        for token, row, start in zip(tokens.split(1), sequence.tolist(), position.tolist(), strict=True):
            cache = PagedKVCache.over(replace(tensors, table=tensors.table[row : row + 1]))
            rows.append(self._reference.run(token, cache, start))
        return torch.cat(rows[-num_logits:])

    def _read(self, tokens: Tensor, cache: PagedKVCache, *, every: bool = False) -> Tensor:
        """Run the native kernels, or the reference."""
        if self._reference is not None:
            return self._reference.run(tokens, cache, cache.length, every=every)
        assert self._native is not None
        position = torch.arange(cache.length, cache.length + len(tokens), device="cpu")
        num_logits = len(tokens) if every else 1
        return self._native.run(
            self._embed(tokens), cache.tensors, torch.zeros_like(position), position, num_logits=num_logits
        )

    def _embed(self, tokens: Tensor) -> Tensor:
        if self._embedding is not None:
            return self._embedding[tokens].float()
        return self._decoder.head.dequantize(tokens)

    def _check(self, tokens: Tensor, cache: PagedKVCache) -> None:
        if not isinstance(cache, PagedKVCache):
            raise TypeError(f"a runner takes a cache of one sequence from new_cache(), not a {type(cache).__name__}")
        _check_integers(tokens)
        cache.tensors.check_made_for(*self._sizes())
        if tokens.device.type != "cpu":
            raise BackendError(f"a runner takes tokens on a CPU, not on {tokens.device}; call tokens.cpu()")
        if tokens.ndim != 1 or not len(tokens):
            raise ConfigError(
                f"a runner takes at least one token of one sequence, shape [T], not {tuple(tokens.shape)}"
            )
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.config.vocab_size:
            raise ConfigError(
                f"token ids must be from 0 to {self.config.vocab_size - 1}, not "
                f"{int(tokens.min())} to {int(tokens.max())}"
            )
        if cache.length + len(tokens) > self.config.max_positions:
            raise ConfigError(
                f"this model has {self.config.max_positions} positions, and {cache.length + len(tokens)} are needed; "
                "shorten the text"
            )


def _check_integers(tokens: object) -> None:
    dtype = getattr(tokens, "dtype", type(tokens).__name__)
    if dtype not in _INTEGERS:
        raise TypeError(f"tokens must be a tensor of integers, not {dtype}")


def check_on_cpu(model: Llama) -> None:
    """Raise ConfigError unless all parameters are on a CPU."""
    devices = {str(parameter.device) for parameter in model.parameters()}
    if devices != {"cpu"}:
        raise ConfigError(
            f"octavo generates on the CPU, and this model is on {' and '.join(sorted(devices))}: call model.cpu(), or "
            f"{ON_A_GPU}"
        )


def _key_means(config: LlamaConfig, means: Mapping[int, Tensor] | None) -> list[Tensor]:
    """Key means of every layer; zeros for None."""
    shape = (config.num_kv_heads, config.head_dim)
    if means is None:
        return [torch.zeros(shape, device="cpu") for _ in range(config.num_layers)]
    if means.keys() != {*range(config.num_layers)} or any(mean.shape != shape for mean in means.values()):
        shapes = " and ".join(sorted({str(list(mean.shape)) for mean in means.values()})) or "none"
        raise ConfigError(
            f"this model needs key means {list(shape)} for each of {config.num_layers} layers, and got {len(means)} of "
            f"{shapes}; calibrate this model"
        )
    if not all(bool(mean.isfinite().all()) for mean in means.values()):
        raise ConfigError("a key mean is NaN or infinite; calibrate again")
    return [means[layer].detach().to("cpu", torch.float32, copy=True) for layer in range(config.num_layers)]


def _decoder(model: Llama, recipe: ServingRecipe, key_means: list[Tensor]) -> DecoderTensors:
    body = model.model
    layers = [_layer(layer, recipe, mean) for layer, mean in zip(body.layers, key_means, strict=True)]
    head = decoder_weight(recipe, model.lm_head, is_head=True)
    cos, sin, norm = map(_copied, (body.cos, body.sin, body.norm.weight))
    return DecoderTensors(model.config, layers, cos, sin, norm, head)


def _layer(layer: nn.Module, recipe: ServingRecipe, key_mean: Tensor) -> DecoderLayerTensors:
    assert isinstance(layer, llama.DecoderLayer)
    attention, mlp = layer.self_attn, layer.mlp
    norms = attention.q_norm, attention.k_norm
    return DecoderLayerTensors(
        attention_norm=_copied(layer.input_layernorm.weight),
        qkv=decoder_weight(recipe, attention.q_proj, attention.k_proj, attention.v_proj),
        out=decoder_weight(recipe, attention.o_proj),
        mlp_norm=_copied(layer.post_attention_layernorm.weight),
        key_mean=key_mean,
        mlps=[
            MLPWeights(decoder_weight(recipe, each.gate_proj, each.up_proj), decoder_weight(recipe, each.down_proj))
            for each in llama.mlps_of(layer)
        ],
        router=_copied(mlp.gate.weight) if isinstance(mlp, llama.Experts) else None,
        shared_gate=_shared_gate(mlp),
        qk_norms=None if norms[0] is None or norms[1] is None else (_copied(norms[0].weight), _copied(norms[1].weight)),
    )


def _shared_gate(mlp: nn.Module) -> Tensor | None:
    gate = mlp.shared_expert_gate if isinstance(mlp, llama.Experts) else None
    return None if gate is None else _copied(gate.weight)[0]


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float32, copy=True)


def _narrowed(tensor: Tensor) -> Tensor:
    """Copy in BF16 if that is exact, else in the same dtype."""
    narrow = tensor.bfloat16()
    return (narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor).clone()
