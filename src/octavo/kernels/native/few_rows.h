// GEMM with few rows of a, as in generation: out = (a · bᵀ) · scales + bias, FP32 sums.
//
// a [M, K], any element, M <= 16; b [N, K] row-major FP8 codes or BF16 (the weight); out [M, N] row-major. A token's time is
// the time to read the weight, so b's words (words.h) are read once, in the order of memory, and multiplied with up to three
// rows of a; there is no packing of b. Each row of a is converted to FP32 once, shifted, and permuted to the order in which a
// word's numbers come out.
//
// One thread owns SUM_COLUMNS rows of b (columns of the output), all rows of a. A lane is one chain of a sum; lanes are added
// at the end. A row's result does not depend on the other rows, here or in many_rows.h, so an answer does not depend on what
// else is served with it (tests/unit/inference/test_read_rows.py).
//
// Checked for all levels in tests/native/gemm.cpp and tests/oracle/test_native_gemm.py; a decoder's time:
// benchmarks/results/decode_*.md.
#pragma once

#include "kernels.h"
#include "memory.h"
#include "parallel.h"
#include "words.h"

namespace octavo {
namespace {

// The scales of a GEMM: a block's sums are multiplied by the block's, or finished sums by the only one.
struct Scales {
    const GemmProblem& p;
    const int64_t blocks = p.block ? (p.k + p.block - 1) / p.block : 1;
    const bool wide_columns = reaches_far(p.b, p.n);  // sum · scale_a · scale_b might leave FP32 halfway
    const bool wide = wide_columns || reaches_far(p.a, p.m);

    float of(const Operand& operand, int64_t row, int64_t block) const {
        return operand.scale ? operand.scale[(operand.scale_per_row ? row * blocks : 0) + block] : 1.0f;
    }

    // Depends on this row's scale and the columns' alone, so that a row's rounding does not depend on other rows.
    bool is_wide(int64_t row, int64_t block) const { return wide_columns || is_far(of(p.a, row, block)); }

    // sum · scale_a · scale_b, in this order, as all of octavo's GEMMs; in FP64 where a scale is far from 1.
    float apply(float sum, int64_t row, int64_t column, int64_t block) const {
        const float left = of(p.a, row, block), right = of(p.b, column, block);
        return is_wide(row, block) ? static_cast<float>(double(sum) * left * right) : sum * left * right;
    }

    // Scales finished sums of `count` <= LANES columns; with blocks they are scaled already.
    f32v finished(f32v sums, int64_t row, int64_t column, int64_t count) const {
        if (p.block) return sums;
        if (!is_wide(row, 0))
            return sums * all(of(p.a, row, 0)) * (p.b.scale && p.b.scale_per_row ? load_f32(p.b.scale + column, count) : all(of(p.b, 0, 0)));
        for (int64_t i = 0; i < count; ++i) sums[i] = apply(sums[i], row, column + i, 0);
        return sums;
    }

private:
    static bool is_far(float scale) {
        // Outside [2^-60, 2^60], 0 and NaN included: between, a sum of codes times one scale cannot leave FP32.
        constexpr uint32_t low = (127u - 60) << 23, high = (127u + 60) << 23;  // the bits of 2^-60 and 2^60
        return bits_as<uint32_t>(scale) - low > high - low;  // unsigned: one comparison for both ends
    }

