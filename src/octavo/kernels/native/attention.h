// Paged attention for generation: a few query rows over cached keys and values, in FP32.
//
//   out[row][head] = Σ_t softmax_t(scale · q[row][head] · K[t]) · V[t],   t = 0 ... position of the row
//
// Layouts (kernels.h):
//   queries [rows, heads, D], rows `query_stride` apart     out [rows, heads, D], dense
//   keys    [pages, kv heads, D, PAGE]: a dimension's PAGE positions lie side by side
//   values  [pages, kv heads, PAGE, D]: a position's D numbers lie side by side
//   scales  [pages, kv heads, PAGE], BF16, one for every vector of FP8 codes
//   partials [row, head, page, 2 + D]: maximum, sum of exp(score - maximum), weighted values
// Both GEMVs (q · K and weights · V) are therefore weighted sums of rows of a page: one loop serves both, and nothing is added
// across lanes, except the sum of exp.
//
// A work item is one page of one key head for one row, with up to three query heads that share the key head. A second pass
// combines a row's pages in ascending order. Neither depends on the thread or on the other rows, so a row's bits are those of
// the sequence computed alone (tests/oracle/test_native_attention.py). tests/native/attention.cpp bounds the error at every
// level.
//
// Reference: Dao et al., "FlashAttention", arXiv 2205.14135, section 3.1 (softmax in parts).
#pragma once

#include "exponential.h"
#include "few_rows.h"

namespace octavo {
namespace {

constexpr int64_t PAGE_OR_DIM = PAGE > MAX_HEAD_DIM ? PAGE : MAX_HEAD_DIM;
constexpr int64_t PARTIAL_NUMBERS = 65536;  // FP32 numbers of partials at once, 256 KiB: more rows are done in several passes

// The result of one query head in one page: largest score, sum of weights, weighted values [D]; 2 + D numbers at `at`.
struct PartialSoftmax {
    float* at;

    float& maximum() const { return at[0]; }
    float& sum() const { return at[1]; }
    float* values() const { return at + 2; }
};

struct VectorPair {
    f32v first, second;
};

// Reads STEP = 4 · LANES stored numbers as FP32 and writes their sums back in order. Two parts of two vectors each: with three
// queries a part has six sums in registers, where all four vectors would have twelve beside the operands.
template <class T>
struct StoredVector {
    typedef T Element;
    static constexpr bool scaled = false;

    template <int PART, bool SPECIAL>
    static VectorPair read(const T* from) {
        return {load_f32(from + 2 * PART * LANES), load_f32(from + (2 * PART + 1) * LANES)};
    }

    static bool has_special(const T*, int64_t, int64_t, int64_t) { return false; }

    static void write(const VectorPair& first, const VectorPair& second, float* to) {
        store(to, first.first);
        store(to + LANES, first.second);
        store(to + 2 * LANES, second.first);
        store(to + 3 * LANES, second.second);
    }
};

// Codes are read as value · 2^-MISSING by a shift and a mask (words.h); the query is scaled up to make up for it. Part 0 holds
// bytes 0 and 2 of each 32-bit word, part 1 bytes 1 and 3. The shift makes NaN codes finite (480 · 2^-120), so a page with one
// takes SPECIAL, which decodes by fp8.h.
template <>
struct StoredVector<E4M3> {
    typedef uint8_t Element;
    static constexpr bool scaled = true;

    template <int PART, bool SPECIAL>
    static VectorPair read(const uint8_t* from) {
        const u32v words = load<u32v>(from);
        if (SPECIAL) return {shifted(words >> 8 * PART), shifted(words >> 8 * (PART + 2))};
        u32v halves[2];
        halve_codes<E4M3>(words, halves);
        return {number_of(halves[PART], 0), number_of(halves[PART], 1)};
    }

    // The low byte of each lane, decoded exactly and scaled as the shifted codes are, so that both branches share the rest.
    static f32v shifted(u32v words) { return decode<E4M3>(words & 0xff) * all(power_of_two(-MISSING<E4M3>)); }

