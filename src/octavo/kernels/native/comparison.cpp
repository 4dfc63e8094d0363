// Comparison of one GEMM in high precision, from codes, and with tensor-core sums (comparison.h). Compiled once: it calls the
// instruction-set level's kernels and adds in FP64 itself, serially, so that sums do not depend on threads.
#include "comparison.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "memory.h"

namespace octavo {
namespace {

float scale_of(const Operand& operand, int64_t row) { return operand.scale[operand.scale_per_row ? row : 0]; }

Operand without_scale(Operand operand) {
    operand.scale = nullptr;
    return operand;
}

// Copies [rows, k] with any strides to K-major [k][rows]; T has the element's size.
template <class T>
void gather(const Operand& operand, int64_t rows, int64_t k, void* to) {
    const T* from = static_cast<const T*>(operand.data);
    T* next = static_cast<T*>(to);
    for (int64_t column = 0; column < k; ++column)
        for (int64_t row = 0; row < rows; ++row) *next++ = from[row * operand.row_stride + column * operand.column_stride];
}

// The operand with one stride of 1, as the kernels need it; other layouts are copied to `memory`.
Operand dense(Operand operand, int64_t rows, int64_t k, Scratch& memory) {
    if (operand.row_stride == 1 || operand.column_stride == 1) return operand;
    void* to = memory.floats(rows * k);
    if (operand.element == Element::f32) gather<uint32_t>(operand, rows, k, to);
    else if (operand.element == Element::bf16 || operand.element == Element::f16) gather<uint16_t>(operand, rows, k, to);
    else gather<uint8_t>(operand, rows, k, to);
    operand.data = to, operand.row_stride = 1, operand.column_stride = rows;
    return operand;
}

void multiply(const Kernels& kernels, const ComparisonProblem& p) {
    const int64_t count = p.m * p.n;
    kernels.gemm({p.left, p.right, p.m, p.n, p.k, 0, nullptr, p.out, Dtype::f32});
    kernels.gemm({p.left_codes, p.right_codes, p.m, p.n, p.k, p.block, nullptr, p.out + count, Dtype::f32});
    float* tensor_core_sums = p.out + 2 * count;
    if (p.sums == TensorCore::none) {
        std::fill(tensor_core_sums, tensor_core_sums + count, std::numeric_limits<float>::quiet_NaN());
        return;
    }
    std::fill(tensor_core_sums, tensor_core_sums + count, 0.0f);
    // Chains without scales: with scales constant along K, scaling the finished total is what hardware does.
    kernels.hopper({without_scale(p.left_codes), without_scale(p.right_codes), p.m, p.n, p.k,
                    p.sums == TensorCore::one_chain, tensor_core_sums});
    for (int64_t row = 0; row < p.m; ++row)
        for (int64_t column = 0; column < p.n; ++column) {
            float& sum = tensor_core_sums[row * p.n + column];
            sum = static_cast<float>(double(sum) * scale_of(p.left_codes, row) * scale_of(p.right_codes, column));
        }
}

ComparisonSums total_of(const float* products, int64_t count) {
    ComparisonSums found{};
    for (int64_t i = 0; i < count; ++i) {
        const double wanted = products[i], exact = products[count + i], error = products[2 * count + i] - exact;
        found.energy += wanted * wanted;
        found.noise += (exact - wanted) * (exact - wanted);
        found.magnitude += std::fabs(exact);
        found.signed_error += exact > 0 ? error : exact < 0 ? -error : 0 * error;  // NaN stays
    }
    return found;
}

}  // namespace

void compare(const Kernels& kernels, const ComparisonProblem& p) {
    static thread_local Scratch memory[4];
    ComparisonProblem read = p;
    read.left = dense(p.left, p.m, p.k, memory[0]);
    read.right = dense(p.right, p.n, p.k, memory[1]);
    read.left_codes = dense(p.left_codes, p.m, p.k, memory[2]);
    read.right_codes = dense(p.right_codes, p.n, p.k, memory[3]);
    multiply(kernels, read);
    *p.total = total_of(p.out, p.m * p.n);
    for (Scratch& one : memory) one.trim();
}

}  // namespace octavo
