"""What DDP refuses; ranks themselves send gradients in tests/contract/test_gradients.py."""

import pytest
from torch import distributed, nn

from octavo.errors import ConfigError
from octavo.parallel import reduce_gradients_in_fp8


@pytest.fixture
def alone():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_second_hook_is_refused():
    model = nn.parallel.DistributedDataParallel(nn.Linear(16, 4))
    reduce_gradients_in_fp8(model)
    with pytest.raises(ConfigError, match="has a communication hook already"):
        reduce_gradients_in_fp8(model)
