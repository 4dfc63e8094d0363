// Vectors of one instruction set's width, in GCC's vector extension: plain operators, and the compiler selects instructions.
//
//   level                   OCTAVO_WIDTH   LANES   registers
//   avx512, avx512_bf16     64 bytes       16      32
//   avx2 (with FMA, F16C)   32 bytes        8      16
//   neon, baseline          16 bytes        4      32 (NEON), 16 (SSE2)
//
// Intrinsics appear only where GCC 12 writes something much slower: widening bytes, broadcasts, minima, FP16 conversions,
// packing. All branches of a function return the same numbers; only fused() may differ, in the baseline, which has no FMA.
// Kernels are built with -ffp-contract=off, so a * b + c is never fused by the compiler.
//
// Included by level.cpp only, which is compiled once for every level. Everything is in an unnamed namespace: two levels must
// never share a function, or the linker might keep the copy whose instructions this processor lacks.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_FMA) || defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define OCTAVO_WIDTH 64
#elif defined(__AVX2__)
#define OCTAVO_WIDTH 32
#else
#define OCTAVO_WIDTH 16
#endif

namespace octavo {
namespace {

constexpr int LANES = OCTAVO_WIDTH / 4;  // of 32 bits

typedef float f32v __attribute__((vector_size(OCTAVO_WIDTH)));
typedef double f64v __attribute__((vector_size(OCTAVO_WIDTH)));
typedef uint32_t u32v __attribute__((vector_size(OCTAVO_WIDTH)));
typedef int32_t i32v __attribute__((vector_size(OCTAVO_WIDTH)));
typedef uint16_t u16v __attribute__((vector_size(OCTAVO_WIDTH)));
typedef int16_t i16v __attribute__((vector_size(OCTAVO_WIDTH)));
typedef uint16_t u16h __attribute__((vector_size(OCTAVO_WIDTH / 2)));  // as many lanes as f32v
typedef uint8_t u8q __attribute__((vector_size(OCTAVO_WIDTH / 4)));
typedef uint8_t u8v __attribute__((vector_size(OCTAVO_WIDTH)));

// memcpy, since operands have no alignment and codes alias other types; it compiles to one unaligned load.
template <class V, class T>
inline V load(const T* from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class V, class T>
inline void store(T* to, V value) {
    std::memcpy(to, &value, sizeof value);
}

template <class To, class From>
inline To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From), "a view of the same bits");
    To result;
    std::memcpy(&result, &value, sizeof result);
    return result;
}

// A broadcast, by intrinsic because GCC 12 writes something slower. `f32v{} + value` would also turn -0 into +0.
inline f32v all(float value) {
#if defined(__AVX512F__)
    return (f32v)_mm512_set1_ps(value);
#elif defined(__AVX2__)
    return (f32v)_mm256_set1_ps(value);
#else
    return f32v{value, value, value, value};
#endif
}

inline u32v all(uint32_t value) { return u32v{} + value; }

// a · b + c, rounded once where the level has an instruction for it.
inline f32v fused(f32v a, f32v b, f32v c) {
#if defined(__AVX512F__)
    return (f32v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (f32v)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_FEATURE_FMA)
    return (f32v)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// The lower and the upper half of the lanes in FP64: a vector of doubles has half as many.
struct Doubles {
    f64v low, high;
};

inline Doubles doubles(f32v value) {
#if defined(__AVX512F__)
    const __m512 all = (__m512)value;
    return {(f64v)_mm512_cvtps_pd(_mm512_castps512_ps256(all)), (f64v)_mm512_cvtps_pd(_mm512_extractf32x8_ps(all, 1))};
#elif defined(__AVX2__)
    const __m256 all = (__m256)value;
    return {(f64v)_mm256_cvtps_pd(_mm256_castps256_ps128(all)), (f64v)_mm256_cvtps_pd(_mm256_extractf128_ps(all, 1))};
#else
    return {f64v{value[0], value[1]}, f64v{value[2], value[3]}};
#endif
}

template <class V>
constexpr inline V largest(V a, V b) {
    return a > b ? a : b;
}

// Lane by lane; GCC 12 compiles the select on bytes to more than the one instruction there is.
inline u8v largest_byte(u8v a, u8v b) {
#if defined(__AVX512BW__)
    return (u8v)_mm512_max_epu8((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (u8v)_mm256_max_epu8((__m256i)a, (__m256i)b);
#else
    return a > b ? a : b;
#endif
}

// The largest lane, by halves: log2(LANES) steps.
inline uint32_t largest_lane(u32v value) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epu32((__m512i)value);
#elif defined(__AVX2__)
    __m128i half = _mm_max_epu32(_mm256_castsi256_si128((__m256i)value), _mm256_extracti128_si256((__m256i)value, 1));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1)));
