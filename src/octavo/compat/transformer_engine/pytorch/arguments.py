"""Conversion of Transformer Engine's arguments, and those without effect or support.

An argument that a module here names is supported. The others are in three tables: arguments that concern only speed,
memory, names or processes are accepted without effect; some must have one of a set of values; the rest is accepted only
at its default.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypedDict, TypeVar

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError

__all__ = [
    "Initializer",
    "Visibility",
    "activation_name",
    "check_others",
    "initialize",
    "is_causal",
    "normalization_name",
    "visibility",
    "window_of",
]

Initializer = Callable[[Tensor], object]
_T = TypeVar("_T")

NO_EFFECT = frozenset({
    "checkpoint_core_attention", "cp_comm_type", "cp_global_ranks", "cp_stream", "distribute_saved_activations",
    "fast_zero_fill", "fuse_qkv_params", "get_rng_state_tracker", "is_first_microbatch", "layer_number",
    "max_seqlen_kv", "max_seqlen_q", "micro_batch_size", "name", "num_splits",
    "preserve_high_precision_init_val", "rng_state_tracker_function", "rng_tracker_name", "seq_length",
    "sequence_parallel", "set_parallel_mode", "tensor_parallel", "ub_atomic_gemm_ag", "ub_bulk_dgrad",
    "ub_bulk_wgrad", "ub_name", "ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_split_ag",
    "ub_split_rs", "ub_tp_comm_overlap", "use_reentrant",
})  # fmt: skip
"""Arguments that concern speed, memory, names, or a tensor-parallel group where a module has no layer to divide."""

ONE_OF: Mapping[str, tuple[object, ...]] = dict.fromkeys(
    ("parallel_mode", "tensor_parallel_mode"), (None, "column", "row")
)
"""Arguments without effect that must have one of these values."""

ONLY_DEFAULT: Mapping[str, object] = {
    "accumulate_into_main_grad": False,
    "activation_params": None,
    "alibi_slopes": None,
    "apply_residual_connection_post_layernorm": False,
    "core_attention_bias": None,
    "core_attention_bias_type": "no_bias",
    "cp_group": None,
    "cu_seqlens_kv": None,
    "cu_seqlens_kv_padded": None,
    "cu_seqlens_q": None,
    "cu_seqlens_q_padded": None,
    "delay_wgrad_compute": False,
    "drop_path_rate": 0.0,
    "enc_dec_window_size": None,
    "fp8_output": False,
    "fuse_wgrad_accumulation": False,
    "inference_params": None,
    "output_layernorm": False,
    "pad_between_seqs": None,
    "parameters_split": None,
    "qk_norm_before_rope": False,
    "qk_norm_eps": 1e-6,
    "qk_norm_type": None,
    "return_bias": False,
    "return_max_logit": False,
    "rotary_pos_interleaved": False,
    "save_original_input": False,
    "softmax_type": "vanilla",
    "symmetric_ar_type": None,
    "tp_group": None,
    "tp_size": 1,
}

_ACTIVATIONS = {
    "gelu": "gelu_tanh",
    "geglu": "geglu_tanh",
    **{same: same for same in ("qgelu", "qgeglu", "relu", "reglu", "silu", "srelu", "sreglu", "swiglu")},
}
_NORMALIZATIONS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
_CAUSAL = {
    "no_mask": False,
    "padding": False,
    "arbitrary": False,
    "causal": True,
    "causal_bottom_right": True,
    "padding_causal": True,
    "padding_causal_bottom_right": True,
}
_SPELLINGS = dict.fromkeys(("padding,causal", "causal,padding", "causal_padding"), "padding_causal")


class Visibility(TypedDict):
    """Attention masks for octavo's modules; True marks a visible key."""

    padding: Tensor | None
    mask: Tensor | None


