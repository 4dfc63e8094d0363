"""Precisions by their published names, and the bytes that their casts move.

Which operand of which GEMM is cast how is read from octavo's recipes. A published name ("fp8 delayed scaling (TE,
hybrid)") is translated to the recipe whose scales it uses; FP4, which octavo has no recipe for, casts like MXFP8 and
stores half the bits.
"""

import re
from dataclasses import dataclass, replace
from enum import StrEnum

from octavo import recipes
from octavo.errors import ConfigError
from octavo.numerics import CastSpec, PerBlock, PerTensor, Scaling
from octavo.planning.hardware import Hardware
from octavo.planning.model_shapes import Linear, Part
from octavo.recipes import Recipe

__all__ = [
    "BF16",
    "WITHOUT_CASTS",
    "Kernel",
    "Precision",
    "bytes_cast",
    "cast_kernels",
    "find_precision",
    "linear_precision",
    "precision_of_recipe",
    "unsupported_reason",
    "weight_copies",
]


class Kernel(StrEnum):
    """Kind of GEMM kernel; each reaches a share of the peak of its own."""

    BF16 = "bf16"
    TENSOR = "tensor"  # one scale a tensor
    ROW = "row"
    BLOCK = "block"  # 1x128 and 128x128, cuBLAS
    TRITON = "triton"  # the same in plain Triton
    DEEPGEMM = "deepgemm"  # the same by DeepGEMM
    MX = "mx"  # 1x32 with E8M0 scales, in hardware
    FP4 = "fp4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Precision of a training or an inference.

    Attributes:
        name: as it was given.
        recipe: octavo's recipe whose casts it makes.
        kernel: that multiplies.
        bits: of its operands.
        casts: whether the time includes casts; False where the operands were quantized before.
        covers_dense: whether dense layers use it; ``covers_experts``: whether experts do; ``covers_attention``: whether
            attention's linear layers do as other dense layers.
        gathers_codes: whether FSDP gathers weights as codes.
        stores_codes: whether activations and optimizer states are kept in FP8 (COAT).
        kv_bytes: bytes of an element of the KV cache.
        integer: INT8 instead of FP8.
        weight_bits: of a stored weight, where GEMMs decode it first; 0 for ``bits``.
        hp_grad_weight: whether grad_weight's GEMM is in high precision.
    """

    name: str
    recipe: Recipe
    kernel: Kernel
    bits: int = 8
    weight_bits: int = 0
    casts: bool = True
    covers_dense: bool = True
    covers_experts: bool = True
    covers_attention: bool = True
    gathers_codes: bool = False
    stores_codes: bool = False
    kv_bytes: int = 2
    integer: bool = False

    @property
    def is_bf16(self) -> bool:
        """Return whether nothing is cast."""
        return self.kernel == Kernel.BF16

    def covers(self, part: Part) -> bool:
        """Return whether linear layers of a part use it; the head never does."""
        if part == Part.EXPERTS:
            return self.covers_experts
        return part != Part.HEAD and self.covers_dense and (part != Part.ATTENTION or self.covers_attention)

    @property
    def stored_bits(self) -> int:
        """Return the bits of a stored weight."""
        return self.weight_bits or self.bits

    @property
    def hp_grad_weight(self) -> bool:
        """Return whether grad_weight's GEMM is in high precision."""
        return self.recipe.grad_weight.b is None


BF16 = Precision(name="bf16", recipe=recipes.get("bf16"), kernel=Kernel.BF16, bits=16)
_KERNELS = ((PerTensor, Kernel.TENSOR), (PerBlock, Kernel.BLOCK))


def precision_of_recipe(name: str) -> Precision:
    """Return the precision of one of octavo's recipes.

    Example:
        >>> precision_of_recipe("mxfp8").kernel, precision_of_recipe("rowwise").kernel
        (<Kernel.MX: 'mx'>, <Kernel.ROW: 'row'>)
    """
    recipe = recipes.get(name)
    if recipe.is_high_precision:
        return BF16
    spec = recipe.output.a or recipe.output.b
    assert spec is not None
    granularity = spec.granularity
    kernel = next((kernel for kind, kernel in _KERNELS if isinstance(granularity, kind)), Kernel.ROW)
    if isinstance(granularity, PerBlock) and granularity.columns == 32:
        kernel = Kernel.MX
    return Precision(
        name=name, recipe=recipe, kernel=kernel, gathers_codes=kernel == Kernel.TENSOR and not recipe.is_delayed
    )


