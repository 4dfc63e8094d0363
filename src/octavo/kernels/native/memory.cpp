#include "memory.h"

#include <cstdlib>
#include <new>

namespace octavo {
namespace {

constexpr int64_t KEPT = 4 << 20;  // numbers, 16 MiB

}  // namespace

Scratch::~Scratch() { std::free(data_); }

float* Scratch::floats(int64_t count) {
    if (count > size_) {
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
