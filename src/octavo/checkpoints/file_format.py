"""Description of a checkpoint format; each format is defined in its own module."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.checkpoints.contents import Contents, FP8Layer
from octavo.checkpoints.merged_layers import of_several_schemes
from octavo.checkpoints.names import ScaleNames
from octavo.checkpoints.schemes import Scheme, scheme_of, served
from octavo.errors import CheckpointError, ConfigError
from octavo.recipes import Recipe

__all__ = ["FileFormat", "Layout", "damaged", "matched_scheme", "names_in"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Quantized layers of a folder, from its configuration.

    Attributes:
        recipes: recipe of each FP8 layer, by path.
        has_kv_scales: True if the folder has scales of keys and values.
        tables: paths of embeddings stored as rows of codes.
    """

    recipes: Mapping[str, Recipe]
    has_kv_scales: bool = False
    tables: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """Checkpoint format.

    Attributes:
        name: on the command line.
        quant_method: in config.json.
        names: names of its scales.
        preset: default recipe.
        schemes: supported schemes; None if the format stores whole recipes.
        one_scheme: True if all quantized layers must have the same scheme.
        refuses: returns the reason why a layer cannot be written, or None.
        configuration: contents → config.json's quantization_config.
        other_files: contents → texts of additional files, by name.
        model_type: replaces the model's own in config.json, which moves to quantization_config; None changes nothing. A
            program that does not know a quant_method may load codes as weights; an unknown model_type is an error.
        layout: (quantization_config, paths of the model's linear layers, folder) → layout.
    """

    name: str
    quant_method: str
    names: ScaleNames
    preset: str
    schemes: frozenset[Scheme] | None
    one_scheme: bool
    configuration: Callable[[Contents], dict[str, Any]]
    layout: Callable[[Mapping[str, Any], Sequence[str], Path], Layout]
    refuses: Callable[[FP8Layer], str | None] = lambda _: None
    other_files: Callable[[Contents], dict[str, str]] = lambda _: {}
    model_type: str | None = None

    def served(self, recipe: Recipe) -> Recipe:
        """Recipe that a program which loads the file runs for a layer of ``recipe``."""
        return recipe if self.schemes is None else served(recipe)

    def unsupported_reason(self, contents: Contents) -> str | None:
        """Reason why the format cannot store these contents, or None."""
        if contents.experts and self.schemes is not None:
            return (
                f"this model has experts, {contents.experts[0]!r} and {len(contents.experts) - 1} more tensors, in one "
                f"weight for all of them, which no server reads in {self.name}; octavo.convert.unfuse_experts before "
                "octavo.convert divides those that files name one by one (octavo export has done so), and says why it "
                "leaves others: for these use the format octavo, or serve the model in high precision"
            )
        if contents.tables and self.schemes is not None:
            return (
                f"rows of {next(iter(contents.tables))!r} are FP8 codes, which {self.name} cannot store; use the "
                "format octavo, or export the model that they were made from"
            )
        if contents.kv_scales and self.names.key is None:
            return f"{self.name} has no scales of keys and values; calibrate without --kv-cache"
        for path, layer in contents.layers.items():
            if (reason := self._reason_of(layer)) is not None:
                return f"layer {path!r}: {reason}"
        if self.schemes is not None and (mixed := _partly_in_fp8(contents)):
            return (
                f"servers run all experts of a layer by one scheme, and {mixed!r} has several; skip all or none of it, "
                "or use the format octavo; octavo sensitivity makes a mix that servers run if it is given the --format "
                "of the export"
            )
        return self._reason_of_mixture(contents) if self.one_scheme else None

    def _reason_of_mixture(self, contents: Contents) -> str | None:
        schemes = {scheme_of(layer.recipe): path for path, layer in contents.layers.items()}
        if len(schemes) == 1:
            return None
        (one, first), (other, second), *_ = schemes.items()
        return f"{self.name} has one scheme for all layers; {first!r} has {one}, and {second!r} {other}"

    def _reason_of(self, layer: FP8Layer) -> str | None:
        if self.schemes is None:
            delayed = f"recipe {layer.recipe.name!r} takes its scales from training steps; use a static or dynamic one"
            return delayed if layer.recipe.is_delayed else None
        try:
            scheme = scheme_of(layer.recipe)
        except ConfigError as error:
            return str(error)
        if scheme not in self.schemes:
            return f"it has {scheme}; {self.name} has " + "; or ".join(sorted(map(str, self.schemes)))
        return self.refuses(layer)


def _partly_in_fp8(contents: Contents) -> str | None:
    """Path of the first experts whose linear layers have several schemes, or of which some are in high precision."""
    in_fp8 = {path: scheme_of(layer.recipe) for path, layer in contents.layers.items()}
    return next(iter(of_several_schemes({path: in_fp8.get(path) for path in contents.unfused})), None)


def matched_scheme(fmt: str, scheme: Scheme, supported: frozenset[Scheme]) -> Scheme:
    """Check that the scheme of a configuration is supported.

    Raises:
        CheckpointError: the format does not support it.
    """
    if scheme not in supported:
        raise CheckpointError(f"this {fmt} checkpoint has {scheme}; octavo reads " + "; or ".join(map(str, supported)))
    return scheme


def damaged(what: str, value: object, allowed: str) -> CheckpointError:
    """Error for a configuration value that octavo does not support."""
    return CheckpointError(f"quantization_config has {value!r} as {what}; octavo reads {allowed}")


def names_in(what: str, value: object) -> list[str]:
    """List of names in a configuration; None is an empty list.

    Raises:
        CheckpointError: the value is not a list of names.
    """
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise damaged(what, value, "a list of names")
    return value
