"""``ModelRunner``: a Llama-style model for generation on a CPU, its weights FP8 codes, its keys and values in a cache.

Every weight, the head's too, becomes E4M3 codes with one scale an output row, or what another recipe says
(octavo.inference.recipes). Where the head shares the embedding's weight, the embedding reads the same codes.
Activations are FP32, and with the native kernels all layers are one call; without them octavo.inference.reference
computes the same, many times slower. On a GPU other servers generate, from files that ``octavo export`` writes.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from octavo.errors import BackendError, ConfigError
from octavo.formats import E4M3, Format
from octavo.inference.decoder_weights import Saturation
from octavo.inference.kv_cache import KVCacheBatch, PagedKVCache
from octavo.inference.native_decoder import (
    MAX_HEAD_DIM,
    CacheTensors,
    Decoder,
    DecoderLayer,
    DecoderShape,
    NativeDecoder,
)
from octavo.inference.recipes import ServingRecipe, held_weight
from octavo.inference.reference import ReferenceDecoder
from octavo.kernels import native_bindings
from octavo.models import Llama, LlamaConfig, llama
from octavo.nn.arguments import check_choice

__all__ = ["ON_A_GPU", "ModelRunner"]

ON_A_GPU = "serve on a GPU with vLLM, TensorRT-LLM or Triton, from files that octavo export writes"

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class ModelRunner:
    """Next-token logits of a model, as fast as its weights can be read.

    Args:
        model: a decoder on a CPU; its weights are copied.
        recipe: what its weights become, and their inputs; "fp8-static" reads the scales of layers that a calibration
            was applied to (``Calibration.apply(model, hold_weights=True)``).
        key_means: by layer, float32 [kv heads, D]: what its keys have in common, positions included. It is not stored,
            so that what is can be rounded finer, and changes nothing else. A calibration has them
            (``octavo calibrate --kv-cache``); None subtracts nothing.
        level: an instruction-set level of the CPU's native kernels; None is the best, "torch" uses no kernels at all.

    Raises:
        ConfigError: a model that is not on a CPU, with heads wider than 512, or with weights held as blocks
            of codes; or means of other layers or of another shape, or that are not finite; or an unknown recipe.
        BackendError: a level that is not there.

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
        _check_on_cpu(model)
        if config.head_dim > MAX_HEAD_DIM:
            raise ConfigError(f"heads may be {MAX_HEAD_DIM} wide, not {config.head_dim}")
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
        """Number of positions that the model knows."""
        return self.config.max_positions

    def reader(self, length: int) -> Callable[[list[int]], Tensor]:
        """Start a text of at most ``length`` tokens, for :func:`octavo.models.generate`.

        Returns:
            A function from all token ids so far to the logits [V] of the next; it reads those that its cache lacks.
        """
        cache = self.new_cache(length)
        return lambda ids: self(torch.tensor(ids[cache.length :], device="cpu"), cache)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, their scales and biases: what a token reads, but for a separate embedding."""
        weights = [self._decoder.head]
        for layer in self._decoder.layers:
            weights += [layer.qkv, layer.out, layer.gate_up, layer.down]
        return sum(weight.nbytes for weight in weights)

    @property
    def resident_bytes(self) -> int:
        """Bytes of everything that is kept of the model: weights, embedding, norms, angles."""
        own = self._decoder
        numbers = [own.cos, own.sin, own.norm, *([] if self._embedding is None else [self._embedding])]
        for layer in own.layers:
            numbers += [layer.attention_norm, layer.mlp_norm, layer.key_mean]
        return self.weight_bytes + sum(x.nbytes for x in numbers)

    @property
    def saturation(self) -> Saturation:
        """What static scales of inputs clipped so far; nothing but zeros for another recipe."""
        return self._decoder.saturation

    def new_cache(self, max_positions: int | None = None, *, fmt: Format = E4M3) -> PagedKVCache:
        """An empty cache for one sequence; None makes room for all positions that the model knows."""
        return PagedKVCache(*self._sizes(), max_positions=self._room(max_positions), fmt=fmt)

    def new_batch(self, sequences: int, max_positions: int | None = None, *, fmt: Format = E4M3) -> KVCacheBatch:
        """Empty caches for several sequences, which :meth:`step` reads together."""
        room = self._room(max_positions)
        return KVCacheBatch(*self._sizes(), sequences=sequences, max_positions=room, fmt=fmt)

    def _sizes(self) -> tuple[int, int, int]:
        return self.config.num_layers, self.config.num_kv_heads, self.config.head_dim

    def _room(self, max_positions: int | None) -> int:
        return self.config.max_positions if max_positions is None else max_positions

    @torch.no_grad()
    def __call__(self, tokens: Tensor, cache: PagedKVCache, *, every: bool = False) -> Tensor:
        """The logits after the given tokens, whose keys and values are added to the cache.

        Args:
            tokens: int64 [T], at least one: what follows the positions in the cache.
            cache: from :meth:`new_cache`.
            every: the logits after every one of them instead of the last.

        Returns:
            float32 [V], or [T, V].

        Raises:
            TypeError: tokens that are no tensor of integers, or a cache that is none of one sequence.
            BackendError: a cache of another model, or tokens that are not on a CPU.
            ConfigError: no token, one outside the vocabulary, or more than the cache or the model has positions for.
                The cache is as it was, whatever is raised.
        """
        self._check(tokens, cache)
        tokens = tokens.long()  # torch takes bytes for a mask
        cache.check_room(len(tokens))
        logits = self._read(tokens, cache, every=every)
        cache.advance(len(tokens))
        return logits if every else logits[0]

    @torch.no_grad()
    def step(self, tokens: Tensor, batch: KVCacheBatch) -> Tensor:
        """The logits after one more token of every sequence of a batch, whose keys and values are added to it.

        The first tokens of a sequence are read by calling the runner with ``batch.sequences[i]``.

        Args:
            tokens: int64 [sequences].
            batch: from :meth:`new_batch`.

        Returns:
            float32 [sequences, V].

        Raises:
            TypeError: tokens that are no tensor of integers, or a batch that is none.
            BackendError: a batch of another model, or tokens that are not on a CPU.
            ConfigError: another number of tokens, one outside the vocabulary, or a sequence that is full.

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
            >>> batch = runner.new_batch(2)
            >>> _ = runner(torch.tensor([1, 2, 3]), batch.sequences[0])
            >>> runner.step(torch.tensor([4, 5]), batch).shape, batch.lengths
            (torch.Size([2, 64]), [4, 1])
        """
        if not isinstance(batch, KVCacheBatch):
            raise TypeError(f"a step reads into a batch, from new_batch(), not into a {type(batch).__name__}")
        _check_integers(tokens)
        if tokens.shape != (len(batch.sequences),):
            raise ConfigError(
                f"a step reads a token of each of {len(batch.sequences)} sequences, not {tuple(tokens.shape)} tokens"
            )
        for token, cache in zip(tokens.split(1), batch.sequences, strict=True):
            self._check(token, cache)
        batch.check_room()
        tokens, positions = tokens.long(), batch.lengths
        if self._native is not None:
            sequence, position = (torch.tensor(x, device="cpu") for x in (range(len(tokens)), positions))
            logits = self._native.run(self._embed(tokens), batch.tensors, sequence, position, told=len(tokens))
        else:
            pairs = zip(tokens.split(1), batch.sequences, strict=True)
            logits = torch.cat([self._read(token, cache) for token, cache in pairs])
        batch.advance()
        return logits

    @torch.no_grad()
    def read_rows(
        self, tokens: Tensor, tensors: CacheTensors, *, sequence: Tensor, position: Tensor, told: int
    ) -> Tensor:
        """Read any next tokens of any sequences of a cache at once: what an engine's step does.

        What a row gives depends on its own sequence alone, to the bit: neither on the other rows nor on how a
        sequence's tokens are cut into calls. Without native kernels that is so because rows are read one by one.

        Args:
            tokens: int64 [R], within the vocabulary.
            tensors: all sequences' pages, with a row of the table for each.
            sequence: int64 [R], the row of the table of every token.
            position: int64 [R]; those of a sequence ascend, and follow what is in the cache.
            told: how many rows, the last ones, get logits.

        Returns:
            float32 [told, V].

        Raises:
            BackendError: rows, tables and positions that do not go together.
        """
        if not 1 <= told <= len(tokens):
            raise BackendError(f"from 1 to all {len(tokens)} rows get logits, not {told}")
        if self._native is not None:
            return self._native.run(self._embed(tokens), tensors, sequence, position, told=told)
        assert self._reference is not None
        rows = []
        for token, own, start in zip(tokens.split(1), sequence.tolist(), position.tolist(), strict=True):
            cache = PagedKVCache.over(replace(tensors, table=tensors.table[own : own + 1]))
            rows.append(self._reference.run(token, cache, start))
        return torch.cat(rows[-told:])

    def _read(self, tokens: Tensor, cache: PagedKVCache, *, every: bool = False) -> Tensor:
        """Run the native kernels, or the reference."""
        if self._reference is not None:
            return self._reference.run(tokens, cache, cache.length, every=every)
        assert self._native is not None
        position, told = cache.next_positions(len(tokens)), len(tokens) if every else 1
        return self._native.run(self._embed(tokens), cache.tensors, torch.zeros_like(position), position, told=told)

    def _embed(self, tokens: Tensor) -> Tensor:
        if self._embedding is not None:
            return self._embedding[tokens].float()
        return self._decoder.head.dequantize(tokens)

    def _check(self, tokens: Tensor, cache: PagedKVCache) -> None:
        if not isinstance(cache, PagedKVCache):
            raise TypeError(
                f"a runner reads into a cache of one sequence, from new_cache(), not into a {type(cache).__name__}"
            )
        _check_integers(tokens)
        cache.tensors.check_made_for(*self._sizes())
        if tokens.device.type != "cpu":
            raise BackendError(f"a runner reads tokens on a CPU, not on {tokens.device}; move them there")
        if tokens.ndim != 1 or not len(tokens):
            raise ConfigError(
                f"a runner reads the tokens of one sequence, [T], at least one, not {tuple(tokens.shape)}"
            )
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.config.vocab_size:
            raise ConfigError(
                f"token ids must be 0 or more and below the vocabulary's {self.config.vocab_size}, not "
                f"{int(tokens.min())} to {int(tokens.max())}"
            )
        if cache.length + len(tokens) > self.config.max_positions:
            raise ConfigError(
                f"this model knows {self.config.max_positions} positions, and {cache.length + len(tokens)} are needed; "
                "shorten the text"
            )


def _check_integers(tokens: object) -> None:
    dtype = getattr(tokens, "dtype", type(tokens).__name__)
    if dtype not in _INTEGERS:
        raise TypeError(f"tokens are a tensor of integers, not {dtype}")


def _check_on_cpu(model: Llama) -> None:
    devices = {str(parameter.device) for parameter in model.parameters()}
    if devices != {"cpu"}:
        raise ConfigError(
            f"octavo generates on the CPU, and this model is on {' and '.join(sorted(devices))}: call model.cpu(), or "
            f"{ON_A_GPU}"
        )


def _key_means(config: LlamaConfig, given: Mapping[int, Tensor] | None) -> list[Tensor]:
    """Of every layer, zeros where none are given."""
    shape = (config.num_kv_heads, config.head_dim)
    if given is None:
        return [torch.zeros(shape, device="cpu") for _ in range(config.num_layers)]
    if given.keys() != {*range(config.num_layers)} or any(mean.shape != shape for mean in given.values()):
        found = " and ".join(sorted({str(list(mean.shape)) for mean in given.values()})) or "none"
        raise ConfigError(
            f"this model's keys have a mean {list(shape)} in each of {config.num_layers} layers, and given are "
            f"{len(given)} of {found}; calibrate this model"
        )
    if not all(bool(mean.isfinite().all()) for mean in given.values()):
        raise ConfigError("a mean of keys is NaN or infinite, and would make every key so; calibrate again")
    return [given[layer].detach().to("cpu", torch.float32, copy=True) for layer in range(config.num_layers)]


def _decoder(model: Llama, recipe: ServingRecipe, key_means: list[Tensor]) -> Decoder:
    config, body = model.config, model.model
    shape = DecoderShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.rms_norm_eps,
    )
    own = [_layer(layer, recipe, mean) for layer, mean in zip(body.layers, key_means, strict=True)]
    head = held_weight(recipe, model.lm_head, is_head=True)
    return Decoder(shape, own, _copied(body.cos), _copied(body.sin), _copied(body.norm.weight), head)


def _layer(layer: nn.Module, recipe: ServingRecipe, key_mean: Tensor) -> DecoderLayer:
    assert isinstance(layer, llama.DecoderLayer)
    attention, mlp = layer.self_attn, layer.mlp
    return DecoderLayer(
        attention_norm=_copied(layer.input_layernorm.weight),
        qkv=held_weight(recipe, attention.q_proj, attention.k_proj, attention.v_proj),
        out=held_weight(recipe, attention.o_proj),
        mlp_norm=_copied(layer.post_attention_layernorm.weight),
        key_mean=key_mean,
        gate_up=held_weight(recipe, mlp.gate_proj, mlp.up_proj),
        down=held_weight(recipe, mlp.down_proj),
    )


def _copied(numbers: Tensor) -> Tensor:
    return numbers.detach().to(torch.float32, copy=True)


def _narrowed(numbers: Tensor) -> Tensor:
    """A copy in BF16 where it holds just these numbers, else as they are."""
    narrow = numbers.bfloat16()
    return (narrow if torch.equal(narrow.to(numbers.dtype), numbers) else numbers).clone()
