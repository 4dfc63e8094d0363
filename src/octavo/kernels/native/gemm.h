// y = (a · bᵀ) · scales + bias, sums in FP32; each operand FP8 codes or numbers in high precision.
//
// K is cut into chunks. Of each chunk both operands are decoded once, into panels that a micro-kernel can read in order:
// ROWS rows of a, COLUMNS of b, K outermost. The micro-kernel keeps ROWS x COLUMNS sums in registers. Where scales change
// along K, it stops at every change, and its sums are scaled before they are added to those of the blocks before.
#pragma once

#include "few_rows.h"

namespace octavo {
namespace {

constexpr int VECTORS = 2, COLUMNS = VECTORS * LANES;
#if defined(__AVX512F__)
constexpr int ROWS = 12;  // of 32 registers, 24 hold sums
#else
constexpr int ROWS = 6;  // of 16 registers, 12 hold sums
#endif
constexpr int64_t CHUNK = 256;                         // of K
constexpr int64_t TILE_ROWS = 16 * ROWS, TILE_COLUMNS = 128;  // of the output, for one thread at a time

// Packing.

typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef uint64_t u64x2 __attribute__((vector_size(16)));

// The FP32 values of eight codes and of the next eight, divided by HALF_SCALE<F>.
template <class F>
inline void decode_eights(float* first, float* second, u8x16 codes) {
#if defined(__AVX2__)
    const __m256i halves = halves_of_16((__m128i)codes, F{});
    _mm256_storeu_ps(first, _mm256_cvtph_ps(_mm256_castsi256_si128(halves)));
    _mm256_storeu_ps(second, _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
#else
    uint8_t bytes[16];
    store(bytes, codes);
    for (int i = 0; i < 8; i += LANES) store_f32(first + i, decode<F>(bytes + i));
    for (int i = 0; i < 8; i += LANES) store_f32(second + i, decode<F>(bytes + 8 + i));
#endif
}

// Up to eight bytes, zeros behind them.
inline u8x16 load_eight(const uint8_t* from, int64_t count) {
    uint64_t word = 0;
    if (count >= 8) std::memcpy(&word, from, 8);
    else if (count > 0) std::memcpy(&word, from, count);
    return bits_as<u8x16>(u64x2{word, 0});
}

// Eight rows of eight bytes become eight columns, two in each result.
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

// Rows [row, row + count) and columns [begin, end) of codes: panel[k][0 ... width), zeros for rows that are not there.
// Every store writes eight numbers; what lies beyond the width is overwritten by the next k, hence the order.
template <class F>
void pack_codes(const Operand& from, int64_t row, int64_t count, int64_t begin, int64_t end, int width, float* panel) {
    for (int group = (width - 1) / 8 * 8; group >= 0; group -= 8) {
        const int64_t present = largest<int64_t>(0, least_of<int64_t>(8, count - group));
        const uint8_t* codes = static_cast<const uint8_t*>(from.data) + (row + group) * from.row_stride;
        float* to = panel + group;
        if (from.row_stride == 1) {
            for (int64_t k = begin; k < end; k += 2, to += 2 * width) {
                const u64x2 first = bits_as<u64x2>(load_eight(codes + k * from.column_stride, present));
                const bool last = k + 1 == end;
                const u64x2 second = bits_as<u64x2>(load_eight(codes + (k + 1) * from.column_stride, last ? 0 : present));
                decode_eights<F>(to, to + width, bits_as<u8x16>(__builtin_shuffle(first, second, u64x2{0, 2})));
            }
            continue;
        }
        for (int64_t k = begin; k < end; k += 8, to += 8 * width) {
            u8x16 rows[8], columns[4];
            for (int r = 0; r < 8; ++r) rows[r] = load_eight(codes + r * from.row_stride + k, r < present ? end - k : 0);
            transpose(rows, columns);
            for (int i = 0; i < 4; ++i) decode_eights<F>(to + 2 * i * width, to + (2 * i + 1) * width, columns[i]);
        }
    }
}

// The same of numbers in high precision.
template <class T>
void pack_numbers(const Operand& from, int64_t row, int64_t count, int64_t begin, int64_t end, int width, float* panel) {
    const T* x = static_cast<const T*>(from.data) + row * from.row_stride;
    for (int64_t r = 0; r < width; ++r)
        for (int64_t k = begin; k < end; ++k)
            panel[(k - begin) * width + r] = r < count ? as_f32(x[r * from.row_stride + k * from.column_stride]) : 0.0f;
}

inline void pack(const Operand& from, int64_t row, int64_t count, int64_t begin, int64_t end, int width, float* panel) {
    switch (from.element) {
        case Element::e4m3: return pack_codes<E4M3>(from, row, count, begin, end, width, panel);
        case Element::e5m2: return pack_codes<E5M2>(from, row, count, begin, end, width, panel);
        case Element::f32: return pack_numbers<float>(from, row, count, begin, end, width, panel);
        case Element::bf16: return pack_numbers<Bf16>(from, row, count, begin, end, width, panel);
        case Element::f16: return pack_numbers<F16>(from, row, count, begin, end, width, panel);
    }
}

// Sums of products of k columns of two panels. A function of its own, so that all sums stay in registers.
__attribute__((noinline)) void multiply(const float* a, const float* b, int64_t k, float* out) {
    f32v sums[ROWS][VECTORS] = {};
    for (; k > 0; --k, a += ROWS, b += COLUMNS) {
        f32v right[VECTORS];
        for (int v = 0; v < VECTORS; ++v) right[v] = load<f32v>(b + v * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            const f32v left = all(a[r]);
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; ++v) sums[r][v] = fused(left, right[v], sums[r][v]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) store(out + r * COLUMNS + v * LANES, sums[r][v]);
}

constexpr float half_scale(Element element) {
    return element == Element::e4m3 ? HALF_SCALE<E4M3> : element == Element::e5m2 ? HALF_SCALE<E5M2> : 1.0f;
}

struct Gemm {
    const GemmProblem& p;
    const Scales scales{p};
    const float unshift = half_scale(p.a.element) * half_scale(p.b.element);  // what decoded numbers were divided by
    const int64_t row_panels = (p.m + ROWS - 1) / ROWS, column_panels = (p.n + COLUMNS - 1) / COLUMNS;
    float* sums = nullptr;      // [m, n]
    float* a_panels = nullptr;  // of the chunk
    float* b_panels = nullptr;

    static int64_t panel_floats(int width) { return (CHUNK + 8) * width + 8; }  // stores come in eights

    void pack_chunk(int64_t begin, int64_t end) const {
        parallel_for(row_panels + column_panels, 8, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; ++i) {
                const bool left = i < row_panels;
                const int64_t panel = left ? i : i - row_panels;
                const int width = left ? ROWS : COLUMNS;
                pack(left ? p.a : p.b, panel * width, least_of<int64_t>(width, (left ? p.m : p.n) - panel * width), begin,
                     end, width, (left ? a_panels : b_panels) + panel * panel_floats(width));
            }
        });
    }

    // Adds ROWS x COLUMNS sums of one block of K to what is there, or begins with them.
    void add(const float* found, int64_t row, int64_t column, int64_t block, bool begins) const {
        const bool inside = row + ROWS <= p.m && column + COLUMNS <= p.n;
        if (inside && !scales.wide) {
            f32v right[VECTORS];
            if (p.block)
                for (int v = 0; v < VECTORS; ++v)
                    for (int i = 0; i < LANES; ++i) right[v][i] = scales.of(p.b, column + v * LANES + i, block);
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < VECTORS; ++v) {
                    float* to = sums + (row + r) * p.n + column + v * LANES;
                    f32v own = load<f32v>(found + r * COLUMNS + v * LANES);
                    if (p.block) own = own * all(unshift * scales.of(p.a, row + r, block)) * right[v];
                    store(to, begins ? own : load<f32v>(to) + own);
                }
            return;
        }
        for (int r = 0; r < least_of<int64_t>(ROWS, p.m - row); ++r)
            for (int c = 0; c < least_of<int64_t>(COLUMNS, p.n - column); ++c) {
                float& to = sums[(row + r) * p.n + column + c];
                const float sum = found[r * COLUMNS + c];
                const float own = p.block ? scales.apply(sum * unshift, row + r, column + c, block) : sum;
                to = begins ? own : to + own;
            }
    }

