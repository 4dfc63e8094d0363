// Attention over cached keys and values, a few queries at a time, as in generation.
//
// The work is cut into pages of one key head for one row, whoever does them: scores, their maximum, the sum of
// exp(score - maximum) and the values weighted with it. What the pages of a row found is then put together in their
// order. A row's result depends on its own sequence alone.
//
// Reference: Dao et al., "FlashAttention", arXiv 2205.14135, section 3.1 (softmax in parts).
#pragma once

#include "exponential.h"
#include "few_rows.h"

namespace octavo {
namespace {

constexpr int64_t PAGE_OR_DIM = PAGE > MAX_HEAD_DIM ? PAGE : MAX_HEAD_DIM;
constexpr int64_t KEPT_AT_ONCE = 65536;  // numbers that queries found, before they are put together

// What a query found in one page: the largest score, the sum of weights, and the weighted values, [head dim].
struct Found {
    float* at;

    float& maximum() const { return at[0]; }
    float& sum() const { return at[1]; }
    float* values() const { return at + 2; }
};

struct Two {
    f32v first, second;
};

// How STEP stored numbers become FP32, in two parts of two vectors each, and where their sums belong.
template <class T>
struct Stored {
    typedef T Element;
    static constexpr bool scaled = false;

    template <int PART, bool SPECIAL>
    static Two read(const T* from) {
        return {load_f32(from + 2 * PART * LANES), load_f32(from + (2 * PART + 1) * LANES)};
    }

    static bool has_special(const T*, int64_t, int64_t, int64_t) { return false; }

    static void write(const Two& first, const Two& second, float* to) {
        store(to, first.first);
        store(to + LANES, first.second);
        store(to + 2 * LANES, second.first);
        store(to + 3 * LANES, second.second);
    }
};

// Codes are read times 2^-MISSING; the first part are the even bytes. Only SPECIAL reads NaN codes as what they are.
template <>
struct Stored<E4M3> {
    typedef uint8_t Element;
    static constexpr bool scaled = true;

    template <int PART, bool SPECIAL>
    static Two read(const uint8_t* from) {
        const u32v words = load<u32v>(from);
        if (SPECIAL) return {shifted(words >> 8 * PART), shifted(words >> 8 * (PART + 2))};
        u32v halves[2];
        halve_codes<E4M3>(words, halves);
        return {number_of(halves[PART], 0), number_of(halves[PART], 1)};
    }

    static f32v shifted(u32v words) { return decode<E4M3>(words & 0xff) * all(power_of_two(-MISSING<E4M3>)); }

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

    static void write(const Two& even, const Two& odd, float* to) {
        const Zipped first = zip(even.first, even.second), second = zip(odd.first, odd.second);
        const Zipped low = zip(first.low, second.low), high = zip(first.high, second.high);
        store(to, low.low);
        store(to + LANES, low.high);
        store(to + 2 * LANES, high.low);
        store(to + 3 * LANES, high.high);
    }
};

// Both halves of attention are a few weights a row times the rows of a page: out[q][i] = sum over r of
// weights[q][r] * rows[r][i]. For scores, rows are the head's dimensions and i the positions; for values, the reverse.
template <class T, int COUNT>
struct Weighing {
    typedef typename Stored<T>::Element Element;
    const float* const* weights;
    int64_t stride, count;  // of rows

    void run(const Element* rows, int64_t width, float* const* out) const {
        if (Stored<T>::has_special(rows, stride, count, width)) steps<true>(rows, width, out);
        else steps<false>(rows, width, out);
    }

private:
    template <bool SPECIAL>
    void steps(const Element* rows, int64_t width, float* const* out) const {
        int64_t i = 0;
        for (; i + STEP <= width; i += STEP) step<SPECIAL>(rows + i, stride, out, i, STEP);
        if (i == width) return;
        Element rest[PAGE_OR_DIM * STEP];
        std::memset(rest, 0, count * STEP * sizeof(Element));
        for (int64_t r = 0; r < count; ++r) std::memcpy(rest + r * STEP, rows + r * stride + i, (width - i) * sizeof(Element));
        step<SPECIAL>(rest, STEP, out, i, width - i);
    }

