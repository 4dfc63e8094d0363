"""Checks of ranks before they train together."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from octavo.errors import ConfigError
from octavo.parallel.ranks import Ranks
from octavo.training.config import RunConfig
from octavo.training.rank_layout import _check_gpus


@pytest.mark.parametrize(("first", "is_refused"), [("UUID-0", False), ("UUID-1", True)])
def test_ranks_must_have_different_gpus_whatever_their_numbers(first, is_refused):
    """Each is number 0 of what its process sees."""
    ranks, config = Ranks(rank=1, size=2), RunConfig()
    gpu = SimpleNamespace(name="H100", uuid="UUID-1")
    with (
        mock.patch.object(Ranks, "gathered", lambda _, value: [value.replace("UUID-1", first), value]),
        mock.patch("octavo.training.rank_layout.resolve_device", return_value=torch.device("cuda")),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=gpu),
    ):
        if is_refused:
            with pytest.raises(
                ConfigError, match=r"ranks 0 and 1 would share the GPU H100 UUID-1 of .*no more ranks on a"
            ):
                _check_gpus(ranks, config)
        else:
            _check_gpus(ranks, config)
