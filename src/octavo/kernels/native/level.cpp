// Every kernel at one instruction-set level. The build compiles this file once a level, with that level's flags and its
// name as OCTAVO_LEVEL.
#include "dequantize.h"
#include "gemm.h"
#include "hopper.h"
#include "quantize.h"
#include "stochastic.h"

#define OCTAVO_JOINED(level) level##_kernels
#define OCTAVO_TABLE(level) OCTAVO_JOINED(level)
#define OCTAVO_TEXT(level) #level
#define OCTAVO_NAME(level) OCTAVO_TEXT(level)

namespace octavo {

const Kernels OCTAVO_TABLE(OCTAVO_LEVEL) = {OCTAVO_NAME(OCTAVO_LEVEL), quantize, dequantize, round_stochastic, gemm,
                                               hopper};

}  // namespace octavo
