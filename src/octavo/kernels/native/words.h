// Weights as they lie in memory, 32 bits at a time: four FP8 codes or two BF16 numbers.
//
// A word becomes one or two others, its halves, of two FP32 numbers each, which only need a shift or a mask: the bits of an
// FP8 code go where FP32 has its sign, the end of its exponent and the start of its mantissa. The exponent is then too small
// by FP32's bias less the format's. Rows that such weights are multiplied with are multiplied by a power of two that makes
// up for it as far as FP32 reaches, and sums by the rest. Codes of subnormals become subnormals, which are exact as well
// (some processors are slow at them; a weight has few). NaN and Inf codes become finite numbers, and a row may span too many
// binades: such sums are made in the plain way.
//
// Every sum is a chain for each lane, of its words' numbers in the order of their places: of each half the low number, then
// the high one. The chains are added by halves at the end.
#pragma once

#include "fp8.h"

namespace octavo {
namespace {

constexpr int STEP = 4 * LANES;  // codes of a vector

inline float power_of_two(int exponent) { return bits_as<float>(uint32_t(127 + exponent) << 23); }

template <class F>
constexpr int MISSING = 127 - (1 - F::min_exponent);  // binades that a shifted code's exponent lacks

// The number at a place of a word's half, 0 or 1.
inline f32v number_of(u32v half, int place) { return bits_as<f32v>(place ? half & 0xffff0000u : half << 16); }

// Words of FP8 codes: the first half has bytes 0 and 2, the second bytes 1 and 3. Their values times 2^-MISSING, but for
// special codes.
template <class F>
inline void halve_codes(u32v words, u32v (&halves)[2]) {
    constexpr int right = F::mantissa_bits + 1;
    constexpr int16_t kept = int16_t(0x8000 | (0x7f00 >> right));
    const i16v codes = bits_as<i16v>(words);
    halves[0] = bits_as<u32v>((i16v)((i16v)(codes << 8) >> right) & kept);
    halves[1] = bits_as<u32v>((i16v)(codes >> right) & kept);
}

// Whether there is a special code among those whose largest magnitudes were seen.
template <class F>
inline bool has_special(u8v seen) {
    return any(seen >= uint8_t(F::inf_code));
}

// The lanes' sum, by halves.
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

// What a row is multiplied by, and its sums then: by 0 if the row spans too many binades.
struct Shift {
    float factor, unshift;
};

// The power of two that brings the largest of n finite numbers to FP32's last binade but one.
inline int shift_of(const float* x, int64_t n) {
    i32v most = {};
    for (int64_t i = 0; i < n; i += LANES) {
        const i32v magnitude = bits_as<i32v>(load_f32(x + i, least_of<int64_t>(LANES, n - i))) & int32_t(MAGNITUDE);
        most = largest(most, magnitude >= int32_t(EXPONENT) ? i32v{} : magnitude);
    }
    return least_of(127, 253 - int(largest_lane((u32v)most) >> 23));
}

inline float least_magnitude(const float* x, int64_t n) {  // but zero
    i32v least = (i32v)all(EXPONENT);
    for (int64_t i = 0; i < n; i += LANES) {
        const i32v magnitude = bits_as<i32v>(load_f32(x + i, least_of<int64_t>(LANES, n - i))) & int32_t(MAGNITUDE);
        const i32v known = magnitude == 0 ? (i32v)all(EXPONENT) : magnitude;
        least = known < least ? known : least;
    }
    return bits_as<float>(EXPONENT - largest_lane(EXPONENT - (u32v)least));
}

template <class F>
struct CodeWords {
    typedef uint8_t Element;
    static constexpr int IN_WORD = 4, HALVES = 2;

    static void halve(u32v words, u32v (&halves)[2]) { halve_codes<F>(words, halves); }
    static u8v magnitudes(u32v words) { return bits_as<u8v>(words) & uint8_t(0x7f); }
    static bool has_special(u8v seen) { return octavo::has_special<F>(seen); }
    static f32v decode(const uint8_t* from, int64_t count) { return octavo::decode<F>(from, count); }

    // The smallest number times the smallest code must still be normal after the shift.
    static Shift shift(const float* x, int64_t k) {
        const int shift = shift_of(x, k);
        constexpr int smallest_code = F::min_exponent - F::mantissa_bits - MISSING<F>;
        const bool fits = double(least_magnitude(x, k)) * power_of_two(shift) >= double(power_of_two(-126 - smallest_code));
        return {power_of_two(shift), fits ? power_of_two(MISSING<F> - shift) : 0.0f};
    }
};

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

// Calls each(i, lane, place) for the numbers of a vector.
template <class W, class Each>
inline void for_places(const Each& each) {
    for (int lane = 0; lane < LANES; ++lane)
        for (int i = 0; i < W::IN_WORD; ++i) each(lane * W::IN_WORD + i, lane, i % W::HALVES * 2 + i / W::HALVES);
}

}  // namespace
}  // namespace octavo