    // Whether `count` rows of `width` codes hold a NaN code (0x7f or 0xff).
    static bool has_special(const uint8_t* rows, int64_t stride, int64_t count, int64_t width) {
        u8v seen = {};
        for (int64_t r = 0; r < count; ++r, rows += stride) {
            int64_t i = 0;
            for (; i + STEP <= width; i += STEP) seen = largest_byte(seen, load<u8v>(rows + i) & uint8_t(0x7f));
            uint8_t rest[STEP] = {};
            std::memcpy(rest, rows + i, width - i);
            seen = largest_byte(seen, load<u8v>(rest) & uint8_t(0x7f));
        }
        return octavo::has_special<E4M3>(seen);
    }

    // Sums lie byte by byte: vector b of {even.first, odd.first, even.second, odd.second} has elements 4 · lane + b. Two rounds
    // of interleaving restore memory order, once a STEP instead of once a row.
    static void write(const VectorPair& even, const VectorPair& odd, float* to) {
        const Zipped first = zip(even.first, even.second), second = zip(odd.first, odd.second);
        const Zipped low = zip(first.low, second.low), high = zip(first.high, second.high);
        store(to, low.low);
        store(to + LANES, low.high);
        store(to + 2 * LANES, high.low);
        store(to + 3 * LANES, high.high);
    }
};

// out[q][i] = Σ_r weights[q][r] · rows[r][i], r ascending, one FMA chain for each output.
//
// Scores: weights are the query [D], rows are dimensions, i is the position. Values: weights are exp(score - maximum) · scale,
// rows are positions, i is the dimension. A row is read once for COUNT query heads (grouped-query attention).
template <class T, int COUNT>
struct WeightedSum {
    typedef typename StoredVector<T>::Element Element;
    const float* const* weights;
    int64_t stride, count;  // of rows

    void run(const Element* rows, int64_t width, float* const* out) const {
        if (StoredVector<T>::has_special(rows, stride, count, width)) steps<true>(rows, width, out);
        else steps<false>(rows, width, out);
    }

private:
    template <bool SPECIAL>
    void steps(const Element* rows, int64_t width, float* const* out) const {
        int64_t i = 0;
        for (; i + STEP <= width; i += STEP) step<SPECIAL>(rows + i, stride, out, i, STEP);
        if (i == width) return;
        // The last, partial STEP is copied beside zeros: a load of whole vectors may pass the end of the cache.
        Element rest[PAGE_OR_DIM * STEP];
        std::memset(rest, 0, count * STEP * sizeof(Element));
        for (int64_t r = 0; r < count; ++r) std::memcpy(rest + r * STEP, rows + r * stride + i, (width - i) * sizeof(Element));
        step<SPECIAL>(rest, STEP, out, i, width - i);
    }

    template <bool SPECIAL>
    void step(const Element* rows, int64_t row_stride, float* const* out, int64_t at, int64_t columns_left) const {
        VectorPair first[COUNT], second[COUNT];
        add<SPECIAL, 0>(rows, row_stride, first);
        add<SPECIAL, 1>(rows, row_stride, second);
        for (int q = 0; q < COUNT; ++q) {
            float sorted[STEP];
            StoredVector<T>::write(first[q], second[q], sorted);
            std::memcpy(out[q] + at, sorted, columns_left * sizeof(float));
        }
    }

    // Not inlined, so that all 2 · COUNT sums stay in registers.
    template <bool SPECIAL, int PART>
    __attribute__((noinline)) void add(const Element* rows, int64_t row_stride, VectorPair* out) const {
        f32v sums[COUNT][2] = {};
        for (int64_t r = 0; r < count; ++r, rows += row_stride) {
            const VectorPair own = StoredVector<T>::template read<PART, SPECIAL>(rows);
#pragma GCC unroll 4
            for (int q = 0; q < COUNT; ++q) {
                const f32v weight = all(weights[q][r]);
                sums[q][0] = fused(own.first, weight, sums[q][0]);
                sums[q][1] = fused(own.second, weight, sums[q][1]);
            }
        }
        for (int q = 0; q < COUNT; ++q) out[q] = {sums[q][0], sums[q][1]};
    }
};

struct Attention {
    const AttentionProblem& p;
    const int64_t group = p.heads / p.cache.kv_heads;  // query heads that share a key head
    int64_t pages = 0;                                 // of the row that has most
    float* partials = nullptr;                             // [row, head, page, 2 + head dim]

