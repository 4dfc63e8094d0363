"""Modules that multiply by a child layer's weight themselves instead of calling the layer.

A layer runs its recipe where it is called. Some owners compute ``F.linear(x, self.qkv.weight, bias)`` (timm's BEiT),
hand the weights to ``F.multi_head_attention_forward`` (WavLM) or multiply by ``self.dt_proj.weight`` (Mamba): the layer
never runs there. The source of the owner's ``forward``, and of its own methods that ``forward`` uses, shows it:

| in the source                                    | counts as               |
|--------------------------------------------------|-------------------------|
| ``self.a.weight``, ``self.a[key].weight``        | a read of a's weight    |
| ``self.a.weight.dtype`` and other facts of it    | nothing                 |
| ``self.a(x)``, ``self.a`` handed on              | a call of a             |

A name that is assigned one of these stands for it until it is bound anew, after branches for what any of them bound it
to, and the target of a loop or a comprehension for all that it goes through, also in ``enumerate``, ``zip`` and
``reversed``, ``.values()`` and ``.items()``. A layer that its owner holds under two names is called where either one
is. One that another module holds too may be called there; only where all of them read its weight and none calls it
does it never run. Where a module's own flags and absent parameters decide an ``if`` (``self.q_bias is None``), the
branch that it takes counts; a read in the other is still one that may come. What no
source shows (a function that is given the whole module, C code) is found when the model runs: :func:`layers_not_run`.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeGuard

import torch

from octavo.nn import Linear

__all__ = ["WeightReader", "has_fast_path", "layers_not_run", "weight_readers"]

Chain = tuple[str, ...]  # attribute names after self; ITEM for an index
Trail = tuple[torch.nn.Module, ...]  # from an owner to a layer
ITEM = "[]"
WEIGHT = "weight"
FACTS = {"dtype", "device", "shape", "size", "ndim", "dim", "numel", "is_meta", "is_cuda", "requires_grad", "grad"}
NOT_A_CALL = {WEIGHT, "bias", "in_features", "out_features", *FACTS}
NO_VALUES = ("isinstance", "hasattr", "len")
SAME_ITEMS = ("reversed", "list", "tuple", "iter")
ITEM_METHODS = ("values", "children")
PAIR_METHODS = ("items", "named_children")
UNKNOWN = object()


class WeightReader(NamedTuple):
    """A module that reads the weight of a layer below it.

    Attributes:
        path: of the module.
        module: itself.
        reads: whether it does as its flags stand; otherwise only where they are changed.
        calls: whether it calls the layer too, on another of its ways, or another module that holds the layer may.
    """

    path: str
    module: torch.nn.Module
    reads: bool
    calls: bool

    @property
    def replaces(self) -> bool:
        """Return whether the layer itself never runs."""
        return self.reads and not self.calls


@dataclass(slots=True)
class _Uses:
    """Uses of its children in a class's source.

    Attributes:
        read: layers whose weight it reads.
        mentioned: children that it calls or passes on.
        iterated: containers that it iterates over; each item counts by how it is used.
    """

    read: set[Chain] = field(default_factory=set)
    mentioned: set[Chain] = field(default_factory=set)
    iterated: set[Chain] = field(default_factory=set)

    def calls(self, layer: Chain) -> bool:
        """Return whether the layer, or a module that holds it, is called or handed on."""
        return any(
            layer[: len(each)] == each or (each[: len(layer)] == layer and each[len(layer)] not in NOT_A_CALL)
            for each in self.mentioned
        )


def weight_readers(model: torch.nn.Module) -> dict[torch.nn.Module, WeightReader]:
    """Find the linear layers whose weight another module reads.

    Returns:
        The reader by layer; of several, one that never calls the layer counts, unless a module that holds the layer
        too may call it. Torch's encoders are none: :func:`has_fast_path` tells what they read.

    Example:
        >>> mixer = torch.nn.MultiheadAttention(8, 2)
        >>> weight_readers(mixer)[mixer.out_proj].replaces
        True
    """
    found: dict[torch.nn.Module, list[tuple[WeightReader, Trail]]] = {}
    for reader, trail in _reads(model):
        found.setdefault(trail[-1], []).append((reader, trail))
    holders = _holders(model)
    return {layer: _first_that_replaces(layer, reads, holders) for layer, reads in found.items()}


def _reads(model: torch.nn.Module) -> Iterator[tuple[WeightReader, Trail]]:
    """All readers, each with the modules that lead from it to the layer."""
    sources, whole = _Sources(), dict[type, _Uses]()
    for path, owner in model.named_modules():
        if type(owner).forward in FAST_PATHS:
            continue
        if type(owner) not in whole:
            has_children = next(owner.children(), None) is not None
            whole[type(owner)] = _uses_in(type(owner), sources) if has_children else _Uses()
        if not whole[type(owner)].read:
            continue
        uses = _uses_in(type(owner), sources, owner)
        for chain in sorted(whole[type(owner)].read):
            reader = WeightReader(path, owner, chain in uses.read, uses.calls(chain))
            for trail in _trails(owner, chain):
                calls = reader.calls or any(_reaches(owner, each, trail[-1]) for each in uses.mentioned)
                yield reader._replace(calls=calls), trail


def _first_that_replaces(
    layer: torch.nn.Module,
    reads: list[tuple[WeightReader, Trail]],
    holders: Mapping[torch.nn.Module, list[torch.nn.Module]],
) -> WeightReader:
    """The reader that counts; none replaces a layer that a module above it holds by another way than theirs."""
    replacing = [(reader, trail) for reader, trail in reads if reader.replaces]
    if not replacing:
        return next((reader for reader, _ in reads if reader.reads), reads[0][0])
    first = replacing[0][0]
    owners = {reader.module for reader, _ in replacing}
    between = {module for _, trail in replacing for module in trail[1:-1]}
    waiting, seen = [layer], {layer}
    while waiting:
        for holder in holders[waiting.pop()]:
            if holder in owners or holder in seen:
                continue
            if holder not in between:
                return first._replace(calls=True)
            seen.add(holder)
            waiting.append(holder)
    return first


def _holders(model: torch.nn.Module) -> dict[torch.nn.Module, list[torch.nn.Module]]:
    """The modules that have a module among their children."""
    holders: dict[torch.nn.Module, list[torch.nn.Module]] = {module: [] for module in model.modules()}
    for module in model.modules():
        for child in module.children():
            holders[child].append(module)
    return holders


FAST_PATHS = (torch.nn.TransformerEncoder.forward, torch.nn.TransformerEncoderLayer.forward)  # see has_fast_path


def has_fast_path(module: torch.nn.Module) -> TypeGuard[torch.nn.TransformerEncoderLayer]:
    """Return whether a module is an encoder layer with torch's fast path, which needs an ``in_proj_bias``."""
    return isinstance(module, torch.nn.TransformerEncoderLayer) and module.self_attn.in_proj_bias is not None


