// The Python module octavo.kernels._native: addresses and sizes as integers, nothing of torch. Arguments are positional and
// unchecked here; kernels/native_bindings.py, kernels/native_gemm.py and inference/native_decoder.py check every dtype, shape
// and stride first. The GIL is released while a kernel runs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <sys/mman.h>

#include <deque>
#include <tuple>
#include <vector>

#include "comparison.h"
#include "kernels.h"
#include "parallel.h"

namespace nb = nanobind;
using namespace octavo;

namespace {

// Level by index into levels(); negative: the best this processor has. A wrong index is an exception (at).
const Kernels& kernels(int level) {
    const auto& tables = levels();
    return *tables.at(level < 0 ? tables.size() - 1 : static_cast<size_t>(level));
}

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// Address, element, strides, scale, scale per row: what nanobind makes of a Python tuple.
using BoundOperand = std::tuple<uintptr_t, int, int64_t, int64_t, uintptr_t, bool>;

Operand operand(const BoundOperand& o) {
    return {at<const void>(std::get<0>(o)), Element(std::get<1>(o)), std::get<2>(o), std::get<3>(o),
            at<const float>(std::get<4>(o)), std::get<5>(o)};
}

// Runs each of several problems. One that is more than half a thread's share of the work is shared among all threads; the others
// run side by side, each on one, so that a small one costs no parallel region.
template <class Problem, class Work, class Run>
void run_each(const std::vector<Problem>& problems, const Work& work, const Run& run) {
    double total = 0;
    for (const Problem& problem : problems) total += work(problem);
    std::vector<const Problem*> small;
    for (const Problem& problem : problems) {
        if (2 * max_threads() * work(problem) > total) run(problem);
        else small.push_back(&problem);
    }
    parallel_for(static_cast<int64_t>(small.size()), 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) run(*small[i]);
    });
}

// A decoder's constant arguments, kept between calls: a token passes only addresses of what changes.
class Decoder {
public:
    // Address, element, strides, scale, scale per row, rows, block, bias, cast of the input, its scale: what nanobind makes of
    // a Python tuple.
    using BoundWeight = std::tuple<uintptr_t, int, int64_t, int64_t, uintptr_t, bool, int64_t, int64_t, uintptr_t, int, uintptr_t>;

    Decoder(int level, int64_t hidden_size, int64_t heads, int64_t kv_heads, int64_t head_dim,
            int64_t query_norm_size, int64_t key_norm_size, int64_t top_k, bool normalize_shares, float norm_eps, float attention_scale, double amax_floor, float half_range, float least_scale, uintptr_t cos,
            uintptr_t sin, uintptr_t norm, BoundWeight head)
        : level_(level) {
        problem_.norm = at<const float>(norm);
        problem_.head = weight(head);
        problem_.hidden_size = hidden_size;
        problem_.heads = heads;
        problem_.query_norm_size = query_norm_size;
        problem_.key_norm_size = key_norm_size;
        problem_.top_k = top_k;
        problem_.normalize_shares = normalize_shares;
        problem_.norm_eps = norm_eps;
        problem_.attention_scale = attention_scale;
        problem_.input_rule = {ScaleRounding::fp32, amax_floor, 0};
        problem_.integer_rule = {half_range, least_scale};
        problem_.cos = at<const float>(cos);
        problem_.sin = at<const float>(sin);
        problem_.cache.kv_heads = kv_heads;
        problem_.cache.head_dim = head_dim;
    }

