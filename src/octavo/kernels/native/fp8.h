// FP8 codes: one vector of FP32 numbers to codes and back. numerics/cast.py says what every code must be.
#pragma once

#include "simd.h"

namespace octavo {
namespace {

struct E4M3 {
    static constexpr int mantissa_bits = 3, min_exponent = -6;
    static constexpr float max = 448.0f;
    static constexpr int max_exponent = 8;  // floor(log2 max)
    static constexpr uint32_t nan_code = 0x7f, inf_code = 0x7f, max_code = 0x7e;
};

struct E5M2 {
    static constexpr int mantissa_bits = 2, min_exponent = -14;
    static constexpr float max = 57344.0f;
    static constexpr int max_exponent = 15;
    static constexpr uint32_t nan_code = 0x7f, inf_code = 0x7c, max_code = 0x7b;
};

constexpr uint32_t MAGNITUDE = 0x7fffffff, EXPONENT = 0x7f800000, MANTISSA = 0x007fffff;

// Numbers from 0 to the maximum, rounded to nearest even: the lower half of a lane is then ROUNDED_ZERO<F> more than the code,
// the upper half anything.
//
// A quantum is the distance of two codes around a number. Added to 2^23 quanta, the number is rounded to whole quanta by
// the addition itself, ties to even; their count is what the sum's mantissa holds, and its exponent field says of what size.
template <class F>
inline u32v rounded(f32v magnitude) {
    constexpr uint32_t smallest = uint32_t(127 + F::min_exponent) << 23;
    constexpr int dropped = 23 - F::mantissa_bits;
    const u32v power = largest(bits_as<u32v>(magnitude) & EXPONENT, all(smallest));
    const u32v sum = bits_as<u32v>(fused(bits_as<f32v>(power), all(float(1 << dropped)), magnitude));  // an exact product
    return sum + (sum >> dropped);
}

template <class F>
constexpr uint32_t ROUNDED_ZERO = uint32_t(127 + F::min_exponent + 23 - F::mantissa_bits) << F::mantissa_bits;

// RNE(scaled), saturating; x is the input that `scaled` was made of, and decides what is infinite. Where every element is
// known to be FINITE, nobody looks.
template <class F>
inline u32v encode_magnitude(f32v scaled) {
    const f32v limited = least(bits_as<f32v>(bits_as<u32v>(scaled) & MAGNITUDE), all(F::max));
    return (rounded<F>(limited) - ROUNDED_ZERO<F>) & 0x7f;
}

template <class F, bool FINITE>
inline u32v encode(f32v scaled, f32v x, uint32_t code_of_inf) {
    const u32v finite = encode_magnitude<F>(scaled), sign = (bits_as<u32v>(scaled) >> 24) & 0x80;
    if (FINITE) return finite | sign;
    const u32v given = bits_as<u32v>(x) & MAGNITUDE;
    const u32v special = given > EXPONENT ? all(F::nan_code) : all(code_of_inf);
    return (given >= EXPONENT ? special : finite) | sign;
}

// Two elements of BF16 in every lane, all of them finite, to codes without signs in words. What lies beyond `limit`, whose
// code is the maximum, counts as that.
template <class F>
inline u16v encode_words(u16v given, f32v encode_scale, u16v limit) {
    const u32v pairs = bits_as<u32v>(least(given & uint16_t(0x7fff), limit));
    const f32v even = bits_as<f32v>(pairs << 16), odd = bits_as<f32v>(pairs & 0xffff0000);
    return join_halves(rounded<F>(even * encode_scale), rounded<F>(odd * encode_scale)) - uint16_t(ROUNDED_ZERO<F>);
}

// Less than one in 128 below the maximum, where every number is rounded to it.
template <class F>
inline u16v word_limit(float encode_scale) {
    const uint32_t highest = bits_as<uint32_t>(F::max / encode_scale) >> 16;
    return u16v{} + uint16_t(least_of(highest, 0x7f7fu));
}

// The value of LANES codes in FP32, exactly; NaN and Inf included.
template <class F>
inline f32v decode(u32v codes) {
    constexpr uint32_t normals = uint32_t(127 + F::min_exponent - 1) << 23;  // what a code's exponent field lacks
    constexpr int dropped = 23 - F::mantissa_bits;
    const float min_normal = bits_as<float>(normals + (1u << 23));
    const u32v sign = (codes & 0x80) << 24, magnitude = codes & 0x7f;
    const u32v shifted = magnitude << dropped;
    const u32v is_subnormal = (u32v)(magnitude < (1u << F::mantissa_bits));
    // A subnormal is read one binade up, where its mantissa has a hidden bit, and loses that bit's value again.
    const f32v normal = bits_as<f32v>(shifted + normals);
    const f32v subnormal = bits_as<f32v>(shifted + normals + (1u << 23)) - min_normal;
    u32v bits = bits_as<u32v>(is_subnormal ? subnormal : normal);
    const u32v last = magnitude >= F::inf_code ? (magnitude == F::inf_code && F::inf_code != F::nan_code ? all(EXPONENT) : all(0x7fc00000u)) : bits;
    return bits_as<f32v>(last | sign);
}

template <class F>
inline f32v decode(const uint8_t* codes) {
    return decode<F>(widen(codes));
}

template <class F>
inline f32v decode(const uint8_t* codes, int64_t count) {
    uint8_t buffer[LANES] = {};
    std::memcpy(buffer, codes, count);
    return decode<F>(buffer);
}

// The values of 2 · LANES codes, divided by HALF_SCALE<F>. Where FP16 is converted in hardware, a code is shifted into an
// FP16 number, whose exponents reach further: E5M2 is the upper half of one, E4M3 one divided by 2^8.
struct Pair {
    f32v low, high;
};

#if defined(__AVX2__)
template <class F>
constexpr float HALF_SCALE = F::mantissa_bits == 3 ? 256.0f : 1.0f;

// NaN codes of E4M3 are read as 480 here.
inline __m256i finite_halves_of_16(__m128i codes, E5M2) { return _mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8); }

inline __m256i finite_halves_of_16(__m128i codes, E4M3) {
    const __m256i extended = _mm256_cvtepi8_epi16(codes);  // the sign in all upper bits
    return _mm256_and_si256(_mm256_slli_epi16(extended, 7), _mm256_set1_epi16(short(0xbfff)));
}

inline __m256i halves_of_16(__m128i codes, E5M2 format) { return finite_halves_of_16(codes, format); }

inline __m256i halves_of_16(__m128i codes, E4M3 format) {
    const __m256i halves = finite_halves_of_16(codes, format);
    const __m256i magnitude = _mm256_and_si256(halves, _mm256_set1_epi16(0x3fff));
    return _mm256_or_si256(halves, _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x3f80)));  // all ones are a NaN
}

template <class F>
inline Pair decode_pair(const uint8_t* codes) {
    auto halves = [](const uint8_t* from) { return halves_of_16(load<__m128i>(from), F{}); };
#if defined(__AVX512F__)
    return {(f32v)_mm512_cvtph_ps(halves(codes)), (f32v)_mm512_cvtph_ps(halves(codes + 16))};
#else
    const __m256i both = halves(codes);
    return {(f32v)_mm256_cvtph_ps(_mm256_castsi256_si128(both)), (f32v)_mm256_cvtph_ps(_mm256_extracti128_si256(both, 1))};
#endif
}
#else
template <class F>
constexpr float HALF_SCALE = 1.0f;

template <class F>
inline Pair decode_pair(const uint8_t* codes) {
    return {decode<F>(codes), decode<F>(codes + LANES)};
}
#endif

}  // namespace
}  // namespace octavo
