"""The compiled kernels; every pointer is an address, 0 for none. See native/kernels.h."""

def levels() -> list[str]: ...
def has_threads() -> bool: ...
def max_threads() -> int: ...
def quantize(
    level: int,
    x: int,
    dtype: int,
    rows: int,
    columns: int,
    stride: int,
    fmt: int,
    block_rows: int,
    block_columns: int,
    propagate: bool,
    rounding: int,
    amax_floor: float,
    margin: int,
    given_amax: int,
    zero_is_unknown: bool,
    given_scale: int,
    codes: int,
    scale: int,
    measured: int,
    counting: bool,
    /,
) -> tuple[int, int, int]: ...
def dequantize(
    level: int,
    codes: int,
    fmt: int,
    rows: int,
    columns: int,
    stride: int,
    block_rows: int,
    block_columns: int,
    scale: int,
    out: int,
    out_dtype: int,
    /,
) -> None: ...
