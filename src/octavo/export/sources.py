"""What is exported, from where the user has it: a model, and what says how it runs in FP8.

| given                         | the layers run                                    | scales of keys and values |
|-------------------------------|---------------------------------------------------|---------------------------|
| a folder of ``octavo qat``    | what they were trained for                        | –                         |
| a folder that is in FP8       | what they ran: codes and scales are not touched   | those that it has         |
| a model and a calibration     | the calibration's static recipe                   | the calibration's         |
| a model and a mix             | each its own                                      | –                         |
| a run of a delayed recipe     | ``static``, by the amaxes that it kept, on request | –                        |
| any other model               | the recipe of that name, or the format's          | –                         |
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from octavo import recipes
from octavo.convert import choose_layers, convert, hold_weights
from octavo.errors import ConfigError
from octavo.interchange import FORMATS, CodedTable, is_quantized, load_quantized
from octavo.interchange.contents import nothing_in_fp8
from octavo.language_model import LanguageModel, load_language_model
from octavo.models.sources import SourceKind, kind_of, located
from octavo.nn import Linear
from octavo.quantization import Calibration, calibration_from_run, load_calibration, load_mix, load_qat
from octavo.quantization.qat.folder import MARK
from octavo.recipes import Recipe
from octavo.training.config import Device
from octavo.training.precision import resolve_device
from octavo.training.run_folder import CONFIG as RUN

__all__ = ["ONNX", "Request", "Source", "load_source"]

STATIC, ONNX, OWN = "static", "onnx", "octavo"
PRESETS = {name: fmt.preset for name, fmt in FORMATS.items()} | {ONNX: "tensorwise"}
SCALE_OPTIONS = ("rowwise", "blockwise", STATIC)  # presets that leave the choice of powers of two


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """How a model is to run in FP8; None and empty leave it to the model and the format.

    Attributes:
        recipe: a preset's name.
        power_of_two: let its scales be powers of two.
        calibration: a folder of ``octavo calibrate``.
        mix: a file of ``octavo sensitivity``.
        skip: shell patterns of layers that stay in high precision.
        convert_head: whether a head of its own is in FP8 too.

    Raises:
        ConfigError: options that contradict each other, or no recipe of that name: before a model is loaded.
    """

    recipe: str | None = None
    power_of_two: bool = False
    calibration: Path | None = None
    mix: Path | None = None
    skip: tuple[str, ...] = ()
    convert_head: bool = False

    def __post_init__(self) -> None:
        ways = {"--recipe": self.recipe, "--calibration": self.calibration, "--mix": self.mix}
        given = [name for name, value in ways.items() if value is not None]
        if self.recipe == STATIC and self.calibration is not None:
            given.remove("--recipe")
        if len(given) > 1:
            raise ConfigError(f"{given[0]} and {given[1]} both say how layers run; leave one of them out")
        if self.mix is not None and (self.skip or self.convert_head):
            raise ConfigError("a mix says which layers it is for; leave out --skip and --head")
        if self.power_of_two and (self.calibration or self.mix):
            raise ConfigError("--power-of-two goes with a recipe; calibrations and mixes say for themselves")
        if self.recipe is not None:
            _recipe(self.recipe, power_of_two=self.power_of_two)

    @property
    def is_empty(self) -> bool:
        """Whether everything is left to the model."""
        return self == Request()


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model that is ready to be written.

    Attributes:
        language_model: converted, its weights held as codes.
        kv_scales: of keys and of values, by decoder layer.
        tables: embeddings whose rows are codes, by path.
        calibration: that it was given.
        dtype: that loses nothing of what is not in FP8, where the model was in FP8 already.
    """

    language_model: LanguageModel
    kv_scales: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    tables: Mapping[str, CodedTable] = field(default_factory=dict)
    calibration: Calibration | None = None
    dtype: torch.dtype | None = None


