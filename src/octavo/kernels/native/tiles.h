// Tiled GEMM of many_rows.h and integers.h: tiles of up to SIDE rows of a times WIDE columns of b, sums in registers.
//
//   sums[chain][row][column] = Σ_place a[chain][place][row] · b[chain][place][column]
//
// Layouts, both read front to back: tiles of a [tile][chain][place][row], all tiles with nearly as many rows; panel of b
// [chain][word][WIDE], decoded once by one thread for all tiles. A lane belongs to a column, so nothing is added across lanes.
//
// Threads take WIDE columns at a time from a shared counter, since cores are not equally fast (prefill became 15 % faster than
// with fixed halves), and prefetch their next columns while they multiply. A, the arithmetic, gives Number, Vector, CHAINS and
// IN_WORD; By, the caller, decodes (unpack) and finishes the sums.
#pragma once

#include <atomic>

#include "kernels.h"
#include "memory.h"
#include "parallel.h"
#include "words.h"

namespace octavo {
namespace {

#if defined(__AVX512F__)
constexpr int SIDE = 8, ACROSS = 3;  // 8 rows x 3 vectors: 24 of 32 registers hold sums
#else
constexpr int SIDE = 6, ACROSS = 2;  // 6 rows x 2 vectors: 12 of 16 registers hold sums
#endif
constexpr int WIDE = ACROSS * LANES;
constexpr int64_t TILES = 3;               // tiles whose sums lie together: with AVX2 8 chains x 18 rows x 16 columns, 9 KiB
constexpr int64_t AT_ONCE = TILES * SIDE;  // their rows at most

// Up to WIDE rows of b as bytes, read as columns of 32-bit words.
struct ByteRows {
    const uint8_t* data;
    int64_t stride, count, bytes;  // of each

    // One vector of a row, zeros past its end and past the last row: no read passes the tensor.
    u32v load_some(int64_t row, int64_t at) const {
        uint8_t some[sizeof(u32v)] = {};
        if (row < count) std::memcpy(some, data + row * stride + at, least_of<int64_t>(sizeof some, bytes - at));
        return load<u32v>(some);
    }

    // Calls each(step, v, words): lane c of words[i] is word LANES · step + i of row v · LANES + c. LANES loads and one
    // transposition for LANES vectors.
    template <class Each>
    void for_words(const Each& each) const {
        for (int64_t step = 0, at = 0; at < bytes; ++step, at += sizeof(u32v)) {
            const bool whole = count == WIDE && at + int64_t(sizeof(u32v)) <= bytes;
            for (int v = 0; v < ACROSS; ++v) {
                u32v words[LANES];
                const uint8_t* from = data + v * LANES * stride + at;
                if (whole) {
                    for (int i = 0; i < LANES; ++i) words[i] = load<u32v>(from + i * stride);
                } else {
                    for (int i = 0; i < LANES; ++i) words[i] = load_some(v * LANES + i, at);
                }
                transpose(words);
                each(step, v, words);
            }
        }
    }

    // Prefetches part `part` of `parts`, whole rows: spread over the chains, so that requests do not come all at once.
    void prefetch(int64_t part, int64_t parts) const {
        for (int64_t row = count * part / parts; row < count * (part + 1) / parts; ++row)
            for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(data + row * stride + at);
    }
};

// Rows of a in tiles [chain][place][row]. Rows are spread evenly: 7 rows are 3 + 4, not 6 + 1, since a tile of one row would
// use a sixth of the registers.
template <class A>
struct Tiles {
    typename A::Number* data;
    int64_t rows, places;  // of a chain
    const int64_t count = (rows + SIDE - 1) / SIDE;

    int64_t size() const { return rows * A::CHAINS * places; }
    int64_t first_row(int64_t tile) const { return rows * tile / count; }
    int64_t rows_of(int64_t tile) const { return first_row(tile + 1) - first_row(tile); }

