// Scratch memory (memory.h).
#include "memory.h"

#include <cstdlib>
#include <new>

namespace octavo {
namespace {

constexpr int64_t KEPT = 4 << 20;  // numbers, 16 MiB a buffer: a thread must not keep a large GEMM's sums for ever

}  // namespace

Scratch::~Scratch() { std::free(data_); }

float* Scratch::floats(int64_t count) {
    if (count > size_) {
        // Freed first: old and new need not exist at once, and the contents are not kept. 64 bytes are a cache line and an
        // AVX-512 vector.
        std::free(data_);
        data_ = nullptr;
        size_ = 0;
        data_ = static_cast<float*>(std::aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64));
        if (!data_) throw std::bad_alloc();
        size_ = count;
    }
    return data_;
}

void Scratch::trim() {
    if (size_ <= KEPT) return;
    std::free(data_);
    data_ = nullptr;
    size_ = 0;
}

}  // namespace octavo