    void multiply_panels(int64_t row_panel, int64_t column_panel, int64_t begin, int64_t end) const {
        const float* a = a_panels + row_panel * panel_floats(ROWS);
        const float* b = b_panels + column_panel * panel_floats(COLUMNS);
        float found[ROWS * COLUMNS];
        for (int64_t k = begin; k < end;) {
            const int64_t block = p.block ? k / p.block : 0;
            const int64_t stop = p.block ? least_of(end, (block + 1) * p.block) : end;
            multiply(a + (k - begin) * ROWS, b + (k - begin) * COLUMNS, stop - k, found);
            add(found, row_panel * ROWS, column_panel * COLUMNS, block, k == 0);
            k = stop;
        }
    }

    template <class T>
    void finish(int64_t row, int64_t last_row, int64_t column, int64_t last_column) const {
        for (int64_t r = row; r < last_row; ++r) {
            const float* from = sums + r * p.n;
            T* to = static_cast<T*>(p.out) + r * p.n;
            for (int64_t c = column; c < last_column; c += LANES) {
                const int64_t some = least_of<int64_t>(LANES, last_column - c);
                f32v own = load_f32(from + c, some);
                own = scales.finished(p.block ? own : own * unshift, r, c, some);
                if (p.bias) own = own + load_f32(p.bias + c, some);
                store_f32(to + c, own, some);
            }
        }
    }

