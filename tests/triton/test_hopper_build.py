"""Every kernel, compiled for Hopper in a process of its own: it assembles, and its registers hold its numbers."""

import pytest

from tests.triton import ptx_addresses, sass_bytes, ttgir_reductions
from tests.triton.conftest import PrintedBy

SHARED_MEMORY = 227 << 10  # bytes a block can have on Hopper
REGISTERS, HALF_OF_ALL_THREADS = 1 << 16, 1024  # of a multiprocessor
A_FEW = 16  # bytes of stack that cost nothing beside a tile
ALONE = {  # programs that share their multiprocessor with none, and why
    "scaled_gemm": "a tile of sums in registers; loads run ahead through shared memory",
    "scaled_grouped_gemm": "as scaled_gemm",
    "1 x 128 both ways": "a tile must hold 128 rows for the transpose's blocks; more warps would spill",
    "layernorm, rowwise, 8192": "a row in registers beside its columns' amaxes",
    "layernorm backward, 8192": "a row in registers beside two sums for the parameters",
}
RAISED = {  # what programs raise together, by kernel: amaxes as integers' maxima, counts as sums
    "measure_rows_and_columns_kernel": {"amaxes": ["max.s32"], "nonfinite": ["add.u64"]},
    "cast_tensor_kernel": {"amax_record": ["max.s32"], "nonfinite": ["add.u64"], "saturation": ["add.u64"]},
    "measure_each_kernel": {"amaxes": ["max.s32"], "nonfinite": ["add.u64"]},
    "cast_rows_kernel": {"nonfinite": ["add.u64"]},
    "cast_blocks_kernel": {"nonfinite": ["add.u64"]},
    "_norm_rows_kernel": {"measured": ["add.u32", "max.s32"]},
    "_activation_rows_kernel": {"measured": ["add.u32", "max.s32"]},
    "_activation_tiles_kernel": {"measured": ["add.u32", "max.s32"]},
}

NARROW = {  # to what places 32-bit products lead, by kernel, with their factors: no tensor is too large for these
    "close_step_kernel": {"window": ["length"]},  # a row for each of three roles; Triton 3.7 makes no product of it
}

CONVERTING = {  # the kernels that store codes converted in hardware
    "cast_tensor_kernel",
    "cast_each_kernel",
    "cast_rows_kernel",
    "cast_rows_and_columns_kernel",
    "cast_blocks_kernel",
    "_norm_rows_kernel",
    "_norm_tiles_kernel",
    "_activation_rows_kernel",
    "_activation_tiles_kernel",
}
ONE = ", 1 x 1"  # of a thread's four numbers the compiler knows that three are outside, and stores no codes of them
CODES = {"code", "loaded", "0x7f", "0x7c"}  # kinds of bytes that are codes, see sass_bytes


@pytest.fixture(scope="module")
def builds(printed_by: PrintedBy) -> list[dict]:
    return printed_by("tests.triton.hopper_build")


NARROW_STORE = """
ld.param.b64 %rd1, [scale_rows_param_0];
ld.param.b32 %r1, [scale_rows_param_1];
mov.u32 %r2, %ctaid.x;
mul.lo.s32 %r3, %r1, %r2;
mad.wide.s32 %rd2, %r3, 4, %rd1;
st.global.b32 [ %rd2 + 0 ], { %r2 };
"""
WIDE_STORE = """
ld.param.b64 %rd1, [scale_rows_param_0];
ld.param.b32 %r1, [scale_rows_param_1];
mov.u32 %r2, %ctaid.x;
mul.wide.s32 %rd3, %r1, %r2;
shl.b64 %rd4, %rd3, 2;
add.s64 %rd2, %rd1, %rd4;
st.global.b32 [ %rd2 + 0 ], { %r2 };
"""


@pytest.mark.long
def test_every_kernel_fits_and_hardly_spills(builds: list[dict]) -> None:
    assert builds
    unfit = [build for build in builds if build["stack"] > A_FEW or build["shared"] > SHARED_MEMORY]
    assert not unfit