def layers_not_run(model: torch.nn.Module) -> tuple[str, ...]:
    """Find the converted layers that no forward in training has called, outside of compiled graphs.

    Example:
        >>> import octavo
        >>> model = torch.nn.ModuleDict({"used": torch.nn.Linear(4, 4), "spare": torch.nn.Linear(4, 4)})
        >>> _ = octavo.convert(model)
        >>> _ = model["used"](torch.ones(2, 4))
        >>> layers_not_run(model)
        ('spare',)
    """
    return tuple(
        path for path, layer in model.named_modules() if isinstance(layer, Linear) and layer.last_recipe is None
    )


def _trails(owner: torch.nn.Module, chain: Chain) -> Iterator[Trail]:
    """The modules on the ways from an owner to the linear layers that a chain of attributes leads to."""
    ways: list[tuple[object, ...]] = [(owner,)]
    for name in chain:
        ways = [(*way, inner) for way in ways for inner in _inside(way[-1], name)]
    for way in ways:
        if isinstance(way[-1], torch.nn.Linear) and len(way) > 1:
            yield tuple(each for each in way if isinstance(each, torch.nn.Module))


def _reaches(owner: torch.nn.Module, mentioned: Chain, layer: torch.nn.Module) -> bool:
    """Return whether a mention calls the layer or hands it on, by whatever name the owner holds it."""
    places: list[object] = [owner]
    for name in mentioned:
        if name not in NOT_A_CALL and any(place is layer for place in places):
            return True  # a method or an attribute of the layer
        places = [inner for place in places for inner in _inside(place, name)]
    return any(place is layer for place in places)


