"""How rows write numbers and settings: "8,192", "8k", "2^13"; "VP 5", "VP=5", "VP: 5"; "no LoRA", "LoRA off"."""

import re

from octavo.errors import ConfigError

__all__ = ["as_plain_numbers", "numbers_of", "says", "setting"]

NUMBER = r"(?<![\d.,])(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
UNIT = r"(?: (gpus?|tokens|sequences|seqs|samples))?"
SEQUENCES = ("sequences", "seqs", "samples")
UNITS = {"gpus": ("gpus", "gpu"), "seq": ("tokens",), "global_batch": SEQUENCES, "micro_batch": SEQUENCES}
UNITS |= dict.fromkeys(("tp", "pp", "cp"), UNITS["gpus"])
NO_BEFORE = re.compile(r"(?:\b(?:no|not|non|without|w/o|never))[ -]+$")
NO_AFTER = re.compile(r"[ =:(]*(?:off|disabled|false|none|not (?:used|timed|included)|0(?![\d.]))\b")


DIRECTION = r"(?:in|out|isl|osl)(?:put)?"


def numbers_of(column: str, text: str) -> list[float]:
    """Return the numbers of a cell: "8192", "8,192", "8k" (of 1,024), "128/256", "in 1024 out 128", "64 GPUs".

    Lengths that are named are returned in the order of input and output. "64,128" is two numbers, since the second is
    the first one doubled.

    Raises:
        ConfigError: a part is not a number, or has the unit of another column.

    Example:
        >>> numbers_of("seq", "1k/8,192"), numbers_of("gpus", "16 (2 nodes)"), numbers_of("gpus", "64,128")
        ([1024.0, 8192.0], [16.0], [64.0, 128.0])
        >>> numbers_of("seq", "OSL 128, ISL 1024")
        [1024.0, 128.0]
    """
    plain = re.sub(r"\([^)]*\)", "", text.lower())
    plain = re.sub(r"(?<![\d,.])(\d{1,3}),(\d{3})(?![\d,])", _as_list, plain)
    cells = re.split(rf"/|\+|,(?= )|(?<=[\dk]) +(?={DIRECTION}[ =:]*\d)", plain)
    pattern = rf"\s*({DIRECTION})?[ =:]*({NUMBER}) ?(k?){UNIT} *({DIRECTION})?\s*"
    matches = [match for cell in cells if (match := re.fullmatch(pattern, cell))]
    if len(matches) < len(cells):
        raise ConfigError(f"{column} {text.strip()[:40]!r} is not a number such as 8192, 8,192, 8k, or 128/256")
    of_column = UNITS.get(column, ())
    wrong = next((match[4] for match in matches if match[4] and match[4] not in of_column), None)
    if wrong:
        allowed = f"give {of_column[0]}" if of_column else "give a number alone"
        raise ConfigError(f"{column} {text.strip()[:40]!r} is in {wrong}; {allowed}")
    matches.sort(key=lambda match: (match[1] or match[5] or "").startswith("o"))
    return [float(match[2].replace(",", "")) * (1024 if match[3] else 1) for match in matches]


def _as_list(match: re.Match[str]) -> str:
    first, second = int(match[1]), int(match[2])
    return f"{first}/{second}" if second in (2 * first, 4 * first) else match[0]


def as_plain_numbers(text: str) -> str:
    """Return a text whose numbers are digits alone.

    Example:
        >>> as_plain_numbers("M=16,384 N=8k K=2^13 batch=1e3")
        'M=16384 N=8192 K=8192 batch=1000'
    """
    text = re.sub(r"\b(\d{1,2})\^(\d{1,2})(?![\d^])", lambda match: str(int(match[1]) ** int(match[2])), text)
    return re.sub(rf"{NUMBER}([kK]\b)?", _plain, text)


def _plain(match: re.Match[str]) -> str:
    number = match[0].rstrip("kK").replace(",", "")
    if not match[1] and "e" not in number:
        return number
    value = float(number) * (1024 if match[1] else 1)
    return str(int(value)) if value == value // 1 < 1e15 else match[0]


def setting(text: str, name: str, default: int = 0) -> int:
    """Return the number of a setting; the default if there is none.

    Example:
        >>> [setting(text, "vpp?") for text in ("vp 5; ep 8", "vpp=4", "vp: 2", "vp n/a")]
        [5, 4, 2, 0]
    """
    match = re.search(rf"\b(?:{name})(?:[ -]size)? ?[=:]? ?(\d+)\b", text)
    return int(match[1]) if match and int(match[1]) else default


def says(text: str, words: str) -> bool | None:
    """Return whether a text says what a pattern matches, denies it, or is silent (None).

    Example:
        >>> says("tp; lora", "lora"), says("no lora", "lora"), says("lora off", "lora"), says("full", "lora")
        (True, False, False, None)
    """
    found = None
    for match in re.finditer(words, text):
        if not (NO_BEFORE.search(text[: match.start()]) or NO_AFTER.match(text[match.end() :])):
            return True
        found = False
    return found
