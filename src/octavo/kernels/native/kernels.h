// The interface of the native kernels: one table of functions for each instruction-set level, filled by level.cpp.
//
// Independent of torch and Python, so that one build serves every release of both: pointers, sizes in elements, strides in
// elements. The Python side checks dtypes and shapes; these functions trust their arguments. Matrices are row-major unless
// strides say otherwise.
#pragma once

#include <cstdint>
#include <vector>

namespace octavo {

enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2 };
enum class Format : int { e4m3 = 0, e5m2 = 1 };
// The names and rules are those of numerics/scaling.py.
enum class ScaleRounding : int { fp32 = 0, rceil = 1, floor = 2, even = 3 };

// A matrix of high-precision elements: columns lie side by side, rows are `stride` elements apart.
struct Matrix {
    const void* data;
    Dtype dtype;
    int64_t rows, columns, stride;
};

struct Counts {
    int64_t nonfinite;  // NaN and Inf elements of the input
    int64_t saturated;  // finite elements beyond the format's maximum after scaling
    int64_t underflowed;  // nonzero elements whose code is zero
};

// How amaxes become scales; numerics/scaling.py is the definition.
struct ScaleRule {
    ScaleRounding rounding;
    double amax_floor;
    int margin;
};

// Groups are `block_rows` x `block_columns`, edge groups smaller; scales and amaxes are [row groups, column groups].
struct QuantizeProblem {
    Matrix x;
    Format format;
    int64_t block_rows, block_columns;
    bool propagate;             // an infinite input becomes Inf (NaN in E4M3) instead of the maximum
    ScaleRule rule;
    const float* given_amax;    // null, or the amaxes that scales are made from instead of the measured ones
    bool measure_if_zero;       // a given amax of 0 means unknown: that group's measured amax is used
    const float* given_scale;   // null, or fixed decode scales; amaxes and the rule play no part then
    uint8_t* codes;             // [rows, columns], dense; null where values are written
    void* values;               // null, or where the codes' values go instead: laid out as x is, of its dtype, or x itself;
                                // null both: x is only measured
    float* scale;               // written unless scales are given
    float* measured;            // amax of every group's finite elements
    bool counting;              // saturated and underflowed elements too
    Counts* counts;
};

// Statistics of a cast, in FP64; doctor/statistics.py defines each.
struct CastSums {
    // Of all elements.
    double elements, nonfinite, saturated, amax, scale, stale_ratio;
    // Of the finite elements x of some rows, y what their codes decode to.
    double finite, nonzeros, flushed, mismatched;
    double energy, fourth_powers, flushed_energy, noise, product, decoded_energy, magnitude, signed_error;
};

// Groups as in QuantizeProblem.
struct CastSumsProblem {
    Matrix x;
    Format format;
    int64_t block_rows, block_columns;
    const float* scale;         // decode scales
    const uint8_t* codes;       // columns side by side, rows `codes_stride` apart
    int64_t codes_stride;
    int64_t first_row, row_step;  // the rows that are summed
    float* measured;            // amax of every group's finite elements
    CastSums* sums;
};

struct DequantizeProblem {
    const uint8_t* codes;
    Format format;
    int64_t rows, columns, stride;
    int64_t block_rows, block_columns;
    const float* scale;
    void* out;  // [rows, columns], dense
    Dtype out_dtype;
};

// FP32 numbers within the maximum, or Inf or NaN, rounded up in magnitude where the dropped fraction and a random number of
// 20 bits together make one.
struct StochasticProblem {
    const float* x;
    const int32_t* random;
    int64_t count;
    Format format;
    uint8_t* codes;
};

// 32 random bits for each element: word i % 4 of Philox-4x32-10 of counter i / 4, the key the seed.
struct RandomBitsProblem {
    uint64_t seed;
    int64_t count;
    uint32_t* out;
};

// The element type of a GEMM's operand.
enum class Element : int { e4m3 = 0, e5m2 = 1, f32 = 2, bf16 = 3, f16 = 4, int8 = 5 };  // int8: a decoder's weights alone

// One operand of y = a · bᵀ: [rows, K]. One of the strides, in elements, is 1.
struct Operand {
    const void* data;
    Element element;
    int64_t row_stride, column_stride;
    const float* scale;         // [rows or 1, blocks of K or 1], or null: 1
    bool scale_per_row;
};

// Sums are FP32. Scales that change along K meet the sums of their block, other scales the finished sums.
struct GemmProblem {
    Operand a, b;
    int64_t m, n, k;
    int64_t block;              // columns of K that share a scale; 0 if all do
    const float* bias;          // [n], or null
    void* out;                  // [m, n], dense
    Dtype out_dtype;
};

// GEMM with the sums of Hopper's FP8 tensor cores, added to `out`: one chain over K, or chains of 128, each times its scales if
// there are any (in FP64, rounded once to FP32).
struct HopperProblem {
    Operand a, b;
    int64_t m, n, k;
    bool one_chain;
    float* out;                 // [m, n], dense
};

