"""Native kernels for generation: attention over a paged cache, and a whole Llama-style decoder in one call.

| tensor       | shape and dtype                                                                                     |
|--------------|-----------------------------------------------------------------------------------------------------|
| keys         | [pages, kv heads, D, PAGE], E4M3, bfloat16 or float32                                               |
| values       | [pages, kv heads, PAGE, D], the same dtype                                                          |
| scales       | [pages, kv heads, PAGE] bfloat16: scale of each vector of codes; None in high precision             |
| table        | [sequences, P] int32: page with positions PAGE·i … PAGE·i + PAGE - 1 of each sequence               |
| sequence     | [R] int64: sequence of each row                                                                     |
| position     | [R] int64: position of each row, which attends to the positions up to it                            |

octavo.inference.reference defines the results with torch operations; sums are FP32 in another order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo.errors import BackendError
from octavo.formats import BF16, E4M3
from octavo.inference.decoder_weights import DecoderWeight, Saturation
from octavo.kernels import native_bindings
from octavo.models import LlamaConfig
from octavo.numerics.integers import HALF_RANGE, LEAST_SCALE
from octavo.numerics.scaling import AMAX_FLOOR

__all__ = [
    "MAX_HEAD_DIM",
    "PAGE",
    "CacheTensors",
    "DecoderLayerTensors",
    "DecoderTensors",
    "MLPWeights",
    "NativeDecoder",
    "attend",
]

PAGE = 64  # as in native/kernels.h
MAX_HEAD_DIM = 512
_CACHED = (E4M3.torch_dtype, BF16.torch_dtype, torch.float32)


@dataclass(frozen=True, slots=True)
class MLPWeights:
    """Weights of an MLP, or of one expert.

    Attributes:
        gate_up: rows of the gate, then of the up projection.
        down: [hidden, intermediate].
    """

    gate_up: DecoderWeight
    down: DecoderWeight

    @property
    def nbytes(self) -> int:
        """Bytes of both weights."""
        return self.gate_up.nbytes + self.down.nbytes


@dataclass(frozen=True, slots=True)
class DecoderLayerTensors:
    """Tensors of one layer; weights are [N, K].

    Attributes:
        attention_norm: float32 [hidden].
        qkv: rows of the query heads, then key heads, then value heads.
        out: [hidden, heads · D].
        mlp_norm: float32 [hidden].
        key_mean: float32 [kv heads, D], subtracted from the rotated keys before storing; it cancels in the softmax.
        mlps: weights of the MLP, or of each expert and then of the one that every row goes to, if there is one.
        router: float32 [experts, hidden]; None without experts.
        shared_gate: float32 [hidden], of the share of the expert that every row goes to; None without one.
        qk_norms: weights of the norms of queries and keys, float32; None without them.
    """

    attention_norm: Tensor
    qkv: DecoderWeight
    out: DecoderWeight
    mlp_norm: Tensor
    key_mean: Tensor
    mlps: Sequence[MLPWeights]
    router: Tensor | None = None
    shared_gate: Tensor | None = None
    qk_norms: tuple[Tensor, Tensor] | None = None

    @property
    def numbers(self) -> list[Tensor]:
        """Tensors in high precision."""
        others = [each for each in (self.router, self.shared_gate) if each is not None]
        return [self.attention_norm, self.mlp_norm, self.key_mean, *(self.qk_norms or ()), *others]


@dataclass(frozen=True, slots=True)
class DecoderTensors:
    """Tensors of a model, except its embedding.

    Attributes:
        config: sizes of the model.
        layers: tensors of every layer.
        cos: float32 [positions, D], cosines of the rotary angles, the same in both halves.
        sin: sines of the rotary angles.
        norm: float32 [hidden], weight of the last norm.
        head: [V, hidden].
        saturation: counts of elements cast with static scales, updated by each run.

    Raises:
        BackendError: a tensor of another shape.
    """

    config: LlamaConfig
    layers: Sequence[DecoderLayerTensors]
    cos: Tensor
    sin: Tensor
    norm: Tensor
    head: DecoderWeight
    saturation: Saturation = field(default_factory=Saturation)

    def __post_init__(self) -> None:
        c = self.config
        angles = (len(self.cos), c.head_dim)
        tensors: dict[str, tuple[Tensor | DecoderWeight, tuple[int, ...]]] = {
            "cos": (self.cos, angles),
            "sin": (self.sin, angles),
            "norm": (self.norm, (c.hidden_size,)),
            "head": (self.head, (self.head.shape[0], c.hidden_size)),
        }
        for index, layer in enumerate(self.layers):
            tensors |= {f"{index}.{name}": each for name, each in _expected_shapes(c, layer, index).items()}
        for name, (tensor, expected) in tensors.items():
            if tensor.shape != expected:
                raise BackendError(f"a decoder of this shape has {name} {expected}, not {tuple(tensor.shape)}")

    @property
    def attention_scale(self) -> float:
        """Factor of the attention scores, 1 / sqrt(D)."""
        return 1 / math.sqrt(self.config.head_dim)


def _expected_shapes(
    c: LlamaConfig, layer: DecoderLayerTensors, index: int
) -> dict[str, tuple[Tensor | DecoderWeight, tuple[int, ...]]]:
    """Tensors of a layer with the shapes that the kernels read; BackendError for another number of them."""
    sizes, is_routed = c.mlp_sizes(index), c.has_experts(index)
    numbers = (len(layer.mlps), layer.router is not None, layer.qk_norms is not None)
    if numbers != (expected := (len(sizes), is_routed, c.qk_norm is not None)):
        raise BackendError(
            f"a layer of this decoder has {expected[0]} MLPs, a router: {expected[1]}, norms of queries and keys: "
            f"{expected[2]}, not {numbers[0]}, {numbers[1]} and {numbers[2]}"
        )
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[Tensor | DecoderWeight, tuple[int, ...]]] = {
        "attention_norm": (layer.attention_norm, (c.hidden_size,)),
        "mlp_norm": (layer.mlp_norm, (c.hidden_size,)),
        "key_mean": (layer.key_mean, (c.num_kv_heads, c.head_dim)),
        "qkv": (layer.qkv, (queries + 2 * keys, c.hidden_size)),
        "out": (layer.out, (c.hidden_size, queries)),
    }
    for number, (mlp, size) in enumerate(zip(layer.mlps, sizes, strict=True)):
        shapes[f"{number}.gate_up"] = (mlp.gate_up, (2 * size, c.hidden_size))
        shapes[f"{number}.down"] = (mlp.down, (c.hidden_size, size))
    if layer.router is not None:
        shapes["router"] = (layer.router, (c.num_experts or 0, c.hidden_size))
    if (layer.shared_gate is not None) != (is_routed and c.shared_size is not None):
        raise BackendError("a layer of this decoder has a shared_gate if, and only if, it has a shared expert")
    if layer.shared_gate is not None:
        shapes["shared_gate"] = (layer.shared_gate, (c.hidden_size,))
    for name, norm, size in zip(("query_norm", "key_norm"), layer.qk_norms or (), c.qk_norm_sizes, strict=False):
        shapes[name] = (norm, (size,))
    return shapes


@dataclass(frozen=True, slots=True)
class CacheTensors:
    """Keys and values of all layers, in the layout of the table above with a first dimension for layers.

    Attributes:
        keys: [layers, pages, kv heads, D, PAGE].
        values: [layers, pages, kv heads, PAGE, D].
        key_scale: [layers, pages, kv heads, PAGE], or None.
        value_scale: same as ``key_scale``.
        table: pages of every sequence.

    Raises:
        BackendError: shapes, dtypes or devices do not match.
    """

    keys: Tensor
    values: Tensor
    key_scale: Tensor | None
    value_scale: Tensor | None
    table: Tensor

    def __post_init__(self) -> None:
        layers, pages, heads, dim, _ = self.keys.shape
        scales = [scale for scale in (self.key_scale, self.value_scale) if scale is not None]
        fits = self.keys.shape[4] == PAGE and self.values.shape == (layers, pages, heads, PAGE, dim)
        fits &= len(scales) == (2 if self.keys.dtype == E4M3.torch_dtype else 0)
        fits &= all(scale.shape == (layers, pages, heads, PAGE) and scale.dtype == BF16.torch_dtype for scale in scales)
        fits &= self.keys.dtype == self.values.dtype and self.keys.dtype in _CACHED and dim <= MAX_HEAD_DIM
        fits &= self.table.ndim == 2 and self.table.dtype == torch.int32
        if not fits:
            raise BackendError(
                f"a cache has keys [layers, pages, kv heads, D, {PAGE}], values [layers, pages, kv heads, {PAGE}, D], "
                f"D up to {MAX_HEAD_DIM}, in E4M3 with a bfloat16 scale per vector, or in bfloat16 or float32 "
                f"without scales, and an int32 table, not {tuple(self.keys.shape)} {self.keys.dtype}, "
                f"{tuple(self.values.shape)} {self.values.dtype} and {self.table.dtype}"
            )
        tensors = (self.keys, self.values, self.table, *scales)
        if not all(tensor.is_contiguous() for tensor in tensors):
            strides = [tensor.stride() for tensor in tensors]
            raise BackendError(f"keys, values, table and scales must be contiguous, not of strides {strides}")
        if (devices := {str(tensor.device) for tensor in tensors}) != {"cpu"}:
            raise BackendError(f"a cache must be on a CPU, not on {' and '.join(sorted(devices))}")

    def check_made_for(self, layers: int, kv_heads: int, head_dim: int) -> None:
        """Raise BackendError if the cache is for another model."""
        sizes = (self.keys.shape[0], self.keys.shape[2], self.keys.shape[3])
        if sizes != (layers, kv_heads, head_dim):
            raise BackendError(
                f"this cache is for {sizes[0]} layers with {sizes[1]} key heads of width {sizes[2]}, and the model has "
                f"{layers} with {kv_heads} of {head_dim}; create one with the runner's new_cache()"
            )

    def addresses(self, layer: int) -> tuple[int, int, int, int]:
        """Addresses of a layer's keys, key scales, values and value scales; 0 for None."""
        tensors = (self.keys, self.key_scale, self.values, self.value_scale)
        keys, key_scale, values, value_scale = (0 if t is None else t[layer].data_ptr() for t in tensors)
        return keys, key_scale, values, value_scale


