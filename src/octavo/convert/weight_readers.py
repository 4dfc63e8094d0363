"""Modules that multiply by a child layer's weight themselves instead of calling the layer.

A layer runs its recipe only where it is called. Some owners compute ``F.linear(x, self.qkv.weight, bias)`` (timm's
BEiT), pass the weights to ``F.multi_head_attention_forward`` (WavLM) or multiply by ``self.dt_proj.weight`` (Mamba);
the layer never runs there. The source of the owner's ``forward`` shows it (:mod:`octavo.convert.forward_source`).

A layer that its owner has under two names is called if either one is. A layer that another module contains too may be
called there; it never runs only if all of them read its weight and none calls it. A read in a branch that the owner's
flags exclude is still reported as possible. Uses that no source shows (a function that receives the whole module, C
code) are detected when the model runs: :func:`layers_not_run`.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeGuard

import torch

from octavo.convert.forward_source import ALL_MODULES, ITEM, NOT_A_CALL, Chain, ChildUses, uses_in
from octavo.convert.other_modules import weight_name
from octavo.nn.scaled_layer import ScaledLayer

__all__ = ["WeightReader", "has_fast_path", "layers_not_run", "weight_readers"]

Trail = tuple[torch.nn.Module, ...]  # modules from an owner to a layer


class WeightReader(NamedTuple):
    """A module that reads the weight of a layer below it.

    Attributes:
        path: path of the module.
        module: the module.
        reads: True if it reads the weight with its current flags; otherwise only after they are changed.
        calls: True if it also calls the layer elsewhere, or another module that contains the layer may.
    """

    path: str
    module: torch.nn.Module
    reads: bool
    calls: bool

    @property
    def replaces(self) -> bool:
        """Return whether the layer itself never runs."""
        return self.reads and not self.calls


def weight_readers(model: torch.nn.Module) -> dict[torch.nn.Module, WeightReader]:
    """Find the linear layers whose weight another module reads.

    Returns:
        The reader by layer; of several, one that never calls the layer, unless another module that contains the layer
        may call it. Torch's encoders are not included: see :func:`has_fast_path`.

    Example:
        >>> mixer = torch.nn.MultiheadAttention(8, 2)
        >>> weight_readers(mixer)[mixer.out_proj].replaces
        True
    """
    reads_by_layer: dict[torch.nn.Module, list[tuple[WeightReader, Trail]]] = {}
    for reader, trail in _reads(model):
        reads_by_layer.setdefault(trail[-1], []).append((reader, trail))
    parents = _parents(model)
    return {layer: _decisive_reader(layer, reads, parents) for layer, reads in reads_by_layer.items()}


def _reads(model: torch.nn.Module) -> Iterator[tuple[WeightReader, Trail]]:
    """Yield every reader of every layer, with the modules from the reader to the layer."""
    uses_by_class = dict[type, ChildUses]()
    for path, owner in model.named_modules():
        if type(owner).forward in FAST_PATHS:
            continue
        if type(owner) not in uses_by_class:
            has_children = next(owner.children(), None) is not None
            uses_by_class[type(owner)] = uses_in(type(owner)) if has_children else ChildUses()
        if not uses_by_class[type(owner)].read:
            continue
        uses = uses_in(type(owner), owner)
        for chain in sorted(uses_by_class[type(owner)].read):
            reader = WeightReader(path, owner, chain in uses.read, uses.calls(chain))
            for trail in _trails(owner, chain):
                calls = reader.calls or any(_reaches(owner, each, trail[-1]) for each in uses.mentioned)
                yield reader._replace(calls=calls), trail


def _decisive_reader(
    layer: torch.nn.Module,
    reads: list[tuple[WeightReader, Trail]],
    parents: Mapping[torch.nn.Module, list[torch.nn.Module]],
) -> WeightReader:
    """First reader that replaces the layer; it counts as calling it if the layer has a parent outside their trails."""
    replacing = [(reader, trail) for reader, trail in reads if reader.replaces]
    if not replacing:
        return next((reader for reader, _ in reads if reader.reads), reads[0][0])
    first = replacing[0][0]
    owners = {reader.module for reader, _ in replacing}
    on_trails = {module for _, trail in replacing for module in trail[1:-1]}
    pending, visited = [layer], {layer}
    while pending:
        for parent in parents[pending.pop()]:
            if parent in owners or parent in visited:
                continue
            if parent not in on_trails:
                return first._replace(calls=True)
            visited.add(parent)
            pending.append(parent)
    return first


def _parents(model: torch.nn.Module) -> dict[torch.nn.Module, list[torch.nn.Module]]:
    """Modules that have a module among their children."""
    parents: dict[torch.nn.Module, list[torch.nn.Module]] = {module: [] for module in model.modules()}
    for module in model.modules():
        for child in module.children():
            parents[child].append(module)
    return parents


FAST_PATHS = (torch.nn.TransformerEncoder.forward, torch.nn.TransformerEncoderLayer.forward)  # see has_fast_path


def has_fast_path(module: torch.nn.Module) -> TypeGuard[torch.nn.TransformerEncoderLayer]:
    """Return whether a module is an encoder layer with torch's fast path, which needs an ``in_proj_bias``."""
    return isinstance(module, torch.nn.TransformerEncoderLayer) and module.self_attn.in_proj_bias is not None


def layers_not_run(model: torch.nn.Module) -> tuple[str, ...]:
    """Find the converted layers that no forward pass in training has called, outside of compiled graphs.

    Layers of experts and of other modules with a weight of their own have the weight's name.

    Example:
        >>> import octavo
        >>> model = torch.nn.ModuleDict({"used": torch.nn.Linear(4, 4), "spare": torch.nn.Linear(4, 4)})
        >>> _ = octavo.convert(model)
        >>> _ = model["used"](torch.ones(2, 4))
        >>> layers_not_run(model)
        ('spare',)
    """
    layers = ((path, layer) for path, layer in model.named_modules() if isinstance(layer, ScaledLayer))
    return tuple(weight_name(path) for path, layer in layers if layer.last_recipe is None)


def _trails(owner: torch.nn.Module, chain: Chain) -> Iterator[Trail]:
    """Yield the modules from an owner to each linear layer that a chain of attributes leads to."""
    ways: list[tuple[object, ...]] = [(owner,)]
    for name in chain:
        ways = [(*way, inner) for way in ways for inner in _inside(way[-1], name)]
    for way in ways:
        if isinstance(way[-1], torch.nn.Linear) and len(way) > 1:
            yield tuple(each for each in way if isinstance(each, torch.nn.Module))


def _reaches(owner: torch.nn.Module, mentioned: Chain, layer: torch.nn.Module) -> bool:
    """Return whether a mention calls the layer or passes it on, under any of its names in the owner."""
    places: list[object] = [owner]
    for name in mentioned:
        if name not in NOT_A_CALL and any(place is layer for place in places):
            return True  # a method or an attribute of the layer
        places = [inner for place in places for inner in _inside(place, name)]
    return any(place is layer for place in places)


def _inside(place: object, name: str) -> list[object]:
    """Children of a place by name, or a plain list of them; an index leads to all items."""
    if isinstance(place, torch.nn.Module):
        if name == ALL_MODULES:
            return [list(place.modules())[1:]]
        children = [child for key, child in place._modules.items() if name in (key, ITEM)]  # noqa: SLF001
        return [*children, vars(place)[name]] if isinstance(vars(place).get(name), list | tuple | dict) else [*children]
    if name != ITEM or not isinstance(place, list | tuple | dict):
        return []
    return list(place.values() if isinstance(place, dict) else place)
