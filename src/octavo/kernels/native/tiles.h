// Products of rows with WIDE columns of words, for as many rows as there are: columns are taken apart once, and tiles of SIDE
// rows or fewer are multiplied with them, their sums in registers.
//
// Rows and columns lie in the order in which they are read: for each place of a chain (words.h) the numbers of all rows, and
// the words of all columns, side by side. A lane belongs to a column then, so that nothing is added across lanes.
#pragma once

#include <atomic>

#include "kernels.h"
#include "memory.h"
#include "parallel.h"
#include "words.h"

namespace octavo {
namespace {

#if defined(__AVX512F__)
constexpr int SIDE = 8, ACROSS = 3;  // of 32 registers, 24 hold sums
#else
constexpr int SIDE = 6, ACROSS = 2;  // of 16 registers, 12 hold sums
#endif
constexpr int WIDE = ACROSS * LANES;
constexpr int64_t TILES = 3;               // whose sums stand together
constexpr int64_t AT_ONCE = TILES * SIDE;  // their rows at most

// Rows of bytes that become columns of words, at most WIDE.
struct ByteRows {
    const uint8_t* data;
    int64_t stride, count, bytes;  // of each

    u32v load_some(int64_t row, int64_t at) const {
        uint8_t some[sizeof(u32v)] = {};
        if (row < count) std::memcpy(some, data + row * stride + at, least_of<int64_t>(sizeof some, bytes - at));
        return load<u32v>(some);
    }

    // each(step, v, words): words[i] has word LANES * step + i of the LANES columns of vector v; zeros behind an end.
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

    // Asks for a part of the bytes, which will be read soon.
    void prefetch(int64_t part, int64_t parts) const {
        for (int64_t row = count * part / parts; row < count * (part + 1) / parts; ++row)
            for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(data + row * stride + at);
    }
};

// Rows in tiles, as many in one as in another, [chain][place][row] each.
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

// Sums, [row][WIDE], of ROWS_ rows, [place][ROWS_], with columns, [word][WIDE]. Every loop over sums is unrolled, or they would
// not stay in registers.
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

template <class A, int ROWS_ = SIDE>
void multiply_rows(int64_t count, const typename A::Number* rows, const uint32_t* columns, int64_t places, uint32_t* out) {
    if constexpr (ROWS_ > 1) {
        if (count < ROWS_) return multiply_rows<A, ROWS_ - 1>(count, rows, columns, places, out);
    }
    multiply_tile<A, ROWS_>(rows, columns, places, out);
}

// y = a · bᵀ with the rows in tiles. `by` takes b's words apart and finishes the sums.
template <class A, class By>
struct TiledProduct {
    const Tiles<A>& tiles;
    const By& by;
    const int64_t n;
    const int64_t apart = tiles.places / A::IN_WORD * WIDE + 16;  // columns of chains: seldom a multiple of a page

    // Rows of up to TILES tiles with the columns in the panel; the first of them ask for the next columns' words on the way.
    void multiply(int64_t first, const uint32_t* panel, const ByteRows& next, uint32_t* sums) const {
        const int64_t last = least_of(first + TILES, tiles.count), row = tiles.first_row(first);
        for (int64_t chain = 0; chain < A::CHAINS; ++chain) {
            if (first == 0) next.prefetch(chain, A::CHAINS);
            for (int64_t tile = first; tile < last; ++tile)
                multiply_rows<A>(tiles.rows_of(tile), tiles.chain(tile, chain), panel + chain * apart, tiles.places,
                                 sums + (chain * AT_ONCE + tiles.first_row(tile) - row) * WIDE);
        }
    }

    // Threads take WIDE columns at a time as they come, and know which are next while they multiply some.
    void multiply_panels(std::atomic<int64_t>& taken) const {
        static thread_local Scratch words;
        alignas(64) uint32_t sums[A::CHAINS * AT_ONCE * WIDE];
        uint32_t* panel = reinterpret_cast<uint32_t*>(words.floats(A::CHAINS * apart));
        for (int64_t column = taken.fetch_add(WIDE); column < n;) {
            const int64_t last = least_of(column + WIDE, n), next = taken.fetch_add(WIDE);
            typename By::Seen seen = by.take_apart(by.bytes(column, last), apart, panel);
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
        std::atomic<int64_t> taken{0};
        const int64_t threads = least_of<int64_t>(max_threads(), (n + 2 * WIDE - 1) / (2 * WIDE));
        parallel_for(threads, 1, [&](int64_t, int64_t) { multiply_panels(taken); });
    }
};

}  // namespace
}  // namespace octavo