    PartialSoftmax partial(int64_t row, int64_t head, int64_t page) const {
        return {partials + ((row * p.heads + head) * pages + page) * (2 + p.cache.head_dim)};
    }

    int64_t pages_of(int64_t row) const { return p.rows.position[row] / PAGE + 1; }

    static float scale_at(const Pages& pages, int64_t vector) { return as_f32(Bf16{pages.scale[vector]}); }

    template <class T, int COUNT>
    // One page of one key head for COUNT query heads from `head` on; writes their partials.
    void attend_page(int64_t row, int64_t head, int64_t page, int64_t partial_row) const {
        typedef typename StoredVector<T>::Element Element;
        constexpr bool scaled = StoredVector<T>::scaled;
        const int64_t dim = p.cache.head_dim, count = least_of(PAGE, p.rows.position[row] + 1 - page * PAGE);
        const int64_t number = p.cache.table[p.rows.sequence[row] * p.cache.table_stride + page];
        const int64_t at = (number * p.cache.kv_heads + head / group) * PAGE;
        const float* query = p.queries + row * p.query_stride + head * dim;
        // Stack: 3 · (512 + 64) numbers, 6.75 KiB for three heads.
        float shifted[COUNT][MAX_HEAD_DIM], scores[COUNT][PAGE], unshift[COUNT];
        const float *queries[COUNT], *weights[COUNT];
        float *to_scores[COUNT], *to_values[COUNT];
        for (int q = 0; q < COUNT; ++q, query += dim) {
            unshift[q] = scaled ? shift_query(query, dim, shifted[q]) : 1.0f;
            queries[q] = scaled ? shifted[q] : query;
            weights[q] = to_scores[q] = scores[q];
            to_values[q] = partial(partial_row, head + q, page).values();
        }
        WeightedSum<T, COUNT>{queries, PAGE, dim}.run(static_cast<const Element*>(p.keys.data) + at * dim, count, to_scores);
        for (int q = 0; q < COUNT; ++q) {
            for (int64_t t = 0; t < count; ++t)
                scores[q][t] *= scaled ? unshift[q] * scale_at(p.keys, at + t) * p.scale : p.scale;
            exponentiate(scores[q], count, partial(partial_row, head + q, page));
        }
        // Values' scales go into the weights, divided by the largest one's power of two so that no weight leaves FP32; the
        // division and the final multiplication by `most` are exact. 2^-126 where all scales are 0.
        float most = __FLT_MIN__;
        for (int64_t t = 0; scaled && t < count; ++t) most = largest(most, scale_at(p.values, at + t));
        most = bits_as<float>(bits_as<uint32_t>(most) & EXPONENT);
        for (int64_t t = 0; scaled && t < count; ++t) {
            const float scale = scale_at(p.values, at + t) / most * power_of_two(MISSING<E4M3>);
            for (int q = 0; q < COUNT; ++q) scores[q][t] *= scale;
        }
        WeightedSum<T, COUNT>{weights, dim, count}.run(static_cast<const Element*>(p.values.data) + at * dim, dim, to_values);
        for (int q = 0; scaled && q < COUNT; ++q)
            for (int64_t d = 0; d < dim; ++d) to_values[q][d] *= most;
    }

    // Scales the query by the power of two that moves its largest number to FP32's last binade but one, and returns the factor
    // that undoes it and the codes' 2^-MISSING. Powers of two round nothing; what falls below FP32's smallest number is less
    // than 2^-120 of the largest, and nothing to a score.
    static float shift_query(const float* query, int64_t dim, float* shifted) {
        const int shift = shift_of(query, dim);
        for (int64_t d = 0; d < dim; ++d) shifted[d] = query[d] * power_of_two(shift);
        return power_of_two(MISSING<E4M3> - shift);
    }

