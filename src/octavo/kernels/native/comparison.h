// One product three ways: of what was cast, of its codes in FP32 sums, and of its codes as Hopper's tensor cores sum.
#pragma once

#include "kernels.h"

namespace octavo {

enum class TensorCore : int { none = 0, one_chain = 1, chains = 2 };

// Over all elements w of the first product, e of the second and c of the third.
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
    TensorCore sums;                  // none where scales change along K, or where nobody asks
    float* out;                       // [3, m, n]; NaN for sums that are not made
    ComparisonSums* total;
};

void compare(const Kernels& kernels, const ComparisonProblem& problem);

}  // namespace octavo