    bool reaches_far(const Operand& operand, int64_t rows) const {
        const int64_t count = operand.scale ? (operand.scale_per_row ? rows : 1) * blocks : 0;
        uint32_t far = 0;  // OR instead of an early exit, so that the loop is vectorized
        for (int64_t i = 0; i < count; ++i) far |= is_far(operand.scale[i]);
        return far;
    }
};

constexpr int64_t MAX_FEW_ROWS = 16;  // rows of a; more are a GEMM for gemm.h or many_rows.h
// Columns of the output finished together; the sums of 16 rows are 2 KiB with AVX2, 4 KiB with AVX-512.
constexpr int64_t SUM_COLUMNS = 4 * LANES;

inline bool has_codes_in_rows(const Operand& b) {
    return b.column_stride == 1 && (b.element == Element::e4m3 || b.element == Element::e5m2);
}

inline bool has_words_in_rows(const Operand& b) {
    return has_codes_in_rows(b) || (b.column_stride == 1 && b.element == Element::bf16);
}

inline bool use_few_rows(const GemmProblem& p) { return p.m <= MAX_FEW_ROWS && has_codes_in_rows(p.b); }

// One row of an operand, [k], converted to FP32 without its scale; K-major operands are gathered.
template <class F>
void read_codes(const Operand& from, int64_t row, int64_t k, float* to) {
    const uint8_t* codes = static_cast<const uint8_t*>(from.data) + row * from.row_stride;
    for (int64_t i = 0; i < k; i += LANES) {
        uint8_t some[LANES] = {};
        const int64_t count = least_of<int64_t>(LANES, k - i);
        for (int64_t j = 0; j < count; ++j) some[j] = codes[(i + j) * from.column_stride];
        store_f32(to + i, decode<F>(some), count);
    }
}

template <class T>
void read_numbers(const Operand& from, int64_t row, int64_t k, float* to) {
    const T* x = static_cast<const T*>(from.data) + row * from.row_stride;
    if (from.column_stride != 1) {
        for (int64_t i = 0; i < k; ++i) to[i] = as_f32(x[i * from.column_stride]);
        return;
    }
    for (int64_t i = 0; i < k; i += LANES) {
        const int64_t count = least_of<int64_t>(LANES, k - i);
        store_f32(to + i, load_f32(x + i, count), count);
    }
}

inline void read_row(const Operand& from, int64_t row, int64_t k, float* to) {
    switch (from.element) {
        case Element::e4m3: return read_codes<E4M3>(from, row, k, to);
        case Element::e5m2: return read_codes<E5M2>(from, row, k, to);
        case Element::f32: return read_numbers<float>(from, row, k, to);
        case Element::bf16: return read_numbers<Bf16>(from, row, k, to);
        case Element::f16: return read_numbers<F16>(from, row, k, to);
        case Element::int8: break;  // integers.h
    }
}

// One row of a twice: x [k] unshifted, and `shifted` for b's words, [blocks][steps][IN_WORD][LANES]: for each vector of words
// the numbers that meet place 0 of all lanes, then place 1, and so on. So the inner loop loads whole vectors of both operands.
// Zeros pad each block.
struct Row {
    const float* x;
    const float* shifted;
    float unshift;
};

// Fills `shifted` from x; block is K where the scales do not change along it.
template <class W>
Row shift_row(const float* x, int64_t k, int64_t block, float* shifted) {
    const Shift shift = W::shift(x, k);
    const int64_t padded = steps_of<W>(block) * STEP_OF<W>;
    for (int64_t begin = 0; begin < k; begin += block)
        for (int64_t i = 0; i < padded; i += STEP_OF<W>) {
            float some[STEP_OF<W>] = {};
            const int64_t known = least_of(block, k - begin) - i;
            if (known > 0) std::memcpy(some, x + begin + i, least_of(STEP_OF<W>, known) * sizeof(float));
            float* to = shifted + begin / block * padded + i;
            for_places<W>([&](int number, int lane, int place) { to[place * LANES + lane] = some[number] * shift.factor; });
        }
    return {x, shifted, shift.unshift};
}

constexpr int64_t AHEAD = 2048;  // bytes by which prefetches are ahead of the next columns, in the order of memory

// out [ROWS_][COLUMNS_] = Σ_k shifted row · column, over `count` numbers of COLUMNS_ columns of b that lie `stride` apart;
// `seen` becomes the byte maxima of code magnitudes. A word of b is decoded once for ROWS_ rows.
template <class W, int ROWS_, int COLUMNS_>
inline __attribute__((always_inline)) void dot(const Row* rows, int64_t offset, const typename W::Element* columns,
                                               int64_t stride, int64_t count, float* out, u8v& seen) {
    f32v sums[ROWS_][COLUMNS_] = {};
    auto multiply = [&](u32v words, int64_t at, int c) __attribute__((always_inline)) {
        seen = largest_byte(seen, W::magnitudes(words));
        u32v halves[W::HALVES];
        W::halve(words, halves);
        for (int place = 0; place < W::IN_WORD; ++place) {
            const f32v number = number_of(halves[place / 2], place % 2);
            for (int r = 0; r < ROWS_; ++r) sums[r][c] = fused(number, load<f32v>(rows[r].shifted + at + place * LANES), sums[r][c]);
        }
    };
    // Two vectors of words an iteration: with AVX2's FP8 they are the 64 bytes of the one cache line that is prefetched.
    int64_t k = 0;
    for (; k + 2 * STEP_OF<W> <= count; k += 2 * STEP_OF<W>)
        for (int c = 0; c < COLUMNS_; ++c) {
            const typename W::Element* own = columns + c * stride + k;
            // The COLUMNS_ prefetches of one k are consecutive lines, so every line of the next columns is asked for once, in
            // order.
            __builtin_prefetch(reinterpret_cast<const char*>(columns + COLUMNS_ * (k + stride)) + c * 64 + AHEAD);
            multiply(load<u32v>(own), offset + k, c);
            multiply(load<u32v>(own + STEP_OF<W>), offset + k + STEP_OF<W>, c);
        }
    for (; k + STEP_OF<W> <= count; k += STEP_OF<W>)
        for (int c = 0; c < COLUMNS_; ++c) multiply(load<u32v>(columns + c * stride + k), offset + k, c);
    if (k < count)
        for (int c = 0; c < COLUMNS_; ++c) {
            typename W::Element rest[STEP_OF<W>] = {};
            std::memcpy(rest, columns + c * stride + k, (count - k) * sizeof *rest);
            multiply(load<u32v>(rest), offset + k, c);
        }
    for (int r = 0; r < ROWS_; ++r)
        for (int c = 0; c < COLUMNS_; ++c) out[r * COLUMNS_ + c] = sum_of_lanes(sums[r][c]);
}

// The sum for one row and column without a shift, exact decoding: for NaN and Inf codes and rows of many binades. Slower, and
// rare.
template <class W>
float unshifted_dot(const float* x, const typename W::Element* column, int64_t count) {
    f32v sum = {};
    for (int64_t k = 0; k < count; k += LANES) {
        const int64_t some = least_of<int64_t>(LANES, count - k);
        sum = fused(W::decode(column + k, some), load_f32(x + k, some), sum);
    }
    return sum_of_lanes(sum);
}

// A part of the output whose sums lie together, [row][SUM_COLUMNS]; at most SUM_COLUMNS columns.
struct Part {
    int64_t row, last_row, column, last_column;