#else
    uint32_t result = 0;
    for (int lane = 0; lane < LANES; ++lane) result = largest(result, uint32_t(value[lane]));
    return result;
#endif
}

template <class T>
inline T least_of(T a, T b) {
    return a < b ? a : b;
}

// Lane by lane a < b ? a : b, which for a NaN in `a` is `b`.
inline f32v least(f32v a, f32v b) {
#if defined(__AVX512F__)
    return (f32v)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (f32v)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return a < b ? a : b;
#endif
}

inline u16v least(u16v a, u16v b) { return a < b ? a : b; }

template <class V>
inline bool any(V mask) {  // of a comparison: all bits of a lane, or none
#if defined(__AVX2__) && !defined(__AVX512F__)
    if (sizeof(V) == 32) return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#endif
    uint64_t words[sizeof(V) / 8], found = 0;
    std::memcpy(words, &mask, sizeof mask);
    for (uint64_t word : words) found |= word;
    return found != 0;
}

// LANES bytes or 16-bit words, zero-extended to 32 bits. GCC 12 compiles __builtin_convertvector here to one insert an element.
inline u32v widen(const uint8_t* from) {
#if defined(__AVX512F__)
    return (u32v)_mm512_cvtepu8_epi32(load<__m128i>(from));
#elif defined(__AVX2__)
    return (u32v)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    return __builtin_convertvector(load<u8q>(from), u32v);
#endif
}

inline u32v widen(const uint16_t* from) {
#if defined(__AVX512F__)
    return (u32v)_mm512_cvtepu16_epi32(load<__m256i>(from));
#elif defined(__AVX2__)
    return (u32v)_mm256_cvtepu16_epi32(load<__m128i>(from));
#else
    return __builtin_convertvector(load<u16h>(from), u32v);
#endif
}

