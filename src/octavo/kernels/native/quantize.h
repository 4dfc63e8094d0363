// Casts a matrix to FP8 with one scale a group: amax, scale, codes (or their values), counts.
//
//   amax = max |x| over the group's finite elements    encode_scale = scale rule(amax)    scale = 1 / encode_scale
//   code = RNE(x · encode_scale), saturated at the format's maximum, in FP32
//
// x [rows, columns], rows `stride` apart; codes [rows, columns], dense; scale, measured [row groups, column groups], dense.
// One thread owns a span of SPAN elements (tensorwise), a block (blockwise, rowwise), or a band of rows by up to COLUMN_TILE
// columns (one scale a column). Groups are measured and cast while they are in the first-level cache, so memory is read once;
// tensorwise dynamic scaling reads it twice, because no element can be cast before the last was measured.
//
// NaN and Inf show in the maximum of the magnitudes' bits, so the fast loops test nothing; a group that has one is measured
// again by a scalar loop. Definition: numerics/cast.py and numerics/scaling.py, equal to the bit at every level
// (tests/oracle/test_native_casts.py, tests/native/casts.cpp).
#pragma once

#include "dequantize.h"
#include "fp8.h"
#include "kernels.h"
#include "parallel.h"

namespace octavo {
namespace {

// Elements measured and cast together: 16 KiB of FP32 and 4 KiB of codes, in a first-level cache of 32 KiB.
constexpr int64_t SPAN = 4096;
constexpr int64_t COLUMN_TILE = 1024;  // columns with a scale each, at most: 4 KiB of amaxes and 4 KiB of scales
constexpr int64_t PARALLEL_ELEMENTS = 16384;  // fewer are not worth another thread

// Magnitudes are compared as integers: for non-negative FP32 the order of the bits is the order of the values, NaN above Inf
// above all finite numbers. Integer maxima need no rule for NaN.

inline uint32_t f32_bits(float value) { return bits_as<uint32_t>(value); }

// The largest magnitude of n elements, in FP32 bits; at least EXPONENT where one of them is NaN or Inf.
inline uint32_t largest_magnitude(const float* x, int64_t n) {
    u32v maxima[4] = {};  // four independent maxima hide the latency of one
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int part = 0; part < 4; ++part)
            maxima[part] = largest(maxima[part], load<u32v>(x + i + part * LANES) & MAGNITUDE);
    const u32v both = largest(largest(maxima[0], maxima[1]), largest(maxima[2], maxima[3]));
    uint32_t result = largest_lane(both);
    for (; i < n; ++i) result = largest(result, f32_bits(x[i]) & MAGNITUDE);
    return result;
}

// BF16 and FP16 are compared in their own 16 bits, twice the lanes, and only the maximum is converted.
template <class T>
inline uint32_t largest_magnitude(const T* x, int64_t n) {
    constexpr int lanes = 2 * LANES;
    u16v maxima[2] = {};
    int64_t i = 0;
    for (; i + 2 * lanes <= n; i += 2 * lanes)
        for (int part = 0; part < 2; ++part)
            maxima[part] = largest(maxima[part], load<u16v>(x + i + part * lanes) & uint16_t(0x7fff));
    const u16v both = largest(maxima[0], maxima[1]);
    const u32v pairs = bits_as<u32v>(both);
    T result = {uint16_t(largest_lane(largest(pairs & 0xffff, pairs >> 16)))};
    for (; i < n; ++i) result.bits = largest(result.bits, uint16_t(x[i].bits & 0x7fff));
    return f32_bits(as_f32(result));
}

struct Measurement {
    uint32_t amax = 0;  // of the finite elements, in FP32 bits
    int64_t nonfinite = 0;
};

// amax of rows of n elements, `stride` apart. The second loop runs only where the first saw NaN or Inf.
template <class T>
inline Measurement measure(const T* x, int64_t n, int64_t rows = 1, int64_t stride = 0) {
    Measurement measurement;
    for (int64_t r = 0; r < rows; ++r) measurement.amax = largest(measurement.amax, largest_magnitude(x + r * stride, n));
    if (measurement.amax < EXPONENT) return measurement;
    // For FP16, as_f32 maps its NaN and Inf to FP32's, so one test serves all dtypes.
    measurement.amax = 0;
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < n; ++i) {
            const uint32_t bits = f32_bits(as_f32(x[r * stride + i])) & MAGNITUDE;
            if (bits >= EXPONENT) ++measurement.nonfinite;
            else measurement.amax = largest(measurement.amax, bits);
        }
    return measurement;
}