    typename A::Number* chain(int64_t tile, int64_t chain) const {
        return data + (first_row(tile) * A::CHAINS + chain * rows_of(tile)) * places;
    }
};

// out [ROWS_][WIDE] = Σ_place rows [place][ROWS_] · columns [word][WIDE], one chain of one tile. IN_WORD numbers come out of a
// word. Loops over sums are unrolled by pragma and the function is not inlined, or GCC would not keep the sums in registers.
template <class A, int ROWS_>
__attribute__((noinline)) void multiply_tile(const typename A::Number* rows, const uint32_t* columns, int64_t places, uint32_t* out) {
    typedef typename A::Vector Vector;
    Vector sums[ROWS_][ACROSS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS_; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < ACROSS; ++v) sums[r][v] = Vector{};
    for (int64_t i = 0; i < places; i += A::IN_WORD, columns += WIDE)
#pragma GCC unroll 2
        for (int place = 0; place < A::IN_WORD; ++place, rows += ROWS_) {
            Vector right[ACROSS];
#pragma GCC unroll 8
            for (int v = 0; v < ACROSS; ++v) right[v] = A::number(load<u32v>(columns + v * LANES), place);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS_; ++r) {
                const Vector left = A::spread(rows[r]);
#pragma GCC unroll 8
                for (int v = 0; v < ACROSS; ++v) sums[r][v] = A::add(sums[r][v], left, right[v]);
            }
        }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS_; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < ACROSS; ++v) store(out + r * WIDE + v * LANES, sums[r][v]);
}

// multiply_tile with the number of rows as a template argument, 1 ... SIDE.
template <class A, int ROWS_ = SIDE>
void multiply_rows(int64_t count, const typename A::Number* rows, const uint32_t* columns, int64_t places, uint32_t* out) {
    if constexpr (ROWS_ > 1) {
        if (count < ROWS_) return multiply_rows<A, ROWS_ - 1>(count, rows, columns, places, out);
    }
    multiply_tile<A, ROWS_>(rows, columns, places, out);
}

// out = a · bᵀ with the rows of a in tiles; `by` unpacks b's words and finishes the sums.
template <class A, class By>
struct TiledGemm {
    const Tiles<A>& tiles;
    const By& by;
    const int64_t n;
    // Words from one chain of the panel to the next; 16 more, so that chains seldom start a multiple of 4,096 bytes apart, in
    // the same set of the first-level cache.
    const int64_t chain_stride = tiles.places / A::IN_WORD * WIDE + 16;

    // Up to TILES tiles times the panel, chain outermost: a chain of the panel (2.3 KiB at K = 576 in FP8, AVX2) serves them
    // from the first-level cache. The first tiles prefetch the next columns on the way, once however many rows there are.
    void multiply(int64_t first, const uint32_t* panel, const ByteRows& next, uint32_t* sums) const {
        const int64_t last = least_of(first + TILES, tiles.count), row = tiles.first_row(first);
        for (int64_t chain = 0; chain < A::CHAINS; ++chain) {
            if (first == 0) next.prefetch(chain, A::CHAINS);
            for (int64_t tile = first; tile < last; ++tile)
                multiply_rows<A>(tiles.rows_of(tile), tiles.chain(tile, chain), panel + chain * chain_stride, tiles.places,
                                 sums + (chain * AT_ONCE + tiles.first_row(tile) - row) * WIDE);
        }
    }

    // One thread's work: takes WIDE columns and the next WIDE at once, since prefetching needs to know them.
    void multiply_panels(std::atomic<int64_t>& next_column) const {
        static thread_local Scratch words;
        alignas(64) uint32_t sums[A::CHAINS * AT_ONCE * WIDE];
        uint32_t* panel = reinterpret_cast<uint32_t*>(words.floats(A::CHAINS * chain_stride));
        for (int64_t column = next_column.fetch_add(WIDE); column < n;) {
            const int64_t last = least_of(column + WIDE, n), next = next_column.fetch_add(WIDE);
            typename By::Seen seen = by.unpack(by.bytes(column, last), chain_stride, panel);
            const ByteRows ahead = by.bytes(least_of(next, n), least_of(next + WIDE, n));
            for (int64_t tile = 0; tile < tiles.count; tile += TILES) {
                multiply(tile, panel, ahead, sums);
                const int64_t last_row = tiles.first_row(least_of(tile + TILES, tiles.count));
                by.finish({tiles.first_row(tile), last_row, column, last}, seen, sums);
            }
            column = next;
        }
        words.trim();
    }

    void run() const {
        std::atomic<int64_t> next_column{0};
        // One thread for every two panels, at most. parallel_for's parts are the threads; the counter hands out the work.
        const int64_t threads = least_of<int64_t>(max_threads(), (n + 2 * WIDE - 1) / (2 * WIDE));
        parallel_for(threads, 1, [&](int64_t, int64_t) { multiply_panels(next_column); });
    }
};

}  // namespace
}  // namespace octavo
