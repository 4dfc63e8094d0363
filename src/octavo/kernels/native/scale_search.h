// The scale of a key or value: of sixteen in a binade, the one whose codes are nearest; numerics/scale_search.py is the
// definition. Errors are counted in integers, so every level finds the same scale.
#pragma once

#include "quantize.h"

namespace octavo {
namespace {

constexpr int STEPS = 16;  // scales in a binade
constexpr float FINE = 64.0f;

// Σ ⌊(FINE · (y − r(y)))²⌋ over y = factor / FINE · x, below 2^30 for MAX_HEAD_DIM numbers up to E4M3's maximum.
inline int64_t error_of(const float* x, int64_t n, float factor) {
    constexpr int dropped = 23 - E4M3::mantissa_bits;
    const f32v factors = all(factor);
    i32v sums = {};
    for (int64_t i = 0; i < n; i += LANES) {
        const f32v scaled = load_f32(x + i, least_of<int64_t>(LANES, n - i)) * factors;
        const f32v nearest = bits_as<f32v>((bits_as<u32v>(scaled) + (1u << (dropped - 1))) & ~((1u << dropped) - 1));
        const f32v left = scaled - nearest;
        sums += __builtin_convertvector(left * left, i32v);
    }
    int64_t sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += sums[lane];
    return sum;
}

// Of n numbers, up to MAX_HEAD_DIM.
inline float searched_scale(const float* x, int64_t n) {
    const Measured found = measure(x, n);
    const ScaleRule rule{ScaleRounding::rceil, double(E4M3::max) * __FLT_MIN__, 0};
    const float encode_scale = encode_scale_of<E4M3>(bits_as<float>(found.amax), rule);
    float scaled[MAX_HEAD_DIM];
    for (int64_t i = 0; i < n; ++i) scaled[i] = (f32_bits(x[i]) & MAGNITUDE) < EXPONENT ? x[i] * encode_scale : 0.0f;
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
