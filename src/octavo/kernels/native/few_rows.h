// A product with few rows of a, as in generation: b's codes are read once, in the order they lie in memory, decoded into
// registers and multiplied with the same columns of each row of a.
//
// Four codes in a lane of 32 bits become four FP32 numbers by shifts and masks alone: a code's bits stand where FP32 has
// its sign, the end of its exponent and the start of its mantissa. The exponent is then too small by FP32's bias less the
// format's. Rows of a are multiplied by a power of two that makes up for it as far as FP32 reaches, and sums by the rest.
// Codes of subnormals become subnormals, which are exact as well (some processors are slow at them; a weight has few).
// NaN and Inf codes become finite numbers, and a row may span too many binades: such sums are made in the plain way.
//
// Every sum is made of the same four chains, here and in many_rows.h: a row's result does not depend on the others.
#pragma once

#include "fp8.h"
#include "kernels.h"
#include "memory.h"
#include "parallel.h"

namespace octavo {
namespace {

// The scales of a product, met by the sums of a block of K, or of all of it.
struct Scales {
    const GemmProblem& p;
    const int64_t blocks = p.block ? (p.k + p.block - 1) / p.block : 1;
    const bool wide = reaches_far(p.a, p.m) || reaches_far(p.b, p.n);  // one scale after the other might leave FP32

    float of(const Operand& operand, int64_t row, int64_t block) const {
        return operand.scale ? operand.scale[(operand.scale_per_row ? row * blocks : 0) + block] : 1.0f;
    }

    // sum · scale of a · scale of b, in this order, as everywhere; through FP64 where a scale reaches far.
    float apply(float sum, int64_t row, int64_t column, int64_t block) const {
        const float left = of(p.a, row, block), right = of(p.b, column, block);
        return wide ? static_cast<float>(double(sum) * left * right) : sum * left * right;
    }

