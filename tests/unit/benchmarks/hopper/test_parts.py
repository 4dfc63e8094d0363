"""Every part on the CPU with tiny shapes: what is in its tables, and that what could not be measured is known."""

import os
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.hopper.parts import accumulation, card, casts, layer, linears, training
from benchmarks.hopper.runner import PARTS
from benchmarks.hopper.session import Timings, Variant, share_out
from benchmarks.hopper.sizes import HOPPER, REHEARSAL, LinearCase
from benchmarks.hopper.steps import Memory, TrainingStep, leaf, memory_of
from benchmarks.hopper.tables import faster
from octavo.bench.results import Section
from octavo.formats import E4M3, E5M2
from octavo.functional import saved_operands
from octavo.kernels import cast, quantize
from octavo.nn import Linear
from octavo.numerics import PerTensor
from octavo.numerics.accumulate import Accumulate, hopper_sums

# Reasons that may stand for a figure in a rehearsal.
KNOWN = ("torchao is not rehearsed", "not there: backend", "aten::_scaled_grouped_mm")  # which no CPU has


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_part_runs(part, session):
    sections = list(part.measure(session))
    assert sections
    for section in sections:
        assert all(len(row) == len(section.columns) for row in section.rows)
        assert section.rows
    reasons = [failure.reason for section in sections for failure in section.failures]
    assert [reason for reason in reasons if not any(word in reason for word in KNOWN)] == []


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_part_runs_where_nothing_is_timed(part, session):
    session.prebuilds = share_out(1, 1)
    verdicts = [verdict for section in part.measure(session) for verdict in section.verdicts]
    assert not any(verdict.is_judged for verdict in verdicts)


