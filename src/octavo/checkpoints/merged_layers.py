"""Linear layers that vLLM and SGLang run as one, by one scheme: q, k, v; gate, up; all layers of a layer's experts.

A file whose parts have several schemes is refused. Of experts, not only the same projection must agree: gate, up and
down of all of them are one layer. vLLM refuses the file if the first expert's three differ, and otherwise runs all
experts by that scheme. Source: vLLM, should_ignore_layer in quantization/compressed_tensors/utils.py, and
get_moe_method in compressed_tensors_moe.py beside it (read, not run).
"""

import re
from collections.abc import Mapping

__all__ = ["merged_layer", "of_several_schemes"]

MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
EXPERTS = re.compile(r"((?:.*\.)?experts)\.\d+\.\w+")


def merged_layer(path: str) -> str:
    """Return a name that the parts of one merged layer share; another layer's own path.

    Example:
        >>> merged_layer("layers.0.mlp.up_proj"), merged_layer("layers.0.mlp.down_proj")
        ('layers.0.mlp.gate_proj+up_proj', 'layers.0.mlp.down_proj')
        >>> merged_layer("layers.0.mlp.experts.3.w2")
        'layers.0.mlp.experts.*'
    """
    if expert := EXPERTS.fullmatch(path):
        return f"{expert[1]}.*"
    module, dot, name = path.rpartition(".")
    return module + dot + next(("+".join(parts) for parts in MERGED if name in parts), name)


def of_several_schemes(schemes: Mapping[str, object]) -> tuple[str, ...]:
    """Return the modules with a merged layer whose parts have several schemes.

    Args:
        schemes: of the linear layers, by path.

    Example:
        >>> of_several_schemes({"layers.0.mlp.gate_proj": "FP8", "layers.0.mlp.up_proj": "BF16"})
        ('layers.0.mlp',)
    """
    found: dict[str, set[object]] = {}
    for path, scheme in schemes.items():
        found.setdefault(merged_layer(path), set()).add(scheme)
    return tuple(dict.fromkeys(name.rpartition(".")[0] for name, several in found.items() if len(several) > 1))
