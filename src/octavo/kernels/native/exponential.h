// e^x in FP32, for softmax and silu.
//
//   x = n · ln 2 + r, |r| <= ln 2 / 2;   e^x = 2^n · (1 + r + r²/2! + ... + r⁷/7!)
//
// The Taylor polynomial of degree 7 is off by r⁸/8!, less than 8e-9 relative or an eighth of an ulp. Every step is one FMA or
// exact, so all levels with FMA give the same bits; the bound of 2 ulp is checked in tests/native/exponential.cpp.
#pragma once

#include "simd.h"

namespace octavo {
namespace {

// e^x within 2 ulp. x is clamped to [-87, 88], where the result is normal and finite: e^-87 = 1.6e-38, e^88 = 1.7e38. A NaN
// stays.
inline f32v exponential(f32v x) {
    const f32v low = all(-87.0f), high = all(88.0f), magic = all(12582912.0f);  // 1.5 * 2^23: whole numbers are its ulps
    x = x < low ? low : x > high ? high : x;
    const f32v shifted = fused(x, all(1.44269504f), magic), n = shifted - magic;
    // ln 2 in two parts, so that r keeps its low bits.
    const f32v r = fused(n, all(-1.42860677e-6f), fused(n, all(-0.693145752f), x));
    constexpr float inverse_factorials[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    f32v p = all(1.0f / 5040);
    for (float c : inverse_factorials) p = fused(p, r, all(c));
    // n is in the low bits of `shifted`; added to the exponent field of 1.0 it makes 2^n.
    return p * bits_as<f32v>((bits_as<u32v>(shifted) << 23) + 0x3f800000);
}

inline float exponential(float x) { return exponential(all(x))[0]; }

}  // namespace
}  // namespace octavo
