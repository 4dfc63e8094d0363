// A product with few rows of a, as in generation: b's codes are read once, in the order they lie in memory, and every
// eight or sixteen of them are decoded into registers and multiplied with the same columns of each row of a.
#pragma once

#include "fp8.h"
#include "kernels.h"
#include "memory.h"
#include "parallel.h"

namespace octavo {
namespace {

constexpr float half_scale(Element element) {
    return element == Element::e4m3 ? HALF_SCALE<E4M3> : element == Element::e5m2 ? HALF_SCALE<E5M2> : 1.0f;
}

// The scales of a product, met by the sums of a block of K, or of all of it.
struct Scales {
    const GemmProblem& p;
    const int64_t blocks = p.block ? (p.k + p.block - 1) / p.block : 1;
    const bool wide = reaches_far(p.a, p.m) || reaches_far(p.b, p.n);  // one scale after the other might leave FP32
    const float unshift = half_scale(p.a.element) * half_scale(p.b.element);  // what decoded numbers were divided by

    float of(const Operand& operand, int64_t row, int64_t block) const {
        return operand.scale[(operand.scale_per_row ? row * blocks : 0) + block];
    }

    // sum · scale of a · scale of b, in this order, as everywhere; through FP64 where a scale reaches far.
    float apply(float sum, int64_t row, int64_t column, int64_t block) const {
        const float left = of(p.a, row, block), right = of(p.b, column, block);
        return wide ? static_cast<float>(double(sum) * unshift * left * right) : sum * unshift * left * right;
    }

private:
    bool reaches_far(const Operand& operand, int64_t rows) const {
        const int64_t count = (operand.scale_per_row ? rows : 1) * blocks;
        for (int64_t i = 0; i < count; ++i)
            if (!(operand.scale[i] >= 0x1p-60f && operand.scale[i] <= 0x1p60f)) return true;
        return false;
    }
};

constexpr int64_t FEW = 8;  // rows
constexpr int STEP = 2 * LANES;

inline bool takes_few_rows(const GemmProblem& p) {
    return p.m <= FEW && p.b.column_stride == 1 && (p.b.element == Element::e4m3 || p.b.element == Element::e5m2);
}

// One row of an operand in FP32, codes divided by their HALF_SCALE.
template <class F>
void read_codes(const Operand& from, int64_t row, int64_t k, float* to) {
    const uint8_t* codes = static_cast<const uint8_t*>(from.data) + row * from.row_stride;
    for (int64_t i = 0; i < k; i += LANES) {
        uint8_t some[LANES] = {};
        const int64_t count = least_of<int64_t>(LANES, k - i);
        for (int64_t j = 0; j < count; ++j) some[j] = codes[(i + j) * from.column_stride];
        store_f32(to + i, decode<F>(some) * (1.0f / HALF_SCALE<F>), count);
    }
}

template <class T>
void read_numbers(const Operand& from, int64_t row, int64_t k, float* to) {
    const T* x = static_cast<const T*>(from.data) + row * from.row_stride;
    if (from.column_stride != 1) {
        for (int64_t i = 0; i < k; ++i) to[i] = as_f32(x[i * from.column_stride]);
        return;
    }
    for (int64_t i = 0; i < k; i += LANES) {
        const int64_t count = least_of<int64_t>(LANES, k - i);
        store_f32(to + i, load_f32(x + i, count), count);
    }
}

inline void read_row(const Operand& from, int64_t row, int64_t k, float* to) {
    switch (from.element) {
        case Element::e4m3: return read_codes<E4M3>(from, row, k, to);
        case Element::e5m2: return read_codes<E5M2>(from, row, k, to);
        case Element::f32: return read_numbers<float>(from, row, k, to);
        case Element::bf16: return read_numbers<Bf16>(from, row, k, to);
        case Element::f16: return read_numbers<F16>(from, row, k, to);
    }
}

inline float sum_of_lanes(f32v value) {
    float total = 0;
    for (int i = 0; i < LANES; ++i) total += value[i];
    return total;
}

// Sums of products of codes [begin, end) with COUNT rows of x, `stride` numbers apart. Of FINITE codes a NaN of E4M3 is
// not seen; the answer is whether there might have been one.
template <class F, int COUNT, bool FINITE>
inline __attribute__((always_inline)) bool dot(const float* x, int64_t stride, const uint8_t* codes, int64_t begin,
                                               int64_t end, float* out) {
    constexpr int CHAINS = COUNT < 4 ? 2 : 1;  // an addition waits for the one before it
    f32v low[CHAINS][COUNT] = {}, high[CHAINS][COUNT] = {};
    u8v magnitudes = {};
    auto multiply = [&](int chain, Pair values, const float* from, int64_t apart) {
        for (int r = 0; r < COUNT; ++r) {
            low[chain][r] = fused(values.low, load<f32v>(from + r * apart), low[chain][r]);
            high[chain][r] = fused(values.high, load<f32v>(from + r * apart + LANES), high[chain][r]);
        }
    };
    int64_t k = begin;
    for (; k + 2 * STEP <= end; k += 2 * STEP) {
        __builtin_prefetch(codes + k + 1024);
        if (FINITE && F::nan_code == F::inf_code) magnitudes = raise_magnitudes(magnitudes, codes + k);
        multiply(0, decode_pair<F, FINITE>(codes + k), x + k, stride);
        multiply(CHAINS - 1, decode_pair<F, FINITE>(codes + k + STEP), x + k + STEP, stride);
    }
    for (; k < end; k += STEP) {
        uint8_t some[STEP] = {};
        float rest[COUNT * STEP] = {};
        const int64_t count = least_of<int64_t>(STEP, end - k);
        std::memcpy(some, codes + k, count);
        for (int r = 0; r < COUNT; ++r) std::memcpy(rest + r * STEP, x + r * stride + k, count * sizeof(float));
        multiply(0, decode_pair<F>(some), rest, STEP);
    }
    for (int r = 0; r < COUNT; ++r) {
        f32v both = low[0][r] + high[0][r];
        if (CHAINS == 2) both = both + (low[CHAINS - 1][r] + high[CHAINS - 1][r]);
        out[r] = sum_of_lanes(both);
    }
    return any(magnitudes == 0x7f);
}

struct FewRows {
    const GemmProblem& p;
    const Scales scales{p};
    const int64_t stride = (p.k + STEP - 1) / STEP * STEP;
    const float* x;  // [m, stride], decoded

