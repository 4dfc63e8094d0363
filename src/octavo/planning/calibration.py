"""Constants of one's own GPU: GEMM efficiencies from a result of ``python -m benchmarks.hopper`` instead of the fit's.

The largest linear layer that the run timed gives each recipe's kernel its constant; casts, launches and everything else
keep the fitted ones.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from octavo import recipes
from octavo.errors import ConfigError, DataError
from octavo.parsing import read_object
from octavo.planning.constants import Calibration, Constants, gemm_seconds
from octavo.planning.gemm_costs import gemm_parts, kernel_part
from octavo.planning.hardware import Hardware, find_hardware
from octavo.planning.jobs import GemmJob
from octavo.planning.precision import Kernel, precision_of_recipe, unsupported_reason

__all__ = ["calibrated", "read_calibration"]

MODES = ("CUDA graph", "compiled", "eager")  # the first that was measured counts: launches are the planner's own
SLOWEST = 20.0  # times as long as at the vendor's peak: the slowest of an H100's layers of 4096³ took 14 times
Timing = tuple[str, tuple[int, int, int], float]


def read_calibration(path: Path, hardware: Hardware) -> list[Timing]:
    """Read recipe, M, N and K, and median seconds of forward and backward of the linear layers in a result.

    Raises:
        DataError: the file is no result of the benchmark, has no linear layers, or was measured on other hardware.
        OSError: it cannot be opened.
    """
    advice = "give the .json of python -m benchmarks.hopper --only linears"
    try:
        record = read_object(path)
    except DataError as error:
        raise DataError(f"{str(path)!r} cannot be read: {error}; {advice}") from error
    _check_device(path, record, hardware)
    sections = [section for section in _sections(record) if str(section.get("title", "")).startswith("Linear, ")]
    for mode in MODES:
        found = [timing for section in sections for timing in _timings(section, mode)]
        if found:
            return found
    raise DataError(f"{str(path)!r} has no timings of linear layers; {advice}")


def _check_device(path: Path, record: Mapping[str, Any], hardware: Hardware) -> None:
    facts = record.get("facts")
    device = facts.get("device") if isinstance(facts, Mapping) else None
    try:
        measured = find_hardware(device) if isinstance(device, str) else None
    except ConfigError:
        measured = None
    if measured is None or measured.name != hardware.name:
        where = f"on {str(device)[:60]!r}" if isinstance(device, str) else "on a device that it does not name"
        advice = "a result of that card" if measured is None else f"--hardware {measured.name}, or such a result"
        raise DataError(f"{str(path)!r} was measured {where}, not on {hardware.name}; give {advice}")


def _sections(record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    parts = record.get("parts")
    for part in parts if isinstance(parts, list) else ():
        sections = part.get("sections") if isinstance(part, Mapping) else None
        yield from (each for each in (sections if isinstance(sections, list) else ()) if isinstance(each, Mapping))


def _timings(section: Mapping[str, Any], mode: str) -> Iterator[Timing]:
    shape = _shape(str(section["title"]))
    raw = section.get("raw")
    seconds = raw.get("seconds") if isinstance(raw, Mapping) else None
    if shape is None or not isinstance(seconds, Mapping):
        return
    for name, rounds in seconds.items():
        recipe = name.removesuffix(f", {mode}")
        numbers = (
            [each for each in rounds if isinstance(each, float) and 0 < each < 1e4] if isinstance(rounds, list) else []
        )
        if numbers and recipe != name and recipe in recipes.names():
            yield recipe, shape, median(numbers)


def _shape(title: str) -> tuple[int, int, int] | None:
    """M, N and K of a title such as "Linear, eager, forward and backward, 8192×4096×14336" or "…, 4096³"."""
    last = title.rsplit(", ", 1)[-1]
    if match := re.fullmatch(r"(\d{1,6})³", last):
        side = int(match.group(1))
        return (side, side, side) if side else None
    match = re.fullmatch(r"(\d{1,6})×(\d{1,6})×(\d{1,6})", last)
    if match is None or "0" in match.groups():
        return None
    m, n, k = map(int, match.groups())
    return m, n, k


def calibrated(constants: Constants, timings: list[Timing], hardware: Hardware, *, file: str) -> Constants:
    """Return the constants with the kernels' efficiencies that were timed on ``hardware``.

    Args:
        constants: of the fit.
        timings: as of :func:`read_calibration`; those of recipes that the hardware emulates are left out.
        hardware: that was timed.
        file: name of the result.

    Raises:
        DataError: a time is shorter than at the vendor's peak, or far longer.
    """
    values, kernels = dict(constants.values), set()
    largest: dict[str, Timing] = {}
    for timing in timings:
        known = largest.get(timing[0])
        if known is None or math.prod(timing[1]) > math.prod(known[1]):
            largest[timing[0]] = timing
    for recipe, shape, seconds in largest.values():
        precision = precision_of_recipe(recipe)
        if (precision.hp_grad_weight and not precision.is_bf16) or unsupported_reason(precision, hardware):
            continue  # its kernel is the same recipe's without high precision, or none of the hardware's
        _refuse_implausible(file, recipe, shape, seconds, hardware.peak(precision.bits))
        parts = gemm_parts(GemmJob(shapes=(shape,), hardware=hardware, precision=precision))
        kernel = kernel_part(precision.kernel, hardware)
        others = gemm_seconds({name: value for name, value in parts.items() if name != kernel}, values)["total"]
        if seconds <= 1.05 * float(others):
            raise DataError(
                f"{file!r} has {seconds:.3g} s of {recipe}, hardly more than its casts and launches are predicted to "
                f"take, {float(others):.3g} s; measure a larger layer"
            )
        values[kernel] = math.log((seconds - float(others)) / parts[kernel])
        kernels.add(kernel)
    if "bf16" in largest:  # the generation is measured now
        values.setdefault(f"gemm_bf16_{hardware.generation}", values[kernel_part(Kernel.BF16, hardware)])
    return replace(constants, values=values, calibration=Calibration(file=file, kernels=frozenset(kernels)))


def _refuse_implausible(file: str, recipe: str, shape: tuple[int, int, int], seconds: float, peak: float) -> None:
    """Refuse a time of forward and backward that no GPU takes, such as one in milliseconds."""
    least = 3 * 2.0 * math.prod(shape) / peak
    if not least <= seconds <= SLOWEST * least:
        raise DataError(
            f"{file!r} has {seconds:.3g} s of {recipe}, forward and backward of {'×'.join(map(str, shape))}: at the "
            f"vendor's peak it is {least:.3g} s; give times in seconds, up to {SLOWEST:g} times that, of a large layer"
        )
