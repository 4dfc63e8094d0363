// Trials of gemm, hopper and compare, with operands whose sums are exact in FP32: then every order of additions gives the same bits.
#include "comparison.h"
#include "trial.h"

namespace trial {
namespace {

using octavo::Dtype;
using octavo::Element;

constexpr Element ELEMENTS[] = {Element::e4m3, Element::e5m2, Element::f32, Element::bf16, Element::f16};

bool is_code(Element element) { return element == Element::e4m3 || element == Element::e5m2; }
octavo::Format format_of(Element element) { return octavo::Format(int(element)); }
Dtype dtype_of(Element element) { return Dtype(int(element) - 2); }

// An operand, [rows, K]: its memory, with rows or columns side by side or `apart`, and what the numbers in it are worth.
class Matrix {
public:
    Matrix(Element element, int64_t rows, int64_t k, Random& random, int64_t apart = 1)
        : element(element), rows(rows), k(k), by_rows_(random.one_in(2)), apart_(apart), offset_(random.below(4)) {
        const int64_t lines = by_rows_ ? rows : k, length = (by_rows_ ? k : rows) * apart;
        stride_ = length + (random.one_in(2) ? 0 : random.below(9));
        memory_.resize((offset_ + (lines - 1) * stride_ + length) * bytes());
    }

    void set(int64_t row, int64_t column, double value) {
        const int64_t i = at(row, column);
        if (is_code(element)) memory_[i] = uint8_t(definition::encode(value, small(format_of(element)), true));
        else put(memory_.data(), dtype_of(element), i, value);
    }

    double get(int64_t row, int64_t column) const {
        const int64_t i = at(row, column);
        if (is_code(element)) return definition::decode(memory_[i], small(format_of(element)));
        return trial::get(memory_.data(), dtype_of(element), i);
    }

    octavo::Operand operand() const {
        return {memory_.data() + offset_ * bytes(), element, by_rows_ ? stride_ : apart_, by_rows_ ? apart_ : stride_, scale, scale_per_row};
    }

    std::string name() const {
        return words("[%lld, %lld] of %d by %s, stride %lld, %s", (long long)rows, (long long)k, int(element),
                     by_rows_ ? "rows" : "columns", (long long)stride_, scale_per_row ? "scale per row" : "one scale");
    }

    float scale_of(int64_t row, int64_t block, int64_t blocks) const {
        return scale[(scale_per_row ? row * blocks : 0) + block];
    }

    Element element;
    int64_t rows, k;
    const float* scale = nullptr;
    bool scale_per_row = false;

private:
    int64_t bytes() const { return is_code(element) ? 1 : bytes_of(dtype_of(element)); }
    int64_t at(int64_t row, int64_t column) const {
        return offset_ + (by_rows_ ? row * stride_ + column * apart_ : column * stride_ + row * apart_);
    }

