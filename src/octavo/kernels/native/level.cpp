// All kernels at one instruction-set level. The build compiles this file once a level, with that level's flags and its name as
// OCTAVO_LEVEL (CMakeLists.txt: baseline, avx2, avx512, avx512_bf16). Only the table has external linkage, and each level's has
// a name of its own.
#include "cast_sums.h"
#include "decoder.h"
#include "dequantize.h"
#include "gemm.h"
#include "hopper.h"
#include "quantize.h"
#include "stochastic.h"

// Two steps, so that OCTAVO_LEVEL is expanded before ## and # see it.
#define OCTAVO_JOINED(level) level##_kernels
#define OCTAVO_TABLE(level) OCTAVO_JOINED(level)
#define OCTAVO_TEXT(level) #level
#if defined(__aarch64__)
#define OCTAVO_NAME(level) "neon"  // every 64-bit ARM has it: it is the baseline there
#else
#define OCTAVO_NAME(level) OCTAVO_TEXT(level)
#endif

namespace octavo {

const Kernels OCTAVO_TABLE(OCTAVO_LEVEL) = {OCTAVO_NAME(OCTAVO_LEVEL), quantize, cast_sums, dequantize,
                                             round_stochastic, random_bits, gemm, hopper, attend, decode};

}  // namespace octavo
