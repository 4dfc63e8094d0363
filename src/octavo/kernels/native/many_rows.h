// The sums of few_rows.h, and of weight_rows.h's BF16, for any number of rows of a, to the bit: a row's result depends
// neither on how many rows there are nor on which. Whoever serves several sequences in one call needs that: what one of them is told may not depend on
// the others.
//
// A sum's four chains are those of the four bytes of a lane, so each byte can be gone through by itself: codes of a few
// columns are decoded once, into numbers that lie byte by byte, and SIDE rows times ACROSS columns of sums stay in
// registers, as in a product of matrices (panels.h).
#pragma once

#include <vector>

#include "few_rows.h"

namespace octavo {
namespace {

#if defined(__AVX512F__)
constexpr int SIDE = 6, ACROSS = 4;  // of 32 registers, 24 hold sums
#else
constexpr int SIDE = 4, ACROSS = 3;  // of 16 registers, 12 hold sums
#endif
constexpr int64_t DECODED = 32768;  // numbers of the columns that are decoded at once
constexpr int64_t AT_ONCE = 48;     // rows for which a column is decoded once
constexpr int64_t MANY = 4;         // rows

static_assert(AT_ONCE % SIDE == 0, "rows are taken in whole sides");

struct Sides {
    const float *rows, *columns;
    int64_t row_step, column_step;  // from one to the next
    int64_t part;                   // numbers of one byte; those of the next byte follow
};

// Sums of ROWS x COLUMNS, [row][SOME].
template <int ROWS_, int COLUMNS_>
__attribute__((noinline)) void multiply_sides(const Sides& of, float* out) {
    f32v chains[4][ROWS_][COLUMNS_];
    for (int byte = 0; byte < 4; ++byte) {
        const float *rows = of.rows + byte * of.part, *columns = of.columns + byte * of.part;
        f32v sums[ROWS_][COLUMNS_] = {};
        for (int64_t i = 0; i < of.part; i += LANES, rows += LANES, columns += LANES) {
            f32v right[COLUMNS_];
            for (int c = 0; c < COLUMNS_; ++c) right[c] = load<f32v>(columns + c * of.column_step);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS_; ++r) {
                const f32v left = load<f32v>(rows + r * of.row_step);
#pragma GCC unroll 4
                for (int c = 0; c < COLUMNS_; ++c) sums[r][c] = fused(right[c], left, sums[r][c]);
            }
        }
        for (int r = 0; r < ROWS_; ++r)
            for (int c = 0; c < COLUMNS_; ++c) chains[byte][r][c] = sums[r][c];
    }
    for (int r = 0; r < ROWS_; ++r)
        for (int c = 0; c < COLUMNS_; ++c)
            out[r * SOME + c] = sum_of_lanes((chains[0][r][c] + chains[1][r][c]) + (chains[2][r][c] + chains[3][r][c]));
}

template <int ROWS_>
void multiply_across(const Sides& of, int64_t columns, float* out) {
    Sides own = of;
    int64_t c = 0;
    for (; c + ACROSS <= columns; c += ACROSS, own.columns += ACROSS * of.column_step) multiply_sides<ROWS_, ACROSS>(own, out + c);
    for (; c + 2 <= columns; c += 2, own.columns += 2 * of.column_step) multiply_sides<ROWS_, 2>(own, out + c);
    if (c < columns) multiply_sides<ROWS_, 1>(own, out + c);
}

// Where a row or a column has its numbers: those of a sum's four chains one chain after the other.
inline int64_t part_of(int64_t k) { return (k + STEP - 1) / STEP * LANES; }
inline int64_t room_of(int64_t k) { return 4 * part_of(k) + LANES; }  // seldom a power of two

// Columns of FP8 codes, and rows that are shifted for them.
template <class F>
struct CodeColumns {
    const FewRows& few;
    u8v seen = {};

    static Row row(const float* x, int64_t k, float* to) { return shift_row<F>(x, k, k, {LANES, part_of(k)}, to); }

    void decode(int64_t column, int64_t k, int64_t part, float* to) {
        const uint8_t* codes = few.codes(column);
        auto decode_some = [&](u8v some) {
            seen = largest_byte(seen, some & uint8_t(0x7f));
            const Bytes<F> bytes = shifted_codes<F>(some);
            for (int byte = 0; byte < 4; ++byte) store(to + byte * part, bytes.of[byte]);
            to += LANES;
        };
        int64_t i = 0;
        for (; i + STEP <= k; i += STEP) decode_some(load<u8v>(codes + i));
        if (i == k) return;
        uint8_t rest[STEP] = {};
        std::memcpy(rest, codes + i, k - i);
        decode_some(load<u8v>(rest));
    }