    float* of(float* sums, int64_t own_row, int64_t own_column) const {
        return sums + (own_row - row) * SUM_COLUMNS + own_column - column;
    }
};

struct FewRows {
    const GemmProblem& p;
    const Row* rows;
    const Scales scales{p};
    const int64_t width = p.block ? p.block : p.k;  // columns of K that share a scale

    template <class W>
    const typename W::Element* column(int64_t n) const {
        return static_cast<const typename W::Element*>(p.b.data) + n * p.b.row_stride;
    }

    // ROWS_ x COLUMNS_ sums over all of K into out [row][SUM_COLUMNS]; with blocks, each block's sum is scaled before it is
    // added.
    template <class W, int ROWS_, int COLUMNS_>
    void multiply(int64_t row, int64_t n, float* out, u8v& seen) const {
        const int64_t padded = steps_of<W>(width) * STEP_OF<W>;
        for (int64_t begin = 0, block = 0; begin < p.k; begin += width, ++block) {
            float sums[ROWS_ * COLUMNS_];
            const int64_t count = least_of(width, p.k - begin);
            dot<W, ROWS_, COLUMNS_>(rows + row, block * padded, column<W>(n) + begin, p.b.row_stride, count, sums, seen);
            for (int r = 0; r < ROWS_; ++r)
                for (int c = 0; c < COLUMNS_; ++c)
                    add(sums[r * COLUMNS_ + c] * rows[row + r].unshift, row + r, n + c, block, out[r * SUM_COLUMNS + c]);
        }
    }

    template <class W>
    void multiply_unshifted(int64_t row, int64_t n, float* out) const {
        for (int64_t begin = 0, block = 0; begin < p.k; begin += width, ++block) {
            const int64_t count = least_of(width, p.k - begin);
            add(unshifted_dot<W>(rows[row].x + begin, column<W>(n) + begin, count), row, n, block, *out);
        }
    }

    void add(float sum, int64_t row, int64_t n, int64_t block, float& total) const {
        const float scaled = p.block ? scales.apply(sum, row, n, block) : sum;
        total = block ? total + scaled : scaled;
    }

    // 1 x 4, 2 x 2 or 3 x 2 sums at once: independent chains, so that FMAs do not wait for one another.
    template <class W, int ROWS_>
    void multiply_rows(int64_t row, int64_t first, int64_t last, float* out, u8v& seen) const {
        constexpr int columns = ROWS_ == 1 ? 4 : 2;
        int64_t n = first;
        for (; n + columns <= last; n += columns) multiply<W, ROWS_, columns>(row, n, out + n - first, seen);
        for (; n < last; ++n) multiply<W, ROWS_, 1>(row, n, out + n - first, seen);
    }

