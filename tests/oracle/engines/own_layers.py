"""Linear layers of a decoder by other engines' own quantizers and GEMMs, on a CPU.

vLLM and SGLang quantize groups of inputs and multiply by Triton kernels, here under Triton's interpreter, with the
codes and scales of an exported folder. Transformer Engine has a Python reference of current scaling, which quantizes
weights too; block scaling makes the same scales for each tile, and the tiles' products are added here, in order of K.

Of a layer, this is not the engine's. The interpreter casts to FP8 and BF16 wrongly: ml_dtypes makes the codes of the
kernel's quotients, the GEMM reads them as FP32 numbers, and PyTorch rounds its FP32 output. And a CPU has no tensor
cores: ``tl.dot`` is NumPy's product in FP32, or inside :func:`tensor_cores` octavo's model of a Hopper GPU's;
``torch._scaled_mm`` is PyTorch's for CPUs, in FP32.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from octavo.engines import EngineProfile, linear_as, model_as
from octavo.engines.model import watching
from octavo.engines.token_scores import text_log_probabilities
from octavo.formats import E4M3
from octavo.kernels.native_gemm import hopper_sums
from octavo.language_model import load_language_model
from octavo.numerics import Accumulate
from tests.oracle.engines.interpreted import cast_by_peer, run_interpreted
from tests.oracle.engines.sources import importable, load_engine_module
from tests.oracle.engines.test_sglang import REQUIREMENT as SGLANG
from tests.oracle.engines.test_sglang import group_quantizer
from tests.oracle.engines.test_transformer_engine import reference
from tests.oracle.engines.test_transformer_engine import theirs as quantized_by_te
from tests.oracle.engines.test_vllm import fp8_utils

__all__ = ["OWN", "OwnRun", "own_run"]

BLOCK = 128
SCRIPT = """
from pathlib import Path
from octavo.numerics import Accumulate
from tests.oracle.engines.own_layers import run_own
results = run_own({engine!r}, Path({run!r}), Path({folder!r}), tensors["tokens"], Accumulate({accumulate!r}))
"""
Gemm = Callable[[Tensor], Tensor]  # BF16 [rows, K] to [rows, N]


class OwnLinear(nn.Module):
    """A layer [..., K] to [..., N] in BF16 by an engine's own functions."""

    def __init__(self, gemm: Gemm) -> None:
        super().__init__()
        self._gemm = gemm

    def forward(self, x: Tensor) -> Tensor:
        """Map BF16 [..., K]."""
        return self._gemm(x.reshape(-1, x.shape[-1]).contiguous()).bfloat16().reshape(*x.shape[:-1], -1)


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Multiply in Triton's interpreter as a Hopper GPU does: codes in FP32, 128 of K in one chain."""
    from triton.runtime import interpreter

    def create_dot(_: object, a: Any, b: Any, total: Any, *__: object) -> Any:
        left, right = (torch.tensor(each).to(E4M3.torch_dtype) for each in (a.data, b.data.T))
        sums = hopper_sums(left, right, accumulate=Accumulate.HOPPER_FAST).numpy()
        return interpreter.TensorHandle(sums + total.data, total.dtype.scalar)

    builder: Any = interpreter.InterpreterBuilder
    before = builder.create_dot
    builder.create_dot = create_dot
    try:
        yield
    finally:
        builder.create_dot = before


@cache
def sglang_gemm() -> Any:
    """SGLang's GEMM of blocks."""
    return load_engine_module(SGLANG, "sglang.kernels.ops.gemm.fp8_kernel").w8a8_block_fp8_matmul_triton


def by_vllm(codes: Tensor, scale: Tensor, *, ue8m0: bool = False) -> Gemm:
    """A layer of vLLM in blocks; for UE8M0 vLLM quantizes the folder's weight again."""
    if ue8m0:
        codes, scale = codes.clone(), scale.clone()
        with torch.compiler.set_stance("force_eager"), importable(fp8_utils()):
            fp8_utils().requant_weight_ue8m0_inplace(codes, scale)

    def gemm(rows: Tensor) -> Tensor:
        quotients, scales = fp8_utils().per_token_group_quant_fp8(rows, BLOCK, use_ue8m0=ue8m0, out_q=rows.float())
        return triton_gemm(fp8_utils().w8a8_triton_block_scaled_mm, quotients, scales, codes, scale)

    return gemm


