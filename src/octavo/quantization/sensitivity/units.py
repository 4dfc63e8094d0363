"""Units of a precision search: a weight with all modules that read it, its possible precisions and their sizes.

A unit is a weight, not a layer: a head that shares the embedding's table forms one unit with it, counted once.

| unit                         | choices                                                    |
|------------------------------|------------------------------------------------------------|
| a linear layer               | tensorwise, rowwise, blockwise, weight_only, bf16          |
| a separate head              | weight_only, bf16                                          |
| a table (embedding), and a head that shares it | weight_only of all rows or of a share of them, bf16 |

A ``weight_only`` table stores rows as FP8 codes; a look-up decodes the rows that it needs, and a head that shares the
table multiplies by decoded rows. The measurement uses the decoded table, with identical results. A few thousand common
words cause most of a table's cost: ``weight_only:0.75`` stores the three quarters of the rows with the least cost as
codes and the others in BF16.

Sizes include codes and FP32 scales, as from ``octavo.quantize``, or two bytes an element in BF16; a BF16 row of a mixed
table takes four more bytes for its index.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from octavo import recipes
from octavo.checkpoints.merged_layers import merged_layer
from octavo.checkpoints.tables import CodedTable
from octavo.convert import heads_of
from octavo.functional import WeightCache
from octavo.nn import Linear
from octavo.numerics.cast_spec import check_member
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
    """Weight with selectable precision.

    Attributes:
        path: path of the first module that reads it; identifies the unit.
        paths: paths of all modules that read it.
        shape: [N, K] of a weight; [V, H] of a table.
        choices: possible precisions, BF16 last.
        role: last part of the path that is not a number, such as "down_proj".
        depth: first number in the path, such as a block's; None if there is none.
        is_table: True if an embedding reads it.
        is_head: True if it computes the logits.
        products: multiplications per token; 0 for a table used only in look-ups.
        row_order: row indices of a table, by increasing cost; None before the estimate.
        group: units of one group have one choice; by default the path, a group of its own.
    """

    path: str
    paths: tuple[str, ...]
    shape: tuple[int, int]
    choices: tuple[str, ...]
    is_table: bool = False
    is_head: bool = False
    products: int = 0
    row_order: Tensor | None = field(default=None, compare=False, repr=False)
    group: str = ""
    role: str = field(init=False)
    depth: int | None = field(init=False)

    def __post_init__(self) -> None:
        words = self.path.split(".")
        numbers = [int(word) for word in words if word.isdecimal()]
        object.__setattr__(self, "role", next((word for word in reversed(words) if not word.isdecimal()), self.path))
        object.__setattr__(self, "depth", numbers[0] if numbers else None)
        object.__setattr__(self, "group", self.group or self.path)

    def bytes_as(self, choice: str) -> int:
        """Bytes of the weight and its scales under a choice."""
        rows, columns = self.shape
        cast = recipes.get(recipe_of(choice)).output.b
        if cast is None:
            return BF16_BYTES * rows * columns
        if self.is_table:
            kept = self.rows_in_bf16(choice)
            return (rows - kept) * (columns + SCALE_BYTES) + kept * (BF16_BYTES * columns + ROW_NUMBER_BYTES)
        return rows * columns + SCALE_BYTES * cast.granularity.scale_shape(torch.Size(self.shape)).numel()

    def rows_in_bf16(self, choice: str) -> int:
        """Number of a table's rows in BF16 under a ``weight_only`` choice."""
        _, _, share = choice.partition(":")
        return round(self.shape[0] * (1 - float(share or 1)))

    def kept_rows(self, choice: str) -> Tensor:
        """Indices of a table's rows in BF16 under a ``weight_only`` choice, ascending."""
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