// Positions of a cache of keys and values are kept in pages; a sequence's pages may lie anywhere.
constexpr int64_t PAGE = 64;
constexpr int64_t MAX_HEAD_DIM = 512;

// Keys [pages, kv heads, head dim, PAGE] or values [pages, kv heads, PAGE, head dim] of one layer, and for codes a BF16
// scale for every head of every position, [pages, kv heads, PAGE].
struct Pages {
    void* data;
    uint16_t* scale;            // bits of normal numbers
};

struct KvCache {
    Element element;            // E4M3, or FP32 or BF16 without scales
    int64_t kv_heads, head_dim;
    const int32_t* table;       // [sequences, table_stride]: page number of every PAGE positions
    int64_t table_stride;
};

// One row is one query position of one sequence; it sees the positions up to its own.
struct Rows {
    int64_t count;
    const int64_t* sequence;    // [count], rows of `table`
    const int64_t* position;    // [count]
};

// softmax(queries · keysᵀ · scale) · values; heads / kv_heads query heads that stand side by side share keys and values.
struct AttentionProblem {
    const float* queries;       // [rows, heads, head dim], rows `query_stride` apart
    int64_t query_stride, heads;
    KvCache cache;
    Pages keys, values;
    Rows rows;
    float scale;
    float* out;                 // [rows, heads, head dim]
};

// The cast of a linear layer's input before its GEMM; inference/native_decoder.py says which recipe uses which.
enum class InputCast : int { none = 0, e4m3_dynamic = 1, e4m3_static = 2, int8_dynamic = 3 };

// The weight of a linear layer, [rows, K]: y = cast(x) · weightᵀ + bias.
struct Weight {
    Operand operand;
    int64_t rows, block;
    const float* bias;          // [rows], or null
    InputCast input;
    const float* input_scale;   // of e4m3_static
};

// Quantization of a row to INT8; numerics/integers.py is the definition.
struct IntegerRule {
    float half_range, least_scale;
};

// Elements that were cast with a static scale, and those of them that it saturated.
struct Saturation {
    int64_t elements, saturated;
};

// An MLP, or an expert of a mixture.
struct Mlp {
    Weight gate_up, down;                       // gate, then up
    int64_t width;                              // inside, half the rows of gate_up
};

struct DecoderLayer {
    const float *attention_norm, *mlp_norm;     // [hidden]
    const float* key_mean;                      // [kv heads, head dim], subtracted from keys before they are stored
    const float *query_norm, *key_norm;         // [query_norm_size], [key_norm_size], or null
    Weight qkv, out;                            // qkv: heads of queries, keys, values
    const Mlp* mlps;                            // one; or one for each expert, then the one that every row goes to, if any
    int64_t mlp_count;
    int64_t experts;                            // 0 without a router
    const float* router;                        // [experts, hidden], or null
    const float* shared_gate;                   // [hidden], of the expert that every row goes to, or null
};

// A Llama-style decoder above its embedding, for the next positions of some sequences; numbers between weights are FP32.
// Keys and values of all rows are written to the cache before any row attends.
struct DecoderProblem {
    const DecoderLayer* layers;
    const float* norm;          // the last, [hidden]
    Weight head;
    int64_t layer_count, hidden_size, heads;
    int64_t query_norm_size, key_norm_size;     // elements normed together: a head, or all heads; 0: no norms
    int64_t top_k;              // experts of a row; 0 without experts
    bool normalize_shares;      // whether the shares of a row's experts are divided by their sum
    float norm_eps, attention_scale;
    ScaleRule input_rule;       // of e4m3_dynamic
    IntegerRule integer_rule;   // of int8_dynamic
    const float *cos, *sin;     // [positions, head dim]
    KvCache cache;
    Pages keys, values;         // of the first layer; those of the next follow
    int64_t page_count;         // of one layer
    Rows rows;
    float* hidden;              // [rows, hidden], the residual stream, in and out
    int64_t logit_rows;         // the last logit_rows rows get logits
    float* logits;              // [logit_rows, rows of the head]
    Saturation* saturation;     // is added to
};

struct Kernels {
    const char* name;
    void (*quantize)(const QuantizeProblem&);
    void (*cast_sums)(const CastSumsProblem&);
    void (*dequantize)(const DequantizeProblem&);
    void (*round_stochastic)(const StochasticProblem&);
    void (*random_bits)(const RandomBitsProblem&);
    void (*gemm)(const GemmProblem&);
    void (*hopper)(const HopperProblem&);
    void (*attend)(const AttentionProblem&);
    void (*decode)(const DecoderProblem&);
};

extern const Kernels baseline_kernels, avx2_kernels, avx512_kernels, avx512_bf16_kernels;  // the x86 ones on x86 only

// Those this processor has, slowest first.
const std::vector<const Kernels*>& levels();

}  // namespace octavo
