// FP8 encode and decode of one vector: FP32 numbers to codes, codes to FP32 or FP16. numerics/cast.py is the definition.
//
//   E4M3 (OCP "FN"): S EEEE MMM, bias 7, max 448, no Inf, NaN 0x7f
//   E5M2:            S EEEEE MM, bias 15, max 57,344, Inf 0x7c, NaN 0x7d to 0x7f (encode writes 0x7f)
//
// Rounding is arithmetic, without a table or a branch, so a vector of any width costs the same few instructions a lane. All 256
// codes and ties between them are compared with the definition in tests/oracle/test_native_casts.py and tests/native/casts.cpp.
#pragma once

#include "simd.h"

namespace octavo {
namespace {

// min_exponent is that of the smallest normal number, 2^min_exponent; max_code the code of `max`; inf_code what an infinite
// input becomes where it propagates (E4M3 has no Inf, so NaN).
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

// Rounds magnitudes in [0, max] to nearest even. The low 16 bits of a lane are then the code plus ROUNDED_ZERO<F>, the high 16
// bits are undefined.
//
// A quantum is the distance between neighbouring codes at a number, 2^-mantissa_bits of its binade. Adding the number to 2^23
// quanta makes the FP32 adder round it to whole quanta, ties to even: the sum's mantissa field holds their count, its exponent
// field their size. `power` is at least the smallest normal number, so subnormals share that number's quantum. `sum >> dropped`
// brings the exponent down beside the count; adding both carries a full mantissa into the exponent. 5 instructions for LANES
// numbers.
template <class F>
inline u32v rounded(f32v magnitude) {
    constexpr uint32_t smallest = uint32_t(127 + F::min_exponent) << 23;
    constexpr int dropped = 23 - F::mantissa_bits;
    const u32v power = largest(bits_as<u32v>(magnitude) & EXPONENT, all(smallest));
    // power · 2^dropped is exact, so with or without FMA there is one rounding.
    const u32v sum = bits_as<u32v>(fused(bits_as<f32v>(power), all(float(1 << dropped)), magnitude));
    return sum + (sum >> dropped);
}

// Result of rounded<F>(0): the sum's own exponent in the code's position.
template <class F>
constexpr uint32_t ROUNDED_ZERO = uint32_t(127 + F::min_exponent + 23 - F::mantissa_bits) << F::mantissa_bits;

// The codes of |scaled| without signs, saturated. A NaN becomes the maximum here: least() returns its second operand.
template <class F>
inline u32v encode_magnitude(f32v scaled) {
    const f32v limited = least(bits_as<f32v>(bits_as<u32v>(scaled) & MAGNITUDE), all(F::max));
    return (rounded<F>(limited) - ROUNDED_ZERO<F>) & 0x7f;
}

// RNE(scaled), saturated, with signs. x is the input before scaling and decides which lanes are NaN or Inf: a finite x whose
// product overflows saturates. FINITE leaves that test out.
template <class F, bool FINITE>
inline u32v encode(f32v scaled, f32v x, uint32_t code_of_inf) {
    const u32v finite = encode_magnitude<F>(scaled), sign = (bits_as<u32v>(scaled) >> 24) & 0x80;
    if (FINITE) return finite | sign;
    const u32v given = bits_as<u32v>(x) & MAGNITUDE;
    const u32v special = given > EXPONENT ? all(F::nan_code) : all(code_of_inf);
    return (given >= EXPONENT ? special : finite) | sign;
}

// Codes without signs of 2 · LANES finite BF16 elements, two in every 32-bit lane, as 16-bit words in the same order.
// Magnitudes beyond `limit` (word_limit) count as it. A BF16 is the high half of an FP32: the odd element needs only a mask,
// the even one a shift.
template <class F>
inline u16v encode_words(u16v given, f32v encode_scale, u16v limit) {
    const u32v pairs = bits_as<u32v>(least(given & uint16_t(0x7fff), limit));
    const f32v even = bits_as<f32v>(pairs << 16), odd = bits_as<f32v>(pairs & 0xffff0000);
    return join_halves(rounded<F>(even * encode_scale), rounded<F>(odd * encode_scale)) - uint16_t(ROUNDED_ZERO<F>);
}

// The BF16 bits of max / encode_scale, rounded down: a minimum on 16-bit magnitudes saturates before scaling, twice the lanes
// of one after it. Truncation loses less than 1 / 128, and every number that close below the maximum rounds to it (E4M3's half
// step is 1 / 28).
template <class F>
inline u16v word_limit(float encode_scale) {
    const uint32_t highest = bits_as<uint32_t>(F::max / encode_scale) >> 16;
    return u16v{} + uint16_t(least_of(highest, 0x7f7fu));
}

// LANES codes, one a 32-bit lane, in FP32: exact, NaN and Inf included. Exponent and mantissa are shifted to FP32's place and
// the difference of the biases is added to the exponent field.
template <class F>
inline f32v decode(u32v codes) {
    constexpr uint32_t normals = uint32_t(127 + F::min_exponent - 1) << 23;  // what a code's exponent field lacks
    constexpr int dropped = 23 - F::mantissa_bits;
    const float min_normal = bits_as<float>(normals + (1u << 23));
    const u32v sign = (codes & 0x80) << 24, magnitude = codes & 0x7f;
    const u32v shifted = magnitude << dropped;
    const u32v is_subnormal = (u32v)(magnitude < (1u << F::mantissa_bits));
    // A subnormal is read as 1.M of the smallest normal binade; subtracting 1.0 of that binade leaves 0.M, exactly.
    const f32v normal = bits_as<f32v>(shifted + normals);
    const f32v subnormal = bits_as<f32v>(shifted + normals + (1u << 23)) - min_normal;
    u32v bits = bits_as<u32v>(is_subnormal ? subnormal : normal);
    // E4M3: 0x7f alone is NaN. E5M2: 0x7c is Inf, above it NaN.
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

// The values of 2 · LANES codes divided by HALF_SCALE<F>, by way of FP16 where vcvtph2ps converts it in hardware: one shift
// instead of decode()'s select for subnormals. An E5M2 code is the high byte of the FP16 of the same value. An E4M3 code
// shifted left by 7 is the FP16 of its value / 2^8 (biases 7 and 15), subnormals included.
struct Pair {
    f32v low, high;
};

#if defined(__AVX2__)
template <class F>
constexpr float HALF_SCALE = F::mantissa_bits == 3 ? 256.0f : 1.0f;

// E4M3's NaN codes become 480 / 256 here; halves_of_16 makes them NaN.
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