    void finish_tile(int64_t row, int64_t last_row, int64_t column, int64_t last_column) const {
        if (p.out_dtype == Dtype::f32) finish<float>(row, last_row, column, last_column);
        else if (p.out_dtype == Dtype::bf16) finish<Bf16>(row, last_row, column, last_column);
        else finish<F16>(row, last_row, column, last_column);
    }

    void multiply_chunk(int64_t begin, int64_t end) const {
        const int64_t down = (p.m + TILE_ROWS - 1) / TILE_ROWS, across = (p.n + TILE_COLUMNS - 1) / TILE_COLUMNS;
        parallel_for(down * across, 1, [&](int64_t first, int64_t last) {
            for (int64_t tile = first; tile < last; ++tile) {
                const int64_t row = tile / across * TILE_ROWS, column = tile % across * TILE_COLUMNS;
                const int64_t last_row = least_of(row + TILE_ROWS, p.m), last_column = least_of(column + TILE_COLUMNS, p.n);
                for (int64_t c = column / COLUMNS; c * COLUMNS < last_column; ++c)
                    for (int64_t r = row / ROWS; r * ROWS < last_row; ++r) multiply_panels(r, c, begin, end);
                if (end == p.k) finish_tile(row, last_row, column, last_column);
            }
        });
    }

    void run() const {
        for (int64_t begin = 0; begin < p.k; begin += CHUNK) {
            const int64_t end = least_of(begin + CHUNK, p.k);
            pack_chunk(begin, end);
            multiply_chunk(begin, end);
        }
    }
};

void gemm(const GemmProblem& p) {
    if (takes_few_rows(p)) return few_rows(p);
    static thread_local Scratch panels, sums;
    Gemm work{p};
    const int64_t a_floats = work.row_panels * Gemm::panel_floats(ROWS);
    work.a_panels = panels.floats(a_floats + work.column_panels * Gemm::panel_floats(COLUMNS));
    work.b_panels = work.a_panels + a_floats;
    work.sums = p.out_dtype == Dtype::f32 ? static_cast<float*>(p.out) : sums.floats(p.m * p.n);
    work.run();
    panels.trim();
    sums.trim();
}

}  // namespace
}  // namespace octavo