def load_source(model: str, fmt: str, request: Request, *, device: Device = Device.CPU) -> Source:
    """Load a model and let it run in FP8 as asked for, or as suits the format.

    Args:
        model: a run, a folder or a file.
        fmt: a checkpoint format, or "onnx".
        request: how the layers are to run.
        device: where to put it.

    Raises:
        ConfigError: options that contradict each other or the model, a static recipe without scales, a mix with rows of
            an embedding in FP8 for a format that has none.
        CheckpointError: there is no such model, calibration or mix, or it belongs to another model.
    """
    place, folder = resolve_device(device), located(model)
    if (folder / MARK).is_file():
        return _finished(_trained(folder, request, place))
    if kind_of(folder) is SourceKind.HUGGING_FACE and is_quantized(folder):
        return _in_fp8(folder, request, place)
    loaded = load_language_model(folder, device=device)
    loaded.model.requires_grad_(False)
    if request.calibration is not None:
        return _calibrated(loaded, load_calibration(request.calibration), request)
    if request.mix is not None:
        return _mixed(loaded, request.mix, fmt)
    name = request.recipe or PRESETS[fmt]
    if name == STATIC:
        return _from_history(loaded, folder, fmt, request)
    recipe = _recipe(name, power_of_two=request.power_of_two)
    if not choose_layers(loaded.model, skip=request.skip, convert_head=request.convert_head)[0]:
        raise ConfigError(nothing_in_fp8(loaded.model))
    convert(loaded.model, recipe, skip=request.skip, convert_head=request.convert_head)
    return _finished(loaded)


def _recipe(name: str, *, power_of_two: bool) -> Recipe:
    if name in SCALE_OPTIONS:
        return recipes.get(name, power_of_two=power_of_two)
    if power_of_two:
        raise ConfigError(f"--power-of-two goes with {', '.join(SCALE_OPTIONS)}, not with {name!r}")
    return recipes.get(name)


def _trained(folder: Path, request: Request, place: torch.device) -> LanguageModel:
    if not request.is_empty:
        raise ConfigError(f"{str(folder)!r} was trained for a recipe of its own; leave out what says how layers run")
    loaded = load_qat(folder)
    loaded.model.to(place)
    return loaded


def _in_fp8(folder: Path, request: Request, place: torch.device) -> Source:
    if not request.is_empty:
        raise ConfigError(f"{str(folder)!r} is in FP8 already; leave out what says how layers run")
    read = load_quantized(folder)
    model = LanguageModel(
        model=read.model.to(place), tokenizer=read.tokenizer, context=read.context, source=str(folder)
    )
    return Source(language_model=model, kv_scales=read.kv_scales, tables=read.tables, dtype=read.dtype)


def _calibrated(loaded: LanguageModel, calibration: Calibration, request: Request) -> Source:
    if request.skip or request.convert_head:
        raise ConfigError("a calibration says which layers it is for; leave out --skip and --head")
    calibration.apply(loaded, hold_weights=True)
    return Source(language_model=loaded, kv_scales=calibration.kv_scales, calibration=calibration)


def _mixed(loaded: LanguageModel, path: Path, fmt: str) -> Source:
    mix = load_mix(path)
    if mix.tables and fmt != OWN:
        raise ConfigError(
            f"{str(path)!r} keeps rows of {next(iter(mix.tables))!r} in FP8, which the format {OWN} alone has; leave "
            "its [tables] out"
        )
    tables = mix.coded_tables(loaded.model)
    mix.apply(loaded.model, cache_weights=False)
    return replace(_finished(loaded), tables=tables)


def _from_history(loaded: LanguageModel, folder: Path, fmt: str, request: Request) -> Source:
    """The amaxes that a delayed run has kept are its calibration."""
    if not (folder / RUN).is_file():
        raise ConfigError(
            f"{request.recipe or fmt} has static inputs, whose scales come from data: octavo "
            "calibrate MODEL --out SCALES, then --calibration SCALES"
        )
    return _calibrated(loaded, calibration_from_run(folder, power_of_two=request.power_of_two), request)


def _finished(loaded: LanguageModel) -> Source:
    """Weights become codes, so that nothing is cast twice."""
    loaded.model.requires_grad_(False)
    layers = {path: layer for path, layer in loaded.model.named_modules() if isinstance(layer, Linear)}
    hold_weights(loaded.model, [path for path, layer in layers.items() if not layer.recipe.is_high_precision])
    return Source(language_model=loaded)
