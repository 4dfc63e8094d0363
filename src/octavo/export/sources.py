"""Loading of a model for export, converted to FP8 as requested.

| source                        | recipes of the layers                             | scales of keys and values |
|-------------------------------|---------------------------------------------------|---------------------------|
| a folder of ``octavo qat``    | the recipe used in training                       | –                         |
| a folder in FP8               | unchanged, with its codes and scales              | the folder's              |
| a model and a calibration     | the calibration's static recipe                   | the calibration's         |
| a model and a mix             | the mix's                                         | –                         |
| a run of a delayed recipe     | ``static``, on request, from its amax history     | –                         |
| any other model               | the requested recipe or engine's, or the default  | –                         |
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from octavo import recipes
from octavo.checkpoints import FORMATS, CodedTable, is_quantized, load_quantized
from octavo.checkpoints.contents import nothing_in_fp8
from octavo.convert import choose_layers, convert, other_modules, store_weights_as_codes, unfuse_experts
from octavo.errors import ConfigError
from octavo.language_model import LanguageModel, from_quantized, load_language_model
from octavo.models.sources import SourceKind, kind_of, located
from octavo.nn import Linear
from octavo.nn.parameter_rounding import round_parameters
from octavo.numerics import PerRow, Scaling
from octavo.numerics.granularity import granularity_in_words
from octavo.quantization import Calibration, calibration_from_run, load_calibration, load_mix, load_qat
from octavo.quantization.qat.folder import MARK
from octavo.recipes import Recipe
from octavo.recipes.engines import EngineProfile, forward_recipe
from octavo.training.config import Device
from octavo.training.precision import resolve_device
from octavo.training.run_folder import CONFIG as RUN

__all__ = ["ONNX", "ConversionOptions", "ExportSource", "load_source"]

STATIC, ONNX, OWN = "static", "onnx", "octavo"
PRESETS = {name: fmt.preset for name, fmt in FORMATS.items()} | {ONNX: "tensorwise"}
SCALE_OPTIONS = ("rowwise", "blockwise", STATIC)  # presets with the option power_of_two


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionOptions:
    """Options for converting a model to FP8; defaults depend on the model and the format.

    Attributes:
        recipe: name of a preset.
        power_of_two: use power-of-two scales.
        calibration: folder of ``octavo calibrate``; beside a recipe with dynamic inputs, only its scales of keys and
            values are used.
        mix: file of ``octavo sensitivity``.
        skip: shell patterns of layers that stay in high precision.
        convert_head: also convert an untied head.
        engine: write the codes and scales of this engine.

    Raises:
        ConfigError: contradictory options or an unknown recipe, before a model is loaded.
    """

    recipe: str | None = None
    power_of_two: bool = False
    calibration: Path | None = None
    mix: Path | None = None
    skip: tuple[str, ...] = ()
    convert_head: bool = False
    engine: EngineProfile | None = None

    def __post_init__(self) -> None:
        if self.engine is not None:
            self._check_engine(self.engine)
        ways = {"--recipe": self.recipe, "--calibration": self.calibration}
        given = [name for name, value in ways.items() if value is not None]
        if self.mix is not None and given:
            raise ConfigError(f"{given[0]} and --mix both define how layers run; leave one of them out")
        if self.mix is not None and (self.skip or self.convert_head):
            raise ConfigError("a mix defines its layers; leave out --skip and --head")
        if self.power_of_two and (self.has_static_inputs or self.mix):
            raise ConfigError("--power-of-two goes with a recipe; calibrations and mixes have their own scales")
        if self.recipe is not None:
            _recipe(self.recipe, power_of_two=self.power_of_two)

    def _check_engine(self, engine: EngineProfile) -> None:
        for option, value in {"recipe": self.recipe, "mix": self.mix, "power-of-two": self.power_of_two}.items():
            if value:
                raise ConfigError(f"--for {engine.name} defines the casts, as --{option} does; leave one of them out")
        if self.convert_head and not engine.head:
            raise ConfigError(f"--head casts the head, which {engine.name} keeps in high precision; leave it out")

    @property
    def has_static_inputs(self) -> bool:
        """True if the calibration defines how layers run; beside another recipe it has the scales of a cache alone."""
        static = self.recipe in (None, STATIC) if self.engine is None else _is_static(self.engine)
        return self.calibration is not None and static

    @property
    def is_empty(self) -> bool:
        """True if all options have their defaults."""
        return self == ConversionOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSource:
    """Converted model, ready to be written.

    Attributes:
        language_model: converted, with weights stored as codes.
        kv_scales: scales of keys and of values, by decoder layer.
        tables: embeddings stored as rows of codes, by path.
        calibration: the applied calibration.
        dtype: lossless dtype of the tensors that are not FP8, if the model was already in FP8.
    """

    language_model: LanguageModel
    kv_scales: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    tables: Mapping[str, CodedTable] = field(default_factory=dict)
    calibration: Calibration | None = None
    dtype: torch.dtype | None = None


def load_source(model: str, fmt: str, request: ConversionOptions, *, device: Device = Device.CPU) -> ExportSource:
    """Load a model and convert it to FP8 as requested, or with the format's default.

    Args:
        model: a run, a folder or a file.
        fmt: a checkpoint format, or "onnx".
        request: conversion options.
        device: device of the model.

    Raises:
        ConfigError: options that contradict each other or the model, a static recipe without scales, or a mix with FP8
            tables for a format that does not support them.
        CheckpointError: the model, calibration or mix is missing, or belongs to another model.
    """
    place, folder = resolve_device(device), located(model)
    if (folder / MARK).is_file():
        tuned = _load_qat_folder(folder, request, place)
        _name_experts(tuned, fmt)
        return _store_codes(tuned)
    if kind_of(folder) is SourceKind.HUGGING_FACE and is_quantized(folder):
        return _load_fp8_folder(folder, request, place)
    loaded = load_language_model(folder, device=device)
    loaded.model.requires_grad_(False)
    _name_experts(loaded, fmt)
    if request.engine is not None:
        round_parameters(loaded.model, request.engine.activations)  # as it loads them
    if request.calibration is not None and request.has_static_inputs:
        return _apply_calibration(loaded, load_calibration(request.calibration), request)
    if request.mix is not None:
        return _apply_mix(loaded, request.mix, fmt)
    name = request.recipe or PRESETS[fmt]
    if _is_static(request.engine) if request.engine else name == STATIC:
        return _calibrate_from_run(loaded, folder, fmt, request)
    plain = _recipe(name, power_of_two=request.power_of_two)
    recipe = plain if request.engine is None else forward_recipe(request.engine)
    kv_scales = _cache_scales(loaded, fmt, request)
    if not choose_layers(loaded.model, skip=request.skip, convert_head=request.convert_head)[0]:
        raise ConfigError(nothing_in_fp8(loaded.model))
    skip = [*request.skip, *other_modules(loaded.model)]  # those in one weight are stored as they are
    convert(loaded.model, recipe, skip=skip, convert_head=request.convert_head)
    return replace(_store_codes(loaded), kv_scales=kv_scales)


def _is_static(engine: EngineProfile) -> bool:
    return engine.input is not None and engine.input.scaling is Scaling.STATIC


def _cache_scales(loaded: LanguageModel, fmt: str, request: ConversionOptions) -> Mapping[int, tuple[Tensor, Tensor]]:
    """Scales of keys and values of a calibration that does not define how layers run."""
    if request.calibration is None:
        return {}
    calibration = load_calibration(request.calibration)
    calibration.check_fit(loaded.model)
    if fmt == ONNX or not calibration.kv_scales:
        lacks = "an ONNX graph has no FP8 cache" if fmt == ONNX else "the calibration has no scales of keys and values"
        chosen, static = f"--recipe {request.recipe}", "use --recipe static"
        if request.engine is not None:
            chosen, static = f"--for {request.engine.name}", "name an engine with static scales"
        raise ConfigError(
            f"{chosen} casts inputs by scales of its own and takes of --calibration only the scales of a KV cache, but "
            f"{lacks}; leave --calibration out, {static}, or calibrate with --kv-cache"
        )
    return calibration.kv_scales


def _recipe(name: str, *, power_of_two: bool) -> Recipe:
    if name in SCALE_OPTIONS:
        return recipes.get(name, power_of_two=power_of_two)
    if power_of_two:
        raise ConfigError(f"--power-of-two goes with {', '.join(SCALE_OPTIONS)}, not with {name!r}")
    return recipes.get(name)


def _load_qat_folder(folder: Path, request: ConversionOptions, place: torch.device) -> LanguageModel:
    if not replace(request, engine=None).is_empty:
        raise ConfigError(
            f"{str(folder)!r} was trained for its own recipe; leave out the options that define how layers run"
        )
    loaded = load_qat(folder)
    others = _recipes_unlike(request.engine, loaded.model)
    if request.engine is not None and others:
        raise ConfigError(
            f"{str(folder)!r} was trained for {others[0]!r}, not for what serves as {request.engine.name}; leave out "
            f"--for, or tune it with octavo qat --as-served-by {request.engine.name}"
        )
    loaded.model.to(place)
    return loaded


def _recipes_unlike(engine: EngineProfile | None, model: nn.Module) -> list[str]:
    """Names of the recipes in FP8 that have another forward pass than an engine."""
    recipes_used = [layer.recipe for layer in model.modules() if isinstance(layer, Linear)]
    output = None if engine is None else forward_recipe(engine).output
    return [recipe.name for recipe in recipes_used if not recipe.is_high_precision and recipe.output != output]


def _load_fp8_folder(folder: Path, request: ConversionOptions, place: torch.device) -> ExportSource:
    if not request.is_empty:
        raise ConfigError(f"{str(folder)!r} is already in FP8; leave out the options that define how layers run")
    quantized = load_quantized(folder)
    quantized.model.to(place)
    return ExportSource(
        language_model=from_quantized(quantized, folder),
        kv_scales=quantized.kv_scales,
        tables=quantized.tables,
        dtype=quantized.dtype,
    )


def _apply_calibration(loaded: LanguageModel, calibration: Calibration, request: ConversionOptions) -> ExportSource:
    if request.skip or request.convert_head:
        raise ConfigError("a calibration defines its layers; give --skip and --head to octavo calibrate instead")
    calibration.apply(loaded, hold_weights=True)
    if request.engine is not None:
        _check_weights_fit(request.engine, loaded.model)
    return ExportSource(language_model=loaded, kv_scales=calibration.kv_scales, calibration=calibration)


def _check_weights_fit(engine: EngineProfile, model: nn.Module) -> None:
    for path, layer in model.named_modules():
        codes = layer.stored_codes() if isinstance(layer, Linear) else None
        if codes is not None and codes.granularity != engine.weight.granularity:
            ours, theirs = map(granularity_in_words, (codes.granularity, engine.weight.granularity))
            raise ConfigError(
                f"the calibration has a scale a {ours} of the weight of {path!r}, and {engine.name} one a {theirs}; "
                "calibrate the model for that"
            )


def _apply_mix(loaded: LanguageModel, path: Path, fmt: str) -> ExportSource:
    mix = load_mix(path)
    unfuse_experts(loaded.model)  # as for finding it
    if mix.tables and fmt != OWN:
        raise ConfigError(
            f"{str(path)!r} has rows of {next(iter(mix.tables))!r} in FP8, which only the format {OWN} supports; leave "
            "its [tables] out"
        )
    tables = mix.coded_tables(loaded.model)
    mix.apply(loaded.model, cache_weights=False)
    return replace(_store_codes(loaded), tables=tables)


def _calibrate_from_run(loaded: LanguageModel, folder: Path, fmt: str, request: ConversionOptions) -> ExportSource:
    """Convert a run of a delayed recipe with scales from its amax history."""
    engine = request.engine
    name = f"--for {engine.name}" if engine else request.recipe or fmt
    rows = " --granularity row" if engine and engine.weight.granularity == PerRow() else ""
    command = f"octavo calibrate MODEL{rows} --out SCALES, then --calibration SCALES"
    if not (folder / RUN).is_file():
        raise ConfigError(f"{name} has static inputs, whose scales come from data: {command}")
    try:
        calibration = calibration_from_run(folder, power_of_two=request.power_of_two)
    except ConfigError as error:
        raise ConfigError(f"{name} has static inputs, and {error}: {command}") from error
    return _apply_calibration(loaded, calibration, request)


def _name_experts(loaded: LanguageModel, fmt: str) -> None:
    """Give experts linear layers of their own, as files have them; those that stay fused are written as they are."""
    if fmt in FORMATS:
        unfuse_experts(loaded.model)


def _store_codes(loaded: LanguageModel) -> ExportSource:
    """Store the weights as codes, so that nothing is cast twice."""
    loaded.model.requires_grad_(False)
    layers = {path: layer for path, layer in loaded.model.named_modules() if isinstance(layer, Linear)}
    store_weights_as_codes(loaded.model, [path for path, layer in layers.items() if not layer.recipe.is_high_precision])
    return ExportSource(language_model=loaded)