    // Finished sums of LANES or fewer columns: scaled, unless the sums of every block were.
    f32v finished(f32v sums, int64_t row, int64_t column, int64_t count) const {
        if (p.block) return sums;
        if (!wide)
            return sums * all(of(p.a, row, 0)) * (p.b.scale && p.b.scale_per_row ? load_f32(p.b.scale + column, count) : all(of(p.b, 0, 0)));
        for (int64_t i = 0; i < count; ++i) sums[i] = apply(sums[i], row, column + i, 0);
        return sums;
    }

private:
    bool reaches_far(const Operand& operand, int64_t rows) const {
        const int64_t count = operand.scale ? (operand.scale_per_row ? rows : 1) * blocks : 0;
        constexpr uint32_t low = (127u - 60) << 23, high = (127u + 60) << 23;  // the bits of 2^-60 and 2^60
        uint32_t far = 0;
        for (int64_t i = 0; i < count; ++i) far |= bits_as<uint32_t>(operand.scale[i]) - low > high - low;
        return far;
    }
};

constexpr int64_t FEW = 16;  // rows
constexpr int64_t SOME = 4 * LANES;  // columns whose sums are finished together
constexpr int STEP = 4 * LANES;      // of K

inline bool has_codes_in_rows(const Operand& b) {
    return b.column_stride == 1 && (b.element == Element::e4m3 || b.element == Element::e5m2);
}

inline bool takes_few_rows(const GemmProblem& p) { return p.m <= FEW && has_codes_in_rows(p.b); }

// One row of an operand in FP32.
template <class F>
void read_codes(const Operand& from, int64_t row, int64_t k, float* to) {
    const uint8_t* codes = static_cast<const uint8_t*>(from.data) + row * from.row_stride;
    for (int64_t i = 0; i < k; i += LANES) {
        uint8_t some[LANES] = {};
        const int64_t count = least_of<int64_t>(LANES, k - i);
        for (int64_t j = 0; j < count; ++j) some[j] = codes[(i + j) * from.column_stride];
        store_f32(to + i, decode<F>(some), count);
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
        case Element::int8: break;  // weight_rows.h
    }
}

// Where a shifted row has the four vectors of STEP numbers: those for byte 0 of every lane, then those for byte 1, and so on.
struct Places {
    int64_t step;  // from STEP numbers to the next
    int64_t byte;  // from one byte's vector to the next one's
};

// One row of a: as it is, and shifted, block of K after block, zeros behind each block's end.
struct Row {
    const float* x;
    const float* shifted;
    float unshift;  // sums of the shifted row times this are the row's; 0 if the row spans too many binades
};

inline float power_of_two(int exponent) { return bits_as<float>(uint32_t(127 + exponent) << 23); }

template <class F>
constexpr int MISSING = 127 - (1 - F::min_exponent);  // binades that a shifted code's exponent lacks

// The power of two that brings the largest of n finite numbers to FP32's last binade but one.
inline int shift_of(const float* x, int64_t n) {
    i32v most = {};
    for (int64_t i = 0; i < n; i += LANES) {
        const i32v magnitude = bits_as<i32v>(load_f32(x + i, least_of<int64_t>(LANES, n - i))) & int32_t(MAGNITUDE);
        most = largest(most, magnitude >= int32_t(EXPONENT) ? i32v{} : magnitude);
    }
    return least_of(127, 253 - int(largest_lane((u32v)most) >> 23));
}

inline float least_magnitude(const float* x, int64_t n) {  // but zero
    i32v least = (i32v)all(EXPONENT);
    for (int64_t i = 0; i < n; i += LANES) {
        const i32v magnitude = bits_as<i32v>(load_f32(x + i, least_of<int64_t>(LANES, n - i))) & int32_t(MAGNITUDE);
        const i32v known = magnitude == 0 ? (i32v)all(EXPONENT) : magnitude;
        least = known < least ? known : least;
    }
    return bits_as<float>(EXPONENT - largest_lane(EXPONENT - (u32v)least));
}

// The smallest number times the smallest code must still be normal after the shift.
template <class F>
Row shift_row(const float* x, int64_t k, int64_t block, const Places& places, float* shifted) {
    const int shift = shift_of(x, k);
    constexpr int smallest_code = F::min_exponent - F::mantissa_bits - MISSING<F>;
    const bool fits = double(least_magnitude(x, k)) * power_of_two(shift) >= double(power_of_two(-126 - smallest_code));
    const f32v factor = all(power_of_two(shift));
    const int64_t padded = (block + STEP - 1) / STEP * STEP;
    for (int64_t begin = 0; begin < k; begin += block) {
        const int64_t count = least_of(block, k - begin);
        for (int64_t i = 0; i < padded; i += STEP) {
            float some[STEP] = {};
            if (i < count) std::memcpy(some, x + begin + i, least_of<int64_t>(STEP, count - i) * sizeof(float));
            f32v parts[4];
            for (int v = 0; v < 4; ++v) parts[v] = load<f32v>(some + v * LANES) * factor;
            const Unzipped low = unzip(parts[0], parts[1]), high = unzip(parts[2], parts[3]);
            const Unzipped even = unzip(low.even, high.even), odd = unzip(low.odd, high.odd);
            float* to = shifted + (begin / block * padded + i) / STEP * places.step;
            store(to, even.even);
            store(to + places.byte, odd.even);
            store(to + 2 * places.byte, even.odd);
            store(to + 3 * places.byte, odd.odd);
        }
    }
    return {x, shifted, fits ? power_of_two(MISSING<F> - shift) : 0.0f};
}

inline float sum_of_lanes(f32v value) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)value);
#elif defined(__AVX2__)
    __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)value), _mm256_extractf128_ps((__m256)value, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#else
    float total = 0;
    for (int i = 0; i < LANES; ++i) total += value[i];
    return total;
#endif
}

// STEP codes, those of byte 0 of every lane first.
template <class F>
struct Bytes {
    f32v of[4];
};

// Their values times 2^-MISSING, but for special codes.
template <class F>
inline Bytes<F> shifted_codes(u8v codes) {
    constexpr int right = F::mantissa_bits + 1;
    constexpr uint32_t kept = 0x80000000u | (0x7f000000u >> right);
    const i16v words = bits_as<i16v>(codes);
    const u32v odd = bits_as<u32v>(words >> right), even = bits_as<u32v>((i16v)(words << 8) >> right);
    return {{bits_as<f32v>((even << 16) & kept), bits_as<f32v>((odd << 16) & kept), bits_as<f32v>(even & kept),
             bits_as<f32v>(odd & kept)}};
}

