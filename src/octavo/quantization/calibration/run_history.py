"""Calibration from a training run: amax histories of delayed scaling become static scales.

A run of a delayed recipe records, for each layer's input, the amaxes of its last steps. Their maximum is the result of
calibrating with `max` on those steps' batches, so no data have to be run again. The health contains only the amax and
the scale.
"""

from pathlib import Path

import torch

from octavo import recipes
from octavo.errors import ConfigError
from octavo.nn import Linear
from octavo.numerics import scale_from_amax
from octavo.numerics.cast_spec import check_member
from octavo.quantization.calibration.calibrate import weights_of
from octavo.quantization.calibration.health import LayerHealth
from octavo.quantization.calibration.ranges import RangeRule
from octavo.quantization.calibration.result import (
    NEVER_REACHED,
    Calibration,
    SeenData,
    check_can_store_codes,
    fingerprint,
    linear_shapes,
)
from octavo.quantization.calibration.weight_scales import WeightMethod
from octavo.scaling import INPUT
from octavo.text.corpus import Split
from octavo.training.run_folder import load_run

__all__ = ["calibration_from_run"]


def calibration_from_run(
    run_dir: str | Path, *, granularity: str = "tensor", weight_method: str = "max", power_of_two: bool = False
) -> Calibration:
    """Compute static scales from the amax histories in a run's newest checkpoint.

    Args:
        run_dir: the run's folder.
        granularity: of the weights' scales: "tensor", "row" or "128x128".
        weight_method: "max" or "mse".
        power_of_two: round every scale up to a power of two.

    Raises:
        CheckpointError: the run is missing or has no checkpoint.
        ConfigError: the run has no amax history, because its recipe is not a delayed one; or ``weight_method="mse"``
            for a weight that another module also reads.
    """
    check_member("weight_method", weight_method, tuple(WeightMethod))
    rule = RangeRule(power_of_two=power_of_two)
    recipe = recipes.get("static", weight_granularity=granularity, power_of_two=power_of_two)
    run = load_run(run_dir)
    layers = {path: layer for path, layer in run.model.named_modules() if isinstance(layer, Linear)}
    amaxes = {path: amax for path, layer in layers.items() if (amax := _largest_amax(layer)) >= 0}
    if not amaxes:
        raise ConfigError(
            f"the run in {str(run_dir)!r} ({run.config.training.recipe}) has kept no amaxes; train with the recipe "
            "delayed, or calibrate on data"
        )
    if weight_method != WeightMethod.MAX:
        check_can_store_codes(run.model, amaxes)
    assert recipe.output.a is not None
    fmt = recipe.output.a.format
    scales = {
        path: scale_from_amax(torch.tensor(amax), fmt, rounding=rule.rounding) if amax else torch.ones(())
        for path, amax in amaxes.items()
    }
    weights = weights_of({path: layers[path] for path in amaxes}, recipe, WeightMethod(weight_method))
    return Calibration(
        recipe=recipe,
        rule=rule,
        weight_method=WeightMethod(weight_method),
        input_scales=scales,
        weight_scales={path: q.scale for path, (q, _) in weights.items()},
        health=tuple(
            LayerHealth(path=path, amax=amax, scale=float(scales[path]), weight_sqnr_db=weights[path][1])
            for path, amax in amaxes.items()
        ),
        left_out={path: _left_out_reason(layers.get(path)) for path in linear_shapes(run.model) if path not in amaxes},
        seen=SeenData(source=run.config.data.source, split=Split.TRAIN, run=f"{run_dir}, step {run.step}"),
        **fingerprint(run.model),
    )


def _largest_amax(layer: Linear) -> float:
    """Largest amax in the history of the layer's input; negative if there is none."""
    return -1.0 if layer.amax_history is None else float(layer.amax_history.window[INPUT].max())


def _left_out_reason(layer: Linear | None) -> str:
    if layer is None or layer.recipe.history is None:
        return "the run kept no amaxes of it"
    return NEVER_REACHED