# A pattern of the published name, the recipe, and the kernel where it is not the recipe's own.
SPELLINGS: tuple[tuple[str, str, Kernel | None], ...] = (
    (r"w4a8|int4", "tensorwise", None),
    (r"fp4", "mxfp8", Kernel.FP4),
    (r"delayed", "delayed_te", None),
    (r"triton", "blockwise", Kernel.TRITON),
    (r"deepgemm|1x128 x 128x128", "blockwise", Kernel.DEEPGEMM),
    (r"mxfp8|\bmx\b", "mxfp8", None),
    (r"block|1x128|128x128", "blockwise", None),
    (r"gw-hp|hp-grad-weight|high[ -]precision grad", "rowwise_hp_grad_weight", None),
    (r"row-?wise|per-?(?:row|token|channel)", "rowwise", None),
    (r"current|fp8-?cs|tensor-?wise|per-?tensor|maxtext|w8a8|modelopt|generation", "tensorwise", None),
    (r"fp8|float8|e4m3|int8|w8|hybrid", "delayed_te", None),  # "hybrid" names formats, E4M3 and E5M2, and no scaling
)


HIGH = re.compile(r"(?:bf|fp)16|b?float16|half\b|16-?bit|unquanti[sz]ed|^(?:not stated|none$|n/a|-?$)")
LOW = re.compile(r"(?:fp|float|int)[48]|nf4|\bmx|e[45]m[23]|w[48]|weight|block|tensor-?wise|row-?wise|hybrid|awq|gptq")
# Formats of keys and values; formats that are denied, or of what FSDP gathers. None of them multiplies.
CACHE = re.compile(
    r"(?:fp8|float8|int8|e4m3|e5m2)(?:-e[45]m[23])?[ -]*kv\b(?:[ -]cache)?"
    r"|\bkv(?:[ -]cache)?[ :=(-]*(?:in )?(?:fp8|int8|e4m3)"
)
ASIDE = re.compile(
    r"(?:no|without|not|w/o) (?:fp8|float8|mxfp8|nvfp4)|(?:fp8|float8) (?:off|disabled|false)|fp8[ -]all-?gather"
    r"|\bbaseline (?:for|of) (?:fp8|float8|mxfp8|nvfp4)"
)
WITHOUT_CASTS = re.compile(
    r"pre-?quanti[sz]|\bkernels? (?:only|alone)\b|already (?:quanti[sz]ed|cast\b)"
    r"|\b(?:excl(?:udes|uding|\.)|without|not (?:including|counting)) (?:the )?(?:quanti[sz]ation|casts?\b|casting)"
)
WEIGHTS_ONLY = re.compile(
    r"w([48])a16|weight-?only|weights only|weights?\b.*(?:bf|fp|float)16[ -]act|awq|gptq|marlin|\bint4\b|nf4"
)
FP8_ACTIVATIONS = re.compile(r"w4a8|int4\b.*(?:fp8|float8|e4m3)|fp4\b.*(?:fp8|float8|e4m3)[^,;+]*act")
NOT_MODELLED = re.compile(r"fp6|\bint[23]\b|ms-?amp")
IN_BF16 = re.compile(r"(?:bf|fp)16[ -](?:dense|linears)|(?:dense|linears)(?: in)?[ -](?:bf|fp)16")
ATTENTION_IN_BF16 = re.compile(r"(?:bf|fp)16[ -]attention|attention(?: in)?[ -](?:bf|fp)16")
EXPERTS = re.compile(r"\b(?:grouped|moe|experts?|both)\b")
DENSE = re.compile(r"\b(?:linears|linear (?:layers|only)|dense|both)\b")


