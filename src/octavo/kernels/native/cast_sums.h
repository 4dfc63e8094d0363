// Statistics of a finished cast: maxima and counts over the whole tensor, sums over sampled rows. For octavo's doctor.
//
//   x element, y = decode(code) · scale; for example noise = Σ (y - x)², energy = Σ x², signed_error = Σ (sign(x) y - |x|)
//
// x [rows, columns], rows `stride` apart; codes likewise, rows `codes_stride` apart; scale, measured [row groups, column
// groups]. The first pass is quantize()'s own, which measures amaxes in parallel and writes no codes. The second reads every
// row_step-th row on one thread: sums are FP64, one chain a lane, and a fixed order keeps a step's numbers the same for any
// number of threads. What each sum means: doctor/statistics.py.
#pragma once

#include "quantize.h"

namespace octavo {
namespace {

// A code counts as mismatched if it is farther from x than the best code, by more than this factor. Between two codes at equal
// distance the choice depends on the last bit of the encode scale, which 1 / scale does not restore; 0.1 % covers that.
constexpr float TIE = 1.001f;

inline f32v where(u32v mask, f32v value) { return bits_as<f32v>(bits_as<u32v>(value) & mask); }

inline f32v magnitude_of(f32v value) { return where(all(MAGNITUDE), value); }

inline double sum_of(f64v lanes) {
    double sum = 0;
    for (int i = 0; i < LANES / 2; ++i) sum += lanes[i];
    return sum;
}

inline double sum_of(u32v lanes) {
    double sum = 0;
    for (int i = 0; i < LANES; ++i) sum += lanes[i];
    return sum;
}

// LANES codes or fewer, widened to 32 bits; missing lanes are 0.
inline u32v load_codes(const uint8_t* from, int64_t count) {
    if (count == LANES) return widen(from);
    uint8_t buffer[LANES] = {};
    std::memcpy(buffer, from, count);
    return widen(buffer);
}

template <class F>
struct Sums {
    u32v nonfinite{}, nonzeros{}, flushed{}, mismatched{};
    f64v energy{}, fourth_powers{}, flushed_energy{}, noise{}, product{}, decoded_energy{}, magnitude{}, along{};

    // Adds LANES elements with their codes and both scales. An element of 0 with code 0 changes nothing, so rows are padded
    // with those.
    void add(f32v elements, u32v codes, f32v scale, f32v encode_scale) {
        const u32v bits = bits_as<u32v>(elements) & MAGNITUDE, is_finite = (u32v)(bits < all(EXPONENT));
        const u32v is_nonzero = is_finite & (u32v)(bits != all(0u));
        const u32v is_flushed = is_nonzero & (u32v)((codes & 0x7f) == all(0u));
        // NaN and Inf count as 0 in every sum; they appear in `nonfinite` only.
        const f32v x = where(is_finite, elements), y = where(is_finite, decode<F>(codes) * scale);
        nonfinite -= ~is_finite;  // a lane that holds is -1
        nonzeros -= is_nonzero;
        flushed -= is_flushed;
        // Cast again; only lanes whose code differs are compared by distance, which is rare.
        const u32v again = encode<F, true>(x * encode_scale, x, 0);
        if (any(is_finite & (u32v)(again != codes))) {
            const f32v best = decode<F>(again) * scale;
            // ~(a <= b), not a > b: a NaN code of a finite element counts too.
            mismatched -= is_finite & ~(u32v)(magnitude_of(y - x) <= all(TIE) * magnitude_of(best - x));
        }
        // y with x's sign multiplied in: sign(x) · y.
        const f32v y_along = where(is_nonzero, bits_as<f32v>(bits_as<u32v>(y) ^ (bits_as<u32v>(x) & ~MAGNITUDE)));
        const Doubles x2 = doubles(x), y2 = doubles(y), lost = doubles(where(is_flushed, x));
        const Doubles size = doubles(magnitude_of(x)), along2 = doubles(y_along);
        add(x2.low, y2.low, lost.low, size.low, along2.low);
        add(x2.high, y2.high, lost.high, size.high, along2.high);
    }

