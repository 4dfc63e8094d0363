// Trials of quantize, cast_sums and dequantize.
#include "trial.h"

#include <algorithm>

namespace trial {
namespace {

using octavo::Dtype;
using octavo::Format;

constexpr Dtype DTYPES[] = {Dtype::f32, Dtype::bf16, Dtype::f16};
constexpr Format FORMATS[] = {Format::e4m3, Format::e5m2};
constexpr int64_t ALL = 1 << 30;  // rows or columns of a group
struct Block { int64_t rows, columns; };
constexpr Block BLOCKS[] = {{ALL, ALL}, {1, ALL}, {ALL, 1}, {1, 128}, {128, 1}, {128, 128}, {1, 32},
                            {32, 1},    {3, 7},   {40, 1},  {1, 1000}};
struct Shape { int64_t rows, columns; };
constexpr Shape LARGE[] = {{1, 9000}, {3, 5000}, {5, 1100}, {200, 70}};

Shape any_shape(Random& random) {
    return random.one_in(5) ? random.any_of(LARGE) : Shape{random.size(40), random.size(300)};
}

// A block of the whole matrix is as large as that, as kernels/native_bindings.py has it.
Block fitted(Block block, Shape shape) {
    return {block.rows == ALL ? shape.rows : block.rows, block.columns == ALL ? shape.columns : block.columns};
}

// Rows of elements, `stride` apart, that begin anywhere; no byte more than that.
struct Elements {
    Elements(Dtype dtype, Shape shape, int64_t stride, int64_t offset)
        : dtype(dtype), shape(shape), stride(stride), offset(offset),
          memory((offset + (shape.rows - 1) * stride + shape.columns) * bytes_of(dtype)) {}

    const void* data() const { return memory.data() + offset * bytes_of(dtype); }
    float at(int64_t row, int64_t column) const { return get(data(), dtype, row * stride + column); }

    Dtype dtype;
    Shape shape;
    int64_t stride, offset;
    std::vector<unsigned char> memory;
};

// Where the values of codes are written: nowhere, or beside the elements or over them, without a change between rows.
enum class Values { none, apart, in_place, count };

class Place {
public:
    Place(const Elements& x, Values where) : memory_(int64_t(x.memory.size())), before_(x.memory) {
        if (where == Values::in_place) std::memcpy(memory_.data(), x.memory.data(), x.memory.size());
        else before_.assign(x.memory.size(), *memory_.data());
    }

    void* data(const Elements& x) { return memory_.data() + x.offset * bytes_of(x.dtype); }