def test_card_part_records_the_speeds_for_later_parts(session):
    list(PARTS[0].measure(session))
    assert session.speeds.keys() == {"copy", "bf16", "fp8"}


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ("echo 570.1; echo 570.1", "570.1"),
        ("exit 9", "unknown"),
        ("exec sleep 60", "unknown: nvidia-smi did not answer in 0.2 s"),
        (None, "unknown: nvidia-smi cannot be run: Exec format error"),
    ],
)
def test_a_driver_that_does_not_answer_is_unknown(answer, wanted, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_bytes(b"\x7fELF no program" if answer is None else f"#!/bin/sh\n{answer}\n".encode())
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(card, "ANSWERS_WITHIN", 0.2 if "sleep" in str(answer) else 20.0)
    assert card.driver_version() == wanted


def titles(session, name):
    (part,) = (part for part in PARTS if part.name == name)
    return {section.title: section for section in part.measure(session)}


def test_casts_are_judged_by_copy(session):
    session.speeds["copy"] = 1e-9
    found = titles(session, "casts")
    judged = {verdict.claim: verdict for section in found.values() for verdict in section.verdicts}
    assert judged["bf16, one scale, measured: share of copy"].is_met
    assert not any("torch.compile" in claim for claim in judged)
    assert "share of copy" in found["quantize, bf16 256×128"].columns


def test_every_granularity_and_dtype_is_cast(session):
    found = titles(session, "casts")
    for dtype in ("bf16", "fp32", "fp16"):
        names = {row[0] for row in found[f"quantize, {dtype} 256×128"].rows}
        assert names >= {"one scale, measured", "one scale, amax known", "a scale a row", "1x128", "128x128"}


def test_casts_are_counted_by_the_bytes_that_have_to_move(session):
    count, work = 256 * 128, dict[str, int]()
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        work |= {f"{name}, {what}": round(entry.work * 1e9) for what, entry in casts._casts(session, dtype).items()}
    assert work["bf16, one scale, measured"] == (2 + 2 + 1) * count + 4
    assert work["bf16, one scale, amax known"] == (2 + 1) * count + 4
    assert work["bf16, one scale, measured, both ways"] == (2 + 2 + 1 + 1) * count + 2 * 4
    assert work["bf16, one scale, amax known, both ways"] == (2 + 1 + 1) * count + 2 * 4
    assert work["bf16, one scale, delayed: amax of past steps"] == (2 + 1) * count + 4
    assert work["bf16, one scale, delayed: amax of past steps, both ways"] == (2 + 1 + 1) * count + 2 * 4
    assert work["fp32, one scale, measured"] == (4 + 4 + 1) * count + 4
    assert work["fp32, a scale a row"] == (4 + 1) * count + 4 * 256
    assert work["bf16, 1x128, both ways"] == (2 + 1 + 1) * count + 2 * 4 * 256
    assert work["bf16, a scale a row, both ways"] == (2 + 2 + 1 + 1) * count + 2 * 4 * 256
    assert work["bf16, a scale a row, of the transpose"] == (2 + 2 + 1) * count + 4 * 256
    assert work["bf16, 1x128, of the transpose"] == (2 + 1) * count + 4 * 256
    assert work["bf16, 128x128"] == (2 + 1) * count + 4 * 2
    assert round(casts._decode(session, PerTensor(), torch.float32).work * 1e9) == (1 + 4) * count + 4


def settings(spec, options):
    """What decides which kernels a cast launches, but for what it records."""
    passed = {name: options.get(name) is not None for name in ("amax", "scale")}
    flags = {name: options.get(name, False) for name in ("measure_if_zero", "transpose")}
    return passed | flags | {"spec": spec}


@pytest.mark.parametrize("both_ways", [False, True])
def test_delayed_is_cast_as_a_layer_with_that_recipe_casts(session, both_ways, monkeypatch):
    """Both ways as it learns, one way as it does not; what a learning layer records is recorded."""
    seen, records = [], []

    def noting(x, spec, **options):
        seen.append(settings(spec, options))
        record = options["record"]
        records.append([each is not None for each in (record.amax, record.overflowed, record.nonfinite)])
        return cast(x, spec, **options)

    monkeypatch.setattr(saved_operands, "cast", noting)
    with torch.set_grad_enabled(both_ways):
        Linear(32, 32, recipe="delayed")(torch.randn(32, 32))
    of_layer = len(seen)
    assert of_layer
    monkeypatch.setattr(casts, "cast", noting)
    row = casts.DELAYED + (", both ways" if both_ways else "")
    casts._casts(session, torch.bfloat16)[row].build()()
    wanted = seen[0] | {"amax": True}  # a layer that never learned has no past yet
    assert wanted["transpose"] == both_ways
    assert seen[of_layer:] == [wanted]
    assert records[-1] == [True] * 3
    assert not both_ways or records[0] == [True] * 3


def test_delayed_is_cast_for_the_amax_of_the_past_and_records_its_own(session, monkeypatch):
    monkeypatch.setattr(casts, "amax", lambda _: torch.tensor(3.0))  # 4 more are provided for
    seen = []

    def noting(x, spec, **options):
        result = cast(x, spec, **options)
        seen.append((result.output.scale.item(), options["record"].amax.item(), x.abs().max().item()))
        return result

    monkeypatch.setattr(casts, "cast", noting)
    casts._casts(session, torch.bfloat16)[casts.DELAYED].build()()
    ((scale, recorded, largest),) = seen
    assert scale == pytest.approx(7 / 448)
    assert recorded == largest


def test_a_cast_both_ways_is_judged_by_time_and_the_others_by_speed(session):
    session.speeds["copy"] = 1e-3
    session.clocks = (lambda _: 1.0,) * 2
    judged: dict[str, tuple[float, bool]] = {}
    for section in (casts._quantizing(session, "bf16", torch.bfloat16), casts._dequantizing(session)):
        judged |= {verdict.claim: (round(verdict.found or 0, 3), verdict.at_most) for verdict in section.verdicts}
    count = 256 * 128
    assert judged["bf16, one scale, measured: share of copy"] == (round((5 * count + 4) / 1e6, 3), False)
    name = "bf16, one scale, measured, both ways: time of its bytes' copy"
    assert judged[name] == (round(1e6 / (6 * count + 8), 3), True)
    name = "bf16, one scale, delayed: amax of past steps"
    assert judged[f"{name}: share of copy"] == (round((3 * count + 4) / 1e6, 3), False)
    assert judged[f"{name}, both ways: time of its bytes' copy"] == (round(1e6 / (4 * count + 8), 3), True)
    assert judged["dequantize, one scale, to fp32: share of copy"] == (round((5 * count + 4) / 1e6, 3), False)


def made_up(seconds):
    variants = {name: Variant(build=lambda: list, work=1.0, unit="TFLOP") for name in seconds}
    return Timings(variants, {}, seconds, ())


def test_fastest_variant_is_selected_among_those_that_ran():
    found = made_up({"a": [3.0] * 3, "b": [2.0] * 3})
    assert faster(found, "a", "b", "c") == "b"
    assert faster(found, "c", "d") == "c"


@pytest.mark.long
def test_training_memory_is_judged_against_bf16_compiled(session, monkeypatch):
    peaks = iter([100, 80, 70, 1, 1, 1])
    monkeypatch.setattr(type(session), "peak_above", lambda *_: next(peaks))
    (section,) = training.measure(session)
    (verdict,) = section.verdicts
    assert (verdict.found, verdict.is_met) == (0.7, True)
    assert verdict.by == "rowwise, compiled over bf16, compiled"


def test_a_linear_is_judged_by_its_fastest_recipe_and_blockwise_by_its_own():
    case = LinearCase(m=4, k=4, n=4, bar=1.25, blockwise_bar=1.4)
    found = made_up(
        {
            "bf16, eager": [3.0] * 3,
            "bf16, compiled": [0.1] * 3,
            "rowwise, eager": [2.0] * 3,
            "blockwise, eager": [2.5] * 3,
        }
    )
    fastest, blockwise = linears._verdicts(case, found, linears.EAGER)
    assert (fastest.found, fastest.is_met) == (1.5, True)
    assert fastest.by == "rowwise, eager over bf16, eager"
    assert (round(blockwise.found or 0, 2), blockwise.is_met) == (1.2, False)
    for eager, compiled, by in ((3.0, 2.5, "compiled"), (2.5, 3.0, "eager")):
        times = {"bf16, eager": eager, "bf16, compiled": compiled, "rowwise, compiled": 2.0}
        faster_bf16, _ = linears._verdicts(case, made_up({n: [t] * 3 for n, t in times.items()}), linears.COMPILED)
        assert (faster_bf16.found, faster_bf16.by) == (1.25, f"rowwise, compiled over bf16, {by}")


def test_linears_are_eager_then_compiled_then_graphs_and_rowwise_has_a_published_figure(session):
    found = [title.split(", ")[1] for title in titles(session, "linears")]
    assert found == [linears.EAGER] * 2 + [linears.COMPILED] + [linears.GRAPH] * 2
    for section in linears.measure(session):
        published = {row[0].partition(",")[0] for row in section.rows if row[-1] == "0.84"}
        assert published == ({"rowwise"} if linears.PUBLISHED in section.columns else set())


def test_a_layer_is_judged_against_bf16_and_each_of_torchaos():
    found = made_up(
        {
            layer.BASE: [3.0] * 3,
            layer.EAGER: [4.0] * 3,
            "tensorwise, compiled": [2.0] * 3,
            "rowwise, compiled": [2.5] * 3,
            "delayed, eager": [5.0] * 3,
            "torchao rowwise, compiled": [2.2] * 3,
        }
    )
    judged = {verdict.claim: (verdict.word, verdict.by) for verdict in layer._speed_verdicts(found)}
    assert judged == {
        "TransformerLayer, compiled, × the faster bf16": ("met", "tensorwise, compiled over bf16, compiled"),
        "TransformerLayer, eager, × the faster bf16": ("missed", "delayed, eager over bf16, eager"),
        "TransformerLayer, compiled, × torchao tensorwise, compiled": ("not judged", ""),
        "TransformerLayer, compiled, × torchao rowwise, compiled": (
            "met",
            "tensorwise, compiled over torchao rowwise, compiled",
        ),
    }


def test_a_layer_is_judged_against_the_faster_of_two_in_bf16():
    found = made_up(
        {
            layer.BASE: [3.0] * 3,
            layer.EAGER: [4.0] * 3,
            layer.PLAIN["compiled"]: [2.0] * 3,
            layer.PLAIN["eager"]: [3.0] * 3,
            "tensorwise, compiled": [1.6] * 3,
            "tensorwise, eager": [3.5] * 3,
        }
    )
    compiled, eager, *_ = layer._speed_verdicts(found)
    assert (compiled.word, eager.word) == ("missed", "missed")
    assert "over plain layer" in compiled.by
    assert "over plain layer" in eager.by


def test_memory_is_judged_against_bf16_compiled():
    memory = {layer.BASE: Memory(100, 40), "rowwise, compiled": Memory(70, 20), "rowwise, eager": Memory(1, 1)}
    section = layer._memory_section(memory)
    (verdict,) = section.verdicts
    assert (verdict.found, verdict.is_met) == (0.7, True)
    assert ("rowwise, compiled", "0.00 GB", "0.70", "0.00 GB", "0.50") in section.rows


class Counting:
    """A GPU's memory as a list: what is allocated when it is asked, and a peak."""

    on_gpu = True

    def __init__(self, allocated, peak):
        self.left, self.peak, self.rest = list(allocated), peak, None

    def allocated(self):
        return self.left.pop(0)

    def peak_above(self, rest, run):
        self.rest = rest
        run()
        return self.peak


def test_a_steps_memory_is_its_parameters_and_what_is_above_all_else(session):
    module = torch.nn.Linear(8, 4, dtype=torch.bfloat16)  # (8 · 4 + 4) · 2 bytes
    inputs, grads = (session.rotation(make, 1) for make in (lambda: leaf(session, 2, 8), lambda: session.randn(2, 4)))
    step = TrainingStep(module, list(module.parameters()), inputs, grads)
    counting: Any = Counting(allocated=[5000, 5300, 5100], peak=1000)
    assert memory_of(counting, step) == Memory(peak=72 + 1000, kept=300)
    assert counting.rest == 5100


def codes(rows, k, fmt=E4M3):
    return quantize(torch.randn(rows, k), fmt).data


@pytest.mark.parametrize("k", [96, 500])
def test_intervals_have_octavos_two_models_among_them(k):
    a, b = codes(5, k), codes(3, k, E5M2)
    sums = accumulation.sums_with_interval
    assert torch.equal(sums(a, b, None), hopper_sums(a, b, accumulate=Accumulate.HOPPER_FAST))
    assert torch.equal(sums(a, b, 128), hopper_sums(a, b, accumulate=Accumulate.HOPPER_SLOW))
    if k > 128:
        assert not torch.equal(sums(a, b, 32), sums(a, b, 128))


@pytest.mark.parametrize("interval", [64, 256, None])
def test_a_known_interval_is_found(interval, session, monkeypatch):
    """A stand-in for the GPU's product that adds a chain every so often."""
    session.sizes = replace(session.sizes, chain_lengths=(32, 1024), chain_side=8)
    monkeypatch.setattr(
        accumulation, "_scaled_mm", lambda a, b, *, fast: accumulation.sums_with_interval(a, b, interval)
    )
    (section,) = accumulation.measure(session)
    label = accumulation._label(interval)
    long = [row for row in section.rows if row[0] == "1,024"]
    assert [row[3:6] for row in long] == [(label, "100.0%", "0.0e+00")] * 4
    assert {row[3] for row in section.rows if row[0] == "32"} == {"one chain"}
    assert all(row[7] == "100.0%" and row[8] == row[6] for row in section.rows)
    assert f"With fast accumulation, K above 512: the best fit is {label}" in section.notes[1]
    assert f"Without fast accumulation, K above 512: the best fit is {label}" in section.notes[2]


def test_the_issues_shapes_are_measured():
    assert {
        (case.m, case.k, case.n): (case.published, case.bar) for case in HOPPER.linears if case.bar or case.published
    } == {
        (1024, 1024, 1024): (0.42, None),
        (4096, 4096, 4096): (0.84, 1.25),
        (8192, 4096, 4096): (1.00, None),
        (8192, 4096, 14336): (None, 1.45),
        (16384, 16384, 16384): (1.42, 1.65),
    }
    assert HOPPER.layer.batch * HOPPER.layer.length == 8192
    assert HOPPER.chain_lengths[0] == 32
    assert HOPPER.chain_lengths[-1] == 16384


def test_a_rehearsal_has_every_kind_of_case():
    assert any(case.bar and case.published and case.compiled for case in REHEARSAL.linears)
    assert any(case.blockwise_bar for case in REHEARSAL.linears)


def test_medians_and_ratios_are_of_the_rounds(session):
    from benchmarks.hopper.tables import section_of

    found = made_up({"a": [1.0, 2.0, 9.0], "b": [2.0, 4.0, 9.0]})
    section: Section = section_of("T", found, base="a", limit=1.0, limit_name="most", columns={"more": {"b": "x"}})
    assert section.columns == ("timed", "median", "speed", "share of most", "speed × a (quartiles)", "more")
    assert section.rows[1] == ("b", "4,000.00 ms", "0.2 TFLOP/s", "25%", "0.50 (0.50–1.00)", "x")
    assert statistics.median(section.raw["seconds"]["a"]) == 2.0
