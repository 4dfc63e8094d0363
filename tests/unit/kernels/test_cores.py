"""Cores that a process may use: its affinity, and the quotas of control groups of both versions."""

import os

import pytest

from octavo.kernels.cores import allowed_cores, quota_cores, usable_cores


@pytest.mark.parametrize(
    ("own", "files", "found"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "10000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "100000 50000\n", "a/cpu.max": "300000 100000\n"}, 2),
        (
            "4:cpu,cpuacct:/a\n1:memory:/\n",
            {"cpu/a/cpu.cfs_quota_us": "400000", "cpu/a/cpu.cfs_period_us": "100000"},
            4,
        ),
        ("4:cpu,cpuacct:/a\n0::/\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, None),
        ("3:cpuset:/\n", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_the_smallest_quota_above_a_process_counts(groups, own, files, found):
    groups(own, files)
    assert quota_cores() == found


def test_no_quota_where_the_system_knows_no_groups(groups):
    assert quota_cores() is None


@pytest.mark.parametrize(("quota", "found"), [("100000 100000", 1), ("900000 100000", 3), ("max 100000", 3)])
def test_usable_cores_are_those_of_the_affinity_and_no_more_than_are_paid_for(monkeypatch, groups, quota, found):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 4, 7}, raising=False)
    groups("0::/\n", {"cpu.max": quota})
    assert (allowed_cores(), usable_cores()) == ({1, 4, 7}, found)


def test_every_core_counts_where_the_system_knows_no_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert allowed_cores() == {0, 1, 2, 3, 4}
