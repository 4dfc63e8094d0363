"""Report of ``convert``: each layer's recipe, the weights left unchanged and why, and their shares of the model.

Shares of parameters are of all elements of all parameters. Shares of multiplications are of one pass of one token
through every weight that multiplies: an embedding, which looks up, has none, and every other weight has one
multiplication an element. A convolution that slides over more places than there are tokens does more than that, and of
experts only those that a token is sent to multiply, which no module says in general; all of them are counted. A weight
that takes a gradient has three multiplications an element in training, two in backward; one that takes none has two.
"""

import re
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeGuard

import torch

from octavo.convert.convolutions import is_product
from octavo.convert.routers import experts_in, routers
from octavo.html.notebook import Table, summary
from octavo.html.wording import counted
from octavo.nn import Linear
from octavo.nn.fp8_weight import is_own_linear
from octavo.nn.projected_attention import is_plain
from octavo.recipes import Recipe

__all__ = [
    "BareWeight",
    "ConversionReport",
    "Shares",
    "WeightShare",
    "bare_weights",
    "packed_weights",
    "shares_of",
    "shown",
]

LOOK_UPS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
LAYERS = (torch.nn.Linear, torch.nn.Embedding)
PERCENT = 100
MATRIX = 2
ATTENTION = "stays as it is: a parameter of nn.MultiheadAttention, which multiplies by it without nn.Linear"
PATCHES = "one product of patches"
ARGUMENTS = {  # of convert, by the reasons that they do away with
    "head: ": "convert_head=True",
    f"{ATTENTION}$": "attention_projections=True",
    f"stays as it is: the kernel of a convolution .*{PATCHES}": "convolutions=True",
    r"subclass \w+ of nn\.Linear .* name it in linear_classes": "linear_classes=[{}]",
}
INDEX = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole word of a path, as in "layers.0.fc1"


