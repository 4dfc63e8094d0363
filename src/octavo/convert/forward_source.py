"""Uses of a module's children in the source of its ``forward``, and of the methods that ``forward`` calls.

| in the source                                        | counts as               |
|------------------------------------------------------|-------------------------|
| ``self.a.weight``, ``self.a[key].weight``            | a read of a's weight    |
| ``self.get_parameter("a.weight")``                   | a read of a's weight    |
| ``self.a.parameters()``                              | a read of a's weight    |
| ``self.a.weight.dtype`` and similar metadata         | no use                  |
| ``self.a(x)``, ``self.a`` passed on                  | a call of a             |
| ``self.method(self.a)``                              | what the method does    |

``getattr(self, "a")``, ``self.get_submodule("a")`` and ``self._modules["a"]`` count as ``self.a``.

A name that is assigned one of these refers to it until it is bound again; after branches it refers to all that any of
them bound to it. The target of a loop or comprehension refers to all items, also in ``enumerate``, ``zip`` and
``reversed``, ``.values()``, ``.items()`` and ``.modules()``. If a module's flags and absent parameters decide an ``if``
(``self.q_bias is None``), only the branch that is taken counts for this module.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

__all__ = ["ALL_MODULES", "ITEM", "NOT_A_CALL", "Chain", "ChildUses", "uses_in"]

Chain = tuple[str, ...]  # attribute names after self; ITEM for an index
Arguments = tuple[tuple[str, tuple[Chain, ...]], ...]  # parameters of a method that children are passed to
ITEM = "[]"
ALL_MODULES = "modules()"  # a list of all modules below one, at any depth
MAX_CHAIN = 12  # a method that passes a child of its argument to itself would lengthen chains without end
WEIGHT = "weight"
METADATA = {"dtype", "device", "shape", "size", "ndim", "dim", "numel", "is_meta", "is_cuda", "requires_grad", "grad"}
NOT_A_CALL = {WEIGHT, "bias", "in_features", "out_features", *METADATA}
NO_VALUES = ("isinstance", "hasattr", "len")
SAME_ITEMS = ("reversed", "list", "tuple", "iter")
ITEM_METHODS = ("values", "children")
PAIR_METHODS = ("items", "named_children", "named_modules")
DEEP_METHODS = ("modules", "named_modules")
UNKNOWN = object()


@dataclass(slots=True)
class ChildUses:
    """Uses of a module's children in the source of its class.

    Attributes:
        read: layers whose weight it reads.
        mentioned: children that it calls or passes on.
        iterated: containers that it iterates over; each item counts by its own use.
    """

    read: set[Chain] = field(default_factory=set)
    mentioned: set[Chain] = field(default_factory=set)
    iterated: set[Chain] = field(default_factory=set)

    def calls(self, layer: Chain) -> bool:
        """Return whether the layer, or a module that contains it, is called or passed on."""
        return any(
            layer[: len(each)] == each or (each[: len(layer)] == layer and each[len(layer)] not in NOT_A_CALL)
            for each in self.mentioned
        )


def _definitions(kind: type, name: str) -> Iterator[ast.FunctionDef]:
    """Definitions of a method in a class and its bases, up to torch's ``Module``."""
    for base in kind.__mro__:
        if base is torch.nn.Module:
            return
        method = vars(base).get(name)
        function = method.fget if isinstance(method, property) else method
        function = function.__func__ if isinstance(function, staticmethod) else function
        if inspect.isfunction(function) and (parsed := _parse(function)) is not None:
            yield parsed


@functools.lru_cache(maxsize=4096)  # of a model's methods, for each conversion, report and change of recipe
def _parse(function: Callable[..., object]) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):  # no source file, or one that has changed since
        return None
    return tree.body[0] if tree.body and isinstance(tree.body[0], ast.FunctionDef) else None