    void add(f64v x, f64v y, f64v lost, f64v size, f64v y_along) {
        const f64v square = x * x, error = y - x;
        energy += square;
        fourth_powers += square * square;
        flushed_energy += lost * lost;
        noise += error * error;
        product += x * y;
        decoded_energy += y * y;
        magnitude += size;
        along += y_along;
    }
};

// Bits of scale · (max + half a step), rounded down to FP32: x beyond it would round to more than the maximum, were there such
// a code. 464 for E4M3 at scale 1, 61,440 for E5M2. Rounded down, so that every FP32 x beyond the exact limit is beyond these
// bits.
template <class F>
uint32_t limit_bits(float scale) {
    constexpr int exponent = F::max_exponent - F::mantissa_bits - 1;  // of half a step below the maximum
    constexpr double limit = F::max + (exponent < 0 ? 1.0 / (1 << -exponent) : double(1 << exponent));
    const double exact = scale * limit;
    const float nearest = static_cast<float>(exact);
    return f32_bits(nearest) - (nearest > exact);
}

// The number of finite elements, of n, whose magnitude's bits are above `limit`.
template <class T>
int64_t beyond(const T* x, int64_t n, uint32_t limit) {
    u32v found{};
    for (int64_t i = 0; i < n; i += LANES) {
        const u32v bits = bits_as<u32v>(load_f32(x + i, least_of<int64_t>(LANES, n - i))) & MAGNITUDE;
        found -= (u32v)(bits > all(limit)) & (u32v)(bits < all(EXPONENT));
    }
    return int64_t(sum_of(found));
}

template <class T, class F>
struct CastSummer {
    const CastSumsProblem& p;
    const T* const x = static_cast<const T*>(p.x.data);
    const int64_t across = (p.x.columns + p.block_columns - 1) / p.block_columns;
    const int64_t bands = (p.x.rows + p.block_rows - 1) / p.block_rows;

    int64_t count_beyond(int64_t g, uint32_t limit) const {
        const int64_t row = g / across * p.block_rows, column = g % across * p.block_columns;
        const int64_t last_row = least_of(row + p.block_rows, p.x.rows);
        const int64_t last_column = least_of(column + p.block_columns, p.x.columns);
        int64_t found = 0;
        for (int64_t r = row; r < last_row; ++r) found += beyond(x + r * p.x.stride + column, last_column - column, limit);
        return found;
    }

    // amaxes of all groups, NaN and Inf, saturated elements, and over groups the largest amax, scale and amax / (scale · max).
    void measure_all_elements() const {
        Counts counts{};
        QuantizeProblem measuring{};
        measuring.x = p.x, measuring.format = p.format;
        measuring.block_rows = p.block_rows, measuring.block_columns = p.block_columns;
        measuring.given_scale = p.scale, measuring.measured = p.measured, measuring.counts = &counts;
        Quantizer<T, F>{measuring}.run();
        float amax = 0, scale = 0, stale_ratio = 0;
        f32v amaxes{}, scales{}, stale_ratios{};
        const int64_t groups = bands * across;
        // Lanes of groups: a rowwise cast of a large activation has thousands. largest(a, b) is a > b ? a : b, so a NaN ratio
        // (0 / 0) in the first operand is dropped.
        int64_t g = 0;
        for (; g + LANES <= groups; g += LANES) {
            const f32v measured = load<f32v>(p.measured + g), given = load<f32v>(p.scale + g);
            amaxes = largest(measured, amaxes);
            scales = largest(given, scales);
            stale_ratios = largest(measured / (given * all(float(F::max))), stale_ratios);
        }
        for (int lane = 0; lane < LANES; ++lane) {
            amax = largest(amax, amaxes[lane]);
            scale = largest(scale, scales[lane]);
            stale_ratio = largest(stale_ratio, stale_ratios[lane]);
        }
        for (; g < groups; ++g) {
            amax = largest(amax, p.measured[g]);
            scale = largest(scale, p.scale[g]);
            stale_ratio = largest(stale_ratio, p.measured[g] / (p.scale[g] * F::max));
        }
        int64_t saturated = 0;
        for (g = 0; g < groups && !(stale_ratio <= 1); ++g) {  // where it is at most 1, no element is beyond
            const uint32_t limit = limit_bits<F>(p.scale[g]);
            if (f32_bits(p.measured[g]) > limit) saturated += count_beyond(g, limit);
        }
        CastSums& sums = *p.sums;
        sums.elements = double(p.x.rows * p.x.columns);
        sums.nonfinite = double(counts.nonfinite);
        sums.saturated = double(saturated);
        sums.amax = amax, sums.scale = scale, sums.stale_ratio = stale_ratio;
    }

