// GEMM of FP8 codes with the sums of Hopper's FP8 tensor cores, bit for bit; numerics/accumulate.py is the definition.
//
// For each step of 32 along K, with e the largest exponent among its products and the running total:
//
//   total = cut( q · (trunc(total / q) + Σ trunc(a[k] · b[k] / q)) ),  q = 2^(e - 13), cut: towards zero, to 13 fraction bits
//
// a [M, K], b [N, K] codes of E4M3 or E5M2, either stride 1; out [M, N] FP32 row-major, added to. one_chain: one running total
// over K (hopper-fast); otherwise chains of 128, each scaled if there are scales, and added in FP32 (hopper-slow).
//
// A lane is an output. K is taken in chunks of 128, four steps. Both operands of a chunk are decoded once, in parallel, into
// panels with K outermost: FP32 values, and their exponents, one byte each. With AVX2 a right panel is 16 KiB of values and 4
// KiB of exponents. A thread owns HOPPER_TILE panels of rows by one panel of columns. A step first finds e by adding exponent
// bytes, four times as many a vector as FP32 numbers; then every product is scaled by a power of two that makes a quantum 1,
// truncated by its conversion to an integer, and added.
//
// Everything is exact, so lanes and threads do not matter. A product of two values has at most 8 significant bits and lies
// between 2^-32 and 2^32; a term is less than 2^15 quanta, 33 of them less than 2^21; no power of two here comes near the ends
// of FP32.
//
// Proof: tests/oracle/test_native_hopper.py, against the definition and mmaemu. Reference: Xie et al., "MMA-Sim: Bit-Accurate
// Reference Model of Tensor Cores and Matrix Cores", arXiv 2511.10909.
#pragma once

#include "memory.h"
#include "panels.h"
#include "parallel.h"

namespace octavo {
namespace {

constexpr int HOPPER_STEP = 32, HOPPER_CHUNK = 128;  // of K; a chunk is hopper-slow's chain
constexpr int HOPPER_FRACTION_BITS = 13;
constexpr int HOPPER_VECTORS = 4, HOPPER_COLUMNS = HOPPER_VECTORS * LANES;  // as many bytes as a vector
constexpr int HOPPER_ROWS = 8;  // rows in a panel of a, of which one is multiplied at a time
constexpr int64_t HOPPER_TILE = 8;  // panels of rows (64 rows) that use a panel of columns while the cache holds it

// Exponents, -14 ... 15, are stored with this added: 34 ... 63. A zero, NaN or Inf is stored as 0. A sum of two bytes then is
// 68 or more exactly for a nonzero product, and at most 63 otherwise, which lies below the exponent of any product and never
// becomes the maximum beside one.
constexpr uint32_t EXPONENT_OFFSET = 48;

// A chunk of WIDTH rows of an operand: values and exponents, [k][WIDTH] each.
template <int WIDTH>
struct HopperPanel {
    alignas(64) float values[HOPPER_CHUNK * WIDTH];
    alignas(64) uint8_t exponents[HOPPER_CHUNK * WIDTH];
    bool is_special;  // has NaN or Inf

