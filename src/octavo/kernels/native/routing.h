// The experts of a row and their shares of its output: the top_k largest of a softmax over the router's logits.
//
//   logits = x · routerᵀ     [experts], router [experts, k] row-major, all FP32
//   share  = softmax(logits) of the chosen, divided by their sum if `normalize`
//
// A row's result depends on its own x alone: each logit is one chain for each lane, added by halves at the end. Definition:
// models/llama.py, Router; compared with transformers in tests/oracle/test_served_experts.py.
#pragma once

#include <algorithm>
#include <vector>

#include "exponential.h"
#include "words.h"

namespace octavo {
namespace {

// A row that goes to an expert.
struct Visit {
    int64_t expert, row;
    float share;
};

// An expert by its probability. Types of an unnamed namespace keep the library's templates apart for each level (simd.h).
struct Candidate {
    float probability;
    int64_t expert;
};

inline float dot_f32(const float* x, const float* y, int64_t n) {
    f32v sum = {};
    for (int64_t i = 0; i < n; i += LANES) {
        const int64_t some = least_of<int64_t>(LANES, n - i);
        sum = fused(load_f32(x + i, some), load_f32(y + i, some), sum);
    }
    return sum_of_lanes(sum);
}

// In place. A NaN or a logit of +Inf makes all NaN, as in torch.
inline void softmax(float* x, int64_t n) {
    float most = x[0];
    for (int64_t i = 1; i < n; ++i) most = x[i] > most ? x[i] : most;
    f32v sums = {};
    for (int64_t i = 0; i < n; i += LANES) {
        const int64_t some = least_of<int64_t>(LANES, n - i);
        store_f32(x + i, exponential(load_f32(x + i, some) - all(most)), some);
        sums = sums + load_f32(x + i, some);  // zeros beyond n
    }
    const float sum = sum_of_lanes(sums);
    for (int64_t i = 0; i < n; ++i) x[i] /= sum;
}

// Writes the top_k visits of a row. Among equal probabilities those that torch.topk takes (ATen/native/TopKImpl.h: the same
// algorithms of the standard library, NaN the largest).
inline void choose(const float* probabilities, int64_t experts, int64_t top_k, bool normalize, int64_t row, Visit* visits) {
    static thread_local std::vector<Candidate> queue;
    queue.clear();
    for (int64_t i = 0; i < experts; ++i) queue.push_back({probabilities[i], i});
    const auto is_nan = [](const Candidate& a) { return a.probability != a.probability; };
    const auto above = [&](const Candidate& a, const Candidate& b) {
        return (is_nan(a) && !is_nan(b)) || a.probability > b.probability;
    };
    if (top_k * 64 <= experts) {
        std::partial_sort(queue.begin(), queue.begin() + top_k, queue.end(), above);
    } else {
        std::nth_element(queue.begin(), queue.begin() + top_k - 1, queue.end(), above);
        std::sort(queue.begin(), queue.begin() + top_k - 1, above);
    }
    float sum = 0;
    for (int64_t i = 0; i < top_k; ++i) sum += queue[i].probability;
    for (int64_t i = 0; i < top_k; ++i) {
        const auto [probability, expert] = queue[i];
        visits[i] = {expert, row, normalize ? probability / sum : probability};
    }
}

}  // namespace
}  // namespace octavo