// The same of any codes.
template <class F>
inline Bytes<F> bytes_in_lanes(u8v codes) {
    const u32v lanes = bits_as<u32v>(codes);
    const f32v factor = all(power_of_two(-MISSING<F>));
    return {{decode<F>(lanes & 0xff) * factor, decode<F>((lanes >> 8) & 0xff) * factor,
             decode<F>((lanes >> 16) & 0xff) * factor, decode<F>(lanes >> 24) * factor}};
}

// Whether there is a special code among those whose largest magnitudes were seen.
template <class F>
inline bool has_special(u8v seen) {
    return any(seen >= uint8_t(F::inf_code));
}

// Sums of products of `count` codes with COUNT shifted rows, from `offset` in them on; raises what was seen of magnitudes.
template <class F, int COUNT>
inline __attribute__((always_inline)) void dot(const Row* rows, int64_t offset, const uint8_t* codes, int64_t count,
                                               float* out, u8v& seen) {
    f32v sums[COUNT][4] = {};
    auto multiply = [&](u8v some, int64_t at) {
        seen = largest_byte(seen, some & uint8_t(0x7f));
        const Bytes<F> bytes = shifted_codes<F>(some);
        for (int byte = 0; byte < 4; ++byte)
            for (int r = 0; r < COUNT; ++r)
                sums[r][byte] = fused(bytes.of[byte], load<f32v>(rows[r].shifted + at + byte * LANES), sums[r][byte]);
    };
    int64_t k = 0;
    for (; k + 2 * STEP <= count; k += 2 * STEP) {
        __builtin_prefetch(codes + k + 2048);
        multiply(load<u8v>(codes + k), offset + k);
        multiply(load<u8v>(codes + k + STEP), offset + k + STEP);
    }
    for (; k + STEP <= count; k += STEP) multiply(load<u8v>(codes + k), offset + k);
    if (k < count) {
        uint8_t rest[STEP] = {};
        std::memcpy(rest, codes + k, count - k);
        multiply(load<u8v>(rest), offset + k);
    }
    for (int r = 0; r < COUNT; ++r) out[r] = sum_of_lanes((sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]));
}

// The same sum of a row as it is, for codes and numbers of any kind.
template <class F>
float plain_dot(const float* x, const uint8_t* codes, int64_t count) {
    f32v sum = {};
    for (int64_t k = 0; k < count; k += LANES) {
        const int64_t some = least_of<int64_t>(LANES, count - k);
        sum = fused(decode<F>(codes + k, some), load_f32(x + k, some), sum);
    }
    return sum_of_lanes(sum);
}

// Rows and columns of the output, at most SOME, whose sums stand together: [row][SOME].
struct Part {
    int64_t row, last_row, column, last_column;

    float* of(float* sums, int64_t own_row, int64_t own_column) const {
        return sums + (own_row - row) * SOME + own_column - column;
    }
};

struct FewRows {
    const GemmProblem& p;
    const Row* rows;
    const Scales scales{p};
    const int64_t width = p.block ? p.block : p.k;  // columns of K that share a scale
    const int64_t padded = (width + STEP - 1) / STEP * STEP;

    // One column of the output, [row][SOME]: sums, scaled where the scales change along K.
    template <class F, int COUNT>
    void multiply(int64_t row, int64_t column, float* out, u8v& seen) const {
        for (int64_t begin = 0, block = 0; begin < p.k; begin += width, ++block) {
            float sums[COUNT];
            dot<F, COUNT>(rows + row, block * padded, codes(column) + begin, least_of(width, p.k - begin), sums, seen);
            for (int r = 0; r < COUNT; ++r) add(sums[r] * rows[row + r].unshift, row + r, column, block, out[r * SOME]);
        }
    }

    template <class F>
    void multiply_plainly(int64_t row, int64_t column, float* out) const {
        for (int64_t begin = 0, block = 0; begin < p.k; begin += width, ++block) {
            const int64_t count = least_of(width, p.k - begin);
            add(plain_dot<F>(rows[row].x + begin, codes(column) + begin, count), row, column, block, *out);
        }
    }

