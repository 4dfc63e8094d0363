"""What may be chosen one by one: a weight and whatever reads it, the precisions it may have, and what each weighs.

A unit is a weight, not a layer: a head that shares the embedding's table is one unit with it, whose bytes count once.

| unit                         | choices                                                    |
|------------------------------|------------------------------------------------------------|
| a linear layer               | tensorwise, rowwise, blockwise, weight_only, bf16          |
| a head of its own            | weight_only, bf16                                          |
| a table (embedding), and a head that shares it | weight_only of all rows or of a share of them, bf16 |

A table in ``weight_only`` is rows of FP8 codes, of which a look-up decodes those it needs; the head that shares it
multiplies by the decoded rows. Here the table's decoded values stand in for it, which gives the same numbers. Words are
not alike: a few thousand common ones make most of what a table's error costs. ``weight_only:0.75`` is three quarters of
the rows as codes, those whose error the loss notices least, and the rest in BF16.

Bytes are those of codes and FP32 scales, as ``octavo.quantize`` makes them, or two an element in BF16; a row of a mixed
table that is in BF16 takes four more for its number.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from octavo import recipes
from octavo.convert import heads_of
from octavo.errors import ConfigError
from octavo.functional import WeightCache
from octavo.interchange.tables import CodedTable
from octavo.nn import Linear
from octavo.quantization.layers import check_has_layers

__all__ = [
    "BF16",
    "CHOICES",
    "FP8_PRODUCTS",
    "WEIGHT_ONLY",
    "Unit",
    "applied",
    "bytes_of",
    "decoded_table",
    "mixed",
    "recipe_of",
    "units_of",
]

BF16, WEIGHT_ONLY = "bf16", "weight_only"
FP8_PRODUCTS = ("tensorwise", "rowwise", "blockwise")  # multiply in FP8, twice as fast on Hopper as in BF16
CHOICES = (*FP8_PRODUCTS, WEIGHT_ONLY, BF16)
SHARES = (0.97, 0.94, 0.875, 0.75, 0.5)  # of a table's rows as codes
BF16_BYTES, SCALE_BYTES, ROW_NUMBER_BYTES = 2, 4, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A weight that is chosen for.

    Attributes:
        path: of the first module that reads it; its name here.
        paths: of all of them.
        shape: of the weight, [N, K]; of a table [V, H].
        choices: what it may be, BF16 last.
        role: the last word of the path that is not a number, such as "down_proj".
        depth: the first number in the path, such as a block's; None where there is none.
        is_table: whether an embedding reads it.
        is_head: whether it makes the logits.
        products: multiplications a token that read it; 0 for a table nobody multiplies by.
        row_order: of a table, its rows' numbers, those first whose error costs least; None where nobody has looked.
    """

    path: str
    paths: tuple[str, ...]
    shape: tuple[int, int]
    choices: tuple[str, ...]
    is_table: bool = False
    is_head: bool = False
    products: int = 0
    row_order: Tensor | None = field(default=None, compare=False, repr=False)
    role: str = field(init=False)
    depth: int | None = field(init=False)

    def __post_init__(self) -> None:
        words = self.path.split(".")
        numbers = [int(word) for word in words if word.isdecimal()]
        object.__setattr__(self, "role", next((word for word in reversed(words) if not word.isdecimal()), self.path))
        object.__setattr__(self, "depth", numbers[0] if numbers else None)

    def bytes_as(self, choice: str) -> int:
        """Bytes of the weight and its scales under one of the choices."""
        rows, columns = self.shape
        cast = recipes.get(recipe_of(choice)).output.b
        if cast is None:
            return BF16_BYTES * rows * columns
        if self.is_table:
            kept = self.rows_in_bf16(choice)
            return (rows - kept) * (columns + SCALE_BYTES) + kept * (BF16_BYTES * columns + ROW_NUMBER_BYTES)
        return rows * columns + SCALE_BYTES * cast.granularity.scale_shape(torch.Size(self.shape)).numel()

    def rows_in_bf16(self, choice: str) -> int:
        """How many of a table's rows stay in BF16 under a ``weight_only`` choice."""
        _, _, share = choice.partition(":")
        return round(self.shape[0] * (1 - float(share or 1)))

    def kept_rows(self, choice: str) -> Tensor:
        """Numbers of the rows that stay in BF16 under a ``weight_only`` choice, ascending."""
        kept = self.rows_in_bf16(choice)
        if not kept:
            return torch.empty(0, dtype=torch.int64)
        assert self.row_order is not None, "rows are ranked before some are chosen"
        return self.row_order[-kept:].sort().values


def recipe_of(choice: str) -> str:
    """The recipe's name of a choice.

    Example:
        >>> recipe_of("weight_only:0.75")
        'weight_only'
    """
    return choice.partition(":")[0]