    // Adds elements [first, last) of a row: of one group with scales[0], or each of its own group with scales[i].
    template <bool SCALE_PER_COLUMN>
    void add(Sums<F>& sums, int64_t row, int64_t first, int64_t last, const float* scales) const {
        const T* from = x + row * p.x.stride;
        const uint8_t* codes = p.codes + row * p.codes_stride;
        f32v scale = all(scales[0]), encode_scale = all(least_of(1.0f / scales[0], __FLT_MAX__));
        for (int64_t i = first; i < last; i += LANES) {
            const int64_t n = least_of<int64_t>(LANES, last - i);
            if (SCALE_PER_COLUMN) {
                scale = load_f32(scales + i, n);
                encode_scale = least(all(1.0f) / scale, all(__FLT_MAX__));
            }
            sums.add(load_f32(from + i, n), load_codes(codes + i, n), scale, encode_scale);
        }
    }

    // Rows first_row, first_row + row_step, ...
    void sum_sampled_rows() const {
        Sums<F> sums;
        for (int64_t row = p.first_row; row < p.x.rows; row += p.row_step) {
            const float* scales = p.scale + row / p.block_rows * across;
            if (p.block_columns == 1) {
                add<true>(sums, row, 0, p.x.columns, scales);
                continue;
            }
            for (int64_t g = 0; g < across; ++g)
                add<false>(sums, row, g * p.block_columns, least_of((g + 1) * p.block_columns, p.x.columns), scales + g);
        }
        CastSums& out = *p.sums;
        const int64_t rows = (p.x.rows - p.first_row + p.row_step - 1) / p.row_step;
        out.finite = double(rows * p.x.columns) - sum_of(sums.nonfinite), out.nonzeros = sum_of(sums.nonzeros);
        out.flushed = sum_of(sums.flushed), out.mismatched = sum_of(sums.mismatched);
        out.energy = sum_of(sums.energy), out.fourth_powers = sum_of(sums.fourth_powers);
        out.flushed_energy = sum_of(sums.flushed_energy), out.noise = sum_of(sums.noise);
        out.product = sum_of(sums.product), out.decoded_energy = sum_of(sums.decoded_energy);
        out.magnitude = sum_of(sums.magnitude), out.signed_error = sum_of(sums.along) - out.magnitude;
    }

    void run() const {
        measure_all_elements();
        sum_sampled_rows();
    }
};

template <class T>
void cast_sums_of(const CastSumsProblem& p) {
    if (p.format == Format::e4m3) CastSummer<T, E4M3>{p}.run();
    else CastSummer<T, E5M2>{p}.run();
}

void cast_sums(const CastSumsProblem& p) {
    if (p.x.dtype == Dtype::f32) cast_sums_of<float>(p);
    else if (p.x.dtype == Dtype::bf16) cast_sums_of<Bf16>(p);
    else cast_sums_of<F16>(p);
}

}  // namespace
}  // namespace octavo
