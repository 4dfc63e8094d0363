"""The section ``[parallel]`` of a run's configuration: how ranks share the model and the micro-batches."""

from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.training.config_values import check_at_least

__all__ = ["ParallelConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Layout of a run on several ranks. It may change on resuming, and changes no result beyond the order of sums.

    FP8 gradients are the exception: a run is resumed with them or without them, as it was started.

    Attributes:
        data: replicas of the model; 0 is as many as there are ranks for.
        shard: groups of ranks that share one replica's weights, gradients and optimizer state (FSDP2); 1 does not shard
            (DDP).
        tensor: ranks of such a group, which share each layer (tensor parallelism); 1 does not divide layers. Above 1
            without model.qk_norm, training.cast_norms and training.moments in FP8.
        sequence: whether those ranks also divide the positions between layers (sequence parallelism), which has no size
            of its own.
        fp8_gradients: DDP sends gradients as FP8 codes, and adds a step's rounding errors to the next gradients
            (``octavo.parallel.reduce_gradients_in_fp8``). That keeps a float32 copy of all gradients, which no
            checkpoint has; results depend on the number of ranks.
        check_interval: updates between comparisons of the ranks' scales, recipe and generators; 0 for none.
    """

    data: int = 0
    shard: int = 1
    tensor: int = 1
    sequence: bool = False
    fp8_gradients: bool = False
    check_interval: int = 10

    def __post_init__(self) -> None:
        check_at_least("parallel.data", self.data, 0)
        check_at_least("parallel.shard", self.shard, 1)
        check_at_least("parallel.tensor", self.tensor, 1)
        if self.sequence and self.tensor == 1:
            raise ConfigError(
                "parallel.sequence divides positions between ranks that share each layer, and parallel.tensor is 1; "
                "set it to 2 or more"
            )
        if self.fp8_gradients and self.shard * self.tensor > 1:
            raise ConfigError(
                "parallel.fp8_gradients adds a step's rounding errors to all gradients of the next, which no rank has "
                "where parallel.shard or parallel.tensor divides the weights; set both to 1, or leave it out"
            )
        check_at_least("parallel.check_interval", self.check_interval, 0)

    def replicas(self, ranks: int) -> int:
        """Return the number of replicas on so many ranks.

        Raises:
            ConfigError: the sizes do not fit the number of ranks.

        Example:
            >>> ParallelConfig(shard=2, tensor=2).replicas(8)
            2
        """
        of_one = self.shard * self.tensor
        replicas = self.data or max(1, ranks // of_one)
        if replicas * of_one != ranks:
            sizes = {"data": self.data, "shard": self.shard, "tensor": self.tensor}
            given = [f"{name} = {size}" for name, size in sizes.items() if size > (name != "data")]
            multiple = "" if self.data else "a multiple of "
            raise ConfigError(
                f"[parallel] {' and '.join(given)} needs {multiple}{(self.data or 1) * of_one} ranks, and {ranks} "
                f"{'is' if ranks == 1 else 'are'} running; start as many by octavo train --nproc or torchrun, or set "
                "[parallel] to what is running; other commands train on one rank"
            )
        return replicas

    def micro_batches(self, grad_accumulation: int, ranks: int) -> int:
        """Return the number of an update's micro-batches that each of so many ranks computes.

        Ranks that share layers compute the same ones.

        Raises:
            ConfigError: the ranks cannot have as many each.

        Example:
            >>> ParallelConfig().micro_batches(8, 4)
            2
        """
        sharing = ranks // self.tensor
        if grad_accumulation % sharing:
            groups = "ranks" if self.tensor == 1 else f"groups of {self.tensor} ranks"
            raise ConfigError(
                f"an update has {grad_accumulation} micro-batch{'es' * (grad_accumulation > 1)} "
                f"(training.grad_accumulation), which {sharing} {groups} cannot share evenly; set a multiple of "
                f"{sharing}, and training.batch_size to the sequences of one"
            )
        return grad_accumulation // sharing
