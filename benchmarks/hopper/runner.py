"""Runs the parts one after the other; none of them can end the others.

The time is shared out beforehand: a part may use its share and what the parts before it left over. A part that comes
too late is named and left out; one that raises keeps what it had found, and its error is in the report. So it is with
Ctrl-C: what is finished is kept, the rest is named.
"""

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch

from benchmarks.hopper.bars import still_owed
from benchmarks.hopper.parts import accumulation, card, casts, gemms, layer, linears, training
from benchmarks.hopper.session import OutOfTimeError, Session, failure_of
from octavo._lazy import own_version
from octavo.bench.results import Failure, PartRecord, Report, Section, Verdict
from octavo.errors import ConfigError

__all__ = ["PARTS", "Part", "Progress", "check_parts", "facts", "run"]

LEAST = 0.2  # of a part's share: with less left it is not begun
NOT_MADE = "no section of its part came to it"

Progress = Callable[[str, str], None]  # told the part and what it does


@dataclass(frozen=True, slots=True)
class Part:
    """A theme of the benchmark.

    Attributes:
        name: the word that selects it.
        measure: finds its sections, one after the other.
        share: of the whole time.
        bars: what its sections judge when nothing fails.
    """

    name: str
    measure: Callable[[Session], Iterator[Section]]
    share: float
    bars: Callable[[Session], Sequence[Verdict]] = lambda _: ()


# Those with a bar come first. Most of the time goes into building: a second or more for each kernel of Triton's
# (nearly fifty in "casts"), half a minute for each layer and recipe that torch.compile compiles.
PARTS = (
    Part("card", card.measure, 0.05),
    Part("accumulation", accumulation.measure, 0.05),
    Part("casts", casts.measure, 0.18, casts.bars),
    Part("linears", linears.measure, 0.21, linears.bars),
    Part("layer", layer.measure, 0.29, layer.bars),
    Part("training", training.measure, 0.14, training.bars),
    Part("gemms", gemms.measure, 0.08),
)


def run(
    session: Session,
    *,
    seconds: float,
    only: Iterable[str] = (),
    on_progress: Progress = lambda *_: None,
    on_begin: Callable[[str], None] = lambda _: None,
    on_part: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Run the parts.

    Args:
        session: where.
        seconds: for all of them.
        only: the names of the parts to run, "card" with them; empty for all.
        on_progress: told what is being done.
        on_begin: told in a line which part begins, and how much time it has.
        on_part: given the report after every part, the parts to come left out.

    Returns:
        The report; after Ctrl-C, with what was finished by then.

    Raises:
        ConfigError: a part that does not exist.
    """
    chosen = check_parts(only)
    bars = {part.name: part.bars(session) for part in chosen}
    report = Report(facts=facts(session), command=_command(session, seconds, only), is_rehearsal=not session.on_gpu)
    began = time.monotonic()
    whole, used = sum(part.share for part in chosen), 0.0
    for index, part in enumerate(chosen):
        used += part.share
        session.on_progress = lambda doing, part=part: on_progress(part.name, doing)  # type: ignore[misc]
        deadline = began + seconds * used / whole
        left = deadline - time.monotonic()
        if left < LEAST * seconds * part.share / whole:
            report.parts.append(_left_out(part, bars, "the parts before it had used the time"))
            continue
        session.deadline = deadline
        on_begin(f"{part.name}, {left:.0f} s at most")
        record = PartRecord(name=part.name)
        report.parts.append(record)
        report.is_interrupted = _run_part(part, session, record)
        reason = record.failure.reason if record.failure is not None else NOT_MADE
        record.owed = still_owed(bars[part.name], record.verdicts, reason)
        if report.is_interrupted:
            report.parts += [_left_out(other, bars, "interrupted") for other in chosen[index + 1 :]]
            break
        rest = [_left_out(other, bars, "not come to") for other in chosen[index + 1 :]]
        on_part(replace(report, parts=[*report.parts, *rest]))  # whatever ends the process, all bars are counted
    return report


def _command(session: Session, seconds: float, only: Iterable[str]) -> str:
    words = ["python -m benchmarks.hopper", "--out DIR" if session.on_gpu else "--rehearse", f"--seconds {seconds:g}"]
    return " ".join([*words, *(f"--only {name}" for name in only)])


def check_parts(only: Iterable[str]) -> list[Part]:
    """The parts of these names in their order; all for none.

    Raises:
        ConfigError: a name that no part has.
    """
    wanted = set(only)
    names = [part.name for part in PARTS]
    if unknown := wanted.difference(names):
        raise ConfigError(f"there is no part {min(unknown)!r}; use some of {', '.join(names)}")
    # what the card reaches is what others' speeds are shares of
    return [part for part in PARTS if not wanted or part.name in wanted | {"card"}]


def _run_part(part: Part, session: Session, record: PartRecord) -> bool:
    """Whether it was interrupted."""
    started = time.monotonic()
    session.on_progress(part.name)
    try:
        with torch._dynamo.config.patch(recompile_limit=64):  # noqa: SLF001
            for section in part.measure(session):
                record.sections.append(section)
    except KeyboardInterrupt:
        record.failure = Failure(name=part.name, reason="interrupted")
        return True
    except OutOfTimeError as error:
        record.failure = Failure(name=part.name, reason=str(error))
    except Exception as error:  # noqa: BLE001 (whatever it is, it is reported, and the others go on)
        record.failure = failure_of(part.name, error)
    finally:
        record.seconds = time.monotonic() - started
    try:
        session.forget()
    except Exception as error:  # noqa: BLE001 (a device that an error has ended; the next part will say so)
        record.failure = record.failure or failure_of(part.name, error)
    return False


def _left_out(part: Part, bars: Mapping[str, Sequence[Verdict]], reason: str) -> PartRecord:
    failure = Failure(name=part.name, reason=f"left out, {reason}")
    return PartRecord(name=part.name, failure=failure, owed=still_owed(bars[part.name], (), failure.reason))


def facts(session: Session) -> dict[str, str]:
    """Device, driver and versions, without which the figures cannot be judged."""
    versions = {
        "octavo": own_version(),
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "Python": platform.python_version(),
    }
    if find_spec("triton") is not None:
        import triton

        versions["triton"] = triton.__version__
    if not session.on_gpu:
        return {"device": "CPU, a rehearsal", **versions}
    properties = torch.cuda.get_device_properties(session.device)
    return {
        "device": properties.name,
        "memory": f"{properties.total_memory / 1e9:.0f} GB",
        "multiprocessors": str(properties.multi_processor_count),
        "L2": f"{properties.L2_cache_size / 1e6:.0f} MB",
        "driver": card.driver_version(),
        **versions,
    }
