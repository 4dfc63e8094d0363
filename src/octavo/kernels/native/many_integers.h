// The integers of weight_rows.h for several rows of a: codes of a few columns are widened to 16 bits once, and SIDE rows
// times ACROSS columns of sums stay in registers. Integers add up to the same in any order.
#pragma once

#include "many_rows.h"
#include "weight_rows.h"

namespace octavo {
namespace {

struct IntegerSides {
    const int16_t *rows, *columns;
    int64_t step;   // from one row or column to the next
    int64_t count;  // of each
};

template <int ROWS_, int COLUMNS_>
__attribute__((noinline)) void multiply_integer_sides(const IntegerSides& of, float* out) {
    i32v sums[ROWS_][COLUMNS_] = {};
    for (int64_t k = 0; k < of.count; k += INTEGERS) {
        i16v right[COLUMNS_];
        for (int c = 0; c < COLUMNS_; ++c) right[c] = load<i16v>(of.columns + c * of.step + k);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS_; ++r) {
            const i16v left = load<i16v>(of.rows + r * of.step + k);
#pragma GCC unroll 4
            for (int c = 0; c < COLUMNS_; ++c) sums[r][c] += pairs_of_products(left, right[c]);
        }
    }
    for (int r = 0; r < ROWS_; ++r)
        for (int c = 0; c < COLUMNS_; ++c) {
            int32_t total = 0;
            for (int i = 0; i < LANES; ++i) total += sums[r][c][i];
            out[r * SOME + c] = float(total);
        }
}

template <int ROWS_>
void multiply_integers_across(const IntegerSides& of, int64_t columns, float* out) {
    IntegerSides own = of;
    int64_t c = 0;
    for (; c + ACROSS <= columns; c += ACROSS, own.columns += ACROSS * of.step) multiply_integer_sides<ROWS_, ACROSS>(own, out + c);
    for (; c < columns; ++c, own.columns += of.step) multiply_integer_sides<ROWS_, 1>(own, out + c);
}

struct ManyIntegers {
    const GemmProblem& p;
    const Int8Sums& by;
    const int64_t step = padded_integers(p.k);
    const int64_t at_once = least_of(SOME, 2 * DECODED / step);
    const WeightRows<Int8Sums> whole{p, by};

    void widen(int64_t column, int16_t* to) const {
        const int8_t* codes = static_cast<const int8_t*>(p.b.data) + column * p.b.row_stride;
        int64_t k = 0;
        for (; k + INTEGERS <= p.k; k += INTEGERS) store(to + k, __builtin_convertvector(load<s8h>(codes + k), i16v));
        for (; k < step; ++k) to[k] = k < p.k ? codes[k] : 0;
    }

    void columns(int64_t first, int64_t last) const {
        alignas(64) int16_t widened[2 * DECODED];
        float sums[SIDE * SOME];
        for (int64_t n = first; n < last; n += at_once) {
            const int64_t count = least_of(at_once, last - n);
            for (int64_t c = 0; c < count; ++c) widen(n + c, widened + c * step);
            for (int64_t row = 0; row < p.m;) {
                const IntegerSides sides{by.codes + row * step, widened, step, step};
                const int64_t rows = row + SIDE <= p.m ? SIDE : 1;
                if (rows == SIDE) multiply_integers_across<SIDE>(sides, count, sums);
                else multiply_integers_across<1>(sides, count, sums);
                whole.finish(row, rows, n, n + count, sums);
                row += rows;
            }
        }
    }

    void run() const {
        parallel_for((p.n + SOME - 1) / SOME, 1, [&](int64_t begin, int64_t end) {
            for (int64_t group = begin; group < end; ++group) columns(group * SOME, least_of((group + 1) * SOME, p.n));
        });
    }
};

inline void int8_rows(const GemmProblem& p, const int16_t* codes, const float* scales) {
    const Int8Sums sums{p, codes, scales};
    if (p.m >= MANY && padded_integers(p.k) <= 2 * DECODED) ManyIntegers{p, sums}.run();
    else WeightRows<Int8Sums>{p, sums}.run();
}

}  // namespace
}  // namespace octavo
