"""Reductions that Triton lowers wrongly, read off its own code for GPUs (TTGIR).

A reduction exchanges numbers between the lanes that differ along its axis. Triton up to 3.7 takes those for neighbors:
it counts the lanes' bits that move along the axis, and shuffles as many after the first. Where a reshape has put a bit
that moves nowhere between two that do, the numbers behind it are left out (triton-lang/triton, pull request 9219):

    #linear = #ttg.linear<{register = [[1]], lane = [[2], [4], [0], [0], [8]], ...}>    bits 0 to 2, not 0, 1 and 4
"""

import json
import re

_LINEAR = re.compile(r"^(#\w+) = #ttg\.linear<\{.*?lane = (\[.*?\]), warp", re.MULTILINE)
_REDUCTION = re.compile(
    r'"tt\.reduce"\(.*?<\{axis = (\d+) : i32.*?^ *\}\) : \(tensor<[^#]*(#[^\n]*?)>[,)]', re.MULTILINE | re.DOTALL
)
_SLICE = re.compile(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>")


def with_gaps(ttgir: str) -> list[str]:
    """Layouts of what is reduced along an axis whose lanes are not neighbors.

    Only a reshape makes such layouts, and they are all written as "linear": in a blocked one, or a slice of it, the
    lanes of an axis are neighbors.
    """
    lanes = {name: json.loads(bases) for name, bases in _LINEAR.findall(ttgir)}
    found = []
    for axis, layout in _REDUCTION.findall(ttgir):
        along, parent = int(axis), layout
        while sliced := _SLICE.fullmatch(parent):
            dim, parent = int(sliced[1]), sliced[2]
            along += dim <= along
        moves = "".join("x" if basis[along] else "." for basis in lanes.get(parent, []))
        if "." in moves.strip("."):
            found.append(f"{layout}: {moves}")
    return found
