// Every kernel of every level that this processor has, compared with the definition: problems by chance, the same at every run.
// Needs nothing but the kernels, so it runs wherever a processor can be emulated; scripts/levels.sh does that.
//
//   levels [trials of each kernel, 1000]
#include <unistd.h>
#include <termios.h>

#include <cstdlib>

#include "trial.h"

namespace {

struct Kernel {
    const char* name;
    void (*trial)(trial::Random&, std::vector<trial::Verdict>&);
};

constexpr Kernel KERNELS[] = {{"quantize", trial::quantize}, {"cast_sums", trial::cast_sums}, {"dequantize", trial::dequantize},
                              {"round_stochastic", trial::round_stochastic}, {"random_bits", trial::random_bits},
                              {"gemm", trial::gemm}, {"hopper", trial::hopper}, {"compare", trial::compare},
                              {"exponential", trial::exponential}, {"attend", trial::attend}, {"decode", trial::decode}};

std::vector<trial::Verdict> verdicts() {
    std::vector<trial::Verdict> found;
    for (const octavo::Kernels* kernels : octavo::levels()) found.emplace_back(*kernels);
    return found;
}

bool report(const char* what, const std::vector<trial::Verdict>& levels) {
    bool good = true;
    for (const trial::Verdict& level : levels) {
        std::printf("%-12s %-24s %10lld compared, %lld wrong\n", level.kernels.name, what, (long long)level.compared,
                    (long long)level.wrong);
        good &= level.compared > 0 && level.wrong == 0;
    }
    std::fflush(stdout);
    return good;
}

}  // namespace

int main(int count, char** arguments) {
    const long trials = count > 1 ? std::atol(arguments[1]) : 1000;
    bool good = true;
    for (const Kernel& kernel : KERNELS) {
        std::vector<trial::Verdict> levels = verdicts();
        for (long i = 0; i < trials; ++i) {
            trial::Random random(i + 1);
            kernel.trial(random, levels);
        }
        good &= report(kernel.name, levels);
    }
    std::vector<trial::Verdict> levels = verdicts();
    trial::quantize_every_input(levels);
    good &= report("quantize, every input", levels);
    std::puts(good ? "levels: all equal" : "levels: WRONG");
    std::fflush(stdout);
    tcdrain(STDOUT_FILENO);  // as a machine's only process: its end stops the machine, whatever is not printed yet
    return good ? EXIT_SUCCESS : EXIT_FAILURE;
}
