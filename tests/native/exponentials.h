// e^x of every level by itself, which the table of kernels does not have.
#pragma once

#include <cstdint>

namespace trial {

typedef void Exponential(const float* x, int64_t count, float* y);

Exponential baseline_exponential, avx2_exponential, avx512_exponential, avx512_bf16_exponential;  // the x86 ones on x86 only

}  // namespace trial
