// The sums of few_rows.h for any number of rows of a, to the bit: a row's result depends neither on how many rows there are
// nor on which. Whoever serves several sequences in one call needs that: what one of them is told may not depend on the
// others.
#pragma once

#include <vector>

#include "few_rows.h"
#include "tiles.h"

namespace octavo {
namespace {

constexpr int64_t MANY = 4;  // rows

static_assert(WIDE <= SOME, "sums of WIDE columns are finished together");

// Products of numbers with halves of words, one chain for each lane of few_rows.h.
struct Halves {
    typedef float Number;
    typedef f32v Vector;
    static constexpr int CHAINS = LANES, IN_WORD = 2;

    // Read from memory each time: no register is left for it, and one that is needed would be stored and loaded instead.
    static inline const volatile u32v HIGH = u32v{} + 0xffff0000u;

    static f32v number(u32v half, int place) { return bits_as<f32v>(place ? half & (u32v)HIGH : half << 16); }
    static f32v spread(float number) { return all(number); }
    static f32v add(f32v sum, f32v left, f32v right) { return fused(right, left, sum); }
};

template <class W>
struct ManyRows {
    typedef u8v Seen;  // largest magnitudes
    const GemmProblem& p;
    const Tiles<Halves>& tiles;
    float* plain;  // the rows of a as they are, `dense` apart
    int64_t dense;
    Row* rows;
    const FewRows few{p, rows};

    // Rows of a as they are, and shifted as a tile.
    void shift_tile(int64_t tile) const {
        const int64_t first = tiles.first_row(tile), count = tiles.rows_of(tile);
        for (int64_t r = 0; r < count; ++r) {
            float *x = plain + (first + r) * dense, *to = tiles.chain(tile, 0) + r;
            read_row(p.a, first + r, p.k, x);
            const Shift shift = W::shift(x, p.k);
            rows[first + r] = {x, nullptr, shift.unshift};
            for (int64_t at = 0; at < p.k; at += STEP_OF<W>, to += W::IN_WORD * count) {
                float some[STEP_OF<W>] = {};
                std::memcpy(some, x + at, least_of(STEP_OF<W>, p.k - at) * sizeof(float));
                for_places<W>([&](int number, int lane, int place) {
                    to[(lane * tiles.places + place) * count] = some[number] * shift.factor;
                });
            }
        }
    }

    ByteRows bytes(int64_t column, int64_t last) const {
        constexpr int64_t size = sizeof(typename W::Element);
        const auto* first = reinterpret_cast<const uint8_t*>(few.column<W>(column));
        return {first, p.b.row_stride * size, last - column, p.k * size};
    }

    // Halves of columns of words, [chain][half][WIDE].
    u8v take_apart(const ByteRows& columns, int64_t apart, uint32_t* panel) const {
        u8v seen = {};
        columns.for_words([&](int64_t step, int v, const u32v(&words)[LANES]) {
            uint32_t* to = panel + step * W::HALVES * WIDE + v * LANES;
            for (int chain = 0; chain < LANES; ++chain, to += apart) {
                seen = largest_byte(seen, W::magnitudes(words[chain]));
                u32v halves[W::HALVES];
                W::halve(words[chain], halves);
                for (int i = 0; i < W::HALVES; ++i) store(to + i * WIDE, halves[i]);
            }
        });
        return seen;
    }

    // The chains, [chain][row][WIDE], added as sum_of_lanes does, and unshifted.
    void finish(const Part& part, u8v seen, uint32_t* chains) const {
        const int64_t count = (part.last_row - part.row) * WIDE, apart = AT_ONCE * WIDE;
        for (int64_t half = LANES / 2; half; half /= 2)
            for (int64_t i = 0; i < half; ++i)
                for (int64_t j = i * apart; j < i * apart + count; j += LANES)
                    store(chains + j, load<f32v>(chains + j) + load<f32v>(chains + half * apart + j));
        float sums[AT_ONCE * SOME];
        for (int64_t r = 0; r < part.last_row - part.row; ++r)
            for (int i = 0; i < WIDE; i += LANES)
                store(sums + r * SOME + i, load<f32v>(chains + r * WIDE + i) * all(rows[part.row + r].unshift));
        few.mend<W>(part, seen, sums);
        few.finish(part, sums);
    }

    void run() const {
        parallel_for(tiles.count, largest<int64_t>(1, 4096 / (p.k * SIDE)), [&](int64_t first, int64_t last) {
            for (int64_t tile = first; tile < last; ++tile) shift_tile(tile);
        });
        TiledProduct<Halves, ManyRows>{tiles, *this, p.n}.run();
    }
};

template <class W>
void many_rows_of(const GemmProblem& p) {
    static thread_local Scratch numbers;
    static thread_local std::vector<Row> rows;
    rows.resize(p.m);
    Tiles<Halves> tiles{nullptr, p.m, steps_of<W>(p.k) * W::IN_WORD};
    const int64_t dense = (p.k + LANES - 1) / LANES * LANES;
    tiles.data = numbers.floats(tiles.size() + p.m * dense);
    ManyRows<W>{p, tiles, tiles.data + tiles.size(), dense, rows.data()}.run();
    numbers.trim();
}

void many_rows(const GemmProblem& p) {
    switch (p.b.element) {
        case Element::e4m3: return many_rows_of<CodeWords<E4M3>>(p);
        case Element::e5m2: return many_rows_of<CodeWords<E5M2>>(p);
        default: return many_rows_of<NumberWords>(p);
    }
}

// Where columns are better taken apart once for all rows than for every three of them.
inline bool takes_many_rows(const GemmProblem& p) { return p.m >= MANY && !p.block && has_words_in_rows(p.b); }

}  // namespace
}  // namespace octavo
