// Exact numbers, each with a bound of how far FP32 arithmetic may end from it, whatever the order of its additions.
//
// Reference: Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, sections 3.3 (running error analysis)
// and 4.2 (sums).
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace definition {

// Half an ulp of FP32, and a hundredth of that for what is of second order.
constexpr double UNIT = 0x1.03p-24;

struct Near {
    double value = 0, error = 0;

    Near() = default;
    Near(double value, double error = 0) : value(value), error(error) {}
    double magnitude() const { return std::fabs(value) + error; }
};

inline Near rounded(Near x) { return {x.value, x.error + UNIT * x.magnitude() + 0x1p-149}; }

inline Near operator-(Near a) { return {-a.value, a.error}; }
inline Near operator+(Near a, Near b) { return rounded({a.value + b.value, a.error + b.error}); }
inline Near operator-(Near a, Near b) { return a + -b; }

inline Near operator*(Near a, Near b) {
    return rounded({a.value * b.value, a.magnitude() * b.error + a.error * std::fabs(b.value)});
}

inline Near operator/(Near a, Near b) {
    const double quotient = a.value / b.value;
    return rounded({quotient, (a.error + std::fabs(quotient) * b.error) / std::fmax(std::fabs(b.value) - b.error, 0)});
}

inline Near square_root(Near x) {
    const double root = std::sqrt(x.value);
    return rounded({root, x.error / root});
}

// Within two ulps, which are four units; e^-87 takes the place of what is less. For less than 88.
inline Near exponential(Near x) {
    const double value = std::exp(x.value);
    return {value, value * std::expm1(x.error) + 4 * UNIT * value * std::exp(x.error) + std::exp(-87.0)};
}

class Sum {
public:
    void add(Near x) {
        exact_.value += x.value;
        exact_.error += x.error;
        magnitude_ += x.magnitude();
        ++count_;
    }

    // Added in parts, or with zeros, a sum has two roundings more than terms at most.
    Near total() const { return {exact_.value, exact_.error + (count_ + 2) * UNIT * magnitude_}; }

private:
    Near exact_;
    double magnitude_ = 0;
    int64_t count_ = 0;
};

inline Near dot(const std::vector<Near>& a, const std::vector<double>& b) {
    Sum sum;
    for (size_t i = 0; i < b.size(); ++i) sum.add(a[i] * b[i]);
    return sum.total();
}

// softmax(query · keysᵀ · scale) · values of one head; keys and values are [position][head dim]. FP32 may lose `least` of
// a weighted value, and weights come in two steps, the maximum of a part and that of all: the steps of one weight go the
// same way, so their differences have one rounding of the whole way, and there is a second power, and the product.
inline std::vector<Near> attend(const std::vector<Near>& query, const std::vector<std::vector<double>>& keys,
                                const std::vector<std::vector<double>>& values, double scale, double least) {
    std::vector<Near> scores;
    double maximum = -INFINITY;
    for (const std::vector<double>& key : keys) {
        scores.push_back(dot(query, key) * scale);
        maximum = std::fmax(maximum, scores.back().value);
    }
    Sum total;
    std::vector<Sum> sums(query.size());
    for (size_t t = 0; t < keys.size(); ++t) {
        // What is wrong with the maximum is so for all weights, and cancels.
        const Near score = scores[t] - maximum, power = exponential(score);
        const Near weight = {power.value, power.error + 5 * UNIT * power.magnitude() + std::exp(-87.0)};
        total.add(weight);
        for (size_t d = 0; d < query.size(); ++d) {
            const Near weighted = weight * values[t][d];
            sums[d].add({weighted.value, weighted.error + least});
        }
    }
    std::vector<Near> out;
    for (const Sum& sum : sums) out.push_back(sum.total() / total.total());
    return out;
}

}  // namespace definition
