"""metrics.jsonl: whole lines, cut at the right place, readable after a kill."""

import builtins
import json
import shutil
import threading

import pytest

from octavo.errors import TrainingError
from octavo.training.metrics import METRICS, MetricsLog, read_metrics


def write_steps(folder, steps, *, after_step=None):
    log = MetricsLog(folder, after_step=after_step)
    for step in steps:
        log.write("step", step, loss=1 / 3 / step, lr=0.1, grad_norm=2.0)
        log.write("evaluation", step, nats=2 / 3 / step, perplexity=1.5)
    log.close()


def test_values_round_trip_bit_for_bit(tmp_path):
    write_steps(tmp_path, [1, 7])
    lines = read_metrics(tmp_path)
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("step", 1), ("evaluation", 1), ("step", 7), ("evaluation", 7),
    ]  # fmt: skip
    assert lines[2]["loss"] == 1 / 3 / 7


def test_every_line_is_on_disk_before_the_next(tmp_path):
    log = MetricsLog(tmp_path, after_step=None)
    log.write("step", 1, loss=1.0, lr=0.1, grad_norm=2.0)
    assert json.loads((tmp_path / METRICS).read_text())["loss"] == 1.0
    log.close()


@pytest.mark.parametrize(("after_step", "kept"), [(2, [1, 1, 2, 2]), (0, []), (None, [])])
def test_resume_removes_lines_after_the_checkpoint(tmp_path, after_step, kept):
    write_steps(tmp_path, [1, 2, 3])
    MetricsLog(tmp_path, after_step=after_step).close()
    assert [line["step"] for line in read_metrics(tmp_path)] == kept


def test_incomplete_last_line_is_skipped(tmp_path):
    write_steps(tmp_path, [1])
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"kind": "step", "st')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 1]


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"loss": 1}'])
def test_damaged_line_elsewhere_is_refused(tmp_path, line):
    write_steps(tmp_path, [1])
    with (tmp_path / METRICS).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(TrainingError, match="line 3"):
        read_metrics(tmp_path)


def test_no_file_is_no_lines(tmp_path):
    assert read_metrics(tmp_path) == []


def test_tensorboard_holds_the_same_curve(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed; there are no events to read")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_steps(tmp_path, [1, 2])
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("step/loss")] == [
        (1, pytest.approx(1 / 3)),
        (2, pytest.approx(1 / 6)),
    ]
    assert [e.step for e in events.Scalars("evaluation/nats")] == [1, 2]


def remove(folder):
    """Remove a folder that another thread may be writing a file into."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


def test_missing_tensorboard_is_reported(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args):
        if name == "torch.utils.tensorboard":
            raise ModuleNotFoundError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    said: list[str] = []
    log = MetricsLog(tmp_path, after_step=None, on_notice=said.append)
    assert said == ["TensorBoard events are not written; install octavo[report] to get them"]
    log.write("step", 1, loss=1.0, lr=0.1, grad_norm=2.0)
    log.close()
    assert len(read_metrics(tmp_path)) == 1


def removed(folder):
    remove(folder)


def full(folder):
    """A file where the folder was takes no events, as a full disk takes none."""
    remove(folder)
    folder.write_text("")


@pytest.mark.parametrize("spoil", [removed, full])
@pytest.mark.parametrize("when", ["at first", "in between", "at the end"])
def test_failing_events_are_reported_once_and_lines_continue(tmp_path, capfd, spoil, when):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed; there are no events to write")
    said: list[str] = []
    if when == "at first":
        (tmp_path / "tensorboard").write_text("")
    log = MetricsLog(tmp_path, after_step=None, on_notice=said.append)
    for step in range(1, 200):
        if step == {"at first": 0, "in between": 5, "at the end": 199}[when]:
            spoil(tmp_path / "tensorboard")  # before a line, since events that are on disk already cannot fail
        log.write("step", step, loss=1.0, lr=0.1, grad_norm=2.0)
    log.close()
    (sentence,) = said
    assert sentence.startswith("TensorBoard events are no longer written (")
    assert sentence.endswith("); metrics.jsonl has every number")
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 200))
    assert capfd.readouterr().err == "", "no traceback of the writer's thread"


def test_another_threads_error_is_still_shown(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(threading, "excepthook", lambda args: shown.append(args.exc_type))
    log = MetricsLog(tmp_path, after_step=None)
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    log.close()
    assert shown == [ZeroDivisionError]
