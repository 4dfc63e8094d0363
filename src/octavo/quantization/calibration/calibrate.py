"""Static scales from representative data (``octavo.calibrate``).

All methods need one pass over the batches: only the amax and a histogram of each input are stored
(``octavo.quantization.calibration.magnitude_histogram``), no activations. Both are exact, so the scales depend on
neither the order nor the size of the batches. Padding is counted like other tokens: leave it out.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from octavo import recipes
from octavo.convert import choose_layers, other_modules, undivided_experts
from octavo.doctor.thresholds import Thresholds
from octavo.errors import ConfigError
from octavo.formats import Format
from octavo.language_model import LanguageModel
from octavo.numerics import QuantizedTensor, sqnr_db
from octavo.numerics.cast_spec import check_integer, check_member
from octavo.quantization.calibration.expert_scales import MIN_TOKENS, fill_in, same_layers, tokens_of
from octavo.quantization.calibration.health import LayerHealth, health_of
from octavo.quantization.calibration.magnitude_histogram import MagnitudeCounts
from octavo.quantization.calibration.observers import Batch, Observation, module_of, observe
from octavo.quantization.calibration.ranges import PERCENTILE, Method, RangeRule, scale_from_magnitudes
from octavo.quantization.calibration.rank_statistics import check_is_whole, observed_by_ranks
from octavo.quantization.calibration.result import (
    NEVER_REACHED,
    NO_LINEAR_LAYERS,
    Calibration,
    SeenData,
    check_can_store_codes,
    check_has_no_codes,
    fingerprint,
)
from octavo.quantization.calibration.weight_scales import WeightMethod, quantized_weight
from octavo.recipes import CastSpec, Recipe
from octavo.scaling import INPUT, ROLES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["LayerCoverage", "calibrate", "check_choices", "coverage", "weights_of"]

SATURATION, HEALTHY_DB = Thresholds().saturation_fraction, Thresholds().healthy_cast_db
OnBatch = Callable[[int, int | None], None]


def calibrate(
    model: nn.Module | LanguageModel,
    batches: Iterable[Batch],
    *,
    method: str = Method.MAX,
    percentile: float = PERCENTILE,
    granularity: str = "tensor",
    weight_method: str = WeightMethod.MAX,
    power_of_two: bool = False,
    kv_cache: bool = False,
    skip: Sequence[str] = (),
    convert_head: bool = False,
    min_expert_tokens: int = MIN_TOKENS,
    group: "ProcessGroup | None" = None,
    source: str = "",
    split: str = "",
    on_batch: OnBatch = lambda _done, _total: None,
) -> Calibration:
    """Compute static scales for the layers that ``octavo.convert`` would convert; the model is not changed.

    Args:
        model: any module, in high precision, or an ``octavo.language_model.LanguageModel``.
        batches: arguments of the module's calls: a tensor, a tuple of arguments or a dictionary of keywords each; token
            ids [B, T] for a language model. ``moved`` of the health is None if ``batches`` has no length.
        method: range selection for inputs: "max", "percentile", "mse" or "entropy"
            (``octavo.quantization.calibration.ranges``).
        percentile: of "percentile".
        granularity: of the weights' scales: "tensor", "row" or "128x128".
        weight_method: "max" or "mse".
        power_of_two: round every scale up to a power of two.
        kv_cache: also compute a scale for the keys and one for the values of each decoder layer, from their amax, and
            the mean key, which the KV cache subtracts; language models only.
        skip: shell patterns of paths to leave out, as in ``octavo.convert``.
        convert_head: include the language-model head.
        min_expert_tokens: an expert that fewer tokens reach has the largest scale of the other experts in its layer.
            Experts need linear layers of their own (``octavo.convert.unfuse_experts``); others are left out.
        group: the process group of ranks that calibrate together: all of them call this with the same model and
            options, each with batches of its own, and have the result of one process with all batches, without
            ``moved``. None: this process alone, whatever others do.
        source: name of the data in the result: for text, a source of ``octavo.text.sources``.
        split: split of that source.
        on_batch: called after each batch with (done, total or None).

    Raises:
        ConfigError: an unknown method or granularity, ``min_expert_tokens`` below 0, a pattern that matches nothing, no
            layer to calibrate, a weight that ranks divide, or ``weight_method="mse"`` for one that another module also
            reads.
        DataError: no batch, or a batch in which a layer's input contains NaN or ±Inf; on another rank too.
        TypeError: a batch of another type.

    Example:
        >>> import octavo
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> calibration = octavo.calibrate(model, [torch.randn(4, 8) for _ in range(8)])
        >>> print(calibration.apply(model))
        2 layers run static, 0 stay as they are
        in FP8: 88.9 % of the parameters and 100.0 % of the multiplications, counting each weight once a token
    """
    check_choices(method=method, percentile=percentile, granularity=granularity, weight_method=weight_method)
    check_integer("min_expert_tokens", min_expert_tokens, least=0)
    rule = RangeRule(method=Method(method), percentile=percentile, power_of_two=power_of_two)
    weight_rule = WeightMethod(weight_method)
    recipe = recipes.get("static", weight_granularity=granularity, power_of_two=power_of_two)
    module = module_of(model)
    layers, left_out = choose_layers(module, skip=skip, convert_head=convert_head)
    if not layers:
        raise ConfigError("this model has no linear layer to calibrate: octavo.convert would convert none of it")
    undivided = undivided_experts(module)
    for path in other_modules(module):
        why = f" and cannot be: {undivided[path]}" if path in undivided else ""
        left_out[path] = f"{NO_LINEAR_LAYERS}{why or '; octavo.convert.unfuse_experts gives experts such layers'}"
    check_has_no_codes(module, layers)
    check_is_whole(layers)
    if weight_rule is not WeightMethod.MAX:
        check_can_store_codes(module, layers)
    fmt = _input_cast(recipe).format
    observing = partial(observe, model, batches, layers, kv_cache=kv_cache, on_batch=on_batch)
    if group is None:
        stats = observing(before_the_last_quarter=partial(_note_early_scales, rule=rule, fmt=fmt))
    else:
        stats = observed_by_ranks(observing, layers, group)
    same = same_layers(module, layers)
    tokens = tokens_of(stats.inputs, {path: layers[path] for path in same})
    scales = _scales(stats, rule, fmt)
    borrowed = fill_in(scales, same, tokens, min_expert_tokens)
    reached = {path: layer for path, layer in layers.items() if path in scales}
    weights = weights_of(reached, recipe, weight_rule)
    health = _health(stats, fmt, scales, weights, tokens=tokens, borrowed=borrowed)
    return Calibration(
        recipe=recipe,
        rule=rule,
        weight_method=weight_rule,
        input_scales={path: scales[path] for path in reached},
        weight_scales={path: q.scale for path, (q, _) in weights.items()},
        kv_scales=_kv_scales(stats, rule, fmt),
        key_means={layer: each.key_mean for layer, each in sorted(stats.keys_and_values.items())},
        health=tuple(health[path] for path in reached),
        groups=tuple(tuple(path for path in reached if path in group) for group in stats.groups()),
        left_out=left_out | {path: NEVER_REACHED for path in layers if path not in reached},
        seen=SeenData(batches=stats.batches, samples=stats.samples, tokens=stats.tokens, source=source, split=split),
        **fingerprint(module),
    )


def check_choices(*, method: str, percentile: float, granularity: str, weight_method: str) -> None:
    """Validate the options of :func:`calibrate` before a model is loaded.

    Raises:
        ConfigError: an unknown method or granularity, or a percentile out of range.
    """
    check_member("method", method, tuple(Method))
    check_member("weight_method", weight_method, tuple(WeightMethod))
    RangeRule(method=Method(method), percentile=percentile)
    recipes.get("static", weight_granularity=granularity)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCoverage:
    """Fit of a calibrated scale, of a layer's input or of keys or values, to other data.

    Attributes:
        path: path of the layer, or "keys of layer 0", "values of layer 0" and so on.
        amax: largest magnitude in the other data.
        ratio: ``amax`` over the largest magnitude that the scale represents; above 1, values are clipped.
        saturation_fraction: share of the elements that are clipped.
        calibrated_fraction: the same share of the calibration data, which the method clipped deliberately.
        sqnr_db: signal-to-quantization-noise ratio of the other data; None without noise. A few huge elements can be a
            small share of the elements and most of the noise.
        calibrated_sqnr_db: the same for the calibration data.
    """

    path: str
    amax: float
    ratio: float
    saturation_fraction: float
    calibrated_fraction: float
    sqnr_db: float | None
    calibrated_sqnr_db: float | None

    @property
    def goes_beyond(self) -> bool:
        """True if clipping, of elements or of the signal, exceeds both the health limits and the calibration's own."""
        now, then = (math.inf if each is None else each for each in (self.sqnr_db, self.calibrated_sqnr_db))
        drowned = self.ratio > 1 and now < HEALTHY_DB <= then
        return drowned or self.saturation_fraction > max(SATURATION, 2 * self.calibrated_fraction)