    template <bool SPECIAL>
    void step(const Element* rows, int64_t apart, float* const* out, int64_t at, int64_t some) const {
        Two first[COUNT], second[COUNT];
        add<SPECIAL, 0>(rows, apart, first);
        add<SPECIAL, 1>(rows, apart, second);
        for (int q = 0; q < COUNT; ++q) {
            float sorted[STEP];
            Stored<T>::write(first[q], second[q], sorted);
            std::memcpy(out[q] + at, sorted, some * sizeof(float));
        }
    }

    // A function of its own, so that all sums stay in registers.
    template <bool SPECIAL, int PART>
    __attribute__((noinline)) void add(const Element* rows, int64_t apart, Two* out) const {
        f32v sums[COUNT][2] = {};
        for (int64_t r = 0; r < count; ++r, rows += apart) {
            const Two own = Stored<T>::template read<PART, SPECIAL>(rows);
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
    float* kept = nullptr;                             // [row, head, page, 2 + head dim]

    Found found(int64_t row, int64_t head, int64_t page) const {
        return {kept + ((row * p.heads + head) * pages + page) * (2 + p.cache.head_dim)};
    }

    int64_t pages_of(int64_t row) const { return p.rows.position[row] / PAGE + 1; }

    static float scale_at(const Pages& pages, int64_t vector) { return as_f32(Bf16{pages.scale[vector]}); }

    template <class T, int COUNT>
    void look(int64_t row, int64_t head, int64_t page, int64_t kept_row) const {
        typedef typename Stored<T>::Element Element;
        constexpr bool scaled = Stored<T>::scaled;
        const int64_t dim = p.cache.head_dim, count = least_of(PAGE, p.rows.position[row] + 1 - page * PAGE);
        const int64_t number = p.cache.table[p.rows.sequence[row] * p.cache.table_stride + page];
        const int64_t at = (number * p.cache.kv_heads + head / group) * PAGE;
        const float* query = p.queries + row * p.query_stride + head * dim;
        float shifted[COUNT][MAX_HEAD_DIM], scores[COUNT][PAGE], unshift[COUNT];
        const float *queries[COUNT], *weights[COUNT];
        float *to_scores[COUNT], *to_values[COUNT];
        for (int q = 0; q < COUNT; ++q, query += dim) {
            unshift[q] = scaled ? shift_query(query, dim, shifted[q]) : 1.0f;
            queries[q] = scaled ? shifted[q] : query;
            weights[q] = to_scores[q] = scores[q];
            to_values[q] = found(kept_row, head + q, page).values();
        }
        Weighing<T, COUNT>{queries, PAGE, dim}.run(static_cast<const Element*>(p.keys.data) + at * dim, count, to_scores);
        for (int q = 0; q < COUNT; ++q) {
            for (int64_t t = 0; t < count; ++t)
                scores[q][t] *= scaled ? unshift[q] * scale_at(p.keys, at + t) * p.scale : p.scale;
            soften(scores[q], count, found(kept_row, head + q, page));
        }
        float most = __FLT_MIN__;  // of the values' scales, its power of two, by which the weights take them divided
        for (int64_t t = 0; scaled && t < count; ++t) most = largest(most, scale_at(p.values, at + t));
        most = bits_as<float>(bits_as<uint32_t>(most) & EXPONENT);
        for (int64_t t = 0; scaled && t < count; ++t) {
            const float scale = scale_at(p.values, at + t) / most * power_of_two(MISSING<E4M3>);
            for (int q = 0; q < COUNT; ++q) scores[q][t] *= scale;
        }
        Weighing<T, COUNT>{weights, dim, count}.run(static_cast<const Element*>(p.values.data) + at * dim, dim, to_values);
        for (int q = 0; scaled && q < COUNT; ++q)
            for (int64_t d = 0; d < dim; ++d) to_values[q][d] *= most;
    }

    // What shifted codes lack goes into the query, as far as FP32 reaches; the rest is returned. What that pushes out at
    // FP32's lower end is 2^-120 of the largest number, and nothing to a score.
    static float shift_query(const float* query, int64_t dim, float* shifted) {
        const int shift = shift_of(query, dim);
        for (int64_t d = 0; d < dim; ++d) shifted[d] = query[d] * power_of_two(shift);
        return power_of_two(MISSING<E4M3> - shift);
    }

    // Scores become exp(score - maximum).
    static void soften(float* scores, int64_t count, Found to) {
        float maximum = scores[0];
        for (int64_t t = 1; t < count; ++t) maximum = largest(maximum, scores[t]);
        f32v sum = {};
        for (int64_t t = 0; t < count; t += LANES) {
            const int64_t some = least_of<int64_t>(LANES, count - t);
            store_f32(scores + t, exponential(load_f32(scores + t, some) - all(maximum)), some);
            sum = sum + load_f32(scores + t, some);
        }
        to.maximum() = maximum;
        to.sum() = sum_of_lanes(sum);
    }

    template <class T>
    void look_at_group(int64_t row, int64_t first_head, int64_t page, int64_t kept_row) const {
        int64_t q = 0;
        for (; q + 3 <= group; q += 3) look<T, 3>(row, first_head + q, page, kept_row);
        if (q + 2 == group) look<T, 2>(row, first_head + q, page, kept_row);
        if (q + 1 == group) look<T, 1>(row, first_head + q, page, kept_row);
    }

    void join(int64_t row, int64_t head, int64_t kept_row) const {
        const int64_t dim = p.cache.head_dim, count = pages_of(row);
        float* out = p.out + (row * p.heads + head) * dim;
        float maximum = found(kept_row, head, 0).maximum(), sum = 0;
        for (int64_t page = 1; page < count; ++page) maximum = largest(maximum, found(kept_row, head, page).maximum());
        std::memset(out, 0, dim * sizeof(float));
        for (int64_t page = 0; page < count; ++page) {
            const Found own = found(kept_row, head, page);
            const float weight = exponential(own.maximum() - maximum);
            sum += own.sum() * weight;
            for (int64_t d = 0; d < dim; ++d) out[d] += own.values()[d] * weight;
        }
        for (int64_t d = 0; d < dim; ++d) out[d] /= sum;
    }

    // Rows [first, last); pages outermost, so that those who share one read it from the cache of the processor.
    template <class T>
    void run(int64_t first, int64_t last) const {
        const int64_t rows = last - first, kv_heads = p.cache.kv_heads;
        parallel_for(pages * kv_heads * rows, 4, [&](int64_t begin, int64_t end) {
            for (int64_t item = begin; item < end; ++item) {
                const int64_t row = item % rows, head = item / rows % kv_heads * group, page = item / rows / kv_heads;
                if (page >= pages_of(first + row)) continue;
                look_at_group<T>(first + row, head, page, row);
            }
        });
        parallel_for(rows * p.heads, 16, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) join(first + i / p.heads, i % p.heads, i / p.heads);
        });
    }
};

void attend(const AttentionProblem& p) {
    static thread_local Scratch partial;
    if (p.rows.count == 0 || p.heads == 0) return;
    Attention work{p};
    for (int64_t row = 0; row < p.rows.count; ++row) work.pages = largest(work.pages, work.pages_of(row));
    const int64_t a_row = p.heads * work.pages * (2 + p.cache.head_dim), at_once = largest<int64_t>(1, KEPT_AT_ONCE / a_row);
    work.kept = partial.floats(least_of(at_once, p.rows.count) * a_row);
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