    // All rows, three at a time: columns [first, last) of b come from memory for the first three, from the cache for the rest.
    template <class W>
    void multiply_columns(int64_t first, int64_t last, float* out) const {
        u8v seen = {};
        int64_t row = 0;
        for (; row + 3 <= p.m; row += 3) multiply_rows<W, 3>(row, first, last, out + row * SUM_COLUMNS, seen);
        if (row + 2 == p.m) multiply_rows<W, 2>(row, first, last, out + row * SUM_COLUMNS, seen);
        if (row + 1 == p.m) multiply_rows<W, 1>(row, first, last, out + row * SUM_COLUMNS, seen);
        recompute_special<W>({0, p.m, first, last}, seen, out);
    }

    template <class W>
    bool has_special(int64_t n) const {
        u8v seen = {};
        for (int64_t k = 0; k < p.k; k += STEP_OF<W>) {
            typename W::Element some[STEP_OF<W>] = {};
            std::memcpy(some, column<W>(n) + k, least_of(STEP_OF<W>, p.k - k) * sizeof *some);
            seen = largest_byte(seen, W::magnitudes(load<u32v>(some)));
        }
        return W::has_special(seen);
    }

    // Recomputes sums without a shift: of columns with a NaN or Inf code, and of rows whose unshift is 0.
    template <class W>
    void recompute_special(const Part& part, u8v seen, float* sums) const {
        const bool special = W::has_special(seen);
        for (int64_t n = part.column; n < part.last_column; ++n) {
            const bool whole_column = special && has_special<W>(n);
            for (int64_t row = part.row; row < part.last_row; ++row)
                if (whole_column || rows[row].unshift == 0) multiply_unshifted<W>(row, n, part.of(sums, row, n));
        }
    }

    // Scales, bias and one rounding to the output's dtype.
    template <class T>
    void finish_as(const Part& part, float* sums) const {
        for (int64_t row = part.row; row < part.last_row; ++row)
            for (int64_t n = part.column; n < part.last_column; n += LANES) {
                const int64_t some = least_of<int64_t>(LANES, part.last_column - n);
                f32v own = scales.finished(load<f32v>(part.of(sums, row, n)), row, n, some);
                if (p.bias) own = own + load_f32(p.bias + n, some);
                store_f32(static_cast<T*>(p.out) + row * p.n + n, own, some);
            }
    }

    void finish(const Part& part, float* sums) const {
        if (p.out_dtype == Dtype::f32) finish_as<float>(part, sums);
        else if (p.out_dtype == Dtype::bf16) finish_as<Bf16>(part, sums);
        else finish_as<F16>(part, sums);
    }

    // At least 16,384 multiplications for a row of a part: fewer are not worth another thread.
    template <class W>
    void run() const {
        const int64_t groups = (p.n + SUM_COLUMNS - 1) / SUM_COLUMNS;
        parallel_for(groups, largest<int64_t>(1, 16384 / (p.k * SUM_COLUMNS)), [&](int64_t begin, int64_t end) {
            for (int64_t group = begin; group < end; ++group) {
                float sums[MAX_FEW_ROWS * SUM_COLUMNS];
                const int64_t first = group * SUM_COLUMNS, last = least_of(first + SUM_COLUMNS, p.n);
                multiply_columns<W>(first, last, sums);
                finish({0, p.m, first, last}, sums);
            }
        });
    }
};

// Reads and shifts the rows of a, in parallel where K is large, then multiplies. `dense` numbers of x, then `padded` shifted
// ones, a row.
template <class W>
void few_rows_of(const GemmProblem& p) {
    static thread_local Scratch numbers;
    const int64_t width = p.block ? p.block : p.k, dense = (p.k + LANES - 1) / LANES * LANES;
    const int64_t padded = (p.k + width - 1) / width * steps_of<W>(width) * STEP_OF<W>;
    Row rows[MAX_FEW_ROWS];
    float* memory = numbers.floats(p.m * (dense + padded));
    parallel_for(p.m, largest<int64_t>(1, 4096 / p.k), [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            float* x = memory + row * (dense + padded);
            read_row(p.a, row, p.k, x);
            rows[row] = shift_row<W>(x, p.k, width, x + dense);
        }
    });
    FewRows{p, rows}.run<W>();
    numbers.trim();
}

void few_rows(const GemmProblem& p) {
    switch (p.b.element) {
        case Element::e4m3: return few_rows_of<CodeWords<E4M3>>(p);
        case Element::e5m2: return few_rows_of<CodeWords<E5M2>>(p);
        default: return few_rows_of<NumberWords>(p);
    }
}

}  // namespace
}  // namespace octavo
