// A Llama-style decoder for the next positions of some sequences, in one call.
//
//   h += out(attention(rope(qkv(norm(h)))));   h += mlp(norm(h));   logits = head(norm(h))
//   mlp(x) = down(silu(gate(x)) · up(x)), or Σ share · expert(x) over the experts of the row (routing.h), each such an MLP,
//            and one that every row goes to, by the share sigmoid(x · shared_gate)
//
// hidden [rows, hidden] FP32, in and out; all intermediates [rows, ...] FP32, dense, in one scratch buffer a thread keeps;
// weights [N, K] row-major (kernels.h). Keys and values of all rows are written to the cache before any row attends, so that
// the rows of a prompt see one another.
//
// One native call, because a GEMM called from Python costs 20 to 50 µs more, and a token of SmolLM2-135M has 121 of them in
// some 10 ms. A row's result does not depend on the other rows (linear(); tests/unit/inference/test_read_rows.py), so neither
// does an answer. Definition: inference/reference.py; checked in tests/native/decoder.cpp against a bound on FP32's rounding
// errors.
//
// Experts run one after the other, ascending, each for all of its rows at once, which are gathered first. A row's outputs are
// added in that order, whatever the other rows are.
#pragma once

#include "attention.h"
#include "cast_sums.h"
#include "gemm.h"
#include "integers.h"
#include "routing.h"
#include "scale_search.h"

namespace octavo {
namespace {

// y = x / sqrt(mean(x²) + eps) · weight, for one row of n (RMSNorm, arXiv 1910.07467, equation 4).
inline void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* y) {
    f32v squares = {};
    for (int64_t i = 0; i < n; i += LANES) {
        const f32v own = load_f32(x + i, least_of<int64_t>(LANES, n - i));
        squares = fused(own, own, squares);
    }
    const f32v factor = all(1.0f / __builtin_sqrtf(sum_of_lanes(squares) / float(n) + eps));
    for (int64_t i = 0; i < n; i += LANES) {
        const int64_t some = least_of<int64_t>(LANES, n - i);
        store_f32(y + i, load_f32(x + i, some) * factor * load_f32(weight + i, some), some);
    }
}

// y = silu(gate) · up for n numbers (SwiGLU, arXiv 2002.05202, equation 6).
inline void silu_times(const float* gate, const float* up, int64_t n, float* y) {
    for (int64_t i = 0; i < n; i += LANES) {
        const int64_t some = least_of<int64_t>(LANES, n - i);
        const f32v own = load_f32(gate + i, some);
        // Below -87, e^-x leaves FP32 and silu is above -2e-36.
        const f32v silu = own < -87.0f ? f32v{} : own / (1.0f + exponential(-own));
        store_f32(y + i, silu * load_f32(up + i, some), some);
    }
}

// Rotary embedding: rotates the pairs (x[i], x[i + n / 2]) by the angles of their position (RoPE, arXiv 2104.09864, equation
// 34, in Hugging Face's order of dimensions). y may be x.
inline void rotate(const float* x, const float* cos, const float* sin, int64_t n, float* y) {
    for (int64_t i = 0; i < n / 2; ++i) {
        const float low = x[i], high = x[i + n / 2];
        y[i] = low * cos[i] - high * sin[i];
        y[i + n / 2] = high * cos[i + n / 2] + low * sin[i + n / 2];
    }
}

struct Decoder {
    const DecoderProblem& p;
    const int64_t rows = p.rows.count, dim = p.cache.head_dim, kv_heads = p.cache.kv_heads, kv_size = kv_heads * dim;
    const int64_t query_size = p.heads * dim, qkv_size = query_size + 2 * kv_size;
    const int64_t experts = most([](const DecoderLayer& layer) { return layer.experts; });  // of any layer
    const int64_t width = most([](const DecoderLayer& layer) {                              // inside any MLP
        int64_t widest = 0;
        for (int64_t j = 0; j < layer.mlp_count; ++j) widest = largest(widest, layer.mlps[j].width);
        return widest;
    });
    float *normed = nullptr, *qkv = nullptr, *new_kv = nullptr, *scales = nullptr, *attended = nullptr, *gate_up = nullptr,
          *gated = nullptr;
    float *logits = nullptr, *gathered = nullptr, *mixed = nullptr;  // of experts
    std::vector<Visit> visits{};
    uint8_t* codes = nullptr;
    float *input_codes = nullptr, *input_scales = nullptr;  // of the input of a weight that wants it cast
    Pages keys{}, values{};     // of the layer

