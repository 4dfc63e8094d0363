"""Numbers as pages and summaries write them."""

__all__ = ["counted", "number", "percent", "signed"]

LARGEST_PLAIN_INTEGER = 1e9


def counted(count: int, name: str) -> str:
    """A count with its noun.

    Example:
        >>> counted(1, "sample"), counted(2000, "sample")
        ('1 sample', '2,000 samples')
    """
    return f"{count:,} {name}" + ("" if count == 1 else "s")


def number(value: float) -> str:
    """Three digits, plain where that is short.

    Example:
        >>> number(0.62154), number(41000.0), number(2.5e-7), number(float("inf"))
        ('0.622', '41,000', '2.5e-07', 'inf')
    """
    if value == int(value) if abs(value) < LARGEST_PLAIN_INTEGER else False:
        return f"{int(value):,}"
    return f"{value:.3g}"


def percent(part: float, whole: float = 1.0) -> str:
    """A share of a whole in percent, with three digits below 1 %; 0 % of an empty whole.

    Example:
        >>> percent(1, 4), percent(0.99999), percent(3e-5), percent(0, 0)
        ('25.0 %', '100.0 %', '0.003 %', '0 %')
    """
    share = 100 * part / whole if whole else 0.0
    return f"{share:.1f} %" if share >= 1 else f"{share:.3g} %"


def signed(value: float) -> str:
    """:func:`number` with a minus sign instead of a hyphen.

    Example:
        >>> signed(-0.5), signed(2e-9)
        ('−0.5', '2e-09')
    """
    return ("−" if value < 0 else "") + number(abs(value))
