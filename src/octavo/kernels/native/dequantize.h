// Codes times their scales, rounded once to the output's dtype.
#pragma once

#include "fp8.h"
#include "kernels.h"
#include "parallel.h"

namespace octavo {
namespace {

template <class F, class T>
inline void dequantize_row(const uint8_t* codes, T* out, int64_t n, float scale) {
    const f32v scales = all(scale);
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        const Pair values = decode_pair<F>(codes + i);
        store_f32(out + i, values.low * HALF_SCALE<F> * scales);
        store_f32(out + i + LANES, values.high * HALF_SCALE<F> * scales);
    }
    for (; i + LANES <= n; i += LANES) store_f32(out + i, decode<F>(codes + i) * scales);
    if (i < n) store_f32(out + i, decode<F>(codes + i, n - i) * scales, n - i);
}

template <class F, class T>
inline void dequantize_columns(const uint8_t* codes, T* out, int64_t n, const float* scales) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store_f32(out + i, decode<F>(codes + i) * load<f32v>(scales + i));
    if (i < n) store_f32(out + i, decode<F>(codes + i, n - i) * load_f32(scales + i, n - i), n - i);
}

template <class F, class T>
void dequantize_as(const DequantizeProblem& p) {
    const bool dense = p.stride == p.columns && p.block_rows >= p.rows && p.block_columns >= p.columns;
    const int64_t rows = dense ? 1 : p.rows, columns = dense ? p.rows * p.columns : p.columns;
    const int64_t block_columns = dense ? columns : p.block_columns;
    const int64_t groups = (columns + block_columns - 1) / block_columns;  // across
    const int64_t span = block_columns == 1 ? columns : 4096, spans = (columns + span - 1) / span;
    parallel_for(rows * spans, largest<int64_t>(1, 16384 / least_of(span, columns)), [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item) {
            const int64_t row = item / spans, first = item % spans * span, last = least_of(first + span, columns);
            const uint8_t* codes = p.codes + row * p.stride;
            T* out = static_cast<T*>(p.out) + row * columns;
            const float* scales = p.scale + (dense ? 0 : row / p.block_rows * groups);
            if (block_columns == 1) {
                dequantize_columns<F>(codes, out, columns, scales);
                continue;
            }
            for (int64_t i = first; i < last;) {
                const int64_t group = i / block_columns, end_of_group = least_of((group + 1) * block_columns, last);
                dequantize_row<F>(codes + i, out + i, end_of_group - i, scales[group]);
                i = end_of_group;
            }
        }
    });
}

template <class F>
void dequantize_from(const DequantizeProblem& p) {
    if (p.out_dtype == Dtype::f32) dequantize_as<F, float>(p);
    else if (p.out_dtype == Dtype::bf16) dequantize_as<F, Bf16>(p);
    else dequantize_as<F, F16>(p);
}

void dequantize(const DequantizeProblem& p) {
    if (p.format == Format::e4m3) dequantize_from<E4M3>(p);
    else dequantize_from<E5M2>(p);
}

}  // namespace
}  // namespace octavo
