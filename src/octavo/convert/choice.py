"""Selection of the layers that ``convert`` converts, with a reason for each layer that it leaves."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeGuard

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from octavo.convert.attention import attention_modules, reason_to_stay, recipe_of
from octavo.convert.experts import linear_shapes, other_modules, unable
from octavo.convert.other_modules import ConvertedModule
from octavo.convert.report import shown
from octavo.convert.routers import routers
from octavo.convert.weight_readers import WeightReader, weight_readers
from octavo.errors import ConfigError
from octavo.nn import Linear
from octavo.nn.fp8_weight import is_own_linear
from octavo.numerics.cast_spec import check_integer
from octavo.recipes import Recipe

__all__ = [
    "HEAD_NAMES",
    "all_paths",
    "candidates_of",
    "check_patterns",
    "choose_attention",
    "choose_layers",
    "choose_others",
    "heads_of",
    "matches",
    "multiplying_modules",
]

_TWINS = {"encoder": "decoder", "decoder": "encoder"}
HEAD_NAMES = ("lm_head", "embed_out", "output_projection", "classifier", "score")


def choose_layers(
    model: torch.nn.Module,
    *,
    skip: Sequence[str] = (),
    layer_filter: Callable[[str, torch.nn.Linear], bool] | None = None,
    convert_head: bool = False,
    min_weight_elements: int = 1,
    keep_first_blocks: int = 0,
    keep_last_blocks: int = 0,
    linear_classes: Sequence[type[torch.nn.Linear]] = (),
    convolutions: bool = False,
    attention: bool = False,
) -> tuple[dict[str, torch.nn.Linear], dict[str, str]]:
    """Select the layers that :func:`convert` would convert with the same arguments; the model is not changed.

    With ``attention``, ``skip`` may also name modules of attention; see :func:`choose_attention`.

    Returns:
        The layers by path; and the path of every other linear or embedding layer, with the reason why it stays.

    Raises:
        ConfigError: a ``skip`` that is a bare string, a pattern that matches nothing, more blocks to keep than there
            are, or a class in ``linear_classes`` whose layer is no plain linear one.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 9))
        >>> chosen, left = choose_layers(model)
        >>> list(chosen), left["2"]
        (['1'], 'head: has the shape of an embedding')
    """
    if isinstance(skip, str):
        raise ConfigError(f"skip takes a list of patterns; write skip=[{skip!r}]")
    candidates = dict(candidates_of(model))
    _check_classes(candidates, linear_classes)
    paths, readers = all_paths(model), weight_readers(model)
    every = multiplying_modules(model, convolutions=convolutions)
    check_patterns(skip, every | dict(attention_modules(model) if attention else ()), paths)
    choosing = routers(model)
    reasons = _heads(candidates, choosing, linear_classes) if not convert_head else {}
    reasons |= _outer_blocks(model, every, keep_first_blocks, keep_last_blocks)
    for path, module in candidates.items():
        if _is_convertible(module, linear_classes) and (reason := _unable(module, readers)) is not None:
            reasons[path] = reason
    selected, skipped = {}, {}
    for path, module in candidates.items():  # all decided before the first change: a filter may raise
        reason = choosing.get(f"{path}.weight") or _reason_of_class(module, linear_classes, readers)
        reason = reason or _reason_to_skip(paths[module], module, skip, layer_filter, min_weight_elements)
        reason = reason or reasons.get(path)
        if reason is None:
            assert isinstance(module, torch.nn.Linear)
            selected[path] = module
        else:
            skipped[path] = f"{reason}; keeps its recipe {module.recipe.name}" if is_own_linear(module) else reason
    return selected, skipped


def choose_others(
    model: torch.nn.Module,
    *,
    skip: Sequence[str] = (),
    layer_filter: Callable[[str, torch.nn.Linear], bool] | None = None,
    min_weight_elements: int = 1,
    keep_first_blocks: int = 0,
    keep_last_blocks: int = 0,
    convolutions: bool = False,
) -> tuple[dict[str, torch.nn.Module], dict[str, str]]:
    """Select the experts and other modules, no linear layers, that :func:`convert` would convert.

    Returns:
        The modules by path, and the path of each that is left with the reason.
    """
    others, paths = other_modules(model, convolutions=convolutions), all_paths(model)
    every = multiplying_modules(model, convolutions=convolutions)
    reasons = _outer_blocks(model, every, keep_first_blocks, keep_last_blocks) if others else {}
    selected, left = {}, {}
    for path, module in others.items():
        reason = _reason_of_pattern(paths[module], skip) or unable(module)
        reason = reason or _reason_of_weights(path, module, layer_filter, min_weight_elements) or reasons.get(path)
        if reason is None:
            selected[path] = module
        else:
            recipes = {layer.recipe.name for _, layer in module.layers()} if isinstance(module, ConvertedModule) else ()
            left[path] = "; ".join([reason, *(f"keeps its recipe {name}" for name in recipes)])
    return selected, left


def choose_attention(
    model: torch.nn.Module,
    recipe: Recipe,
    *,
    skip: Sequence[str] = (),
    keep_first_blocks: int = 0,
    keep_last_blocks: int = 0,
    convolutions: bool = False,
) -> tuple[dict[str, torch.nn.Module], dict[str, str]]:
    """Select the modules whose attention :func:`convert` would let run ``recipe``.

    Returns:
        The modules by path, and the path of each that is left with the reason.
    """
    modules, paths = dict(attention_modules(model)), all_paths(model)
    every = multiplying_modules(model, convolutions=convolutions)
    kept = _outer_blocks(model, every, keep_first_blocks, keep_last_blocks, inside=modules) if modules else {}
    selected, left = {}, {}
    for path, module in modules.items():
        reason = _reason_of_pattern(paths[module], skip) or kept.get(path)
        reason = reason or (None if recipe.is_high_precision else reason_to_stay(module))
        if reason is None:
            selected[path] = module
        else:
            own = recipe_of(module)
            left[path] = reason if own is None else f"{reason}; keeps its recipe {own.name}"
    return selected, left


def _reason_of_pattern(paths: list[str], skip: Sequence[str]) -> str | None:
    return next((f"skip pattern {each!r}" for each in skip if matches(each, paths)), None)


def _reason_of_weights(
    path: str,
    module: torch.nn.Module,
    layer_filter: Callable[[str, torch.nn.Linear], bool] | None,
    min_weight_elements: int,
) -> str | None:
    """Reason why a module's weights stay: the filter, asked about one expert's layer of each, or their size."""
    for name, (rows, columns) in linear_shapes(module).items():
        layer = torch.nn.Linear(columns, rows, device="meta")
        if layer_filter is not None and not layer_filter(f"{path}.{name}" if path else name, layer):
            return "filter"
        if rows * columns < min_weight_elements:
            return f"shape: {rows * columns} weights, fewer than {min_weight_elements}"
    return None


def _unable(layer: torch.nn.Linear, readers: Mapping[torch.nn.Module, WeightReader]) -> str | None:
    """Reason why a layer cannot run a recipe: its forward is not called, or its weight is codes of another library."""
    if type(layer) is torch.nn.Linear and "forward" in vars(layer):
        return "its forward was replaced by another library's (accelerate's hooks); convert the model before that"
    if layer in readers and readers[layer].replaces:
        return f"{type(readers[layer].module).__name__} reads its weight and never calls the layer"
    if isinstance(layer, Linear) and layer.codes_layout is not None:
        return None
    return _unreadable(layer.weight)


def _is_convertible(
    module: torch.nn.Module, linear_classes: Sequence[type[torch.nn.Linear]] = ()
) -> TypeGuard[torch.nn.Linear]:
    return type(module) in (torch.nn.Linear, *linear_classes) or is_own_linear(module)


def _check_classes(candidates: Mapping[str, torch.nn.Module], linear_classes: Sequence[type[torch.nn.Linear]]) -> None:
    """Refuse a class that is no subclass of ``nn.Linear``, has no layer here, or computes something else."""
    for kind in linear_classes:
        layers = {path: module for path, module in candidates.items() if type(module) is kind}
        if kind is torch.nn.Linear or not layers:
            raise ConfigError(f"linear_classes names {kind!r}, of which this model has no layer but nn.Linear's own")
        for path, layer in layers.items():
            assert isinstance(layer, torch.nn.Linear)
            refusal = (
                f"linear_classes names {kind.__name__}, but {shown(path)} is no plain linear layer: besides "
                "x @ weight.T + bias it computes or stores something else; leave the class out"
            )
            try:
                with torch.no_grad(), torch.random.fork_rng([layer.weight.device] if layer.weight.is_cuda else []):
                    is_plain = _computes_as_linear(layer)
            except Exception as error:  # a forward of its own may raise anything
                raise ConfigError(f"{refusal} (its forward raised {type(error).__name__}: {error})") from error
            if not is_plain:
                raise ConfigError(refusal)


def _has_weight_and_bias_alone(layer: torch.nn.Linear) -> bool:
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    plain = {name for name, _ in tensors} <= {"weight", "bias"} and not list(layer.children())
    return plain and not any(torch.nn.parameter.is_lazy(tensor) for _, tensor in tensors)


def _computes_as_linear(layer: torch.nn.Linear) -> bool:
    """Return whether a layer has a weight and a bias alone, and computes of two rows what nn.Linear computes.

    It is asked about a copy with other values, in training and in evaluation: a correction of zeros hides, and so does
    what only training does.
    """
    weight = layer.weight
    if not _has_weight_and_bias_alone(layer):
        return False
    if weight.is_meta or type(weight) is not torch.nn.Parameter:
        return True  # no values of its own to multiply
    x = torch.linspace(-1, 1, 2 * layer.in_features, device=weight.device).reshape(2, -1).to(weight.dtype)
    probe = copy.copy(layer)
    probe._parameters = {  # noqa: SLF001 (a copy's, so that the layer's stay)
        name: None if each is None else torch.nn.Parameter(torch.empty_like(each).uniform_(0.5, 1.5))
        for name, each in layer._parameters.items()  # noqa: SLF001
    }
    expected = torch.nn.functional.linear(x, probe.weight, probe.bias)
    for training in (True, False):
        probe.training = training
        found: object = type(layer).forward(probe, x)
        if not isinstance(found, torch.Tensor) or found.shape != expected.shape or found.dtype is not expected.dtype:
            return False
        if not torch.allclose(found, expected, rtol=torch.finfo(x.dtype).eps ** 0.5, atol=1e-3):
            return False
    return True


def _unreadable(weight: torch.Tensor) -> str | None:
    """Reason why a weight has no values in high precision to cast; a sharded one has them on its ranks."""
    is_wrapper: Callable[[object], bool] = is_traceable_wrapper_subclass  # no promise about the type
    if is_wrapper(weight):
        from torch.distributed.tensor import DTensor  # slow to import, and here a sharded model has

        if isinstance(weight, DTensor):
            return _unreadable(weight.to_local())
        return f"its weight is a {type(weight).__name__}, which another library has quantized or packed"
    if not weight.is_floating_point() or weight.dtype.itemsize == 1:
        return f"its weight is {weight.dtype}, codes of another library and no numbers in high precision"
    return None


def heads_of(model: torch.nn.Module) -> tuple[str, ...]:
    """Paths of what :func:`convert` takes for language-model heads.

    Example:
        >>> heads_of(torch.nn.ModuleDict({"up": torch.nn.Linear(4, 8), "lm_head": torch.nn.Linear(8, 16)}))
        ('lm_head',)
    """
    return tuple(_heads(dict(candidates_of(model)), routers(model)))


def _reason_of_class(
    module: torch.nn.Module,
    linear_classes: Sequence[type[torch.nn.Linear]],
    readers: Mapping[torch.nn.Module, WeightReader],
) -> str | None:
    if not isinstance(module, torch.nn.Linear):
        return "embedding: a look-up, not a product"
    if _is_convertible(module, linear_classes):
        return None
    reason = f"subclass {type(module).__name__} of nn.Linear may compute something else"
    runs = module not in readers or not readers[module].replaces
    may_be_plain = runs and _has_weight_and_bias_alone(module) and _unreadable(module.weight) is None
    return f"{reason}; if it does not, name it in linear_classes" if may_be_plain else reason


def _reason_to_skip(
    paths: list[str],
    module: torch.nn.Module,
    skip: Sequence[str],
    layer_filter: Callable[[str, torch.nn.Linear], bool] | None,
    min_weight_elements: int,
) -> str | None:
    assert isinstance(module, torch.nn.Linear)
    if (reason := _reason_of_pattern(paths, skip)) is not None:
        return reason
    if layer_filter is not None and not layer_filter(paths[0], module):
        return "filter"
    if module.weight.numel() < min_weight_elements:
        return f"shape: {module.weight.numel()} weights, fewer than {min_weight_elements}"
    return None


def _heads(
    candidates: dict[str, torch.nn.Module],
    choosing: Mapping[str, str],
    linear_classes: Sequence[type[torch.nn.Linear]] = (),
) -> dict[str, str]:
    """Paths of language-model heads and what gives them away; routers, whose weights are in ``choosing``, are none.

    A shape is the weakest sign: a position table may be as large as a projection. It counts where nothing better is
    found, and then for the last layer that has it.
    """
    linears = {
        path: module
        for path, module in candidates.items()
        if _is_convertible(module, linear_classes) and f"{path}.weight" not in choosing
    }
    tables = [module.weight for module in candidates.values() if isinstance(module, torch.nn.Embedding)]
    heads = {path: "head: by its name" for path in linears if _has_head_name(path)}
    for path, linear in linears.items():
        if any(linear.weight is table for table in tables):
            heads.setdefault(path, "head: shares its weight with an embedding")
    alike = [path for path, linear in linears.items() if any(linear.weight.shape == table.shape for table in tables)]
    return heads if heads or not alike else {alike[-1]: "head: has the shape of an embedding"}


def _has_head_name(path: str) -> bool:
    """Return whether a layer is called as a head is, or is one of a list in the plural, such as ``lm_heads.0``."""
    *_, owner, name = ["", *path.split(".")]
    return name in HEAD_NAMES or (name.isdecimal() and owner.removesuffix("s") in HEAD_NAMES and owner.endswith("s"))


def candidates_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Linear and embedding layers, by path."""
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            yield path, module


