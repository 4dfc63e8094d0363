"""What is made of answers, beside numpy, and of targets whose speed is known."""

import json
import operator

import numpy as np
import pytest

from benchmarks.hopper.reading import load_report
from octavo.bench.render import markdown
from octavo.bench.results import PartRecord, Report
from octavo.bench.serving import AnswerTimes, Workload, measured
from octavo.bench.serving.comparison import LoadMeasurement
from octavo.errors import ConfigError
from tests.unit.bench.serving.virtual_time import run, target


def measured_sections(targets, **options):
    work = Workload(batches=(1, 16), answer=4, prompt=8, **options)
    return run(measured(targets, work))


def test_percentiles_are_numpys():
    draw = np.random.default_rng(0)
    times = draw.gamma(2.0, size=(57, 2)).cumsum(axis=1)
    answers = [AnswerTimes(due=0.0, first=float(first), last=float(last), tokens=5) for first, last in times]
    found = LoadMeasurement(answers=answers)
    wanted = {
        "latency": times[:, 1],
        "to_first": times[:, 0],
        "a_token": (times[:, 1] - times[:, 0]) / 4,
    }
    for name, values in wanted.items():
        own = found.percentiles_ms(operator.attrgetter(name))
        np.testing.assert_allclose(own, 1e3 * np.percentile(values, [50, 95, 99]), rtol=1e-12)


def test_a_single_token_has_no_time_between_tokens():
    assert (
        LoadMeasurement(answers=[AnswerTimes(due=0.0, first=1.0, last=1.0, tokens=1)]).percentiles_ms(
            lambda a: a.a_token
        )
        == []
    )


def test_a_run_counts_from_the_first_request_to_the_last_token():
    found = LoadMeasurement()
    for scale in (1.0, 2.0, 4.0):
        pair = [
            AnswerTimes(due=10.0, first=10.5, last=10.0 + scale, tokens=3),
            AnswerTimes(due=10.5, first=10.6, last=10.7, tokens=5),
        ]
        found.add(pair, 8)
    assert found.seconds == [1.0, 2.0, 4.0]
    assert (found.speed, found.seconds_a_token) == (4.0, [0.125, 0.25, 0.5])


def test_speeds_ratios_and_bars_match_the_targets():
    slow, fast = target(0.2, weight_bytes=1000), target(0.1, weight_bytes=540)
    sections = measured_sections({"bf16": slow, "fp8": fast})
    titles = ["prefill, 1 at once", "prefill, 16 at once", "decode, 1 at once", "decode, 16 at once", "open loop"]
    assert [section.title for section in sections] == [*titles, "memory of weights, and the bars"]
    alone = {row[0]: row[1:] for row in sections[2].rows}
    assert alone["bf16"][0] == "5.0"
    assert alone["fp8"][:2] == ("10.0", "2.00 (2.00–2.00)")
    assert alone["fp8"][2:] == ("100.0 / 100.0 / 100.0", "100.0 / 100.0 / 100.0", "400.0 / 400.0 / 400.0")
    assert {row[0]: row[1] for row in sections[0].rows} == {"bf16": "40.0", "fp8": "80.0"}  # 8 tokens are read in one
    verdicts = {verdict.claim: (round(verdict.found, 6), verdict.is_met) for verdict in sections[-1].verdicts}
    assert verdicts == {
        "16 clients' throughput over 1's, decode, bf16": (16.0, True),
        "16 clients' throughput over 1's, decode, fp8": (16.0, True),
        "weights of fp8 over bf16's": (0.54, True),
    }


def test_servers_are_compared_with_the_first():
    sections = measured_sections({"ours": target(0.1), "theirs": target(0.15)})
    (verdict,) = (v for v in sections[-1].verdicts if "over theirs" in v.claim)
    assert verdict.found == pytest.approx(1.5)
    assert not verdict.is_met


def test_open_loop_rate_is_half_the_first_targets_capacity():
    """16 at once, four tokens of 0.1 s each: 40 requests a second."""
    sections = measured_sections({"ours": target(0.1)}, rounds=2)
    assert sections[4].raw["rate"] == pytest.approx(20.0)
    assert "20 a second" in sections[4].notes[0]
    assert measured_sections({"ours": target(0.1)}, rate=3.0)[4].raw["rate"] == 3.0


def test_report_survives_json(tmp_path):
    sections = measured_sections({"bf16": target(0.2, weight_bytes=10), "fp8": target(0.1, weight_bytes=5)})
    report = Report(facts={"device": "this"}, command="octavo bench serve", is_rehearsal=False, theme="serving")
    report.parts.append(PartRecord(name="serving", sections=sections))
    path = tmp_path / "result.json"
    path.write_text(report.to_json())
    raw = json.loads(path.read_text())
    run_of_fp8 = raw["parts"][0]["sections"][3]["raw"]["runs"]["fp8"]
    assert {*run_of_fp8} == {"answers", "seconds", "tokens"}
    assert {*run_of_fp8["answers"][0]} == {"due", "first", "last", "tokens"}
    assert len(run_of_fp8["answers"]) == 16 * 2 * 3
    assert markdown(load_report(path)) == markdown(report)
    assert markdown(report).startswith("# Serving")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"batches": ()}, "at least one, not"),
        ({"batches": (4, 4)}, "different numbers of clients"),
        ({"batches": (0,)}, "a batch must be"),
        ({"rounds": 0}, "rounds must be"),
        ({"rate": 0.0}, "above 0, not 0.0"),
    ],
)
def test_invalid_workloads_raise(given, words):
    with pytest.raises(ConfigError, match=words):
        Workload(**given)


def test_prompts_differ_by_round_and_repeat_by_seed():
    work = Workload(vocab_size=300)
    first, second = work.prompts(2, 8, 4, round_of="a")
    assert first != second
    assert work.prompts(2, 8, 4, round_of="a") == [first, second]
    assert len(first.ids) == len(first.text.split()) == 8
    assert Workload().prompts(1, 8, 4, round_of="a")[0].ids == ()
