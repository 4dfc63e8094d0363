// Trials of round_stochastic and random_bits.
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

// One word of Philox-4x32-10, as its authors write it.
uint32_t philox_word(uint64_t seed, uint64_t counter, int word) {
    uint32_t c[4] = {uint32_t(counter), uint32_t(counter >> 32), 0, 0}, k[2] = {uint32_t(seed), uint32_t(seed >> 32)};
    for (int round = 0; round < 10; ++round, k[0] += 0x9e3779b9, k[1] += 0xbb67ae85) {
        const uint64_t a = uint64_t(0xd2511f53) * c[0], b = uint64_t(0xcd9e8d57) * c[2];
        const uint32_t next[4] = {uint32_t(b >> 32) ^ c[1] ^ k[0], uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ k[1], uint32_t(a)};
        std::memcpy(c, next, sizeof c);
    }
    return c[word];
}

}  // namespace

void random_bits(Random& random, std::vector<Verdict>& levels) {
    const int64_t count = random.one_in(10) ? random.between(30000, 70000) : random.size(2000);
    const uint64_t seed = uint64_t(random.bits()) << 32 | random.bits();
    const std::string name = words("random_bits %lld", (long long)count);
    for (Verdict& level : levels) {
        Written<uint32_t> out(count);
        level.kernels.random_bits({seed, count, out.data()});
        for (int64_t i = 0; i < count; ++i) {
            const uint32_t wanted = philox_word(seed, uint64_t(i) / 4, int(i % 4));
            level.expect(out[i] == wanted, out[i], wanted, "word", i, name);
        }
        level.expect(out.is_intact(), 0, 1, "margin", 0, name);
    }
}

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