    // Fills rows [row, row + count) of columns [begin, end); zeros up to a whole step add nothing and have no exponent.
    void fill(const Operand& from, int64_t row, int64_t count, int64_t begin, int64_t end) {
        const int64_t elements = (end - begin + HOPPER_STEP - 1) / HOPPER_STEP * HOPPER_STEP * WIDTH;
        if (end - begin < HOPPER_CHUNK) std::memset(values, 0, elements * sizeof(float));
        pack<Numbers, true>(from, row, count, begin, end, WIDTH, values);
        if (from.element == Element::e4m3) find_exponents<E4M3>(elements);
        else find_exponents<E5M2>(elements);
    }

private:
    // A subnormal code takes the smallest normal exponent, as in the definition.
    template <class F>
    void find_exponents(int64_t elements) {
        u32v special{};
        for (int64_t i = 0; i < elements; i += LANES) {
            const u32v bits = load<u32v>(values + i) & MAGNITUDE, field = bits & EXPONENT;
            const u32v exponent = (largest(field, all(uint32_t(127 + F::min_exponent) << 23)) >> 23) - (127 - EXPONENT_OFFSET);
            const u32v is_special = (u32v)(field == EXPONENT);
            store_bytes(exponents + i, (bits == 0) | is_special ? all(0u) : exponent);
            special |= is_special;
        }
        is_special = false;
        for (int i = 0; i < LANES; ++i) is_special |= special[i] != 0;
    }
};

using HopperLeft = HopperPanel<HOPPER_ROWS>;
using HopperRight = HopperPanel<HOPPER_COLUMNS>;

// Truncation toward zero, as cvttps2dq does it: the tensor core drops bits below the quantum.
inline u32v truncated(f32v x) { return bits_as<u32v>(__builtin_convertvector(x, i32v)); }

// For every column the largest sum of exponent bytes of a step's 32 products; at most 126, so bytes hold it.
inline u8v largest_exponents(const uint8_t* a, const uint8_t* b) {
    u8v found{};
    for (int k = 0; k < HOPPER_STEP; k += 2) {
        const u8v first = load<u8v>(b + k * HOPPER_COLUMNS) + a[k * HOPPER_ROWS];
        const u8v second = load<u8v>(b + (k + 1) * HOPPER_COLUMNS) + a[(k + 1) * HOPPER_ROWS];
        found = largest(found, largest(first, second));
    }
    return found;
}

// One step of one row: adds 32 products to the totals of HOPPER_COLUMNS columns. quanta = 2^(e - 13), per_quantum = 2^(13 - e),
// both made in the exponent field.
inline void add_step(const float* a, const float* b, u8v exponents, f32v* totals) {
    constexpr uint32_t one = 1u << 23, dropped = (1u << (23 - HOPPER_FRACTION_BITS)) - 1;
    uint8_t bytes[HOPPER_COLUMNS];
    store(bytes, exponents);
    f32v quanta[HOPPER_VECTORS], per_quantum[HOPPER_VECTORS];
    u32v sums[HOPPER_VECTORS];
    for (int v = 0; v < HOPPER_VECTORS; ++v) {
        const u32v products = (widen(bytes + v * LANES) + (127 - 2 * EXPONENT_OFFSET)) << 23;
        const u32v quantum = largest(products, bits_as<u32v>(totals[v]) & EXPONENT) - HOPPER_FRACTION_BITS * one;
        quanta[v] = bits_as<f32v>(quantum);
        per_quantum[v] = bits_as<f32v>(2 * 127 * one - quantum);
        sums[v] = truncated(totals[v] * per_quantum[v]);
    }
    for (int k = 0; k < HOPPER_STEP; ++k) {
        const f32v left = all(a[k * HOPPER_ROWS]);
#pragma GCC unroll 4
        for (int v = 0; v < HOPPER_VECTORS; ++v)
            sums[v] += truncated(left * load<f32v>(b + k * HOPPER_COLUMNS + v * LANES) * per_quantum[v]);
    }
    for (int v = 0; v < HOPPER_VECTORS; ++v) {
        // Less than 2^21 in magnitude, so the conversion is exact; the mask keeps 13 fraction bits of the new total.
        const f32v sum = __builtin_convertvector(bits_as<i32v>(sums[v]), f32v) * quanta[v];
        totals[v] = bits_as<f32v>(bits_as<u32v>(sum) & ~dropped);
    }
}

// A chunk of one row: adds `steps` steps to the totals out [HOPPER_COLUMNS]. Not inlined, so that totals stay in registers over
// the steps.
__attribute__((noinline)) void add_steps(const HopperLeft& a, int row, const HopperRight& b, int steps, float* out) {
    f32v totals[HOPPER_VECTORS];
    for (int v = 0; v < HOPPER_VECTORS; ++v) totals[v] = load<f32v>(out + v * LANES);
    for (int step = 0; step < steps; ++step) {
        const int left = step * HOPPER_STEP * HOPPER_ROWS + row, right = step * HOPPER_STEP * HOPPER_COLUMNS;
        const u8v exponents = largest_exponents(a.exponents + left, b.exponents + right);
        add_step(a.values + left, b.values + right, exponents, totals);
    }
    for (int v = 0; v < HOPPER_VECTORS; ++v) store(out + v * LANES, totals[v]);
}

// Columns with NaN or Inf among their products: the plain FP32 sum says which, and replaces the result. Only where a panel has
// a special code.
void add_specials(const HopperLeft& a, int row, const HopperRight& b, int steps, const float* before, float* out) {
    for (int i = 0; i < HOPPER_COLUMNS; i += LANES) {
        f32v sum = load<f32v>(before + i);
        for (int k = 0; k < steps * HOPPER_STEP; ++k)
            sum += all(a.values[k * HOPPER_ROWS + row]) * load<f32v>(b.values + k * HOPPER_COLUMNS + i);
        const u32v is_special = (u32v)((bits_as<u32v>(sum) & EXPONENT) == EXPONENT);
        store(out + i, is_special ? bits_as<u32v>(sum) : load<u32v>(out + i));
    }
}

struct HopperGemm {
    const HopperProblem& p;
    const int64_t row_panels = (p.m + HOPPER_ROWS - 1) / HOPPER_ROWS;
    const int64_t column_panels = (p.n + HOPPER_COLUMNS - 1) / HOPPER_COLUMNS;
    const int64_t blocks = (p.k + HOPPER_CHUNK - 1) / HOPPER_CHUNK;
    HopperLeft* left = nullptr;
    HopperRight* right = nullptr;