def find_precision(text: str, *, has_mx: bool = False) -> Precision:
    """Return the precision of a published name; no name is BF16.

    Args:
        text: as published.
        has_mx: whether the accelerator multiplies MX formats; without, "fp8-block/mx" is block scaling, and MXFP4 of
            weights alone.

    Raises:
        ConfigError: the name is not one of those that are modelled.

    Example:
        >>> find_precision("fp8 delayed scaling (TE, hybrid)").recipe.is_delayed
        True
        >>> find_precision("bf16") is BF16, find_precision("bf16_with_mxfp8_mixed").kernel
        (True, <Kernel.MX: 'mx'>)
        >>> find_precision("INT4 AWQ").weight_bits, find_precision("INT4 AWQ").bits
        (4, 16)
    """
    lower = text.lower().strip().replace("_", "-")
    kv_bytes = 1 if CACHE.search(lower) or "modelopt" in lower else 2
    multiplied = ASIDE.sub("", CACHE.sub("", lower)).strip(" ()+,;-")
    if HIGH.search(multiplied) and not LOW.search(multiplied):
        return replace(BF16, name=text, kv_bytes=1) if kv_bytes == 1 else BF16
    if weights := _weights_only(text, lower, kv_bytes=kv_bytes, has_mx=has_mx):
        return weights
    match = next((entry for entry in SPELLINGS if re.search(entry[0], multiplied)), None)
    is_e5m2 = "e5m2" in multiplied and not re.search(r"hybrid|e4m3", multiplied)
    if match is None or is_e5m2 or NOT_MODELLED.search(lower):
        raise ConfigError(
            f"the precision {text[:40]!r} is not modelled; BF16, FP8 (delayed, tensorwise, rowwise, blockwise), MXFP8, "
            "FP4, INT8, and weights alone in 4 or 8 bits are"
        )
    has_fp8_activations = bool(FP8_ACTIVATIONS.search(multiplied))
    if has_fp8_activations:
        match = SPELLINGS[0]
    elif "block/mx" in lower and not has_mx:
        match = (match[0], "blockwise", None)
    _, recipe, kernel = match
    usual = precision_of_recipe(recipe)
    covered = IN_BF16.sub("", multiplied)
    of_experts, of_dense = bool(EXPERTS.search(covered)), bool(DENSE.search(covered))
    return Precision(
        name=text,
        recipe=usual.recipe,
        kernel=kernel or usual.kernel,
        bits=4 if kernel == Kernel.FP4 else 8,
        weight_bits=4 if has_fp8_activations else 0,
        casts=not WITHOUT_CASTS.search(lower),
        covers_dense=(of_dense or not of_experts) and not (IN_BF16.search(multiplied) and not of_dense),
        covers_experts=of_experts or not of_dense,
        covers_attention=not ATTENTION_IN_BF16.search(multiplied),
        gathers_codes="all-gather" in lower or "float8 tensorwise" in lower,
        stores_codes="coat" in lower,
        kv_bytes=kv_bytes,
        integer="int8" in multiplied,
    )


def _weights_only(text: str, lower: str, *, kv_bytes: int, has_mx: bool) -> Precision | None:
    """The precision of a name that says that weights alone are stored in fewer bits; None for other names.

    MXFP4 without units for it is of experts alone, as GPT-OSS is published.
    """
    is_mxfp4 = "mxfp4" in lower and not has_mx
    match = WEIGHTS_ONLY.search(lower)
    if FP8_ACTIVATIONS.search(CACHE.sub("", lower)) or not (match or is_mxfp4):
        return None
    has_8 = bool(re.search(r"w8a16|int8|fp8|float8|8-?bit", lower)) and "4" not in lower
    return replace(BF16, name=text, weight_bits=8 if has_8 else 4, covers_dense=not is_mxfp4, kv_bytes=kv_bytes)


def unsupported_reason(precision: Precision, hardware: Hardware) -> str | None:
    """Return why an accelerator cannot run a precision; None if it can.

    Example:
        >>> from octavo.planning.hardware import find_hardware
        >>> unsupported_reason(precision_of_recipe("mxfp8"), find_hardware("h100"))
        'h100 has no MX scales in hardware; use tensorwise, rowwise or blockwise'
    """
    if precision.is_bf16:
        return None
    if precision.integer:
        return None if hardware.int8 else f"{hardware.name} has no INT8 units"
    if not hardware.has_fp8:
        return f"{hardware.name} has no FP8 units: it would emulate FP8, slower than 16 bits"
    if precision.kernel == Kernel.FP4 and not hardware.has_mx:
        return f"{hardware.name} has no FP4 units; name weights alone in 4 bits W4A16, with FP8 activations W4A8"
    if precision.kernel == Kernel.MX and not hardware.has_mx:
        return f"{hardware.name} has no MX scales in hardware; use tensorwise, rowwise or blockwise"
    return None