def uses_in(kind: type, owner: torch.nn.Module | None = None) -> ChildUses:
    """Collect the uses in ``forward`` and the methods it calls; ``owner`` selects the branches it takes."""
    uses, visited = ChildUses(), set[tuple[str, Arguments]]()
    pending: list[tuple[str, Arguments]] = [("forward", ())]
    while pending:
        name, arguments = pending.pop()
        if (name, arguments) in visited:
            continue
        visited.add((name, arguments))
        for function in _definitions(kind, name):
            visitor = _UseVisitor(function, uses, owner, lambda name: next(_definitions(kind, name), None))
            visitor.names |= {parameter: list(chains) for parameter, chains in arguments}
            visitor.visit_block(function.body)
            pending += visitor.calls
            pending += [(chain[0], ()) for chain in uses.mentioned | uses.iterated if chain]
            if not visitor.uses_super:
                break
    return uses


def _parameters(function: ast.FunctionDef) -> list[str]:
    """Names of a method's parameters; of a static one, after a blank in the place of ``self``."""
    static = any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in function.decorator_list)
    return [*([""] if static else []), *(each.arg for each in (*function.args.posonlyargs, *function.args.args))]


class _UseVisitor(ast.NodeVisitor):
    """Collect what one method does with its module's children."""

    def __init__(
        self,
        function: ast.FunctionDef,
        uses: ChildUses,
        owner: torch.nn.Module | None,
        method: Callable[[str], ast.FunctionDef | None],
    ) -> None:
        self.uses, self.owner, self.method, self.uses_super = uses, owner, method, False
        self.calls: list[tuple[str, Arguments]] = []  # of methods of the same class that children are passed to
        self.names: dict[str, list[Chain]] = {name: [()] for name in _parameters(function)[:1]}

    def visit_block(self, statements: list[ast.stmt]) -> bool:
        """Visit statements up to a return or raise; returns whether one was reached."""
        for statement in statements:
            condition = self._known(statement.test) if isinstance(statement, ast.If) else None
            if isinstance(statement, ast.If) and condition is not None:
                self._bind_walruses(statement.test)
                if self.visit_block(statement.body if condition else statement.orelse):
                    return True
                continue
            self.visit(statement)
            if isinstance(statement, ast.Return | ast.Raise):
                return True
        return False

    def visit_If(self, node: ast.If) -> None:
        """Visit both branches, or only the one that is taken."""
        if self._known(node.test) is not None:
            self.visit_block([node])
            return
        self.visit(node.test)
        self._branch(node.body, node.orelse)

    def visit_While(self, node: ast.While) -> None:
        """Visit the body until its names no longer change."""
        self.visit(node.test)
        self._repeat(node)

    def visit_Try(self, node: ast.Try) -> None:
        """Visit all parts; after an exception names are bound as before or as in the body."""
        self._branch(node.body, [])
        self._branch(*(handler.body for handler in node.handlers), node.orelse)
        self.visit_block(node.finalbody)

    def visit_Match(self, node: ast.Match) -> None:
        """Visit all cases; none may match."""
        self.visit(node.subject)
        self._branch(*(case.body for case in node.cases), [])

    def _branch(self, *blocks: list[ast.stmt]) -> None:
        """Visit alternative blocks; afterwards a name may refer to any child that one of them bound to it."""
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
        """Value of a condition for this module; None if its attributes do not determine it."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                known = self._known(operand)
                return None if known is None else not known
            case ast.BoolOp(op=op, values=values):
                decisive = isinstance(op, ast.Or)  # one True decides an "or", one False an "and"
                known_values = [self._known(value) for value in values]
                if decisive in known_values:
                    return decisive
                return None if None in known_values else not decisive
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as op], comparators=[ast.Constant(value=None)]):
                value = self._attribute(left)
                return None if value is UNKNOWN else (value is None) == isinstance(op, ast.Is)
        value = self._attribute(test)
        return bool(value) if value is None or isinstance(value, bool) else None

    def _attribute(self, node: ast.expr) -> object:
        """Value of the attribute, parameter, buffer or child of the module that an expression names, or UNKNOWN."""
        chains = self._chains(node)
        if self.owner is None or len(chains) != 1 or len(chains[0]) != 1 or chains[0] == ("training",):
            return UNKNOWN
        owner, chain = self.owner, chains[0]
        places = (vars(owner), owner._parameters, owner._buffers, owner._modules)  # noqa: SLF001
        return next((place[chain[0]] for place in places if chain[0] in place), UNKNOWN)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Bind names, as in ``layer = self.a``."""
        self._assign(node.targets, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Bind a name with a type annotation."""
        if node.value is not None:
            self._assign([node.target], node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        """Bind a name inside an expression, which uses the value too."""
        self._assign([node.target], node.value)
        self._use(node.target)

    def _bind_walruses(self, expression: ast.expr) -> None:
        """Bind the names of assignments inside an expression whose value itself is not used."""
        for each in ast.walk(expression):
            if isinstance(each, ast.NamedExpr):
                self._assign([each.target], each.value)

    def _assign(self, targets: list[ast.expr], value: ast.expr) -> None:
        bound: dict[str, list[Chain]] = {}
        for target in targets:
            self._bind(target, value, bound)
            self.visit(target)
        self.names |= bound

    def visit_For(self, node: ast.For) -> None:
        """Bind the loop variable to all items, as in ``for layer in self.layers``."""
        self._loop(node.target, node.iter)
        self._repeat(node)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        """Visit a comprehension, whose names are local."""
        outside = dict(self.names)
        for each in node.generators:
            self._loop(each.target, each.iter)
            for condition in each.ifs:
                self.visit(condition)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(part)
        self.names = outside

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp  # noqa: N815 (ast defines the names)

    def _loop(self, target: ast.expr, iterable: ast.expr) -> None:
        bound: dict[str, list[Chain]] = {}
        self._bind_items(target, iterable, bound)
        self.visit(target)
        self.names |= bound

    def _bind(self, target: ast.expr, value: ast.expr, bound: dict[str, list[Chain]]) -> None:
        """Add the children that the target's names refer to, to ``bound``; visit any other value."""
        match target, value:
            case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
                for each, inner in zip(targets, values, strict=True):
                    self._bind(each, inner, bound)
            case ast.Name(id=name), _ if children := self._children(value):
                bound.setdefault(name, []).extend(children)
            case _:
                self.visit(value)

    def _bind_items(self, target: ast.expr, iterable: ast.expr, bound: dict[str, list[Chain]]) -> None:
        """Add the items of a container that the target iterates over, to ``bound``."""
        match iterable, target:
            case ast.Call(func=ast.Name(id=name), args=[inner]), _ if name in SAME_ITEMS:
                self._bind_items(target, inner, bound)
            case ast.Call(func=ast.Attribute(value=inner, attr=name), args=[]), _ if name in ITEM_METHODS:
                self._bind_items(target, inner, bound)
            case ast.Call(func=ast.Attribute(value=inner, attr=name)), ast.Tuple(elts=[_, item]) if (
                name in PAIR_METHODS
            ):
                self._bind_items(item, iterable if name in DEEP_METHODS else inner, bound)
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
        """Note ``super()`` and the arguments of methods; ``len`` and type checks read no values."""
        if isinstance(node.func, ast.Name):
            self.uses_super = self.uses_super or node.func.id == "super"
            if node.func.id in NO_VALUES:
                return
        elif isinstance(node.func, ast.Attribute) and node.func.attr in (*ITEM_METHODS, *PAIR_METHODS, *DEEP_METHODS):
            self.uses.mentioned.update(self._chains(node.func.value))  # the items are passed on
        if self._chains(node):
            self._use(node)
        elif not self._call_method(node):
            self.generic_visit(node)

    def _call_method(self, node: ast.Call) -> bool:
        """Note the children that are passed to a method of the same class, whose source says what it does with them."""
        if not isinstance(node.func, ast.Attribute) or self._chains(node.func.value) != [()]:
            return False
        function = self.method(node.func.attr)
        if function is None or any(isinstance(each, ast.Starred) for each in node.args):
            return False
        named = {each.arg for each in function.args.kwonlyargs} | set(_parameters(function))
        passed = list(zip(_parameters(function)[1:], node.args, strict=False))
        passed += [(each.arg, each.value) for each in node.keywords if each.arg is not None and each.arg in named]
        bound = {name: tuple(self._children(value)) for name, value in passed}
        bound = {name: chains for name, chains in bound.items() if 0 < max(map(len, chains), default=0) < MAX_CHAIN}
        followed = [value for name, value in passed if name in bound]
        for value in (node.func, *node.args, *(each.value for each in node.keywords)):
            if not any(value is each for each in followed):
                self.visit(value)
        self.calls.append((node.func.attr, tuple(bound.items())))
        return True

    def visit_Compare(self, node: ast.Compare) -> None:
        """Skip ``is None`` and ``in self.a``, which read no values."""
        if all(isinstance(each, ast.Is | ast.IsNot | ast.In | ast.NotIn) for each in node.ops):
            self._bind_walruses(node)
        else:
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Record the longest chain of attributes that begins at ``self``."""
        self._use(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Record such a chain with an index."""
        self._use(node)

    def visit_Name(self, node: ast.Name) -> None:
        """Record the use of a name that refers to a child; forget a name that is bound to something else."""
        if isinstance(node.ctx, ast.Load):
            self._use(node)
        else:
            self.names.pop(node.id, None)

    def _use(self, node: ast.expr) -> None:
        chains = self._chains(node)
        if chains:
            self._bind_walruses(node)
        else:
            self.generic_visit(node)
        for chain in chains:
            if WEIGHT in chain[1:]:
                place = chain.index(WEIGHT, 1)
                if not METADATA & set(chain[place + 1 : place + 2]):
                    self.uses.read.add(chain[:place])
            elif chain or isinstance(node, ast.Subscript):  # a slice of the module itself
                self.uses.mentioned.add(chain or (ITEM,))

    def _children(self, value: ast.expr) -> list[Chain]:
        """Children that a name refers to after this value is assigned to it; () is the module itself."""
        chains, is_name = self._chains(value), isinstance(value, ast.Name)
        return chains if all(WEIGHT not in chain and (chain or is_name) for chain in chains) else []

    def _chains(self, node: ast.expr) -> list[Chain]:
        """Chains of attribute names from ``self`` of each child that an expression may be; else []."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, [])
        value, names = _last_step(node)
        return [] if value is None else [(*chain, *names) for chain in self._chains(value)]


def _last_step(node: ast.expr) -> tuple[ast.expr | None, Chain]:
    """Split the last attribute, index or look-up from an expression; None if it has none."""
    match node:
        case ast.Attribute(value=value, attr=name):
            return value, (name,)
        case ast.Subscript(value=value, slice=ast.Slice()) | ast.NamedExpr(value=value):
            return value, ()
        case ast.Subscript(
            value=ast.Attribute(value=value, attr="_modules" | "_parameters"), slice=ast.Constant(value=str(name))
        ):
            return value, (name,)
        case ast.Subscript(value=value):
            return value, (ITEM,)
    return _look_up(node) if isinstance(node, ast.Call) else (None, ())


def _look_up(call: ast.Call) -> tuple[ast.expr | None, Chain]:
    """Split a look-up of children or weights, such as ``getattr(self, "a")``, into the module and the names."""
    match call.func, call.args:
        case ast.Name(id="getattr"), [value, name, *_]:
            return value, (str(name.value) if isinstance(name, ast.Constant) else ITEM,)
        case ast.Attribute(value=value, attr="parameters"), []:
            return value, (WEIGHT,)
        case ast.Attribute(value=value, attr="get_submodule" | "get_parameter"), [ast.Constant(value=str(path))]:
            return value, tuple(path.split("."))
        case ast.Attribute(value=value, attr="modules" | "named_modules"), _:
            return value, (ALL_MODULES,)
        case ast.Attribute(value=value, attr="get_submodule"), [_]:
            return value, (ALL_MODULES, ITEM)
    first_parameter = isinstance(call.func, ast.Name) and call.func.id == "next" and len(call.args) == 1
    return (call.args[0], ()) if first_parameter else (None, ())
