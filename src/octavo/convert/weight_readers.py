"""Modules that multiply by a child layer's weight themselves instead of calling the layer.

A layer runs its recipe where it is called. Some owners compute ``F.linear(x, self.qkv.weight, bias)`` (timm's BEiT),
hand the weights to ``F.multi_head_attention_forward`` (WavLM) or multiply by ``self.dt_proj.weight`` (Mamba): the layer
never runs there. The source of the owner's ``forward``, and of its own methods that ``forward`` uses, shows it:

| in the source                                    | counts as               |
|--------------------------------------------------|-------------------------|
| ``self.a.weight``, ``self.a[key].weight``        | a read of a's weight    |
| ``self.a.weight.dtype`` and other facts of it    | nothing                 |
| ``self.a(x)``, ``self.a`` handed on              | a call of a             |

A name that is assigned one of these stands for it. Where a module's own flags and absent parameters decide an ``if``
(``self.q_bias is None``), the branch that it takes counts; a read in the other is still one that may come. What no
source shows (a function that is given the whole module, C
code) is found when the model runs: :func:`layers_not_run`.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeGuard

import torch

from octavo.nn import Linear

__all__ = ["WeightReader", "has_fast_path", "layers_not_run", "weight_readers"]

Chain = tuple[str, ...]  # attribute names after self; ITEM for an index
ITEM = "[]"
WEIGHT = "weight"
FACTS = {"dtype", "device", "shape", "size", "ndim", "dim", "numel", "is_meta", "is_cuda", "requires_grad", "grad"}
NOT_A_CALL = {WEIGHT, "bias", "in_features", "out_features", *FACTS}
NO_VALUES = ("isinstance", "hasattr")
UNKNOWN = object()


class WeightReader(NamedTuple):
    """A module that reads the weight of a layer below it.

    Attributes:
        path: of the module.
        module: itself.
        reads: whether it does as its flags stand; otherwise only where they are changed.
        calls: whether it calls the layer too, on another of its ways.
    """

    path: str
    module: torch.nn.Module
    reads: bool
    calls: bool

    @property
    def replaces(self) -> bool:
        """Whether the layer itself never runs."""
        return self.reads and not self.calls


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
        The reader by layer; of several, one that never calls the layer counts.

    Example:
        >>> mixer = torch.nn.MultiheadAttention(8, 2)
        >>> weight_readers(mixer)[mixer.out_proj].replaces
        True
    """
    sources, whole = _Sources(), dict[type, _Uses]()
    readers: dict[torch.nn.Module, WeightReader] = {}
    for path, owner in model.named_modules():
        if type(owner) not in whole:
            has_children = next(owner.children(), None) is not None
            whole[type(owner)] = _uses_in(type(owner), sources) if has_children else _Uses()
        if not whole[type(owner)].read:
            continue
        uses = _uses_in(type(owner), sources, owner)
        for chain in sorted(whole[type(owner)].read):
            reader = WeightReader(path, owner, chain in uses.read, uses.calls(chain))
            for layer in _at(owner, chain):
                if layer not in readers or not readers[layer].replaces:
                    readers[layer] = reader
    return readers


def has_fast_path(module: torch.nn.Module) -> TypeGuard[torch.nn.TransformerEncoderLayer]:
    """Whether a module is an encoder layer that torch evaluates on a fast path, which asks for an ``in_proj_bias``."""
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


def _at(owner: torch.nn.Module, chain: Chain) -> list[torch.nn.Module]:
    """The linear layers that a chain of attributes leads to; an index leads to all children."""
    modules = [owner]
    for name in chain:
        modules = [child for each in modules for key, child in each.named_children() if name in (key, ITEM)]
    return [each for each in modules if isinstance(each, torch.nn.Linear) and each is not owner]


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
            waiting += [chain[0] for chain in uses.mentioned if chain[0] not in seen]
            if not visitor.uses_super:
                break
    return uses


class _Visitor(ast.NodeVisitor):
    """Collect what one method does with its module's children."""

    def __init__(self, function: ast.FunctionDef, uses: _Uses, owner: torch.nn.Module | None) -> None:
        self.uses, self.owner, self.uses_super = uses, owner, False
        arguments = [*function.args.posonlyargs, *function.args.args]
        self.names: dict[str, Chain] = {arguments[0].arg: ()} if arguments else {}

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
        self.visit_block(node.body)
        self.visit_block(node.orelse)

    def _known(self, test: ast.expr) -> bool | None:
        """What a condition is for this module; None where its flags do not decide it."""
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
        chain = self._chain(node)
        if self.owner is None or not chain or len(chain) > 1 or chain == ("training",):
            return UNKNOWN
        owner = self.owner
        places = (vars(owner), owner._parameters, owner._buffers, owner._modules)  # noqa: SLF001
        return next((place[chain[0]] for place in places if chain[0] in place), UNKNOWN)

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
