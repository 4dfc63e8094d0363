"""What every checkpoint format can say of itself; each has a file of its own beside this one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError, ConfigError
from octavo.interchange.contents import Contents, FP8Layer
from octavo.interchange.names import ScaleNames
from octavo.interchange.schemes import Scheme, scheme_of, served
from octavo.recipes import Recipe

__all__ = ["FileFormat", "Layout", "damaged", "matched_scheme", "names_in"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a folder's configuration says of its layers.

    Attributes:
        recipes: of each layer in FP8, by path.
        has_kv_scales: whether scales of keys and values go with them.
        tables: paths of embeddings whose rows are codes.
    """

    recipes: Mapping[str, Recipe]
    has_kv_scales: bool = False
    tables: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """A format of checkpoints.

    Attributes:
        name: on the command line.
        quant_method: in config.json.
        names: of its scales.
        preset: the recipe that suits it best where nobody asks for one.
        schemes: those it can name; None where it names every recipe.
        one_scheme: whether all layers have the same, or those left out none.
        refuses: why a layer of such a path and scheme cannot be written, or None.
        configuration: contents → config.json's quantization_config.
        other_files: contents → texts of more files, by name.
        model_type: what config.json has instead of the model's own, which is in quantization_config then; None leaves
            it there. A program that does not know a quant_method may load codes as weights; one that does not know a
            model_type refuses.
        layout: quantization_config, paths of the model's linear layers, the folder → what they say.
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
        """What is computed of a layer that runs ``recipe`` by whoever loads the file."""
        return recipe if self.schemes is None else served(recipe)

    def unsupported_reason(self, contents: Contents) -> str | None:
        """Why the format cannot hold these contents, in a sentence, or None."""
        if contents.experts and self.schemes is not None:
            return (
                f"this model has experts, {contents.experts[0]!r} and {len(contents.experts) - 1} more tensors, which "
                f"stay in high precision and whose names no server reads in {self.name}; only the format octavo takes "
                "them, or serve the model in high precision"
            )
        if contents.tables and self.schemes is not None:
            return (
                f"rows of {next(iter(contents.tables))!r} are FP8 codes, which {self.name} cannot say; only the format "
                "octavo can, or export the model that they were made of"
            )
        if contents.kv_scales and self.names.key is None:
            return f"{self.name} has no scales of keys and values; calibrate without --kv-cache"
        for path, layer in contents.layers.items():
            if (reason := self._reason_of(layer)) is not None:
                return f"layer {path!r}: {reason}"
        return self._reason_of_mixture(contents) if self.one_scheme else None

    def _reason_of_mixture(self, contents: Contents) -> str | None:
        found = {scheme_of(layer.recipe): path for path, layer in contents.layers.items()}
        if len(found) == 1:
            return None
        (one, first), (other, second), *_ = found.items()
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


def matched_scheme(fmt: str, scheme: Scheme, known: frozenset[Scheme]) -> Scheme:
    """The scheme that a configuration describes.

    Raises:
        CheckpointError: it is none of the format's.
    """
    if scheme not in known:
        raise CheckpointError(f"this {fmt} checkpoint has {scheme}; octavo reads " + "; or ".join(map(str, known)))
    return scheme


def damaged(what: str, given: object, allowed: str) -> CheckpointError:
    """The error for a configuration that says something octavo does not read."""
    return CheckpointError(f"quantization_config has {given!r} as {what}; octavo reads {allowed}")


def names_in(what: str, given: object) -> list[str]:
    """A configuration's list of names; None is an empty one.

    Raises:
        CheckpointError: it is no such list.
    """
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise damaged(what, given, "a list of names")
    return given