def check_others(what: str, others: Mapping[str, object]) -> None:
    """Check arguments that module ``what`` does not name.

    Raises:
        TypeError: unknown argument.
        ConfigError: arguments of :data:`ONE_OF` or :data:`ONLY_DEFAULT` at other values.

    Example:
        >>> check_others("Linear", {"return_bias": True})
        Traceback (most recent call last):
        ...
        octavo.errors.ConfigError: octavo's Linear does not support return_bias=True; leave it at False
    """
    for name, value in others.items():
        if name in NO_EFFECT:
            continue
        if name in ONE_OF:
            if value not in ONE_OF[name]:
                raise ConfigError(f"{name} must be one of {', '.join(map(repr, ONE_OF[name]))}, not {value!r}")
            continue
        if name not in ONLY_DEFAULT:
            raise TypeError(f"octavo's {what} has no argument {name!r}")
        default = ONLY_DEFAULT[name]
        if value is not default and (isinstance(value, Tensor) or value != default):
            shown = type(value).__name__ if isinstance(value, Tensor) else repr(value)
            raise ConfigError(f"octavo's {what} does not support {name}={shown}; leave it at {default!r}")


def activation_name(name: str) -> str:
    """Name in octavo of an activation; Transformer Engine's ``gelu`` is the tanh approximation."""
    return _looked_up("activation", name, _ACTIVATIONS)


def normalization_name(name: str) -> str:
    """Name in octavo of a norm."""
    return _looked_up("normalization", name, _NORMALIZATIONS)


def is_causal(mask_type: str) -> bool:
    """Return True if a mask of this type hides later positions."""
    return _looked_up("the attention mask type", _SPELLINGS.get(mask_type, mask_type), _CAUSAL)


def window_of(window_size: tuple[int, int] | None, *, causal: bool) -> int | None:
    """Window in octavo for (left, right), where -1 is no limit.

    Example:
        >>> window_of((-1, 0), causal=True), window_of((128, 0), causal=True), window_of((4, 4), causal=False)
        (None, 128, 4)
    """
    if window_size is None:
        return None
    left, right = window_size
    if causal and left >= -1 and right in (0, -1):
        return None if left == -1 else left
    if not causal and left == right >= -1:
        return None if left == -1 else left
    allowed = "(left, 0)" if causal else "of two equal numbers"
    raise ConfigError(f"window_size must be {allowed} with this mask type, not {window_size!r}")


def visibility(mask_type: str, attention_mask: Tensor | tuple[Tensor, ...] | None) -> Visibility:
    """Convert a mask whose True hides a key.

    Args:
        mask_type: "padding..." takes [B, 1, 1, S], or such masks of queries and keys; "arbitrary" a mask that
            broadcasts to [B, heads, T, S]; the others take None.
        attention_mask: bool.

    Raises:
        ConfigError: a mask with a type that takes none, or the reverse.
    """
    mask_type = _SPELLINGS.get(mask_type, mask_type)
    hides = attention_mask[-1] if isinstance(attention_mask, tuple) else attention_mask
    reads = mask_type.startswith("padding") or mask_type == "arbitrary"
    if reads != (hides is not None):
        raise ConfigError(
            f"mask type {mask_type!r} " + ("needs an attention mask" if hides is None else "takes no attention mask")
        )
    if hides is None:
        return {"padding": None, "mask": None}
    if hides.dtype is not torch.bool or hides.ndim != 4:
        raise ConfigError(f"an attention mask must be bool with 4 dimensions, not {hides.dtype} {tuple(hides.shape)}")
    if mask_type == "arbitrary":
        return {"padding": None, "mask": ~hides}
    if hides.shape[1:3] != (1, 1):
        raise ConfigError(f"a padding mask must be [B, 1, 1, S], not {tuple(hides.shape)}")
    return {"padding": ~hides[:, 0, 0], "mask": None}


_normal = partial(nn.init.normal_, mean=0.0, std=0.023)


@torch.no_grad()
def initialize(module: nn.Module, init: Initializer | None, output_init: Initializer | None = None) -> None:
    """Initialize the weights of the linear layers of ``module``, and biases with 0.

    Args:
        module: linear layer or a module with linear layers.
        init: initializer; None is a normal distribution with standard deviation 0.023.
        output_init: initializer of layers that write to the residual stream; None is ``init``.
    """
    for path, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            writes = path.rpartition(".")[2] in {"out", "fc2"}
            ((output_init if writes else init) or _normal)(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def _looked_up(what: str, name: str, table: Mapping[str, _T]) -> _T:
    if name not in table:
        raise ConfigError(f"{what} must be one of {', '.join(table)}, not {name!r}")
    return table[name]
