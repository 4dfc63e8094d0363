"""Limits of control groups of both versions, from the process's own group upwards."""

import pytest

from octavo.control_groups import read_limits


def limits() -> list[list[str]]:
    return list(read_limits("cpu", "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"))


@pytest.mark.parametrize(
    ("own", "files", "found"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, [["max", "100000"]]),
        ("0::/a/b\n", {"a/b/cpu.max": "1 2\n", "a/cpu.max": "3 4\n", "a/c/cpu.max": "5 6\n"}, [["1", "2"], ["3", "4"]]),
        ("0::/a:b\n", {"a:b/cpu.max": "1 2\n"}, [["1", "2"]]),
        ("0::/outside/the/container\n", {"cpu.max": "1 2\n"}, [["1", "2"]]),
        ("0::/../beside\n", {"cpu.max": "1 2\n"}, [["1", "2"]]),
        ("0::/\n", {"memory.max": "1\n"}, []),
        ("4:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "2\n"}, [["-1", "2"]]),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n"}, []),
        ("3:cpuset:/\n2:name=cpu:/\n", {"cpu/cpu.cfs_quota_us": "1", "cpu/cpu.cfs_period_us": "2"}, []),
        ("", {"cpu.max": "1 2\n"}, []),
    ],
)
def test_limits_include_parent_groups(groups, own, files, found):
    groups(own, files)
    assert limits() == found


def test_no_limits_without_control_groups(groups):
    assert limits() == []


def test_unreadable_limit_is_skipped(groups, tmp_path):
    groups("0::/a\n", {"cpu.max": "1 2\n"})
    (tmp_path / "groups" / "a" / "cpu.max").mkdir(parents=True)
    assert limits() == [["1", "2"]]
