// Packing and micro-kernel of gemm.h: panels of decoded operands, and ROWS x COLUMNS sums of two panels in registers.
//
//   out[r][c] = Σ_k a[k][r] · b[k][c]      one FMA chain over k for each output, k ascending
//
// A panel holds `width` rows of an operand, K outermost, so the micro-kernel reads both panels front to back:
//   Numbers  [k][width] FP32                    every level
//   Pairs    [k / 2][width][2] BF16             avx512_bf16: vdpbf16ps multiplies two neighbours along K a lane
// FP8 codes are exact in both. Past the last column of K and past the last row, panels are zero: zeros add nothing, so edge
// tiles run the same code.
#pragma once

#include "fp8.h"
#include "kernels.h"

namespace octavo {
namespace {

// VECTORS · ROWS independent FMA chains: more than FMA latency (4 to 5 cycles) times the 2 FMAs a cycle of x86 needs. Each
// loaded vector of b serves ROWS FMAs, each broadcast of a VECTORS.
constexpr int VECTORS = 2, COLUMNS = VECTORS * LANES;
#if defined(__AVX512F__)
constexpr int ROWS = 12;  // 24 of 32 registers hold sums
#else
constexpr int ROWS = 6;  // 12 of 16 registers hold sums; two of b, one broadcast
#endif

typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef uint64_t u64x2 __attribute__((vector_size(16)));

// The two kinds of panels. DEPTH neighbours along K share a lane. decode_columns writes 16 codes, eight rows of one column of K
// and the same rows of the next, as values / HALF_SCALE<F>; finished sums make up for it. With EXACT it multiplies that in at
// once: where the other operand is in high precision, products may be as small as FP32 goes and have no binades to give away.

struct Numbers {  // [k][width]
    using Number = float;
    static constexpr int DEPTH = 1;

    template <class F, bool EXACT>
    static void decode_columns(float* to, int width, u8x16 codes) {
#if defined(__AVX2__)
        const __m256i halves = halves_of_16((__m128i)codes, F{});
        const __m256 scale = _mm256_set1_ps(EXACT ? HALF_SCALE<F> : 1.0f);  // GCC leaves out a product with 1.0
        _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm256_castsi256_si128(halves)) * scale);
        _mm256_storeu_ps(to + width, _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)) * scale);
#else
        uint8_t bytes[16];
        store(bytes, codes);
        for (int i = 0; i < 8; i += LANES) store_f32(to + i, decode<F>(bytes + i));
        for (int i = 0; i < 8; i += LANES) store_f32(to + width + i, decode<F>(bytes + 8 + i));
#endif
    }

    template <class T>
    static float number(T x) {
        return as_f32(x);
    }

    static f32v multiply_add(f32v a, f32v b, f32v sum) { return fused(a, b, sum); }
};

#if defined(__AVX512BF16__)
// vdpbf16ps treats subnormals as zero and produces none, whatever the thread's mode. Codes, their products and sums never come
// near them. With a BF16 operand, its subnormal numbers and products or sums below 2^-126 may count as zero. They are not
// tested for: falling back to Numbers where a panel has one would make a row's bits depend on other rows.
struct Pairs {  // [k / 2][width][2]
    using Number = Bf16;
    static constexpr int DEPTH = 2;

    static bool can(Element element) { return element == Element::e4m3 || element == Element::e5m2 || element == Element::bf16; }
    // A block must not split a pair.
    static bool can(const GemmProblem& p) { return can(p.a.element) && can(p.b.element) && p.block % 2 == 0; }

    template <class F, bool EXACT>
    static void decode_columns(Bf16* to, int, u8x16 codes) {
        // Row r of both columns side by side; BF16 is the upper half of the FP32, which is exact for a code.
        const u8x16 in_turn = __builtin_shuffle(codes, u8x16{0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15});
        const f32v numbers = (f32v)_mm512_cvtph_ps(halves_of_16((__m128i)in_turn, F{}));
        store_words(&to->bits, bits_as<u32v>(numbers * all(EXACT ? HALF_SCALE<F> : 1.0f)) >> 16);
    }

    template <class T>
    static Bf16 number(T x) {  // x is BF16 or a code's value: truncation drops zeros only
        return {uint16_t(bits_as<uint32_t>(as_f32(x)) >> 16)};
    }

    static f32v multiply_add(f32v a, f32v b, f32v sum) {
        return (f32v)_mm512_dpbf16_ps((__m512)sum, bits_as<__m512bh>(a), bits_as<__m512bh>(b));
    }
};
#endif

template <class P>
using Number = typename P::Number;

// The first `count` of eight bytes, the others zero; count may be negative or above 8.
inline u8x16 load_eight(const uint8_t* from, int64_t count) {
    uint64_t word = 0;
    if (count >= 8) std::memcpy(&word, from, 8);
    else if (count > 0) std::memcpy(&word, from, count);
    return bits_as<u8x16>(u64x2{word, 0});
}

