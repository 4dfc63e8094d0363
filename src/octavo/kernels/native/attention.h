// Attention over cached keys and values, a few queries at a time, as in generation.
//
// The work is cut into pages of one key head for one row, whoever does them: scores, their maximum, the sum of
// exp(score - maximum) and the values weighted with it. What the pages of a row found is then put together in their
// order. A row's result depends on its own sequence alone.
//
// Reference: Dao et al., "FlashAttention", arXiv 2205.14135, section 3.1 (softmax in parts).
#pragma once

#include "few_rows.h"

namespace octavo {
namespace {

constexpr int64_t ROWS_AT_ONCE = 64;    // rows whose partial results are kept

// e^x, within 2 units in the last place; what would leave FP32 stops short of its ends.
inline f32v exponential(f32v x) {
    const f32v low = all(-87.0f), high = all(88.0f), magic = all(12582912.0f);  // 1.5 * 2^23: whole numbers are its ulps
    x = x < low ? low : x > high ? high : x;
    const f32v shifted = fused(x, all(1.44269504f), magic), n = shifted - magic;
    const f32v r = fused(n, all(-1.42860677e-6f), fused(n, all(-0.693145752f), x));  // ln 2 in two parts
    constexpr float inverse_factorials[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    f32v p = all(1.0f / 5040);
    for (float c : inverse_factorials) p = fused(p, r, all(c));
    return p * bits_as<f32v>((bits_as<u32v>(shifted) << 23) + 0x3f800000);
}

inline float exponential(float x) { return exponential(all(x))[0]; }

// What a query found in one page.
struct Found {
    float maximum, sum;
    float values[MAX_HEAD_DIM];
};

// How queries meet keys and values of one kind. `queries` and `out` are COUNT rows of head_dim numbers.

// Numbers in high precision.
template <class T, int COUNT>
struct PageOf {
    const KvCache& cache;

    void score(const float* const* queries, const Pages& keys, int64_t at, int64_t count, float (*scores)[PAGE]) const {
        const T* key = static_cast<const T*>(keys.data) + at * cache.head_dim;
        for (int64_t t = 0; t < count; ++t, key += cache.head_dim) {
            f32v sums[COUNT] = {};
            for (int64_t d = 0; d < cache.head_dim; d += LANES) {
                const int64_t some = least_of<int64_t>(LANES, cache.head_dim - d);
                const f32v own = load_f32(key + d, some);
                for (int q = 0; q < COUNT; ++q) sums[q] = fused(own, load_f32(queries[q] + d, some), sums[q]);
            }
            for (int q = 0; q < COUNT; ++q) scores[q][t] = sum_of_lanes(sums[q]);
        }
    }

    void weigh(const float (*weights)[PAGE], const Pages& values, int64_t at, int64_t count, float* const* out) const {
        for (int64_t d = 0; d < cache.head_dim; d += LANES) {
            const int64_t some = least_of<int64_t>(LANES, cache.head_dim - d);
            const T* value = static_cast<const T*>(values.data) + at * cache.head_dim + d;
            f32v sums[COUNT] = {};
            for (int64_t t = 0; t < count; ++t, value += cache.head_dim) {
                const f32v own = load_f32(value, some);
                for (int q = 0; q < COUNT; ++q) sums[q] = fused(own, all(weights[q][t]), sums[q]);
            }
            for (int q = 0; q < COUNT; ++q) store_f32(out[q] + d, sums[q], some);
        }
    }
};

// E8M0: 2^(byte - 127).
inline float power_of_e8m0(int byte) { return byte ? bits_as<float>(uint32_t(byte) << 23) : 0x1p-127f; }

// Codes with a scale for every position.
template <int COUNT>
struct PageOf<E4M3, COUNT> {
    const KvCache& cache;

    void score(const float* const* queries, const Pages& keys, int64_t at, int64_t count, float (*scores)[PAGE]) const {
        float shifted[COUNT][MAX_HEAD_DIM + STEP];
        Row rows[COUNT];
        for (int q = 0; q < COUNT; ++q) rows[q] = shift_row<E4M3>(queries[q], cache.head_dim, cache.head_dim, shifted[q]);
        const uint8_t* codes = static_cast<const uint8_t*>(keys.data) + at * cache.head_dim;
        for (int64_t t = 0; t < count; ++t, codes += cache.head_dim) {
            float sums[COUNT];
            const bool special = dot<E4M3, COUNT>(rows, 0, codes, cache.head_dim, sums);
            const float scale = power_of_e8m0(keys.scale[at + t]);
            for (int q = 0; q < COUNT; ++q) {
                const bool plainly = special || rows[q].unshift == 0;
                const float sum = plainly ? plain_dot<E4M3>(queries[q], codes, cache.head_dim) : sums[q] * rows[q].unshift;
                scores[q][t] = sum * scale;
            }
        }
    }

    // Weights take the scales, less the largest of them, and what the shifted codes lack.
    void weigh(const float (*weights)[PAGE], const Pages& values, int64_t at, int64_t count, float* const* out) const {
        const uint8_t* scales = values.scale + at;
        int most = 1;
        for (int64_t t = 0; t < count; ++t) most = largest<int>(most, scales[t]);
        float scaled[COUNT][PAGE];
        for (int64_t t = 0; t < count; ++t)
            for (int q = 0; q < COUNT; ++q)
                scaled[q][t] = weights[q][t] * power_of_two(largest(scales[t] - most, -126)) * power_of_two(MISSING<E4M3>);
        const uint8_t* codes = static_cast<const uint8_t*>(values.data) + at * cache.head_dim;
        for (int64_t d = 0; d < cache.head_dim; d += STEP) {
            const int64_t some = least_of<int64_t>(STEP, cache.head_dim - d);
            f32v sums[COUNT][4] = {};
            u8v seen = {};
            for (int64_t t = 0; t < count; ++t) add<false>(codes + t * cache.head_dim + d, some, scaled, t, sums, seen);
            if (any(seen >= uint8_t(E4M3::inf_code))) {
                std::memset(sums, 0, sizeof sums);
                for (int64_t t = 0; t < count; ++t) add<true>(codes + t * cache.head_dim + d, some, scaled, t, sums, seen);
            }
            const f32v scale = all(power_of_e8m0(most));
            for (int q = 0; q < COUNT; ++q) {
                float sorted[STEP];
                for (int byte = 0; byte < 4; ++byte)
                    for (int lane = 0; lane < LANES; ++lane) sorted[4 * lane + byte] = (sums[q][byte] * scale)[lane];
                std::memcpy(out[q] + d, sorted, some * sizeof(float));
            }
        }
    }

private:
    template <bool SPECIAL>
    static void add(const uint8_t* codes, int64_t count, const float (*weights)[PAGE], int64_t t, f32v (*sums)[4], u8v& seen) {
        uint8_t some[STEP] = {};
        if (count < STEP) {
            std::memcpy(some, codes, count);
            codes = some;
        }
        const Bytes<E4M3> bytes = SPECIAL ? bytes_in_lanes<E4M3>(codes) : shifted_codes<E4M3>(load<u8v>(codes));
        seen = largest_byte(seen, load<u8v>(codes) & uint8_t(0x7f));
        for (int q = 0; q < COUNT; ++q)
            for (int byte = 0; byte < 4; ++byte) sums[q][byte] = fused(bytes.of[byte], all(weights[q][t]), sums[q][byte]);
    }
};

struct Attention {
    const AttentionProblem& p;
    const int64_t group = p.heads / p.cache.kv_heads;  // query heads that share a key head
    int64_t pages = 0;                                 // of the row that has most
    Found* found = nullptr;                            // [row, head, page]

    int64_t pages_of(int64_t row) const { return p.rows.position[row] / PAGE + 1; }

    template <class T, int COUNT>
    void look(int64_t row, int64_t head, int64_t page, Found* to) const {
        const KvCache& cache = p.cache;
        const int64_t number = cache.table[p.rows.sequence[row] * cache.table_stride + page];
        const int64_t at = (number * cache.kv_heads + head / group) * PAGE;
        const int64_t count = least_of(PAGE, p.rows.position[row] + 1 - page * PAGE);
        const PageOf<T, COUNT> own{cache};
        float scores[COUNT][PAGE];
        const float* queries[COUNT];
        float* values[COUNT];
        for (int q = 0; q < COUNT; ++q) {
            queries[q] = p.queries + row * p.query_stride + (head + q) * cache.head_dim;
            values[q] = to[q * pages].values;
        }
        own.score(queries, p.keys, at, count, scores);
        for (int q = 0; q < COUNT; ++q) soften(scores[q], count, to[q * pages]);
        own.weigh(scores, p.values, at, count, values);
    }

    // Scores become exp(score - maximum).
    void soften(float* scores, int64_t count, Found& to) const {
        for (int64_t t = 0; t < count; ++t) scores[t] *= p.scale;
        to.maximum = scores[0];
        for (int64_t t = 1; t < count; ++t) to.maximum = largest(to.maximum, scores[t]);
        f32v sum = {};
        for (int64_t t = 0; t < count; t += LANES) {
            const int64_t some = least_of<int64_t>(LANES, count - t);
            store_f32(scores + t, exponential(load_f32(scores + t, some) - all(to.maximum)), some);
            sum = sum + load_f32(scores + t, some);
        }
        to.sum = sum_of_lanes(sum);
    }

    template <class T>
    void look_at_group(int64_t row, int64_t first_head, int64_t page, Found* to) const {
        int64_t q = 0;
        for (; q + 3 <= group; q += 3) look<T, 3>(row, first_head + q, page, to + q * pages);
        if (q + 2 == group) look<T, 2>(row, first_head + q, page, to + q * pages);
        if (q + 1 == group) look<T, 1>(row, first_head + q, page, to + q * pages);
    }

    void join(int64_t row, int64_t head, const Found* of) const {
        const int64_t dim = p.cache.head_dim;
        float* out = p.out + (row * p.heads + head) * dim;
        float maximum = of[0].maximum, sum = 0;
        for (int64_t page = 1; page < pages_of(row); ++page) maximum = largest(maximum, of[page].maximum);
        for (int64_t page = 0; page < pages_of(row); ++page) {
            const float weight = exponential(of[page].maximum - maximum);
            sum += of[page].sum * weight;
            for (int64_t d = 0; d < dim; ++d) out[d] = (page ? out[d] : 0.0f) + of[page].values[d] * weight;
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
                look_at_group<T>(first + row, head, page, found + (row * p.heads + head) * pages + page);
            }
        });
        parallel_for(rows * p.heads, 16, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) join(first + i / p.heads, i % p.heads, found + i * pages);
        });
    }
};

void attend(const AttentionProblem& p) {
    static thread_local Scratch partial;
    for (int64_t first = 0; first < p.rows.count; first += ROWS_AT_ONCE) {
        Attention work{p};
        const int64_t last = least_of(first + ROWS_AT_ONCE, p.rows.count);
        for (int64_t row = first; row < last; ++row) work.pages = largest(work.pages, work.pages_of(row));
        const int64_t floats = sizeof(Found) / sizeof(float);
        work.found = reinterpret_cast<Found*>(partial.floats((last - first) * p.heads * work.pages * floats));
        if (p.cache.element == Element::e4m3) work.run<E4M3>(first, last);
        else if (p.cache.element == Element::bf16) work.run<Bf16>(first, last);
        else work.run<float>(first, last);
    }
    partial.trim();
}

}  // namespace
}  // namespace octavo