class WeightShare(NamedTuple):
    """Share of a model that one weight makes up, as fractions of 1.

    Attributes:
        parameters: of the model's parameters.
        multiplications: of those of one token; a look-up has none.
    """

    parameters: float
    multiplications: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Share of a model that runs in FP8, as fractions of 1.

    Attributes:
        parameters: of the model's parameters, the weights of layers whose recipe casts.
        multiplications: of those of one token, if each weight multiplies it once; see this module's head.
        training: of those of forward and backward together; 0 where no recipe casts in backward, as for inference.
        by_path: of both, each weight that stays as it is.
    """

    parameters: float = 0.0
    multiplications: float = 0.0
    training: float = 0.0
    by_path: Mapping[str, WeightShare] = field(default_factory=dict)

    def sentence(self) -> str:
        """The totals; that of training where it differs from that of forward alone."""
        training = _percent(self.training)
        differs = self.training and training != _percent(self.multiplications)
        with_backward = f" ({training} with backward's)" if differs else ""
        return (
            f"in FP8: {_percent(self.parameters)} of the parameters and {_percent(self.multiplications)} of the "
            f"multiplications{with_backward}, counting each weight once a token"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """Result of :func:`convert`.

    Attributes:
        recipe: the recipe's name.
        converted: paths of the layers that run it, or what ``overrides`` give them.
        overridden: path of each converted layer that runs another recipe, and its name.
        weights: names of the parameters of other modules, such as experts, that run a recipe.
        attention: paths of the modules whose attention multiplies in FP8.
        attention_skipped: path of each module whose attention was to multiply in FP8 and does not, or does with the
            recipe that it had, and why.
        stored: paths of the layers whose weight is stored as FP8 codes.
        not_stored: path of each converted layer whose frozen weight could not be stored as FP8 codes, and why.
        skipped: path of every other linear or embedding layer, and why it stays as it is.
        parameters: name of every other weight of two or more dimensions, such as the kernels of convolutions, torch's
            packed projections and the matrices of experts, and why it stays.
        notes: path of modules that go round their converted layers, and when.
        shares: how much of the model runs in FP8, and how much of it each weight is that does not.
    """

    recipe: str
    converted: tuple[str, ...]
    overridden: dict[str, str] = field(default_factory=dict)
    weights: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    attention_skipped: dict[str, str] = field(default_factory=dict)
    stored: tuple[str, ...] = ()
    not_stored: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    shares: Shares = field(default_factory=Shares)

    @property
    def gains(self) -> dict[str, float]:
        """Arguments of :func:`convert` under which more would run in FP8, and the share of multiplications of each.

        The head is among the layers that quantization hurts most: try it, and measure.
        """
        shares: dict[str, float] = {}
        for path, reason in (self.skipped | self.parameters).items():
            argument = next((each for pattern, each in ARGUMENTS.items() if re.match(pattern, reason)), None)
            if argument is None:
                continue
            argument = argument.format(*reason.split()[1:2])
            for taken in (path, *([path.replace("in_proj_weight", "out_proj")] if reason == ATTENTION else [])):
                share = self.shares.by_path.get(taken)
                shares[argument] = shares.get(argument, 0.0) + (share.multiplications if share is not None else 0.0)
        return dict(sorted(shares.items(), key=lambda gain: -gain[1]))

    @property
    def held(self) -> tuple[str, ...]:
        """Former name of ``stored``; works for one release."""
        warnings.warn("ConversionReport.held is ConversionReport.stored now", DeprecationWarning, stacklevel=2)
        return self.stored

    @property
    def not_held(self) -> dict[str, str]:
        """Former name of ``not_stored``; works for one release."""
        warnings.warn("ConversionReport.not_held is ConversionReport.not_stored now", DeprecationWarning, stacklevel=2)
        return self.not_stored

    def __str__(self) -> str:
        """Totals, then one line for all layers that differ in the numbers of their paths alone."""
        following = len(self.converted) + len(self.weights) - len(self.overridden)
        left = len(self.skipped)
        runs = f"{counted(following, 'layer')} {'runs' if following == 1 else 'run'} {self.recipe}"
        experts = f", {len(self.weights)} of them weights of experts and other modules" if self.weights else ""
        rest = f"{left} {'stays as it is' if left == 1 else 'stay as they are'}"
        lines = [f"{runs}{experts}, {rest}", self.shares.sentence()]
        if self.attention:
            lines.append(f"the attention of {counted(len(self.attention), 'module')} multiplies in FP8")
        if self.stored:
            lines.append(f"{len(self.stored)} store their weight as FP8 codes")
        lines += [f"  {path}: runs {name}" for path, name in _grouped(self.overridden)]
        lines += [
            f"  {path}: its weight is not stored as codes: {reason}" for path, reason in _grouped(self.not_stored)
        ]
        stay = self.skipped | self.parameters
        lines += [f"  {path}: {reason}" for path, reason in _grouped(stay, self.shares.by_path)]
        lines += [f"  {path}: attention: {reason}" for path, reason in _grouped(self.attention_skipped)]
        lines += [f"note: {path} {note}" for path, note in _grouped(self.notes)]
        return "\n".join(lines + ([f"more would run in FP8 with {self._gains()}"] if self.gains else []))

    def _gains(self) -> str:
        return ", ".join(
            f"{argument} ({_percent(share)} of the multiplications)" for argument, share in self.gains.items()
        )

    def _repr_html_(self) -> str | None:
        facts = {
            "in FP8": f"{_percent(self.shares.parameters)} of the parameters, "
            f"{_percent(self.shares.multiplications)} of the multiplications, counting each weight once a token",
            "converted": counted(len(self.converted) + len(self.weights), "layer"),
            "high precision": counted(len(self.skipped), "layer"),
        }
        if self.gains:
            facts["more with"] = self._gains()
        if self.attention:
            facts["attention in FP8"] = counted(len(self.attention), "module")
        if self.stored:
            facts["stored as codes"] = counted(len(self.stored), "weight")
        runs = {path: self.overridden.get(path, self.recipe) for path in (*self.converted, *self.weights)}
        stay = self.skipped | self.parameters
        tables = (
            Table(title="Converted layers", columns=("layers", "recipe"), rows=list(_grouped(runs))),
            Table(
                title="In high precision", columns=("weights", "reason"), rows=list(_grouped(stay, self.shares.by_path))
            ),
            Table(title="Not stored as codes", columns=("layers", "reason"), rows=list(_grouped(self.not_stored))),
            Table(title="Attention", columns=("modules", "reason"), rows=list(_grouped(self.attention_skipped))),
            Table(title="Notes", columns=("module", "note"), rows=list(_grouped(self.notes))),
        )
        return summary(f"ConversionReport: recipe {self.recipe}", facts=facts, tables=tables)


def shown(path: str) -> str:
    """A module's path as a sentence has it."""
    return path or "(the model itself)"


