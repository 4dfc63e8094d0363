"""Every recipe under DDP, FSDP2 and HSDP, on two and on four ranks with gloo between them, against one process.

Codes and scales of all GEMMs' operands, losses and scaling state bit for bit; gradients within the bound of the order
of their sum. Tensor parallelism, alone and under FSDP2: test_tensor_parallel.py.
"""

import pytest

from tests.contract.layouts_program import RECIPES, layouts
from tests.contract.rank_processes import of_check, results_of_ranks, shared_folder

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=[2, 4])
def found(request, tmp_path_factory):
    ranks = request.param
    folder = shared_folder(tmp_path_factory, f"layouts {ranks}")
    return results_of_ranks("tests.contract.layouts_program", folder, ranks)


def test_codes_and_scales_are_those_of_one_process(found):
    for differences in of_check(found, "every_layout"):
        assert len(differences) == len(RECIPES) * len(layouts(len(found)))
        assert not any(differences.values()), {name: each for name, each in differences.items() if each}


@pytest.mark.parametrize("check", ["mixtures", "frozen", "repeated", "branches", "evaluating", "autocasts"])
def test_ranks_that_run_other_layers_experts_or_modes(found, check):
    """Experts without rows, frozen layers, checkpointing, skipped branches, an evaluation of one rank, autocasts."""
    for differences in of_check(found, check):
        assert len(differences) >= 4
        assert not any(differences.values()), {name: each for name, each in differences.items() if each}


def test_other_recipes_data_and_groups_are_told_apart(found):
    assert of_check(found, "told_apart") == [[True] * 3] * len(found)