def units_of(model: nn.Module, choices: Sequence[str] = CHOICES) -> tuple[Unit, ...]:
    """Every weight that a linear layer or an embedding reads, in the model's order.

    Args:
        model: with plain linear layers, or octavo's.
        choices: those to choose from, besides BF16; units that know only some of them keep those.

    Raises:
        ConfigError: an unknown choice, or a model without linear layers besides its head.

    Example:
        >>> layers = {"embed": nn.Embedding(16, 4), "mlp": nn.Linear(4, 4), "lm_head": nn.Linear(4, 16, bias=False)}
        >>> model = nn.ModuleDict(layers)
        >>> model["lm_head"].weight = model["embed"].weight
        >>> [(unit.path, unit.paths, unit.bytes_as("weight_only")) for unit in units_of(model)]
        [('embed', ('embed', 'lm_head'), 128), ('mlp', ('mlp',), 32)]
    """
    unknown = [choice for choice in choices if choice not in CHOICES]
    if unknown:
        raise ConfigError(f"a layer may be {', '.join(CHOICES)}, not {unknown[0]!r}")
    readers: dict[int, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        if type(module) in (nn.Linear, Linear) or isinstance(module, nn.Embedding):
            weight = module.weight
            assert isinstance(weight, Tensor)
            readers.setdefault(id(weight), []).append((path, module))
    heads = heads_of(model)
    found = tuple(_unit(read, choices, is_head=any(path in heads for path, _ in read)) for read in readers.values())
    check_has_layers(model, [unit.path for unit in found if not (unit.is_table or unit.is_head)])
    return found


def _unit(read: Sequence[tuple[str, nn.Module]], choices: Sequence[str], *, is_head: bool) -> Unit:
    weight = read[0][1].weight
    assert isinstance(weight, Tensor)
    is_table = any(isinstance(module, nn.Embedding) for _, module in read)
    allowed: tuple[str, ...] = (WEIGHT_ONLY,) if is_table or is_head else (*FP8_PRODUCTS, WEIGHT_ONLY)
    if is_table:
        allowed += tuple(f"{WEIGHT_ONLY}:{share}" for share in SHARES)
    multiplied = sum(isinstance(module, nn.Linear) for _, module in read)
    return Unit(
        path=read[0][0],
        paths=tuple(path for path, _ in read),
        shape=(weight.shape[0], weight.shape[1]),
        choices=(*(choice for choice in allowed if recipe_of(choice) in choices), BF16),
        is_table=is_table,
        is_head=is_head,
        products=multiplied * weight.numel(),
    )


def bytes_of(model: nn.Module, units: Sequence[Unit], chosen: Mapping[str, str]) -> int:
    """Bytes of the whole model: the units as chosen (BF16 where nothing is), every other parameter in BF16."""
    all_in_bf16 = BF16_BYTES * sum(parameter.numel() for parameter in model.parameters())
    saved = (unit.bytes_as(BF16) - unit.bytes_as(chosen.get(unit.path, BF16)) for unit in units)
    return all_in_bf16 - sum(saved)


def decoded_table(table: Tensor, bf16_rows: Tensor | None = None) -> Tensor:
    """What rows of FP8 codes made of ``table`` decode to, in its dtype; the rows that are named are rounded to BF16."""
    rows = torch.empty(0, dtype=torch.int64) if bf16_rows is None else bf16_rows
    return CodedTable.of(table, rows).decoded().to(table.dtype)


@contextmanager
def applied(model: nn.Module, unit: Unit, choice: str) -> Iterator[None]:
    """Let one unit of a model whose linear layers are octavo's be as chosen inside the block, and BF16 after it."""
    modules = [model.get_submodule(path) for path in unit.paths]
    if unit.is_table:
        table = modules[0].weight
        assert isinstance(table, Tensor)
        known = table.data
        table.data = known if choice == BF16 else decoded_table(table, unit.kept_rows(choice))
        try:
            yield
        finally:
            table.data = known
        return
    layers = [module for module in modules if isinstance(module, Linear)]
    try:
        _run(layers, choice)
        yield
    finally:
        _run(layers, BF16)


@contextmanager
def mixed(model: nn.Module, units: Sequence[Unit], chosen: Mapping[str, str]) -> Iterator[None]:
    """Let every unit be as chosen inside the block; a weight is cast once, and its codes are kept until the end."""
    layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
    with ExitStack() as stack:
        for layer in layers:
            layer.weight_cache = WeightCache()
            stack.callback(setattr, layer, "weight_cache", None)
        for unit in units:
            if chosen.get(unit.path, BF16) != BF16:
                stack.enter_context(applied(model, unit, chosen[unit.path]))
        yield


def _run(layers: Sequence[Linear], choice: str) -> None:
    for layer in layers:
        layer.set_recipe(recipes.get(choice), layer.scale_updates, path=layer.path)
