"""Limits of the control groups over this process, such as a container's, of versions 1 and 2 (cgroups(7)).

A group's limit holds for the groups inside it too, so those above the process's own count. ``/proc/self/cgroup`` names
the process's groups, one line a hierarchy: version 2 has one, without controllers; version 1 has one or more, each with
its controllers and its own folder.
"""

from collections.abc import Iterator
from pathlib import Path

__all__ = ["read_limits"]

ROOT, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def read_limits(controller: str, version_2: str, *version_1: str) -> Iterator[list[str]]:
    """Yield the words of a limit's files, for each group that has them: the process's, then its parents'.

    Args:
        controller: such as ``"memory"``.
        version_2: the limit's file in a group of version 2, such as ``"memory.max"``.
        version_1: the files of the same limit in version 1, such as ``"memory.limit_in_bytes"``.
    """
    try:
        lines = OWN_GROUPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # a system without control groups
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            yield from _upwards(ROOT, group, (version_2,))
        elif controller in controllers.split(","):
            yield from _upwards(ROOT / controller, group, version_1)


def _upwards(root: Path, group: str, files: tuple[str, ...]) -> Iterator[list[str]]:
    """Words of one hierarchy; in a container its group may be the root, without a folder of the group's name."""
    process_group = root / group.lstrip("/")
    for folder in (process_group, *process_group.parents):
        if folder.is_relative_to(root):
            try:
                texts = [(folder / file).read_text(encoding="ascii") for file in files]
            except OSError:  # no such limit, or one that this process may not read
                continue
            yield " ".join(texts).split()
