"""Mix of precisions: a recipe for each layer of a model, stored as a TOML file.

    format = "octavo mix"
    version = 1

    [overrides]                              shell patterns of paths → recipe: octavo.convert's overrides
    "model.layers.0.self_attn.q_proj" = "weight_only"
    ...

    [tables."model.embed_tokens"]            an embedding, and the head that shares its weight: rows of FP8 codes,
    bf16_rows = [0, 28, 198]                 except these

Layers without a matching pattern run in BF16. All weights are first rounded to BF16, as in the measurement
(octavo.quantization.bf16). A table is replaced by its decoded values, because ``octavo.convert`` does not convert
embeddings; ``octavo export --format octavo`` writes the codes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.checkpoints.tables import CodedTable
from octavo.convert import ConversionReport, convert
from octavo.errors import ConfigError, DataError
from octavo.files import write_atomically
from octavo.numerics.cast_spec import check_member
from octavo.parsing import read_toml
from octavo.quantization.bf16 import round_to_bf16
from octavo.quantization.sensitivity.units import BF16, CHOICES, Unit

__all__ = ["Mix", "load_mix", "save_mix"]

FORMAT, VERSION = "octavo mix", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Recipes of a model's layers.

    Attributes:
        overrides: recipe by shell pattern of linear layers' paths; the first match is used.
        tables: for each embedding in FP8 codes, by path, the indices of the rows that stay in BF16.
    """

    overrides: Mapping[str, str]
    tables: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path, choice in self.overrides.items():
            check_member(f"the recipe of {path!r} in a mix", choice, CHOICES)
        for path, rows in self.tables.items():
            if any(type(row) is not int or row < 0 for row in rows):
                raise ConfigError(f"bf16_rows of table {path!r} must be whole numbers of at least 0, not {rows!r}")

    @classmethod
    def of(cls, units: Sequence[Unit], chosen: Mapping[str, str]) -> "Mix":
        """Create a mix from choices by unit path; missing units are BF16."""
        return cls(
            overrides={unit.path: chosen.get(unit.path, BF16) for unit in units if not unit.is_table},
            tables={
                unit.path: tuple(unit.kept_rows(chosen[unit.path]).tolist())
                for unit in units
                if unit.is_table and chosen.get(unit.path, BF16) != BF16
            },
        )

    def apply(self, model: nn.Module, *, cache_weights: bool = True) -> ConversionReport:
        """Convert a model to the mix, in place; under BF16 autocast it is bitwise identical to the measured model.

        Args:
            model: with the layers of the mix. Its parameters are rounded to BF16; a table's values are replaced by its
                decoded codes.
            cache_weights: see :func:`octavo.convert`.

        Raises:
            ConfigError: a pattern matches no layer of this model, or a table is not one of its embeddings.
        """
        tables = self.coded_tables(model)
        report = convert(model, BF16, convert_head=True, overrides=dict(self.overrides), cache_weights=cache_weights)
        round_to_bf16(model)
        for path, table in tables.items():
            weight = model.get_submodule(path).get_parameter("weight")
            weight.data = table.decoded().to(weight.dtype)
        return report

    def coded_tables(self, model: nn.Module) -> dict[str, CodedTable]:
        """Codes of the tables by path, from weights rounded to BF16; call before :meth:`apply`.

        Raises:
            ConfigError: as for :meth:`apply`.
        """
        weights = {path: _table(model, path, rows).to(torch.bfloat16).float() for path, rows in self.tables.items()}
        return {path: CodedTable.of(weight, torch.tensor(self.tables[path])) for path, weight in weights.items()}


def save_mix(mix: Mix, path: Path, *, comment: str = "") -> None:
    """Write the TOML file, preceded by the lines of ``comment``."""
    import tomli_w  # imported here so that "import octavo" needs only torch

    head = "".join(f"# {line}\n" for line in comment.splitlines())
    body: dict[str, Any] = {"format": FORMAT, "version": VERSION, "overrides": dict(mix.overrides)}
    if mix.tables:
        body["tables"] = {path: {"bf16_rows": list(rows)} for path, rows in mix.tables.items()}
    write_atomically(path, f"{head}\n{tomli_w.dumps(body)}" if head else tomli_w.dumps(body))


def load_mix(path: str | Path) -> Mix:
    """Read a mix written by ``octavo sensitivity``, :func:`save_mix` or by hand.

    Raises:
        ConfigError: the file is missing, is not a mix, or names an unknown recipe.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "mix.toml"
        >>> save_mix(Mix(overrides={"*.down_proj": "bf16", "*": "tensorwise"}), path)
        >>> load_mix(path).overrides
        {'*.down_proj': 'bf16', '*': 'tensorwise'}
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"there is no mix {str(path)!r}; octavo sensitivity writes one as mix.toml")
    try:
        document = read_toml(path)
    except OSError as error:
        raise ConfigError(f"cannot read the mix {str(path)!r}: {error.strerror}; name a file you may read") from error
    except DataError as error:
        raise ConfigError(f"{str(path)!r} is not TOML: {error}") from error
    if document.get("format") != FORMAT or document.get("version") != VERSION:
        raise ConfigError(f'{str(path)!r} is not a mix of version {VERSION}; it needs format = "{FORMAT}" and version')
    unknown = sorted(document.keys() - {"format", "version", "overrides", "tables"})
    if unknown:
        raise ConfigError(f"a mix has no key {unknown[0]!r}; use format, version, overrides, tables")
    tables = {path: _rows(path, table) for path, table in _mapping(document, "tables").items()}
    return Mix(overrides=_mapping(document, "overrides"), tables=tables)


def _mapping(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = document.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{name} of a mix must be a table with paths as keys, not {table!r}")
    return dict(table)


def _rows(path: str, table: object) -> tuple[int, ...]:
    if not isinstance(table, dict) or table.keys() != {"bf16_rows"} or not isinstance(table["bf16_rows"], list):
        raise ConfigError(f"table {path!r} of a mix must have exactly one key, bf16_rows, a list of row numbers")
    return tuple(table["bf16_rows"])


def _table(model: nn.Module, path: str, rows: Sequence[int]) -> Tensor:
    embedding = dict(model.named_modules()).get(path)
    if not isinstance(embedding, nn.Embedding):
        raise ConfigError(f"this model has no embedding {path!r}; the mix was made for another model")
    if max(rows, default=0) >= embedding.num_embeddings:
        raise ConfigError(f"table {path!r} has {embedding.num_embeddings} rows, but the mix names row {max(rows)}")
    return embedding.weight
