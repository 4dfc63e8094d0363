// Scale of one cached key or value vector, by search; numerics/scale_search.py is the definition.
//
//   scale = argmin over step = 16 ... 31 of Σ (x - scale · E4M3(x / scale))²,   scale = step / 16 · 2^e
//
// Sixteen candidates in the binade that the amax gives, all BF16 numbers, so two bytes store one. On SmolLM2-135M's keys the
// squared error was 0.49 of that with the power of two alone, on its values 0.63. x is a dense FP32 vector of
// at most MAX_HEAD_DIM numbers. Squared errors are truncated to integers before they are added: integer sums have no order, so
// every instruction set, the Python definition included, selects the same scale to the bit.
#pragma once

#include "quantize.h"

namespace octavo {
namespace {

constexpr int STEPS = 16;  // scales in a binade
constexpr float FINE = 64.0f;

// Σ ⌊(FINE · (y − r(y)))²⌋ over y = factor / FINE · x, r rounding to E4M3's mantissa. Below 2^30 for MAX_HEAD_DIM numbers up to
// E4M3's maximum, so 32-bit lanes cannot overflow.
inline int64_t error_of(const float* x, int64_t n, float factor) {
    constexpr int dropped = 23 - E4M3::mantissa_bits;
    const f32v factors = all(factor);
    i32v sums = {};
    for (int64_t i = 0; i < n; i += LANES) {
        const f32v scaled = load_f32(x + i, least_of<int64_t>(LANES, n - i)) * factors;
        // Round half up in the dropped bits, without E4M3's subnormals: this ranks scales, it makes no codes.
        const f32v nearest = bits_as<f32v>((bits_as<u32v>(scaled) + (1u << (dropped - 1))) & ~((1u << dropped) - 1));
        const f32v left = scaled - nearest;
        sums += __builtin_convertvector(left * left, i32v);
    }
    int64_t sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += sums[lane];
    return sum;
}

// The decode scale of n numbers, n <= MAX_HEAD_DIM. NaN and Inf count as 0; they do not widen the scale.
inline float searched_scale(const float* x, int64_t n) {
    const Measurement measurement = measure(x, n);
    // The floor keeps the smallest scale at 2^-126, a normal BF16 number.
    const ScaleRule rule{ScaleRounding::rceil, double(E4M3::max) * __FLT_MIN__, 0};
    const float encode_scale = encode_scale_of<E4M3>(bits_as<float>(measurement.amax), rule);
    float scaled[MAX_HEAD_DIM];
    for (int64_t i = 0; i < n; ++i) scaled[i] = (f32_bits(x[i]) & MAGNITUDE) < EXPONENT ? x[i] * encode_scale : 0.0f;
    // A smaller step wins a tie. Errors of different steps are in different units, hence · step².
    int best = STEPS;
    int64_t least = INT64_MAX;
    for (int step = STEPS; step < 2 * STEPS; ++step) {
        const int64_t error = error_of(scaled, n, FINE * STEPS / float(step)) * step * step;
        if (error < least) least = error, best = step;
    }
    return float(best) / STEPS / encode_scale;
}

}  // namespace
}  // namespace octavo
