// One GEMM three ways, for octavo's doctor: of the operands in high precision (w), of their codes with FP32 sums (e), and of
// their codes with Hopper's tensor-core sums (c). out [3, M, N] FP32, in this order. The differences w - e and e - c are what
// the casts and what the sums cost.
#pragma once

#include "kernels.h"

namespace octavo {

enum class TensorCore : int { none = 0, one_chain = 1, chains = 2 };

// FP64 sums over all M · N elements of w, e and c.
struct ComparisonSums {
    double energy;        // w²
    double noise;         // (e - w)²
    double magnitude;     // |e|
    double signed_error;  // sign(e) (c - e)
};

struct ComparisonProblem {
    Operand left, right;              // in high precision, without scales; strides are any
    Operand left_codes, right_codes;  // with scales
    int64_t m, n, k, block;           // as in GemmProblem
    TensorCore sums;                  // none where scales change along K, or the comparison is not wanted
    float* out;                       // [3, m, n]: w, e, c; c is NaN where sums is none
    ComparisonSums* total;
};

void compare(const Kernels& kernels, const ComparisonProblem& problem);

}  // namespace octavo
