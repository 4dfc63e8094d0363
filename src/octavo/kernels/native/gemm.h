// Scaled GEMM with FP32 sums; each operand FP8 codes or FP32, BF16, FP16.
//
//   out[m][n] = round( Σ_block scale_a[m][block] · scale_b[n][block] · Σ_{k in block} a[m][k] · b[n][k]  + bias[n] )
//
// a [M, K] and b [N, K], each row-major or K-major (one of the strides is 1); out [M, N] row-major, FP32, BF16 or FP16; scales
// [rows or 1, blocks of K or 1]. block = 0: all of K is one block, and scales meet the finished sums.
//
// Three levels, as in any packed GEMM (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", ACM TOMS
// 34(3)):
//   chunk of K     both operands are decoded once, in parallel, into panels (panels.h); an FP8 code is decoded once a GEMM
//   output tile    TILE_ROWS x TILE_COLUMNS, one thread at a time; a panel of b stays in the first-level cache for 16 panels of a
//   micro-kernel   ROWS x COLUMNS sums in registers, added to `sums` [M, N] after each chunk or block
// The order of additions depends on K and the block alone, not on threads, M or N: chunks ascending, each one chain over k. The
// few rows of generation take few_rows.h, the many rows of a server many_rows.h, with an order of their own.
//
// Compared with torch and with sums that are exact: tests/oracle/test_native_gemm.py, tests/native/gemm.cpp; its speed
// beside torch's GEMMs: benchmarks/results/cpu_kernels_*.md.
#pragma once

#include "many_rows.h"
#include "panels.h"

namespace octavo {
namespace {

// About 320 of K: FP32 panels then are 7.5 + 20 KiB with AVX2 (first-level cache 32 KiB), 15 + 40 KiB with AVX-512, BF16 pairs
// half of that.
constexpr int64_t CHUNK = 320;
constexpr int64_t TILE_ROWS = 16 * ROWS, TILE_COLUMNS = 128;  // of the output, for one thread at a time

// The factor that a code's panel lacks (panels.h).
constexpr float half_scale(Element element) { return element == Element::e4m3 ? HALF_SCALE<E4M3> : HALF_SCALE<E5M2>; }

constexpr bool is_code(Element element) { return element == Element::e4m3 || element == Element::e5m2; }

template <class P>
struct Gemm {
    const GemmProblem& p;
    const Scales scales{p};
    const bool exact = !is_code(p.a.element) || !is_code(p.b.element);
    const float unshift = exact ? 1.0f : half_scale(p.a.element) * half_scale(p.b.element);  // what codes were divided by
    const int64_t row_panels = (p.m + ROWS - 1) / ROWS, column_panels = (p.n + COLUMNS - 1) / COLUMNS;
    float* sums = nullptr;          // [m, n]
    Number<P>* a_panels = nullptr;  // of the chunk
    Number<P>* b_panels = nullptr;

    // K is cut evenly, into chunks of whole blocks where a block is a multiple of eight and fits one: a block's sum is then
    // scaled and added once. Other blocks may be cut, and their parts are scaled one by one.
    const int64_t unit = p.block && p.block <= CHUNK && p.block % 8 == 0 ? p.block : 8;
    const int64_t chunks = (p.k + CHUNK - 1) / CHUNK, chunk = ((p.k + chunks - 1) / chunks + unit - 1) / unit * unit;

    int64_t panel_size(int width) const { return (chunk + 8) * width + 8 * P::DEPTH; }  // stores of eight rows pass the end

    // Decodes columns [begin, end) of all rows of both operands. A part is eight panels.
    void pack_chunk(int64_t begin, int64_t end) const {
        parallel_for(row_panels + column_panels, 8, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; ++i) {
                const bool left = i < row_panels;
                const int64_t panel = left ? i : i - row_panels;
                const int width = left ? ROWS : COLUMNS;
                const auto packed = exact ? pack<P, true> : pack<P, false>;
                packed(left ? p.a : p.b, panel * width, (left ? p.m : p.n) - panel * width, begin, end, width,
                       (left ? a_panels : b_panels) + panel * panel_size(width));
            }
        });
    }