def _inside(place: object, name: str) -> list[object]:
    """A child, or a plain list of them; an index leads to all."""
    if isinstance(place, torch.nn.Module):
        children = [child for key, child in place._modules.items() if name in (key, ITEM)]  # noqa: SLF001
        return [*children, vars(place)[name]] if isinstance(vars(place).get(name), list | tuple | dict) else [*children]
    if name != ITEM or not isinstance(place, list | tuple | dict):
        return []
    return list(place.values() if isinstance(place, dict) else place)


class _Sources:
    """The parsed methods of classes, each read once."""

    def __init__(self) -> None:
        self._parsed: dict[Callable[..., object], ast.FunctionDef | None] = {}

    def definitions(self, kind: type, name: str) -> Iterator[ast.FunctionDef]:
        """A method in a class and in its bases, those of torch's ``Module`` left out."""
        for base in kind.__mro__:
            if base is torch.nn.Module:
                return
            method = vars(base).get(name)
            function = method.fget if isinstance(method, property) else method
            if not inspect.isfunction(function):
                continue
            if function not in self._parsed:
                self._parsed[function] = _parsed(function)
            if (parsed := self._parsed[function]) is not None:
                yield parsed


def _parsed(function: Callable[..., object]) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):  # no source file, or one that has changed since
        return None
    return tree.body[0] if tree.body and isinstance(tree.body[0], ast.FunctionDef) else None


def _uses_in(kind: type, sources: _Sources, owner: torch.nn.Module | None = None) -> _Uses:
    """Follow ``forward`` through a class; with ``owner``, through the branches that this module takes."""
    uses, waiting, seen = _Uses(), ["forward"], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for function in sources.definitions(kind, name):
            visitor = _Visitor(function, uses, owner)
            visitor.visit_block(function.body)
            waiting += [chain[0] for chain in uses.mentioned | uses.iterated if chain and chain[0] not in seen]
            if not visitor.uses_super:
                break
    return uses


