// Codes times their scales, rounded once to the output's dtype.
#pragma once

#include "fp8.h"
#include "kernels.h"
#include "parallel.h"

namespace octavo {
namespace {

constexpr int64_t SHORT_ROW = 64;  // codes, fewer of which are not worth tables

#if defined(OCTAVO_BYTE_TABLES)
// The first codes of a format in FP32: the subnormal ones and 16 normal ones.
template <class F>
struct FirstCodes {
    alignas(OCTAVO_WIDTH) float values[32] = {};

    constexpr FirstCodes() {
        constexpr int in_binade = 1 << F::mantissa_bits;
        float quantum = 1;
        for (int i = 0; i < F::mantissa_bits - F::min_exponent; ++i) quantum /= 2;
        for (int code = 0; code < 32; ++code) {
            if (code >= 2 * in_binade && code % in_binade == 0) quantum *= 2;
            values[code] = (code < in_binade ? code : in_binade + code % in_binade) * quantum;
        }
    }
};

template <class F>
constexpr FirstCodes<F> FIRST_CODES;

// The products of all codes and one scale, as BF16. A step in a code's exponent is one in the product's, so that 16 normal
// codes stand for all of them, and what is left of the exponent is added. Subnormal codes have a table of their own.
//
// That needs products that are normal, and codes that are finite.
template <class F>
struct Products {
    static constexpr uint8_t first_normal = 1 << F::mantissa_bits, subnormal_index = 0x80 - first_normal;
    static constexpr int exponent_shift = F::mantissa_bits == 3 ? 4 : 3;  // of 16 codes, to the upper byte of a product
    static constexpr uint8_t exponent_mask = (0x7f >> exponent_shift) & (0xff << (4 - exponent_shift));
    u8v low, high, subnormal_low, subnormal_high;

    static bool can(float scale) { return scale >= 0x1p-100f && scale <= 0x1p100f; }

    explicit Products(float scale) {
        const f32v scales = all(scale);
        uint16_t products[16 + 32] = {};  // the subnormal ones end at 16
        for (int i = 0; i < 32; i += LANES)
            store_f32((Bf16*)products + 16 - first_normal + i, load<f32v>(FIRST_CODES<F>.values + i) * scales);
        const u8x16 normal = u8x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + first_normal;
        const u8x16 exponents = (normal >> exponent_shift) & exponent_mask;
        low = repeated(low_bytes(products + 16));
        high = repeated(high_bytes(products + 16) - exponents);
        subnormal_low = repeated(low_bytes(products));
        subnormal_high = repeated(high_bytes(products));
    }

    // 4 · LANES of them; the codes' magnitudes are returned.
    u8v write(const uint8_t* codes, Bf16* out) const {
        const u8v given = spread_bytes(codes), magnitude = given & uint8_t(0x7f);
        const u8v normal = magnitude - first_normal, subnormal = magnitude + subnormal_index;  // one of them has bit 7 set
        const u8v exponent = bits_as<u8v>(bits_as<u16v>(given) >> exponent_shift) & exponent_mask;
        const u8v upper = (look_up(high, normal) | look_up(subnormal_high, subnormal)) + exponent;
        store_joined(&out->bits, look_up(low, normal) | look_up(subnormal_low, subnormal), upper | (given & uint8_t(0x80)));
        return magnitude;
    }
};

// Most of a row, and how much that is.
template <class F>
inline int64_t write_products(const uint8_t* codes, Bf16* out, int64_t n, float scale) {
    if (n < SHORT_ROW || !Products<F>::can(scale)) return 0;
    const Products<F> products(scale);
    u8v seen = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) seen = largest_byte(seen, products.write(codes + i, out + i));
    return any(seen > uint8_t(F::max_code)) ? 0 : i;
}
#endif

template <class F, class T>
inline int64_t write_products(const uint8_t*, T*, int64_t, float) {
    return 0;
}

template <class F, class T>
inline void dequantize_row(const uint8_t* codes, T* out, int64_t n, float scale) {
    const f32v scales = all(scale);
    int64_t i = write_products<F>(codes, out, n, scale);
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
