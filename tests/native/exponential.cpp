// Trials of e^x: within 2 units in the last place from -87 to 88, and the value there for what is beyond.
#include "exponentials.h"
#include "trial.h"

namespace trial {
namespace {

constexpr double LOW = -87, HIGH = 88, LN_2 = 0.693147180559945309;

// Anywhere in the range; around an odd multiple of ln 2 / 2, where the series is longest; next to 0; or out of the range.
float any_power(Random& random) {
    const double anywhere = LOW + (HIGH - LOW) * random.uniform();
    const double middle = (std::floor(anywhere / LN_2) + 0.5) * LN_2 + std::ldexp(random.uniform() - 0.5, -int(random.below(20)));
    const double small = std::ldexp(random.uniform() - 0.5, -int(random.below(140)));
    const double powers[] = {anywhere, anywhere, middle, small};
    const double specials[] = {LOW, HIGH, -INFINITY, INFINITY, NAN, -1e30, 1e30, -87.5, 88.5, 0.0, -0.0};
    return static_cast<float>(random.one_in(30) ? random.any_of(specials) : random.any_of(powers));
}

Exponential* of([[maybe_unused]] const octavo::Kernels& level) {
#if defined(__x86_64__)
    if (&level == &octavo::avx2_kernels) return avx2_exponential;
    if (&level == &octavo::avx512_kernels) return avx512_exponential;
    if (&level == &octavo::avx512_bf16_kernels) return avx512_bf16_exponential;
#endif
    return baseline_exponential;
}

}  // namespace

void exponential(Random& random, std::vector<Verdict>& levels) {
    std::vector<float> x(random.between(1000, 1100));
    for (float& power : x) power = any_power(random);
    for (Verdict& level : levels) {
        Written<float> y(int64_t(x.size()));
        of(level.kernels)(x.data(), int64_t(x.size()), y.data());
        for (size_t i = 0; i < x.size(); ++i) {
            const double wanted = std::isnan(x[i]) ? NAN : std::exp(std::fmin(std::fmax(x[i], LOW), HIGH));
            const double ulp = std::isnan(wanted) ? 0 : std::ldexp(1.0, std::ilogb(wanted) - 23);
            level.expect_near(y[int64_t(i)], wanted, 2 * ulp, "power", int64_t(i), words("e to the power of %.9g", x[i]));
        }
        level.expect(y.is_intact(), 0, 1, "margin", 0, "exponential");
    }
}

}  // namespace trial
