// The Python module: addresses and sizes in, nothing of torch. kernels/cpu.py checks everything before it calls.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <sys/mman.h>

#include <tuple>
#include <vector>

#include "kernels.h"
#include "parallel.h"

namespace nb = nanobind;
using namespace octavo;

namespace {

// The levels this processor has, slowest first.
const std::vector<const Kernels*>& available() {
    static const std::vector<const Kernels*> tables = [] {
        std::vector<const Kernels*> found{&baseline_kernels};
#if defined(OCTAVO_X86)
        __builtin_cpu_init();
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

const Kernels& kernels(int level) {
    const auto& tables = available();
    return *tables.at(level < 0 ? tables.size() - 1 : static_cast<size_t>(level));
}

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace

NB_MODULE(_native, m) {
    m.def("levels", [] {
        std::vector<std::string> names;
        for (const Kernels* table : available()) names.emplace_back(table->name);
        return names;
    });
    m.def("has_threads", &has_threads);
    m.def("max_threads", &max_threads);
    m.def("expect_writes", [](uintptr_t address, size_t bytes) {
#if defined(MADV_HUGEPAGE)
        constexpr uintptr_t page = 4096;
        const uintptr_t begin = (address + page - 1) / page * page, end = (address + bytes) / page * page;
        if (begin < end) madvise(at<void>(begin), end - begin, MADV_HUGEPAGE);  // a hint: the answer does not matter
#endif
    });
    m.def(
        "quantize",
        [](int level, uintptr_t x, int dtype, int64_t rows, int64_t columns, int64_t stride, int format,
           int64_t block_rows, int64_t block_columns, bool propagate, int rounding, double amax_floor, int margin,
           uintptr_t given_amax, bool zero_is_unknown, uintptr_t given_scale, uintptr_t codes, uintptr_t values,
           uintptr_t scale, uintptr_t measured, bool counting) {
            Counts counts{};
            const QuantizeProblem problem{
                {at<const void>(x), Dtype(dtype), rows, columns, stride}, Format(format), block_rows, block_columns,
                propagate, {ScaleRounding(rounding), amax_floor, margin}, at<const float>(given_amax), zero_is_unknown,
                at<const float>(given_scale), at<uint8_t>(codes), at<void>(values), at<float>(scale), at<float>(measured),
                counting, &counts};
            {
                nb::gil_scoped_release released;
                kernels(level).quantize(problem);
            }
            return std::make_tuple(counts.nonfinite, counts.saturated, counts.underflowed);
        });
    m.def("round_stochastic",
          [](int level, uintptr_t x, uintptr_t random, int64_t count, int format, uintptr_t codes) {
              const StochasticProblem problem{at<const float>(x), at<const int32_t>(random), count, Format(format),
                                              at<uint8_t>(codes)};
              nb::gil_scoped_release released;
              kernels(level).round_stochastic(problem);
          });
    m.def(
        "gemm",
        [](int level, uintptr_t a, int a_element, int64_t a_row, int64_t a_column, uintptr_t a_scale, bool a_per_row,
           uintptr_t b, int b_element, int64_t b_row, int64_t b_column, uintptr_t b_scale, bool b_per_row, int64_t rows,
           int64_t columns, int64_t depth, int64_t block, uintptr_t bias, uintptr_t out, int out_dtype) {
            const GemmProblem problem{
                {at<const void>(a), Element(a_element), a_row, a_column, at<const float>(a_scale), a_per_row},
                {at<const void>(b), Element(b_element), b_row, b_column, at<const float>(b_scale), b_per_row},
                rows, columns, depth, block, at<const float>(bias), at<void>(out), Dtype(out_dtype)};
            nb::gil_scoped_release released;
            kernels(level).gemm(problem);
        });
    m.def(
        "hopper",
        [](int level, uintptr_t a, int a_element, int64_t a_row, int64_t a_column, uintptr_t a_scale, bool a_per_row,
           uintptr_t b, int b_element, int64_t b_row, int64_t b_column, uintptr_t b_scale, bool b_per_row, int64_t rows,
           int64_t columns, int64_t depth, bool one_chain, uintptr_t out) {
            const HopperProblem problem{
                {at<const void>(a), Element(a_element), a_row, a_column, at<const float>(a_scale), a_per_row},
                {at<const void>(b), Element(b_element), b_row, b_column, at<const float>(b_scale), b_per_row},
                rows, columns, depth, one_chain, at<float>(out)};
            nb::gil_scoped_release released;
            kernels(level).hopper(problem);
        });
    m.def("dequantize", [](int level, uintptr_t codes, int format, int64_t rows, int64_t columns, int64_t stride,
                           int64_t block_rows, int64_t block_columns, uintptr_t scale, uintptr_t out, int out_dtype) {
        const DequantizeProblem problem{at<const uint8_t>(codes), Format(format), rows, columns, stride, block_rows,
                                        block_columns, at<const float>(scale), at<void>(out), Dtype(out_dtype)};
        nb::gil_scoped_release released;
        kernels(level).dequantize(problem);
    });
}
