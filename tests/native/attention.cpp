// Trials of attend.
#include "cache.h"
#include "near.h"

namespace trial {
namespace {

using octavo::Element;

constexpr Element ELEMENTS[] = {Element::e4m3, Element::f32, Element::bf16};

struct Row {
    int64_t sequence, position;
};

int64_t any_position(int64_t count, Random& random) {
    const int64_t second_page = std::min<int64_t>(octavo::PAGE, count - 1), any = random.below(count);
    const int64_t positions[] = {0, octavo::PAGE - 1, second_page, count - 1, any, any, any};
    return random.any_of(positions);
}

// A NaN here and there among keys and values, an infinity among values that may have one, and a query that is not a number.
void plant_specials(Cache& cache, std::vector<float>& queries, Random& random) {
    const CacheShape& shape = cache.shape;
    for (int i = 0; i < 3; ++i) {
        const Spot spot{0, random.below(shape.sequences), random.below(shape.pages * octavo::PAGE), random.below(shape.kv_heads)};
        const int64_t d = random.below(shape.head_dim);
        const bool infinite = random.one_in(2) && shape.element != Element::e4m3;
        if (random.one_in(3)) cache.set_key(spot, d, NAN);
        else cache.set_value(spot, d, infinite ? (random.one_in(2) ? INFINITY : -INFINITY) : NAN);
    }
    if (random.one_in(3)) queries[random.below(int64_t(queries.size()))] = NAN;
}

// One query head of one row.
std::vector<definition::Near> wanted_of(const Cache& cache, const float* query, const Row& row, int64_t kv_head, double scale) {
    std::vector<std::vector<double>> keys, values;
    double largest = 0;
    for (int64_t position = 0; position <= row.position; ++position) {
        const Spot spot{0, row.sequence, position, kv_head};
        keys.push_back(cache.key(spot)), values.push_back(cache.value(spot));
        largest = std::fmax(largest, cache.value_scale(spot));
    }
    // A page's scales count as 126 binades below its largest at least: 448 * 2^-126 of that.
    const double least = cache.shape.element == Element::e4m3 ? largest * 0x1p-117 : 0;
    return definition::attend({query, query + cache.shape.head_dim}, keys, values, scale, least);
}

CacheShape any_shape(Random& random) {
    CacheShape shape{random.any_of(ELEMENTS), 1, random.between(1, 3), random.between(1, 4), random.between(1, 3),
                     random.size(100)};
    if (random.one_in(15)) shape.head_dim = octavo::MAX_HEAD_DIM - random.below(2), shape.kv_heads = 1;
    return shape;
}

}  // namespace

void attend(Random& random, std::vector<Verdict>& levels) {
    const CacheShape shape = any_shape(random);
    const int64_t heads = shape.kv_heads * random.between(1, 5), length = shape.pages * octavo::PAGE, dim = shape.head_dim;
    const int64_t affordable = std::max<int64_t>(1, 300000 / (heads * length * dim)), query_stride = heads * dim + random.below(9);
    std::vector<Row> rows(random.between(1, std::min<int64_t>(affordable, 9)));
    std::vector<int64_t> sequence, position;
    for (Row& row : rows) {
        row = {random.below(shape.sequences), any_position(length, random)};
        sequence.push_back(row.sequence), position.push_back(row.position);
    }

    // Scores of about 1, of hundreds, or next to none; sizes far apart, but with room to both ends of FP32.
    const int size = int(random.between(-50, 50)), spread = random.one_in(4) ? 40 : int(random.below(4));
    Cache cache(shape, {size, int(random.below(3))}, {int(random.between(-50, 50)), spread}, random);
    const bool special = random.one_in(3);  // an infinity needs a weight that is more than nothing in FP64
    const int wanted_size = !special && random.one_in(4) ? int(random.between(-6, 9)) : 1;
    std::vector<float> queries((rows.size() - 1) * query_stride + heads * dim);
    for (float& query : queries) query = static_cast<float>(std::ldexp(random.uniform() * 2 - 1, wanted_size - size));
    if (special) plant_specials(cache, queries, random);

    octavo::AttentionProblem p{queries.data(), query_stride, heads, cache.cache(), cache.keys(), cache.values(),
                               {int64_t(rows.size()), sequence.data(), position.data()},
                               static_cast<float>(1 / std::sqrt(double(dim))), nullptr};
    const std::string name = words("attend, cache of %d, %lld sequences of %lld pages, heads %lld / %lld of %lld, rows %lld, "
                                   "sizes %d, %d, spread %d", int(shape.element), (long long)shape.sequences,
                                   (long long)shape.pages, (long long)heads, (long long)shape.kv_heads, (long long)dim,
                                   (long long)rows.size(), size, wanted_size, spread);
    std::vector<definition::Near> wanted;
    for (size_t r = 0; r < rows.size(); ++r)
        for (int64_t head = 0; head < heads; ++head) {
            const float* query = queries.data() + r * query_stride + head * dim;
            for (const definition::Near& number : wanted_of(cache, query, rows[r], head / (heads / shape.kv_heads), p.scale))
                wanted.push_back(number);
        }
    const Cache before = cache;
    for (Verdict& level : levels) {
        Written<float> out(wanted.size());
        p.out = out.data();
        level.kernels.attend(p);
        for (size_t i = 0; i < wanted.size(); ++i) level.expect_near(out[i], wanted[i].value, wanted[i].error, "output", i, name);
        level.expect(out.is_intact() && cache == before, 0, 1, "margin", 0, name);
    }
}

}  // namespace trial