def linear_precision(precision: Precision, linear: Linear) -> Precision:
    """Return the precision of one kind of linear layer; the head and routers stay in BF16."""
    return precision if precision.covers(linear.part) else BF16


@dataclass(frozen=True, slots=True)
class RoleBytes:
    """Bytes that casting one element moves, by role, both orientations included.

    Attributes:
        input: an element of a layer's input.
        weight: of its weight.
        grad_output: of its output's gradient.
    """

    input: float
    weight: float
    grad_output: float


def bytes_cast(precision: Precision) -> RoleBytes:
    """Return the bytes that each role's casts move, an element in BF16.

    Example:
        >>> bytes_cast(precision_of_recipe("delayed_te")).input, bytes_cast(precision_of_recipe("tensorwise")).input
        (4.0, 6.0)
    """
    if precision.is_bf16 or not precision.casts:
        return RoleBytes(0.0, 0.0, 0.0)
    recipe, share = precision.recipe, precision.bits / 8
    return RoleBytes(
        _both_ways(recipe.output.a, recipe.grad_weight.b, share),
        _both_ways(recipe.output.b, recipe.grad_input.b, share),
        _both_ways(recipe.grad_input.a, recipe.grad_weight.a, share),
    )


def cast_kernels(precision: Precision) -> float:
    """Return the kernels that one cast launches: a scale from the whole tensor's amax takes several small ones.

    Example:
        >>> cast_kernels(precision_of_recipe("tensorwise")) > cast_kernels(precision_of_recipe("delayed_te"))
        True
    """
    if precision.is_bf16 or not precision.casts:
        return 0.0
    spec = precision.recipe.output.a or precision.recipe.output.b
    assert spec is not None
    if isinstance(spec.granularity, PerTensor):
        return 4.0 if spec.scaling == Scaling.DYNAMIC else 2.0  # two for the amax, one for the scale, the cast
    return 1.0 if _fuses(spec) else 2.0


def weight_copies(precision: Precision, hardware: Hardware) -> int:
    """Return the copies of a weight's codes that two GEMMs need: one where both can read it as it is stored.

    Hopper's and Ada's FP8 units read K along memory alone, so that the gradient of the input needs a transposed copy.
    Scales of rows and of 1x32 blocks run along K, which is another dimension of the weight in each GEMM.

    Example:
        >>> from octavo.planning.hardware import find_hardware
        >>> [weight_copies(precision_of_recipe("tensorwise"), find_hardware(name)) for name in ("h100", "b200")]
        [2, 1]
        >>> weight_copies(precision_of_recipe("mxfp8"), find_hardware("b200"))
        2
    """
    spec, transposed = precision.recipe.output.b, precision.recipe.grad_input.b
    granularity = spec.granularity if spec is not None else None
    is_square = isinstance(granularity, PerBlock) and granularity.rows == granularity.columns
    is_alike = spec == transposed and (is_square or isinstance(granularity, PerTensor))
    return 1 if is_alike and hardware.generation in ("blackwell", "cdna") else 2


def _both_ways(spec: CastSpec | None, transposed: CastSpec | None, share: float) -> float:
    """Bytes of the casts of an element for its two GEMMs; one reading serves both where they are alike."""
    specs = [each for each in (spec, transposed) if each is not None]
    if not specs:
        return 0.0
    reads = sum(map(_read_bytes, specs)) if len(set(specs)) > 1 or not _fuses(specs[0]) else _read_bytes(specs[0])
    reads += 0.0 if share == 1.0 else 4.0  # FP4 measures the tensor as well, and rotates both orientations
    return reads + sum(share + _scale_bytes(each) for each in specs)


def _fuses(spec: CastSpec) -> bool:
    """Return whether one pass casts both orientations: a block is read once, a row and a column are not."""
    return isinstance(spec.granularity, PerTensor | PerBlock)


def _read_bytes(spec: CastSpec) -> float:
    """BF16 elements are read once, and once before where the scale comes from the whole tensor's amax."""
    return 4.0 if isinstance(spec.granularity, PerTensor) and spec.scaling == Scaling.DYNAMIC else 2.0


def _scale_bytes(spec: CastSpec) -> float:
    granularity = spec.granularity
    if not isinstance(granularity, PerBlock):
        return 0.0
    width = 1.0 if granularity.columns == 32 else 4.0
    return width / (granularity.rows * granularity.columns)