    // `mlps` are pairs of gate and up in one weight, and down: one; or one for each of `experts`, rows of the router, then one
    // that every row goes to, if any.
    void add_layer(uintptr_t attention_norm, uintptr_t mlp_norm, uintptr_t key_mean, uintptr_t query_norm, uintptr_t key_norm,
                   BoundWeight qkv, BoundWeight out, const std::vector<std::tuple<BoundWeight, BoundWeight>>& mlps,
                   int64_t experts, uintptr_t router, uintptr_t shared_gate) {
        std::vector<Mlp>& own = mlps_.emplace_back();
        for (const auto& [gate_up, down] : mlps) own.push_back({weight(gate_up), weight(down), std::get<6>(gate_up) / 2});
        layers_.push_back({at<const float>(attention_norm), at<const float>(mlp_norm), at<const float>(key_mean),
                           at<const float>(query_norm), at<const float>(key_norm), weight(qkv), weight(out), own.data(),
                           static_cast<int64_t>(own.size()), experts, at<const float>(router), at<const float>(shared_gate)});
    }

    // Decodes the next positions; returns how many elements were cast with a static scale, and how many of them saturated.
    std::tuple<int64_t, int64_t> run(uintptr_t hidden, int64_t rows, uintptr_t sequence, uintptr_t position, int element, uintptr_t keys,
             uintptr_t key_scales, uintptr_t values, uintptr_t value_scales, int64_t page_count, uintptr_t table, int64_t table_stride,
             int64_t logit_rows, uintptr_t logits) const {
        DecoderProblem problem = problem_;
        problem.layers = layers_.data();
        problem.layer_count = static_cast<int64_t>(layers_.size());
        problem.cache.element = Element(element);
        problem.cache.table = at<const int32_t>(table);
        problem.cache.table_stride = table_stride;
        problem.keys = {at<void>(keys), at<uint16_t>(key_scales)};
        problem.values = {at<void>(values), at<uint16_t>(value_scales)};
        problem.page_count = page_count;
        problem.rows = {rows, at<const int64_t>(sequence), at<const int64_t>(position)};
        problem.hidden = at<float>(hidden);
        problem.logit_rows = logit_rows;
        problem.logits = at<float>(logits);
        Saturation saturation{};
        problem.saturation = &saturation;
        {
            nb::gil_scoped_release released;
            kernels(level_).decode(problem);
        }
        return {saturation.elements, saturation.saturated};
    }

private:
    static Weight weight(const BoundWeight& w) {
        return {{at<const void>(std::get<0>(w)), Element(std::get<1>(w)), std::get<2>(w), std::get<3>(w),
                 at<const float>(std::get<4>(w)), std::get<5>(w)},
                std::get<6>(w), std::get<7>(w), at<const float>(std::get<8>(w)), InputCast(std::get<9>(w)),
                at<const float>(std::get<10>(w))};
    }

    int level_;
    std::vector<DecoderLayer> layers_;
    std::deque<std::vector<Mlp>> mlps_;  // of every layer; a deque's elements stay where they are
    DecoderProblem problem_{};
};

}  // namespace