    bool is_intact(const Elements& x) {
        const int64_t size = bytes_of(x.dtype), first = x.offset * size, stride = x.stride * size;
        for (int64_t i = 0; i < int64_t(before_.size()); ++i) {
            const bool is_element = i >= first && (i - first) % stride < x.shape.columns * size;
            if (!is_element && memory_[i] != before_[i]) return false;
        }
        return memory_.is_intact();
    }

private:
    Written<unsigned char> memory_;
    std::vector<unsigned char> before_;
};

enum class Numbers { plain, wide, any_bits, few_specials, zeros, largest, smallest, count };

void fill(Elements& x, Numbers kind, Random& random) {
    const int64_t count = int64_t(x.memory.size()) / bytes_of(x.dtype);
    for (int64_t i = 0; i < count; ++i) {
        const double plain = (random.uniform() * 2 - 1) * (random.one_in(20) ? 0 : 1);
        double value = plain;
        if (kind == Numbers::wide) value = std::ldexp(plain, int(random.between(-30, 12)));
        if (kind == Numbers::few_specials && random.one_in(200))
            value = random.one_in(2) ? NAN : random.one_in(2) ? INFINITY : -INFINITY;
        if (kind == Numbers::zeros) value = random.one_in(2) ? 0.0 : -0.0;
        if (kind == Numbers::largest) value = plain * (x.dtype == Dtype::f16 ? 65504.0 : 0x1.fep127);
        if (kind == Numbers::smallest) value = std::ldexp(plain, x.dtype == Dtype::f16 ? -16 : -140);
        put(x.memory.data(), x.dtype, i, value);
    }
    if (kind == Numbers::any_bits)
        for (unsigned char& byte : x.memory) byte = static_cast<unsigned char>(random.bits() >> 11);
}

// What quantize must find and make of one group.
struct Group {
    double amax = 0;
    float encode_scale = 0, scale = 0;
};

struct Wanted {
    int64_t across;
    std::vector<Group> groups;
    std::vector<int> codes;
    std::vector<float> values;
    octavo::Counts counts{};
};

float encode_scale_of(const octavo::QuantizeProblem& p, int64_t g, double amax) {
    if (p.given_scale) return std::fmin(1.0f / p.given_scale[g], FLT_MAX);
    if (p.given_amax && (p.given_amax[g] > 0 || !p.measure_if_zero)) amax = p.given_amax[g];
    return definition::encode_scale(amax, small(p.format), definition::Rule(p.rule.rounding), p.rule.amax_floor,
                                    p.rule.margin);
}

int code_of(const octavo::QuantizeProblem& p, float x, float scaled) {
    const definition::Small& format = small(p.format);
    if (std::isfinite(x) || std::isnan(x)) return definition::encode(std::isnan(x) ? x : std::fmax(std::fmin(scaled, FLT_MAX), -FLT_MAX), format, true);
    return definition::encode(p.propagate ? x : std::copysign(FLT_MAX, x), format, true);
}

Wanted wanted_of(const octavo::QuantizeProblem& p, const Elements& x) {
    Wanted wanted;
    wanted.across = (x.shape.columns + p.block_columns - 1) / p.block_columns;
    wanted.groups.resize((x.shape.rows + p.block_rows - 1) / p.block_rows * wanted.across);
    auto group = [&](int64_t row, int64_t column) -> Group& {
        return wanted.groups[row / p.block_rows * wanted.across + column / p.block_columns];
    };
    for (int64_t r = 0; r < x.shape.rows; ++r)
        for (int64_t c = 0; c < x.shape.columns; ++c) {
            const double magnitude = std::fabs(x.at(r, c));
            if (!std::isfinite(magnitude)) ++wanted.counts.nonfinite;
            else group(r, c).amax = std::fmax(group(r, c).amax, magnitude);
        }
    for (Group& g : wanted.groups) {
        g.encode_scale = encode_scale_of(p, &g - wanted.groups.data(), g.amax);
        g.scale = p.given_scale ? p.given_scale[&g - wanted.groups.data()] : 1.0f / g.encode_scale;
    }
    for (int64_t r = 0; r < x.shape.rows; ++r)
        for (int64_t c = 0; c < x.shape.columns; ++c) {
            const float element = x.at(r, c), scaled = element * group(r, c).encode_scale;
            const int code = code_of(p, element, scaled);
            wanted.codes.push_back(code);
            const float decoded = static_cast<float>(definition::decode(code, small(p.format)));
            wanted.values.push_back(rounded(decoded * group(r, c).scale, x.dtype));
            if (!p.counting || !std::isfinite(element)) continue;
            wanted.counts.saturated += std::fabs(scaled) > definition::decode(small(p.format).max_code, small(p.format));
            wanted.counts.underflowed += element != 0 && (code & 0x7f) == 0;
        }
    return wanted;
}

std::string name_of(const octavo::QuantizeProblem& p, const Elements& x) {
    return words("quantize %lld x %lld (stride %lld, offset %lld), dtype %d, format %d, block %lld x %lld, propagate %d, "
                 "rounding %d, floor %g, margin %d, given amax %d, scale %d, counting %d",
                 (long long)x.shape.rows, (long long)x.shape.columns, (long long)x.stride, (long long)x.offset,
                 int(x.dtype), int(p.format), (long long)p.block_rows, (long long)p.block_columns, p.propagate,
                 int(p.rule.rounding), p.rule.amax_floor, p.rule.margin, p.given_amax != nullptr,
                 p.given_scale != nullptr, p.counting);
}

// Codes, or with `where` their values, and what comes with them.
void compare(octavo::QuantizeProblem p, const Elements& x, Values where, Verdict& level, const Wanted& wanted) {
    const int64_t groups = int64_t(wanted.groups.size()), count = int64_t(wanted.codes.size());
    const std::string name = name_of(p, x) + words(", values %d", int(where));
    Written<uint8_t> codes(count);
    Written<float> scale(groups), measured(groups);
    Place place(x, where);
    octavo::Counts counts{};
    p.x = {where == Values::in_place ? place.data(x) : x.data(), x.dtype, x.shape.rows, x.shape.columns, x.stride};
    p.codes = where == Values::none ? codes.data() : nullptr, p.values = where == Values::none ? nullptr : place.data(x);
    p.scale = p.given_scale ? nullptr : scale.data(), p.measured = measured.data(), p.counts = &counts;
    level.kernels.quantize(p);
    for (int64_t i = 0; i < count && where == Values::none; ++i) {
        const bool both_nan = definition::is_nan(codes[i], small(p.format)) && definition::is_nan(wanted.codes[i], small(p.format));
        level.expect(both_nan || codes[i] == wanted.codes[i], int(codes[i]), wanted.codes[i], "code", i, name);
    }
    for (int64_t i = 0; i < count && where != Values::none; ++i) {
        const float value = get(p.values, x.dtype, i / x.shape.columns * x.stride + i % x.shape.columns);
        level.expect(value, wanted.values[i], "value", i, name);
    }
    for (int64_t g = 0; g < groups; ++g) {
        level.expect(measured[g], float(wanted.groups[g].amax), "amax", g, name);
        if (!p.given_scale) level.expect(scale[g], wanted.groups[g].scale, "scale", g, name);
    }
    const int64_t found[] = {counts.nonfinite, counts.saturated, counts.underflowed};
    const int64_t expected[] = {wanted.counts.nonfinite, wanted.counts.saturated, wanted.counts.underflowed};
    for (int i = 0; i < 3; ++i) level.expect(found[i] == expected[i], found[i], expected[i], "count", i, name);
    const bool intact = codes.is_intact() && scale.is_intact() && measured.is_intact() && place.is_intact(x);
    level.expect(intact, 0, 1, "margin", 0, name);
}

void compare(const octavo::QuantizeProblem& p, const Elements& x, std::vector<Verdict>& levels) {
    const Wanted wanted = wanted_of(p, x);
    for (Verdict& level : levels)
        for (int where = 0; where < int(Values::count); ++where) compare(p, x, Values(where), level, wanted);
}

}  // namespace

void quantize(Random& random, std::vector<Verdict>& levels) {
    const Shape shape = any_shape(random);
    const Block block = fitted(random.any_of(BLOCKS), shape);
    Elements x(random.any_of(DTYPES), shape, shape.columns + (random.one_in(2) ? 0 : random.below(9)), random.below(4));
    fill(x, Numbers(random.below(int(Numbers::count))), random);

    octavo::QuantizeProblem p{};
    p.format = random.any_of(FORMATS);
    p.block_rows = block.rows, p.block_columns = block.columns;
    p.propagate = random.one_in(2), p.counting = random.one_in(3), p.measure_if_zero = random.one_in(2);
    const double floors[] = {0.0, 1e-12, 1e-3};
    const int margins[] = {0, 0, 0, 1, 5, 4096};
    p.rule = {octavo::ScaleRounding(random.below(4)), random.any_of(floors), random.any_of(margins)};

    const int64_t groups = (shape.rows + block.rows - 1) / block.rows * ((shape.columns + block.columns - 1) / block.columns);
    std::vector<float> given(groups);
    const bool as_scale = random.one_in(4), as_amax = !as_scale && random.one_in(3);
    for (float& value : given) {
        value = static_cast<float>(std::ldexp(random.uniform(), int(random.between(-20, 4))));
        if (as_scale && value == 0) value = 1;
        if (as_amax && random.one_in(4)) value = 0;
    }
    if (as_scale && random.one_in(8)) given[0] = 1e-39f;
    p.given_scale = as_scale ? given.data() : nullptr;
    p.given_amax = as_amax ? given.data() : nullptr;
    compare(p, x, levels);
}

// Every 16-bit number; in FP32 every code's value, every middle of two of them, and the neighbours of both.
void quantize_every_input(std::vector<Verdict>& levels) {
    for (const Format format : FORMATS)
        for (const float scale : {1.0f, 3.7e-3f, 0x1p8f}) {
            octavo::QuantizeProblem p{};
            p.format = format, p.given_scale = &scale, p.propagate = true;
            for (const Dtype dtype : {Dtype::bf16, Dtype::f16}) {
                Elements every(dtype, {1, 1 << 16}, 1 << 16, 0);
                for (int i = 0; i < 1 << 16; ++i) reinterpret_cast<uint16_t*>(every.memory.data())[i] = uint16_t(i);
                p.block_rows = 1, p.block_columns = 1 << 16;
                compare(p, every, levels);
            }
            std::vector<float> numbers;
            for (int code = 0; code < 2 * small(format).max_code; ++code) {
                const double low = definition::decode(code / 2, small(format)), high = definition::decode(code / 2 + 1, small(format));
                const float number = static_cast<float>(code % 2 && code / 2 < small(format).max_code ? (low + high) / 2 : low) * scale;
                for (const float near : {number, std::nextafter(number, INFINITY), std::nextafter(number, -INFINITY)})
                    numbers.insert(numbers.end(), {near, -near});
            }
            const int64_t count = int64_t(numbers.size());
            Elements near(Dtype::f32, {1, count}, count, 0);
            std::memcpy(near.memory.data(), numbers.data(), near.memory.size());
            p.block_columns = count;
            compare(p, near, levels);
        }
}

// What cast_sums must find, in the order of octavo::CastSums, in plain FP64 sums of FP32 products.
void wanted_sums(const octavo::CastSumsProblem& p, const Elements& x, double* found) {
    enum { elements, nonfinite, saturated, amax, scale, stale_ratio, finite, nonzeros, flushed, mismatched, energy,
           fourth_powers, flushed_energy, noise, product, decoded_energy, magnitude, signed_error };
    const definition::Small& format = small(p.format);
    const double largest = definition::decode(format.max_code, format);
    const double limit = largest + (largest - definition::decode(format.max_code - 1, format)) / 2;
    const int64_t across = (x.shape.columns + p.block_columns - 1) / p.block_columns;
    for (int64_t r = 0; r < x.shape.rows; ++r)
        for (int64_t c = 0; c < x.shape.columns; ++c) {
            const float element = x.at(r, c), own = p.scale[r / p.block_rows * across + c / p.block_columns];
            const double value = element, size = std::fabs(value);
            const bool is_finite = std::isfinite(value);
            found[elements] += 1;
            found[scale] = std::fmax(found[scale], own);
            if (!is_finite) {
                found[nonfinite] += 1;
                continue;
            }
            found[amax] = std::fmax(found[amax], size);
            found[saturated] += size > own * limit;
            found[stale_ratio] = std::fmax(found[stale_ratio], float(size) / (own * float(largest)));
            if (r < p.first_row || (r - p.first_row) % p.row_step) continue;
            const int code = p.codes[r * p.codes_stride + c];
            const float scaled = element * std::fmin(1.0f / own, FLT_MAX);
            const int best = definition::encode(std::fmax(std::fmin(scaled, FLT_MAX), -FLT_MAX), format, true);
            const float decoded = float(definition::decode(code, format)) * own, wanted = float(definition::decode(best, format)) * own;
            const double y = decoded, square = value * value;
            const bool is_flushed = value != 0 && (code & 0x7f) == 0;
            found[finite] += 1;
            found[nonzeros] += value != 0;
            found[flushed] += is_flushed;
            found[mismatched] += !(std::fabs(decoded - element) <= 1.001f * std::fabs(wanted - element));
            found[energy] += square;
            found[fourth_powers] += square * square;
            found[flushed_energy] += is_flushed ? square : 0;
            found[noise] += (y - value) * (y - value);
            found[product] += value * y;
            found[decoded_energy] += y * y;
            found[magnitude] += size;
            if (value != 0) found[signed_error] += std::copysign(1.0, value) * (y - value);
        }
}

void dequantize(Random& random, std::vector<Verdict>& levels) {
    const Shape shape = any_shape(random);
    const Block block = fitted(random.any_of(BLOCKS), shape);
    const int64_t stride = shape.columns + (random.one_in(2) ? 0 : random.below(9)), offset = random.below(4);
    std::vector<uint8_t> codes(offset + (shape.rows - 1) * stride + shape.columns);
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = uint8_t(random.one_in(2) ? random.bits() >> 9 : i);
    const int64_t across = (shape.columns + block.columns - 1) / block.columns;
    std::vector<float> scales((shape.rows + block.rows - 1) / block.rows * across);
    const int reach = random.one_in(4) ? 130 : 20;
    for (float& scale : scales)
        scale = static_cast<float>(std::ldexp(random.uniform() + 0.5, int(random.between(-reach, reach))));

    octavo::DequantizeProblem p{codes.data() + offset, random.any_of(FORMATS), shape.rows, shape.columns, stride, block.rows,
                                block.columns, scales.data(), nullptr, random.any_of(DTYPES)};
    const std::string name = words("dequantize %lld x %lld (stride %lld), format %d to dtype %d, block %lld x %lld",
                                   (long long)shape.rows, (long long)shape.columns, (long long)stride, int(p.format),
                                   int(p.out_dtype), (long long)block.rows, (long long)block.columns);
    std::vector<float> wanted;
    for (int64_t r = 0; r < shape.rows; ++r)
        for (int64_t c = 0; c < shape.columns; ++c) {
            const float value = static_cast<float>(definition::decode(p.codes[r * stride + c], small(p.format)));
            wanted.push_back(rounded(value * scales[r / block.rows * across + c / block.columns], p.out_dtype));
        }
    for (Verdict& level : levels) {
        Written<uint32_t> out(shape.rows * shape.columns);  // twice as much as two bytes each need
        p.out = out.data();
        level.kernels.dequantize(p);
        for (int64_t i = 0; i < int64_t(wanted.size()); ++i)
            level.expect(get(p.out, p.out_dtype, i), wanted[i], "element", i, name);
        level.expect(out.is_intact(), 0, 1, "margin", 0, name);
    }
}

void cast_sums(Random& random, std::vector<Verdict>& levels) {
    constexpr int COUNTED = 10, ALL_SUMS = sizeof(octavo::CastSums) / sizeof(double);
    const Shape shape = any_shape(random);
    const Block block = fitted(random.any_of(BLOCKS), shape);
    Elements x(random.any_of(DTYPES), shape, shape.columns + (random.one_in(2) ? 0 : random.below(9)), random.below(4));
    fill(x, Numbers(random.below(int(Numbers::count))), random);
    octavo::CastSumsProblem p{};
    p.x = {x.data(), x.dtype, shape.rows, shape.columns, x.stride};
    p.format = random.any_of(FORMATS), p.block_rows = block.rows, p.block_columns = block.columns;
    const int64_t groups = (shape.rows + block.rows - 1) / block.rows * ((shape.columns + block.columns - 1) / block.columns);
    std::vector<float> scales(groups);
    for (float& scale : scales) scale = static_cast<float>(std::ldexp(random.uniform() + 0.5, int(random.between(-20, 4))));
    if (random.one_in(8)) scales[0] = 1e-39f;
    p.codes_stride = shape.columns + random.below(5);
    std::vector<uint8_t> codes((shape.rows - 1) * p.codes_stride + shape.columns);
    const bool right = random.one_in(2);  // codes of these elements, or of none
    for (int64_t i = 0; i < int64_t(codes.size()); ++i) {
        const int64_t r = i / p.codes_stride, c = i % p.codes_stride, across = (shape.columns + block.columns - 1) / block.columns;
        codes[i] = uint8_t(random.bits() >> 9) % 0x7b;
        if (!right || c >= shape.columns) continue;
        const float scaled = x.at(r, c) * std::fmin(1.0f / scales[r / block.rows * across + c / block.columns], FLT_MAX);
        if (std::isfinite(x.at(r, c)))
            codes[i] = uint8_t(definition::encode(std::fmax(std::fmin(scaled, FLT_MAX), -FLT_MAX), small(p.format), true));
    }
    p.scale = scales.data(), p.codes = codes.data();
    p.row_step = random.one_in(2) ? 1 : random.between(1, 7);
    p.first_row = random.below(std::min(shape.rows, p.row_step));

    double wanted[ALL_SUMS] = {};
    wanted_sums(p, x, wanted);
    const std::string name = words("cast_sums %lld x %lld, dtype %d, format %d, block %lld x %lld, rows from %lld by %lld",
                                   (long long)shape.rows, (long long)shape.columns, int(x.dtype), int(p.format),
                                   (long long)block.rows, (long long)block.columns, (long long)p.first_row, (long long)p.row_step);
    for (Verdict& level : levels) {
        Written<float> measured(groups);
        Written<octavo::CastSums> sums(1);
        p.measured = measured.data(), p.sums = sums.data();
        level.kernels.cast_sums(p);
        const double* found = reinterpret_cast<const double*>(sums.data());
        for (int i = 0; i < ALL_SUMS; ++i) {
            const double scale = i == ALL_SUMS - 1 ? wanted[i - 1] + std::fabs(wanted[i]) : std::fabs(wanted[i]);
            const bool near = i >= COUNTED && std::fabs(found[i] - wanted[i]) <= 1e-11 * scale;
            const bool same = std::isnan(wanted[i]) ? std::isnan(found[i]) : found[i] == wanted[i];
            level.expect(near || same, found[i], wanted[i], "sum", i, name);
        }
        level.expect(measured.is_intact() && sums.is_intact(), 0, 1, "margin", 0, name);
    }
}

}  // namespace trial