    void mend(const Part& part, float* sums) const { few.mend<F>(part, seen, sums); }
};

// Columns of BF16 numbers, and rows as they are.
struct NumberColumns {
    const FewRows& few;

    template <class T>
    static void spread(const T* from, int64_t k, int64_t part, float* to) {
        for (int64_t i = 0; i < k; i += STEP, to += LANES)
            for (int chain = 0; chain < 4; ++chain) {
                const int64_t at = i + chain * LANES;
                store(to + chain * part, at < k ? load_f32(from + at, least_of<int64_t>(LANES, k - at)) : f32v{});
            }
    }

    static Row row(const float* x, int64_t k, float* to) {
        spread(x, k, part_of(k), to);
        return {x, to, 1.0f};
    }

    void decode(int64_t column, int64_t k, int64_t part, float* to) {
        spread(static_cast<const Bf16*>(few.p.b.data) + column * few.p.b.row_stride, k, part, to);
    }

    void mend(const Part&, float*) const {}
};

template <class Columns>
struct ManyRows {
    const GemmProblem& p;
    const Row* rows;  // their shifted numbers lie chain by chain
    const FewRows few{p, rows};
    const int64_t part = part_of(p.k), step = room_of(p.k);  // of a chain; of a row or a column
    const int64_t at_once = least_of(SOME, DECODED / step);

    static int64_t dense_of(int64_t k) { return (k + LANES - 1) / LANES * LANES; }

    // Sums of decoded columns from `column` on.
    void multiply(const Part& of, int64_t column, int64_t count, const float* decoded, float* sums) const {
        for (int64_t row = of.row; row < of.last_row;) {
            const Sides sides{rows[row].shifted, decoded, dense_of(p.k) + step, step, part};
            float* own = of.of(sums, row, column);
            const bool whole = row + SIDE <= of.last_row;
            if (whole) multiply_across<SIDE>(sides, count, own);
            else multiply_across<1>(sides, count, own);
            for (int64_t r = row; r < row + (whole ? SIDE : 1); ++r)
                for (int64_t c = 0; c < count; ++c) of.of(sums, r, column)[c] *= rows[r].unshift;
            row += whole ? SIDE : 1;
        }
    }

    void multiply_columns(int64_t first, int64_t last) const {
        alignas(64) float decoded[DECODED];
        float sums[AT_ONCE * SOME];
        for (int64_t row = 0; row < p.m; row += AT_ONCE) {
            const Part whole{row, least_of(row + AT_ONCE, p.m), first, last};
            Columns columns{few};
            for (int64_t n = first; n < last; n += at_once) {
                const int64_t count = least_of(at_once, last - n);
                for (int64_t c = 0; c < count; ++c) columns.decode(n + c, p.k, part, decoded + c * step);
                multiply(whole, n, count, decoded, sums);
            }
            columns.mend(whole, sums);
            few.finish(whole, sums);
        }
    }

    void run() const {
        parallel_for((p.n + SOME - 1) / SOME, 1, [&](int64_t begin, int64_t end) {
            for (int64_t group = begin; group < end; ++group) multiply_columns(group * SOME, least_of((group + 1) * SOME, p.n));
        });
    }
};

template <class Columns>
void many_rows_of(const GemmProblem& p) {
    static thread_local Scratch numbers;
    static thread_local std::vector<Row> rows;
    const int64_t dense = ManyRows<Columns>::dense_of(p.k), room = room_of(p.k);
    rows.resize(p.m);
    float* memory = numbers.floats(p.m * (dense + room));
    parallel_for(p.m, largest<int64_t>(1, 4096 / p.k), [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            float* x = memory + row * (dense + room);
            read_row(p.a, row, p.k, x);
            rows[row] = Columns::row(x, p.k, x + dense);
        }
    });
    ManyRows<Columns>{p, rows.data()}.run();
    numbers.trim();
}

void many_rows(const GemmProblem& p) {
    switch (p.b.element) {
        case Element::e4m3: return many_rows_of<CodeColumns<E4M3>>(p);
        case Element::e5m2: return many_rows_of<CodeColumns<E5M2>>(p);
        default: return many_rows_of<NumberColumns>(p);  // BF16
    }
}

// Where columns are better decoded once for all rows than read anew for three at a time.
inline bool takes_many_rows(const GemmProblem& p) {
    const bool is_bf16 = p.b.element == Element::bf16 && p.b.column_stride == 1;
    return p.m >= MANY && !p.block && room_of(p.k) <= DECODED && (is_bf16 || has_codes_in_rows(p.b));
}

}  // namespace
}  // namespace octavo