    // Replaces scores [count] by exp(score - maximum) in place; stores maximum and sum in `to`. Subtracting the maximum bounds
    // every weight by 1, so the sum over a page is at most PAGE.
    static void exponentiate(float* scores, int64_t count, PartialSoftmax to) {
        float maximum = scores[0];
        for (int64_t t = 1; t < count; ++t) maximum = largest(maximum, scores[t]);
        f32v sum = {};
        for (int64_t t = 0; t < count; t += LANES) {
            const int64_t lanes = least_of<int64_t>(LANES, count - t);
            store_f32(scores + t, exponential(load_f32(scores + t, lanes) - all(maximum)), lanes);
            sum = sum + load_f32(scores + t, lanes);  // read again: lanes past the end are 0, not exp(-maximum)
        }
        to.maximum() = maximum;
        to.sum() = sum_of_lanes(sum);
    }

    // Three heads at a time: six sums, two vectors of numbers and a weight fit AVX2's 16 registers.
    template <class T>
    void attend_group(int64_t row, int64_t first_head, int64_t page, int64_t partial_row) const {
        int64_t q = 0;
        for (; q + 3 <= group; q += 3) attend_page<T, 3>(row, first_head + q, page, partial_row);
        if (q + 2 == group) attend_page<T, 2>(row, first_head + q, page, partial_row);
        if (q + 1 == group) attend_page<T, 1>(row, first_head + q, page, partial_row);
    }

    // softmax over all pages of a row: each page's sums times exp(its maximum - the largest), added in ascending order of
    // pages.
    void combine_pages(int64_t row, int64_t head, int64_t partial_row) const {
        const int64_t dim = p.cache.head_dim, count = pages_of(row);
        float* out = p.out + (row * p.heads + head) * dim;
        float maximum = partial(partial_row, head, 0).maximum(), sum = 0;
        for (int64_t page = 1; page < count; ++page) maximum = largest(maximum, partial(partial_row, head, page).maximum());
        std::memset(out, 0, dim * sizeof(float));
        for (int64_t page = 0; page < count; ++page) {
            const PartialSoftmax own = partial(partial_row, head, page);
            const float weight = exponential(own.maximum() - maximum);
            sum += own.sum() * weight;
            for (int64_t d = 0; d < dim; ++d) out[d] += own.values()[d] * weight;
        }
        for (int64_t d = 0; d < dim; ++d) out[d] /= sum;
    }

    // Rows [first, last). Pages are outermost: rows of one sequence read a page one after another, while the cache holds it
    // (a page of 64 codes of 64 dimensions is 4 KiB, keys and values 8 KiB).
    template <class T>
    void run(int64_t first, int64_t last) const {
        const int64_t rows = last - first, kv_heads = p.cache.kv_heads;
        parallel_for(pages * kv_heads * rows, 4, [&](int64_t begin, int64_t end) {
            for (int64_t item = begin; item < end; ++item) {
                const int64_t row = item % rows, head = item / rows % kv_heads * group, page = item / rows / kv_heads;
                if (page >= pages_of(first + row)) continue;  // a shorter sequence than the longest
                attend_group<T>(first + row, head, page, row);
            }
        });
        parallel_for(rows * p.heads, 16, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) combine_pages(first + i / p.heads, i % p.heads, i / p.heads);
        });
    }
};

void attend(const AttentionProblem& p) {
    static thread_local Scratch partial;
    if (p.rows.count == 0 || p.heads == 0) return;
    Attention work{p};
    for (int64_t row = 0; row < p.rows.count; ++row) work.pages = largest(work.pages, work.pages_of(row));
    const int64_t a_row = p.heads * work.pages * (2 + p.cache.head_dim), at_once = largest<int64_t>(1, PARTIAL_NUMBERS / a_row);
    work.partials = partial.floats(least_of(at_once, p.rows.count) * a_row);
    for (int64_t first = 0; first < p.rows.count; first += at_once) {
        const int64_t last = least_of(first + at_once, p.rows.count);
        if (p.cache.element == Element::e4m3) work.run<E4M3>(first, last);
        else if (p.cache.element == Element::bf16) work.run<Bf16>(first, last);
        else work.run<float>(first, last);
    }
    partial.trim();
}

}  // namespace
}  // namespace octavo