class BareWeight(NamedTuple):
    """A weight of two or more dimensions that is no linear layer's and no embedding's.

    Attributes:
        path: its name among the model's parameters.
        parameter: itself.
        reason: why it stays as it is.
        multiplies: whether it is no look-up.
    """

    path: str
    parameter: torch.nn.Parameter
    reason: str
    multiplies: bool


def bare_weights(model: torch.nn.Module, running: Container[str], left: Mapping[str, str]) -> Iterator[BareWeight]:
    """Find all of them; each once, under its first name.

    Args:
        model: to be converted.
        running: names of the weights of experts and other modules that run a recipe, which are left out.
        left: path of each module that could run one and does not, with the reason.
    """
    choosing, mixtures = routers(model), tuple(f"{path}." for path in experts_in(model) if path)
    own = {f"{path}.{name}" if path else name for path, module in model.named_modules() for name in _computing(module)}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            where = f"{path}.{name}" if path else name
            if where in running or where in own or torch.nn.parameter.is_lazy(parameter) or parameter.ndim < MATRIX:
                continue
            why = left.get(path) or choosing.get(where)
            why = why or _why_bare(module, parameter, of_experts=where.startswith(mixtures))
            adds, looks_up = name.endswith("bias"), isinstance(module, LOOK_UPS) and name == "weight"
            why = "stays as it is: a bias, which is added" if adds else why
            yield BareWeight(where, parameter, why, not adds and not looks_up)


def _computing(module: torch.nn.Module) -> Iterator[str]:
    """Names in a linear or embedding layer of its weight, its codes, and what weight_norm computes it from."""
    if isinstance(module, LAYERS):
        for name, _ in module.named_parameters():
            if name.removeprefix("parametrizations.").startswith("weight"):
                yield name


