// amax, scale and codes of a matrix, one scale a group.
//
// A group, or a part of a large one, is measured and cast while it is in the first-level cache: memory is read once,
// except by a scale for the whole tensor that has to be measured first. Whatever needs care, NaN and Inf among the
// elements, is seen in the maximum of the magnitudes' bits and then handled by a slow loop.
#pragma once

#include "dequantize.h"
#include "fp8.h"
#include "kernels.h"
#include "parallel.h"

namespace octavo {
namespace {

constexpr int64_t SPAN = 4096;         // elements that are measured and cast in one go
constexpr int64_t COLUMN_TILE = 1024;  // columns with a scale each that are worked on together, at most
constexpr int64_t PARALLEL_ELEMENTS = 16384;  // fewer are not worth another thread

// Magnitudes, by their bits.

inline uint32_t f32_bits(float value) { return bits_as<uint32_t>(value); }

// The largest magnitude of n elements, in FP32 bits; at least EXPONENT where one of them is NaN or Inf.
inline uint32_t largest_magnitude(const float* x, int64_t n) {
    u32v found[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int part = 0; part < 4; ++part)
            found[part] = largest(found[part], load<u32v>(x + i + part * LANES) & MAGNITUDE);
    const u32v both = largest(largest(found[0], found[1]), largest(found[2], found[3]));
    uint32_t result = largest_lane(both);
    for (; i < n; ++i) result = largest(result, f32_bits(x[i]) & MAGNITUDE);
    return result;
}

template <class T>  // 16 bits each, twice the lanes
inline uint32_t largest_magnitude(const T* x, int64_t n) {
    constexpr int lanes = 2 * LANES;
    u16v found[2] = {};
    int64_t i = 0;
    for (; i + 2 * lanes <= n; i += 2 * lanes)
        for (int part = 0; part < 2; ++part)
            found[part] = largest(found[part], load<u16v>(x + i + part * lanes) & uint16_t(0x7fff));
    const u16v both = largest(found[0], found[1]);
    const u32v pairs = bits_as<u32v>(both);
    T result = {uint16_t(largest_lane(largest(pairs & 0xffff, pairs >> 16)))};
    for (; i < n; ++i) result.bits = largest(result.bits, uint16_t(x[i].bits & 0x7fff));
    return f32_bits(as_f32(result));
}

struct Measured {
    uint32_t amax = 0;  // of the finite elements, in FP32 bits
    int64_t nonfinite = 0;
};

// Of rows of n elements, `stride` apart.
template <class T>
inline Measured measure(const T* x, int64_t n, int64_t rows = 1, int64_t stride = 0) {
    Measured found;
    for (int64_t r = 0; r < rows; ++r) found.amax = largest(found.amax, largest_magnitude(x + r * stride, n));
    if (found.amax < EXPONENT) return found;
    found.amax = 0;
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < n; ++i) {
            const uint32_t bits = f32_bits(as_f32(x[r * stride + i])) & MAGNITUDE;
            if (bits >= EXPONENT) ++found.nonfinite;
            else found.amax = largest(found.amax, bits);
        }
    return found;
}

// Scales.

template <class F>
inline float encode_scale_of(float amax, const ScaleRule& rule) {
    const double floor = largest(rule.amax_floor, 2.2250738585072014e-308);
    const double provided = largest(static_cast<double>(amax), floor);
    if (rule.rounding == ScaleRounding::floor || rule.rounding == ScaleRounding::even) {
        const uint64_t half = rule.rounding == ScaleRounding::even ? uint64_t(1) << (51 - F::mantissa_bits) : 0;
        const int exponent = static_cast<int>((bits_as<uint64_t>(provided) + half) >> 52) - 1023;
        const int wanted = F::max_exponent - rule.margin - exponent;
        return bits_as<float>(uint32_t(least_of(largest(wanted, -126), 127) + 127) << 23);
    }
    const double target = rule.margin == 0 ? F::max : F::max * __builtin_ldexp(1.0, -rule.margin);
    const double quotient = target / provided;
    const float limited =
        static_cast<float>(least_of(largest(quotient, double(__FLT_MIN__)), double(__FLT_MAX__)));
    return rule.rounding == ScaleRounding::rceil ? bits_as<float>(f32_bits(limited) & EXPONENT) : limited;
}

inline bool is_given(const QuantizeProblem& p, int64_t g) {
    return p.given_amax && (p.given_amax[g] > 0 || !p.zero_is_unknown);
}

// The encode scale of group g; its decode scale is written unless it was given.
template <class F>
inline float group_scale(const QuantizeProblem& p, int64_t g, uint32_t measured_amax) {
    if (p.given_scale) return least_of(1.0f / p.given_scale[g], __FLT_MAX__);
    const float amax = is_given(p, g) ? p.given_amax[g] : bits_as<float>(measured_amax);
    const float encode_scale = encode_scale_of<F>(amax, p.rule);
    p.scale[g] = 1.0f / encode_scale;
    return encode_scale;
}

// Casts.

struct CastCounts {
    int64_t saturated = 0, underflowed = 0;
};

template <class F>
inline void count(CastCounts& counts, f32v x, f32v scaled, u32v codes, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t given = f32_bits(x[i]) & MAGNITUDE;
        if (given >= EXPONENT) continue;
        counts.saturated += bits_as<float>(f32_bits(scaled[i]) & MAGNITUDE) > F::max;
        counts.underflowed += given != 0 && (codes[i] & 0x7f) == 0;
    }
}