class _Visitor(ast.NodeVisitor):
    """Collect what one method does with its module's children."""

    def __init__(self, function: ast.FunctionDef, uses: _Uses, owner: torch.nn.Module | None) -> None:
        self.uses, self.owner, self.uses_super = uses, owner, False
        arguments = [*function.args.posonlyargs, *function.args.args]
        self.names: dict[str, list[Chain]] = {arguments[0].arg: [()]} if arguments else {}

    def visit_block(self, statements: list[ast.stmt]) -> bool:
        """Visit statements up to one after which nothing follows; returns whether there is such a one."""
        for statement in statements:
            taken = self._known(statement.test) if isinstance(statement, ast.If) else None
            if isinstance(statement, ast.If) and taken is not None:
                if self.visit_block(statement.body if taken else statement.orelse):
                    return True
                continue
            self.visit(statement)
            if isinstance(statement, ast.Return | ast.Raise):
                return True
        return False

    def visit_If(self, node: ast.If) -> None:
        """Both branches, or the one that is taken."""
        if self._known(node.test) is not None:
            self.visit_block([node])
            return
        self.visit(node.test)
        self._branch(node.body, node.orelse)

    def visit_While(self, node: ast.While) -> None:
        """As often as a name may stand for something else."""
        self.visit(node.test)
        self._repeat(node)

    def visit_Try(self, node: ast.Try) -> None:
        """An exception may leave the names as they were, or as the body bound them."""
        self._branch(node.body, [])
        self._branch(*(handler.body for handler in node.handlers), node.orelse)
        self.visit_block(node.finalbody)

    def visit_Match(self, node: ast.Match) -> None:
        """Any case, or none."""
        self.visit(node.subject)
        self._branch(*(case.body for case in node.cases), [])

    def _branch(self, *blocks: list[ast.stmt]) -> None:
        """One of several blocks: afterwards a name stands for all that those which go on bound it to."""
        before, after = self.names, dict[str, list[Chain]]()
        for block in blocks:
            self.names = dict(before)
            if not self.visit_block(block):
                for name, chains in self.names.items():
                    after[name] = list(dict.fromkeys((*after.get(name, ()), *chains)))
        self.names = after

    def _repeat(self, loop: ast.For | ast.While) -> None:
        for _ in range(2):  # the second pass begins with what the first one bound
            self._branch(loop.body, [])
        self.visit_block(loop.orelse)

    def _known(self, test: ast.expr) -> bool | None:
        """Value of a condition for this module; None where its flags do not decide it."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                known = self._known(operand)
                return None if known is None else not known
            case ast.BoolOp(op=op, values=values):
                decides = isinstance(op, ast.Or)  # one True decides an "or", one False an "and"
                known_values = [self._known(value) for value in values]
                if decides in known_values:
                    return decides
                return None if None in known_values else not decides
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as op], comparators=[ast.Constant(value=None)]):
                value = self._attribute(left)
                return None if value is UNKNOWN else (value is None) == isinstance(op, ast.Is)
        value = self._attribute(test)
        return bool(value) if value is None or isinstance(value, bool) else None

    def _attribute(self, node: ast.expr) -> object:
        """The module's own attribute, parameter, buffer or child that an expression names."""
        chains = self._chains(node)
        if self.owner is None or len(chains) != 1 or len(chains[0]) != 1 or chains[0] == ("training",):
            return UNKNOWN
        owner, chain = self.owner, chains[0]
        places = (vars(owner), owner._parameters, owner._buffers, owner._modules)  # noqa: SLF001
        return next((place[chain[0]] for place in places if chain[0] in place), UNKNOWN)

    def visit_Assign(self, node: ast.Assign) -> None:
        """``layer = self.a``: the name stands for the layer from here on."""
        self._assign(node.targets, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """The same with a type."""
        if node.value is not None:
            self._assign([node.target], node.value)

    def _assign(self, targets: list[ast.expr], value: ast.expr) -> None:
        bound: dict[str, list[Chain]] = {}
        for target in targets:
            self._bind(target, value, bound)
            self.visit(target)
        self.names |= bound

    def visit_For(self, node: ast.For) -> None:
        """``for layer in self.layers``: the name stands for all of them."""
        self._loop(node.target, node.iter)
        self._repeat(node)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        """The same, with names of their own."""
        outside = dict(self.names)
        for each in node.generators:
            self._loop(each.target, each.iter)
            for condition in each.ifs:
                self.visit(condition)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(part)
        self.names = outside

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp  # noqa: N815 (names that ast asks for)

    def _loop(self, target: ast.expr, iterable: ast.expr) -> None:
        bound: dict[str, list[Chain]] = {}
        self._bind_items(target, iterable, bound)
        self.visit(target)
        self.names |= bound

    def _bind(self, target: ast.expr, value: ast.expr, bound: dict[str, list[Chain]]) -> None:
        """Add what the target's names stand for to ``bound``; a value that is no child counts as it does elsewhere."""
        match target, value:
            case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
                for each, inner in zip(targets, values, strict=True):
                    self._bind(each, inner, bound)
            case ast.Name(id=name), _ if children := self._children(value):
                bound.setdefault(name, []).extend(children)
            case _:
                self.visit(value)

    def _bind_items(self, target: ast.expr, iterable: ast.expr, bound: dict[str, list[Chain]]) -> None:
        """The same for a target that goes through what is in a container."""
        match iterable, target:
            case ast.Call(func=ast.Name(id=name), args=[inner]), _ if name in SAME_ITEMS:
                self._bind_items(target, inner, bound)
            case ast.Call(func=ast.Attribute(value=inner, attr=name), args=[]), _ if name in ITEM_METHODS:
                self._bind_items(target, inner, bound)
            case ast.Call(func=ast.Attribute(value=inner, attr=name)), ast.Tuple(elts=[_, item]) if (
                name in PAIR_METHODS
            ):
                self._bind_items(item, inner, bound)
            case ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]), ast.Tuple(elts=[_, item]):
                self._bind_items(item, inner, bound)
            case ast.Call(func=ast.Name(id="zip"), args=args), ast.Tuple(elts=items) if len(args) == len(items):
                for item, inner in zip(items, args, strict=True):
                    self._bind_items(item, inner, bound)
            case ast.Tuple(elts=values) | ast.List(elts=values), _:
                for value in values:
                    self._bind(target, value, bound)
            case _, ast.Name(id=name) if (chains := self._chains(iterable)) and not any(WEIGHT in c for c in chains):
                bound.setdefault(name, []).extend((*chain, ITEM) for chain in chains)
                self.uses.iterated.update(chains)
            case _:
                self.visit(iterable)

    def visit_Call(self, node: ast.Call) -> None:
        """``super()`` leads to the base's method; ``len`` and questions about a type read no values."""
        if isinstance(node.func, ast.Name):
            self.uses_super = self.uses_super or node.func.id == "super"
            if node.func.id in NO_VALUES:
                return
        elif isinstance(node.func, ast.Attribute) and node.func.attr in (*ITEM_METHODS, *PAIR_METHODS):
            self.uses.mentioned.update(self._chains(node.func.value))  # the items are handed on
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """``is None`` and ``in self.a`` read no values."""
        if not all(isinstance(each, ast.Is | ast.IsNot | ast.In | ast.NotIn) for each in node.ops):
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """The longest chain of attributes that begins at ``self``."""
        self._use(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """The same with an index."""
        self._use(node)

    def visit_Name(self, node: ast.Name) -> None:
        """A name that stands for a child, where it is used; one that is bound anew stands for it no longer."""
        if isinstance(node.ctx, ast.Load):
            self._use(node)
        else:
            self.names.pop(node.id, None)

    def _use(self, node: ast.expr) -> None:
        chains = self._chains(node)
        if not chains:
            self.generic_visit(node)
        for chain in chains:
            if WEIGHT in chain[1:]:
                place = chain.index(WEIGHT, 1)
                if not FACTS & set(chain[place + 1 : place + 2]):
                    self.uses.read.add(chain[:place])
            elif chain or isinstance(node, ast.Subscript):  # a slice of the module itself
                self.uses.mentioned.add(chain or (ITEM,))

    def _children(self, value: ast.expr) -> list[Chain]:
        """Children that a name stands for once it is assigned a value."""
        chains = self._chains(value)
        return chains if all(chain and WEIGHT not in chain for chain in chains) else []

    def _chains(self, node: ast.expr) -> list[Chain]:
        """Attribute names from ``self`` on, of each child that an expression may be; none where it begins elsewhere."""
        match node:
            case ast.Name(id=name):
                return self.names.get(name, [])
            case ast.Attribute(value=value, attr=name):
                return [(*chain, name) for chain in self._chains(value)]
            case ast.Subscript(value=value, slice=ast.Slice()):
                return self._chains(value)
            case ast.Subscript(value=value):
                return [(*chain, ITEM) for chain in self._chains(value)]
        return []
