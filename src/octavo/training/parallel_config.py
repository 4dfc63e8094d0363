"""The section ``[parallel]`` of a run's configuration: how ranks share the model and the micro-batches."""

from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.training.config_values import check_at_least

__all__ = ["ParallelConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Layout of a run on several ranks. It changes no result beyond the order of sums, and may change on resuming.

    Attributes:
        data: replicas of the model; 0 is as many as there are ranks for.
        shard: ranks that share one replica's weights, gradients and optimizer state (FSDP2); 1 does not shard (DDP).
        check_interval: updates between comparisons of the ranks' scales, recipe and generators; 0 for none.
    """

    data: int = 0
    shard: int = 1
    check_interval: int = 10

    def __post_init__(self) -> None:
        check_at_least("parallel.data", self.data, 0)
        check_at_least("parallel.shard", self.shard, 1)
        check_at_least("parallel.check_interval", self.check_interval, 0)

    def replicas(self, ranks: int) -> int:
        """Return the number of replicas on so many ranks.

        Raises:
            ConfigError: the sizes do not fit the number of ranks.

        Example:
            >>> ParallelConfig(shard=2).replicas(8)
            4
        """
        replicas = self.data or max(1, ranks // self.shard)
        if replicas * self.shard != ranks:
            need = f"data = {self.data} and shard = {self.shard}" if self.data else f"shard = {self.shard}"
            multiple = "" if self.data else "a multiple of "
            raise ConfigError(
                f"[parallel] {need} needs {multiple}{(self.data or 1) * self.shard} ranks, and {ranks} "
                f"{'is' if ranks == 1 else 'are'} running; start as many by octavo train --nproc or torchrun, or set "
                "[parallel] to what is running; other commands train on one rank"
            )
        return replicas

    def micro_batches(self, grad_accumulation: int, ranks: int) -> int:
        """Return the number of an update's micro-batches that each of so many ranks computes.

        Raises:
            ConfigError: the ranks cannot have as many each.

        Example:
            >>> ParallelConfig().micro_batches(8, 4)
            2
        """
        if grad_accumulation % ranks:
            raise ConfigError(
                f"an update has {grad_accumulation} micro-batches (training.grad_accumulation), which {ranks} ranks "
                f"cannot share evenly; set a multiple of {ranks}, and training.batch_size to the sequences of one"
            )
        return grad_accumulation // ranks