// Most of a row of finite elements with one scale, and how many that are. As many elements ahead lies what is measured
// next: memory goes on reading while these, which are in a cache, are cast.
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

// One row of elements; `scales` steps from lane to lane, or is the same for all.
template <class T, class F, bool SCALE_PER_COLUMN, bool FINITE, bool COUNTING>
inline void cast_row(const T* x, uint8_t* codes, int64_t n, const float* scales, uint32_t inf, CastCounts& counts) {
    const f32v same = all(scales[0]);
    auto scale_at = [&](int64_t i) { return SCALE_PER_COLUMN ? load<f32v>(scales + i) : same; };
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

// One problem, its types known.
template <class T, class F>
struct Quantizer {
    const QuantizeProblem& p;
    const T* const x = static_cast<const T*>(p.x.data);
    const uint32_t inf = p.propagate ? F::inf_code : F::max_code;

    template <bool SCALE_PER_COLUMN>
    void cast_codes(const T* from, uint8_t* to, int64_t n, const float* scales, bool finite) const {
        CastCounts found;
        if (!p.counting) {
            if (finite) cast_row<T, F, SCALE_PER_COLUMN, true, false>(from, to, n, scales, inf, found);
            else cast_row<T, F, SCALE_PER_COLUMN, false, false>(from, to, n, scales, inf, found);
            return;
        }
        cast_row<T, F, SCALE_PER_COLUMN, false, true>(from, to, n, scales, inf, found);
        __atomic_fetch_add(&p.counts->saturated, found.saturated, __ATOMIC_RELAXED);
        __atomic_fetch_add(&p.counts->underflowed, found.underflowed, __ATOMIC_RELAXED);
    }

    // n elements of a row, of group g or, with a scale per column, of as many groups from there on: to codes at `at`, or
    // to their values, by way of codes that stay in the first-level cache.
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

    void add_nonfinite(int64_t found) const {
        if (found) __atomic_fetch_add(&p.counts->nonfinite, found, __ATOMIC_RELAXED);
    }

    // One scale for the tensor.

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

    static void raise(uint32_t* shared, uint32_t found) {
        uint32_t seen = __atomic_load_n(shared, __ATOMIC_RELAXED);
        while (seen < found && !__atomic_compare_exchange_n(shared, &seen, found, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
        }
    }

    void per_tensor() const {
        uint32_t amax = 0;
        auto look = [&](const T* from, int64_t n) {
            const Measured found = measure(from, n);
            raise(&amax, found.amax);
            add_nonfinite(found.nonfinite);
            return found.nonfinite == 0;
        };
        const bool known = p.given_scale || is_given(p, 0);
        if (!known) for_each_span([&](const T* from, int64_t, int64_t n) { look(from, n); });
        const float encode_scale = group_scale<F>(p, 0, amax);
        const bool finite = p.counts->nonfinite == 0;
        for_each_span([&](const T* from, int64_t at, int64_t n) {
            cast<false>(from, at, n, &encode_scale, 0, known ? look(from, n) : finite);
        });
        p.measured[0] = bits_as<float>(amax);
    }

    // A scale for every block.

    void block(int64_t g, int64_t row, int64_t column) const {
        const int64_t rows = least_of(p.block_rows, p.x.rows - row);
        const int64_t columns = least_of(p.block_columns, p.x.columns - column);
        const Measured found = measure(x + row * p.x.stride + column, columns, rows, p.x.stride);
        add_nonfinite(found.nonfinite);
        p.measured[g] = bits_as<float>(found.amax);
        const float encode_scale = group_scale<F>(p, g, found.amax);
        for (int64_t r = row; r < row + rows; ++r)
            cast<false>(x + r * p.x.stride + column, r * p.x.columns + column, columns, &encode_scale, g,
                        found.nonfinite == 0);
    }

    void per_block() const {
        const int64_t bands = (p.x.rows + p.block_rows - 1) / p.block_rows;
        const int64_t across = (p.x.columns + p.block_columns - 1) / p.block_columns;
        const int64_t elements = least_of(p.block_rows, p.x.rows) * least_of(p.block_columns, p.x.columns);
        parallel_for(bands * across, largest<int64_t>(1, PARALLEL_ELEMENTS / elements), [&](int64_t begin, int64_t end) {
            for (int64_t g = begin; g < end; ++g) block(g, g / across * p.block_rows, g % across * p.block_columns);
        });
    }

    // A scale for every column of a band of rows: what a transposed operand's rows are.

    void columns(int64_t band, int64_t first, int64_t tile) const {
        const int64_t n = least_of(tile, p.x.columns - first), row = band * p.block_rows;
        const int64_t last = least_of(row + p.block_rows, p.x.rows), g = band * p.x.columns + first;
        uint32_t amax[COLUMN_TILE] = {};
        float scales[COLUMN_TILE];
        for (int64_t r = row; r < last; ++r) raise_columns(amax, x + r * p.x.stride + first, n);
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