def by_sglang(codes: Tensor, scale: Tensor) -> Gemm:
    """A layer of SGLang in blocks."""

    def gemm(rows: Tensor) -> Tensor:
        scales = torch.empty(len(rows), rows.shape[1] // BLOCK)
        quotients, _ = group_quantizer()(rows, BLOCK, output_s=scales, output_q=rows.float())
        return triton_gemm(sglang_gemm(), quotients, scales, codes, scale)

    return gemm


def triton_gemm(kernel: Any, quotients: Tensor, scales: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """FP32 [rows, N] of both servers' GEMM, which have one signature."""
    inputs = cast_by_peer(quotients).float()
    y: Tensor = kernel(inputs, codes.float(), scales, scale, [BLOCK, BLOCK], torch.float32)
    return y


def by_te_current(weight: Tensor) -> Gemm:
    """A layer of Transformer Engine with a scale for each tensor."""
    codes, scale = quantized_by_te(weight, power_of_two=False)

    def gemm(rows: Tensor) -> Tensor:
        inputs, input_scale = quantized_by_te(rows, power_of_two=False)
        return te_gemm(inputs, codes, torch.bfloat16, input_scale, scale)

    return gemm


def by_te_block(weight: Tensor) -> Gemm:
    """A layer of Transformer Engine with a scale for each tile."""
    codes, scale = quantized_tiles(weight, BLOCK)

    def gemm(rows: Tensor) -> Tensor:
        inputs, input_scale = quantized_tiles(rows, 1)
        y, one = torch.zeros(len(rows), len(weight)), torch.ones(1)
        for k in range(rows.shape[1] // BLOCK):
            x, w = (each[:, BLOCK * k : BLOCK * (k + 1)].contiguous() for each in (inputs, codes))
            product = te_gemm(x, w, torch.float32, one, one)
            y += product * input_scale[:, k, None] * scale[:, k].repeat_interleave(BLOCK)[: len(weight)]
        return y

    return gemm


def te_gemm(x: Tensor, w: Tensor, dtype: torch.dtype, x_scale: Tensor, w_scale: Tensor) -> Tensor:
    """The reference's GEMM."""
    quantizer = reference().CurrentScalingQuantizerRef(E4M3.torch_dtype)
    y: Tensor = quantizer.qgemm(x, w, reference().gemm.MMParams(), dtype, x_scale, w_scale)
    return y


def quantized_tiles(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Codes, and scales [tiles down, tiles across], of tiles [rows, 128]."""
    tiles = [
        [quantized_by_te(tile.contiguous(), power_of_two=True) for tile in band.split(BLOCK, 1)]
        for band in x.split(rows)
    ]
    codes = torch.cat([torch.cat([data for data, _ in band], 1) for band in tiles])
    return codes, torch.stack([torch.cat([scale for _, scale in band]) for band in tiles])


OWN: Mapping[str, Callable[..., Gemm]] = {
    "vllm-block": by_vllm,
    "vllm-block-ue8m0": partial(by_vllm, ue8m0=True),
    "sglang-block": by_sglang,
    "te-current": by_te_current,
    "te-block": by_te_block,
}


def own_layers(engine: str, model: nn.Module, paths: Iterable[str], folder: Path) -> dict[str, OwnLinear]:
    """A decoder's layers by path: a server's from its exported folder, Transformer Engine's from the parameters."""
    if engine.startswith("te-"):
        weights = {path: model.get_parameter(f"{path}.weight").detach().bfloat16() for path in paths}
        return {path: OwnLinear(OWN[engine](weight)) for path, weight in weights.items()}
    stored = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    operands = {path: (stored[f"{path}.weight"], stored[f"{path}.weight_scale_inv"]) for path in paths}
    return {path: OwnLinear(OWN[engine](*operand)) for path, operand in operands.items()}


def run_own(engine: str, run: Path, folder: Path, tokens: Tensor, accumulate: Accumulate) -> dict[str, list[Tensor]]:
    """Each layer's input and output by the engine, and "logits", in this process."""
    model = load_language_model(run).model
    decoder = model_as(model, engine)
    layers, results = own_layers(engine, model, decoder.layers, folder), {}

    def see(path: str, x: Tensor, _: Tensor) -> None:
        results[path] = [x, layers[path](x)]

    with torch.no_grad(), tensor_cores() if accumulate == Accumulate.HOPPER_SLOW else nullcontext():
        with watching(decoder.layers, see):
            decoder(tokens)
        for path, layer in layers.items():
            decoder.model.set_submodule(path, layer)
        results["logits"] = [decoder(tokens)]
    return results


@dataclass(frozen=True)
class OwnRun:
    """A trained run's decoder, and what an engine's own layers make of it.

    Attributes:
        model: as the run's folder has it.
        windows: token ids [windows, T + 1].
        layers: each layer's input in octavo's decoder, and the engine's output, by path.
        logits: [windows, T, V] of the decoder in which all layers are the engine's.
    """

    model: nn.Module
    windows: Tensor
    layers: Mapping[str, list[Tensor]]
    logits: Tensor

    def unequal(self, profile: EngineProfile) -> tuple[int, int, float]:
        """Outputs of all layers that differ from octavo's, of how many, and the largest mean error of a layer."""
        differing, outputs, errors = 0, 0, []
        for path, (x, theirs) in self.layers.items():
            ours = linear_as(x, self.model.get_parameter(f"{path}.weight").detach().bfloat16(), profile)
            differing, outputs = differing + int((ours != theirs).sum()), outputs + ours.numel()
            errors.append(float((ours.float() - theirs.float()).abs().mean() / theirs.float().abs().mean()))
        return differing, outputs, max(errors)

    def deltas(self, profile: EngineProfile) -> Tensor:
        """|Δ log p| of every token but the windows' first, to octavo's decoder."""
        logits = model_as(self.model, profile)(self.windows[:, :-1])
        pairs = zip(logits, self.logits, self.windows[:, 1:], strict=True)
        return torch.cat(
            [
                (text_log_probabilities(ours, text) - text_log_probabilities(theirs, text)).abs()
                for ours, theirs, text in pairs
            ]
        )


def own_run(engine: str, run: Path, folder: Path, windows: Tensor, *, accumulate: Accumulate, place: Path) -> OwnRun:
    """A trained run's decoder with an engine's own layers; skip if the engine's sources are not unpacked.

    Args:
        engine: of :data:`OWN`.
        run: folder of a run.
        folder: exported for a server; Transformer Engine needs none.
        windows: token ids [windows, T + 1], read in one batch without the last ones.
        accumulate: "fp32"; for Triton's kernels "hopper-slow" too.
        place: for the files of a process under Triton's interpreter.
    """
    tokens = windows[:, :-1]
    if engine.startswith("te-"):
        results = run_own(engine, run, folder, tokens, accumulate)
    else:
        script = SCRIPT.format(engine=engine, run=str(run), folder=str(folder), accumulate=str(accumulate))
        results = run_interpreted(script, {"tokens": tokens}, place)
    (logits,) = results.pop("logits")
    return OwnRun(load_language_model(run).model, windows, results, logits)
