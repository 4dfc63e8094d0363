"""Result of a calibration: a static recipe, its scales and their health.

| scale of                    | shape                         | key in scales.safetensors              |
|-----------------------------|-------------------------------|----------------------------------------|
| a layer's input             | []                            | ``PATH.input.scale``                   |
| a layer's weight            | [], [N, 1] or [N/128, K/128]  | ``PATH.weight.scale``                  |
| a decoder layer's keys      | []                            | ``kv_cache.LAYER.key.scale``           |
| a decoder layer's values    | []                            | ``kv_cache.LAYER.value.scale``         |
| its mean key                | [kv heads, D]                 | ``kv_cache.LAYER.key.mean``            |

All scales are decode scales: high precision ≈ codes · scale. An input has a single scale: scales along the reduced
dimension cannot be factored out of the sum, and scales per row would belong to tokens of the calibration data.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo._lazy import own_version
from octavo.convert import ConversionReport, convert, read_by_others, store_weights_as_codes
from octavo.errors import CheckpointError, ConfigError
from octavo.kernels import quantize
from octavo.language_model import LanguageModel
from octavo.nn import Linear
from octavo.numerics import amax, sqnr_db
from octavo.quantization.calibration.folder import read_folder, write_folder
from octavo.quantization.calibration.health import LayerHealth, health_warnings
from octavo.quantization.calibration.observers import module_of
from octavo.quantization.calibration.ranges import Method, RangeRule
from octavo.quantization.calibration.weight_scales import WeightMethod
from octavo.recipes import Recipe, from_toml, to_toml

__all__ = [
    "NEVER_REACHED",
    "NO_LINEAR_LAYERS",
    "Calibration",
    "SeenData",
    "check_can_store_codes",
    "check_has_no_codes",
    "fingerprint",
    "linear_shapes",
    "load_calibration",
    "shape_hash",
    "weights_hash",
]

NEVER_REACHED = "no batch reached it"
NO_LINEAR_LAYERS = "the weights are not those of linear layers"
MOST_BEYOND = 2.02  # a search at most halves a group's range; rounding to BF16 changes it slightly
LOST_DB = 1.0  # of a weight under its own searched scales; rounding to BF16 first costs a tenth of that
KV_CACHE, KV_ROLES, KEY_MEAN = "kv_cache.", ("key", "value"), ".key.mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenData:
    """Data of a calibration.

    Attributes:
        batches: number of batches; None if the amaxes come from a training run.
        samples: sum of the batches' first dimensions; None as above.
        tokens: number of token ids; None as above.
        source: origin of the data, if known.
        split: split of that source (``octavo.text.sources``); empty if the source is not a readable text.
        run: training run and step of the amaxes; empty if there is none.
    """

    batches: int | None = None
    samples: int | None = None
    tokens: int | None = None
    source: str = ""
    split: str = ""
    run: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Static scales for a model's linear layers.

    Attributes:
        recipe: the static recipe.
        rule: range selection for inputs.
        weight_method: range selection for weights.
        input_scales: scale of each layer's input, float32 [], by path.
        weight_scales: scales of each layer's weight, float32 in the shape of the recipe's granularity, by path.
        kv_scales: scales of keys and of values, float32 [] each, by decoder layer; empty if not requested.
        key_means: mean key after the rotary embedding, float32 [kv heads, D], by decoder layer; empty like kv_scales.
        health: of each layer.
        groups: paths of layers that share their inputs, and therefore their scale.
        left_out: reason for each linear layer, and each module of fused experts, that is not calibrated, by path.
        shapes: [N, K] of the model's linear layers, calibrated or not, by path.
        model_hash: hash of the names and shapes of all parameters.
        weights_hash: hash of the values of all parameters (:func:`weights_hash`); empty in calibrations written before
            2026-11-24.
        seen: the calibration data.
        octavo_version: version that computed the calibration.
    """

    recipe: Recipe
    rule: RangeRule
    weight_method: WeightMethod
    input_scales: Mapping[str, Tensor]
    weight_scales: Mapping[str, Tensor]
    kv_scales: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    key_means: Mapping[int, Tensor] = field(default_factory=dict)
    health: tuple[LayerHealth, ...]
    groups: tuple[tuple[str, ...], ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, int]]
    model_hash: str
    weights_hash: str
    seen: SeenData
    octavo_version: str

    def apply(self, model: nn.Module | LanguageModel, *, hold_weights: bool | None = None) -> ConversionReport:
        """Convert the calibrated layers of a model to the static recipe, in place.

        Args:
            model: the calibrated model, with the same weights.
            hold_weights: freeze the calibrated layers' weights and store them as FP8 codes, one byte an element. None
                does so only for searched scales (``weight_method="mse"``), which a high-precision weight cannot use.

        Returns:
            The converted layers, and the reason for each layer that is not converted.

        Raises:
            CheckpointError: the scales belong to another model or other weights; the model is not changed then.
            ConfigError: ``hold_weights=False`` with searched weight scales, searched scales of a weight that another
                module also reads, or a layer that already stores codes.
        """
        module = module_of(model)
        self.check_fit(module)
        searched = self.weight_method is not WeightMethod.MAX
        if searched:
            check_can_store_codes(module, self.input_scales)
        if searched and not self.weights_hash:
            self._check_weights(module)
        if searched and hold_weights is False:
            raise ConfigError(
                "searched weight scales (mse) need hold_weights=True: a weight in high precision is cast with its own "
                "amax"
            )
        report = convert(module, self.recipe, layer_filter=lambda path, _: path in self.input_scales, convert_head=True)
        for path, scale in self.input_scales.items():
            layer = module.get_submodule(path)
            assert isinstance(layer, Linear)
            layer.input_scale.copy_(scale)
        if searched or hold_weights:
            report = _with_stored_codes(module, report, self.weight_scales if searched else {})
        return replace(report, skipped={path: self.left_out.get(path, why) for path, why in report.skipped.items()})

    def means_of_keys(self, model: nn.Module | LanguageModel) -> Mapping[int, Tensor]:
        """Return :attr:`key_means` for ``octavo.inference.ModelRunner``, after checking that they belong to the model.

        Raises:
            CheckpointError: they belong to another model or other weights.
            ConfigError: the calibration has no means of keys.
        """
        self.check_fit(module_of(model))
        if not self.key_means:
            raise ConfigError("this calibration has no means of keys; octavo calibrate --kv-cache computes them")
        return self.key_means

    def check_fit(self, module: nn.Module) -> None:
        """Raise unless names, shapes and weights are those of the calibrated model, and no layer stores codes."""
        shapes = linear_shapes(module)
        missing, extra = sorted(self.shapes.keys() - shapes.keys()), sorted(shapes.keys() - self.shapes.keys())
        if missing or extra:
            raise CheckpointError(
                f"this calibration is of another model: {len(missing)} of its layers are missing here {missing[:3]}, "
                f"{len(extra)} layers are new {extra[:3]}; calibrate this model"
            )
        for path, shape in self.shapes.items():
            if shapes[path] != tuple(shape):
                raise CheckpointError(
                    f"this calibration is of another model: the weight of {path!r} is {list(shapes[path])} here and "
                    f"was {list(shape)}; calibrate this model"
                )
        if shape_hash(module) != self.model_hash:
            raise CheckpointError(
                "this calibration is of another model: its linear layers are the same, but the names or shapes of "
                "other parameters differ; calibrate this model"
            )
        check_has_no_codes(module, self.input_scales)
        if self.weights_hash and weights_hash(module) != self.weights_hash:
            raise CheckpointError(
                "this calibration is of other weights of the same shape, such as another run's or an earlier step's; "
                "calibrate this model"
            )

    def _check_weights(self, module: nn.Module) -> None:
        """Raise if searched scales do not fit the weights, trained since or of another model.

        A search does not go below half of a group's amax, and the SQNR of a matrix must not be lower than it was.
        """
        spec = self.recipe.output.b
        assert spec is not None
        for layer in self.health:
            weight = module.get_submodule(layer.path).get_parameter("weight").detach().float()
            scale = self.weight_scales[layer.path].to(weight.device)
            q = quantize(weight, spec.format, granularity=spec.granularity, scale=scale)
            measured_db = sqnr_db(weight, q.dequantize())
            calibrated_db = measured_db if layer.weight_sqnr_db is None else layer.weight_sqnr_db
            beyond = float((amax(weight, spec.granularity) / (scale * spec.format.max)).max())
            if measured_db < calibrated_db - LOST_DB or beyond > MOST_BEYOND:
                raise CheckpointError(
                    f"the weight of {layer.path!r} is not the one its scales were searched for (mse): its SQNR is "
                    f"{measured_db:.1f} dB and was {calibrated_db:.1f}, and its amax is {beyond:.2f} times the "
                    "range of the scales; calibrate the model with these weights"
                )

    def warnings(self) -> list[str]:
        """One sentence for each problem; empty if there is none."""
        sentences = list(health_warnings(self.health, samples=self.seen.samples))
        unreached = [path for path, why in self.left_out.items() if why == NEVER_REACHED]
        if unreached:
            names = ", ".join(map(repr, unreached[:5])) + (" and others" if len(unreached) > 5 else "")
            sentences.append(f"no batch reached {names}: {len(unreached)} layers stay as they are")
        others = {path: why for path, why in self.left_out.items() if why.startswith(NO_LINEAR_LAYERS)}
        for reason in dict.fromkeys(others.values()):
            first, *rest = [path for path, why in others.items() if why == reason]
            more = f" and {len(rest)} more" if rest else ""
            sentences.append(f"left in high precision: {first!r}{more} ({reason})")
        return sentences

    def save(self, folder: str | Path) -> None:
        """Write ``recipe.toml``, ``scales.safetensors`` and ``calibration.json``; the folder is replaced as a whole.

        Raises:
            ConfigError: the folder holds files other than a calibration's.
        """
        write_folder(Path(folder), to_toml(self.recipe), _tensors(self), self.to_record())

    def to_record(self) -> dict[str, Any]:
        """Everything except the recipe and the scales, as JSON-compatible values."""
        plain = ("groups", "left_out", "shapes", "model_hash", "weights_hash", "octavo_version")
        return {
            **{name: getattr(self, name) for name in plain},
            "seen": asdict(self.seen),
            "inputs": asdict(self.rule),
            "weights": str(self.weight_method),
            "warnings": self.warnings(),
            "layers": [asdict(each) for each in self.health],
        }