// LANES 32-bit lanes below 2^16, as 16-bit words.
inline void store_words(uint16_t* to, u32v value) {
#if defined(__AVX512F__)
    store(to, _mm512_cvtepi32_epi16((__m512i)value));
#elif defined(__AVX2__)
    // AVX2 packs within each 128-bit half, so the two wanted quadwords are 0 and 2.
    const __m256i packed = _mm256_packus_epi32((__m256i)value, (__m256i)value);
    store(to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#else
    store(to, __builtin_convertvector(value, u16h));
#endif
}

// Two vectors interleaved: low = a[0], b[0], a[1], b[1] ..., high = the rest.
struct Zipped {
    f32v low, high;
};

#if OCTAVO_WIDTH == 64
constexpr i32v EVENS = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
constexpr i32v TURNS = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
#elif OCTAVO_WIDTH == 32
constexpr i32v EVENS = {0, 2, 4, 6, 8, 10, 12, 14}, TURNS = {0, 8, 1, 9, 2, 10, 3, 11};
#else
constexpr i32v EVENS = {0, 2, 4, 6}, TURNS = {0, 4, 1, 5};
#endif

inline Zipped zip(f32v a, f32v b) { return {__builtin_shuffle(a, b, TURNS), __builtin_shuffle(a, b, TURNS + LANES / 2)}; }

// The even lanes of two vectors, and the odd ones: the inverse of zip.
struct Unzipped {
    f32v even, odd;
};

inline Unzipped unzip(f32v a, f32v b) { return {__builtin_shuffle(a, b, EVENS), __builtin_shuffle(a, b, EVENS + 1)}; }

// Transposes a LANES x LANES matrix of 32-bit lanes in place. AVX2: 8 x 8 in three rounds of 8 shuffles, of which only the last
// crosses 128-bit halves. Otherwise log2(LANES) rounds of interleaving vector i with vector i + LANES / 2.
inline void transpose(u32v (&x)[LANES]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    __m256i pairs[8], fours[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_epi32((__m256i)x[i], (__m256i)x[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_epi32((__m256i)x[i], (__m256i)x[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int high = 0; high < 2; ++high) {
            fours[i + 2 * high] = _mm256_unpacklo_epi64(pairs[i + high], pairs[i + high + 2]);
            fours[i + 2 * high + 1] = _mm256_unpackhi_epi64(pairs[i + high], pairs[i + high + 2]);
        }
    for (int i = 0; i < 4; ++i) {
        x[i] = (u32v)_mm256_permute2x128_si256(fours[i], fours[i + 4], 0x20);
        x[i + 4] = (u32v)_mm256_permute2x128_si256(fours[i], fours[i + 4], 0x31);
    }
#else
    for (int round = 1; round < LANES; round *= 2) {
        u32v next[LANES];
        for (int i = 0; i < LANES / 2; ++i) {
            const Zipped pair = zip(bits_as<f32v>(x[i]), bits_as<f32v>(x[i + LANES / 2]));
            next[2 * i] = bits_as<u32v>(pair.low);
            next[2 * i + 1] = bits_as<u32v>(pair.high);
        }
        for (int i = 0; i < LANES; ++i) x[i] = next[i];
    }
#endif
}

// Elements in memory; load_f32 and store_f32 convert LANES of them from and to FP32.

struct Bf16 { uint16_t bits; };
struct F16 { uint16_t bits; };

#if defined(__aarch64__)
typedef __fp16 Half;  // only converted; GCC 12 has no _Float16 there
#else
typedef _Float16 Half;
#endif

inline float as_f32(float value) { return value; }
inline float as_f32(Bf16 value) { return bits_as<float>(uint32_t(value.bits) << 16); }
inline float as_f32(F16 value) { return static_cast<float>(bits_as<Half>(value.bits)); }

inline f32v load_f32(const float* from) { return load<f32v>(from); }

inline f32v load_f32(const Bf16* from) {
    return bits_as<f32v>(widen(&from->bits) << 16);
}

inline f32v load_f32(const F16* from) {
#if defined(__AVX512F__)
    return (f32v)_mm512_cvtph_ps((__m256i)load<u16h>(from));
#elif defined(__F16C__)
    return (f32v)_mm256_cvtph_ps((__m128i)load<u16h>(from));
#else
    f32v value;
    for (int i = 0; i < LANES; ++i) value[i] = static_cast<float>(bits_as<Half>(from[i].bits));
    return value;
#endif
}

// Round to nearest even; a NaN stays a NaN.
inline void store_f32(float* to, f32v value) { store(to, value); }

inline void store_f32(Bf16* to, f32v value) {
    const u32v bits = bits_as<u32v>(value);
    // Adds half a unit of bit 16 less one, plus that bit itself: ties go to even, and a carry moves the exponent as it should.
    // A NaN could carry into Inf, so its mantissa is truncated and made quiet instead.
    const u32v rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const u32v is_nan = (u32v)((bits & 0x7fffffff) > 0x7f800000);
    store_words(&to->bits, is_nan ? (bits >> 16) | 0x40 : rounded);
}

inline void store_f32(F16* to, f32v value) {
#if defined(__AVX512F__)
    store(to, (u16h)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    store(to, (u16h)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    for (int i = 0; i < LANES; ++i) to[i].bits = bits_as<uint16_t>(static_cast<Half>(value[i]));
#endif
}

// `count` <= LANES elements. Fewer go through a buffer: lanes past the end are zero when loaded and not written when stored, so
// no access passes the end of a tensor.
template <class T>
inline f32v load_f32(const T* from, int64_t count) {
    if (count == LANES) return load_f32(from);
    T buffer[LANES] = {};
    std::memcpy(buffer, from, count * sizeof(T));
    return load_f32(buffer);
}

template <class T>
inline void store_f32(T* to, f32v value, int64_t count) {
    if (count == LANES) return store_f32(to, value);
    T buffer[LANES];
    store_f32(buffer, value);
    std::memcpy(to, buffer, count * sizeof(T));
}

// LANES lanes below 256, as bytes. AVX2's packs leave bytes 0 to 3 in doubleword 0 and bytes 4 to 7 in doubleword 4.
inline void store_bytes(uint8_t* to, u32v value) {
#if defined(__AVX512F__)
    store(to, _mm512_cvtepi32_epi8((__m512i)value));
#elif defined(__AVX2__)
    const __m256i words = _mm256_packus_epi32((__m256i)value, (__m256i)value);
    const __m256i bytes = _mm256_packus_epi16(words, words);
    const __m256i ordered = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4));
    _mm_storel_epi64((__m128i*)to, _mm256_castsi256_si128(ordered));
#else
    store(to, __builtin_convertvector(value, u8q));
#endif
}

// Four vectors at once: with AVX2 three packs and one permutation, where four calls take eight and four.
inline void store_bytes(uint8_t* to, u32v a, u32v b, u32v c, u32v d) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i ab = _mm256_packus_epi32((__m256i)a, (__m256i)b), cd = _mm256_packus_epi32((__m256i)c, (__m256i)d);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(ab, cd), order));
#else
    store_bytes(to, a);
    store_bytes(to + LANES, b);
    store_bytes(to + 2 * LANES, c);
    store_bytes(to + 3 * LANES, d);
#endif
}

// Codes without signs, bytes[4], and the numbers whose signs they get. With AVX2 the numbers are packed with signed saturation,
// which keeps every sign bit, so signs are joined once for all bytes instead of once a vector.
inline void store_bytes(uint8_t* to, const u32v (&bytes)[4], const f32v (&signs)[4]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    auto words = [](auto a, auto b) { return _mm256_packs_epi32((__m256i)a, (__m256i)b); };
    const __m256i all_bytes = _mm256_packus_epi16(words(bytes[0], bytes[1]), words(bytes[2], bytes[3]));
    const __m256i all_signs = _mm256_packs_epi16(words(signs[0], signs[1]), words(signs[2], signs[3]));
    const __m256i joined = _mm256_or_si256(all_bytes, _mm256_and_si256(all_signs, _mm256_set1_epi8(-128)));
    _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32(joined, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
#else
    for (int part = 0; part < 4; ++part)
        store_bytes(to + part * LANES, bytes[part] | ((bits_as<u32v>(signs[part]) >> 24) & 0x80));
#endif
}

inline void store_bytes(uint8_t* to, u32v value, int64_t count) {
    uint8_t buffer[LANES];
    store_bytes(buffer, value);
    std::memcpy(to, buffer, count);
}

// 16-bit words: the low halves of `even` at even places, those of `odd` at odd places.
inline u16v join_halves(u32v even, u32v odd) {
#if defined(__AVX512F__)
    return (u16v)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)even, (__m512i)(odd << 16));
#elif defined(__AVX2__)
    return (u16v)_mm256_blend_epi16((__m256i)even, (__m256i)(odd << 16), 0xaa);
#else
    return bits_as<u16v>((even & 0xffff) | (odd << 16));
#endif
}

// Bytes from words below 256 of `a` then `b`, each with the top bit of the word at its place in sign_of_a, sign_of_b. x86 packs
// within 128-bit parts; the last permutation restores the order.
inline u8v narrow(u16v a, u16v b, u16v sign_of_a, u16v sign_of_b) {
#if defined(__AVX512F__)
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    const __m512i signs = _mm512_and_si512(_mm512_packs_epi16((__m512i)sign_of_a, (__m512i)sign_of_b), _mm512_set1_epi8(-128));
    const __m512i bytes = _mm512_or_si512(_mm512_packus_epi16((__m512i)a, (__m512i)b), signs);
    return (u8v)_mm512_permutexvar_epi64(order, bytes);
#elif defined(__AVX2__)
    const __m256i signs = _mm256_and_si256(_mm256_packs_epi16((__m256i)sign_of_a, (__m256i)sign_of_b), _mm256_set1_epi8(-128));
    return (u8v)_mm256_permute4x64_epi64(_mm256_or_si256(_mm256_packus_epi16((__m256i)a, (__m256i)b), signs), 0xd8);
#else
    const u8v low_bytes = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    const u8v signs = __builtin_shuffle((u8v)(sign_of_a >> 8), (u8v)(sign_of_b >> 8), low_bytes) & uint8_t(0x80);
    return __builtin_shuffle((u8v)a, (u8v)b, low_bytes) | signs;
#endif
}

// Look-ups in a table of 16 bytes (pshufb, vqtbl1q). The baseline x86 level has no such instruction, and no tables.
#if defined(__AVX2__) || defined(__aarch64__)
#define OCTAVO_BYTE_TABLES

typedef uint8_t u8x16 __attribute__((vector_size(16)));

// The table in every 128-bit part: pshufb looks up within its own part.
inline u8v repeated(u8x16 table) {
#if defined(__AVX512F__)
    return (u8v)_mm512_broadcast_i32x4((__m128i)table);
#elif defined(__AVX2__)
    return (u8v)_mm256_broadcastsi128_si256((__m128i)table);
#else
    return table;
#endif
}

// The low bytes of 16 words; high_bytes the high ones.
inline u8x16 low_bytes(const uint16_t* words) {
    const u8x16 even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    return __builtin_shuffle(load<u8x16>(words), load<u8x16>(words + 8), even);
}

inline u8x16 high_bytes(const uint16_t* words) {
    const u8x16 odd = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
    return __builtin_shuffle(load<u8x16>(words), load<u8x16>(words + 8), odd);
}

// table[index & 15], or 0 where bit 7 of the index is set. vqtbl1q gives 0 for any index above 15, so bits 4 to 6 are masked.
inline u8v look_up(u8v table, u8v index) {
#if defined(__AVX512F__)
    return (u8v)_mm512_shuffle_epi8((__m512i)table, (__m512i)index);
#elif defined(__AVX2__)
    return (u8v)_mm256_shuffle_epi8((__m256i)table, (__m256i)index);
#else
    return (u8v)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)(index & uint8_t(0x8f)));
