// Trials of decode: a decoder in FP64, and how far FP32 may be from it. What the kernel wrote to the cache is compared with
// the keys and values that belong there, and is then what the definition attends to: rounding it is a step of its own.
#include <algorithm>
#include <utility>

#include "cache.h"
#include "near.h"

namespace trial {
namespace {

using definition::Near;
using octavo::Element;
typedef std::vector<Near> Numbers;

std::vector<float> any_numbers(int64_t count, double low, double high, Random& random) {
    std::vector<float> numbers(count);
    for (float& number : numbers) number = static_cast<float>(low + (high - low) * random.uniform());
    return numbers;
}

// y = x · weightᵀ + bias: codes with scales, for every row or for blocks of its columns, or numbers without.
class Linear {
public:
    Linear(int64_t rows, int64_t k, Random& random)
        : rows_(rows), k_(k), block_(random.one_in(3) ? 32 : 0), bias_(any_numbers(random.one_in(3) ? rows : 0, -1, 1, random)) {
        constexpr Element elements[] = {Element::e4m3, Element::e4m3, Element::e5m2, Element::bf16, Element::f32};
        element_ = random.any_of(elements);
        if (!is_code()) block_ = 0;
        memory_.resize(rows * k * (is_code() ? 1 : bytes_of(dtype())));
        const double size = 3.0 / double(k);  // so that an error does not grow on its way, whatever its signs
        if (is_code()) scale_ = any_numbers(rows * blocks(), 0x1p-8 * size, 0x1p-7 * size, random);
        for (int64_t i = 0; i < rows * k; ++i) {
            const double number = random.uniform() * 2 - 1;
            if (is_code()) memory_[i] = uint8_t(definition::encode(number * 0x1p7, format(), true));
            else put(memory_.data(), dtype(), i, number * size);
        }
    }

    octavo::Weight weight() const {
        const octavo::Operand operand{memory_.data(), element_, k_, 1, scale_.empty() ? nullptr : scale_.data(), !scale_.empty()};
        return {operand, rows_, block_, bias_.empty() ? nullptr : bias_.data()};
    }

    Numbers operator()(const Numbers& x) const {
        Numbers y;
        for (int64_t row = 0; row < rows_; ++row) {
            definition::Sum sum;
            for (int64_t i = 0; i < k_; ++i) sum.add(x[i] * at(row, i));
            const Near scaled = rounded(sum.total());
            y.push_back(bias_.empty() ? scaled : scaled + double(bias_[row]));
        }
        return y;
    }

private:
    bool is_code() const { return element_ == Element::e4m3 || element_ == Element::e5m2; }
    const definition::Small& format() const { return small(octavo::Format(int(element_))); }
    octavo::Dtype dtype() const { return octavo::Dtype(int(element_) - 2); }
    int64_t blocks() const { return block_ ? (k_ + block_ - 1) / block_ : 1; }

    double at(int64_t row, int64_t i) const {
        if (!is_code()) return get(memory_.data(), dtype(), row * k_ + i);
        return definition::decode(memory_[row * k_ + i], format()) * scale_[row * blocks() + (block_ ? i / block_ : 0)];
    }

    int64_t rows_, k_, block_;
    Element element_;
    std::vector<uint8_t> memory_;
    std::vector<float> scale_, bias_;
};

struct Sizes {
    int64_t hidden, intermediate, heads, kv_heads, dim;
    int64_t query_norm, key_norm;  // elements normed together; 0: no norms
    int64_t experts, top_k;        // 0: one MLP
    bool normalize_shares;
    int64_t shared;                // width of the expert that every row goes to; 0: none
};

// The gate's part of numbers comes first.
Numbers gated(const Numbers& gate_up) {
    Numbers y;
    for (size_t i = 0; i < gate_up.size() / 2; ++i) {
        const Near gate = gate_up[i];
        y.push_back(gate / (Near(1) + exponential(-gate)) * gate_up[gate_up.size() / 2 + i]);
    }
    return y;
}

struct Mlp {
    Mlp(const Sizes& s, int64_t width, Random& random)
        : gate_up(2 * width, s.hidden, random), down(s.hidden, width, random), width(width) {}
    octavo::Mlp mlp() const { return {gate_up.weight(), down.weight(), width}; }
    Numbers operator()(const Numbers& x) const { return down(gated(gate_up(x))); }

    Linear gate_up, down;
    int64_t width;
};

struct Layer {
    Layer(const Sizes& s, Random& random) : Layer(s, random.one_in(4) ? 0 : s.experts, random) {}

