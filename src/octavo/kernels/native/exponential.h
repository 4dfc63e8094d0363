// e^x, for softmax and silu.
#pragma once

#include "simd.h"

namespace octavo {
namespace {

// e^x, within 2 units in the last place; what would leave FP32 stops short of its ends.
inline f32v exponential(f32v x) {
    const f32v low = all(-87.0f), high = all(88.0f), magic = all(12582912.0f);  // 1.5 * 2^23: whole numbers are its ulps
    x = x < low ? low : x > high ? high : x;
    const f32v shifted = fused(x, all(1.44269504f), magic), n = shifted - magic;
    const f32v r = fused(n, all(-1.42860677e-6f), fused(n, all(-0.693145752f), x));  // ln 2 in two parts
    constexpr float inverse_factorials[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    f32v p = all(1.0f / 5040);
    for (float c : inverse_factorials) p = fused(p, r, all(c));
    return p * bits_as<f32v>((bits_as<u32v>(shifted) << 23) + 0x3f800000);
}

inline float exponential(float x) { return exponential(all(x))[0]; }

}  // namespace
}  // namespace octavo