    template <class F, int COUNT>
    void multiply(int64_t row, int64_t column, float* totals) const {
        const uint8_t* codes = static_cast<const uint8_t*>(p.b.data) + column * p.b.row_stride;
        const int64_t width = p.block ? p.block : p.k;
        for (int r = 0; r < COUNT; ++r) totals[r] = 0;
        for (int64_t begin = 0, block = 0; begin < p.k; begin += width, ++block) {
            float sums[COUNT];
            const int64_t end = least_of(begin + width, p.k);
            if (dot<F, COUNT, true>(x + row * stride, stride, codes, begin, end, sums))
                dot<F, COUNT, false>(x + row * stride, stride, codes, begin, end, sums);
            for (int r = 0; r < COUNT; ++r) totals[r] += scales.apply(sums[r], row + r, column, block);
        }
    }

    template <class F>
    void column(int64_t column, float* totals) const {
        int64_t row = 0;
        for (; row + 4 <= p.m; row += 4) multiply<F, 4>(row, column, totals + row);
        for (; row + 2 <= p.m; row += 2) multiply<F, 2>(row, column, totals + row);
        if (row < p.m) multiply<F, 1>(row, column, totals + row);
    }

    template <class T>
    void write(int64_t column, const float* totals) const {
        for (int64_t row = 0; row < p.m; ++row) {
            f32v own = {};
            own[0] = totals[row] + (p.bias ? p.bias[column] : 0.0f);
            store_f32(static_cast<T*>(p.out) + row * p.n + column, own, 1);
        }
    }

    void run() const {
        parallel_for(p.n, largest<int64_t>(1, 32768 / p.k), [&](int64_t first, int64_t last) {
            for (int64_t n = first; n < last; ++n) {
                float totals[FEW];
                if (p.b.element == Element::e4m3) column<E4M3>(n, totals);
                else column<E5M2>(n, totals);
                if (p.out_dtype == Dtype::f32) write<float>(n, totals);
                else if (p.out_dtype == Dtype::bf16) write<Bf16>(n, totals);
                else write<F16>(n, totals);
            }
        });
    }
};

void few_rows(const GemmProblem& p) {
    static thread_local Scratch numbers;
    const int64_t stride = (p.k + STEP - 1) / STEP * STEP;
    float* x = numbers.floats(p.m * stride);
    for (int64_t row = 0; row < p.m; ++row) read_row(p.a, row, p.k, x + row * stride);
    FewRows{p, Scales{p}, stride, x}.run();
}

}  // namespace
}  // namespace octavo