    // In one chain over K, a panel that had NaN or Inf keeps its mark for all later chunks: the totals keep them, too.
    template <int WIDTH>
    void fill(HopperPanel<WIDTH>& panel, const Operand& from, int64_t row, int64_t rows, int64_t begin) const {
        const bool was_special = p.one_chain && begin > 0 && panel.is_special;
        panel.fill(from, row, least_of<int64_t>(WIDTH, rows - row), begin, least_of(begin + HOPPER_CHUNK, p.k));
        panel.is_special |= was_special;
    }

    void fill_panels(int64_t begin) const {
        parallel_for(row_panels + column_panels, 8, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; ++i) {
                if (i < row_panels) fill(left[i], p.a, i * HOPPER_ROWS, p.m, begin);
                else fill(right[i - row_panels], p.b, (i - row_panels) * HOPPER_COLUMNS, p.n, begin);
            }
        });
    }

    float scale_of(const Operand& operand, int64_t row, int64_t block) const {
        return operand.scale[(operand.scale_per_row ? row * blocks : 0) + block];
    }

    // One chunk of one row and `count` columns: continues the output's totals (one_chain), or adds a chain of 128 to it,
    // scaled. The scaled product is FP64, rounded once to FP32.
    void add_row(const HopperLeft& a, int64_t row, const HopperRight& b, int64_t count, int64_t begin, const double* scales,
                 float* out) const {
        const int steps = int((least_of<int64_t>(HOPPER_CHUNK, p.k - begin) + HOPPER_STEP - 1) / HOPPER_STEP);
        float before[HOPPER_COLUMNS] = {}, totals[HOPPER_COLUMNS];
        if (p.one_chain) std::memcpy(before, out, count * sizeof(float));
        std::memcpy(totals, before, sizeof totals);
        add_steps(a, int(row % HOPPER_ROWS), b, steps, totals);
        if (a.is_special || b.is_special) add_specials(a, int(row % HOPPER_ROWS), b, steps, before, totals);
        if (p.one_chain) {
            std::memcpy(out, totals, count * sizeof(float));
        } else if (p.a.scale) {
            const double scale = scale_of(p.a, row, begin / HOPPER_CHUNK);
            for (int64_t i = 0; i < count; ++i) out[i] += static_cast<float>(totals[i] * scale * scales[i]);
        } else {
            for (int64_t i = 0; i < count; ++i) out[i] += totals[i];
        }
    }

    void add_tile(int64_t first_row, int64_t last_row, int64_t panel, int64_t begin) const {
        const int64_t column = panel * HOPPER_COLUMNS, count = least_of<int64_t>(HOPPER_COLUMNS, p.n - column);
        double scales[HOPPER_COLUMNS];
        if (p.b.scale)
            for (int64_t i = 0; i < count; ++i) scales[i] = scale_of(p.b, column + i, begin / HOPPER_CHUNK);
        for (int64_t row = first_row; row < last_row; ++row) {
            float* out = p.out + row * p.n + column;
            if (row + 1 < last_row)
                for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(out + p.n + i, 1);  // the next row's first step needs it
            add_row(left[row / HOPPER_ROWS], row, right[panel], count, begin, scales, out);
        }
    }

    void run() const {
        constexpr int64_t rows = HOPPER_TILE * HOPPER_ROWS;
        const int64_t down = (p.m + rows - 1) / rows;
        for (int64_t begin = 0; begin < p.k; begin += HOPPER_CHUNK) {
            fill_panels(begin);
            parallel_for(down * column_panels, 1, [&](int64_t first, int64_t last) {
                for (int64_t tile = first; tile < last; ++tile) {
                    // Tiles of rows innermost: neighbouring tiles share a panel of columns.
                    const int64_t row = tile % down * rows;
                    add_tile(row, least_of(row + rows, p.m), tile / down, begin);
                }
            });
        }
    }
};

void hopper(const HopperProblem& p) {
    static thread_local Scratch scratch;
    HopperGemm work{p};
    const int64_t left_bytes = work.row_panels * sizeof(HopperLeft), right_bytes = work.column_panels * sizeof(HopperRight);
    char* memory = reinterpret_cast<char*>(scratch.floats((left_bytes + right_bytes) / sizeof(float)));
    work.left = reinterpret_cast<HopperLeft*>(memory);
    work.right = reinterpret_cast<HopperRight*>(memory + left_bytes);
    work.run();
    scratch.trim();
}

}  // namespace
}  // namespace octavo
