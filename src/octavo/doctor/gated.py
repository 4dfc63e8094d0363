"""Detection of gated MLPs among a module's linear layers, by shape and by common names where shapes are ambiguous."""

from collections.abc import Mapping

__all__ = ["gated_linears"]

PAIRS = (
    ("gate_proj", "up_proj"),
    ("w1", "w3"),  # w2 is the down projection
    ("wi_0", "wi_1"),
    ("gate", "up"),
    ("w_gate", "w_up"),
    ("linear_fc1_gate", "linear_fc1_up"),
)
FUSED = frozenset({"gate_up_proj", "gate_up", "w13", "w12", "wi_fused"})
FUSED_ATTENTION = frozenset({"qkv", "qkv_proj", "wqkv", "Wqkv", "c_attn", "query_key_value", "in_proj"})


def gated_linears(shapes: Mapping[str, tuple[int, int]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of a gated MLP's gate and up projections (or of the one fused layer), and of its possible down projections.

    Gate and up have shape [N, K] each, or are the halves of one fused [2N, K] layer; down has shape [K, N]. The module
    may have other linear layers too. If N = K, or if more than two layers have the gate's shape, shapes do not
    distinguish a gated MLP from an attention's query, key and value, and known names decide.

    Args:
        shapes: (out_features, in_features) of the linear layers of one module, by name.

    Returns:
        Two tuples, both empty without a gated MLP.

    Example:
        >>> gated_linears({"w1": (24, 8), "w2": (8, 24), "w3": (24, 8), "router": (4, 8)})
        (('w1', 'w3'), ('w2',))
        >>> gated_linears({"gate_up_proj": (48, 8), "down_proj": (8, 24)})
        (('gate_up_proj',), ('down_proj',))
        >>> gated_linears({"query": (8, 8), "key": (8, 8), "value": (8, 8)})
        ((), ())
    """
    candidates: list[tuple[str, ...]] = [
        pair for pair in PAIRS if set(pair) <= shapes.keys() and shapes[pair[0]] == shapes[pair[1]]
    ]
    candidates += [(name,) for name in shapes if name in FUSED]
    candidates += [alike for alike in _groups_of_equal_shape(shapes) if len(alike) == 2 and _is_oblong(alike, shapes)]
    candidates += [(name,) for name in shapes if _may_be_fused(name, shapes) and _is_oblong((name,), shapes)]
    for names in candidates:
        down_names = tuple(name for name in shapes if name not in names and shapes[name] == _down_shape(names, shapes))
        if down_names:
            return names, down_names
    return (), ()


def _may_be_fused(name: str, shapes: Mapping[str, tuple[int, int]]) -> bool:
    """True unless the name is a fused attention's or another layer reads the whole output, which then is not halved."""
    return name not in FUSED_ATTENTION and all(shape[1] != shapes[name][0] for shape in shapes.values())


def _groups_of_equal_shape(shapes: Mapping[str, tuple[int, int]]) -> list[tuple[str, ...]]:
    return [tuple(name for name in shapes if shapes[name] == shape) for shape in dict.fromkeys(shapes.values())]


def _down_shape(names: tuple[str, ...], shapes: Mapping[str, tuple[int, int]]) -> tuple[int, float]:
    rows, columns = shapes[names[0]]
    return columns, rows * len(names) / 2  # half the rows of a fused layer; an odd number has no half


def _is_oblong(names: tuple[str, ...], shapes: Mapping[str, tuple[int, int]]) -> bool:
    down_outputs, down_inputs = _down_shape(names, shapes)
    return down_outputs != down_inputs