    template <class Of>
    int64_t most(const Of& of) const {
        int64_t found = 0;
        for (int64_t i = 0; i < p.layer_count; ++i) found = largest(found, int64_t{of(p.layers[i])});
        return found;
    }

    // Lays out all intermediates in `memory`, each at a multiple of 16 numbers (64 bytes); returns how many numbers they take.
    // Called with null first, to size the buffer.
    int64_t assign_memory(float* memory) {
        int64_t taken = 0;
        auto take = [&](int64_t a_row) {
            float* own = memory ? memory + taken : nullptr;
            taken += (rows * a_row + 15) / 16 * 16;
            return own;
        };
        normed = take(p.hidden_size);
        qkv = take(qkv_size);
        new_kv = take(2 * kv_size);  // keys and values to be stored, [2][row][head][dim]
        scales = take(4 * kv_heads);
        codes = reinterpret_cast<uint8_t*>(take((2 * kv_size + 3) / 4));
        attended = take(query_size);
        gate_up = take(2 * width);
        gated = take(width);
        input_codes = take(padded_integers(largest(largest(p.hidden_size, width), query_size)) / 2);
        input_scales = take(2 * most_blocks());
        logits = take(experts);
        gathered = take(experts ? p.hidden_size : 0);
        mixed = take(experts ? p.hidden_size : 0);
        return taken;
    }

    // Scales of a row of the input of any weight.
    int64_t most_blocks() const {
        int64_t blocks = 1;
        const auto count = [&](const Weight& weight, int64_t k) { blocks = largest(blocks, blocks_of(weight, k)); };
        for (int64_t i = 0; i < p.layer_count; ++i) {
            count(p.layers[i].qkv, p.hidden_size);
            count(p.layers[i].out, query_size);
            for (int64_t j = 0; j < p.layers[i].mlp_count; ++j) {
                count(p.layers[i].mlps[j].gate_up, p.hidden_size);
                count(p.layers[i].mlps[j].down, p.layers[i].mlps[j].width);
            }
        }
        count(p.head, p.hidden_size);
        return blocks;
    }

    static int64_t blocks_of(const Weight& weight, int64_t k) { return weight.block ? (k + weight.block - 1) / weight.block : 1; }

    // each(row) in parallel; parts have at least 8,192 elements.
    template <class Each>
    void for_rows(int64_t elements, const Each& each) const { for_rows(rows, elements, each); }

    template <class Each>
    void for_rows(int64_t count, int64_t elements, const Each& each) const {
        parallel_for(count, largest<int64_t>(1, 8192 / elements), [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; ++row) each(row);
        });
    }

    void norm(const float* weight) const {
        for_rows(p.hidden_size, [&](int64_t row) {
            rms_norm(p.hidden + row * p.hidden_size, weight, p.hidden_size, p.norm_eps, normed + row * p.hidden_size);
        });
    }

    void linear(const float* x, int64_t k, const Weight& weight, float* y) const { linear(x, rows, k, weight, y); }

