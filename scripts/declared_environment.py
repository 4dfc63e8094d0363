"""Link into a virtual environment the distributions that others declare as their dependencies, and nothing else.

A wheel tried beside every package of a developer's environment does not show an import that its METADATA forgot.
Here the environment gets, as links to this interpreter's files, the named distributions and the closure of what they
require: what pip would install, without the network.

    python scripts/declared_environment.py VENV "octavo" pytest "octavo[report]"

A named distribution that VENV itself has installed (octavo, from the wheel) is read there.
"""

import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def by_name(*paths: str) -> dict[str, Distribution]:
    """Installed distributions in these folders; the first of a name counts."""
    found: dict[str, Distribution] = {}
    for one in distributions(path=list(paths)):
        found.setdefault(canonicalize_name(one.metadata["Name"]), one)
    return found


def required(distribution: Distribution, extras: set[str]) -> Iterator[Requirement]:
    """Requirements that hold on this machine, with these extras."""
    for text in distribution.requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in (extras or {""})):
            yield requirement


def closure(names: list[str], known: dict[str, Distribution]) -> dict[str, Distribution]:
    """Named distributions and, transitively, what they require.

    Raises:
        SystemExit: one is not installed, or has a version that is not allowed.
    """
    found: dict[str, Distribution] = {}
    seen = set[tuple[str, frozenset[str]]]()
    pending = [Requirement(name) for name in names]
    while pending:
        requirement = pending.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        distribution = known.get(name)
        if distribution is None:
            sys.exit(f"{requirement} is required and not installed here")
        if not requirement.specifier.contains(distribution.version, prereleases=True):
            sys.exit(f"{requirement} is required, and {distribution.version} is installed here")
        found[name] = distribution
        pending += required(distribution, set(extras))
    return found


def link(distribution: Distribution, folder: Path) -> None:
    """Link the files of a distribution that lie in its site-packages; scripts and data outside are left out."""
    for file in distribution.files or ():
        if file.parts[0] == ".." or file.is_absolute():
            continue
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            target.symlink_to(Path(str(distribution.locate_file(file))).resolve())


def main(venv: str, *names: str) -> None:
    """Link the closure of ``names`` into ``venv``, and print its size."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folder = Path(venv) / "lib" / version / "site-packages"
    inside = by_name(str(folder))
    found = closure(list(names), {**by_name(*sys.path), **inside})
    for name, distribution in found.items():
        if name not in inside:
            link(distribution, folder)
    print(f"{venv}: {len(found)} distributions of {', '.join(names)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
