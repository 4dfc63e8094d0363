// Weights decoded in the order of memory, 32 bits a lane: a word is four FP8 codes or two BF16 numbers.
//
//   word (4 codes)   -> 2 halves, 3 shifts and 2 masks      half (2 numbers) -> low number: shift by 16; high number: mask
//
// A half is two 16-bit words, each the upper half of an FP32. A code's sign goes to FP32's sign, its exponent to the end of
// FP32's exponent field, its mantissa to the start of FP32's mantissa:
//
//   E4M3  S EEEE MMM  ->  S 0000EEEE MMM0000      value · 2^-120
//   E5M2  S EEEEE MM  ->  S 000EEEEE MM00000      value · 2^-112
//
// That needs no addition of biases and no case for subnormals; it made few rows twice as fast in cache as decode<F>(). The
// other operand's row is multiplied by a power of two that makes up for 2^-MISSING as far as FP32 reaches, the finished sum by
// the rest: both exact. Subnormal codes become subnormal FP32 numbers, also exact (some processors are slow at them; a weight
// has few). Two cases take an unshifted sum instead: NaN and Inf codes, which become finite numbers here, and rows that span
// too many binades for one shift.
//
// Order of additions, the same for one row and for many, so that a row's bits never depend on the batch: one FMA chain for each
// lane, over its words' numbers in the order half 0 low, half 0 high, half 1 low, half 1 high; at the end lanes are added by
// halves.
#pragma once

#include "fp8.h"

namespace octavo {
namespace {

constexpr int STEP = 4 * LANES;  // codes in a vector of words

inline float power_of_two(int exponent) { return bits_as<float>(uint32_t(127 + exponent) << 23); }

template <class F>
constexpr int MISSING = 127 - (1 - F::min_exponent);  // difference of the biases, 120 or 112

// Number `place` (0 low, 1 high) of every half, in FP32.
inline f32v number_of(u32v half, int place) { return bits_as<f32v>(place ? half & 0xffff0000u : half << 16); }

// Splits words of codes b0 b1 b2 b3: halves[0] holds (b0, b2), halves[1] holds (b1, b3), as values · 2^-MISSING; NaN and Inf
// codes become finite. The 16-bit arithmetic shift brings copies of the sign; the mask `kept` leaves the sign bit, exponent and
// mantissa.
template <class F>
inline void halve_codes(u32v words, u32v (&halves)[2]) {
    constexpr int right = F::mantissa_bits + 1;
    constexpr int16_t kept = int16_t(0x8000 | (0x7f00 >> right));
    const i16v codes = bits_as<i16v>(words);
    halves[0] = bits_as<u32v>((i16v)((i16v)(codes << 8) >> right) & kept);
    halves[1] = bits_as<u32v>((i16v)(codes >> right) & kept);
}

// Whether `seen`, byte maxima of code magnitudes, includes a NaN or Inf code. Tested once for SUM_COLUMNS columns, not for
// each.
template <class F>
inline bool has_special(u8v seen) {
    return any(seen >= uint8_t(F::inf_code));
}

// The sum of the lanes, by halves: lane i + lane i + LANES / 2, and so on. All levels of one width use this order, and
// many_rows.h repeats it.
inline float sum_of_lanes(f32v value) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)value);
#elif defined(__AVX2__)
    __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)value), _mm256_extractf128_ps((__m256)value, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#else
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) value[i] += value[i + half];
    return value[0];
#endif
}

// factor: multiplies the row before; unshift: multiplies its sums after, 0 if the row spans too many binades for a shift.
struct Shift {
    float factor, unshift;
};

// The exponent of the power of two that brings the largest of n finite numbers to FP32's last binade but one (exponent
// field 253), at most 127, so that the power itself is an FP32 number. NaN and Inf count as 0.
inline int shift_of(const float* x, int64_t n) {
    i32v most = {};
    for (int64_t i = 0; i < n; i += LANES) {
        const i32v magnitude = bits_as<i32v>(load_f32(x + i, least_of<int64_t>(LANES, n - i))) & int32_t(MAGNITUDE);
        most = largest(most, magnitude >= int32_t(EXPONENT) ? i32v{} : magnitude);
    }
    return least_of(127, 253 - int(largest_lane((u32v)most) >> 23));
}

// The smallest nonzero magnitude of n numbers. The horizontal minimum is taken as EXPONENT minus a maximum.
inline float least_magnitude(const float* x, int64_t n) {
    i32v least = (i32v)all(EXPONENT);
    for (int64_t i = 0; i < n; i += LANES) {
        const i32v magnitude = bits_as<i32v>(load_f32(x + i, least_of<int64_t>(LANES, n - i))) & int32_t(MAGNITUDE);
        const i32v known = magnitude == 0 ? (i32v)all(EXPONENT) : magnitude;
        least = known < least ? known : least;
    }
    return bits_as<float>(EXPONENT - largest_lane(EXPONENT - (u32v)least));
}

// FP8 weights. Members are the interface of NumberWords, too: numbers in a word, halves of it, and how a row is shifted.
template <class F>
struct CodeWords {
    typedef uint8_t Element;
    static constexpr int IN_WORD = 4, HALVES = 2;

    static void halve(u32v words, u32v (&halves)[2]) { halve_codes<F>(words, halves); }
    static u8v magnitudes(u32v words) { return bits_as<u8v>(words) & uint8_t(0x7f); }
    static bool has_special(u8v seen) { return octavo::has_special<F>(seen); }
    static f32v decode(const uint8_t* from, int64_t count) { return octavo::decode<F>(from, count); }

    // Smallest number · smallest code · 2^shift must be a normal FP32, so that no product loses bits.
    static Shift shift(const float* x, int64_t k) {
        const int shift = shift_of(x, k);
        constexpr int smallest_code = F::min_exponent - F::mantissa_bits - MISSING<F>;
        const bool fits = double(least_magnitude(x, k)) * power_of_two(shift) >= double(power_of_two(-126 - smallest_code));
        return {power_of_two(shift), fits ? power_of_two(MISSING<F> - shift) : 0.0f};
    }
};

// BF16 weights: a word is a half already, and nothing is shifted.
struct NumberWords {
    typedef Bf16 Element;
    static constexpr int IN_WORD = 2, HALVES = 1;

    static void halve(u32v words, u32v (&halves)[1]) { halves[0] = words; }
    static u8v magnitudes(u32v) { return u8v{}; }
    static bool has_special(u8v) { return false; }
    static f32v decode(const Bf16* from, int64_t count) { return load_f32(from, count); }
    static Shift shift(const float*, int64_t) { return {1.0f, 1.0f}; }
};

// Numbers of K in a vector of words.
template <class W>
constexpr int64_t STEP_OF = W::IN_WORD * LANES;

template <class W>
inline int64_t steps_of(int64_t k) { return (k + STEP_OF<W> - 1) / STEP_OF<W>; }

// Calls each(i, lane, place) for the numbers of a vector: element i of memory is number `place`, in order of additions, of lane
// `lane`.
template <class W, class Each>
inline void for_places(const Each& each) {
    for (int lane = 0; lane < LANES; ++lane)
        for (int i = 0; i < W::IN_WORD; ++i) each(lane * W::IN_WORD + i, lane, i % W::HALVES * 2 + i / W::HALVES);
}

}  // namespace
}  // namespace octavo
