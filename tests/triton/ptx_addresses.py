"""What a kernel's machine code makes of its arguments, read off its PTX: what it writes to, and how wide products are.

An address is a register; what it was made from is followed back to the arguments, of which one is a pointer. Triton's
interpreter runs one program after the other, so it cannot tell an atomic operation from a load and a store. Nor has it
room for a tensor whose elements are too many for an int32, in which a row times a stride would be another row's place.
"""

import re
from collections import defaultdict
from collections.abc import Iterator

_LINE = re.compile(r"(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+(.*);")
_REGISTER = re.compile(r"%[a-z]+\d+")
_ARGUMENT = re.compile(r"_param_(\d+)\]")
_ADDRESS = re.compile(r"\[\s*(%rd\d+)")
_NARROW_PRODUCT = re.compile(r"(?:mul|mad)\.lo\.[su]32$")


def written(ptx: str, signature: dict[str, str]) -> dict[str, list[str]]:
    """The pointers that are written to, each with the operations: ``store`` or an atomic one, such as ``max.s32``.

    For an address that is made from none, but from what was loaded, it is the pointer to where that was.

    Args:
        ptx: of one kernel.
        signature: its arguments' names and Triton's types of them.
    """
    names = _parameters(signature)
    made_from, loaded_from, writes = _read(ptx)
    found: dict[str, set[str]] = defaultdict(set)

    def pointers(register: str, origins: dict[str, set[str]]) -> set[str]:
        arguments = {names[int(each)] for each in _ancestors(register, origins) if each.isdigit()}
        return {name for name in arguments if signature.get(name, "").startswith("*")}

    for register, operation in writes:
        [pointer] = pointers(register, made_from) or pointers(register, loaded_from)
        found[pointer].add(operation)
    return {pointer: sorted(operations) for pointer, operations in found.items()}


def narrow_factors(ptx: str, signature: dict[str, str]) -> dict[str, list[str]]:
    """The pointers to whose places 32-bit products lead, each with the arguments by which those multiply.

    Sizes and strides, or powers of two times them: of such a product 32 bits are kept, too few for a place in a tensor
    of 2^31 elements or more. Products with constants and quotients are not looked at, nor sums.
    """
    names = _parameters(signature)
    made_from, _, _ = _read(ptx)
    narrow, addresses = _narrow_products(ptx, names)
    found: dict[str, set[str]] = defaultdict(set)
    for address in addresses:
        known = _ancestors(address, made_from)
        factors = {factor for register in known & narrow.keys() for factor in narrow[register]}
        for name in {names[int(each)] for each in known if each.isdigit()}:
            if factors and signature.get(name, "").startswith("*"):
                found[name] |= factors
    return {pointer: sorted(factors) for pointer, factors in found.items()}


def _narrow_products(ptx: str, names: list[str]) -> tuple[dict[str, set[str]], set[str]]:
    """Registers that hold 32-bit products, with the arguments among their factors; and all addresses of memory."""
    held: dict[str, str] = {}
    products: dict[str, set[str]] = defaultdict(set)
    addresses = set()
    for operation, operands in _instructions(ptx):
        to, *others = map(str.strip, operands.split(","))
        if operation.startswith("ld.param"):
            held[to] = names[int(_ARGUMENT.findall(operands)[0])]
        elif operation.startswith(("mov.", "shl.")) and others[0] in held:
            held[to] = held[others[0]]
        elif _NARROW_PRODUCT.match(operation):
            products[to] |= {held[factor] for factor in others[:2] if factor in held}
        elif "global" in operation:
            addresses |= set(_ADDRESS.findall(operands))
    return products, addresses


def _parameters(signature: dict[str, str]) -> list[str]:
    """The argument that each parameter belongs to: a tensor descriptor has its sizes and strides beside itself."""
    names = []
    for name, type_ in signature.items():
        dimensions = type_.count(",") + 1 if type_.startswith("tensordesc") else 0
        names += [name] * (0 if type_ == "constexpr" else 1 + 2 * dimensions)
    return [*names, "memory for descriptors", "memory for a profiler"]  # Triton's own, last


def _instructions(ptx: str) -> Iterator[tuple[str, str]]:
    """Operations with their operands."""
    for line in map(str.strip, ptx.splitlines()):
        match = _LINE.match(line)
        if match is not None:
            yield match[1], match[2]


def _read(ptx: str) -> tuple[dict[str, set[str]], dict[str, set[str]], list[tuple[str, str]]]:
    """What every register is made from, registers and numbers of arguments; and where what is done to memory.

    The second is the first with the addresses that registers were loaded from.
    """
    made_from: dict[str, set[str]] = defaultdict(set)
    loads: dict[str, set[str]] = defaultdict(set)
    writes = []
    for operation, operands in _instructions(ptx):
        if operation.startswith(("st.global", "atom.global", "red.global")):
            address = _ADDRESS.search(operands)
            assert address, operands
            kind = "store" if operation.startswith("st.") else ".".join(operation.split(".")[-2:])
            writes.append((address[1], kind))
        elif operation.startswith("ld.param"):
            made_from[_REGISTER.findall(operands)[0]] |= set(_ARGUMENT.findall(operands))
        elif operation.startswith("ld.global"):
            address = _ADDRESS.search(operands)
            assert address, operands
            for register in _REGISTER.findall(operands[: address.start()]):
                loads[register].add(address[1])
        elif not operation.startswith(("ld.", "st.", "bra")):  # what is loaded is data
            first, *others = _REGISTER.findall(operands) or [""]
            made_from[first] |= set(others)
    loaded_from = defaultdict(set, {to: made_from[to] | loads[to] for to in made_from.keys() | loads.keys()})
    return made_from, loaded_from, writes


def _ancestors(register: str, made_from: dict[str, set[str]]) -> set[str]:
    known, waiting = {register}, [register]
    while waiting:
        further = made_from[waiting.pop()] - known
        known |= further
        waiting += further
    return known