// The encode scale for an amax, F::max / amax under the rule's rounding; numerics/scaling.py is the definition.
//
// All in FP64 until one rounding to FP32. `provided` is at least the smallest normal double, so that an amax of 0 divides to a
// finite number and its exponent field is valid. The result is clamped to FP32's normal numbers: its reciprocal, the decode
// scale, is then finite and not 0.
template <class F>
inline float encode_scale_of(float amax, const ScaleRule& rule) {
    const double floor = largest(rule.amax_floor, 2.2250738585072014e-308);
    const double provided = largest(static_cast<double>(amax), floor);
    if (rule.rounding == ScaleRounding::floor || rule.rounding == ScaleRounding::even) {
        // floor: 2^(max_exponent - floor(log2 amax)). even: amax is first rounded to the format's mantissa, by adding half of
        // its last place; a carry moves the exponent.
        const uint64_t half = rule.rounding == ScaleRounding::even ? uint64_t(1) << (51 - F::mantissa_bits) : 0;
        const int exponent = static_cast<int>((bits_as<uint64_t>(provided) + half) >> 52) - 1023;
        const int wanted = F::max_exponent - rule.margin - exponent;
        return bits_as<float>(uint32_t(least_of(largest(wanted, -126), 127) + 127) << 23);
    }
    const double target = rule.margin == 0 ? F::max : F::max * __builtin_ldexp(1.0, -rule.margin);
    const double quotient = target / provided;
    const float limited =
        static_cast<float>(least_of(largest(quotient, double(__FLT_MIN__)), double(__FLT_MAX__)));
    // rceil rounds the decode scale up to a power of two, so the encode scale down: its mantissa is dropped.
    return rule.rounding == ScaleRounding::rceil ? bits_as<float>(f32_bits(limited) & EXPONENT) : limited;
}

inline bool is_given(const QuantizeProblem& p, int64_t g) {
    return p.given_amax && (p.given_amax[g] > 0 || !p.measure_if_zero);
}

// The encode scale of group g; its decode scale is written unless it was given.
template <class F>
inline float group_scale(const QuantizeProblem& p, int64_t g, uint32_t measured_amax) {
    if (p.given_scale) return least_of(1.0f / p.given_scale[g], __FLT_MAX__);  // 1 / subnormal is Inf
    const float amax = is_given(p, g) ? p.given_amax[g] : bits_as<float>(measured_amax);
    const float encode_scale = encode_scale_of<F>(amax, p.rule);
    p.scale[g] = 1.0f / encode_scale;
    return encode_scale;
}

struct CastCounts {
    int64_t saturated = 0, underflowed = 0;
};

// Statistics of n lanes: finite elements beyond the maximum before saturation, and nonzero ones whose code is zero.
template <class F>
inline void count(CastCounts& counts, f32v x, f32v scaled, u32v codes, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t given = f32_bits(x[i]) & MAGNITUDE;
        if (given >= EXPONENT) continue;
        counts.saturated += bits_as<float>(f32_bits(scaled[i]) & MAGNITUDE) > F::max;
        counts.underflowed += given != 0 && (codes[i] & 0x7f) == 0;
    }
}

// Casts whole groups of 4 · LANES finite elements with one positive scale; returns how many, the caller does the rest.
//
// Prefetches n elements ahead, where the next span to be measured lies: memory goes on reading while these, which the
// first-level cache holds, are cast.
template <class F, class T>
inline int64_t cast_finite(const T* x, uint8_t* codes, int64_t n, float scale) {
    const f32v scales = all(scale);
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        f32v scaled[4];
        u32v magnitudes[4];
        for (int part = 0; part < 4; ++part) {
            __builtin_prefetch(x + i + part * LANES + n);
            scaled[part] = load_f32(x + i + part * LANES) * scales;
            magnitudes[part] = encode_magnitude<F>(scaled[part]);
        }
        store_bytes(codes + i, magnitudes, scaled);
    }
    return i;
}

