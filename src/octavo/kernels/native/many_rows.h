// GEMM of few_rows.h for any number of rows of a, bit for bit: same chains, same order, other loops.
//
// a [M, K], M >= 4; b [N, K] row-major FP8 codes or BF16; out [M, N] row-major. A server that batches sequences needs a row's
// result to be independent of how many rows there are and which (tests/unit/inference/test_read_rows.py). One order of
// additions for all makes long prompts a fifth slower than gemm.h would be, and needs no second order.
//
// few_rows.h decodes b's words again for every three rows; here a thread decodes WIDE columns once, into a panel, and
// multiplies it with tiles of up to SIDE rows (tiles.h). Words are transposed first, so that a vector's lanes are columns:
// chain c of the sum, lane c of few_rows.h, becomes a pass of its own over K, and nothing is added across lanes until all LANES
// chains are added, element by element. The panel holds halves of words, two numbers in 32 bits: FP32 numbers of 16 columns
// would not stay in the first-level cache.
#pragma once

#include <vector>

#include "few_rows.h"
#include "tiles.h"

namespace octavo {
namespace {

constexpr int64_t MIN_MANY_ROWS = 4;  // rows of a; up to three share a decoded word in few_rows.h already

static_assert(WIDE <= SUM_COLUMNS, "sums of WIDE columns are finished together");

// Arithmetic of a tile: FP32 numbers times halves of words, one chain for each lane of few_rows.h, fused in its operand order.
struct Halves {
    typedef float Number;
    typedef f32v Vector;
    static constexpr int CHAINS = LANES, IN_WORD = 2;

    // volatile: the mask is an operand in memory. Kept in a register it would displace one of the 16 that a 6 x 2 tile fills,
    // and GCC would spill that.
    static inline const volatile u32v HIGH = u32v{} + 0xffff0000u;

    static f32v number(u32v half, int place) { return bits_as<f32v>(place ? half & (u32v)HIGH : half << 16); }
    static f32v spread(float number) { return all(number); }
    static f32v add(f32v sum, f32v left, f32v right) { return fused(right, left, sum); }
};

template <class W>
struct ManyRows {
    typedef u8v Seen;  // largest magnitudes
    const GemmProblem& p;
    const Tiles<Halves>& tiles;
    float* unshifted_rows;  // rows of a in FP32, `dense` apart, for sums that take no shift
    int64_t dense;
    Row* rows;
    const FewRows few{p, rows};

    // Converts a tile's rows to FP32, and shifted into the tile's layout [chain][place][row]: lane `lane`'s numbers are chain
    // `lane`'s.
    void shift_tile(int64_t tile) const {
        const int64_t first = tiles.first_row(tile), count = tiles.rows_of(tile);
        for (int64_t r = 0; r < count; ++r) {
            float *x = unshifted_rows + (first + r) * dense, *to = tiles.chain(tile, 0) + r;
            read_row(p.a, first + r, p.k, x);
            const Shift shift = W::shift(x, p.k);
            rows[first + r] = {x, nullptr, shift.unshift};
            for (int64_t at = 0; at < p.k; at += STEP_OF<W>, to += W::IN_WORD * count) {
                float some[STEP_OF<W>] = {};
                std::memcpy(some, x + at, least_of(STEP_OF<W>, p.k - at) * sizeof(float));
                for_places<W>([&](int number, int lane, int place) {
                    to[(lane * tiles.places + place) * count] = some[number] * shift.factor;
                });
            }
        }
    }

    // b's rows [column, last), as bytes.
    ByteRows bytes(int64_t column, int64_t last) const {
        constexpr int64_t size = sizeof(typename W::Element);
        const auto* first = reinterpret_cast<const uint8_t*>(few.column<W>(column));
        return {first, p.b.row_stride * size, last - column, p.k * size};
    }

    // Decodes columns into the panel [chain][half][WIDE]; returns the byte maxima of code magnitudes.
    u8v unpack(const ByteRows& columns, int64_t chain_stride, uint32_t* panel) const {
        u8v seen = {};
        columns.for_words([&](int64_t step, int v, const u32v(&words)[LANES]) {
            uint32_t* to = panel + step * W::HALVES * WIDE + v * LANES;
            for (int chain = 0; chain < LANES; ++chain, to += chain_stride) {
                seen = largest_byte(seen, W::magnitudes(words[chain]));
                u32v halves[W::HALVES];
                W::halve(words[chain], halves);
                for (int i = 0; i < W::HALVES; ++i) store(to + i * WIDE, halves[i]);
            }
        });
        return seen;
    }

    // Adds the chains [chain][row][WIDE] by halves, in sum_of_lanes' order, multiplies by unshift, scales and stores.
    void finish(const Part& part, u8v seen, uint32_t* chains) const {
        const int64_t count = (part.last_row - part.row) * WIDE, chain_size = AT_ONCE * WIDE;
        for (int64_t half = LANES / 2; half; half /= 2)
            for (int64_t i = 0; i < half; ++i)
                for (int64_t j = i * chain_size; j < i * chain_size + count; j += LANES)
                    store(chains + j, load<f32v>(chains + j) + load<f32v>(chains + half * chain_size + j));
        float sums[AT_ONCE * SUM_COLUMNS];
        for (int64_t r = 0; r < part.last_row - part.row; ++r)
            for (int i = 0; i < WIDE; i += LANES)
                store(sums + r * SUM_COLUMNS + i, load<f32v>(chains + r * WIDE + i) * all(rows[part.row + r].unshift));
        few.recompute_special<W>(part, seen, sums);
        few.finish(part, sums);
    }

    void run() const {
        parallel_for(tiles.count, largest<int64_t>(1, 4096 / (p.k * SIDE)), [&](int64_t first, int64_t last) {
            for (int64_t tile = first; tile < last; ++tile) shift_tile(tile);
        });
        TiledGemm<Halves, ManyRows>{tiles, *this, p.n}.run();
    }
};

template <class W>
void many_rows_of(const GemmProblem& p) {
    static thread_local Scratch numbers;
    static thread_local std::vector<Row> rows;
    rows.resize(p.m);
    Tiles<Halves> tiles{nullptr, p.m, steps_of<W>(p.k) * W::IN_WORD};
    const int64_t dense = (p.k + LANES - 1) / LANES * LANES;
    tiles.data = numbers.floats(tiles.size() + p.m * dense);
    ManyRows<W>{p, tiles, tiles.data + tiles.size(), dense, rows.data()}.run();
    numbers.trim();
}

void many_rows(const GemmProblem& p) {
    switch (p.b.element) {
        case Element::e4m3: return many_rows_of<CodeWords<E4M3>>(p);
        case Element::e5m2: return many_rows_of<CodeWords<E5M2>>(p);
        default: return many_rows_of<NumberWords>(p);
    }
}

// From MIN_MANY_ROWS rows on, decoding columns once for all rows pays. Blocks of K have scaled sums, which only few_rows.h
// computes.
inline bool use_many_rows(const GemmProblem& p) { return p.m >= MIN_MANY_ROWS && !p.block && has_words_in_rows(p.b); }

}  // namespace
}  // namespace octavo