    Layer(const Sizes& s, int64_t experts, Random& random)
        : experts(experts), attention_norm(any_numbers(s.hidden, 0.5, 1.5, random)), mlp_norm(any_numbers(s.hidden, 0.5, 1.5, random)),
          key_mean(any_numbers(s.kv_heads * s.dim, -1, 1, random)),
          qkv((s.heads + 2 * s.kv_heads) * s.dim, s.hidden, random), out(s.hidden, s.heads * s.dim, random),
          query_norm(any_numbers(s.query_norm, 0.1, 0.3, random)), key_norm(any_numbers(s.key_norm, 0.1, 0.3, random)),
          router(any_numbers(experts * s.hidden, -4.0 / double(s.hidden), 4.0 / double(s.hidden), random)),
          shared_gate(any_numbers(experts && s.shared ? s.hidden : 0, -0.1, 0.1, random)) {
        if (!experts) mlps.emplace_back(s, s.experts ? random.between(4, 60) : s.intermediate, random);
        for (int64_t i = 0; i < experts; ++i) mlps.emplace_back(s, s.intermediate, random);
        if (!shared_gate.empty()) mlps.emplace_back(s, s.shared, random);
    }

    std::vector<octavo::Mlp> bound_mlps() const {
        std::vector<octavo::Mlp> bound;
        for (const Mlp& mlp : mlps) bound.push_back(mlp.mlp());
        return bound;
    }

    octavo::DecoderLayer layer(const std::vector<octavo::Mlp>& bound) const {
        return {attention_norm.data(), mlp_norm.data(), key_mean.data(), query_norm.data(), key_norm.data(), qkv.weight(),
                out.weight(), bound.data(), int64_t(bound.size()), experts, router.data(),
                shared_gate.empty() ? nullptr : shared_gate.data()};
    }

    int64_t experts;
    std::vector<float> attention_norm, mlp_norm, key_mean;
    Linear qkv, out;
    std::vector<float> query_norm, key_norm, router, shared_gate;
    std::vector<Mlp> mlps;
};

struct Model {
    Model(const Sizes& sizes, int64_t layer_count, int64_t words, int64_t positions, Random& random)
        : sizes(sizes), layers(layer_count, Layer(sizes, random)), norm(any_numbers(sizes.hidden, 0.5, 1.5, random)),
          head(words, sizes.hidden, random), cos(any_numbers(positions * sizes.dim, -1, 1, random)),
          sin(any_numbers(positions * sizes.dim, -1, 1, random)) {
        for (Layer& layer : layers) layer = Layer(sizes, random);
    }

    Sizes sizes;
    std::vector<Layer> layers;
    std::vector<float> norm;
    Linear head;
    std::vector<float> cos, sin;
    float eps = 1e-5f;
};

Numbers normed(const Numbers& x, const std::vector<float>& weight, double eps) {
    definition::Sum squares;
    for (const Near& number : x) squares.add(number * number);
    const Near factor = Near(1) / square_root(squares.total() / double(x.size()) + eps);
    Numbers y;
    for (size_t i = 0; i < x.size(); ++i) y.push_back(x[i] * factor * double(weight[i]));
    return y;
}

// Vectors of the norm's size, each normed.
void norm_each(Numbers& all, size_t begin, size_t end, const std::vector<float>& weight, double eps) {
    for (; !weight.empty() && begin < end; begin += weight.size()) {
        const Numbers own = normed({all.begin() + begin, all.begin() + begin + weight.size()}, weight, eps);
        std::copy(own.begin(), own.end(), all.begin() + begin);
    }
}

// One head of some, turned by the angles of a position.
Numbers turned(const Numbers& heads, int64_t head, int64_t dim, const float* cos, const float* sin) {
    const Near* x = heads.data() + head * dim;
    Numbers y;
    for (int64_t i = 0; i < dim; ++i) {
        const Near other = i < dim / 2 ? -x[i + dim / 2] : x[i - dim / 2];
        y.push_back(x[i] * double(cos[i]) + other * double(sin[i]));
    }
    return y;
}

struct Row {
    int64_t sequence, position;
};

// The definition, which follows what one level wrote.
struct Forward {
    const Model& model;
    const std::vector<Row>& rows;
    const Cache& cache;  // after the call
    Verdict& level;
    const std::string& name;
    std::vector<Numbers> hidden;
    bool ambiguous = false;  // experts whose probabilities FP32 may have in another order