// Transposes an 8 x 8 matrix of bytes: rows in the low halves of rows[8], columns 2 i and 2 i + 1 in columns[i]. Three rounds
// of interleaving, of bytes, of pairs, of fours: 12 shuffles.
inline void transpose(const u8x16* rows, u8x16* columns) {
    const u8x16 bytes = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    const u16x8 low16 = {0, 8, 1, 9, 2, 10, 3, 11}, high16 = {4, 12, 5, 13, 6, 14, 7, 15};
    const u32x4 low32 = {0, 4, 1, 5}, high32 = {2, 6, 3, 7};
    u16x8 pairs[4];
    for (int i = 0; i < 4; ++i) pairs[i] = bits_as<u16x8>(__builtin_shuffle(rows[2 * i], rows[2 * i + 1], bytes));
    const u32x4 a = bits_as<u32x4>(__builtin_shuffle(pairs[0], pairs[1], low16));
    const u32x4 b = bits_as<u32x4>(__builtin_shuffle(pairs[2], pairs[3], low16));
    const u32x4 c = bits_as<u32x4>(__builtin_shuffle(pairs[0], pairs[1], high16));
    const u32x4 d = bits_as<u32x4>(__builtin_shuffle(pairs[2], pairs[3], high16));
    columns[0] = bits_as<u8x16>(__builtin_shuffle(a, b, low32));
    columns[1] = bits_as<u8x16>(__builtin_shuffle(a, b, high32));
    columns[2] = bits_as<u8x16>(__builtin_shuffle(c, d, low32));
    columns[3] = bits_as<u8x16>(__builtin_shuffle(c, d, high32));
}

// Packs rows [row, row + width) and columns [begin, end) of codes; rows from `count` on are zero.
//
// Stores write eight rows. With ROWS = 6 or 12 the last group's store passes the width into the next k's first rows, which are
// stored later, by the next k or by group 0: hence groups from the last to the first, and panel_size()'s room at the end.
template <class P, class F, bool EXACT>
void pack_codes(const Operand& from, int64_t row, int64_t count, int64_t begin, int64_t end, int width, Number<P>* panel) {
    for (int group = (width - 1) / 8 * 8; group >= 0; group -= 8) {
        // K-major codes: eight rows are one load, and more than the width are harmless.
        const bool transposed = from.row_stride == 1;
        const int64_t present = largest<int64_t>(0, least_of<int64_t>(8, (transposed ? count : least_of<int64_t>(width, count)) - group));
        const uint8_t* codes = static_cast<const uint8_t*>(from.data) + (row + group) * from.row_stride;
        Number<P>* to = panel + P::DEPTH * group;
        if (transposed) {
            for (int64_t k = begin; k < end; k += 2, to += 2 * width) {
                const u64x2 first = bits_as<u64x2>(load_eight(codes + k * from.column_stride, present));
                const bool last = k + 1 == end;
                const u64x2 second = bits_as<u64x2>(load_eight(codes + (k + 1) * from.column_stride, last ? 0 : present));
                P::template decode_columns<F, EXACT>(to, width, bits_as<u8x16>(__builtin_shuffle(first, second, u64x2{0, 2})));
            }
            continue;
        }
        for (int64_t k = begin; k < end; k += 8, to += 8 * width) {
            u8x16 rows[8], columns[4];
            for (int r = 0; r < 8; ++r) rows[r] = load_eight(codes + r * from.row_stride + k, r < present ? end - k : 0);
            transpose(rows, columns);
            for (int i = 0; i < 4; ++i) P::template decode_columns<F, EXACT>(to + 2 * i * width, width, columns[i]);
        }
    }
}

// The same for operands in high precision, one number at a time.
template <class P, class T>
void pack_numbers(const Operand& from, int64_t row, int64_t count, int64_t begin, int64_t end, int width, Number<P>* panel) {
    constexpr int depth = P::DEPTH;
    const T* x = static_cast<const T*>(from.data) + row * from.row_stride + begin * from.column_stride;
    for (int64_t r = 0; r < width; ++r)
        for (int64_t k = 0; k < (end - begin + depth - 1) / depth * depth; ++k)
            panel[k / depth * depth * width + r * depth + k % depth] =
                r < count && k < end - begin ? P::number(x[r * from.row_stride + k * from.column_stride]) : Number<P>{};
}

template <class P, bool EXACT>
void pack(const Operand& from, int64_t row, int64_t count, int64_t begin, int64_t end, int width, Number<P>* panel) {
    switch (from.element) {
        case Element::e4m3: return pack_codes<P, E4M3, EXACT>(from, row, count, begin, end, width, panel);
        case Element::e5m2: return pack_codes<P, E5M2, EXACT>(from, row, count, begin, end, width, panel);
        case Element::f32: return pack_numbers<P, float>(from, row, count, begin, end, width, panel);
        case Element::bf16: return pack_numbers<P, Bf16>(from, row, count, begin, end, width, panel);
        case Element::f16: return pack_numbers<P, F16>(from, row, count, begin, end, width, panel);
        case Element::int8: break;  // integers.h
    }
}

// Writes the ROWS x COLUMNS sums over k columns of two panels to out [ROWS][COLUMNS]. Not inlined and fully unrolled: only so
// does GCC keep all sums in registers.
template <class P>
__attribute__((noinline)) void multiply(const Number<P>* a, const Number<P>* b, int64_t k, float* out) {
    f32v sums[ROWS][VECTORS] = {};
    for (; k > 0; k -= P::DEPTH, a += P::DEPTH * ROWS, b += P::DEPTH * COLUMNS) {
        f32v right[VECTORS];
        for (int v = 0; v < VECTORS; ++v) right[v] = load<f32v>(b + v * P::DEPTH * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            const f32v left = all(load<float>(a + r * P::DEPTH));
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; ++v) sums[r][v] = P::multiply_add(left, right[v], sums[r][v]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v) store(out + r * COLUMNS + v * LANES, sums[r][v]);
}

}  // namespace
}  // namespace octavo
