"""Which of a kernel's arguments its machine code writes to, and whether atomically: read off its PTX.

An address is a register; what it was made from is followed back to the arguments, of which one is a pointer. Triton's
interpreter runs one program after the other, so it cannot tell an atomic operation from a load and a store.
"""

import re
from collections import defaultdict

_LINE = re.compile(r"(?:@!?%p\d+\s+)?([a-z][\w.]*)\s+(.*);")
_REGISTER = re.compile(r"%[a-z]+\d+")
_ARGUMENT = re.compile(r"_param_(\d+)\]")
_WRITTEN_AT = re.compile(r"\[\s*(%rd\d+)")


def written(ptx: str, signature: dict[str, str]) -> dict[str, list[str]]:
    """The pointers that are written to, each with the operations: ``store`` or an atomic one, such as ``max.s32``.

    Args:
        ptx: of one kernel.
        signature: its arguments' names and Triton's types of them.
    """
    names = [name for name, type_ in signature.items() if type_ != "constexpr"]
    made_from, writes = _read(ptx)
    found: dict[str, set[str]] = defaultdict(set)
    for register, operation in writes:
        numbers = _arguments(register, made_from)
        [pointer] = {names[number] for number in numbers if signature[names[number]].startswith("*")}
        found[pointer].add(operation)
    return {pointer: sorted(operations) for pointer, operations in found.items()}


def _read(ptx: str) -> tuple[dict[str, set[str]], list[tuple[str, str]]]:
    """What every register is made from, registers and numbers of arguments; and where what is done to memory."""
    made_from: dict[str, set[str]] = defaultdict(set)
    writes = []
    for line in map(str.strip, ptx.splitlines()):
        match = _LINE.match(line)
        if match is None:
            continue
        operation, operands = match.groups()
        if operation.startswith(("st.global", "atom.global", "red.global")):
            address = _WRITTEN_AT.search(operands)
            assert address, line
            kind = "store" if operation.startswith("st.") else ".".join(operation.split(".")[-2:])
            writes.append((address[1], kind))
        elif operation.startswith("ld.param"):
            made_from[_REGISTER.findall(operands)[0]] |= set(_ARGUMENT.findall(operands))
        elif not operation.startswith(("ld.", "st.", "bra")):  # what is loaded is data
            first, *others = _REGISTER.findall(operands) or [""]
            made_from[first] |= set(others)
    return made_from, writes


def _arguments(register: str, made_from: dict[str, set[str]]) -> set[int]:
    known, waiting = {register}, [register]
    while waiting:
        further = made_from[waiting.pop()] - known
        known |= further
        waiting += further
    return {int(each) for each in known if each.isdigit()}