    // Adds the micro-kernel's sums of one block to `sums`, scaled by the block's scales; `begins` overwrites instead. Tiles at
    // the edge and scales that could leave FP32 halfway take the scalar loop, with the same operations in the same order.
    void add(const float* tile_sums, int64_t row, int64_t column, int64_t block, bool begins) const {
        const bool inside = row + ROWS <= p.m && column + COLUMNS <= p.n;
        if (inside && !scales.wide) {
            f32v right[VECTORS];
            if (p.block)
                for (int v = 0; v < VECTORS; ++v)
                    for (int i = 0; i < LANES; ++i) right[v][i] = scales.of(p.b, column + v * LANES + i, block);
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < VECTORS; ++v) {
                    float* to = sums + (row + r) * p.n + column + v * LANES;
                    f32v scaled = load<f32v>(tile_sums + r * COLUMNS + v * LANES);
                    if (p.block) scaled = scaled * all(unshift * scales.of(p.a, row + r, block)) * right[v];
                    store(to, begins ? scaled : load<f32v>(to) + scaled);
                }
            return;
        }
        for (int r = 0; r < least_of<int64_t>(ROWS, p.m - row); ++r)
            for (int c = 0; c < least_of<int64_t>(COLUMNS, p.n - column); ++c) {
                float& to = sums[(row + r) * p.n + column + c];
                const float sum = tile_sums[r * COLUMNS + c];
                const float scaled = p.block ? scales.apply(sum * unshift, row + r, column + c, block) : sum;
                to = begins ? scaled : to + scaled;
            }
    }

    // One micro-tile over [begin, end): the micro-kernel stops wherever scales change along K.
    void multiply_panels(int64_t row_panel, int64_t column_panel, int64_t begin, int64_t end) const {
        const Number<P>* a = a_panels + row_panel * panel_size(ROWS);
        const Number<P>* b = b_panels + column_panel * panel_size(COLUMNS);
        float tile_sums[ROWS * COLUMNS];
        for (int64_t k = begin; k < end;) {
            const int64_t block = p.block ? k / p.block : 0;
            const int64_t stop = p.block ? least_of(end, (block + 1) * p.block) : end;
            multiply<P>(a + (k - begin) * ROWS, b + (k - begin) * COLUMNS, stop - k, tile_sums);
            add(tile_sums, row_panel * ROWS, column_panel * COLUMNS, block, k == 0);
            k = stop;
        }
    }

    // Scales, bias and the one rounding to the output's dtype, for a tile whose sums are complete.
    template <class T>
    void finish(int64_t row, int64_t last_row, int64_t column, int64_t last_column) const {
        for (int64_t r = row; r < last_row; ++r) {
            const float* from = sums + r * p.n;
            T* to = static_cast<T*>(p.out) + r * p.n;
            for (int64_t c = column; c < last_column; c += LANES) {
                const int64_t some = least_of<int64_t>(LANES, last_column - c);
                f32v scaled = load_f32(from + c, some);
                scaled = scales.finished(p.block ? scaled : scaled * unshift, r, c, some);
                if (p.bias) scaled = scaled + load_f32(p.bias + c, some);
                store_f32(to + c, scaled, some);
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
                // b's panel outside, a's panels inside: b's, the larger, is read from the first-level cache 16 times.
                for (int64_t c = column / COLUMNS; c * COLUMNS < last_column; ++c)
                    for (int64_t r = row / ROWS; r * ROWS < last_row; ++r) multiply_panels(r, c, begin, end);
                if (end == p.k) finish_tile(row, last_row, column, last_column);
            }
        });
    }

    void run() const {
        for (int64_t begin = 0; begin < p.k; begin += chunk) {
            const int64_t end = least_of(begin + chunk, p.k);
            pack_chunk(begin, end);
            multiply_chunk(begin, end);
        }
    }
};

// An FP32 output holds the sums itself; others need [M, N] numbers beside it.
template <class P>
void gemm_by(const GemmProblem& p) {
    static thread_local Scratch panels, sums;
    Gemm<P> work{p};
    const int64_t a_size = work.row_panels * work.panel_size(ROWS), b_size = work.column_panels * work.panel_size(COLUMNS);
    work.a_panels = reinterpret_cast<Number<P>*>(panels.floats((a_size + b_size + P::DEPTH - 1) / P::DEPTH));
    work.b_panels = work.a_panels + a_size;
    work.sums = p.out_dtype == Dtype::f32 ? static_cast<float*>(p.out) : sums.floats(p.m * p.n);
    work.run();
    panels.trim();
    sums.trim();
}

void gemm(const GemmProblem& p) {
    // Up to 16 rows against FP8 codes in rows: those kernels read b once, as it lies in memory, and pack nothing of it for one
    // use.
    if (use_few_rows(p)) return use_many_rows(p) ? many_rows(p) : few_rows(p);
#if defined(__AVX512BF16__)
    if (Pairs::can(p)) return gemm_by<Pairs>(p);
#endif
    gemm_by<Numbers>(p);
}

}  // namespace
}  // namespace octavo
