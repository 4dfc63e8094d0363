// Trials of round_stochastic.
#include "trial.h"

namespace trial {
namespace {

constexpr int BITS = 20;  // of a random number

// Of any size that the format has, of none, in the middle of two codes or just beside it, infinite, or not a number.
float any_number(const definition::Small& format, Random& random) {
    const double sign = random.one_in(2) ? -1 : 1, largest = definition::decode(format.max_code, format);
    const int64_t code = random.below(format.max_code);
    const double low = definition::decode(int(code), format), high = definition::decode(int(code) + 1, format);
    const double beside = low + (high - low) * std::ldexp(double(random.below(1 << BITS)), -BITS);
    const double sizes[] = {beside,
                            std::nextafter(float(beside), INFINITY),
                            low,
                            largest,
                            largest * random.uniform(),
                            std::ldexp(random.uniform(), int(random.between(-149, 0))),
                            0.0};
    if (random.one_in(50)) return static_cast<float>(random.one_in(2) ? NAN : sign * INFINITY);
    return static_cast<float>(sign * std::fmin(random.any_of(sizes), largest));
}

int32_t any_drawn(Random& random) {
    const int64_t numbers[] = {random.below(1 << BITS), random.below(1 << BITS), 0, 1, 1 << (BITS - 1), (1 << BITS) - 1};
    return int32_t(random.any_of(numbers));
}

}  // namespace

void round_stochastic(Random& random, std::vector<Verdict>& levels) {
    const int64_t count = random.one_in(10) ? random.between(30000, 40000) : random.size(2000);
    const octavo::Format format = octavo::Format(random.below(2));
    std::vector<float> x(count);
    std::vector<int32_t> drawn(count);
    std::vector<int> wanted(count);
    for (int64_t i = 0; i < count; ++i) {
        x[i] = any_number(small(format), random), drawn[i] = any_drawn(random);
        wanted[i] = definition::encode_stochastic(x[i], drawn[i], BITS, small(format));
    }
    const std::string name = words("round_stochastic %lld, format %d", (long long)count, int(format));
    for (Verdict& level : levels) {
        Written<uint8_t> codes(count);
        level.kernels.round_stochastic({x.data(), drawn.data(), count, format, codes.data()});
        for (int64_t i = 0; i < count; ++i) {
            const bool both_nan = std::isnan(x[i]) && definition::is_nan(codes[i], small(format));
            level.expect(both_nan || codes[i] == wanted[i], int(codes[i]), wanted[i], "code", i, name);
        }
        level.expect(codes.is_intact(), 0, 1, "margin", 0, name);
    }
}

}  // namespace trial
