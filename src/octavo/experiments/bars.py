"""Bars of a study, written before its runs: what counts as no loss of accuracy.

```toml
gap_nats = 0.005      # the largest final gap to the baseline, nats a token
spread = 1.0          # or: the gap as a multiple of the baseline's standard deviation over seeds
tail = 0.33           # the share of the steps, at the end, over which the gap's slope is measured
targets = [0.5, 0.75, 0.9]    # losses to reach: the baseline's at these shares of its steps
spike = 6.0           # a training loss this many robust deviations above the median of the 32 before it is a spike
```
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from octavo.checksums import KEY, sealed
from octavo.errors import ConfigError, DataError
from octavo.files import write_atomically
from octavo.parsing import read_toml
from octavo.training.comparison import GAP_BAR_NATS
from octavo.training.config_values import section

__all__ = ["BARS", "Bars", "read_bars", "save_bars", "study_bars"]

BARS = "bars.toml"  # in a study's folder
SEAL = "# Written before the first run; SHA-256 of the values: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Bars of a study; see the module."""

    gap_nats: float = GAP_BAR_NATS
    spread: float = 1.0
    tail: float = 0.33
    targets: tuple[float, ...] = (0.5, 0.75, 0.9)
    spike: float = 6.0

    def __post_init__(self) -> None:
        for name in ("gap_nats", "spread", "spike"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"bars.{name} must be above 0, not {getattr(self, name)}")
        for name, shares in (("tail", (self.tail,)), ("targets", self.targets)):
            if not shares or not all(0 < share <= 1 for share in shares):
                raise ConfigError(f"bars.{name} must be above 0 and at most 1, not {getattr(self, name)}")


def read_bars(path: str | Path) -> Bars:
    """Read a bars.toml.

    Raises:
        ConfigError: the file is missing, is not TOML, or has an unknown key or an invalid value.
    """
    try:
        return section(Bars, read_toml(Path(path)), "bars.")
    except OSError as error:
        raise ConfigError(f"cannot read the bars {str(path)!r}: {error.strerror}; name an existing file") from error
    except DataError as error:
        raise ConfigError(f"{str(path)!r} is not TOML: {error}; correct that place") from error


def save_bars(bars: Bars, path: Path) -> None:
    """Write a TOML file that ``read_bars`` reads back to the same bars, sealed by a comment."""
    import tomli_w

    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(bars).items()}
    write_atomically(path, f"{_seal(bars)}\n{tomli_w.dumps(plain)}")


def study_bars(path: Path) -> Bars:
    """Read the bars that ``save_bars`` wrote for a study.

    Raises:
        ConfigError: they are not those that it wrote, or as for ``read_bars``.
    """
    bars = read_bars(path)
    if path.read_text(encoding="utf-8").partition("\n")[0] != _seal(bars):
        raise ConfigError(
            f"{str(path)!r} is not as octavo wrote it before the runs; bars do not change once there are results: "
            "restore it, or name another folder with --out and your bars with --bars"
        )
    return bars


def _seal(bars: Bars) -> str:
    return f"{SEAL}{sealed(asdict(bars))[KEY]}"
