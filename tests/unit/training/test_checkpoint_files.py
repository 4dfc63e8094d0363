"""Tensors put together from the files of several ranks; tests/contract/test_training_ranks.py has real ones."""

import json

import pytest
import torch
from safetensors.torch import save_file

from octavo.errors import DataError
from octavo.training.checkpoint_files import StoredTensors

WHOLE = torch.arange(24).view(6, 4)


def stored(folder, pieces):
    """Read a tensor of pieces, each of a file: where it begins and ends."""
    files = []
    for number, (rows, columns) in enumerate(pieces):
        place = {"w": {"saved_offsets": [rows[0], columns[0]]}}
        files.append(folder / f"{number}.safetensors")
        piece = WHOLE[slice(*rows), slice(*columns)].contiguous()
        save_file({"w": piece}, files[-1], {"DCP_SHARDING_INFO": json.dumps(place)})
    return StoredTensors(files)


@pytest.mark.parametrize(
    "pieces",
    [
        [((4, 6), (0, 4)), ((0, 2), (0, 4)), ((2, 4), (0, 4))],
        [((0, 6), (2, 4)), ((0, 6), (0, 2))],
        [((0, 3), (0, 2)), ((0, 3), (2, 4)), ((3, 6), (0, 2)), ((3, 6), (2, 4)), ((6, 6), (0, 4))],
    ],
)
def test_pieces_of_a_tensor(tmp_path, pieces):
    assert torch.equal(stored(tmp_path, pieces)["w"], WHOLE)


@pytest.mark.parametrize(
    "pieces",
    [
        [((0, 2), (0, 4)), ((0, 2), (0, 4)), ((4, 6), (0, 4))],
        [((0, 6), (0, 1)), ((0, 6), (3, 4)), ((2, 4), (0, 2)), ((2, 4), (1, 3)), ((0, 2), (1, 3))],
        [((0, 4), (0, 4)), ((2, 4), (0, 4)), ((6, 6), (0, 4))],
    ],
)
def test_pieces_that_overlap_and_leave_a_gap_are_refused(tmp_path, pieces):
    """As many elements as the tensor has."""
    with pytest.raises(DataError, match=r"^the pieces of 'w' overlap$"):
        stored(tmp_path, pieces)