def load_calibration(folder: str | Path) -> Calibration:
    """Load a calibration written by :meth:`Calibration.save`.

    Raises:
        CheckpointError: the calibration is missing or damaged.

    Example:
        >>> import octavo, tempfile
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     octavo.calibrate(model, [torch.randn(4, 8)]).save(folder)
        ...     print(load_calibration(folder).apply(model))
        2 layers run static, 0 stay as they are
        in FP8: 88.9 % of the parameters and 100.0 % of the multiplications, counting each weight once a token
    """
    folder = Path(folder)
    recipe, tensors, record = read_folder(folder)
    try:
        return Calibration(
            recipe=from_toml(recipe),
            rule=RangeRule(**{**record["inputs"], "method": Method(record["inputs"]["method"])}),
            weight_method=WeightMethod(record["weights"]),
            input_scales=_of_role(tensors, ".input.scale"),
            weight_scales=_of_role(tensors, ".weight.scale"),
            kv_scales=_kv_scales(tensors),
            key_means=_key_means(tensors),
            health=tuple(LayerHealth(**each) for each in record["layers"]),
            groups=tuple(map(tuple, record["groups"])),
            left_out=record["left_out"],
            shapes={path: (n, k) for path, (n, k) in record["shapes"].items()},
            model_hash=record["model_hash"],
            weights_hash=record.get("weights_hash", ""),
            seen=SeenData(**record["seen"]),
            octavo_version=record["octavo_version"],
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the calibration in {str(folder)!r} is damaged ({error}); calibrate again") from error


def _tensors(calibration: Calibration) -> dict[str, Tensor]:
    """All scales, by file key."""
    tensors = {_key(path, "input"): scale for path, scale in calibration.input_scales.items()}
    tensors |= {_key(path, "weight"): scale.contiguous() for path, scale in calibration.weight_scales.items()}
    for layer, pair in calibration.kv_scales.items():
        tensors |= {f"{KV_CACHE}{layer}.{role}.scale": scale for role, scale in zip(KV_ROLES, pair, strict=True)}
    return tensors | {f"{KV_CACHE}{layer}{KEY_MEAN}": mean for layer, mean in calibration.key_means.items()}


def _key(path: str, role: str) -> str:
    return f"{path}.{role}.scale" if path else f"{role}.scale"


def _of_role(tensors: Mapping[str, Tensor], ending: str) -> dict[str, Tensor]:
    """Scales of one role by path; "" is the path of a model that is itself a linear layer."""
    return {f".{key}".removesuffix(ending)[1:]: scale for key, scale in tensors.items() if f".{key}".endswith(ending)}


def _kv_scales(tensors: Mapping[str, Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
    layers = sorted({int(key.split(".")[1]) for key in tensors if key.startswith(KV_CACHE)})
    key_role, value_role = (f".{role}.scale" for role in KV_ROLES)
    return {i: (tensors[f"{KV_CACHE}{i}{key_role}"], tensors[f"{KV_CACHE}{i}{value_role}"]) for i in layers}


def _key_means(tensors: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Mean keys by decoder layer; older calibrations have scales of keys but no means."""
    layers = sorted(int(key.split(".")[1]) for key in tensors if key.startswith(KV_CACHE) and key.endswith(KEY_MEAN))
    return {layer: tensors[f"{KV_CACHE}{layer}{KEY_MEAN}"] for layer in layers}


def linear_shapes(module: nn.Module) -> dict[str, tuple[int, int]]:
    """[N, K] of every linear layer, by path."""
    return {
        path: (each.out_features, each.in_features)
        for path, each in module.named_modules()
        if isinstance(each, nn.Linear)
    }


def fingerprint(module: nn.Module) -> dict[str, Any]:
    """Fields of a :class:`Calibration` that identify its model and octavo's version."""
    return {
        "shapes": linear_shapes(module),
        "model_hash": shape_hash(module),
        "weights_hash": weights_hash(module),
        "octavo_version": own_version(),
    }


def shape_hash(module: nn.Module) -> str:
    """BLAKE2b of the names and shapes of a model's parameters; 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in sorted(module.named_parameters()):
        digest.update(f"{name} {list(parameter.shape)}\n".encode())
    return digest.hexdigest()


def weights_hash(module: nn.Module) -> str:
    """SHA-256 of the names, shapes and BF16 values of a model's parameters, sorted by name; 64 hexadecimal digits.

    Values are hashed as little-endian BF16, so a model has the same hash in FP32 and BF16, and from every file with the
    same weights and names: a run, a Hugging Face folder, a .gguf file with lossless types.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        digest.update(f"{name} {list(parameter.shape)}\n".encode())
        values = parameter.detach().to(device="cpu", dtype=torch.bfloat16).flatten()
        digest.update(values.view(torch.int16).numpy().data)
    return digest.hexdigest()


def check_has_no_codes(module: nn.Module, paths: Iterable[str]) -> None:
    """Raise ConfigError if one of the layers stores FP8 codes instead of its weight."""
    for path in paths:
        layer = module.get_submodule(path)
        if isinstance(layer, Linear) and layer.codes_layout is not None:
            raise ConfigError(
                f"layer {path!r} already stores its weight as FP8 codes; give the high-precision model that they were "
                "made from"
            )


def check_can_store_codes(module: nn.Module, paths: Iterable[str]) -> None:
    """Raise ConfigError if the weight of one of the layers cannot be stored as codes, as searched scales require."""
    shared_weights = read_by_others(module)
    for path in paths:
        if path in shared_weights:
            raise ConfigError(
                f"the weight of {path!r} cannot have searched scales (mse), because it cannot be stored as codes: "
                f"{shared_weights[path]}; leave the layer out with skip, or use the weight method max"
            )


def _with_stored_codes(module: nn.Module, report: ConversionReport, scales: Mapping[str, Tensor]) -> ConversionReport:
    for path in report.converted:
        layer = module.get_submodule(path)
        assert isinstance(layer, Linear)
        layer.weight.requires_grad_(False)
    stored, not_stored = store_weights_as_codes(module, report.converted, scales=scales)
    return replace(report, stored=stored, not_stored=not_stored)