// BF16 stays in pairs: two elements share a 32-bit lane until the codes are joined (encode_words), so a pair costs one load.
template <class F>
inline int64_t cast_finite(const Bf16* x, uint8_t* codes, int64_t n, float scale) {
    const f32v scales = all(scale);
    const u16v limit = word_limit<F>(scale);
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        __builtin_prefetch(x + i + n);
        const u16v low = load<u16v>(x + i), high = load<u16v>(x + i + 2 * LANES);
        store(codes + i, narrow(encode_words<F>(low, scales, limit), encode_words<F>(high, scales, limit), low, high));
    }
    return i;
}

// Casts n elements of a row. SCALE_PER_COLUMN: scales[n], one an element; otherwise scales[0] is for all. FINITE leaves out the
// tests for NaN and Inf; `inf` is the code of an infinite input.
template <class T, class F, bool SCALE_PER_COLUMN, bool FINITE, bool COUNTING>
inline void cast_row(const T* x, uint8_t* codes, int64_t n, const float* scales, uint32_t inf, CastCounts& counts) {
    const f32v same = all(scales[0]);
    auto scale_at = [&](int64_t i) { return SCALE_PER_COLUMN ? load<f32v>(scales + i) : same; };
    // A scale of 0 or NaN, possible only if the caller gave it, takes the general loops.
    int64_t i = FINITE && !SCALE_PER_COLUMN && !COUNTING && scales[0] > 0 ? cast_finite<F>(x, codes, n, scales[0]) : 0;
    if (!COUNTING)
        for (; i + 4 * LANES <= n; i += 4 * LANES) {
            u32v coded[4];
            for (int part = 0; part < 4; ++part) {
                const f32v element = load_f32(x + i + part * LANES);
                coded[part] = encode<F, FINITE>(element * scale_at(i + part * LANES), element, inf);
            }
            store_bytes(codes + i, coded[0], coded[1], coded[2], coded[3]);
        }
    for (; i < n; i += LANES) {
        const int64_t rest = least_of<int64_t>(LANES, n - i);
        const f32v element = rest == LANES ? load_f32(x + i) : load_f32(x + i, rest);
        const f32v scale = SCALE_PER_COLUMN && rest < LANES ? load_f32(scales + i, rest) : scale_at(i);
        const f32v scaled = element * scale;
        const u32v coded = encode<F, FINITE>(scaled, element, inf);
        if (COUNTING) count<F>(counts, element, scaled, coded, rest);
        store_bytes(codes + i, coded, rest);
    }
}

// A QuantizeProblem with its element type T and format F known at compile time.
template <class T, class F>
struct Quantizer {
    const QuantizeProblem& p;
    const T* const x = static_cast<const T*>(p.x.data);
    const uint32_t inf = p.propagate ? F::inf_code : F::max_code;

    template <bool SCALE_PER_COLUMN>
    void cast_codes(const T* from, uint8_t* to, int64_t n, const float* scales, bool finite) const {
        CastCounts cast_counts;
        if (!p.counting) {
            if (finite) cast_row<T, F, SCALE_PER_COLUMN, true, false>(from, to, n, scales, inf, cast_counts);
            else cast_row<T, F, SCALE_PER_COLUMN, false, false>(from, to, n, scales, inf, cast_counts);
            return;
        }
        cast_row<T, F, SCALE_PER_COLUMN, false, true>(from, to, n, scales, inf, cast_counts);
        // Relaxed is enough: integers in any order, read after the region has ended.
        __atomic_fetch_add(&p.counts->saturated, cast_counts.saturated, __ATOMIC_RELAXED);
        __atomic_fetch_add(&p.counts->underflowed, cast_counts.underflowed, __ATOMIC_RELAXED);
    }