def attend(
    queries: Tensor,
    cache: CacheTensors,
    layer: int,
    *,
    sequence: Tensor,
    position: Tensor,
    scale: float,
    level: str | None = None,
) -> Tensor:
    """Compute ``softmax(queries · keysᵀ · scale) · values`` of each row over the cache of its sequence.

    Args:
        queries: float32 [R, heads, D]; each key head serves heads / kv heads adjacent query heads.
        cache: keys and values.
        layer: index of the layer.
        sequence: int64 [R], sequence of each row.
        position: int64 [R], position of each row.
        scale: factor of the scores.
        level: instruction-set level; None is the best.

    Returns:
        float32 [R, heads, D]. A row depends only on its own sequence, and not on the number of threads.

    Raises:
        BackendError: shapes or dtypes do not match, or rows are outside the cache.
    """
    _, _, kv_heads, dim, _ = cache.keys.shape
    rows, heads, head_dim = queries.shape
    if head_dim != dim or heads % kv_heads or len(sequence) != rows:
        raise BackendError(
            f"this cache needs queries [R, heads, {dim}] with heads a multiple of {kv_heads}, and R sequences and "
            f"positions, not {tuple(queries.shape)}, {tuple(sequence.shape)} and {tuple(position.shape)}"
        )
    _check_rows(cache, sequence, position, queries)
    queries = native_bindings.in_memory(queries.float()).contiguous()
    out = torch.empty_like(queries)
    native_bindings.extension().attend(
        native_bindings.level_number(level),
        queries.data_ptr(),
        heads,
        kv_heads,
        dim,
        native_bindings.element_number(cache.keys.dtype),
        *cache.addresses(layer),
        cache.table.data_ptr(),
        cache.table.shape[1],
        rows,
        sequence.data_ptr(),
        position.data_ptr(),
        scale,
        out.data_ptr(),
    )
    return out