    // A vector of the cache: rounded to the cache's format; of E4M3 the scale is one of the binade that fits.
    void compare_stored(const Numbers& wanted, const std::vector<double>& stored, double scale) const {
        const bool coded = cache.shape.element == Element::e4m3;
        const double half_ulp = coded ? 0x1p-4 : cache.shape.element == Element::bf16 ? 0x1p-8 : 0;
        double amax = 0, error = 0;
        for (size_t d = 0; d < wanted.size(); ++d) {
            const double rounding = half_ulp * wanted[d].magnitude();
            const double bound = wanted[d].error + (coded ? std::fmax(rounding, scale * 0x1p-10) : rounding);
            level.expect_near(static_cast<float>(stored[d]), wanted[d].value, bound, "stored", int64_t(d), name);
            amax = std::fmax(amax, std::fabs(wanted[d].value)), error = std::fmax(error, rounded(wanted[d]).error);
        }
        const bool fits = amax - error <= 448 * scale && amax + error >= 112 * scale;
        level.expect(!coded || fits, scale, amax / 448, "scale", 0, name);
    }

    // Queries of a row; its keys and values are compared.
    std::vector<Numbers> look(int64_t index, size_t r) const {
        const auto& [sequence, position] = rows[r];
        const int64_t heads = model.sizes.heads, kv_heads = model.sizes.kv_heads, dim = model.sizes.dim;
        const float *cos = model.cos.data() + position * dim, *sin = model.sin.data() + position * dim;
        const Layer& layer = model.layers[index];
        Numbers all = layer.qkv(normed(hidden[r], layer.attention_norm, model.eps));
        norm_each(all, 0, heads * dim, layer.query_norm, model.eps);
        norm_each(all, heads * dim, (heads + kv_heads) * dim, layer.key_norm, model.eps);
        std::vector<Numbers> queries;
        for (int64_t head = 0; head < heads; ++head) queries.push_back(turned(all, head, dim, cos, sin));
        for (int64_t head = 0; head < kv_heads; ++head) {
            const Spot spot{index, sequence, position, head};
            const Near* value = all.data() + (heads + kv_heads + head) * dim;
            Numbers key = turned(all, heads + head, dim, cos, sin);
            for (int64_t d = 0; d < dim; ++d) key[d] = key[d] - double(layer.key_mean[head * dim + d]);
            compare_stored(key, cache.key(spot), cache.key_scale(spot));
            compare_stored({value, value + dim}, cache.value(spot), cache.value_scale(spot));
        }
        return queries;
    }

    Numbers attended(int64_t index, size_t r, const std::vector<Numbers>& queries) const {
        Numbers found;
        const int64_t group = model.sizes.heads / model.sizes.kv_heads;
        for (int64_t head = 0; head < model.sizes.heads; ++head) {
            std::vector<std::vector<double>> keys, values;
            for (int64_t position = 0; position <= rows[r].position; ++position) {
                const Spot spot{index, rows[r].sequence, position, head / group};
                keys.push_back(cache.key(spot)), values.push_back(cache.value(spot));
            }
            const double scale = static_cast<float>(1 / std::sqrt(double(model.sizes.dim)));
            for (const Near& number : definition::attend(queries[head], keys, values, scale, 0)) found.push_back(number);
        }
        return found;
    }

    static void add(Numbers& to, const Numbers& some) {
        for (size_t i = 0; i < to.size(); ++i) to[i] = to[i] + some[i];
    }

    void run(int64_t index) {
        const Layer& layer = model.layers[index];
        for (size_t r = 0; r < rows.size(); ++r) {
            add(hidden[r], layer.out(attended(index, r, look(index, r))));
            add(hidden[r], mixed(layer, normed(hidden[r], layer.mlp_norm, model.eps)));
        }
    }

