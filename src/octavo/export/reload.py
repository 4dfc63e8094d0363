"""Fresh process that loads an exported folder with its reader and compares it with the exported model.

    python -m octavo.export.reload FOLDER PROBE READER

READER is "transformers" (with compressed-tensors) or "octavo". Prints a ``LockstepAgreement`` as one line of JSON; exit
code 2 and one sentence on stderr if the folder cannot be read.

compressed-tensors keeps the first two dimensions of an input and takes a scale for the rest: one a token of
[batch, tokens, K], but one for all tokens of [tokens, K], as in shared experts, and of [batch, 1, tokens, K], as in
DeepSeek-V3's kv_b_proj. vLLM, whose inputs are all [tokens, K], takes one a token. Such layers therefore receive
[1, tokens, K] here.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from octavo.checkpoints import load_quantized
from octavo.errors import OctavoError
from octavo.export.emulation import add_cache_casts
from octavo.export.lockstep import ReferenceProbe, compare, load_probe
from octavo.language_model import LogitsModule, from_quantized

__all__ = ["OCTAVO", "TRANSFORMERS", "main"]

TRANSFORMERS, OCTAVO = "transformers", "octavo"


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    folder, reader = Path(arguments[0]), arguments[2]
    try:
        probe = load_probe(Path(arguments[1]))
        model, logits = _by_transformers(folder, probe) if reader == TRANSFORMERS else _by_octavo(folder)
        agreement = compare(logits, model, probe)
    except OctavoError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(agreement.to_json() + "\n")
    return 0


def _by_octavo(folder: Path) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    quantized = load_quantized(folder)
    model = from_quantized(quantized, folder)
    cast = add_cache_casts(quantized.model, quantized.kv_scales) if quantized.kv_scales else None
    return quantized.model, partial(model.logits, kv_transform=cast)


def _by_transformers(folder: Path, probe: ReferenceProbe) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, local_files_only=True, trust_remote_code=False
    )
    for path in probe.flat_layers:
        _cast_token_by_token(model.get_submodule(path))
    return model.eval(), LogitsModule(model)


def _cast_token_by_token(layer: nn.Module) -> None:
    """Let a layer receive x [..., K] as [1, tokens, K]."""
    forward = layer.forward

    def by_token(_: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = forward(x.reshape(1, -1, x.shape[-1]))
        return y.view(*x.shape[:-1], -1)

    layer.forward = MethodType(by_token, layer)  # compressed-tensors reads __func__


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
