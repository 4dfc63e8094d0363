"""Modules that multiply by a child layer's weight themselves instead of calling the layer.

A layer runs its recipe where it is called. Some owners compute ``F.linear(x, self.qkv.weight, bias)`` (timm's BEiT),
hand the weights to ``F.multi_head_attention_forward`` (WavLM) or multiply by ``self.dt_proj.weight`` (Mamba): the layer
never runs there. The source of the owner's ``forward``, and of its own methods that ``forward`` uses, shows it:

| in the source                                    | counts as               |
|--------------------------------------------------|-------------------------|
| ``self.a.weight``, ``self.a[key].weight``        | a read of a's weight    |
| ``self.a.weight.dtype`` and other facts of it    | nothing                 |
| ``self.a(x)``, ``self.a`` handed on              | a call of a             |

A name that is assigned one of these stands for it. What no source shows (a function that is given the whole module, C
code) is found when the model runs: :func:`layers_not_run`.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from octavo.nn import Linear

__all__ = ["WeightReader", "layers_not_run", "weight_readers"]

Chain = tuple[str, ...]  # attribute names after self; ITEM for an index
ITEM = "[]"
WEIGHT = "weight"
FACTS = {"dtype", "device", "shape", "size", "ndim", "dim", "numel", "is_meta", "is_cuda", "requires_grad", "grad"}
NOT_A_CALL = {WEIGHT, "bias", "in_features", "out_features", *FACTS}
NO_VALUES = ("isinstance", "hasattr")


class WeightReader(NamedTuple):
    """A module that reads the weight of a layer below it.

    Attributes:
        path: of the module.
        module: itself.
        calls: whether it calls the layer too, on another of its ways.
    """

    path: str
    module: torch.nn.Module
    calls: bool


@dataclass(slots=True)
class _Uses:
    """What the source of a class does with its children."""

    read: set[Chain] = field(default_factory=set)
    mentioned: set[Chain] = field(default_factory=set)

    def calls(self, layer: Chain) -> bool:
        """Whether the layer, or a module that holds it, is called or handed on."""
        return any(
            layer[: len(each)] == each or (each[: len(layer)] == layer and each[len(layer)] not in NOT_A_CALL)
            for each in self.mentioned
        )


def weight_readers(model: torch.nn.Module) -> dict[torch.nn.Module, WeightReader]:
    """Find the linear layers whose weight another module reads.

    Returns:
        The reader by layer; of several, one that never calls the layer comes last and counts.

    Example:
        >>> mixer = torch.nn.MultiheadAttention(8, 2)
        >>> weight_readers(mixer)[mixer.out_proj].calls
        False
    """
    uses: dict[type, _Uses] = {}
    readers: dict[torch.nn.Module, WeightReader] = {}
    for path, owner in model.named_modules():
        if type(owner) not in uses:
            uses[type(owner)] = _uses_in(type(owner)) if next(owner.children(), None) is not None else _Uses()
        for chain in sorted(uses[type(owner)].read):
            for layer in _at(owner, chain):
                reader = WeightReader(path, owner, uses[type(owner)].calls(chain))
                if layer not in readers or readers[layer].calls:
                    readers[layer] = reader
    return readers


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


def _at(owner: torch.nn.Module, chain: Chain) -> list[torch.nn.Module]:
    """The linear layers that a chain of attributes leads to; an index leads to all children."""
    modules = [owner]
    for name in chain:
        modules = [child for each in modules for key, child in each.named_children() if name in (key, ITEM)]
    return [each for each in modules if isinstance(each, torch.nn.Linear) and each is not owner]


def _uses_in(kind: type) -> _Uses:
    """Follow ``forward`` through the methods of a class."""
    uses, waiting, seen = _Uses(), ["forward"], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for function in _definitions(kind, name):
            visitor = _Visitor(function, uses)
            visitor.visit_body()
            waiting += [chain[0] for chain in uses.mentioned if chain[0] not in seen]
            if not visitor.uses_super:
                break
    return uses


def _definitions(kind: type, name: str) -> Iterator[ast.FunctionDef]:
    """A method's source in a class and in its bases, those of torch's ``Module`` left out."""
    for base in kind.__mro__:
        if base is torch.nn.Module:
            return
        method = vars(base).get(name)
        function = method.fget if isinstance(method, property) else method
        if inspect.isfunction(function) and (parsed := _parsed(function)) is not None:
            yield parsed


def _parsed(function: Callable[..., object]) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):  # no source file, or one that has changed since
        return None
    return tree.body[0] if tree.body and isinstance(tree.body[0], ast.FunctionDef) else None


class _Visitor(ast.NodeVisitor):
    """Collect what one method does with its module's children."""

    def __init__(self, function: ast.FunctionDef, uses: _Uses) -> None:
        self.function, self.uses, self.uses_super = function, uses, False
        arguments = [*function.args.posonlyargs, *function.args.args]
        self.names: dict[str, Chain] = {arguments[0].arg: ()} if arguments else {}

    def visit_body(self) -> None:
        """Visit every statement."""
        for statement in self.function.body:
            self.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:
        """``layer = self.a``: the name stands for the layer from here on."""
        chain, target = self._chain(node.value), node.targets[0]
        if chain and WEIGHT not in chain and len(node.targets) == 1 and isinstance(target, ast.Name):
            self.names[target.id] = chain
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """``super()`` leads to the base's method; a question about a type reads no values."""
        if isinstance(node.func, ast.Name):
            self.uses_super = self.uses_super or node.func.id == "super"
            if node.func.id in NO_VALUES:
                return
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
        """A name that stands for a child."""
        self._use(node)

    def _use(self, node: ast.expr) -> None:
        chain = self._chain(node)
        if chain is None:
            self.generic_visit(node)
        elif WEIGHT in chain[1:]:
            place = chain.index(WEIGHT, 1)
            if not FACTS & set(chain[place + 1 : place + 2]):
                self.uses.read.add(chain[:place])
        elif chain:
            self.uses.mentioned.add(chain)

    def _chain(self, node: ast.expr) -> Chain | None:
        """Attribute names from ``self`` on; None where the expression begins elsewhere."""
        match node:
            case ast.Name(id=name):
                return self.names.get(name)
            case ast.Attribute(value=value, attr=name):
                chain = self._chain(value)
                return None if chain is None else (*chain, name)
            case ast.Subscript(value=value):
                chain = self._chain(value)
                return None if chain is None else (*chain, ITEM)
        return None
