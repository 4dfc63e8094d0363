// y = (a · bᵀ) · scales + bias, sums in FP32; each operand FP8 codes or numbers in high precision.
//
// K is cut into chunks. Of each chunk both operands are decoded once, into panels that the micro-kernel reads in order
// (panels.h): ROWS rows of a, COLUMNS of b. It keeps ROWS x COLUMNS sums in registers. Where scales change along K, it stops
// at every change, and its sums are scaled before they are added to those of the blocks before.
#pragma once

#include "many_rows.h"
#include "panels.h"

namespace octavo {
namespace {

constexpr int64_t CHUNK = 320;                                // of K, about: panels of both operands fit the first-level cache
constexpr int64_t TILE_ROWS = 16 * ROWS, TILE_COLUMNS = 128;  // of the output, for one thread at a time

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

    // Blocks are not cut where they are made of whole groups of eight: their sums are rounded once, then scaled.
    const int64_t unit = p.block && p.block <= CHUNK && p.block % 8 == 0 ? p.block : 8;
    const int64_t chunks = (p.k + CHUNK - 1) / CHUNK, chunk = ((p.k + chunks - 1) / chunks + unit - 1) / unit * unit;

    int64_t panel_size(int width) const { return (chunk + 8) * width + 8 * P::DEPTH; }  // stores come in eights

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
        const Number<P>* a = a_panels + row_panel * panel_size(ROWS);
        const Number<P>* b = b_panels + column_panel * panel_size(COLUMNS);
        float found[ROWS * COLUMNS];
        for (int64_t k = begin; k < end;) {
            const int64_t block = p.block ? k / p.block : 0;
            const int64_t stop = p.block ? least_of(end, (block + 1) * p.block) : end;
            multiply<P>(a + (k - begin) * ROWS, b + (k - begin) * COLUMNS, stop - k, found);
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
        for (int64_t begin = 0; begin < p.k; begin += chunk) {
            const int64_t end = least_of(begin + chunk, p.k);
            pack_chunk(begin, end);
            multiply_chunk(begin, end);
        }
    }
};

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
    if (takes_few_rows(p)) return takes_many_rows(p) ? many_rows(p) : few_rows(p);
#if defined(__AVX512BF16__)
    if (Pairs::can(p)) return gemm_by<Pairs>(p);
#endif
    gemm_by<Numbers>(p);
}

}  // namespace
}  // namespace octavo