    // Casts n elements of one row to codes at offset `at`, or to the codes' values (fake quantization) through a buffer of SPAN
    // codes in the first-level cache. g is their group, or with SCALE_PER_COLUMN the first of n groups. `values` may be x
    // itself: a part is read completely before it is written.
    template <bool SCALE_PER_COLUMN>
    void cast(const T* from, int64_t at, int64_t n, const float* scales, int64_t g, bool finite) const {
        if (!p.values) {
            if (p.codes) cast_codes<SCALE_PER_COLUMN>(from, p.codes + at, n, scales, finite);
            return;
        }
        const float* decode_scales = (p.given_scale ? p.given_scale : p.scale) + g;
        T* values = static_cast<T*>(p.values) + (from - x);
        uint8_t codes[SPAN];
        for (int64_t i = 0; i < n; i += SPAN) {
            const int64_t part = least_of(SPAN, n - i), column = SCALE_PER_COLUMN ? i : 0;
            cast_codes<SCALE_PER_COLUMN>(from + i, codes, part, scales + column, finite);
            if (SCALE_PER_COLUMN) dequantize_columns<F>(codes, values + i, part, decode_scales + column);
            else dequantize_row<F>(codes, values + i, part, decode_scales[0]);
        }
    }

    void add_nonfinite(int64_t nonfinite) const {
        if (nonfinite) __atomic_fetch_add(&p.counts->nonfinite, nonfinite, __ATOMIC_RELAXED);
    }

    // Tensorwise. Calls each(from, at, n) for all spans in parallel; a dense matrix counts as one long row, so that spans are
    // full.
    template <class Each>
    void for_each_span(const Each& each) const {
        const bool dense = p.x.stride == p.x.columns;
        const int64_t rows = dense ? 1 : p.x.rows, columns = dense ? p.x.rows * p.x.columns : p.x.columns;
        const int64_t spans = (columns + SPAN - 1) / SPAN;
        const int64_t grain = largest<int64_t>(1, PARALLEL_ELEMENTS / least_of(SPAN, columns));
        parallel_for(rows * spans, grain, [&](int64_t begin, int64_t end) {
            for (int64_t item = begin; item < end; ++item) {
                const int64_t row = item / spans, first = item % spans * SPAN;
                each(x + row * p.x.stride + first, row * columns + first, least_of(SPAN, columns - first));
            }
        });
    }

    // shared = max(shared, value), atomically. A maximum has no order, so the result does not depend on the threads.
    static void raise(uint32_t* shared, uint32_t value) {
        uint32_t seen = __atomic_load_n(shared, __ATOMIC_RELAXED);
        while (seen < value && !__atomic_compare_exchange_n(shared, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
        }
    }

    void per_tensor() const {
        uint32_t amax = 0;
        auto measure_span = [&](const T* from, int64_t n) {
            const Measurement measurement = measure(from, n);
            raise(&amax, measurement.amax);
            add_nonfinite(measurement.nonfinite);
            return measurement.nonfinite == 0;
        };
        // With a scale or amax given, measuring and casting are one pass; otherwise all is measured first.
        const bool known = p.given_scale || is_given(p, 0);
        if (!known) for_each_span([&](const T* from, int64_t, int64_t n) { measure_span(from, n); });
        const float encode_scale = group_scale<F>(p, 0, amax);
        const bool finite = p.counts->nonfinite == 0;
        for_each_span([&](const T* from, int64_t at, int64_t n) {
            cast<false>(from, at, n, &encode_scale, 0, known ? measure_span(from, n) : finite);
        });
        p.measured[0] = bits_as<float>(amax);
    }

    // Casts the block of group g whose first element is [row, column]; edge blocks are smaller.
    void block(int64_t g, int64_t row, int64_t column) const {
        const int64_t rows = least_of(p.block_rows, p.x.rows - row);
        const int64_t columns = least_of(p.block_columns, p.x.columns - column);
        const Measurement measurement = measure(x + row * p.x.stride + column, columns, rows, p.x.stride);
        add_nonfinite(measurement.nonfinite);
        p.measured[g] = bits_as<float>(measurement.amax);
        const float encode_scale = group_scale<F>(p, g, measurement.amax);
        for (int64_t r = row; r < row + rows; ++r)
            cast<false>(x + r * p.x.stride + column, r * p.x.columns + column, columns, &encode_scale, g,
                        measurement.nonfinite == 0);
    }

    void per_block() const {
        const int64_t bands = (p.x.rows + p.block_rows - 1) / p.block_rows;
        const int64_t across = (p.x.columns + p.block_columns - 1) / p.block_columns;
        const int64_t elements = least_of(p.block_rows, p.x.rows) * least_of(p.block_columns, p.x.columns);
        parallel_for(bands * across, largest<int64_t>(1, PARALLEL_ELEMENTS / elements), [&](int64_t begin, int64_t end) {
            for (int64_t g = begin; g < end; ++g) block(g, g / across * p.block_rows, g % across * p.block_columns);
        });
    }

    // Scales for `tile` columns of one band of rows, from column `first` on: the rowwise scales of a transposed operand,
    // without transposing it. Rows are read in memory order, twice: once into amax[], once to cast.
    void columns(int64_t band, int64_t first, int64_t tile) const {
        const int64_t n = least_of(tile, p.x.columns - first), row = band * p.block_rows;
        const int64_t last = least_of(row + p.block_rows, p.x.rows), g = band * p.x.columns + first;
        uint32_t amax[COLUMN_TILE] = {};
        float scales[COLUMN_TILE];
        for (int64_t r = row; r < last; ++r) raise_columns(amax, x + r * p.x.stride + first, n);
        // One NaN or Inf anywhere in the tile sends all of it through the scalar loop.
        const bool finite = largest_magnitude(reinterpret_cast<const float*>(amax), n) < EXPONENT;
        if (!finite) {
            std::memset(amax, 0, sizeof amax);
            for (int64_t r = row; r < last; ++r) raise_finite_columns(amax, x + r * p.x.stride + first, n);
        }
        for (int64_t i = 0; i < n; ++i) {
            p.measured[g + i] = bits_as<float>(amax[i]);
            scales[i] = group_scale<F>(p, g + i, amax[i]);
        }
        for (int64_t r = row; r < last; ++r)
            cast<true>(x + r * p.x.stride + first, r * p.x.columns + first, n, scales, g, finite);
    }

    static void raise_columns(uint32_t* amax, const T* from, int64_t n) {
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES)
            store(amax + i, largest(load<u32v>(amax + i), bits_as<u32v>(load_f32(from + i)) & MAGNITUDE));
        for (; i < n; ++i) amax[i] = largest(amax[i], f32_bits(as_f32(from[i])) & MAGNITUDE);
    }

