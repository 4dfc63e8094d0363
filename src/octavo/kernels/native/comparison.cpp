#include "comparison.h"

#include <algorithm>
#include <limits>

namespace octavo {
namespace {

float scale_of(const Operand& operand, int64_t row) { return operand.scale[operand.scale_per_row ? row : 0]; }

Operand without_scale(Operand operand) {
    operand.scale = nullptr;
    return operand;
}

}  // namespace

void compare(const Kernels& kernels, const ComparisonProblem& p) {
    const int64_t count = p.m * p.n;
    kernels.gemm({p.left, p.right, p.m, p.n, p.k, 0, nullptr, p.out, Dtype::f32});
    kernels.gemm({p.left_codes, p.right_codes, p.m, p.n, p.k, p.block, nullptr, p.out + count, Dtype::f32});
    float* cut = p.out + 2 * count;
    if (p.sums == TensorCore::none) {
        std::fill(cut, cut + count, std::numeric_limits<float>::quiet_NaN());
        return;
    }
    std::fill(cut, cut + count, 0.0f);
    kernels.hopper({without_scale(p.left_codes), without_scale(p.right_codes), p.m, p.n, p.k,
                    p.sums == TensorCore::one_chain, cut});
    for (int64_t row = 0; row < p.m; ++row)
        for (int64_t column = 0; column < p.n; ++column) {
            float& sum = cut[row * p.n + column];
            sum = static_cast<float>(double(sum) * scale_of(p.left_codes, row) * scale_of(p.right_codes, column));
        }
}

}  // namespace octavo