    // Σ share · expert(x) over the experts with the highest probabilities and the one of all rows, or the only MLP's output.
    Numbers mixed(const Layer& layer, const Numbers& x) {
        const size_t experts = layer.experts, top_k = model.sizes.top_k;
        if (!experts) return layer.mlps[0](x);
        std::vector<Near> logits;
        double most = -INFINITY;
        for (size_t expert = 0; expert < experts; ++expert) {
            definition::Sum logit;
            for (size_t i = 0; i < x.size(); ++i) logit.add(x[i] * double(layer.router[expert * x.size() + i]));
            logits.push_back(rounded(logit.total()));
            most = std::fmax(most, logits.back().value);
        }
        definition::Sum total;
        std::vector<std::pair<Near, size_t>> sorted;
        for (size_t expert = 0; expert < experts; ++expert) {
            sorted.push_back({exponential(logits[expert] - most), expert});
            total.add(sorted.back().first);
        }
        for (auto& [probability, expert] : sorted) probability = probability / total.total();
        std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.first.value > b.first.value; });
        if (top_k < experts) {
            const Near last = sorted[top_k - 1].first, next = sorted[top_k].first;
            ambiguous |= last.value - last.error <= next.value + next.error;
        }
        sorted.resize(top_k);
        definition::Sum shares;
        for (const auto& [share, expert] : sorted) shares.add(share);
        std::vector<definition::Sum> sums(x.size());
        for (const auto& [share, expert] : sorted) {
            const Numbers own = layer.mlps[expert](x);
            const Near factor = model.sizes.normalize_shares ? share / shares.total() : share;
            for (size_t i = 0; i < x.size(); ++i) sums[i].add(factor * own[i]);
        }
        if (!layer.shared_gate.empty()) {
            definition::Sum logit;
            for (size_t i = 0; i < x.size(); ++i) logit.add(x[i] * double(layer.shared_gate[i]));
            const Near share = Near(1) / (Near(1) + exponential(-rounded(logit.total())));
            const Numbers own = layer.mlps[experts](x);
            for (size_t i = 0; i < x.size(); ++i) sums[i].add(share * own[i]);
        }
        Numbers y;
        for (const definition::Sum& sum : sums) y.push_back(sum.total());
        return y;
    }

    Numbers logits(size_t r) const { return model.head(normed(hidden[r], model.norm, model.eps)); }
};

// Some next positions of every sequence, in turn; positions are anywhere.
std::vector<Row> any_rows(int64_t sequences, int64_t length, int64_t each, Random& random) {
    std::vector<Row> rows;
    std::vector<int64_t> first;
    for (int64_t s = 0; s < sequences; ++s) first.push_back(random.below(length - each + 1));
    for (int64_t i = 0; i < each; ++i)
        for (int64_t s = 0; s < sequences; ++s) rows.push_back({s, first[s] + i});
    return rows;
}

// The first layer's keys and values do not depend on the cache: what the level kept of them in FP32, it keeps in codes with
// the scales that were searched for.
void compare_codes(octavo::DecoderProblem p, const Cache& coded, Cache numbers, const std::vector<Row>& rows,
                   std::vector<float> hidden, const std::string& name, Verdict& level) {
    std::vector<float> logits(rows.size() * p.head.rows);
    p.cache = numbers.cache(), p.keys = numbers.keys(), p.values = numbers.values(), p.page_count = numbers.page_count();
    p.hidden = hidden.data(), p.logits = logits.data();
    level.kernels.decode(p);
    auto expect = [&](const std::vector<double>& kept, double scale, const std::vector<double>& decoded) {
        const double wanted = definition::searched_scale(kept);
        level.expect(scale == wanted, scale, wanted, "searched scale", 0, name);
        for (size_t d = 0; d < kept.size(); ++d) {
            const float encoded = static_cast<float>(kept[d]) * static_cast<float>(1 / wanted);
            const int code = definition::encode(encoded, definition::E4M3, true);
            level.expect(static_cast<float>(decoded[d]), static_cast<float>(definition::decode(code, definition::E4M3) * wanted),
                         "coded", int64_t(d), name);
        }
    };
    for (const auto& [sequence, position] : rows)
        for (int64_t head = 0; head < p.cache.kv_heads; ++head) {
            const Spot spot{0, sequence, position, head};
            expect(numbers.key(spot), coded.key_scale(spot), coded.key(spot));
            expect(numbers.value(spot), coded.value_scale(spot), coded.value(spot));
        }
}

void compare(const Model& model, octavo::DecoderProblem p, Cache cache, const Cache& numbers, const std::vector<Row>& rows,
             std::vector<float> hidden, const std::string& name, Verdict& level) {
    const int64_t size = model.sizes.hidden, words = p.head.rows, logit_rows = p.logit_rows;
    Cache before = cache;
    Forward wanted{model, rows, cache, level, name, {}};
    for (size_t r = 0; r < rows.size(); ++r) wanted.hidden.emplace_back(hidden.begin() + r * size, hidden.begin() + (r + 1) * size);
    const std::vector<float> given = hidden;
    Written<float> logits(logit_rows * words);
    p.cache = cache.cache(), p.keys = cache.keys(), p.values = cache.values();
    p.hidden = hidden.data(), p.logits = logits.data();
    level.kernels.decode(p);
    for (int64_t index = 0; index < p.layer_count && !wanted.ambiguous; ++index) wanted.run(index);
    if (wanted.ambiguous) return;
    for (int64_t i = 0; i < int64_t(rows.size()) * size; ++i) {
        const Near& number = wanted.hidden[i / size][i % size];
        level.expect_near(hidden[i], number.value, number.error, "hidden", i, name);
    }
    for (int64_t i = 0; i < logit_rows; ++i) {
        const Numbers own = wanted.logits(rows.size() - logit_rows + i);
        for (int64_t w = 0; w < words; ++w)
            level.expect_near(logits[i * words + w], own[w].value, own[w].error, "logit", i * words + w, name);
    }
    for (const Row& row : rows)
        for (int64_t index = 0; index < p.layer_count; ++index)
            for (int64_t head = 0; head < model.sizes.kv_heads; ++head)
                before.take(cache, {index, row.sequence, row.position, head});
    level.expect(logits.is_intact() && before == cache, 0, 1, "margin", 0, name);
    if (cache.shape.element == Element::e4m3) compare_codes(p, cache, numbers, rows, given, name, level);
}

}  // namespace