    void raise_finite_columns(uint32_t* amax, const T* from, int64_t n) const {
        int64_t nonfinite = 0;
        for (int64_t i = 0; i < n; ++i) {
            const uint32_t bits = f32_bits(as_f32(from[i])) & MAGNITUDE;
            if (bits >= EXPONENT) ++nonfinite;
            else amax[i] = largest(amax[i], bits);
        }
        add_nonfinite(nonfinite);
    }

    void per_column() const {
        // At least one tile a thread, in multiples of 64 columns: 64 codes are a cache line.
        const int64_t share = p.x.columns / max_threads() / 64 * 64;
        const int64_t tile = least_of(largest<int64_t>(share, 64), COLUMN_TILE);
        const int64_t bands = (p.x.rows + p.block_rows - 1) / p.block_rows, tiles = (p.x.columns + tile - 1) / tile;
        const int64_t elements = least_of(p.block_rows, p.x.rows) * least_of(tile, p.x.columns);
        parallel_for(bands * tiles, largest<int64_t>(1, PARALLEL_ELEMENTS / elements), [&](int64_t begin, int64_t end) {
            for (int64_t item = begin; item < end; ++item) columns(item / tiles, item % tiles * tile, tile);
        });
    }

    void run() const {
        const bool all_rows = p.block_rows >= p.x.rows, all_columns = p.block_columns >= p.x.columns;
        // Rowwise is a block of one row and all columns.
        if (all_rows && all_columns) per_tensor();
        else if (p.block_columns == 1) per_column();
        else per_block();
    }
};

template <class T>
void quantize_as(const QuantizeProblem& p) {
    if (p.format == Format::e4m3) Quantizer<T, E4M3>{p}.run();
    else Quantizer<T, E5M2>{p}.run();
}

void quantize(const QuantizeProblem& p) {
    if (p.x.dtype == Dtype::f32) quantize_as<float>(p);
    else if (p.x.dtype == Dtype::bf16) quantize_as<Bf16>(p);
    else quantize_as<F16>(p);
}

}  // namespace
}  // namespace octavo
