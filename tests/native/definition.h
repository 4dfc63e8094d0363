// What every number must be, one at a time and in FP64: numerics/reference.py, scaling.py and accumulate.py in plain C++.
// Nothing here looks at bits, and nothing is shared with the kernels.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace definition {

struct Small {  // a format of 8 or 16 bits
    int exponent_bits, mantissa_bits;
    int max_code;  // of a magnitude
    bool has_infinity;

    int bias() const { return (1 << (exponent_bits - 1)) - 1; }
    int min_exponent() const { return 1 - bias(); }
    int magnitude_mask() const { return (1 << (exponent_bits + mantissa_bits)) - 1; }
    int sign_mask() const { return magnitude_mask() + 1; }
};

constexpr Small E4M3{4, 3, 0x7e, false}, E5M2{5, 2, 0x7b, true}, F16{5, 10, 0x7bff, true}, BF16{8, 7, 0x7f7f, true};

inline double decode(int code, const Small& format) {
    const double sign = code & format.sign_mask() ? -1.0 : 1.0;
    const int magnitude = code & format.magnitude_mask();
    if (magnitude > format.max_code)
        return format.has_infinity && magnitude == format.max_code + 1 ? sign * INFINITY : NAN;
    const int exponent = magnitude >> format.mantissa_bits, one = 1 << format.mantissa_bits, mantissa = magnitude % one;
    const int shift = format.min_exponent() - format.mantissa_bits;
    return sign * (exponent ? std::ldexp(one + mantissa, exponent - 1 + shift) : std::ldexp(mantissa, shift));
}

inline bool is_nan(int code, const Small& format) { return std::isnan(decode(code, format)); }

// To nearest, ties to even; what rounds beyond the maximum saturates, or becomes infinite. An infinite value is infinite
// (NaN where a format has no infinity).
inline int encode(double value, const Small& format, bool saturate) {
    const int sign = std::signbit(value) ? format.sign_mask() : 0;
    const int infinite = format.has_infinity ? format.max_code + 1 : format.magnitude_mask();
    if (std::isnan(value)) return sign | format.magnitude_mask();
    if (std::isinf(value)) return sign | infinite;
    if (value == 0) return sign;
    const int exponent = std::fmax(std::ilogb(value), format.min_exponent());
    const double rounded = std::nearbyint(std::ldexp(std::fabs(value), format.mantissa_bits - exponent));  // in quanta
    const double steps = rounded + std::ldexp(exponent - format.min_exponent(), format.mantissa_bits);
    if (steps > format.max_code) return sign | (saturate ? format.max_code : infinite);
    return sign | int(steps);
}

// A finite value within the maximum, rounded up in magnitude where what it has below its quantum and `drawn`, a part of
// 2^bits, together make one quantum; else down. Exact: FP64 holds both.
inline int encode_stochastic(double value, double drawn, int bits, const Small& format) {
    if (!std::isfinite(value) || value == 0) return encode(value, format, true);
    const int exponent = std::fmax(std::ilogb(value), format.min_exponent());
    const double quanta = std::ldexp(std::fabs(value), format.mantissa_bits - exponent) + std::ldexp(drawn, -bits);
    return encode(std::copysign(std::ldexp(std::floor(quanta), exponent - format.mantissa_bits), value), format, true);
}

enum class Rule { fp32, rceil, floor, even };

// What brings `amax` to the format's maximum.
inline float encode_scale(double amax, const Small& format, Rule rule, double amax_floor, int margin) {
    const double largest = std::fmax(std::fmax(amax, amax_floor), DBL_MIN), maximum = decode(format.max_code, format);
    if (rule == Rule::floor || rule == Rule::even) {
        int exponent = std::ilogb(largest);
        if (rule == Rule::even)
            exponent += std::nearbyint(std::ldexp(largest, format.mantissa_bits - exponent)) == 2 << format.mantissa_bits;
        return std::ldexp(1.0f, std::fmin(127, std::fmax(-126, std::ilogb(maximum) - margin - exponent)));
    }
    const double quotient = std::ldexp(maximum, -margin) / largest;
    const float nearest = static_cast<float>(std::fmin(FLT_MAX, std::fmax(FLT_MIN, quotient)));
    return rule == Rule::rceil ? std::ldexp(1.0f, std::ilogb(nearest)) : nearest;
}

// Of sixteen scales of the binade from the least power of two that keeps FP32 numbers within E4M3 (numerics/scale_search.py),
// the one whose codes are nearest.
inline double searched_scale(const std::vector<double>& numbers) {
    double amax = 0, best = 0;
    for (double number : numbers) amax = std::fmax(amax, std::isfinite(number) ? std::fabs(number) : 0);
    const double encode = encode_scale(amax, E4M3, Rule::rceil, 448 * double(FLT_MIN), 0);
    int64_t least = INT64_MAX;
    for (int n = 16; n < 32; ++n) {
        int64_t error = 0;
        for (double number : numbers) {
            const float y = static_cast<float>(std::fabs(number) * encode) * (1024.0f / float(n));
            if (y == 0 || !std::isfinite(y)) continue;
            const double step = std::ldexp(1.0, std::ilogb(y) - E4M3.mantissa_bits);
            const float left = static_cast<float>(y - std::floor(y / step + 0.5) * step);
            error += static_cast<int64_t>(left * left);
        }
        if (error * n * n < least) least = error * n * n, best = n / 16.0 / encode;
    }
    return best;
}

// One chain of a tensor core: 32 products and the total at a time, cut to a common quantum, exactly added, cut again.
// Where the plain sum is not finite, it is the result.
class Chain {
public:
    // A product's factors, and the smallest exponents of their formats.
    void multiply(double a, int a_min_exponent, double b, int b_min_exponent) {
        const double product = a * b;
        plain_ += product;
        products_[count_++] = product;
        if (product != 0 && std::isfinite(product)) {
            const double exponent = std::fmax(std::ilogb(a), a_min_exponent) + std::fmax(std::ilogb(b), b_min_exponent);
            exponent_ = std::fmax(exponent_, exponent);
        }
        if (count_ == STEP) add();
    }

    float total() {
        add();
        return static_cast<float>(std::isfinite(plain_) ? total_ : plain_);
    }

private:
    static constexpr int STEP = 32, FRACTION_BITS = 13;
    double products_[STEP], total_ = 0, plain_ = 0, exponent_ = -1000;
    int count_ = 0;

    void add() {
        if (total_ != 0) exponent_ = std::fmax(exponent_, std::ilogb(total_));
        if (exponent_ > -1000 && std::isfinite(plain_)) {
            const double quantum = std::ldexp(1.0, int(exponent_) - FRACTION_BITS);
            double sum = std::trunc(total_ / quantum);
            for (int i = 0; i < count_; ++i) sum += std::trunc(products_[i] / quantum);
            sum *= quantum;
            const double kept = sum == 0 ? 1 : std::ldexp(1.0, std::ilogb(sum) - FRACTION_BITS);
            total_ = std::trunc(sum / kept) * kept;
        }
        count_ = 0;
        exponent_ = -1000;
    }
};

}  // namespace definition
