"""Lines of metrics.jsonl: which are a run's, and which are refused by number."""

import hashlib
import json

import pytest

from octavo.doctor.lines import LinesWritten, LineWriter, read_lines
from octavo.errors import TrainingError


def written(folder, *steps, **values):
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps({"kind": "step", "step": step, **values}) + "\n" for step in steps))
    return path


def test_a_step_may_have_several_lines(tmp_path):
    assert [line["step"] for line in read_lines(written(tmp_path, 0, 1, 1, 2, 2**53))] == [0, 1, 1, 2, 2**53]


def test_steps_that_fall_are_two_runs(tmp_path):
    with pytest.raises(TrainingError, match=r"line 3 of .* has step 1 after step 2: two runs wrote there"):
        read_lines(written(tmp_path, 1, 2, 1))


@pytest.mark.parametrize("step", [-1, 1.5, True, "3", None, 10**400, float("inf")])
def test_a_step_is_a_whole_number_from_0_on(tmp_path, step):
    with pytest.raises(TrainingError, match=r"line 2 of .* is not a line of a run \(.*\); put the file back"):
        read_lines(written(tmp_path, 1, step))


@pytest.mark.parametrize("value", [10**400, -(10**400), 10**4000])
def test_a_number_is_one_that_a_float_holds(tmp_path, value):
    with pytest.raises(TrainingError, match=r"line 1 of .* is not a line of a run \(.*\); put the file back"):
        read_lines(written(tmp_path, 1, loss=value))


def sealed_lines(count=4):
    writer = LineWriter()
    return writer, [writer.line({"kind": "step", "step": step, "loss": 5.25 / (step + 1)}) for step in range(count)]


def test_the_sum_of_a_line_is_of_it_and_of_the_sum_before():
    _, (first, second, *_) = sealed_lines()
    sums: list[str] = []
    for line in (first, second):
        body = line[: line.index(', "sha256"')]
        sums.append(hashlib.sha256(("".join(sums[-1:]) + body).encode()).hexdigest()[:16])
        assert line == f'{body}, "sha256": "{sums[-1]}"}}\n'
        assert json.loads(line)["sha256"] == sums[-1]


def test_sealed_lines_come_back_without_their_sums(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(sealed_lines()[1]))
    assert read_lines(path)[1] == {"kind": "step", "step": 1, "loss": 2.625}


def test_every_changed_byte_is_refused(tmp_path):
    """Of all lines, sums included: one bit of each byte."""
    path = tmp_path / "metrics.jsonl"
    content = "".join(sealed_lines()[1]).encode()
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 7
        path.write_bytes(flipped)
        if content[place : place + 1] == b"\n" and place + 1 == len(content):
            continue  # without its end the last line is one that is being written
        with pytest.raises(TrainingError, match=r"line \d of .*metrics\.jsonl' (is not|was changed)"):
            read_lines(path)


@pytest.mark.parametrize("gone", range(3))
def test_a_missing_line_is_refused(tmp_path, gone):
    path = tmp_path / "metrics.jsonl"
    _, lines = sealed_lines()
    path.write_text("".join(lines[:gone] + lines[gone + 1 :]))
    with pytest.raises(TrainingError, match=f"line {gone + 1} of .* or lines before it are missing"):
        read_lines(path)


def test_lines_of_the_same_step_that_changed_places_are_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = LineWriter()
    one, two = (writer.line({"kind": kind, "step": 0, "nats": 1.5}) for kind in ("evaluation", "step"))
    path.write_text(two + one)
    with pytest.raises(TrainingError, match="line 1 of"):
        read_lines(path)


@pytest.mark.parametrize("kept", range(5))
def test_a_file_that_is_written_is_read_at_any_moment_and_a_cut_one_is_not(tmp_path, kept):
    path = tmp_path / "metrics.jsonl"
    writer, lines = sealed_lines()
    path.write_text("".join(lines[:kept]) + '{"kind": "st')
    assert len(read_lines(path)) == kept
    if kept < 4:
        with pytest.raises(
            TrainingError, match=f"has {kept} lines, fewer than the 4 that the run's newest checkpoint records"
        ):
            read_lines(path, beginning=writer.written)
    else:
        assert len(read_lines(path, beginning=writer.written)) == 4


def sealed_file(folder):
    path = folder / "metrics.jsonl"
    path.write_text("".join(sealed_lines()[1]))
    return path


def test_lines_of_another_file_are_not_those_of_a_checkpoint(tmp_path):
    with pytest.raises(
        TrainingError, match="has other lines than the 2 that the run's newest checkpoint records, perhaps"
    ):
        read_lines(sealed_file(tmp_path), beginning=LinesWritten(lines=2, sha256="0123456789abcdef"))


def test_lines_without_checksums_are_not_those_of_a_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "step", "step": 1}\n' * 18)
    with pytest.raises(
        TrainingError, match=r"has no checksums, and the 18 lines .* records have them; put the file back"
    ):
        read_lines(path, beginning=LinesWritten(lines=18, sha256="0123456789abcdef"))
