// Stochastic rounding of FP32 numbers to FP8 codes, and the random bits for it.
//
//   code = ⌊|x| / quantum + random / 2^20⌋ quanta, with x's sign: rounds up with probability = dropped fraction, to 20 bits
//   random bits of element i = word i % 4 of Philox-4x32-10(counter = i / 4, key = seed)
//
// x, random, codes are dense vectors of `count` elements; a thread owns spans of 4,096. Random bits are a function of seed and
// place, so that a GPU, a CPU and any number of threads round to the same codes. Definitions: cast_stochastic in
// numerics/cast.py and numerics/random_bits.py; tests/oracle/test_native_stochastic.py, tests/native/stochastic.cpp.
//
// Reference: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011 (Philox).
#pragma once

#include "fp8.h"
#include "kernels.h"
#include "parallel.h"

namespace octavo {
namespace {

constexpr int STOCHASTIC_BITS = 20;
constexpr int PHILOX_COUNTERS = 32;  // computed together: 128 words, of each of the four two vectors of AVX-512

// Codes of LANES numbers within the maximum, or Inf or NaN. `fixed` is |x| in units of quantum / 2^20; its conversion truncates
// the fraction to 20 bits, as many as `random` has. The integer sum carries into the quanta where fraction + random >= 1: that
// rounds up.
template <class F>
inline u32v encode_stochastic(f32v x, u32v random) {
    constexpr uint32_t smallest = uint32_t(127 + F::min_exponent) << 23;
    constexpr uint32_t reciprocal = uint32_t(2 * 127 + F::mantissa_bits + STOCHASTIC_BITS) << 23;  // less a power's field
    const u32v bits = bits_as<u32v>(x), magnitude = bits & MAGNITUDE;
    const u32v power = largest(magnitude & EXPONENT, all(smallest));  // subnormals share the smallest normal binade's quantum
    const f32v fixed = bits_as<f32v>(magnitude) * bits_as<f32v>(reciprocal - power);
    const u32v quanta = ((u32v)__builtin_convertvector(fixed, i32v) + random) >> STOCHASTIC_BITS;
    // In the smallest normal binade and below, the count of quanta is the code; each binade above adds 2^mantissa_bits codes.
    const u32v finite = quanta + ((power - smallest) >> (23 - F::mantissa_bits));
    const u32v special = magnitude > EXPONENT ? all(F::nan_code) : all(F::inf_code);
    return (magnitude >= EXPONENT ? special : finite) | ((bits >> 24) & 0x80);
}

template <class F>
inline void round_span(const float* x, const int32_t* random, uint8_t* codes, int64_t n) {
    auto rounded_at = [&](int64_t i) { return encode_stochastic<F>(load_f32(x + i), load<u32v>(random + i)); };
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        store_bytes(codes + i, rounded_at(i), rounded_at(i + LANES), rounded_at(i + 2 * LANES), rounded_at(i + 3 * LANES));
    for (; i < n; i += LANES) {
        const int64_t rest = least_of<int64_t>(LANES, n - i);
        uint32_t drawn[LANES] = {};
        std::memcpy(drawn, random + i, rest * sizeof *drawn);
        store_bytes(codes + i, encode_stochastic<F>(load_f32(x + i, rest), load<u32v>(drawn)), rest);
    }
}

template <class F>
void round_stochastic_as(const StochasticProblem& p) {
    constexpr int64_t span = 4096;
    parallel_for((p.count + span - 1) / span, 4, [&](int64_t begin, int64_t end) {
        const int64_t first = begin * span, last = least_of(end * span, p.count);
        round_span<F>(p.x + first, p.random + first, p.codes + first, last - first);
    });
}

// Philox-4x32-10 of counters first ... first + 31: words[i][j] is word i of counter first + j. The loop over counters is
// innermost and has no dependency, so GCC vectorizes it; 64-bit products of 32-bit words are its only wide operation.
inline void philox(uint64_t seed, uint64_t first, uint32_t (&words)[4][PHILOX_COUNTERS]) {
    for (int j = 0; j < PHILOX_COUNTERS; ++j) {
        words[0][j] = uint32_t(first + j), words[1][j] = uint32_t((first + j) >> 32);
        words[2][j] = words[3][j] = 0;
    }
    uint32_t key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        for (int j = 0; j < PHILOX_COUNTERS; ++j) {
            const uint64_t a = uint64_t(0xd2511f53) * words[0][j], b = uint64_t(0xcd9e8d57) * words[2][j];
            words[0][j] = uint32_t(b >> 32) ^ words[1][j] ^ key[0], words[1][j] = uint32_t(b);
            words[2][j] = uint32_t(a >> 32) ^ words[3][j] ^ key[1], words[3][j] = uint32_t(a);
        }
        key[0] += 0x9e3779b9, key[1] += 0xbb67ae85;
    }
}

void random_bits(const RandomBitsProblem& p) {
    constexpr int64_t span = 4 * PHILOX_COUNTERS;
    parallel_for((p.count + span - 1) / span, 256, [&](int64_t begin, int64_t end) {
        for (int64_t part = begin; part < end; ++part) {
            uint32_t words[4][PHILOX_COUNTERS], ordered[span];
            philox(p.seed, uint64_t(part) * PHILOX_COUNTERS, words);
            for (int j = 0; j < PHILOX_COUNTERS; ++j)
                for (int word = 0; word < 4; ++word) ordered[4 * j + word] = words[word][j];
            std::memcpy(p.out + part * span, ordered, least_of(span, p.count - part * span) * sizeof *ordered);
        }
    });
}

void round_stochastic(const StochasticProblem& p) {
    if (p.format == Format::e4m3) round_stochastic_as<E4M3>(p);
    else round_stochastic_as<E5M2>(p);
}

}  // namespace
}  // namespace octavo