def units_of(
    model: nn.Module, choices: Sequence[str] = CHOICES, *, tables: bool = True, merged: bool = False
) -> tuple[Unit, ...]:
    """Units of a model: every weight of a linear layer or an embedding, in the model's order.

    Args:
        model: with plain linear layers, or octavo's.
        choices: allowed precisions in addition to BF16; each unit keeps those that it supports.
        tables: whether embeddings may store rows as codes.
        merged: whether layers that servers run as one (:mod:`octavo.checkpoints.merged_layers`) have one choice: q, k,
            v; gate, up; and all layers of the experts of a layer.

    Raises:
        ConfigError: an unknown choice, or a model without linear layers besides its head.

    Example:
        >>> layers = {"embed": nn.Embedding(16, 4), "mlp": nn.Linear(4, 4), "lm_head": nn.Linear(4, 16, bias=False)}
        >>> model = nn.ModuleDict(layers)
        >>> model["lm_head"].weight = model["embed"].weight
        >>> [(unit.path, unit.paths, unit.bytes_as("weight_only")) for unit in units_of(model)]
        [('embed', ('embed', 'lm_head'), 128), ('mlp', ('mlp',), 32)]
    """
    for choice in choices:
        check_member("a choice", choice, CHOICES)
    readers: dict[int, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        if type(module) in (nn.Linear, Linear) or isinstance(module, nn.Embedding):
            weight = module.weight
            assert isinstance(weight, Tensor)
            readers.setdefault(id(weight), []).append((path, module))
    heads = heads_of(model)
    found = tuple(
        _unit(read, choices, is_head=any(path in heads for path, _ in read), tables=tables) for read in readers.values()
    )
    check_has_layers(model, [unit.path for unit in found if not (unit.is_table or unit.is_head)])
    return tuple(replace(unit, group=merged_layer(unit.path)) for unit in found) if merged else found


def _unit(read: Sequence[tuple[str, nn.Module]], choices: Sequence[str], *, is_head: bool, tables: bool) -> Unit:
    weight = read[0][1].weight
    assert isinstance(weight, Tensor)
    is_table = any(isinstance(module, nn.Embedding) for _, module in read)
    allowed: tuple[str, ...] = (WEIGHT_ONLY,) if is_table or is_head else (*FP8_PRODUCTS, WEIGHT_ONLY)
    if is_table:
        allowed = (WEIGHT_ONLY, *(f"{WEIGHT_ONLY}:{share}" for share in SHARES)) if tables else ()
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
    """Bytes of the whole model: the units as chosen (default BF16), all other parameters in BF16."""
    all_in_bf16 = BF16_BYTES * sum(parameter.numel() for parameter in model.parameters())
    saved = (unit.bytes_as(BF16) - unit.bytes_as(chosen.get(unit.path, BF16)) for unit in units)
    return all_in_bf16 - sum(saved)


def decoded_table(table: Tensor, bf16_rows: Tensor | None = None) -> Tensor:
    """``table`` after a round trip through FP8 row codes, in its dtype; ``bf16_rows`` are rounded to BF16 instead."""
    rows = torch.empty(0, dtype=torch.int64) if bf16_rows is None else bf16_rows
    return CodedTable.of(table, rows).decoded().to(table.dtype)


@contextmanager
def applied(model: nn.Module, unit: Unit, choice: str) -> Iterator[None]:
    """Context manager that applies a choice to one unit; BF16 afterwards. Linear layers must be octavo's."""
    modules = [model.get_submodule(path) for path in unit.paths]
    if unit.is_table:
        table = modules[0].weight
        assert isinstance(table, Tensor)
        original = table.data
        table.data = original if choice == BF16 else decoded_table(table, unit.kept_rows(choice))
        try:
            yield
        finally:
            table.data = original
        return
    layers = [module for module in modules if isinstance(module, Linear)]
    try:
        _run(layers, choice)
        yield
    finally:
        _run(layers, BF16)


@contextmanager
def mixed(model: nn.Module, units: Sequence[Unit], chosen: Mapping[str, str]) -> Iterator[None]:
    """Context manager that applies choices to all units; each weight is cast once and its codes are cached."""
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
