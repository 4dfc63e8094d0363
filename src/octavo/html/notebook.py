"""Summaries of objects for notebooks: ``_repr_html_`` of the public classes.

A class gives plain text; one template (templates/summary.html.jinja) escapes it and lays it out. The fragment takes the
notebook's own text colour and background, so that it fits a light and a dark theme, and needs no script. Long tables
are folded after their first rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.html.environment import environment

__all__ = ["Bar", "Table", "summary"]

SHOWN_AT_ONCE = 8

Cell = str | tuple[str, ...]  # text, or its lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of a summary.

    Attributes:
        columns: headings.
        rows: cells of each row; the first cell heads the row. A summary shows at most 8 rows before it folds the rest.
        title: what the rows are; "" for none.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""

    @property
    def parts(self) -> tuple[Sequence[Sequence[Cell]], Sequence[Sequence[Cell]]]:
        """Rows that are shown at once, and folded rows; a single row is not worth a fold.

        Example:
            >>> table = Table(columns=("n",), rows=[(str(n),) for n in range(10)])
            >>> [len(rows) for rows in table.parts]
            [8, 2]
        """
        end = SHOWN_AT_ONCE if len(self.rows) > SHOWN_AT_ONCE + 1 else len(self.rows)
        return self.rows[:end], self.rows[end:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar of a histogram.

    Attributes:
        height: 0 to 1.
        title: what a pointer on the bar shows.
        tick: label below the bar; "" for none.
    """

    height: float
    title: str
    tick: str = ""


def summary(
    heading: str,
    *,
    facts: Mapping[str, str] | None = None,
    bars: Sequence[Bar] = (),
    bars_title: str = "",
    tables: Sequence[Table] = (),
) -> str | None:
    """HTML fragment of an object; None without jinja2, so that IPython shows the object's plain text.

    Args:
        heading: the object in a few words.
        facts: values by name.
        bars: a histogram, from left to right.
        bars_title: what the bars count.
        tables: those without rows are left out.

    Example:
        >>> html = summary("a <small> tensor", facts={"shape": "4 × 4"})
        >>> "a &lt;small&gt; tensor" in html, "<dd>4 × 4</dd>" in html
        (True, True)
    """
    try:
        template = environment("octavo.html").get_template("summary.html.jinja")
    except ImportError:  # the report extra is not installed
        return None
    return template.render(
        heading=heading,
        facts=facts or {},
        bars=bars,
        bars_title=bars_title,
        tables=[table for table in tables if table.rows],
    )