class NativeDecoder:
    """Decoder run by the native kernels.

    Args:
        decoder: tensors of the decoder; references to them are kept.
        level: instruction-set level; None is the best.
    """

    def __init__(self, decoder: DecoderTensors, *, level: str | None = None) -> None:
        config = self._config = decoder.config
        self._saturation = decoder.saturation
        self._layers, self._positions = len(decoder.layers), len(decoder.cos)
        self._kept: list[Tensor] = []  # tensors that the kernels address
        self._vocabulary = decoder.head.shape[0]
        self._decoder = native_bindings.extension().Decoder(
            native_bindings.level_number(level),
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            *config.qk_norm_sizes,
            config.experts_per_token or 0,
            config.normalize_shares,
            config.rms_norm_eps,
            decoder.attention_scale,
            AMAX_FLOOR,
            HALF_RANGE,
            LEAST_SCALE,
            *(self._address(numbers) for numbers in (decoder.cos, decoder.sin, decoder.norm)),
            self._weight(decoder.head),
        )
        for layer in decoder.layers:
            numbers = (layer.attention_norm, layer.mlp_norm, layer.key_mean, *(layer.qk_norms or (None, None)))
            self._decoder.add_layer(
                *map(self._address, numbers),
                *map(self._weight, (layer.qkv, layer.out)),
                [(self._weight(mlp.gate_up), self._weight(mlp.down)) for mlp in layer.mlps],
                0 if layer.router is None else len(layer.router),
                self._address(layer.router),
                self._address(layer.shared_gate),
            )

    def run(
        self, hidden: Tensor, cache: CacheTensors, sequence: Tensor, position: Tensor, *, num_logits: int = 1
    ) -> Tensor:
        """Read the next positions of some sequences and add their keys and values to the cache.

        Args:
            hidden: float32 [R, hidden], contiguous: rows of the embedding; overwritten.
            cache: cache of all layers.
            sequence: int64 [R], sequence of each row.
            position: int64 [R], position of each row; those of a sequence follow the positions in the cache.
            num_logits: number of last rows that get logits; 1 to R.

        Returns:
            float32 [num_logits, V]. A row has the same bits for any other rows and any number of threads.

        Raises:
            BackendError: cache or rows of another model, or rows outside the cache or the rotary tables.
        """
        self._check(hidden, cache, sequence, position)
        if not 1 <= num_logits <= len(hidden):
            raise BackendError(f"the number of rows with logits must be from 1 to {len(hidden)}, not {num_logits}")
        logits = native_bindings.fresh((num_logits, self._vocabulary), torch.float32)
        elements, saturated = self._decoder.run(
            hidden.data_ptr(),
            len(hidden),
            sequence.data_ptr(),
            position.data_ptr(),
            native_bindings.element_number(cache.keys.dtype),
            *cache.addresses(0),
            cache.keys.shape[1],
            cache.table.data_ptr(),
            cache.table.shape[1],
            num_logits,
            logits.data_ptr(),
        )
        self._saturation.elements += elements
        self._saturation.saturated += saturated
        return logits

    def _check(self, hidden: Tensor, cache: CacheTensors, sequence: Tensor, position: Tensor) -> None:
        cache.check_made_for(self._layers, self._config.num_kv_heads, self._config.head_dim)
        _check_rows(cache, sequence, position, hidden)
        expected = (len(sequence), self._config.hidden_size)
        if hidden.shape != expected or hidden.dtype != torch.float32 or not hidden.is_contiguous() or not len(hidden):
            raise BackendError(
                f"this decoder takes float32 rows {expected}, contiguous and at least one, not {tuple(hidden.shape)} "
                f"{hidden.dtype}"
            )
        if int(position.max()) >= self._positions:
            raise BackendError(
                f"this decoder has rotary tables for {self._positions} positions, not {int(position.max()) + 1}"
            )

    def _address(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        self._kept.append(native_bindings.in_memory(tensor.float()).contiguous())
        return self._kept[-1].data_ptr()

    def _weight(self, weight: DecoderWeight) -> tuple[int, ...]:
        data = native_bindings.in_memory(weight.data).contiguous()
        self._kept.append(data)
        layout = (data.data_ptr(), native_bindings.element_number(data.dtype), data.stride(0), 1)
        scale, bias, input_scale = (self._address(x) for x in (weight.scale, weight.bias, weight.input_scale))
        return (*layout, scale, True, data.shape[0], weight.block, bias, weight.input.value, input_scale)


def _check_rows(cache: CacheTensors, sequence: Tensor, position: Tensor, rows: Tensor) -> None:
    """Check sequences and positions, since a kernel would read any address that follows from them."""
    for name, tensor in {"sequences": sequence, "positions": position, "rows": rows}.items():
        if tensor.device.type != "cpu":
            raise BackendError(f"the kernels read tensors on a CPU, and the {name} are on {tensor.device}")
    fits = all(t.dtype == torch.int64 and t.ndim == 1 and t.is_contiguous() for t in (sequence, position))
    if not fits or len(sequence) != len(position):
        actual = " and ".join(f"{tuple(t.shape)} {t.dtype}" for t in (sequence, position))
        raise BackendError(f"sequences and positions must be contiguous int64 [R], not {actual}")
    sequences, pages = cache.table.shape
    limits = {
        "sequences": (sequence, sequences),
        "positions": (position, pages * PAGE),
        "pages": (cache.table.flatten(), cache.keys.shape[1]),
    }
    for name, (numbers, limit) in limits.items():
        values = numbers.tolist()
        if values and (min(values) < 0 or max(values) >= limit):
            raise BackendError(f"this cache has {limit} {name}, 0 to {limit - 1}, not {min(values)} to {max(values)}")
