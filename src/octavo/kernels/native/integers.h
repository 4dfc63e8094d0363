// INT8 GEMM of a decoder: out = (Σ_k a_int8 · b_int8) · scale_a[m] · scale_b[n] + bias, sums in INT32.
//
// a [M, K] FP32, quantized here with one scale a row, codes kept in 16 bits, rows `stride` apart and zero-padded; b [N, K]
// row-major INT8, scale_b [N]; out [M, N] FP32. vpmaddwd multiplies 16-bit pairs and adds the two products, |sum| <= 2 · 128 ·
// 128 = 2^15, so INT32 holds K up to 2^17 whatever the codes; vpmaddubsw would take bytes but saturates its sums at 16 bits.
// Integer sums are exact in any order, so rows do not depend on one another and every level gives the same bits
// (numerics/integers.py is the definition).
//
// Up to three rows read b as it lies in memory, once for each three rows of a; more rows widen b to 16 bits once for all
// (tiles.h).
#pragma once

#include "many_rows.h"
#include "quantize.h"

namespace octavo {
namespace {

constexpr int64_t INTEGERS = 2 * LANES;  // 16-bit integers in a vector

typedef int8_t s8h __attribute__((vector_size(OCTAVO_WIDTH / 2)));  // as many lanes as i16v

// Lane i: a[2 i] · b[2 i] + a[2 i + 1] · b[2 i + 1].
inline i32v multiply_add_pairs(i16v a, i16v b) {
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

// Quantizes one row [k] to INT8 codes: code = RNE(x / scale), clamped to [-⌊half_range⌋ - 1, ⌊half_range⌋], scale = amax /
// half_range. NaN or Inf anywhere gives codes 0 and scale NaN, so that the whole output row is NaN. numerics/integers.py is the
// definition.
inline void quantize_row_int8(const float* x, int64_t k, const IntegerRule& rule, int16_t* codes, float* scale) {
    std::memset(codes, 0, padded_integers(k) * sizeof(int16_t));
    const uint32_t amax = largest_magnitude(x, k);
    *scale = amax < EXPONENT ? largest(bits_as<float>(amax) / rule.half_range, rule.least_scale) : __builtin_nanf("");
    if (amax >= EXPONENT) return;
    constexpr float rounder = 12582912.0f;  // 1.5 · 2^23, where FP32's ulp is 1: adding it rounds to nearest even
    const float encode_scale = 1.0f / *scale, most = float(int(rule.half_range)), least_code = -most - 1;
    for (int64_t i = 0; i < k; ++i) {
        const float limited = least_of(largest(x[i] * encode_scale, least_code), most);
        codes[i] = int16_t((limited + rounder) - rounder);
    }
}

// The quantized rows of a and the problem; finish() is shared by both kernels.
struct Integers {
    const GemmProblem& p;
    const int16_t* codes;
    const float* scales;  // of the rows of a
    const int64_t stride = padded_integers(p.k);

    const int8_t* column(int64_t n) const { return static_cast<const int8_t*>(p.b.data) + n * p.b.row_stride; }

    // out = sum · scale_a · scale_b + bias, in this order; sums are already FP32 [row][SUM_COLUMNS].
    void finish(const Part& part, float* sums) const {
        for (int64_t row = part.row; row < part.last_row; ++row)
            for (int64_t n = part.column; n < part.last_column; n += LANES) {
                const int64_t some = least_of<int64_t>(LANES, part.last_column - n);
                f32v own = load<f32v>(part.of(sums, row, n)) * all(scales[row]) * load_f32(p.b.scale + n, some);
                if (p.bias) own = own + load_f32(p.bias + n, some);
                store_f32(static_cast<float*>(p.out) + row * p.n + n, own, some);
            }
    }
};

// Up to three rows of a at a time against b in memory order. One thread owns SUM_COLUMNS columns.
struct FewIntegers {
    const Integers& of;
    const int64_t k = of.p.k;

    template <int ROWS_>
    void multiply(int64_t row, int64_t n, float* out) const {
        const int8_t* weights = of.column(n);
        const int16_t* x = of.codes + row * of.stride;
        i32v sums[ROWS_] = {};
        auto add = [&](s8h some, int64_t at) {
            const i16v own = __builtin_convertvector(some, i16v);
            for (int r = 0; r < ROWS_; ++r) sums[r] += multiply_add_pairs(own, load<i16v>(x + r * of.stride + at));
        };
        int64_t at = 0;
        for (; at + INTEGERS <= k; at += INTEGERS) add(load<s8h>(weights + at), at);
        if (at < k) {
            int8_t rest[INTEGERS] = {};
            std::memcpy(rest, weights + at, k - at);
            add(load<s8h>(rest), at);
        }
        for (int r = 0; r < ROWS_; ++r) {
            int32_t total = 0;
            for (int i = 0; i < LANES; ++i) total += sums[r][i];
            out[r * SUM_COLUMNS] = float(total);
        }
    }

    template <int ROWS_>
    void some_rows(int64_t row, int64_t first, int64_t last) const {
        float sums[ROWS_ * SUM_COLUMNS];
        for (int64_t n = first; n < last; ++n) multiply<ROWS_>(row, n, sums + n - first);
        of.finish({row, row + ROWS_, first, last}, sums);
    }

    void run() const {
        const GemmProblem& p = of.p;
        parallel_for((p.n + SUM_COLUMNS - 1) / SUM_COLUMNS, largest<int64_t>(1, 16384 / (k * SUM_COLUMNS)), [&](int64_t begin, int64_t end) {
            for (int64_t group = begin; group < end; ++group) {
                const int64_t first = group * SUM_COLUMNS, last = least_of(first + SUM_COLUMNS, p.n);
                int64_t row = 0;
                for (; row + 3 <= p.m; row += 3) some_rows<3>(row, first, last);
                if (row + 2 == p.m) some_rows<2>(row, first, last);
                if (row + 1 == p.m) some_rows<1>(row, first, last);
            }
        });
    }
};

// Arithmetic of a tile on pairs of 16-bit integers. A word of codes k0 k1 k2 k3 gives the pairs (k0, k2) and (k1, k3): two
// shifts widen it, where neighbours would need a shuffle. a is paired the same way, so that each k meets its own.
struct IntegerPairs {
    typedef uint32_t Number;
    typedef i32v Vector;
    static constexpr int CHAINS = 1, IN_WORD = 1;

    static i32v number(u32v pair, int) { return (i32v)pair; }
    static i32v spread(uint32_t pair) { return (i32v)all(pair); }
    static i32v add(i32v sum, i32v left, i32v right) { return sum + multiply_add_pairs((i16v)left, (i16v)right); }
};

// Many rows: tiles.h with INT32 sums.
struct ManyIntegers {
    struct Seen {};
    const Integers& of;
    const Tiles<IntegerPairs>& tiles;
    const GemmProblem& p = of.p;

    // Pairs of a's codes [pair][row], zeros past K.
    void pair_tile(int64_t tile) const {
        const int64_t first = tiles.first_row(tile), count = tiles.rows_of(tile);
        for (int64_t r = 0; r < count; ++r) {
            uint32_t* to = tiles.chain(tile, 0) + r;
            auto code = [&](int64_t k) { return uint32_t(uint16_t(k < p.k ? of.codes[(first + r) * of.stride + k] : 0)); };
            for (int64_t k = 0; k < 2 * tiles.places; k += 4)
                for (int64_t i = 0; i < 2; ++i, to += count) *to = code(k + i) | code(k + i + 2) << 16;
        }
    }

    ByteRows bytes(int64_t n, int64_t last) const {
        return {reinterpret_cast<const uint8_t*>(of.column(n)), p.b.row_stride, last - n, p.k};
    }

    // Widens columns to pairs [pair][WIDE]; shifts extend the sign.
    Seen unpack(const ByteRows& columns, int64_t, uint32_t* panel) const {
        columns.for_words([&](int64_t step, int v, const u32v(&words)[LANES]) {
            uint32_t* to = panel + step * 2 * LANES * WIDE + v * LANES;
            for (int i = 0; i < LANES; ++i, to += 2 * WIDE) {
                const i16v codes = bits_as<i16v>(words[i]);
                store(to, (i16v)(codes << 8) >> 8);
                store(to + WIDE, codes >> 8);
            }
        });
        return {};
    }

    void finish(const Part& part, Seen, const uint32_t* found) const {
        float sums[AT_ONCE * SUM_COLUMNS];
        for (int64_t r = 0; r < part.last_row - part.row; ++r)
            for (int i = 0; i < WIDE; i += LANES)
                store(sums + r * SUM_COLUMNS + i, __builtin_convertvector(load<i32v>(found + r * WIDE + i), f32v));
        of.finish(part, sums);
    }

    void run() const {
        for (int64_t tile = 0; tile < tiles.count; ++tile) pair_tile(tile);
        TiledGemm<IntegerPairs, ManyIntegers>{tiles, *this, p.n}.run();
    }
};

// Multiplies quantized rows codes [M][stride] with scales [M].
inline void integer_rows(const GemmProblem& p, const int16_t* codes, const float* scales) {
    static thread_local Scratch pairs;
    const Integers of{p, codes, scales};
    if (p.m < MIN_MANY_ROWS) return FewIntegers{of}.run();
    Tiles<IntegerPairs> tiles{nullptr, p.m, (p.k + STEP - 1) / STEP * STEP / 2};
    tiles.data = reinterpret_cast<uint32_t*>(pairs.floats(tiles.size()));
    ManyIntegers{of, tiles}.run();
    pairs.trim();
}

}  // namespace
}  // namespace octavo
