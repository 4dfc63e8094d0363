"""Run the parts one after the other; an error in one does not end the others.

The time is divided beforehand: a part may use its share and the unused time of earlier parts. A part without enough
time is left out and named; one that raises keeps its finished sections, and its error is in the report. After Ctrl-C
the finished sections are kept, and the other parts are named.
"""

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch

from benchmarks.hopper.bars import still_owed
from benchmarks.hopper.parts import accumulation, card, casts, experts, gemms, layer, linears, training
from benchmarks.hopper.session import OutOfTimeError, Session, failure_of
from octavo._lazy import own_version
from octavo.bench.results import Failure, PartRecord, Report, Section, Verdict
from octavo.errors import ConfigError

__all__ = ["PARTS", "Part", "Progress", "check_parts", "facts", "run"]

LEAST = 0.2  # of a part's share; with less time left it does not begin
NOT_MADE = "no section of its part came to it"

Progress = Callable[[str, str], None]  # part, description of its current work


@dataclass(frozen=True, slots=True)
class Part:
    """A theme of the benchmark.

    Attributes:
        name: name that selects it.
        measure: yields its sections.
        share: share of the whole time.
        bars: bars that its sections judge if nothing fails.
    """

    name: str
    measure: Callable[[Session], Iterator[Section]]
    share: float
    bars: Callable[[Session], Sequence[Verdict]] = lambda _: ()


# Parts with bars come first. Building takes most of the time: a second or more for each of Triton's kernels
# (nearly fifty in "casts"), half a minute for each layer and recipe that torch.compile compiles.
PARTS = (
    Part("card", card.measure, 0.05),
    Part("accumulation", accumulation.measure, 0.05),
    Part("casts", casts.measure, 0.18, casts.bars),
    Part("linears", linears.measure, 0.21, linears.bars),
    Part("layer", layer.measure, 0.27, layer.bars),
    Part("training", training.measure, 0.14, training.bars),
    Part("experts", experts.measure, 0.05, experts.bars),
    Part("gemms", gemms.measure, 0.05),
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
        session: the session.
        seconds: time for all parts.
        only: names of the parts to run in addition to "card"; empty for all.
        on_progress: called with a part and a description of its current work.
        on_begin: called with a line when a part begins: its name and time.
        on_part: called after every part with the report, in which later parts are left out.

    Returns:
        The report; after Ctrl-C, with what was finished by then.

    Raises:
        ConfigError: a part that does not exist.
    """
    parts = check_parts(only)
    bars = {part.name: part.bars(session) for part in parts}
    report = Report(facts=facts(session), command=_command(session, seconds, only), is_rehearsal=not session.on_gpu)
    began = time.monotonic()
    shares, used_shares = sum(part.share for part in parts), 0.0
    for index, part in enumerate(parts):
        used_shares += part.share
        session.on_progress = lambda doing, part=part: on_progress(part.name, doing)  # type: ignore[misc]
        deadline = began + seconds * used_shares / shares
        remaining = deadline - time.monotonic()
        if remaining < LEAST * seconds * part.share / shares:
            report.parts.append(_left_out(part, bars, "the parts before it had used the time"))
            continue
        session.deadline = deadline
        on_begin(f"{part.name}, {remaining:.0f} s at most")
        record = PartRecord(name=part.name)
        report.parts.append(record)
        report.is_interrupted = _run_part(part, session, record)
        reason = record.failure.reason if record.failure is not None else NOT_MADE
        record.owed = still_owed(bars[part.name], record.verdicts, reason)
        if report.is_interrupted:
            report.parts += [_left_out(other, bars, "interrupted") for other in parts[index + 1 :]]
            break
        later_parts = [_left_out(other, bars, "not come to") for other in parts[index + 1 :]]
        on_part(replace(report, parts=[*report.parts, *later_parts]))  # whatever ends the process, all bars are counted
    return report


def _command(session: Session, seconds: float, only: Iterable[str]) -> str:
    words = ["python -m benchmarks.hopper", "--out DIR" if session.on_gpu else "--rehearse", f"--seconds {seconds:g}"]
    return " ".join([*words, *(f"--only {name}" for name in only)])


def check_parts(only: Iterable[str]) -> list[Part]:
    """Return the parts of these names in order; all parts if empty.

    Raises:
        ConfigError: an unknown name.
    """
    selected = set(only)
    names = [part.name for part in PARTS]
    if unknown := selected.difference(names):
        raise ConfigError(f"there is no part {min(unknown)!r}; use some of {', '.join(names)}")
    # other parts compute shares of the speeds that "card" measures
    return [part for part in PARTS if not selected or part.name in selected | {"card"}]


def _run_part(part: Part, session: Session, record: PartRecord) -> bool:
    """Run one part into ``record``; return True if it was interrupted."""
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
    except Exception as error:  # noqa: BLE001 (it is reported, and the other parts continue)
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