void decode(Random& random, std::vector<Verdict>& levels) {
    constexpr Element caches[] = {Element::f32, Element::f32, Element::bf16, Element::e4m3};
    const int64_t kv_heads = random.between(1, 2), group = random.between(1, 3), each = random.one_in(8) ? 9 : random.between(1, 2);
    Sizes sizes{random.between(4, 40), random.between(4, 50), kv_heads * group, kv_heads, 2 * random.between(1, 12), 0, 0, 0, 0,
                random.one_in(2), 0};
    if (random.one_in(3)) {
        const bool all_heads = random.one_in(2);
        sizes.query_norm = sizes.dim * (all_heads ? sizes.heads : 1), sizes.key_norm = sizes.dim * (all_heads ? kv_heads : 1);
    }
    if (random.one_in(2)) sizes.experts = random.between(1, 9), sizes.top_k = random.between(1, sizes.experts);
    if (random.one_in(2)) sizes.shared = random.between(4, 60);
    const CacheShape shape{random.any_of(caches), random.between(1, 2), random.between(1, 2), random.between(1, 2), kv_heads,
                           sizes.dim};
    const int64_t length = shape.pages * octavo::PAGE;
    const Model model(sizes, shape.layers, random.between(1, 40), length, random);
    const Cache cache(shape, {0, 1}, {0, 1}, random);
    CacheShape plain = shape;
    plain.element = Element::f32;
    const Cache numbers(plain, {0, 0}, {0, 0}, random);
    const std::vector<Row> rows = any_rows(shape.sequences, length, each, random);
    const std::vector<float> hidden = any_numbers(int64_t(rows.size()) * sizes.hidden, -1, 1, random);

    std::vector<octavo::DecoderLayer> layers;
    std::vector<std::vector<octavo::Mlp>> mlps;
    for (const Layer& layer : model.layers) mlps.push_back(layer.bound_mlps());
    for (size_t i = 0; i < mlps.size(); ++i) layers.push_back(model.layers[i].layer(mlps[i]));
    std::vector<int64_t> sequence, position;
    for (const Row& row : rows) sequence.push_back(row.sequence), position.push_back(row.position);
    octavo::DecoderProblem p{};
    p.layers = layers.data(), p.norm = model.norm.data(), p.head = model.head.weight();
    p.layer_count = shape.layers, p.hidden_size = sizes.hidden, p.heads = sizes.heads;
    p.query_norm_size = sizes.query_norm, p.key_norm_size = sizes.key_norm;
    p.top_k = sizes.top_k, p.normalize_shares = sizes.normalize_shares;
    p.norm_eps = model.eps, p.attention_scale = static_cast<float>(1 / std::sqrt(double(sizes.dim)));
    p.cos = model.cos.data(), p.sin = model.sin.data(), p.page_count = cache.page_count();
    p.rows = {int64_t(rows.size()), sequence.data(), position.data()}, p.logit_rows = random.between(1, rows.size());
    const std::string name = words("decode, cache of %d, %lld layers of %lld and %lld, heads %lld / %lld of %lld, rows %lld of "
                                   "%lld sequences, logit rows %lld, norms %lld, %lld experts of %lld, %lld", int(shape.element), (long long)shape.layers,
                                   (long long)sizes.hidden, (long long)sizes.intermediate, (long long)sizes.heads,
                                   (long long)kv_heads, (long long)sizes.dim, (long long)rows.size(),
                                   (long long)shape.sequences, (long long)p.logit_rows, (long long)sizes.query_norm,
                                   (long long)sizes.top_k, (long long)sizes.experts, (long long)sizes.shared);
    for (Verdict& level : levels) compare(model, p, cache, numbers, rows, hidden, name, level);
}

}  // namespace trial