def coverage(
    model: nn.Module | LanguageModel,
    calibration: Calibration,
    batches: Iterable[Batch],
    *,
    on_batch: OnBatch = lambda _done, _total: None,
) -> tuple[LayerCoverage, ...]:
    """Measure the saturation of other data under these scales, the worst first: inputs of layers, keys and values.

    Args:
        model: the calibrated model, in high precision.
        calibration: its scales.
        batches: the other data, such as evaluation data.
        on_batch: called after each batch with (done, total or None).

    Raises:
        CheckpointError: the calibration belongs to another model.
        DataError: no batch, or a batch in which a layer's input contains NaN or ±Inf.
    """
    module = module_of(model)
    calibration.check_fit(module)
    layers = {path: module.get_submodule(path) for path in calibration.input_scales}
    observation = observe(model, batches, layers, kv_cache=bool(calibration.kv_scales), on_batch=on_batch)
    fmt = _input_cast(calibration.recipe).format
    calibrated = {each.path: each for each in calibration.health}
    counts = {path: (each.counts, calibration.input_scales[path]) for path, each in observation.inputs.items()}
    for layer, each in observation.keys_and_values.items():
        key_scale, value_scale = calibration.kv_scales[layer]
        counts |= {
            f"keys of layer {layer}": (each.keys, key_scale),
            f"values of layer {layer}": (each.values, value_scale),
        }
    layers_coverage = []
    for path, (own, scale) in counts.items():
        health = health_of(path, own.magnitudes(), scale, fmt)
        before = calibrated.get(path)
        layers_coverage.append(
            LayerCoverage(
                path=path,
                amax=health.amax,
                ratio=health.amax / (float(scale) * fmt.max),
                saturation_fraction=health.clipped_fraction or 0.0,
                calibrated_fraction=0.0 if before is None else before.clipped_fraction or 0.0,
                sqnr_db=health.sqnr_db,
                calibrated_sqnr_db=None if before is None else before.sqnr_db,
            )
        )
    return tuple(sorted(layers_coverage, key=lambda each: (each.saturation_fraction, each.ratio), reverse=True))


