// A trial: one problem, its inputs by chance, and what every level makes of it compared with the definition.
#pragma once

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "definition.h"
#include "kernels.h"

namespace trial {

class Random {  // xorshift64*
public:
    explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u | 1) {
        for (int i = 0; i < 8; ++i) bits();
    }

    uint32_t bits() {
        state_ ^= state_ >> 12;
        state_ ^= state_ << 25;
        state_ ^= state_ >> 27;
        return uint32_t(state_ * 0x2545f4914f6cdd1du >> 32);
    }

    int64_t below(int64_t count) { return bits() % count; }
    int64_t between(int64_t first, int64_t last) { return first + below(last - first + 1); }
    bool one_in(int64_t count) { return below(count) == 0; }
    double uniform() { return bits() * 0x1p-32; }

    template <class T, size_t N>
    T any_of(const T (&choices)[N]) {
        return choices[below(N)];
    }

    // Small sizes more often than large ones.
    int64_t size(int64_t largest) { return int64_t(std::exp2(uniform() * std::log2(double(largest) + 0.999))); }

private:
    uint64_t state_;
};

// Of one level: how many numbers were compared, and how many were wrong. The first of them are printed.
class Verdict {
public:
    explicit Verdict(const octavo::Kernels& kernels) : kernels(kernels) {}

    template <class T>
    void expect(bool equal, T found, T wanted, const char* what, int64_t index, const std::string& problem) {
        ++compared;
        if (equal) return;
        if (++wrong <= 5)
            std::printf("%s: %s[%lld] is %.9g, not %.9g, of %s\n", kernels.name, what, (long long)index, double(found),
                        double(wanted), problem.c_str());
    }

    void expect(float found, float wanted, const char* what, int64_t index, const std::string& problem) {
        const bool equal = std::isnan(wanted) ? std::isnan(found) : std::memcmp(&found, &wanted, sizeof found) == 0;
        expect(equal, found, wanted, what, index, problem);
    }

    // Sums and such: within `bound` of a finite number, else the same.
    void expect_near(float found, double wanted, double bound, const char* what, int64_t index, const std::string& problem) {
        const bool same = std::isnan(wanted) ? std::isnan(found) : found == wanted;
        const bool near = std::isfinite(wanted) && std::fabs(found - wanted) <= bound;
        expect(same || near, double(found), wanted, what, index, problem);
    }

    const octavo::Kernels& kernels;
    int64_t compared = 0, wrong = 0;
};

// Memory for results, with a margin that must stay as it was.
template <class T>
class Written {
public:
    explicit Written(int64_t count) : count_(count), memory_((count + 2 * MARGIN) * sizeof(T), FILL) {}

    T* data() { return reinterpret_cast<T*>(memory_.data()) + MARGIN; }
    T operator[](int64_t i) { return data()[i]; }

    bool is_intact() const {
        const size_t margin = MARGIN * sizeof(T);
        for (size_t i = 0; i < margin; ++i)
            if (memory_[i] != FILL || memory_[memory_.size() - 1 - i] != FILL) return false;
        return true;
    }

private:
    static constexpr int64_t MARGIN = 64;
    static constexpr unsigned char FILL = 0xa5;
    int64_t count_;
    std::vector<unsigned char> memory_;
};

inline const definition::Small& small(octavo::Format format) {
    return format == octavo::Format::e4m3 ? definition::E4M3 : definition::E5M2;
}

// FP32, BF16 or FP16 numbers in memory, by index.
inline int64_t bytes_of(octavo::Dtype dtype) { return dtype == octavo::Dtype::f32 ? 4 : 2; }

inline const definition::Small& small(octavo::Dtype dtype) {
    return dtype == octavo::Dtype::bf16 ? definition::BF16 : definition::F16;
}

inline float get(const void* memory, octavo::Dtype dtype, int64_t index) {
    if (dtype == octavo::Dtype::f32) return static_cast<const float*>(memory)[index];
    return static_cast<float>(definition::decode(static_cast<const uint16_t*>(memory)[index], small(dtype)));
}

inline void put(void* memory, octavo::Dtype dtype, int64_t index, double value) {
    if (dtype == octavo::Dtype::f32) static_cast<float*>(memory)[index] = static_cast<float>(value);
    else static_cast<uint16_t*>(memory)[index] = uint16_t(definition::encode(value, small(dtype), false));
}

// `value` as FP32, rounded to `dtype`.
inline float rounded(float value, octavo::Dtype dtype) {
    if (dtype == octavo::Dtype::f32) return value;
    return static_cast<float>(definition::decode(definition::encode(value, small(dtype), false), small(dtype)));
}

template <class... Numbers>
std::string words(const char* format, Numbers... numbers) {
    char text[400];
    std::snprintf(text, sizeof text, format, numbers...);
    return text;
}

void quantize(Random& random, std::vector<Verdict>& levels);
void quantize_every_input(std::vector<Verdict>& levels);
void cast_sums(Random& random, std::vector<Verdict>& levels);
void dequantize(Random& random, std::vector<Verdict>& levels);
void round_stochastic(Random& random, std::vector<Verdict>& levels);
void random_bits(Random& random, std::vector<Verdict>& levels);
void gemm(Random& random, std::vector<Verdict>& levels);
void hopper(Random& random, std::vector<Verdict>& levels);
void compare(Random& random, std::vector<Verdict>& levels);
void exponential(Random& random, std::vector<Verdict>& levels);
void attend(Random& random, std::vector<Verdict>& levels);
void decode(Random& random, std::vector<Verdict>& levels);

}  // namespace trial