    const uint8_t* codes(int64_t column) const {
        return static_cast<const uint8_t*>(p.b.data) + column * p.b.row_stride;
    }

    void add(float sum, int64_t row, int64_t column, int64_t block, float& total) const {
        const float scaled = p.block ? scales.apply(sum, row, column, block) : sum;
        total = block ? total + scaled : scaled;
    }

    template <class F>
    void multiply_columns(int64_t first, int64_t last, float* out) const {
        u8v seen = {};
        for (int64_t n = first; n < last; ++n) {
            int64_t row = 0;
            float* own = out + n - first;
            for (; row + 3 <= p.m; row += 3) multiply<F, 3>(row, n, own + row * SOME, seen);
            if (row + 2 == p.m) multiply<F, 2>(row, n, own + row * SOME, seen);
            if (row + 1 == p.m) multiply<F, 1>(row, n, own + row * SOME, seen);
        }
        mend<F>({0, p.m, first, last}, seen, out);
    }

    // Makes sums in the plain way where a code or a row asks for it.
    template <class F>
    void mend(const Part& part, u8v seen, float* sums) const {
        const bool special = has_special<F>(seen);
        for (int64_t row = part.row; row < part.last_row; ++row)
            if (special || rows[row].unshift == 0)
                for (int64_t n = part.column; n < part.last_column; ++n) multiply_plainly<F>(row, n, part.of(sums, row, n));
    }

    template <class T>
    void finish_as(const Part& part, float* sums) const {
        for (int64_t row = part.row; row < part.last_row; ++row)
            for (int64_t n = part.column; n < part.last_column; n += LANES) {
                const int64_t some = least_of<int64_t>(LANES, part.last_column - n);
                f32v own = scales.finished(load<f32v>(part.of(sums, row, n)), row, n, some);
                if (p.bias) own = own + load_f32(p.bias + n, some);
                store_f32(static_cast<T*>(p.out) + row * p.n + n, own, some);
            }
    }

    void finish(const Part& part, float* sums) const {
        if (p.out_dtype == Dtype::f32) finish_as<float>(part, sums);
        else if (p.out_dtype == Dtype::bf16) finish_as<Bf16>(part, sums);
        else finish_as<F16>(part, sums);
    }

    template <class F>
    void run() const {
        const int64_t groups = (p.n + SOME - 1) / SOME;
        parallel_for(groups, largest<int64_t>(1, 16384 / (p.k * SOME)), [&](int64_t begin, int64_t end) {
            for (int64_t group = begin; group < end; ++group) {
                float sums[FEW * SOME];
                const int64_t first = group * SOME, last = least_of(first + SOME, p.n);
                multiply_columns<F>(first, last, sums);
                finish({0, p.m, first, last}, sums);
            }
        });
    }
};

// Reads and shifts all rows of a; `room` numbers of memory for each.
template <class F>
void prepare_rows(const GemmProblem& p, const Places& places, int64_t room, float* memory, Row* rows) {
    const int64_t dense = (p.k + LANES - 1) / LANES * LANES;
    parallel_for(p.m, largest<int64_t>(1, 4096 / p.k), [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            float* x = memory + row * (dense + room);
            read_row(p.a, row, p.k, x);
            rows[row] = shift_row<F>(x, p.k, p.block ? p.block : p.k, places, x + dense);
        }
    });
}

template <class F>
void few_rows_of(const GemmProblem& p) {
    static thread_local Scratch numbers;
    const int64_t width = p.block ? p.block : p.k;
    const int64_t dense = (p.k + LANES - 1) / LANES * LANES;
    const int64_t padded = (p.k + width - 1) / width * ((width + STEP - 1) / STEP * STEP);
    Row rows[FEW];
    prepare_rows<F>(p, {STEP, LANES}, padded, numbers.floats(p.m * (dense + padded)), rows);
    FewRows{p, rows}.run<F>();
    numbers.trim();
}

void few_rows(const GemmProblem& p) {
    if (p.b.element == Element::e4m3) few_rows_of<E4M3>(p);
    else few_rows_of<E5M2>(p);
}

}  // namespace
}  // namespace octavo