    // y = cast(x) · weightᵀ + bias for `count` rows of k. Few and many rows have the same order of additions, and gemm() is
    // taken by the weight's layout alone, so a row's bits do not depend on `count`.
    void linear(const float* x, int64_t count, int64_t k, const Weight& weight, float* y) const {
        const Operand input{x, Element::f32, k, 1, nullptr, false};
        GemmProblem whole{input, weight.operand, count, weight.rows, k, weight.block, weight.bias, y, Dtype::f32};
        if (weight.operand.element == Element::int8) return linear_int8(whole);
        if (weight.input != InputCast::none) whole.a = cast(x, count, k, weight);
        if (!has_words_in_rows(weight.operand)) return gemm(whole);
        if (use_many_rows(whole)) return many_rows(whole);
        for (int64_t row = 0; row < count; row += MAX_FEW_ROWS) few_rows(some_rows(whole, row));
    }

    // Up to MAX_FEW_ROWS rows of a problem, from `row` on.
    static GemmProblem some_rows(const GemmProblem& whole, int64_t row) {
        GemmProblem some = whole;
        const Operand& a = whole.a;
        some.a.data = static_cast<const uint8_t*>(a.data) + row * a.row_stride * (a.element == Element::f32 ? sizeof(float) : 1);
        some.a.scale = a.scale_per_row ? a.scale + row * (whole.block ? (whole.k + whole.block - 1) / whole.block : 1) : a.scale;
        some.out = static_cast<float*>(whole.out) + row * whole.n;
        some.m = least_of(MAX_FEW_ROWS, whole.m - row);
        return some;
    }

    // Casts an input to E4M3: a dynamic scale a row, or a block of it if the weight has blocks, or the weight's static one,
    // beyond which elements saturate and are counted.
    Operand cast(const float* x, int64_t count, int64_t k, const Weight& weight) const {
        const bool fixed = weight.input == InputCast::e4m3_static;
        uint8_t* to = reinterpret_cast<uint8_t*>(input_codes);
        Counts counts{};
        float* amax = input_scales + count * blocks_of(weight, k);
        quantize({{x, Dtype::f32, count, k, k}, Format::e4m3, fixed ? count : 1, weight.block ? weight.block : k, true,
                  p.input_rule, nullptr, false, fixed ? weight.input_scale : nullptr, to, nullptr,
                  fixed ? nullptr : input_scales, amax, false, &counts});
        if (fixed) note_saturation(x, count * k, *weight.input_scale, *amax);
        return {to, Element::e4m3, k, 1, fixed ? weight.input_scale : input_scales, !fixed};
    }

    void note_saturation(const float* x, int64_t n, float scale, float amax) const {
        const uint32_t limit = limit_bits<E4M3>(scale);
        p.saturation->elements += n;
        if (f32_bits(amax) > limit) p.saturation->saturated += beyond(x, n, limit);
    }

