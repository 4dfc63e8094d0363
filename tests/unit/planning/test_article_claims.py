"""The article's claims on memory and scale, as docs/how-to/plan.md judges them."""

from dataclasses import replace
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.planning import PlanRequest, find_hardware, find_model, fitted_constants, make_plan
from octavo.planning.jobs import Layout
from octavo.planning.search import best_layout

CONSTANTS = fitted_constants()


def plan(name: str, gpus: int, **settings: Any) -> Any:
    request = PlanRequest(model=find_model(name), hardware=find_hardware("h100"), gpus=gpus, **settings)
    return make_plan(request, CONSTANTS)


def test_fp8_trains_no_bigger_batches_in_the_same_memory():
    """Codes for both of a weight's GEMMs, two bytes an element, fill more than codes of saved inputs free."""
    bf16, fp8 = plan("llama-7b", 8, seq=4096).record()["options"][:2]
    assert [option["micro_batch"] for option in (bf16, fp8)] == [1, 1]
    assert [option["layout"] for option in (bf16, fp8)] == ["zero1 8", "zero1 8"]
    kept = [sum(option["activations_gb_by_layer"]["none"].values()) for option in (bf16, fp8)]
    assert kept == pytest.approx([17.2, 15.3], abs=0.05)
    blocks = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)  # the embedding and the head stay in BF16
    assert fp8["memory_gb_by_part"]["codes"] == pytest.approx(2 * blocks / 1e9)
    assert [round(option["memory_gb"]) for option in (bf16, fp8)] == [58, 69]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "least", "fewer"),
    [("llama-7b", 2, (1,)), ("llama-13b", 4, (2, 3)), ("llama-3-70b", 24, (12, 16)), ("llama-3-405b", 128, (64, 96))],
)
def test_fp8_trains_no_larger_models_on_fewer_gpus(name, least, fewer):
    made = plan(name, least, global_batch=3072)
    options = {option.name: option.candidate for option in made.options}
    assert {recipe for recipe, candidate in options.items() if candidate is None} == {"mxfp8"}
    for gpus in fewer:
        for recipe in ("bf16", "tensorwise", "delayed", "rowwise", "blockwise"):
            job = replace(options[recipe].job, layout=Layout(gpus=gpus))
            with pytest.raises(ConfigError, match="does not fit into"):
                best_layout(job, CONSTANTS)


@pytest.mark.long
def test_the_gain_does_not_compound_with_more_gpus():
    """With a sequence a GPU at least it stays; with a batch that is fixed it falls."""
    growing = [plan("llama-3-70b", gpus).best_fp8.speedup[0] for gpus in (32, 256, 512, 1024, 4096, 16384)]
    assert growing == pytest.approx([1.43, 1.43, 1.49, 1.48, 1.48, 1.48], abs=0.006)
    fixed = [plan("llama-3-70b", gpus, global_batch=512).best_fp8.speedup[0] for gpus in (512, 1024, 2048, 4096)]
    assert fixed == pytest.approx([1.49, 1.38, 1.22, 1.23], abs=0.006)
