"""Copies of a run's numbers to other libraries' loggers, with those that are installed and with a recording one."""

import importlib
import sys
from types import SimpleNamespace

import pytest

from octavo.errors import ConfigError
from octavo.training.config import TrainingConfig
from octavo.training.metric_writers import MetricWriters, check_loggers
from octavo.training.metrics import MetricsLog, read_metrics


def recording(calls, *names):
    def record(name):
        return lambda *args, **kwargs: calls.append((name, args, kwargs))

    return SimpleNamespace(**{name: record(name) for name in names})


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_numbers_reach_a_project_logger_once_each(tmp_path, monkeypatch, name):
    calls: list[tuple] = []
    monkeypatch.setitem(sys.modules, name, recording(calls, "init", "log", "finish"))
    log = MetricsLog(tmp_path, after_step=None, loggers=(name,), config={"training.steps": 1})
    log.write("step", 1, loss=2.0, lr=0.1, grad_norm=3.0)
    log.write("failure", 2, loss=None)  # no curve, so no numbers
    log.close()
    assert calls == [
        ("init", (), {"project": "octavo", "name": tmp_path.name, "config": {"training.steps": 1}}),
        ("log", ({"step/loss": 2.0, "step/lr": 0.1, "step/grad_norm": 3.0},), {"step": 1}),
        ("finish", (), {}),
    ]
    assert not (tmp_path / "tensorboard").exists()


def test_logger_that_fails_is_reported_once_and_lines_continue(tmp_path, monkeypatch):
    def fail(*_args, **_kwargs):
        raise ConnectionError("no network\nand more")

    calls: list[tuple] = []
    library = recording(calls, "init", "finish")
    library.log = fail
    monkeypatch.setitem(sys.modules, "wandb", library)
    notices: list[str] = []
    log = MetricsLog(tmp_path, after_step=None, loggers=("wandb",), on_notice=notices.append)
    for step in (1, 2):
        log.write("step", step, loss=2.0, lr=0.1, grad_norm=3.0)
    log.close()
    assert notices == ["wandb receives no more numbers (no network); metrics.jsonl has every number"]
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_library_that_cannot_be_imported_is_reported_once_and_lines_continue(tmp_path, monkeypatch):
    (tmp_path / "site/wandb").mkdir(parents=True)
    (tmp_path / "site/wandb/__init__.py").write_text("raise ImportError('built for another numpy\\nand more')")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    notices: list[str] = []
    check_loggers(("wandb",))
    log = MetricsLog(tmp_path, after_step=None, loggers=("wandb",), on_notice=notices.append)
    log.write("step", 1, loss=2.0, lr=0.1, grad_norm=3.0)
    log.close()
    assert notices == ["wandb receives no more numbers (built for another numpy); metrics.jsonl has every number"]
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]


def test_missing_library_is_one_sentence(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"^logging to mlflow needs its package; pip install mlflow, or leave"):
        check_loggers(("tensorboard", "mlflow"))


def test_unknown_logger_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"training\.log must be one of tensorboard, wandb, mlflow, trackio"):
        TrainingConfig(log=("tensorbord",))


def test_wandb_offline_leaves_a_run_to_sync(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    notices: list[str] = []
    writers = MetricWriters(("wandb",), run_dir=tmp_path, config={"training.steps": 1}, on_notice=notices.append)
    writers.write(1, {"step/loss": 2.0})
    writers.close()
    assert notices == []
    (record,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"step/loss" in record.read_bytes()
