"""Layers that vLLM and SGLang merge into one: q, k, v and gate, up.

The merged layer has one scheme. A file whose parts have several is refused: vLLM,
quantization/compressed_tensors/utils.py, should_ignore_layer (read, not run).
"""

from collections.abc import Mapping

__all__ = ["merged_layer", "of_several_schemes"]

MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def merged_layer(path: str) -> str:
    """Return a name that the parts of one merged layer share; another layer's own path.

    Example:
        >>> merged_layer("layers.0.mlp.up_proj"), merged_layer("layers.0.mlp.down_proj")
        ('layers.0.mlp.gate_proj+up_proj', 'layers.0.mlp.down_proj')
    """
    module, dot, name = path.rpartition(".")
    return module + dot + next(("+".join(parts) for parts in MERGED if name in parts), name)


def of_several_schemes(schemes: Mapping[str, str]) -> tuple[str, ...]:
    """Return the modules with a merged layer whose parts have several schemes.

    Args:
        schemes: of the linear layers, by path.

    Example:
        >>> of_several_schemes({"layers.0.mlp.gate_proj": "FP8", "layers.0.mlp.up_proj": "BF16"})
        ('layers.0.mlp',)
    """
    found: dict[str, set[str]] = {}
    for path, scheme in schemes.items():
        found.setdefault(merged_layer(path), set()).add(scheme)
    return tuple(dict.fromkeys(name.rpartition(".")[0] for name, several in found.items() if len(several) > 1))
