// FP32 numbers to codes with random numbers that are given; cast_stochastic in numerics/cast.py is the definition.
#pragma once

#include "fp8.h"
#include "kernels.h"
#include "parallel.h"

namespace octavo {
namespace {

constexpr int STOCHASTIC_BITS = 20;

// The dropped fraction is what a number has below its quantum, cut off after as many bits as the random number has: both
// are whole numbers then, and a carry into the quanta is what rounds up.
template <class F>
inline u32v encode_stochastic(f32v x, u32v random) {
    constexpr uint32_t smallest = uint32_t(127 + F::min_exponent) << 23;
    constexpr uint32_t reciprocal = uint32_t(2 * 127 + F::mantissa_bits + STOCHASTIC_BITS) << 23;  // less a power's field
    const u32v bits = bits_as<u32v>(x), magnitude = bits & MAGNITUDE;
    const u32v power = largest(magnitude & EXPONENT, all(smallest));
    const f32v fixed = bits_as<f32v>(magnitude) * bits_as<f32v>(reciprocal - power);
    const u32v quanta = ((u32v)__builtin_convertvector(fixed, i32v) + random) >> STOCHASTIC_BITS;
    const u32v finite = quanta + ((power - smallest) >> (23 - F::mantissa_bits));
    const u32v special = magnitude > EXPONENT ? all(F::nan_code) : all(F::inf_code);
    return (magnitude >= EXPONENT ? special : finite) | ((bits >> 24) & 0x80);
}

template <class F>
void round_stochastic_as(const StochasticProblem& p) {
    constexpr int64_t span = 4 * LANES;
    parallel_for((p.count + span - 1) / span, 16384 / span, [&](int64_t begin, int64_t end) {
        const int64_t last = least_of(end * span, p.count);
        for (int64_t i = begin * span; i < last; i += LANES) {
            const int64_t n = least_of<int64_t>(LANES, last - i);
            uint32_t random[LANES] = {};
            std::memcpy(random, p.random + i, n * sizeof *random);
            const u32v codes = encode_stochastic<F>(load_f32(p.x + i, n), load<u32v>(random));
            if (n == LANES) store_bytes(p.codes + i, codes);
            else store_bytes(p.codes + i, codes, n);
        }
    });
}

void round_stochastic(const StochasticProblem& p) {
    if (p.format == Format::e4m3) round_stochastic_as<E4M3>(p);
    else round_stochastic_as<E5M2>(p);
}

}  // namespace
}  // namespace octavo
