"""Accelerators: vendors' peaks, bandwidths, links and power, found by published names.

``hardware.toml`` has the figures with their sources. They are limits; the share of them that programs reach is fitted
(:mod:`octavo.planning.constants`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from octavo.errors import ConfigError
from octavo.parsing import parse_toml

__all__ = ["Hardware", "find_hardware", "hardware_names"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One accelerator, and how it is connected.

    Attributes:
        name: key of the table.
        bf16: peak of dense BF16 products, TFLOP/s; likewise ``fp8`` and ``int8``, 0 where there are no such units.
        memory: GB.
        bandwidth: of memory, GB/s.
        link: GB/s a GPU in one direction, to the others of its domain.
        domain: GPUs that ``link`` connects.
        network: GB/s a GPU to other domains.
        processors: multiprocessors, for wave quantization.
        watts: board power.
        generation: of the units: ampere, ada, hopper, blackwell, cdna or cpu.
        source: of the figures.
    """

    name: str
    bf16: float
    fp8: float
    int8: float
    memory: float
    bandwidth: float
    link: float
    domain: int
    network: float
    processors: int
    watts: float
    generation: str
    source: str

    @property
    def has_fp8(self) -> bool:
        """Return whether it multiplies FP8."""
        return self.fp8 > 0

    @property
    def has_mx(self) -> bool:
        """Return whether it multiplies FP8 and FP4 with MX scales."""
        return self.generation == "blackwell" or self.name.startswith("mi35")

    def peak(self, bits: int) -> float:
        """Peak of dense products of operands of 16, 8 or 4 bits, FLOP/s."""
        if bits == 16:
            return self.bf16 * 1e12
        fastest = self.fp8 if bits == 8 or not self.has_mx else _fp4(self)
        return (fastest or self.bf16) * 1e12

    def rate(self, ranks: int) -> float:
        """Bytes a second of a collective among ``ranks`` GPUs; beyond the domain the network is the limit."""
        return (self.link if ranks <= self.domain else self.network) * 1e9

    def capped(self, watts: float) -> "Hardware":
        """This accelerator under a power limit: its clock follows the cube root of the power."""
        share = min(1.0, (watts / self.watts) ** (1 / 3))
        rates = {name: getattr(self, name) * share for name in ("bf16", "fp8", "int8")}
        return replace(self, watts=min(watts, self.watts), **rates)


def _fp4(hardware: Hardware) -> float:
    """Peak of FP4, TFLOP/s: twice FP8's (MI355X too), three times on Blackwell Ultra (NVIDIA DGX B300 datasheet)."""
    return hardware.fp8 * (3 if "b300" in hardware.name else 2)


MEMORY_ROUNDED = 0.1  # B200 is sold with 180 to 192 GB
SPELLINGS = (
    (r"h100.*96 ?gb", "h100-96gb"),
    (r"gh200.*144 ?gb", "gh200-144gb"),
    (r"gh200", "gh200"),
    (r"gb300", "gb300"),
    (r"gb200", "gb200"),
    (r"b300", "b300"),
    (r"b200", "b200"),
    (r"b100", "b100"),
    (r"h200.*nvl", "h200-nvl"),
    (r"h200", "h200"),
    (r"h100.*nvl(?!ink)", "h100-nvl"),
    (r"h100.*pcie", "h100-pcie"),
    (r"h100|hopper", "h100"),
    (r"h800", "h800"),
    (r"h20\b", "h20"),
    (r"a100.*40 ?gb", "a100-40gb"),
    (r"a800", "a800"),
    (r"a100", "a100"),
    (r"v100", "v100"),
    (r"l40s", "l40s"),
    (r"l40", "l40"),
    (r"\bl4\b", "l4"),
    (r"4090", "rtx-4090"),
    (r"6000[ -]?ada", "rtx-6000-ada"),
    (r"mi300a", "mi300a"),
    (r"mi300", "mi300x"),
    (r"mi325", "mi325x"),
    (r"mi350", "mi350x"),
    (r"mi355", "mi355x"),
)


def find_hardware(text: str) -> Hardware:
    """Return the accelerator of a published name.

    Args:
        text: such as ``h100``, ``DGX-GB200`` or "H100 SXM 96GB HBM2e (500W cap)"; a power limit is followed.

    Raises:
        ConfigError: the table has no such accelerator, or none with that memory, or the name leads to another one.

    Example:
        >>> find_hardware("DGX H100 80GB SXM").fp8
        1978.9
        >>> find_hardware("A100").has_fp8
        False
    """
    if re.search(r"→|[-=]>", text):
        raise ConfigError(
            f"hardware {text[:60]!r} names one accelerator and then another; give the one that was measured"
        )
    lower = re.split(r"\b(?:vs\.?|versus|compared)\b", text.lower())[0]
    key = next((key for pattern, key in SPELLINGS if re.search(rf"(?:{pattern})(?!\d)", lower)), None)
    if key is None:
        raise ConfigError(f"no figures are known for hardware {text!r}; use one of {', '.join(hardware_names())}")
    hardware = _table()[key]
    sizes = [float(size) for size in re.findall(r"(\d+) ?(?:GB|gb|GiB)\b(?! ?/)", text)]  # "Gb" are bits
    if sizes and not any(abs(size / hardware.memory - 1) <= MEMORY_ROUNDED for size in sizes):
        raise ConfigError(f"no figures are known for {text[:60]!r}; {key} has {hardware.memory:g} GB")
    limit = re.search(r"(\d+) ?w(?:atts?)? (?:power )?(?:cap|limit)|(?:capped|limited) (?:to|at) (\d+) ?w", lower)
    watts = float(limit[1] or limit[2]) if limit else 0.0
    return hardware.capped(watts) if watts else hardware


def hardware_names() -> tuple[str, ...]:
    """Names of all accelerators in the table."""
    return tuple(_table())


@cache
def _table() -> dict[str, Hardware]:
    text = resources.files("octavo.planning").joinpath("hardware.toml").read_text(encoding="utf-8")
    entries = parse_toml(text)
    return {name: Hardware(name=name, **_fields(name, entries)) for name in entries}


def _fields(name: str, entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Fields of an entry, those of the one it is like included."""
    own = dict(entries[name])
    like = own.pop("like", None)
    return _fields(like, entries) | own if like else own
