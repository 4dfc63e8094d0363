// Selection of instruction-set levels at run time. Compiled with baseline flags: it runs before the processor is known.
#include "kernels.h"

namespace octavo {

const std::vector<const Kernels*>& levels() {
    static const std::vector<const Kernels*> tables = [] {
        std::vector<const Kernels*> found{&baseline_kernels};
#if defined(OCTAVO_X86)
        __builtin_cpu_init();
        // A level needs every extension that its file is compiled with (CMakeLists.txt); the operating system's support is
        // included.
        const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
        if (avx2) found.push_back(&avx2_kernels);
        if (avx512) found.push_back(&avx512_kernels);
        if (avx512 && __builtin_cpu_supports("avx512bf16")) found.push_back(&avx512_bf16_kernels);
#endif
        return found;
    }();
    return tables;
}

}  // namespace octavo