NB_MODULE(_native, m) {
    m.def("levels", [] {
        std::vector<std::string> names;
        for (const Kernels* table : levels()) names.emplace_back(table->name);
        return names;
    });
    m.def("has_threads", &has_threads);
    m.def("max_threads", &max_threads);
    m.def("limit_threads", &limit_threads);
    m.def("check_threads", &check_threads, nb::call_guard<nb::gil_scoped_release>());
    m.def("is_busy", &is_busy);
    m.def("assume_busy", &assume_busy);
    m.def("release_threads", &release_threads, nb::call_guard<nb::gil_scoped_release>());
    // Asks for large pages for a fresh output: 512 times fewer page faults than with 4 KiB.
    m.def("expect_writes", [](uintptr_t address, size_t bytes) {
#if defined(MADV_HUGEPAGE)
        constexpr uintptr_t page = 4096;
        const uintptr_t begin = (address + page - 1) / page * page, end = (address + bytes) / page * page;
        if (begin < end) madvise(at<void>(begin), end - begin, MADV_HUGEPAGE);  // a hint: failure changes nothing
#endif
    });
    m.def(
        "quantize",
        [](int level, uintptr_t x, int dtype, int64_t rows, int64_t columns, int64_t stride, int format,
           int64_t block_rows, int64_t block_columns, bool propagate, int rounding, double amax_floor, int margin,
           uintptr_t given_amax, bool measure_if_zero, uintptr_t given_scale, uintptr_t codes, uintptr_t values,
           uintptr_t scale, uintptr_t measured, bool counting) {
            Counts counts{};
            const QuantizeProblem problem{
                {at<const void>(x), Dtype(dtype), rows, columns, stride}, Format(format), block_rows, block_columns,
                propagate, {ScaleRounding(rounding), amax_floor, margin}, at<const float>(given_amax), measure_if_zero,
                at<const float>(given_scale), at<uint8_t>(codes), at<void>(values), at<float>(scale), at<float>(measured),
                counting, &counts};
            {
                nb::gil_scoped_release released;
                kernels(level).quantize(problem);
            }
            return std::make_tuple(counts.nonfinite, counts.saturated, counts.underflowed);
        });
    // Matrices of equal width, dtype and stride, cast as by quantize; codes, scales and amaxes of all lie one after the other.
    // block_rows 0: all rows of each. Given amaxes and scales are one number a matrix. Returns counts of non-finite elements.
    m.def("quantize_each",
          [](int level, const std::vector<uintptr_t>& x, const std::vector<int64_t>& rows, int dtype, int64_t columns,
             int64_t stride, int format, int64_t block_rows, int64_t block_columns, bool propagate, int rounding,
             double amax_floor, int margin, uintptr_t given_amax, bool measure_if_zero, uintptr_t given_scale,
             uintptr_t codes, uintptr_t scale, uintptr_t measured) {
              const ScaleRule rule{ScaleRounding(rounding), amax_floor, margin};
              std::vector<Counts> counts(x.size());
              std::vector<QuantizeProblem> problems;
              int64_t row = 0, group = 0;
              for (size_t i = 0; i < x.size(); ++i) {
                  const int64_t down = block_rows && block_rows < rows.at(i) ? block_rows : rows[i];
                  problems.push_back(
                      {{at<const void>(x[i]), Dtype(dtype), rows[i], columns, stride}, Format(format), down, block_columns,
                       propagate, rule, given_amax ? at<const float>(given_amax) + i : nullptr, measure_if_zero,
                       given_scale ? at<const float>(given_scale) + i : nullptr, at<uint8_t>(codes) + row * columns, nullptr,
                       given_scale ? nullptr : at<float>(scale) + group, at<float>(measured) + group, false, &counts[i]});
                  row += rows[i];
                  group += (rows[i] + down - 1) / down * ((columns + block_columns - 1) / block_columns);
              }
              {
                  nb::gil_scoped_release released;
                  run_each(problems, [](const QuantizeProblem& p) { return double(p.x.rows) * double(p.x.columns); },
                           kernels(level).quantize);
              }
              std::vector<int64_t> nonfinite;
              for (const Counts& each : counts) nonfinite.push_back(each.nonfinite);
              return nonfinite;
          });
    // The number of doubles the caller allocates for the sums.
    m.attr("CAST_SUMS") = sizeof(CastSums) / sizeof(double);
    m.def("cast_sums",
          [](int level, uintptr_t x, int dtype, int64_t rows, int64_t columns, int64_t stride, int format,
             int64_t block_rows, int64_t block_columns, uintptr_t scale, uintptr_t codes, int64_t codes_stride,
             int64_t first_row, int64_t row_step, uintptr_t measured, uintptr_t sums) {
              const CastSumsProblem problem{
                  {at<const void>(x), Dtype(dtype), rows, columns, stride}, Format(format), block_rows, block_columns,
                  at<const float>(scale), at<const uint8_t>(codes), codes_stride, first_row, row_step,
                  at<float>(measured), at<CastSums>(sums)};
              nb::gil_scoped_release released;
              kernels(level).cast_sums(problem);
          });
    m.def("round_stochastic",
          [](int level, uintptr_t x, uintptr_t random, int64_t count, int format, uintptr_t codes) {
              const StochasticProblem problem{at<const float>(x), at<const int32_t>(random), count, Format(format),
                                              at<uint8_t>(codes)};
              nb::gil_scoped_release released;
              kernels(level).round_stochastic(problem);
          });
    m.def("random_bits", [](int level, uint64_t seed, int64_t count, uintptr_t out) {
        const RandomBitsProblem problem{seed, count, at<uint32_t>(out)};
        nb::gil_scoped_release released;
        kernels(level).random_bits(problem);
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
    // Products as by gemm: operands, sizes M, N, K and the block, bias, out.
    m.def("gemm_each",
          [](int level,
             const std::vector<std::tuple<BoundOperand, BoundOperand, int64_t, int64_t, int64_t, int64_t, uintptr_t, uintptr_t>>& each,
             int out_dtype) {
              std::vector<GemmProblem> problems;
              for (const auto& [a, b, rows, columns, depth, block, bias, out] : each)
                  problems.push_back({operand(a), operand(b), rows, columns, depth, block, at<const float>(bias), at<void>(out),
                                      Dtype(out_dtype)});
              nb::gil_scoped_release released;
              run_each(problems, [](const GemmProblem& p) { return double(p.m) * double(p.n) * double(p.k); },
                       kernels(level).gemm);
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
    m.attr("COMPARISON_SUMS") = sizeof(ComparisonSums) / sizeof(double);
    m.def("compare_products",
          [](int level, BoundOperand left, BoundOperand right, BoundOperand left_codes, BoundOperand right_codes,
             int64_t rows, int64_t columns, int64_t depth, int64_t block, int sums, uintptr_t out, uintptr_t total) {
              const ComparisonProblem problem{operand(left), operand(right), operand(left_codes), operand(right_codes),
                                              rows, columns, depth, block, TensorCore(sums), at<float>(out),
                                              at<ComparisonSums>(total)};
              nb::gil_scoped_release released;
              compare(kernels(level), problem);
          });
    m.attr("PAGE") = PAGE;
    m.attr("MAX_HEAD_DIM") = MAX_HEAD_DIM;
    m.def("attend", [](int level, uintptr_t queries, int64_t heads, int64_t kv_heads, int64_t head_dim, int element,
                       uintptr_t keys, uintptr_t key_scales, uintptr_t values, uintptr_t value_scales, uintptr_t table,
                       int64_t table_stride, int64_t rows, uintptr_t sequence, uintptr_t position, float scale,
                       uintptr_t out) {
        const AttentionProblem problem{
            at<const float>(queries), heads * head_dim, heads,
            {Element(element), kv_heads, head_dim, at<const int32_t>(table), table_stride},
            {at<void>(keys), at<uint16_t>(key_scales)}, {at<void>(values), at<uint16_t>(value_scales)},
            {rows, at<const int64_t>(sequence), at<const int64_t>(position)}, scale, at<float>(out)};
        nb::gil_scoped_release released;
        kernels(level).attend(problem);
    });
    nb::class_<Decoder>(m, "Decoder")
        .def(nb::init<int, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, float, float, double, float, float, uintptr_t, uintptr_t,
                      uintptr_t, Decoder::BoundWeight>())
        .def("add_layer", &Decoder::add_layer)
        .def("run", &Decoder::run);
    m.def("dequantize", [](int level, uintptr_t codes, int format, int64_t rows, int64_t columns, int64_t stride,
                           int64_t block_rows, int64_t block_columns, uintptr_t scale, uintptr_t out, int out_dtype) {
        const DequantizeProblem problem{at<const uint8_t>(codes), Format(format), rows, columns, stride, block_rows,
                                        block_columns, at<const float>(scale), at<void>(out), Dtype(out_dtype)};
        nb::gil_scoped_release released;
        kernels(level).dequantize(problem);
    });
}
