"""A decoder for the engine that computes as another engine does, under its profile.

    casts, scales, sums of GEMMs, dtypes     octavo.engines.model_as
    keys and values                          cast as the profile says, then stored in its activations' dtype
    everything else                          a row alone (octavo.kernels.row_by_row)

So a token's logits have the same bits in prefill, however it is split, in decoding, alone and in company, and they are
those of :func:`octavo.rl.log_probs` under the profile. Profiles in which rows share a dynamic scale are refused.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from octavo.engines.model import EngineLinear, model_as
from octavo.errors import BackendError, ConfigError
from octavo.formats import BF16, FP32, Format
from octavo.inference.decoder_weights import Saturation
from octavo.inference.kv_cache import KVCacheBatch, PagedKVCache
from octavo.inference.model_runner import check_on_cpu
from octavo.inference.native_decoder import CacheTensors
from octavo.inference.recipes import has_static_scales
from octavo.kernels.row_by_row import RowByRow
from octavo.language_model import KVTransform
from octavo.models import Llama
from octavo.models.llama import causal_attention
from octavo.numerics import PerTensor, QuantizedTensor, Scaling
from octavo.numerics.granularity import Granularity
from octavo.numerics.metrics import saturation_limit
from octavo.recipes.engines import EngineProfile
from octavo.recipes.engines.catalog import resolved

__all__ = ["ProfileRunner", "cache_format_of"]

CACHE_FORMATS = {torch.bfloat16: BF16, torch.float32: FP32}  # by dtype of the activations


class ProfileRunner:
    """Next-token logits of a model under another engine's profile, for :class:`octavo.inference.Engine`.

    Args:
        model: decoder on a CPU, in high precision or with stored FP8 codes; not changed. Tensors may be shared with it.
        profile: the engine or its name.

    Attributes:
        config: sizes of the model.
        profile: the engine.
        cache_format: of keys and values; the only one that :meth:`new_batch` takes.
        saturation: counts of input elements cast with static scales; an input counts for each layer that reads it.

    Raises:
        ConfigError: an unknown profile; one in which rows share a dynamic scale, whose scales are of past steps, or
            whose activations no cache holds; or static scales that the model does not have.
        BackendError: the model stores codes with scales that the profile's GEMM does not multiply.

    Example:
        >>> from octavo.models import Llama, LlamaConfig
        >>> sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_layers": 1}
        >>> llama = Llama(LlamaConfig(**sizes, num_heads=2, num_kv_heads=1, max_positions=16))
        >>> runner = ProfileRunner(llama, "vllm-token")
        >>> batch, at = runner.new_batch(1), torch.arange(3)
        >>> runner.read_rows(at + 5, batch.tensors, sequence=0 * at, position=at, num_logits=2).shape
        torch.Size([2, 64])
    """

    def __init__(self, model: Llama, profile: str | EngineProfile) -> None:
        self.config, self.profile = model.config, resolved(profile)
        check_on_cpu(model)
        self.cache_format = cache_format_of(self.profile)
        cast = self.profile.input
        if cast is not None and cast.scaling is Scaling.STATIC and not has_static_scales(model):
            raise ConfigError(
                f"{self.profile.name} takes its inputs' scales from calibration, and this model has none; serve a "
                f"folder of octavo export --for {self.profile.name} --calibration FOLDER"
            )
        engine = model_as(model, self.profile)
        engine(
            torch.zeros(1, 1, dtype=torch.long, device="cpu")
        )  # raises here for codes that do not fit, not in a request
        self.saturation = Saturation()
        for layer in engine.layers.values():
            if layer.input_scale is not None:
                layer.register_forward_pre_hook(self._count)
        self._decoder: Any = engine.model
        self._kv_transform = engine.kv_transform

    def new_batch(self, sequences: int, max_positions: int | None = None, *, fmt: Format | None = None) -> KVCacheBatch:
        """Create empty caches for several sequences; None is the model's number of positions, and its format.

        Raises:
            ConfigError: another format.
        """
        if fmt not in (None, self.cache_format):
            raise ConfigError(
                f"{self.profile.name} keeps keys and values in {self.cache_format}, not in {fmt}; give the runner's "
                "cache_format"
            )
        c = self.config
        return KVCacheBatch(
            c.num_layers,
            c.num_kv_heads,
            c.head_dim,
            sequences=sequences,
            max_positions=c.max_positions if max_positions is None else max_positions,
            fmt=self.cache_format,
        )

    @torch.no_grad()
    def read_rows(
        self, tokens: Tensor, tensors: CacheTensors, *, sequence: Tensor, position: Tensor, num_logits: int
    ) -> Tensor:
        """Read tokens of several sequences of a cache; see :meth:`octavo.inference.ModelRunner.read_rows`.

        Returns:
            float32 [num_logits, V].
        """
        if not 1 <= num_logits <= len(tokens):
            raise BackendError(f"the number of rows with logits must be from 1 to {len(tokens)}, not {num_logits}")
        tensors.check_made_for(self.config.num_layers, self.config.num_kv_heads, self.config.head_dim)
        first = len(tokens) - num_logits
        logits = torch.empty(num_logits, self.config.vocab_size, dtype=torch.float32, device="cpu")
        with RowByRow():
            for row in sequence.unique().tolist():
                rows = (sequence == row).nonzero()[:, 0]
                cache = PagedKVCache.over(replace(tensors, table=tensors.table[row : row + 1]))
                attention = _ProfileCache(cache, int(position[rows[0]]), self._kv_transform)
                hidden = self._decoder.model(tokens[None, rows], attention)[0]
                logits[rows[rows >= first] - first] = self._decoder.lm_head(hidden[rows >= first]).float()
        return logits

    def _count(self, layer: nn.Module, inputs: tuple[Tensor]) -> None:
        assert isinstance(layer, EngineLinear)
        assert layer.input_scale is not None
        x, none = inputs[0], torch.empty(0, dtype=layer.codes.data.dtype, device="cpu")
        limit = saturation_limit(QuantizedTensor(none, layer.input_scale, PerTensor(), torch.float32))
        self.saturation.elements += x.numel()
        self.saturation.saturated += int(((x.double().abs() > limit) & x.isfinite()).sum())


class _ProfileCache:
    """Adapter of a paged cache of one sequence to :class:`octavo.models.llama.DecoderCache`."""

    def __init__(self, cache: PagedKVCache, start: int, transform: KVTransform | None) -> None:
        self._cache, self.length, self._transform = cache, start, transform

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        end = self.length + queries.shape[1]
        if self._transform is not None:
            keys, values = self._transform(layer, keys, values)
        self._cache.store(layer, torch.arange(self.length, end, device="cpu"), keys[0], values[0])
        keys, values = (each.to(queries.dtype)[None] for each in self._cache.read(layer, end))
        rows = [  # each with the positions that it sees, so without a mask
            causal_attention(query, keys[:, :seen], values[:, :seen])
            for seen, query in enumerate(queries.split(1, dim=1), self.length + 1)
        ]
        return torch.cat(rows, dim=1)


def cache_format_of(profile: EngineProfile) -> Format:
    """Format of keys and values under a profile that can serve.

    Raises:
        ConfigError: it cannot; see :class:`ProfileRunner`.

    Example:
        >>> from octavo.engines import get
        >>> cache_format_of(get("vllm-token")).name
        'BF16'
    """
    for reason in _unserved(profile):
        raise ConfigError(
            f"octavo cannot serve as {profile.name}: {reason}; use an engine with a scale for each token, such as "
            "vllm-token"
        )
    return CACHE_FORMATS[profile.activations]


def _unserved(profile: EngineProfile) -> Iterator[str]:
    """Reasons why requests cannot be answered under a profile."""
    cast, cache = profile.input, profile.kv_cache
    if cast is not None and cast.scaling is Scaling.DELAYED:
        yield "the scales of its inputs are from past steps, which a server has not"
    if cast is not None and cast.scaling is Scaling.DYNAMIC and _is_shared(cast.granularity, 2):
        yield "tokens share a scale of its inputs, so an answer would depend on other requests"
    if cache is not None and cache.scaling is Scaling.DYNAMIC and _is_shared(cache.granularity, 4):
        yield "tokens share a scale of its KV cache, so an answer would depend on other requests"
    if profile.activations not in CACHE_FORMATS:
        yield f"a cache holds {' or '.join(map(str, CACHE_FORMATS.values()))}, not {profile.activations}"


def _is_shared(granularity: Granularity, dimensions: int) -> bool:
    """Whether two tokens, at the first dimension of an operand, share a scale."""
    return granularity.scale_shape(torch.Size([2, *[1] * (dimensions - 1)]))[:1] != (2,)
