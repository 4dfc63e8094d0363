// Products with weights of BF16 numbers or INT8 codes, as in generation: the counterpart of few_rows.h for weights that are
// no FP8 codes. A weight's row is read as it lies in memory, once for every ROWS_AT_ONCE rows of a.
//
// A row's sums do not depend on the others: BF16's are the same four chains for any number of rows, INT8's are integers.
#pragma once

#include "few_rows.h"
#include "quantize.h"

namespace octavo {
namespace {

constexpr int ROWS_AT_ONCE = 3;
constexpr int64_t INTEGERS = 2 * LANES;  // of 16 bits, in a vector

// Sums of FP32 rows with rows of BF16 numbers.
struct Bf16Sums {
    const GemmProblem& p;

    template <int COUNT>
    void sums(int64_t row, int64_t column, float* out) const {
        const Bf16* weight = static_cast<const Bf16*>(p.b.data) + column * p.b.row_stride;
        const float* x = static_cast<const float*>(p.a.data) + row * p.a.row_stride;
        f32v chains[COUNT][4] = {};
        int64_t k = 0;
        for (; k + STEP <= p.k; k += STEP)
            for (int chain = 0; chain < 4; ++chain) {
                const f32v own = load_f32(weight + k + chain * LANES);
                for (int r = 0; r < COUNT; ++r)
                    chains[r][chain] = fused(own, load<f32v>(x + r * p.a.row_stride + k + chain * LANES), chains[r][chain]);
            }
        for (int chain = 0; k < p.k; k += LANES, ++chain) {
            const int64_t some = least_of<int64_t>(LANES, p.k - k);
            const f32v own = load_f32(weight + k, some);
            for (int r = 0; r < COUNT; ++r)
                chains[r][chain] = fused(own, load_f32(x + r * p.a.row_stride + k, some), chains[r][chain]);
        }
        for (int r = 0; r < COUNT; ++r)
            out[r * SOME] = sum_of_lanes((chains[r][0] + chains[r][1]) + (chains[r][2] + chains[r][3]));
    }

    f32v finished(f32v sums, int64_t, int64_t, int64_t) const { return sums; }
};

typedef int8_t s8h __attribute__((vector_size(OCTAVO_WIDTH / 2)));  // as many lanes as i16v

// Products of neighbours, added in pairs.
inline i32v pairs_of_products(i16v a, i16v b) {
#if defined(__AVX512BW__)
    return (i32v)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (i32v)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    i32v sums;
    for (int i = 0; i < LANES; ++i) sums[i] = a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
    return sums;
#endif
}

inline int64_t padded_integers(int64_t k) { return (k + INTEGERS - 1) / INTEGERS * INTEGERS; }

// Sums of rows of INT8 codes that lie in 16 bits, zeros behind their ends, with rows of INT8 codes.
struct Int8Sums {
    const GemmProblem& p;
    const int16_t* codes;
    const float* scales;  // of the rows of a

    template <int COUNT>
    void sums(int64_t row, int64_t column, float* out) const {
        const int8_t* weight = static_cast<const int8_t*>(p.b.data) + column * p.b.row_stride;
        const int64_t stride = padded_integers(p.k);
        const int16_t* x = codes + row * stride;
        i32v found[COUNT] = {};
        auto add = [&](s8h some, int64_t k) {
            const i16v own = __builtin_convertvector(some, i16v);
            for (int r = 0; r < COUNT; ++r) found[r] += pairs_of_products(own, load<i16v>(x + r * stride + k));
        };
        int64_t k = 0;
        for (; k + INTEGERS <= p.k; k += INTEGERS) add(load<s8h>(weight + k), k);
        if (k < p.k) {
            int8_t rest[INTEGERS] = {};
            std::memcpy(rest, weight + k, p.k - k);
            add(load<s8h>(rest), k);
        }
        for (int r = 0; r < COUNT; ++r) {
            int32_t total = 0;
            for (int i = 0; i < LANES; ++i) total += found[r][i];
            out[r * SOME] = float(total);
        }
    }

    f32v finished(f32v sums, int64_t row, int64_t column, int64_t some) const {
        return sums * all(scales[row]) * load_f32(p.b.scale + column, some);
    }
};

template <class S>
struct WeightRows {
    const GemmProblem& p;
    const S& by;

    void finish(int64_t row, int64_t rows, int64_t column, int64_t last, const float* found) const {
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t n = column; n < last; n += LANES) {
                const int64_t some = least_of<int64_t>(LANES, last - n);
                f32v own = by.finished(load<f32v>(found + r * SOME + n - column), row + r, n, some);
                if (p.bias) own = own + load_f32(p.bias + n, some);
                store_f32(static_cast<float*>(p.out) + (row + r) * p.n + n, own, some);
            }
    }

    template <int COUNT>
    void some_rows(int64_t row, int64_t column, int64_t last) const {
        float found[COUNT * SOME];
        for (int64_t n = column; n < last; ++n) by.template sums<COUNT>(row, n, found + n - column);
        finish(row, COUNT, column, last, found);
    }

    void columns(int64_t column, int64_t last) const {
        int64_t row = 0;
        for (; row + ROWS_AT_ONCE <= p.m; row += ROWS_AT_ONCE) some_rows<ROWS_AT_ONCE>(row, column, last);
        for (; row < p.m; ++row) some_rows<1>(row, column, last);
    }

    void run() const {
        parallel_for((p.n + SOME - 1) / SOME, largest<int64_t>(1, 16384 / (p.k * SOME)), [&](int64_t begin, int64_t end) {
            for (int64_t group = begin; group < end; ++group) columns(group * SOME, least_of((group + 1) * SOME, p.n));
        });
    }
};

inline void bf16_rows(const GemmProblem& p) {
    const Bf16Sums sums{p};
    WeightRows<Bf16Sums>{p, sums}.run();
}

// A row as INT8: numerics/integers.py is the definition. A row with NaN or Inf gets the scale NaN.
inline void integers_of(const float* x, int64_t k, const IntegerRule& rule, int16_t* codes, float* scale) {
    std::memset(codes, 0, padded_integers(k) * sizeof(int16_t));
    const uint32_t amax = largest_magnitude(x, k);
    *scale = amax < EXPONENT ? largest(bits_as<float>(amax) / rule.half_range, rule.least_scale) : __builtin_nanf("");
    if (amax >= EXPONENT) return;
    constexpr float rounder = 12582912.0f;  // 1.5 · 2^23: what is added to it is rounded to a whole number
    const float encode_scale = 1.0f / *scale, most = float(int(rule.half_range)), least_code = -most - 1;
    for (int64_t i = 0; i < k; ++i) {
        const float limited = least_of(largest(x[i] * encode_scale, least_code), most);
        codes[i] = int16_t((limited + rounder) - rounder);
    }
}

}  // namespace
}  // namespace octavo
