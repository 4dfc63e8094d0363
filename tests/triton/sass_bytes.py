"""Where the bytes that a kernel stores come from, read off its machine code (SASS).

ptxas may assemble correct PTX wrongly: where pairs of FP8 codes are in 16-bit registers, release 12.8 stores bytes of
registers that the codes reach only later, or never. So every byte is followed back from its store, on all paths,
through the instructions that only move bytes. The first other instruction is its origin, of one of these kinds:

    code        a conversion to FP8, F2FP.SATFINITE
    loaded      a load of a byte, or of any width from shared memory: the store that put it there is followed by itself
    exponent    a shift by 23, which brings down the exponent of an FP32 number: a scale of MXFP8, E8M0
    0x7f        a constant in the instruction, here NaN; 0x7c is infinity in E5M2, its sign is not followed
    FMUL, ...   the operation's name: a number, a part of an address; or "unwritten"
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@\S+)?\s*([A-Z][\w.]*)\s*(.*?)\s*;")
_PREDICATE = re.compile(r"!?U?P")
_NO_RESULT = re.compile(r"[FIDH]SETP|PLOP3|FCHK|R2P|ST|RED|BAR|BRA|CALL|RET|EXIT")
_TWO_REGISTERS = re.compile(r"\.64|WIDE|^CS2R|^D[A-Z]|^[FI]2[FI]\.[FUS]64")
_FOUR_REGISTERS = re.compile(r"\.128|\.4$")
_WIDTHS = {"U8": 1, "U16": 2, "64": 8, "2": 8, "128": 16, "4": 16}  # of a store, in bytes; all others: 4

_Byte = tuple[str, int]  # an operand, and which byte of it: 0 is the lowest
_Origin = tuple[str, int, int]  # kind, index of the instruction, byte of its result


class _Instruction(NamedTuple):
    guard: str | None  # @P0: it may do nothing
    operation: str
    operands: list[str]

    def results(self) -> set[str]:
        """Registers that it writes."""
        register = next((each for each in self.operands[:2] if not _PREDICATE.match(each)), "")
        if _NO_RESULT.match(self.operation) or not re.match(r"R\d", register):
            return set()
        count = 4 if _FOUR_REGISTERS.search(self.operation) else 2 if _TWO_REGISTERS.search(self.operation) else 1
        return set(_registers(register, count))

    def moved(self, byte: int) -> list[_Byte]:
        """Bytes of operands, one of which becomes this byte of the result; none if that is computed."""
        _, *inputs = [each for each in self.operands if not _PREDICATE.match(each)]
        number = int(inputs[1], 16) if len(inputs) > 1 and inputs[1].startswith("0x") else None
        moved: list[_Byte] = []
        match self.operation.split("."):
            case ["F2FP", "SATFINITE", *_] if byte > 1:  # two codes; above them the lower half of the third operand
                moved = [(inputs[2], byte - 2)]
            case ["MOV", *_] | ["IMAD", "MOV", *_]:
                moved = [(inputs[-1], byte)]
            case ["SEL"]:
                moved = [(each, byte) for each in inputs]
            case ["SHFL", *_]:  # the same register of another thread
                moved = [(inputs[0], byte)]
            case ["SGXT", *_] if number and 8 * byte < number:
                moved = [(inputs[0], byte)]
            case ["PRMT"] if number is not None:
                place = number >> 4 * byte & 15  # 0 to 3: of the first operand; 4 to 7: of the third
                moved = [(inputs[place // 4 * 2], place % 4)] if place < 8 else []
            case ["LOP3", "LUT"] if number and inputs[2:4] == ["RZ", "0xc0"]:  # a and b
                mask = number >> 8 * byte & 255
                moved = {255: [(inputs[0], byte)], 0: [("RZ", byte)]}.get(mask, [])
            case ["SHF", "R", *_] if inputs[0] == "RZ" and number in (8, 16, 24) and byte + number // 8 < 4:
                moved = [(inputs[2], byte + number // 8)]
        return moved

    def kind(self, byte: int) -> str:
        """What a byte that it computes is."""
        if self.operation.startswith("F2FP.SATFINITE"):
            return "code"
        if self.operation.startswith(("LDS", "LDG.E.U8")):
            return "loaded"
        if self.operation.startswith("SHF.R") and self.operands[2] == "0x17":
            return "exponent"
        match self.operation, self.operands:
            case "LOP3.LUT", [_, _, constant, "RZ", "0xfc", *_] if constant.startswith(
                "0x"
            ):  # a register or a constant
                return _constant(constant, byte)
        return self.operation


def _registers(first: str, count: int) -> list[str]:
    return [first if first == "RZ" else f"R{int(first[1:]) + each}" for each in range(count)]


def _constant(operand: str, byte: int) -> str:
    """The kind of a byte of an operand that is no register."""
    return hex(int(operand, 16) >> 8 * byte & 255) if operand.startswith("0x") else operand


class _Code:
    """Instructions, and for each the registers that it writes and which may run just before it."""

    def __init__(self, sass: str) -> None:
        lines = list(filter(None, map(_LINE.search, sass.replace(".reuse", "").splitlines())))
        at = {int(line[1], 16): index for index, line in enumerate(lines)}
        self.instructions = [_Instruction(line[2], line[3], line[4].split(", ")) for line in lines]
        self.results = [instruction.results() for instruction in self.instructions]
        self.before: list[list[int]] = [[] for _ in [*lines, "end"]]
        for index, (guard, operation, operands) in enumerate(self.instructions):
            conditional = guard or len(operands) > 1
            if conditional or not re.match("BRA|EXIT|RET", operation):
                self.before[index + 1].append(index)
            if operation.startswith(("BRA", "BRX", "JM")):  # an address that a register holds is an error here
                self.before[at[int(operands[-1], 16)]].append(index)
            if operation.startswith("CALL"):
                self.results[index] = self._function_results(at[int(operands[-1], 16)])

    def _function_results(self, start: int) -> set[str]:
        end = next(
            index for index in range(start, len(self.results)) if self.instructions[index].operation[:3] == "RET"
        )
        return set().union(*self.results[start:end])

    def converted(self) -> list[_Origin]:
        conversions = [index for index, each in enumerate(self.instructions) if each.kind(0) == "code"]
        return [("code", index, byte) for index in conversions for byte in (0, 1)]

    def origins(self, index: int, register: str, byte: int) -> Iterator[_Origin]:
        """What may have made a byte of a register that an instruction reads."""
        waiting, known = [(index, register, byte)], set()
        while waiting:
            place = index, register, byte = waiting.pop()
            if place in known:
                continue
            known.add(place)
            if not re.match(r"R\d", register):
                yield _constant(register, byte), 0, 0
                continue
            if index == 0:
                yield "unwritten", 0, 0
            for earlier in self.before[index]:
                instruction, writes = self.instructions[earlier], register in self.results[earlier]
                moved = instruction.moved(byte) if writes else []
                waiting += [(earlier, *source) for source in moved]
                if not writes or instruction.guard:
                    waiting.append((earlier, register, byte))
                if writes and not moved:
                    yield instruction.kind(byte), earlier, byte


def stored(sass: str) -> tuple[dict[str, int], dict[int, int]]:
    """Kinds of the bytes that are stored singly, counted; and by how often they are stored, the numbers of codes.

    A thread stores each of its codes once for every matrix that it writes, so all codes equally often. This covers the
    stores of words too, whose bytes of other kinds may be numbers.
    """
    code = _Code(sass)
    kinds: Counter[str] = Counter()
    times: Counter[_Origin] = Counter(dict.fromkeys(code.converted(), 0))
    for index, (_, operation, operands) in enumerate(code.instructions):
        if operation.startswith(("STS", "STG")):
            width = next((_WIDTHS[word] for word in operation.split(".") if word in _WIDTHS), 4)
            bytes_ = [(register, byte) for register in _registers(operands[-1], -(-width // 4)) for byte in range(4)]
            found = [origin for place in bytes_[:width] for origin in code.origins(index, *place)]
            times.update(origin for origin in found if origin in times)
            kinds.update(kind for kind, *_ in found if width == 1)
    return dict(kinds), dict(Counter(times.values()))
