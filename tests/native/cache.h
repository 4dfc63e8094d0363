// Keys and values of some sequences, layer by layer, in pages that lie anywhere; every other page is full of NaNs.
#pragma once

#include <algorithm>
#include <numeric>

#include "trial.h"

namespace trial {

struct CacheShape {
    octavo::Element element;
    int64_t layers, sequences, pages, kv_heads, head_dim;  // pages of a sequence
};

// Where a head's vector is.
struct Spot {
    int64_t layer, sequence, position, head;
};

class Cache {
public:
    // Numbers of about 2^exponent, give or take `spread` binades from vector to vector.
    struct Sizes {
        int exponent, spread;
    };

    Cache(const CacheShape& shape, Sizes keys, Sizes values, Random& random)
        : shape(shape), page_count_(shape.sequences * shape.pages + 1 + random.below(3)), stride_(shape.pages + random.below(3)) {
        std::vector<int32_t> places(page_count_);
        std::iota(places.begin(), places.end(), 0);
        for (int64_t i = page_count_ - 1; i > 0; --i) std::swap(places[i], places[random.below(i + 1)]);
        table_.assign((shape.sequences - 1) * stride_ + shape.pages, places.back());
        for (int64_t s = 0; s < shape.sequences; ++s)
            for (int64_t page = 0; page < shape.pages; ++page) table_[s * stride_ + page] = places[s * shape.pages + page];
        for (Side* side : {&keys_, &values_}) {
            side->data.assign(shape.layers * vectors() * shape.head_dim * bytes(), 0xff);
            if (has_scales()) side->scale.assign(shape.layers * vectors(), 0xffff);
        }
        fill(keys, values, random);
    }

    octavo::KvCache cache() const { return {shape.element, shape.kv_heads, shape.head_dim, table_.data(), stride_}; }
    octavo::Pages keys() { return {keys_.data.data(), keys_.scale.data()}; }
    octavo::Pages values() { return {values_.data.data(), values_.scale.data()}; }
    int64_t page_count() const { return page_count_; }

    std::vector<double> key(const Spot& spot) const { return read(keys_, spot, true); }
    std::vector<double> value(const Spot& spot) const { return read(values_, spot, false); }

    // What codes are multiplied with; 1 without scales.
    double key_scale(const Spot& spot) const { return scale(keys_, spot); }
    double value_scale(const Spot& spot) const { return scale(values_, spot); }

    void set_key(const Spot& spot, int64_t d, double number) { set(keys_, element(spot, d, true), number); }
    void set_value(const Spot& spot, int64_t d, double number) { set(values_, element(spot, d, false), number); }

    // Takes one vector of each from there.
    void take(const Cache& other, const Spot& spot) {
        for (int64_t d = 0; d < shape.head_dim; ++d) {
            const int64_t key = element(spot, d, true) * bytes(), value = element(spot, d, false) * bytes();
            std::copy_n(other.keys_.data.begin() + key, bytes(), keys_.data.begin() + key);
            std::copy_n(other.values_.data.begin() + value, bytes(), values_.data.begin() + value);
        }
        if (!has_scales()) return;
        keys_.scale[vector(spot)] = other.keys_.scale[vector(spot)];
        values_.scale[vector(spot)] = other.values_.scale[vector(spot)];
    }

    bool operator==(const Cache& other) const {
        return keys_.data == other.keys_.data && keys_.scale == other.keys_.scale && values_.data == other.values_.data &&
               values_.scale == other.values_.scale;
    }

    CacheShape shape;

private:
    struct Side {
        std::vector<uint8_t> data;
        std::vector<uint16_t> scale;  // BF16
    };

    bool has_scales() const { return shape.element == octavo::Element::e4m3; }
    octavo::Dtype dtype() const { return octavo::Dtype(int(shape.element) - 2); }
    int64_t bytes() const { return has_scales() ? 1 : bytes_of(dtype()); }
    int64_t vectors() const { return page_count_ * shape.kv_heads * octavo::PAGE; }  // of a layer

    int64_t vector(const Spot& spot) const {
        const int64_t page = table_[spot.sequence * stride_ + spot.position / octavo::PAGE];
        return spot.layer * vectors() + (page * shape.kv_heads + spot.head) * octavo::PAGE + spot.position % octavo::PAGE;
    }

    int64_t element(const Spot& spot, int64_t d, bool is_key) const {
        const int64_t own = vector(spot), in_page = own % octavo::PAGE;
        return is_key ? (own - in_page) * shape.head_dim + d * octavo::PAGE + in_page : own * shape.head_dim + d;
    }

    void set(Side& side, int64_t at, double number) {
        if (has_scales()) side.data[at] = uint8_t(definition::encode(number, definition::E4M3, true));
        else put(side.data.data(), dtype(), at, number);
    }

    double scale(const Side& side, const Spot& spot) const {
        return has_scales() ? definition::decode(side.scale[vector(spot)], definition::BF16) : 1.0;
    }

    std::vector<double> read(const Side& side, const Spot& spot, bool is_key) const {
        std::vector<double> found;
        for (int64_t d = 0; d < shape.head_dim; ++d) {
            const int64_t at = element(spot, d, is_key);
            if (has_scales()) found.push_back(definition::decode(side.data[at], definition::E4M3) * scale(side, spot));
            else found.push_back(get(side.data.data(), dtype(), at));
        }
        return found;
    }

    void fill_vector(Side& side, const Spot& spot, Sizes sizes, bool is_key, Random& random) {
        const int exponent = sizes.exponent + int(random.between(-sizes.spread, sizes.spread));
        const double scale = std::ldexp(1 + random.uniform(), exponent - 8);
        if (has_scales()) side.scale[vector(spot)] = uint16_t(definition::encode(scale, definition::BF16, true));
        for (int64_t d = 0; d < shape.head_dim; ++d) {
            const double number = random.uniform() * 2 - 1;
            // Of codes, some are of any size, and so subnormal as well.
            const double coded = random.one_in(4) ? std::ldexp(number, -int(random.below(18))) * 448 : number * 256;
            set(side, element(spot, d, is_key), has_scales() ? coded : std::ldexp(number, exponent));
        }
    }

    void fill(Sizes keys, Sizes values, Random& random) {
        Spot spot{};
        for (spot.layer = 0; spot.layer < shape.layers; ++spot.layer)
            for (spot.sequence = 0; spot.sequence < shape.sequences; ++spot.sequence)
                for (spot.position = 0; spot.position < shape.pages * octavo::PAGE; ++spot.position)
                    for (spot.head = 0; spot.head < shape.kv_heads; ++spot.head) {
                        fill_vector(keys_, spot, keys, true, random);
                        fill_vector(values_, spot, values, false, random);
                    }
    }

    int64_t page_count_, stride_;
    std::vector<int32_t> table_;
    Side keys_, values_;
};

}  // namespace trial
