"""Profile of an engine: what it computes for a decoder's linear layers and its cache, and how that is known.

Every property has a :class:`Source`: the project's file that says so, and the test that runs the project's own code and
compares, bit for bit; it proves a property whose every other value it would notice. All others are "read, not run"
wherever they are shown. Kernels for GPUs that run under Triton's interpreter, and PyTorch operations that are compiled
for a CPU here and for a GPU in the engine, prove what IEEE arithmetic gives: a GPU's division and logarithm may differ
in the last bit, so that the properties that rest on them are not proven there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum

import torch

from octavo.errors import ConfigError
from octavo.numerics import Accumulate
from octavo.numerics.engine_cast import EngineCast
from octavo.numerics.granularity import granularity_in_words

__all__ = [
    "COMPILED",
    "GIVEN_SCALE",
    "INTERPRETED",
    "NOT_RUN",
    "EngineProfile",
    "Products",
    "Source",
    "limited",
    "not_run",
    "properties_of",
    "source_of",
]

GIVEN_SCALE = (  # properties that a scale from elsewhere leaves without effect
    "amax_of",
    "amax_floor",
    "division",
    "divided_in",
    "scale_floor",
    "power_of_two",
    "scale_format",
    "zero_scale",
    "zero_amax",
    "zero_encode",
    "infinite_encode",
    "nonfinite_scale",
)
NOT_RUN = "read, not run"
COMPILED = f"compiled for a CPU; on a GPU {NOT_RUN}"
INTERPRETED = f"under Triton's interpreter; on a GPU {NOT_RUN}"


class Products(StrEnum):
    """Operands of an engine's GEMM."""

    CODES = "codes; the scales multiply sums"
    DECODED = "decoded operands, in the activations' dtype"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a property comes from.

    Attributes:
        project: name of the project.
        version: its release; "main" is a file of its repository that no package has.
        file: path in the project.
        test: test that runs the project's code; "" if the file was only read.
        limit: how the test runs the code, such as :data:`INTERPRETED`, where a GPU may compute other last bits; "" if
            the test proves the property.
    """

    project: str
    version: str
    file: str
    test: str = ""
    limit: str = ""

    @property
    def proof(self) -> str:
        """The test, with what limits it, or :data:`NOT_RUN`."""
        return f"{self.test} {self.limit}".rstrip() if self.test else NOT_RUN

    @property
    def is_proven(self) -> bool:
        """Whether a test proves the property on the engine's own hardware."""
        return bool(self.test) and not self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """Computation of an engine.

    Attributes:
        name: on the command line.
        engine: name in sentences, with the mode.
        sources: source of each property by name or by the beginning of its name up to a dot; the longest counts. Names
            are those of :func:`properties_of`.
        weight: cast of a weight in high precision; codes of a file are kept, unless ``requantizes`` says otherwise.
        input: cast of a layer's input; None casts none.
        requantizes: whether weights that a file has as codes are decoded and cast again.
        activations: dtype of the activations, to which a layer's input is rounded before its cast.
        fused_cast: whether a norm's output is cast before that rounding.
        products: operands of the GEMM.
        accumulate: sums of a GEMM.
        output: dtype of a layer's output.
        head: whether the head's products are in FP8.
        kv_cache: cast of keys and values [B, T, heads, D] in the cache by default; None casts none.
        skipped: linear layers in high precision, beside the head.
    """

    name: str
    engine: str
    sources: Mapping[str, Source] = field(hash=False)  # a dictionary has no hash
    weight: EngineCast
    input: EngineCast | None
    requantizes: bool = False
    activations: torch.dtype = torch.bfloat16
    fused_cast: bool = False
    products: Products = Products.CODES
    accumulate: Accumulate = Accumulate.FP32
    output: torch.dtype = torch.bfloat16
    head: bool = False
    kv_cache: EngineCast | None = None
    skipped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in properties_of(self):
            source_of(self, name)


def not_run(source: Source, role: str, *names: str) -> dict[str, Source]:
    """Sources of a cast's properties that were only read, though a test runs the cast.

    Example:
        >>> source = Source(project="vLLM", version="0.33.0", file="fp8.py", test="tests/test_vllm.py")
        >>> not_run(source, "input", "saturation")["input.saturation"].proof
        'read, not run'
    """
    return dict.fromkeys((f"{role}.{name}" for name in names), replace(source, test=""))


def limited(source: Source, limit: str, role: str, *names: str) -> dict[str, Source]:
    """Sources of a cast's properties whose proof does not hold on a GPU.

    Example:
        >>> source = Source(project="vLLM", version="0.33.0", file="fp8.py", test="test_vllm.py")
        >>> limited(source, INTERPRETED, "input", "division")["input.division"].is_proven
        False
    """
    return dict.fromkeys((f"{role}.{name}" for name in names), replace(source, limit=limit))


def source_of(profile: EngineProfile, name: str) -> Source:
    """Source of a property.

    Raises:
        ConfigError: the profile has none.
    """
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if (source := profile.sources.get(".".join(parts[:end]))) is not None:
            return source
    raise ConfigError(f"profile {profile.name!r} has no source for {name!r}; add one to its sources")


def properties_of(profile: EngineProfile) -> dict[str, str]:
    """Properties of a profile in words, by name; those of its two casts as ``weight.…`` and ``input.…``.

    Example:
        >>> from octavo.engines import get
        >>> properties_of(get("vllm-block"))["input.granularity"]
        '1×128 block'
    """
    shown: dict[str, str] = {}
    for role, cast in (("weight", profile.weight), ("input", profile.input)):
        shown |= {f"{role}.{name}": words for name, words in _cast_in_words(cast).items()}
    apart = ("name", "engine", "sources", "weight", "input", "kv_cache")
    rest = [field.name for field in fields(profile) if field.name not in apart]
    shown |= {name: in_words(getattr(profile, name)) for name in rest}
    if profile.kv_cache is None:
        return shown | {"kv_cache": "high precision"}
    return shown | {f"kv_cache.{name}": words for name, words in _cast_in_words(profile.kv_cache).items()}


def _cast_in_words(cast: EngineCast | None) -> dict[str, str]:
    if cast is None:
        return {"format": "not cast"}
    words = {field.name: in_words(getattr(cast, field.name)) for field in fields(cast)}
    return words | {"granularity": granularity_in_words(cast.granularity), "limit": in_words(cast.largest)}


def in_words(value: object) -> str:
    """A property's value as the table shows it.

    Example:
        >>> in_words(torch.float32), in_words(None), in_words(True), in_words(1e-10)
        ('float32', '–', 'yes', '1e-10')
    """
    match value:
        case None | "" | ():
            return "–"
        case bool():
            return "yes" if value else "no"
        case torch.dtype():
            return str(value).removeprefix("torch.")
        case float():
            return f"{value:g}"
        case tuple():
            return ", ".join(map(str, value))
    return str(value)