    void linear_int8(const GemmProblem& whole) const {
        const float* x = static_cast<const float*>(whole.a.data);
        int16_t* to = reinterpret_cast<int16_t*>(input_codes);
        parallel_for(whole.m, largest<int64_t>(1, 8192 / whole.k), [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; ++row)
                quantize_row_int8(x + row * whole.k, whole.k, p.integer_rule, to + row * padded_integers(whole.k), input_scales + row);
        });
        integer_rows(whole, to, input_scales);
    }

    void add_to_hidden(const float* x) const {
        for_rows(p.hidden_size, [&](int64_t row) {
            for (int64_t i = row * p.hidden_size; i < (row + 1) * p.hidden_size; ++i) p.hidden[i] += x[i];
        });
    }

    // Norms the vectors of `size` that n numbers consist of, in place.
    void norm_each(float* x, int64_t n, const float* weight, int64_t size) const {
        for (int64_t i = 0; size && i < n; i += size) rms_norm(x + i, weight, size, p.norm_eps, x + i);
    }

    // Rotates queries in place and keys into new_kv, keys less their head's mean. The mean adds the same number to all scores
    // of a query, which softmax does not see, so it is never added back; what is left rounds finer. Values are copied beside.
    void rotate_queries_and_keys(const DecoderLayer& layer) const {
        for_rows(qkv_size, [&](int64_t row) {
            float* row_qkv = qkv + row * qkv_size;
            norm_each(row_qkv, query_size, layer.query_norm, p.query_norm_size);
            norm_each(row_qkv + query_size, kv_size, layer.key_norm, p.key_norm_size);
            const float *cos = p.cos + p.rows.position[row] * dim, *sin = p.sin + p.rows.position[row] * dim;
            for (int64_t head = 0; head < p.heads; ++head) rotate(row_qkv + head * dim, cos, sin, dim, row_qkv + head * dim);
            float *keys = new_kv + row * kv_size, *values = new_kv + (rows + row) * kv_size;
            for (int64_t head = 0; head < kv_heads; ++head)
                rotate(row_qkv + query_size + head * dim, cos, sin, dim, keys + head * dim);
            for (int64_t i = 0; i < kv_size; ++i) keys[i] -= layer.key_mean[i];
            std::memcpy(values, row_qkv + query_size + kv_size, kv_size * sizeof(float));
        });
    }

    // Where a vector goes in the pages: index of its scale, of its first number, and the distance of its numbers (PAGE for
    // keys, 1 for values).
    struct Place {
        int64_t vector, first, step;
    };

    Place place(int64_t i) const {  // vector i of new_kv: keys of all rows, then values
        const int64_t row = i / kv_heads % rows, position = p.rows.position[row];
        const int64_t page = p.cache.table[p.rows.sequence[row] * p.cache.table_stride + position / PAGE];
        const int64_t head = page * kv_heads + i % kv_heads, vector = head * PAGE + position % PAGE;
        if (i < rows * kv_heads) return {vector, head * PAGE * dim + position % PAGE, PAGE};
        return {vector, vector * dim, 1};
    }

    template <class T>
    void store_numbers() const {
        for (int64_t i = 0; i < 2 * rows * kv_heads; ++i) {
            const Place to = place(i);
            T* data = static_cast<T*>((i < rows * kv_heads ? keys : values).data);
            for (int64_t d = 0; d < dim; ++d) store_f32(data + to.first + d * to.step, all(new_kv[i * dim + d]), 1);
        }
    }

    // Searches a scale for each vector (scale_search.h), casts, and scatters codes and BF16 scales.
    void store_codes() const {
        const int64_t vectors = 2 * rows * kv_heads;
        parallel_for(vectors, largest<int64_t>(1, PARALLEL_ELEMENTS / (STEPS * dim)), [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; ++i) scales[i] = searched_scale(new_kv + i * dim, dim);
        });
        Counts counts{};
        quantize({{new_kv, Dtype::f32, vectors, dim, dim}, Format::e4m3, 1, dim, true, {}, nullptr, false, scales, codes,
                  nullptr, nullptr, scales + vectors, false, &counts});
        for (int64_t i = 0; i < vectors; ++i) {
            const Place to = place(i);
            const Pages& pages = i < rows * kv_heads ? keys : values;
            uint8_t* data = static_cast<uint8_t*>(pages.data);
            for (int64_t d = 0; d < dim; ++d) data[to.first + d * to.step] = codes[i * dim + d];
            pages.scale[to.vector] = uint16_t(f32_bits(scales[i]) >> 16);  // exact: five significant bits
        }
    }

    void store_new_kv() const {
        if (p.cache.element == Element::e4m3) store_codes();
        else if (p.cache.element == Element::bf16) store_numbers<Bf16>();
        else store_numbers<float>();
    }

    // The pages of layer `layer`, which follow those of the layers before.
    Pages of_layer(const Pages& first, int64_t layer) const {
        const int64_t vectors = layer * p.page_count * kv_heads * PAGE;
        const int64_t size = p.cache.element == Element::e4m3 ? 1 : p.cache.element == Element::bf16 ? 2 : 4;
        return {static_cast<uint8_t*>(first.data) + vectors * dim * size, first.scale ? first.scale + vectors : nullptr};
    }

    void run(int64_t index) {
        const DecoderLayer& layer = p.layers[index];
        keys = of_layer(p.keys, index);
        values = of_layer(p.values, index);
        norm(layer.attention_norm);
        linear(normed, p.hidden_size, layer.qkv, qkv);
        rotate_queries_and_keys(layer);
        store_new_kv();
        attend({qkv, qkv_size, p.heads, p.cache, keys, values, p.rows, p.attention_scale, attended});
        linear(attended, query_size, layer.out, normed);
        add_to_hidden(normed);
        norm(layer.mlp_norm);
        if (layer.experts) mix(layer);
        else mlp(normed, rows, layer.mlps[0], normed);
        add_to_hidden(layer.experts ? mixed : normed);
    }

    // y = down(silu(gate(x)) · up(x)) for `count` rows; y may be x.
    void mlp(const float* x, int64_t count, const Mlp& own, float* y) const {
        linear(x, count, p.hidden_size, own.gate_up, gate_up);
        for_rows(count, own.width, [&](int64_t row) {
            const float* gate = gate_up + row * 2 * own.width;
            silu_times(gate, gate + own.width, own.width, gated + row * own.width);
        });
        linear(gated, count, own.width, own.down, y);
    }

    // Fills `visits`, sorted by expert and then row.
    void route(const DecoderLayer& layer) {
        const int64_t size = p.hidden_size, count = layer.experts;
        for_rows(rows * count, size, [&](int64_t i) {
            logits[i] = dot_f32(normed + i / count * size, layer.router + i % count * size, size);
        });
        visits.resize(rows * p.top_k);
        for_rows(count, [&](int64_t row) {
            softmax(logits + row * count, count);
            choose(logits + row * count, count, p.top_k, p.normalize_shares, row, visits.data() + row * p.top_k);
        });
        std::sort(visits.begin(), visits.end(), [](const Visit& a, const Visit& b) {
            return a.expert < b.expert || (a.expert == b.expert && a.row < b.row);
        });
    }

    // mixed = Σ share · expert(normed) over each row's experts, then the one that every row goes to.
    void mix(const DecoderLayer& layer) {
        const int64_t size = p.hidden_size;
        route(layer);
        std::memset(mixed, 0, rows * size * sizeof(float));
        for (size_t first = 0, last; first < visits.size(); first = last) {
            for (last = first; last < visits.size() && visits[last].expert == visits[first].expert; ++last)
                std::memcpy(gathered + (last - first) * size, normed + visits[last].row * size, size * sizeof(float));
            mlp(gathered, last - first, layer.mlps[visits[first].expert], gathered);
            for (size_t i = first; i < last; ++i)
                for (int64_t d = 0; d < size; ++d)
                    mixed[visits[i].row * size + d] += visits[i].share * gathered[(i - first) * size + d];
        }
        if (layer.shared_gate) add_shared(layer);
    }

    // mixed += sigmoid(normed · gate) · shared(normed)
    void add_shared(const DecoderLayer& layer) {
        const int64_t size = p.hidden_size;
        mlp(normed, rows, layer.mlps[layer.experts], gathered);
        for_rows(size, [&](int64_t row) {
            const float share = 1.0f / (1.0f + exponential(-dot_f32(normed + row * size, layer.shared_gate, size)));
            for (int64_t d = 0; d < size; ++d) mixed[row * size + d] += share * gathered[row * size + d];
        });
    }

    // Last norm and head, for the rows that get logits: of a prompt only the last needs the largest GEMM.
    void finish() const {
        const int64_t first = rows - p.logit_rows;
        norm(p.norm);
        linear(normed + first * p.hidden_size, rows - first, p.hidden_size, p.head, p.logits);
    }
};

void decode(const DecoderProblem& p) {
    static thread_local Scratch between;
    Decoder work{p};
    work.assign_memory(between.floats(work.assign_memory(nullptr)));
    for (int64_t i = 0; i < p.layer_count; ++i) work.run(i);
    work.finish();
    between.trim();
}

}  // namespace
}  // namespace octavo
