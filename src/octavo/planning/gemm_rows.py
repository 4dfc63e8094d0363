"""Rows of matrix products and single layers: their sizes, groups and passes, from a name."""

import re
from dataclasses import replace

from octavo.errors import ConfigError
from octavo.planning.hardware import find_hardware
from octavo.planning.jobs import GemmJob, GemmPass
from octavo.planning.precision import WITHOUT_CASTS, Kernel, find_precision
from octavo.planning.row_words import as_plain_numbers, says
from octavo.planning.rows import Row

__all__ = ["gemm_job"]


def gemm_job(row: Row) -> GemmJob:
    """Return the linear layers that a row measured.

    Raises:
        ConfigError: its hardware is unknown, or its model names no sizes.
    """
    text, hardware = as_plain_numbers(row["model"]), find_hardware(row["hardware"])
    precision = find_precision(row["precision"], has_mx=hardware.has_mx)
    if precision.kernel == Kernel.DEEPGEMM or WITHOUT_CASTS.search(row["notes"].lower()):  # DeepGEMM is given codes
        precision = replace(precision, casts=False)
    groups = next((size for name in ("G", "E", "groups", "experts") if (size := _size(text, name))), 1)
    shapes, attention = _shapes(text, groups), None
    is_batched = bool(BATCHED.search(text))
    if is_batched:  # M is that of each product
        groups = next((size for name in ("B", "batch(?: size)?") if (size := _size(text, name))), groups)
    if "TransformerLayer" in text:
        hidden, ffn, heads = (_size(text, name) or 0 for name in ("h", "ffn", "heads"))
        seq = _size(text, "seq") or 2048
        tokens = seq * (_size(text, "batch") or 1)
        if min(hidden, ffn, heads) < 1:
            raise ConfigError("a TransformerLayer needs h, ffn and heads in its name")
        shapes = tuple(
            (tokens, n, k) for n, k in ((3 * hidden, hidden), (hidden, hidden), (ffn, hidden), (hidden, ffn))
        )
        attention = (tokens, heads, hidden // heads, seq)
    if not shapes or any(min(shape) < 1 for shape in shapes):
        raise ConfigError(f"the sizes M, N and K of {text!r} are not known")
    ranks = row.integer("tp", 1) or 1
    narrowest = min(n for _, n, _ in shapes)
    if ranks > narrowest:
        raise ConfigError(f"{ranks:,} tensor-parallel ranks are more than the {narrowest:,} output features")
    copies = max(1, row.integer("gpus", 1) // ranks)
    shapes = tuple((max(1, m // copies), n, k) for m, n, k in shapes)
    return GemmJob(
        shapes=shapes,
        groups=groups,
        passes=_passes(row),
        hardware=hardware,
        precision=precision,
        attention=attention,
        ranks=ranks,
        weight_cached="inference" in row["source_path_or_url"],
        is_grouped="grouped" in text.lower() or (groups > 1 and not is_batched),
    )


BATCHED = re.compile(r"\b(?:batched|strided|bmm)\b", re.IGNORECASE)


def _size(text: str, name: str) -> int | None:
    """A size such as that of "M=4096", "M: 4096", "M 4096" or, of small letters alone, "m4096"."""
    match = re.search(rf"\b{name}(?: ?[=:] ?| )(\d+)\b(?!\.\d)", text)
    match = match or re.search(rf"\b{name.lower()} ?[=:]? ?(\d+)\b(?!\.\d)", text)
    return int(match.group(1)) if match else None


MLP = re.compile(r"mlp|feed[ -]?forward|ffn (?:block|layer)", re.IGNORECASE)
GATED = re.compile(r"swiglu|geglu|\bgated", re.IGNORECASE)
ORDER = r"\(?\b([MNK])[ ,x×]*([MNK])[ ,x×]*([MNK])\b\)?[ =:]*\(?(\d+)[ ,x×]+(\d+)[ ,x×]+(\d+)"


def _shapes(text: str, groups: int) -> tuple[tuple[int, int, int], ...]:
    """M (of a group), N and K of every product a name lists."""
    text = re.sub(r"\bM ?= ?N ?= ?K ?= ?(\d+)", r"M=\1 N=\1 K=\1", text)
    text = re.sub(ORDER, r"\1=\4 \2=\5 \3=\6", text)
    if match := re.search(r"h=(\d+) ffn=(\d+) M=(\d+)", text):
        hidden, ffn, m = map(int, match.groups())
        mlp = ((2 * ffn if GATED.search(text) else ffn, hidden), (hidden, ffn))
        attention = () if MLP.search(text) else ((3 * hidden, hidden), (hidden, hidden))
        return tuple((m, n, k) for n, k in (*attention, *mlp))
    if match := re.search(r"(\d+) ?-> ?(\d+), batch (\d+) x (\d+)", text):
        k, n, batch, seq = map(int, match.groups())
        return ((batch * seq, n, k),)
    if match := re.search(r"\b(\d{2,}) ?[x×] ?(\d{2,}) ?[x×] ?(\d{2,})\b", text):
        m, n, k = map(int, match.groups())
        return ((m, n, k),)
    if match := re.search(r"\b(\d{3,})(?:³|\^3| cubed)", text):
        return ((int(match.group(1)),) * 3,)
    sizes = [_size(text, name) or 0 for name in ("M", "N", "K")]
    if of_group := re.search(r"M(?:/|_per_| per )group ?[=:]? ?(\d+)", text):
        return ((int(of_group.group(1)), sizes[1], sizes[2]),)
    return ((sizes[0] // groups, sizes[1], sizes[2]),)


# In this order; what is left of a text is searched for the next.
PASSES = (
    (r"\btotal\b", "total"),
    (r"\bdgrad\b|\bgrad input\b", "grad_input"),
    (r"\bwgrad\b|\bgrad weight\b", "grad_weight"),
    (r"\bbwd\b|\bbackward\b|\bgrads?\b(?! input| weight)", "backward"),
    (r"\bfprop\b|\bforward\b|\bfwd\b", "forward"),
)


def _passes(row: Row) -> GemmPass:
    """The passes that a name, the metric or else the notes list; the forward pass if nothing does.

    Raises:
        ConfigError: they list passes that are not measured together.
    """
    for text in (f"{row['model']} {row['metric']}", row["notes"]):
        words = re.sub(r"[_-]", " ", text.lower())
        named = {name for pattern, name in PASSES if says(words, pattern)}
        if "transformerlayer" in words and not named:
            return GemmPass.ALL
        if "total" in named:
            return GemmPass.SUM
        if named & {"grad_input", "grad_weight"} == {"grad_input", "grad_weight"}:
            named = (named - {"grad_input", "grad_weight"}) | {"backward"}
        if named == {"forward", "backward"}:
            return GemmPass.ALL
        if len(named) > 1:
            raise ConfigError(f"{', '.join(sorted(named))} are not measured together in a way that is modelled")
        if named:
            return GemmPass(named.pop())
    return GemmPass.FORWARD
