"""The compiled kernels; every pointer is an address, 0 for none. See native/kernels.h."""

def levels() -> list[str]: ...
def has_threads() -> bool: ...
def max_threads() -> int: ...
def limit_threads(most: int, /) -> None: ...
def check_threads() -> None: ...
def is_busy() -> bool: ...
def assume_busy(seconds: float, /) -> None: ...
def release_threads() -> None: ...
def expect_writes(address: int, count: int, /) -> None: ...
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
    measure_if_zero: bool,
    given_scale: int,
    codes: int,
    values: int,
    scale: int,
    measured: int,
    counting: bool,
    /,
) -> tuple[int, int, int]: ...

CAST_SUMS: int

def cast_sums(
    level: int,
    x: int,
    dtype: int,
    rows: int,
    columns: int,
    stride: int,
    fmt: int,
    block_rows: int,
    block_columns: int,
    scale: int,
    codes: int,
    codes_stride: int,
    first_row: int,
    row_step: int,
    measured: int,
    sums: int,
    /,
) -> None: ...
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
def round_stochastic(level: int, x: int, random: int, count: int, fmt: int, codes: int, /) -> None: ...
def random_bits(level: int, seed: int, count: int, out: int, /) -> None: ...
def gemm(
    level: int,
    a: int,
    a_element: int,
    a_row: int,
    a_column: int,
    a_scale: int,
    a_per_row: bool,
    b: int,
    b_element: int,
    b_row: int,
    b_column: int,
    b_scale: int,
    b_per_row: bool,
    rows: int,
    columns: int,
    depth: int,
    block: int,
    bias: int,
    out: int,
    out_dtype: int,
    /,
) -> None: ...
def hopper(
    level: int,
    a: int,
    a_element: int,
    a_row: int,
    a_column: int,
    a_scale: int,
    a_per_row: bool,
    b: int,
    b_element: int,
    b_row: int,
    b_column: int,
    b_scale: int,
    b_per_row: bool,
    rows: int,
    columns: int,
    depth: int,
    one_chain: bool,
    out: int,
    /,
) -> None: ...

COMPARISON_SUMS: int

def compare_products(
    level: int,
    left: tuple[int, ...],
    right: tuple[int, ...],
    left_codes: tuple[int, ...],
    right_codes: tuple[int, ...],
    rows: int,
    columns: int,
    depth: int,
    block: int,
    sums: int,
    out: int,
    total: int,
    /,
) -> None: ...

PAGE: int
MAX_HEAD_DIM: int

def attend(
    level: int,
    queries: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    element: int,
    keys: int,
    key_scales: int,
    values: int,
    value_scales: int,
    table: int,
    table_stride: int,
    rows: int,
    sequence: int,
    position: int,
    scale: float,
    out: int,
    /,
) -> None: ...

class Decoder:
    def __init__(
        self,
        level: int,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        query_norm_size: int,
        key_norm_size: int,
        top_k: int,
        normalize_shares: bool,
        norm_eps: float,
        attention_scale: float,
        amax_floor: float,
        half_range: float,
        least_scale: float,
        cos: int,
        sin: int,
        norm: int,
        head: tuple[int, ...],
        /,
    ) -> None: ...
    def add_layer(
        self,
        attention_norm: int,
        mlp_norm: int,
        key_mean: int,
        query_norm: int,
        key_norm: int,
        qkv: tuple[int, ...],
        out: tuple[int, ...],
        mlps: list[tuple[tuple[int, ...], tuple[int, ...]]],
        experts: int,
        router: int,
        shared_gate: int,
        /,
    ) -> None: ...
    def run(
        self,
        hidden: int,
        rows: int,
        sequence: int,
        position: int,
        element: int,
        keys: int,
        key_scales: int,
        values: int,
        value_scales: int,
        page_count: int,
        table: int,
        table_stride: int,
        logit_rows: int,
        logits: int,
        /,
    ) -> tuple[int, int]: ...