def weights_of(
    layers: dict[str, nn.Linear], recipe: Recipe, method: WeightMethod
) -> dict[str, tuple[QuantizedTensor, float | None]]:
    """Quantize each layer's weight; returns it with its SQNR in dB, None without noise.

    Raises:
        ConfigError: a weight contains NaN or ±Inf; the message names the layer.
    """
    spec = recipe.output.b
    assert spec is not None
    quantized = {}
    for path, layer in layers.items():
        try:
            q = quantized_weight(layer.weight, spec, method)
        except ConfigError as error:
            raise ConfigError(f"layer {path!r} cannot be calibrated: {error}; correct the weight first") from error
        decibels = sqnr_db(layer.weight.detach().float(), q.dequantize())
        quantized[path] = q, decibels if math.isfinite(decibels) else None
    return quantized


def _note_early_scales(observation: Observation, *, rule: RangeRule, fmt: Format) -> None:
    for group in _input_groups(observation):
        early = float(scale_from_magnitudes(observation.inputs[group[0]].counts.magnitudes(), rule, fmt))
        for path in group:
            observation.inputs[path].early_scale = early


def _scales(observation: Observation, rule: RangeRule, fmt: Format) -> dict[str, Tensor]:
    """Scale of each input that was observed, computed once for layers that share it."""
    scales = dict[str, Tensor]()
    for group in _input_groups(observation):
        scale = scale_from_magnitudes(observation.inputs[group[0]].counts.magnitudes(), rule, fmt)
        scales |= {path: scale.clone() for path in group}
    return scales


def _health(
    observation: Observation,
    fmt: Format,
    scales: Mapping[str, Tensor],
    weights: Mapping[str, tuple[QuantizedTensor, float | None]],
    *,
    tokens: Mapping[str, int],
    borrowed: Collection[str],
) -> dict[str, LayerHealth]:
    """Health of each layer under its scale; experts that no token reached have one too."""
    health = dict[str, LayerHealth]()
    unreached = ((path,) for path in scales if path not in observation.inputs)
    for group in (*_input_groups(observation), *unreached):
        first = observation.inputs.get(group[0])
        magnitudes = MagnitudeCounts().magnitudes() if first is None else first.counts.magnitudes()
        early_scale = None if first is None or group[0] in borrowed else first.early_scale
        for path in group:
            of_input = health_of(
                path, magnitudes, scales[path], fmt, early_scale=early_scale, weight_sqnr_db=weights[path][1]
            )
            health[path] = replace(of_input, tokens=tokens.get(path), borrowed=path in borrowed)
    assert scales.keys() == health.keys() == weights.keys()
    return health


def _input_groups(observation: Observation) -> list[tuple[str, ...]]:
    """Group layers by identical inputs; every other layer is a group of one."""
    groups = observation.groups()
    grouped = {path for group in groups for path in group}
    return [*groups, *((path,) for path in observation.inputs if path not in grouped)]


def _kv_scales(observation: Observation, rule: RangeRule, fmt: Format) -> dict[int, tuple[Tensor, Tensor]]:
    """Scales of keys and values, always from their amax: no position may saturate."""
    largest = RangeRule(power_of_two=rule.power_of_two)

    def scale_of(counts: MagnitudeCounts) -> Tensor:
        return scale_from_magnitudes(counts.magnitudes(), largest, fmt)

    return {i: (scale_of(each.keys), scale_of(each.values)) for i, each in sorted(observation.keys_and_values.items())}


def _input_cast(recipe: Recipe) -> CastSpec:
    spec = recipe.output.a
    assert spec is not None, f"a static recipe casts the {ROLES[INPUT]}"
    return spec
