"""A report that holds a little of everything."""

from octavo.bench.results import Chart, Failure, PartRecord, Report, Section, Verdict

__all__ = ["SECTION", "made_report"]

SECTION = Section(
    title="Casts",
    columns=("timed", "speed"),
    rows=(("a <cast>", "1|2 GB/s"),),
    notes=("A note.",),
    chart=Chart(unit="GB/s", series={"Casts": {"a": 1.5}}, line=2.0),
    verdicts=(
        Verdict(claim="share", found=0.9, bar=0.85),
        Verdict(claim="memory", found=0.8, bar=0.75, at_most=True),
    ),
    failures=(Failure(name="b", reason="BackendError: no", trace="Traceback"),),
    raw={"seconds": {"a": [1.0, 2.0]}},
)


def made_report() -> Report:
    """Two parts: one that was measured, one that was interrupted."""
    parts = [
        PartRecord(name="casts", seconds=3.0, sections=[SECTION]),
        PartRecord(
            name="layer",
            failure=Failure(name="layer", reason="interrupted"),
            owed=(Verdict(claim="a layer's memory", bar=0.75, at_most=True, reason="interrupted"),),
        ),
    ]
    return Report(
        facts={"device": "H200"}, command="octavo bench", is_rehearsal=False, measured="2026-01-02", parts=parts
    )