def packed_weights(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Weights in objects of C++ that are no tensors, as of ``torch.ao``'s quantized layers: path, why each stays."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.ScriptObject):
                where = f"{path}.{name}" if path else name
                yield where, f"stays as it is: packed by {type(module).__name__}, of a size that cannot be read"


def _why_bare(module: torch.nn.Module, parameter: torch.Tensor, *, of_experts: bool) -> str:
    if isinstance(module, torch.nn.EmbeddingBag):
        return "embedding: a look-up, not a product"
    if isinstance(module, torch.nn.modules.conv._ConvNd):  # noqa: SLF001 (the one base of all convolutions)
        kernel = f"stays as it is: the kernel of a convolution ({'x'.join(map(str, parameter.shape[2:]))})"
        return f"{kernel}, {PATCHES}" if is_product(module) else kernel
    kind = type(module).__name__
    if isinstance(module, torch.nn.MultiheadAttention):
        return ATTENTION if is_plain(module) else f"{ATTENTION}, with sizes, biases or zeros of its own"
    if isinstance(module, LAYERS):
        return f"stays as it is: a parameter of {kind} besides its weight"
    stack = f", {parameter.shape[0]} matrices in one" if parameter.ndim == 3 and parameter.shape[0] > 1 else ""
    experts = "experts of a class that octavo does not know, " if of_experts else ""
    return f"stays as it is: {experts}a parameter of {kind}{stack}, which is not nn.Linear"


def shares_of(
    model: torch.nn.Module,
    converted: Mapping[str, Recipe],
    skipped: Iterable[str],
    bare: Sequence[BareWeight],
    weights: Mapping[str, Recipe],
) -> Shares:
    """Count elements.

    Args:
        model: converted or to be converted.
        converted: paths of the layers that run a recipe, and which.
        skipped: paths of the other linear and embedding layers; octavo's own keep their recipes.
        bare: its other weights.
        weights: names of the weights of experts and other modules that run a recipe, and which.
    """
    others = {model.get_parameter(name): recipe for name, recipe in weights.items()}
    taken = {model.get_submodule(path): recipe for path, recipe in converted.items()}
    staying_layers = {path: model.get_submodule(path) for path in skipped}
    total = _sum(model.parameters())
    multiplying = {path: layer.weight for path, layer in staying_layers.items() if not isinstance(layer, LOOK_UPS)}
    multiplying |= {weight.path: weight.parameter for weight in bare if weight.multiplies}
    products = _sum(layer.weight for layer in taken) + _sum(others) + _sum(multiplying.values())
    kept = {path: layer for path, layer in staying_layers.items() if isinstance(layer, Linear) and is_own_linear(layer)}
    running = [*taken.items(), *((layer, layer.recipe) for layer in kept.values())]
    in_fp8 = [(layer.weight, recipe) for layer, recipe in running if _will_run_in_fp8(layer, recipe)]
    cast = _sum(weight for weight, _ in in_fp8)
    cast += _sum(weight for weight, recipe in others.items() if not recipe.is_high_precision)
    staying = {
        path: layer.weight
        for path, layer in staying_layers.items()
        if path not in kept or not _will_run_in_fp8(layer, kept[path].recipe)
    }
    staying |= {weight.path: weight.parameter for weight in bare}
    runs = [*in_fp8, *others.items()]
    trains = any(recipe.grad_input.b is not None or recipe.grad_weight.b is not None for _, recipe in runs)
    in_training = sum(weight.numel() * _products(weight, recipe) for weight, recipe in runs) if trains else 0
    of_training = sum(
        _elements(weight) * (3 if weight.requires_grad else 2)
        for weight in (*(layer.weight for layer in taken), *others, *multiplying.values())
    )
    return Shares(
        parameters=_fraction(cast, total),
        multiplications=_fraction(cast, products),
        training=_fraction(in_training, of_training),
        by_path={
            path: WeightShare(
                _fraction(_elements(weight), total),
                _fraction(_elements(weight), products) if path in multiplying else 0.0,
            )
            for path, weight in staying.items()
        },
    )


def _will_run_in_fp8(layer: torch.nn.Module, recipe: Recipe) -> TypeGuard[torch.nn.Linear]:
    """Return whether the recipe casts, or the weight is stored as codes already."""
    return not recipe.is_high_precision or (isinstance(layer, Linear) and layer.codes_layout is not None)


def _products(weight: torch.Tensor, recipe: Recipe) -> int:
    """GEMMs of forward and backward that the recipe runs in FP8; a weight without gradient has no grad_weight."""
    specs = [recipe.output, recipe.grad_input, *([recipe.grad_weight] if weight.requires_grad else [])]
    return sum(spec.b is not None for spec in specs)


def _elements(weight: object) -> int:
    """Of a parameter; a lazy one has none yet."""
    assert isinstance(weight, torch.Tensor)
    return 0 if torch.nn.parameter.is_lazy(weight) else weight.numel()


def _sum(weights: Iterable[object]) -> int:
    return sum(map(_elements, weights))


def _fraction(part: int, total: int) -> float:
    return part / total if total else 0.0


def _percent(fraction: float) -> str:
    return f"{PERCENT * fraction:.1f} %"


def _grouped(reasons: Mapping[str, str], shares: Mapping[str, WeightShare] | None = None) -> Iterator[tuple[str, str]]:
    """Paths that have one reason and differ in numbers alone as one, with their number; reasons with their shares."""
    shares = shares or {}
    groups: dict[tuple[str, str], list[str]] = {}
    for path, reason in reasons.items():
        groups.setdefault((INDEX.sub("#", path), reason), []).append(path)
    for (_, reason), paths in groups.items():
        yield (
            _pattern(paths) + (f" ({len(paths)})" if len(paths) > 1 else ""),
            reason
            + (f" ({_of_both(staying)})" if (staying := [shares[path] for path in paths if path in shares]) else ""),
        )


def _of_both(shares: list[WeightShare]) -> str:
    """The shares of several weights together."""
    parameters = _percent(sum(share.parameters for share in shares))
    multiplications = _percent(sum(share.multiplications for share in shares))
    return f"{parameters} of the parameters, {multiplications} of the multiplications"


def _pattern(paths: list[str]) -> str:
    """The paths in one, with the ranges of their numbers: "layers.[0-3,5].up"."""
    if len(paths) == 1:
        return shown(paths[0])
    words = INDEX.split(paths[0])
    numbers = zip(*([int(each) for each in INDEX.findall(path)] for path in paths), strict=True)
    ranges = [_ranges(sorted(set(column))) for column in numbers]
    return "".join(word + number for word, number in zip(words, [*ranges, ""], strict=True))


def _ranges(numbers: list[int]) -> str:
    """Runs of whole numbers, "[0-3,5]"; one number stands alone."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "[" + ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) + "]"