def multiplying_modules(model: torch.nn.Module, *, convolutions: bool = False) -> dict[str, torch.nn.Module]:
    """Linear and embedding layers, and the other modules that octavo can convert, by path."""
    return dict(candidates_of(model)) | other_modules(model, convolutions=convolutions)


def check_patterns(
    patterns: Iterable[str], candidates: dict[str, torch.nn.Module], paths: dict[torch.nn.Module, list[str]]
) -> None:
    """Refuse a pattern that matches none of the candidates."""
    for pattern in patterns:
        if not any(matches(pattern, paths[module]) for module in candidates.values()):
            for path, module in candidates.items():
                weights = [f"{known}.{name}" for known in paths[module] for name, _ in module.named_parameters()]
                if matches(pattern, weights):
                    module_pattern = pattern.rpartition(".")[0]
                    shorter = module_pattern if matches(module_pattern, paths[module]) else path
                    raise ConfigError(
                        f"pattern {pattern!r} matches a weight, and patterns match whole modules; write {shorter!r}"
                    )
            linears = [path for path, module in candidates.items() if isinstance(module, torch.nn.Linear)]
            raise ConfigError(
                f"pattern {pattern!r} matches no layer; the first linear layers are {', '.join(linears[:5])}"
            )


def all_paths(model: torch.nn.Module) -> dict[torch.nn.Module, list[str]]:
    """Every path of every module; one that stands in several places has several, the first of them its own."""
    paths: dict[torch.nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    return paths


def matches(pattern: str, paths: list[str]) -> bool:
    """Return whether a shell pattern matches one of a module's paths."""
    return any(fnmatchcase(path, pattern) for path in paths)


def _outer_blocks(
    model: torch.nn.Module,
    candidates: dict[str, torch.nn.Module],
    first: int,
    last: int,
    *,
    inside: dict[str, torch.nn.Module] | None = None,
) -> dict[str, str]:
    """Layers, or the modules ``inside``, of the model's first and last blocks: path to reason."""
    check_integer("keep_first_blocks", first, least=0)
    check_integer("keep_last_blocks", last, least=0)
    reasons: dict[str, str] = {}
    for stack in _stacks(model, candidates) if first or last else ():
        count = len(list(model.get_submodule(stack).children()))
        if first + last > count:
            raise ConfigError(
                f"keep_first_blocks={first} and keep_last_blocks={last} must be no more together than the {count} "
                f"blocks of {shown(stack)}"
            )
        reasons |= _ends(model, candidates if inside is None else inside, stack, first, last)
    return reasons


def _stacks(model: torch.nn.Module, candidates: dict[str, torch.nn.Module]) -> list[str]:
    """Paths of the list of blocks that has most of the layers and of its twin in an encoder-decoder."""
    lists = {
        path: len(module)
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
    }
    if not lists:
        raise ConfigError(
            "this model has no ModuleList or Sequential whose first or last blocks could be kept; name layers by skip"
        )
    largest = max(lists, key=lambda path: (len(_inside(path, candidates)), lists[path]))
    swapped = [_TWINS.get(name, name) for name in largest.split(".")]
    return [path for path in lists if path in (largest, ".".join(swapped))]


def _inside(path: str, candidates: dict[str, torch.nn.Module]) -> list[str]:
    return [name for name in candidates if name.startswith(f"{path}." if path else "")]


def _ends(
    model: torch.nn.Module, candidates: dict[str, torch.nn.Module], stack: str, first: int, last: int
) -> dict[str, str]:
    """Layers in the first and last blocks of one list: path to reason."""
    children = [name for name, _ in model.get_submodule(stack).named_children()]
    reasons = {}
    for name in _inside(stack, candidates):
        block = children.index(name[len(stack) :].lstrip(".").split(".")[0])
        if block < first or block >= len(children) - last:
            reasons[name] = f"block {block} of {len(children)} is kept"
    return reasons
