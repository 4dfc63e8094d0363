"""``reduce_gradients_in_fp8``: DDP and FSDP2 send gradients as FP8 codes, with a scale for each 128 elements.

Rank r of R averages the r-th of R equal chunks of the gradients:

    1. every rank casts its gradients and sends chunk r to rank r                (all-to-all, one byte an element)
    2. rank r sums what it received in float32, in the order of the ranks, and divides by R
    3. under DDP rank r casts that average and sends it to all                   (all-gather, one byte an element)

FSDP2 keeps only its own shard and ends at 2. A sum of codes would overflow FP8's range and round once per rank; here
every gradient is rounded once, and every average once more under DDP.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn

from octavo.errors import ConfigError
from octavo.formats import E4M3, FP8_FORMATS, Format
from octavo.numerics import PerBlock, QuantizedTensor, quantize
from octavo.parallel.fsdp2 import fsdp_modules, set_reduce_scatter

__all__ = ["GradientReduction", "reduce_bucket", "reduce_gradients_in_fp8"]

BLOCK = 128  # elements that share a float32 scale: 1.03 bytes an element
_SCALES = PerBlock(1, BLOCK)


def reduce_gradients_in_fp8(
    model: nn.Module, *, fmt: Format = E4M3, error_feedback: bool = False
) -> "GradientReduction":
    """Let DDP or FSDP2 send gradients as FP8 codes with a float32 scale for each 128 elements.

    That is 1.03 bytes an element where bfloat16 takes two, in each of DDP's two halves and in FSDP2's reduce-scatter.
    The relative error of Gaussian gradients is about 0.026 in E4M3. With ``error_feedback`` a rank adds what rounding
    took away to its next gradients, so that errors do not add up over the steps; that keeps a float32 copy of all
    gradients.

    Args:
        model: wrapped by ``DistributedDataParallel``, or with modules that ``fully_shard`` was called with.
        fmt: one of the FP8 formats.
        error_feedback: add the error of the last step to the next gradients; DDP only.

    Returns:
        The reduction, which measures what rounding takes away if its ``measures`` is set.

    Raises:
        ConfigError: ``model`` is neither, ``fmt`` is no FP8 format, DDP has a hook already, or ``error_feedback`` under
            FSDP2, where no rank keeps whole gradients.

    Example:
        >>> from torch import distributed
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> model = nn.parallel.DistributedDataParallel(nn.Linear(16, 4))
        >>> reduction = reduce_gradients_in_fp8(model)
        >>> reduction.measures = True
        >>> model(torch.randn(8, 16)).square().mean().backward()
        >>> 0 < reduction.statistics()["gradient_error"] < 0.1
        True
        >>> distributed.destroy_process_group()

    Source: error feedback as in Karimireddy et al., arXiv:1901.09847.
    """
    if fmt not in FP8_FORMATS:
        raise ConfigError(f"gradients are sent in an FP8 format, not {fmt}; use octavo.E4M3 or octavo.E5M2")
    reduction = GradientReduction(fmt, error_feedback=error_feedback)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        try:
            model.register_comm_hook((reduction, model.process_group, True), reduce_bucket)
        except RuntimeError as error:
            if "once" not in str(error):
                raise
            raise ConfigError(
                "this DistributedDataParallel has a communication hook already and takes no second one; call "
                "reduce_gradients_in_fp8 once, and register no other hook"
            ) from error
        return reduction
    sharded = fsdp_modules(model)
    if not sharded:
        raise ConfigError(
            f"{type(model).__name__} is not wrapped by DistributedDataParallel, and fully_shard was not called with "
            "one of its modules; wrap it first"
        )
    if error_feedback:
        raise ConfigError(
            "error_feedback keeps all gradients of this rank, which FSDP2 frees; leave it out, or train with DDP"
        )
    for module in sharded:
        set_reduce_scatter(module, reduction.reduce_scatter)
    return reduction


class GradientReduction:
    """Averages or sums of gradients over ranks that are sent as codes; see :func:`reduce_gradients_in_fp8`.

    Args:
        fmt: one of the FP8 formats.
        error_feedback: add the error of the last step to the next gradients.

    Attributes:
        measures: whether what is sent from now on is measured, for :meth:`statistics`; False at first.
    """

    def __init__(self, fmt: Format, *, error_feedback: bool) -> None:
        self.fmt, self.error_feedback = fmt, error_feedback
        self._residuals: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self.measures = False
        self._sums: Tensor | None = None  # float64 [4]: squares of errors and values, numbers of new zeros and nonzeros
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def statistics(self) -> dict[str, float]:
        """Losses by rounding since the last call, of this rank's gradients and averages; empty if nothing was measured.

        Returns:
            "gradient_error": root of the mean square error, relative to what was to be sent.
            "gradient_underflow": share of the nonzeros that were sent as zero: small next to others of their 128.
        """
        sums, self._sums = self._sums, None
        if sums is None:
            return {}
        error, square, zeros, nonzeros = sums.tolist()
        return {
            "gradient_error": (error / square) ** 0.5 if square else 0.0,
            "gradient_underflow": zeros / nonzeros if nonzeros else 0.0,
        }

    def reduce_scatter(self, output: Tensor, gradients: Tensor, group: Any, *, average: bool) -> None:
        """Sum, or average, this rank's chunk of all ranks' gradients.

        Args:
            output: the result, [n].
            gradients: this rank's, [ranks · n].
            group: the process group.
            average: divide by the number of ranks.
        """
        output.copy_(self._reduced_chunk(gradients.view(group.size(), -1), group, None, average=average))

    def all_reduce(self, gradients: Tensor, group: Any, key: tuple[int, ...], *, average: bool) -> Tensor:
        """Sum, or average, over all ranks, on all of them.

        Args:
            gradients: this rank's, [n].
            group: the process group.
            key: what the gradients are of; residuals are kept by it.
            average: divide by the number of ranks.
        """
        ranks, count = group.size(), gradients.numel()
        padded = nn.functional.pad(gradients.float(), (0, -count % ranks)).view(ranks, -1)
        residuals = self._residuals_of(key, padded) if self.error_feedback else None
        chunk = self._reduced_chunk(padded, group, None if residuals is None else residuals[0], average=average)
        codes = self._cast(chunk[None], None if residuals is None else residuals[1])
        received = codes.new_empty(ranks, codes.numel())
        distributed.all_gather(list(received.unbind()), codes[0], group=group)
        return self._decoded(received, chunk.numel()).flatten()[:count].to(gradients.dtype)

    def stream(self, device: torch.device) -> AbstractContextManager[Any]:
        """Context of a stream of its own on a GPU, so that backward goes on while gradients are sent."""
        if device.type != "cuda":
            return nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(stream)

    def _reduced_chunk(self, gradients: Tensor, group: Any, residual: Tensor | None, *, average: bool) -> Tensor:
        """This rank's chunk of the sum or average, float32 [n], of gradients [ranks, n]."""
        codes = self._cast(gradients, residual)
        received = torch.empty_like(codes)
        distributed.all_to_all_single(received, codes, group=group)
        total = self._decoded(received, gradients.shape[1]).sum(0)
        return total / group.size() if average else total

    def _cast(self, values: Tensor, residual: Tensor | None) -> Tensor:
        """Codes of rows, then their scales, as bytes [rows, n + 4 · blocks]; ``residual`` becomes their error."""
        values = values.float()
        if residual is not None:
            values = values + residual
        cast = quantize(values, self.fmt, granularity=_SCALES)
        if residual is not None or self.measures:
            sent = cast.dequantize()
            if residual is not None:
                residual.copy_((values - sent).nan_to_num(0.0, 0.0, 0.0))  # an overflow must not outlast its step
            if self.measures:
                self._measure(values, sent)
        return torch.cat([cast.data.view(torch.uint8), cast.scale.view(torch.uint8)], dim=1)

    def _measure(self, values: Tensor, sent: Tensor) -> None:
        squares = [each.square().sum(dtype=torch.float64) for each in (values - sent, values)]
        counts = [each.count_nonzero().double() for each in ((sent == 0) & (values != 0), values)]
        sums = torch.stack([*squares, *counts])
        self._sums = sums if self._sums is None else self._sums + sums

    def _decoded(self, received: Tensor, count: int) -> Tensor:
        """Rows of ``count`` numbers, float32, from the bytes of :meth:`_cast`."""
        codes = received[:, :count].view(self.fmt.torch_dtype)
        scales = received[:, count:].contiguous().view(torch.float32)
        return QuantizedTensor(codes, scales, _SCALES, torch.float32).dequantize()

    def _residuals_of(self, key: tuple[int, ...], gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Errors of the last step: of this rank's gradients [ranks, n] and of its average or sum [1, n]."""
        if key not in self._residuals:
            parameters = set(key)  # DDP orders parameters anew after the first backward pass
            self._residuals = {other: kept for other, kept in self._residuals.items() if not parameters & set(other)}
            self._residuals[key] = torch.zeros_like(gradients), torch.zeros_like(gradients[:1])
        return self._residuals[key]


def reduce_bucket(
    state: tuple[GradientReduction, Any, bool],
    bucket: distributed.GradBucket,  # type: ignore[name-defined]  # DDP checks the annotation
) -> torch.futures.Future[Tensor]:
    """The communication hook of DDP, which waits for the future before the gradients are used.

    Args:
        state: the reduction, the process group, and whether gradients are averaged instead of summed.
        bucket: DDP's.
    """
    reduction, group, average = state
    gradients = bucket.buffer()
    is_cuda = gradients.device.type == "cuda"
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[gradients.device] if is_cuda else [])
    with reduction.stream(gradients.device):
        key = tuple(map(id, bucket.parameters()))
        future.set_result(reduction.all_reduce(gradients, group, key, average=average))
    return future