#endif
}

// spread_bytes loads bytes in such an order that store_joined, whose unpack instructions work within 128-bit parts, writes
// words in the order of memory: one permutation of the codes instead of two of the words.
inline u8v spread_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
    return (u8v)_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), load<__m512i>(from));
#elif defined(__AVX2__)
    return (u8v)_mm256_permute4x64_epi64(load<__m256i>(from), 0xd8);
#else
    return load<u8v>(from);
#endif
}

// 4 · LANES words low | high << 8.
inline void store_joined(uint16_t* to, u8v low, u8v high) {
#if defined(__AVX512F__)
    store(to, _mm512_unpacklo_epi8((__m512i)low, (__m512i)high));
    store(to + 2 * LANES, _mm512_unpackhi_epi8((__m512i)low, (__m512i)high));
#elif defined(__AVX2__)
    store(to, _mm256_unpacklo_epi8((__m256i)low, (__m256i)high));
    store(to + 2 * LANES, _mm256_unpackhi_epi8((__m256i)low, (__m256i)high));
#else
    store(to, vzip1q_u8((uint8x16_t)low, (uint8x16_t)high));
    store(to + 2 * LANES, vzip2q_u8((uint8x16_t)low, (uint8x16_t)high));
#endif
}
#endif

}  // namespace
}  // namespace octavo