@pytest.mark.long
def test_a_multiprocessor_is_kept_busy(builds: list[dict]) -> None:
    """While one program waits for memory another computes, or half of all threads are its own."""
    alone = [build for build in builds if build["threads"] < HALF_OF_ALL_THREADS and registers(build) * 2 > REGISTERS]
    unexplained = [build for build in alone if not any(word in str(build) for word in ALONE)]
    assert not unexplained
    assert all(any(word in str(build) for build in alone) for word in ALONE), "an exception that nothing needs"


def registers(build: dict) -> int:
    """Of a program: a thread's are dealt out in eights."""
    return -(-build["registers"] // 8) * 8 * build["threads"]


def test_products_of_codes_run_on_fp8_tensor_cores(builds: list[dict]) -> None:
    products = [build for build in builds if "gemm" in build["kernel"]]
    assert all(any("e4m3" in word or "e5m2" in word for word in build["tensor_core"]) for build in products)


@pytest.mark.parametrize("kernel", RAISED)
def test_shared_counters_are_updated_atomically(kernel: str, builds: list[dict]) -> None:
    """In every build of the kernel, and never stored; the interpreter, which has one program at a time, cannot tell."""
    written = [build["written"] for build in builds if build["kernel"] == kernel]
    for each in written:
        shared = {name: operations for name, operations in each.items() if name in RAISED[kernel]}
        assert shared == {name: RAISED[kernel][name] for name in shared}
    assert {name for each in written for name in each} >= RAISED[kernel].keys()
    atomic = {name for each in written for name, operations in each.items() if operations != ["store"]}
    assert atomic == RAISED[kernel].keys(), "raised, and not in the table"


def test_no_other_kernel_is_atomic(builds: list[dict]) -> None:
    """So that the table above has all of them, and every other result has its order of sums."""
    others = [build for build in builds if build["kernel"] not in RAISED]
    assert {operation for build in others for each in build["written"].values() for operation in each} == {"store"}


@pytest.mark.parametrize(("ptx", "expected"), [(NARROW_STORE, {"out": ["stride"]}), (WIDE_STORE, {})])
def test_a_32_bit_product_of_row_and_stride_is_found(ptx: str, expected: dict) -> None:
    assert ptx_addresses.narrow_factors(ptx, {"out": "*fp32", "stride": "i32"}) == expected


def test_places_in_tensors_of_2_to_the_31_elements_and_more_are_64_bits_wide(builds: list[dict]) -> None:
    """No row is multiplied by a stride in 32 bits. No test runs on a tensor so large that it would matter."""
    found: dict[str, dict[str, list[str]]] = {}
    for build in builds:
        if build["narrow_factors"]:
            found.setdefault(build["kernel"], {}).update(build["narrow_factors"])
    assert not {kernel: places for kernel, places in found.items() if places != NARROW.get(kernel)}


REDUCED = """
#blocked = #ttg.blocked<{sizePerThread = [1, 8], threadsPerWarp = [8, 4], warpsPerCTA = [8, 1], order = [1, 0]}>
#linear = #ttg.linear<{register = [[0, 1]], lane = [[0, 8], [2, 0], [0, 0], [0, 16], [1, 0]], warp = [], block = []}>
    %a = "tt.reduce"(%b) <{axis = AXIS : i32}> ({
    ^bb0(%c: i32 loc(callsite(#loc1 at #loc329)), %d: i32 loc(callsite(#loc1 at #loc329))):
      tt.reduce.return %e : i32 loc(#loc355)
    }) : (tensor<512xi32, LAYOUT>) -> i32 loc(#loc355)
"""


@pytest.mark.parametrize(
    ("layout", "axis", "moves"),
    [
        ("#blocked", 0, None),
        ("#linear", 0, ".x..x"),
        ("#linear", 1, "x..x."),
        ("#ttg.slice<{dim = 0, parent = #linear}>", 0, "x..x."),
        ("#ttg.slice<{dim = 1, parent = #ttg.slice<{dim = 2, parent = #linear}>}>", 0, ".x..x"),
    ],
)
def test_a_reduction_whose_lanes_are_no_neighbors_is_found(layout: str, axis: int, moves: str | None) -> None:
    ttgir = REDUCED.replace("AXIS", str(axis)).replace("LAYOUT", layout)
    assert ttgir_reductions.with_gaps(ttgir) == ([] if moves is None else [f"{layout}: {moves}"])


def test_every_reduction_includes_all_lanes(builds: list[dict]) -> None:
    """Otherwise NaN may go unnoticed. Without a GPU no other test can tell: the interpreter has no lanes."""
    assert not [build for build in builds if build["gaps"]]


CONVERTED_PAIRS = """
/*0000*/ F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R2, R3, R2, RZ ;
/*0010*/ F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R4, R5, R4, R2.reuse ;
/*0020*/ STG.E desc[UR6][R10.64], R4 ;
"""
RIGHT = """
/*0030*/ PRMT R7, R4, 0x7771, RZ ;
/*0040*/ @P0 BRA 0x60 ;
/*0050*/ SEL R7, R7, 0x7f, !P1 ;
/*0060*/ STS.U8 [R0+UR4], R7 ;
/*0070*/ LOP3.LUT R8, R2, 0xffff, RZ, 0xc0, !PT ;
/*0080*/ SHF.R.U32.HI R8, RZ, 0x8, R8 ;
/*0090*/ STS.U8 [R0+UR4+0x80], R8 ;
/*00a0*/ STS.U8 [R1], R2 ;
/*00b0*/ STS.U8 [R1+0x80], R4 ;
"""
READ_TOO_EARLY = """
/*0030*/ LOP3.LUT R8, R9, 0xffff, RZ, 0xc0, !PT ;
/*0040*/ PRMT R9, R4, 0x7610, R9 ;
/*0050*/ SHF.R.U32.HI R8, RZ, 0x8, R8 ;
/*0060*/ STS.U8 [R0+UR4], R8 ;
/*0070*/ STS.U8 [R0+UR4+0x80], R4 ;
"""
ON_ONE_PATH = """
/*0030*/ FADD R7, R6, R6 ;
/*0040*/ @P0 BRA 0x60 ;
/*0050*/ PRMT R7, R4, 0x7771, RZ ;
/*0060*/ @!P1 STG.E.U8 desc[UR6][R12.64], R7 ;
"""
OF_A_SCALE = """
/*0030*/ SHF.R.S32.HI R7, RZ, 0x17, R6 ;
/*0040*/ SGXT R7, R7, 0x8 ;
/*0050*/ STS.U8 [R1], R7 ;
/*0060*/ LDS.U8 R8, [R0] ;
/*0070*/ STG.E.U8 desc[UR6][R12.64], R8 ;
"""


@pytest.mark.parametrize(
    ("sass", "kinds", "times"),
    [
        (RIGHT, {"code": 4, "0x7f": 1}, {2: 4}),
        (READ_TOO_EARLY, {"unwritten": 1, "code": 1}, {1: 3, 2: 1}),
        (ON_ONE_PATH, {"code": 1, "FADD": 1}, {1: 3, 2: 1}),
        (OF_A_SCALE, {"exponent": 1, "loaded": 1}, {1: 4}),
    ],
)
def test_stored_bytes_are_followed_to_their_origins(sass: str, kinds: dict, times: dict) -> None:
    assert sass_bytes.stored(CONVERTED_PAIRS + sass) == (kinds, times)


def test_stored_bytes_have_been_converted(builds: list[dict]) -> None:
    """Or are scales in E8M0, or the byte that records an overflow."""
    stray = []
    for build in builds:
        scales = {"exponent"} if "mxfp8" in build["call"] else set()
        flags = {"0x1"} if "overflowed" in build["written"] else set()
        if build["stored_bytes"].keys() - CODES - scales - flags:
            stray.append(build)
    assert not stray


def test_every_code_is_stored_equally_often(builds: list[dict]) -> None:
    """A store of a byte or word that is not the code that belongs there leaves one code out."""
    assert not [build for build in builds if len(build["stored_codes"]) > 1 and not build["call"].endswith(ONE)]
    single = [build["stored_codes"] for build in builds if build["call"].endswith(ONE)]
    assert [times for times in single if times] == [{"0": 3, "1": 1}] * 2
    assert {build["kernel"] for build in builds if build["stored_codes"].keys() - {"0"}} == CONVERTING
