"""A Llama on several ranks that share each of its layers, by torch's ``parallelize_module``.

| module            | divided along           | its input           | its output                |
|-------------------|-------------------------|---------------------|---------------------------|
| embedding         | vocabulary              | whole               | the residual stream       |
| q, k, v; gate, up | heads; width of the MLP | whole               | this rank's part          |
| o; down           | heads; width of the MLP | this rank's part    | the residual stream       |
| norms             | not at all              | the residual stream | the same                  |
| head              | vocabulary              | whole               | this rank's part (logits) |

The residual stream is whole on each rank. With sequence parallelism each has a part of the positions; norms and
additions are then divided too, and layers whose input is whole gather it.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from octavo.errors import ConfigError
from octavo.models.llama import Llama
from octavo.parallel import gather_input_in_fp8

__all__ = ["divide"]

POSITIONS = 1  # the dimension of [B, T, H]


class _Norm(ParallelStyle):
    """A norm whose weight is whole, of an input that is placed as the residual stream; the output is a DTensor."""

    def __init__(self, stream: Placement) -> None:
        super().__init__()
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def as_dtensor(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return DTensor.from_local(inputs[0], mesh, (self.stream,), run_check=False)

        return distribute_module(module, device_mesh, input_fn=as_dtensor)


def divide(model: Llama, mesh: DeviceMesh, *, sequence: bool, codes: bool = False) -> None:
    """Let the ranks of a mesh share each layer of a model, in place.

    Args:
        model: the model, with equal weights on all ranks, converted or not. Its logits are then a DTensor, for torch's
            ``loss_parallel``.
        mesh: the ranks, along one dimension.
        sequence: share the positions between the layers too; the ranks divide the length of a sequence.
        codes: gather positions as FP8 codes (:func:`octavo.parallel.gather_input_in_fp8`).

    Raises:
        ConfigError: the ranks do not divide the heads or the MLP's width, or a layer into multiples of its recipe's
            blocks.
    """
    heads, kv_heads, ranks = model.config.num_heads, model.config.num_kv_heads, mesh.size()
    width = model.config.intermediate_size
    if heads % ranks or kv_heads % ranks:
        raise ConfigError(
            f"{ranks} ranks cannot share {heads} query heads and {kv_heads} key-value heads; set model.num_heads and "
            f"model.num_kv_heads to multiples of {ranks}, or parallel.tensor to a number that divides both"
        )
    if width % ranks:
        raise ConfigError(
            f"{ranks} ranks cannot share {width} channels of the MLP; set model.intermediate_size to a multiple of "
            f"{ranks}, or parallel.tensor to a number that divides it"
        )
    whole, stream = Replicate(), Shard(POSITIONS) if sequence else Replicate()
    norm, rows, columns = _Norm(stream), RowwiseParallel(output_layouts=stream), ColwiseParallel()
    taken: Placement = whole  # by the layers of attention and MLP
    if codes and sequence:
        taken, columns = stream, gather_input_in_fp8(ColwiseParallel(input_layouts=stream))
    rest = (None, None, None)  # angles and attention
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=stream),
        "model.norm": norm,
        "lm_head": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
    }
    layer: dict[str, ParallelStyle] = {
        "self_attn": PrepareModuleInput(input_layouts=(stream, *rest), desired_input_layouts=(taken, *rest)),
        "mlp": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(taken,)),
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), norm),
        **{f"self_attn.{name}_proj": columns for name in "qkv"},
        **{f"mlp.{name}_proj": columns for name in ("gate", "up")},
        **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), rows),
    }
    plan |= {f"model.layers.*.{name}": style for name, style in layer.items()}
    parallelize_module(model, mesh, plan)
    if model.config.tie_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