    bool by_rows_;
    int64_t apart_, stride_, offset_;
    std::vector<uint8_t> memory_;
};

double any_finite_code(Element element, Random& random) {
    const definition::Small& format = small(format_of(element));
    return definition::decode(int(random.below(format.max_code + 1)) | (random.one_in(2) ? format.sign_mask() : 0), format);
}

// A NaN, or an infinity where there is one, in some places of a and b.
void plant_specials(Matrix& a, Matrix& b, Random& random) {
    for (int i = 0; i < 2; ++i) {
        Matrix& matrix = random.one_in(2) ? a : b;
        const double special = random.one_in(2) && matrix.element != Element::e4m3 ? INFINITY : NAN;
        matrix.set(random.below(matrix.rows), random.below(matrix.k), special);
    }
}

// The exponent of the lowest bit in b's numbers, as fill makes them.
int lowest_bit(Element element) {
    if (is_code(element)) return element == Element::e4m3 ? -9 : -16;
    return element == Element::f16 ? -24 : -32;
}

// The smallest power of two whose products with b's numbers are exact; BF16's stay normal (panels.h says why).
int smallest_exponent(const Matrix& a, const Matrix& b) {
    if (a.element == Element::f32) return -149 - lowest_bit(b.element);
    if (a.element == Element::bf16) return -126 - lowest_bit(b.element);
    return -6;
}

// Whole numbers; or a power of two in one column of each row of a, and anything in b.
void fill(Matrix& a, Matrix& b, Random& random) {
    const bool whole = random.one_in(2);
    for (int64_t k = 0; k < a.k; ++k) {
        for (int64_t r = 0; r < a.rows; ++r) a.set(r, k, whole ? double(random.between(-8, 8)) : 0.0);
        for (int64_t r = 0; r < b.rows; ++r) {
            const double anything = is_code(b.element) ? any_finite_code(b.element, random) : random.uniform() - 0.5;
            b.set(r, k, whole ? double(random.between(-8, 8)) : anything);
        }
    }
    const int least = smallest_exponent(a, b);
    for (int64_t r = 0; r < a.rows && !whole; ++r) {
        const int64_t exponent = random.one_in(2) ? random.between(-6, 6) : random.between(least, least + 12);
        a.set(r, random.below(a.k), std::ldexp(random.one_in(2) ? 1.0 : -1.0, int(exponent)));
    }
}

enum class Scales { ones, powers_of_two, any, far };

std::vector<float> any_scales(Matrix& matrix, int64_t blocks, Scales kind, int far, Random& random) {
    matrix.scale_per_row = random.one_in(2);
    std::vector<float> scales((matrix.scale_per_row ? matrix.rows : 1) * blocks);
    for (float& scale : scales) {
        const double mantissa = kind == Scales::any || kind == Scales::far ? random.uniform() + 0.5 : 1.0;
        const int exponent = kind == Scales::ones ? 0 : int(random.between(0, 3)) + (kind == Scales::far ? far : 0);
        scale = static_cast<float>(std::ldexp(mantissa, exponent));
    }
    return scales;
}

// The sums of one output, by blocks of K, with the scales where kernels.h says they come in.
float wanted_of(const octavo::GemmProblem& p, const Matrix& a, const Matrix& b, int64_t row, int64_t column, bool far) {
    const int64_t width = p.block ? p.block : p.k, blocks = (p.k + width - 1) / width;
    float total = 0;
    for (int64_t block = 0; block < blocks; ++block) {
        double sum = 0;
        for (int64_t k = block * width; k < std::min(p.k, (block + 1) * width); ++k) sum += a.get(row, k) * b.get(column, k);
        const float left = a.scale_of(row, block, blocks), right = b.scale_of(column, block, blocks);
        const float own = far ? float(sum * left * right) : float(sum) * left * right;
        total = block == 0 ? own : total + own;
    }
    return rounded(p.bias ? total + p.bias[column] : total, p.out_dtype);
}

// One sum as Hopper's tensor cores make it, without scales.
float cut_sum_of(const Matrix& a, const Matrix& b, int64_t row, int64_t column, bool one_chain) {
    constexpr int64_t CHAIN = 128;
    const int a_min = small(format_of(a.element)).min_exponent(), b_min = small(format_of(b.element)).min_exponent();
    float total = 0;
    for (int64_t begin = 0; begin < a.k; begin += one_chain ? a.k : CHAIN) {
        definition::Chain chain;
        for (int64_t k = begin; k < std::min(a.k, one_chain ? a.k : begin + CHAIN); ++k)
            chain.multiply(a.get(row, k), a_min, b.get(column, k), b_min);
        total += float(chain.total());
    }
    return total;
}

octavo::ComparisonSums totals_of(const std::vector<float>& wanted, int64_t count) {
    octavo::ComparisonSums total{};
    for (int64_t i = 0; i < count; ++i) {
        const double high = wanted[i], exact = wanted[count + i], cut = wanted[2 * count + i];
        total.energy += high * high, total.noise += (exact - high) * (exact - high), total.magnitude += std::fabs(exact);
        total.signed_error += exact == 0 ? 0 * (cut - exact) : std::copysign(1.0, exact) * (cut - exact);
    }
    return total;
}

}  // namespace

void gemm(Random& random, std::vector<Verdict>& levels) {
    octavo::GemmProblem p{};
    const int64_t rows[] = {random.between(1, 8), random.between(1, 8), random.size(40), 210};
    p.m = random.any_of(rows);
    p.k = random.size(700), p.n = random.size(std::max<int64_t>(1, std::min<int64_t>(300, 200000 / (p.m * p.k))));
    Matrix a(random.any_of(ELEMENTS), p.m, p.k, random), b(random.any_of(ELEMENTS), p.n, p.k, random);
    fill(a, b, random);
    if (random.one_in(3)) plant_specials(a, b, random);

    const int64_t widths[] = {0, 0, 32, 128, 256, 100, 33};
    p.block = random.any_of(widths);
    const int64_t blocks = p.block ? (p.k + p.block - 1) / p.block : 1;
    Scales kind = Scales(random.below(4));
    if (p.block % 8) kind = Scales::powers_of_two;  // a block may lie in two chunks and be scaled in two parts
    const int far = random.one_in(2) ? 70 : -70;
    const std::vector<float> a_scales = any_scales(a, blocks, kind, far, random), b_scales = any_scales(b, blocks, kind, -far, random);
    a.scale = a_scales.data(), b.scale = b_scales.data();
    std::vector<float> bias(p.n);
    for (float& value : bias) value = static_cast<float>(random.between(-99, 99)) / 8;
    p.bias = random.one_in(2) ? bias.data() : nullptr;
    p.out_dtype = Dtype(random.below(3));
    p.a = a.operand(), p.b = b.operand();

    const std::string name = words("gemm %s x %s, block %lld, scales %d, bias %d, to dtype %d", a.name().c_str(),
                                   b.name().c_str(), (long long)p.block, int(kind), p.bias != nullptr, int(p.out_dtype));
    std::vector<float> wanted;
    for (int64_t r = 0; r < p.m; ++r)
        for (int64_t c = 0; c < p.n; ++c) wanted.push_back(wanted_of(p, a, b, r, c, kind == Scales::far));
    for (Verdict& level : levels) {
        Written<uint32_t> out(p.m * p.n);  // twice as much as two bytes each need
        p.out = out.data();
        level.kernels.gemm(p);
        for (int64_t i = 0; i < p.m * p.n; ++i) level.expect(get(p.out, p.out_dtype, i), wanted[i], "output", i, name);
        level.expect(out.is_intact(), 0, 1, "margin", 0, name);
    }
}

void hopper(Random& random, std::vector<Verdict>& levels) {
    constexpr int64_t CHAIN = 128;
    octavo::HopperProblem p{};
    p.m = random.size(80), p.k = random.size(500);
    p.n = random.size(std::max<int64_t>(1, std::min<int64_t>(200, 100000 / (p.m * p.k))));
    Matrix a(ELEMENTS[random.below(2)], p.m, p.k, random), b(ELEMENTS[random.below(2)], p.n, p.k, random);
    if (random.one_in(6)) {
        fill(a, b, random);
    } else {
        const bool sparse = random.one_in(4);
        for (Matrix* matrix : {&a, &b})
            for (int64_t r = 0; r < matrix->rows; ++r)
                for (int64_t k = 0; k < p.k; ++k)
                    matrix->set(r, k, sparse && !random.one_in(4) ? 0.0 : any_finite_code(matrix->element, random));
    }
    if (random.one_in(3)) plant_specials(a, b, random);
    p.one_chain = random.one_in(2);
    const int64_t chains = (p.k + CHAIN - 1) / CHAIN;
    const bool scaled = !p.one_chain && random.one_in(2);
    const std::vector<float> a_scales = any_scales(a, chains, Scales::any, 0, random), b_scales = any_scales(b, chains, Scales::any, 0, random);
    if (scaled) a.scale = a_scales.data(), b.scale = b_scales.data();
    p.a = a.operand(), p.b = b.operand();

    const std::string name = words("hopper %s x %s, one chain %d, scaled %d", a.name().c_str(), b.name().c_str(), p.one_chain, scaled);
    const int a_min = small(format_of(a.element)).min_exponent(), b_min = small(format_of(b.element)).min_exponent();
    std::vector<float> wanted(p.m * p.n);
    for (int64_t r = 0; r < p.m; ++r)
        for (int64_t c = 0; c < p.n; ++c) {
            float& total = wanted[r * p.n + c];
            const int64_t length = p.one_chain ? p.k : CHAIN;
            for (int64_t begin = 0, block = 0; begin < p.k; begin += length, ++block) {
                definition::Chain chain;
                for (int64_t k = begin; k < std::min(p.k, begin + length); ++k) chain.multiply(a.get(r, k), a_min, b.get(c, k), b_min);
                const double sum = chain.total();
                total += scaled ? float(sum * a.scale_of(r, block, chains) * b.scale_of(c, block, chains)) : float(sum);
            }
        }
    for (Verdict& level : levels) {
        Written<float> out(p.m * p.n);
        std::memset(out.data(), 0, p.m * p.n * sizeof(float));
        p.out = out.data();
        level.kernels.hopper(p);
        for (int64_t i = 0; i < p.m * p.n; ++i) level.expect(out[i], wanted[i], "sum", i, name);
        level.expect(out.is_intact(), 0, 1, "margin", 0, name);
    }
}

void compare(Random& random, std::vector<Verdict>& levels) {
    constexpr Element HIGH_PRECISION[] = {Element::f32, Element::bf16, Element::f16};
    octavo::ComparisonProblem p{};
    p.m = random.size(40), p.k = random.size(400);
    p.n = random.size(std::max<int64_t>(1, std::min<int64_t>(100, 60000 / (p.m * p.k))));
    const Element high = random.any_of(HIGH_PRECISION);
    const auto apart = [&] { return random.one_in(3) ? random.between(2, 3) : 1; };
    Matrix left(high, p.m, p.k, random, apart()), right(high, p.n, p.k, random, apart());
    Matrix left_codes(ELEMENTS[random.below(2)], p.m, p.k, random, apart()), right_codes(ELEMENTS[random.below(2)], p.n, p.k, random, apart());
    fill(left, right, random), fill(left_codes, right_codes, random);
    if (random.one_in(4)) plant_specials(left_codes, right_codes, random);
    const std::vector<float> l_scales = any_scales(left_codes, 1, Scales::any, 0, random), r_scales = any_scales(right_codes, 1, Scales::any, 0, random);
    left_codes.scale = l_scales.data(), right_codes.scale = r_scales.data();
    p.left = left.operand(), p.right = right.operand(), p.left_codes = left_codes.operand(), p.right_codes = right_codes.operand();
    p.sums = octavo::TensorCore(random.below(3));

    const std::string name = words("compare %s, %s and %s x %s, sums %d", left.name().c_str(), right.name().c_str(),
                                   left_codes.name().c_str(), right_codes.name().c_str(), int(p.sums));
    const int64_t count = p.m * p.n;
    std::vector<float> wanted(3 * count);
    for (int64_t r = 0; r < p.m; ++r)
        for (int64_t c = 0; c < p.n; ++c) {
            double high_sum = 0, sum = 0;
            for (int64_t k = 0; k < p.k; ++k) high_sum += left.get(r, k) * right.get(c, k), sum += left_codes.get(r, k) * right_codes.get(c, k);
            const float left_scale = left_codes.scale_of(r, 0, 1), right_scale = right_codes.scale_of(c, 0, 1);
            const int64_t i = r * p.n + c;
            wanted[i] = float(high_sum), wanted[count + i] = float(sum) * left_scale * right_scale;
            if (p.sums == octavo::TensorCore::none) wanted[2 * count + i] = NAN;
            else wanted[2 * count + i] = float(double(cut_sum_of(left_codes, right_codes, r, c, p.sums == octavo::TensorCore::one_chain)) * left_scale * right_scale);
        }
    const octavo::ComparisonSums totals = totals_of(wanted, count);
    for (Verdict& level : levels) {
        Written<float> out(3 * count);
        octavo::ComparisonSums found;
        p.out = out.data(), p.total = &found;
        octavo::compare(level.kernels, p);
        for (int64_t i = 0; i < 3 * count; ++i) level.expect(out[i], wanted[i], "product", i, name);
        const double sums[][2] = {{found.energy, totals.energy}, {found.noise, totals.noise}, {found.magnitude, totals.magnitude}, {found.signed_error, totals.signed_error}};
        for (int i = 0; i < 4; ++i) {
            const bool same = std::isnan(sums[i][1]) ? std::isnan(sums[i][0]) : sums[i][0] == sums[i][1];
            level.expect(same, sums[i][0], sums[i][1], "total", i, name);
        }
        level.expect(out.is_intact(), 0, 1, "margin", 0, name);
    }
}

}  // namespace trial
