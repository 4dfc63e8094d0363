// Dequantizes FP8 codes: out = round(decode(code) · scale), FP32 product, rounded once to FP32, BF16 or FP16.
//
// codes [rows, columns], rows `stride` apart; out [rows, columns], dense; scale [row groups, column groups], dense. One thread
// owns spans of 4,096 elements of a row (whole rows where every column has a scale). BF16 with one scale a row or block looks
// products up in byte tables, which spares the rounding of FP32 to BF16 in integers; everything else decodes to FP32 and
// multiplies.
#pragma once

#include "fp8.h"
#include "kernels.h"
#include "parallel.h"

namespace octavo {
namespace {

constexpr int64_t SHORT_ROW = 64;  // shorter rows do not pay for the tables, 32 products and their shuffles

#if defined(OCTAVO_BYTE_TABLES)
// Codes 0 ... 31 of a format in FP32, at compile time: the subnormal ones (8 of E4M3, 4 of E5M2), then the normal ones.
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

// BF16 of code · scale for all codes of one scale, by byte look-ups (pshufb, vqtbl1q), 4 · LANES codes at once.
//
// Raising a code's exponent by one doubles the product exactly, so a table of 16 normal codes, two binades of E4M3 or four of
// E5M2, stands for all: its index is the low four bits of code - first_normal, and the code's upper exponent bits are added to
// the product's exponent, which lies in the upper byte. Subnormal codes have a second table. A BF16 needs two look-ups, low and
// high byte.
//
// Holds only while all products are normal (can()) and codes are finite: write() returns magnitudes so that the caller can
// check.
template <class F>
struct ProductTable {
    static constexpr uint8_t first_normal = 1 << F::mantissa_bits, subnormal_index = 0x80 - first_normal;
    static constexpr int exponent_shift = F::mantissa_bits == 3 ? 4 : 3;  // of 16 codes, to the upper byte of a product
    static constexpr uint8_t exponent_mask = (0x7f >> exponent_shift) & (0xff << (4 - exponent_shift));
    u8v low, high, subnormal_low, subnormal_high;

    // 2^-100 · 2^-16 and 2^100 · 57,344 are well inside BF16's normal numbers.
    static bool can(float scale) { return scale >= 0x1p-100f && scale <= 0x1p100f; }

    explicit ProductTable(float scale) {
        const f32v scales = all(scale);
        uint16_t products[16 + 32] = {};  // subnormal products end at index 16, normal ones begin there
        for (int i = 0; i < 32; i += LANES)
            store_f32((Bf16*)products + 16 - first_normal + i, load<f32v>(FIRST_CODES<F>.values + i) * scales);
        const u8x16 normal = u8x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + first_normal;
        // The exponent bits of the table's own codes are subtracted once here, so that write() can add every code's whole
        // exponent.
        const u8x16 exponents = (normal >> exponent_shift) & exponent_mask;
        low = repeated(low_bytes(products + 16));
        high = repeated(high_bytes(products + 16) - exponents);
        subnormal_low = repeated(low_bytes(products));
        subnormal_high = repeated(high_bytes(products));
    }

    // Writes 4 · LANES products and returns the codes' magnitudes. A look-up gives 0 for an index with bit 7 set, so OR selects
    // between the two tables: one of the indices has it.
    u8v write(const uint8_t* codes, Bf16* out) const {
        const u8v given = spread_bytes(codes), magnitude = given & uint8_t(0x7f);
        const u8v normal = magnitude - first_normal, subnormal = magnitude + subnormal_index;  // modulo 256
        const u8v exponent = bits_as<u8v>(bits_as<u16v>(given) >> exponent_shift) & exponent_mask;
        const u8v upper = (look_up(high, normal) | look_up(subnormal_high, subnormal)) + exponent;
        store_joined(&out->bits, look_up(low, normal) | look_up(subnormal_low, subnormal), upper | (given & uint8_t(0x80)));
        return magnitude;
    }
};

// Writes whole groups of 4 · LANES products; returns how many elements, 0 if the tables do not apply. A NaN or Inf code is
// found at the end, and the row is then written again: special codes are rare.
template <class F>
inline int64_t write_products(const uint8_t* codes, Bf16* out, int64_t n, float scale) {
    if (n < SHORT_ROW || !ProductTable<F>::can(scale)) return 0;
    const ProductTable<F> products(scale);
    u8v seen = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) seen = largest_byte(seen, products.write(codes + i, out + i));
    return any(seen > uint8_t(F::max_code)) ? 0 : i;
}
#endif

// Without byte tables, or for FP32 and FP16: nothing is written.
template <class F, class T>
inline int64_t write_products(const uint8_t*, T*, int64_t, float) {
    return 0;
}

// n codes of a row with one scale. HALF_SCALE is a power of two, so multiplying it in first rounds nothing.
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

// n codes of a row with a scale each.
template <class F, class T>
inline void dequantize_columns(const uint8_t* codes, T* out, int64_t n, const float* scales) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store_f32(out + i, decode<F>(codes + i) * load<f32v>(scales + i));
    if (i < n) store_f32(out + i, decode<F>(codes + i, n - i) * load_f32(scales + i, n - i), n - i);
}

template <class F, class T>
void dequantize_as(const DequantizeProblem& p) {
    // One scale for a dense matrix: it counts as one row, so that spans are full.
    const bool dense = p.stride == p.columns && p.block_rows >= p.rows && p.block_columns >= p.columns;
    const int64_t rows = dense ? 1 : p.rows, columns = dense ? p.rows * p.columns : p.columns;
    const int64_t block_columns = dense ? columns : p.block_columns;
    const int64_t groups = (columns + block_columns - 1) / block_columns;  // in a row
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
