// A parallel region: body(context, begin, end) over [0, count) in parts; the first exception ends it early.
//
// Shared by OpenMP's teams and the pool, so that a part runs the same way on both.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace octavo {

// Clears flush-to-zero and denormals-are-zero on this thread and restores them. Kernels need subnormals whatever
// torch.set_flush_denormal says: shifted codes (words.h) and tiny scales are subnormal FP32 numbers.
class Subnormals {
public:
#if defined(__SSE2__)
    Subnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ & ~0x8040u); }  // FTZ is bit 15, DAZ bit 6
    ~Subnormals() { _mm_setcsr(before_); }

private:
    unsigned before_;
#elif defined(__aarch64__)
    Subnormals() : before_(__builtin_aarch64_get_fpcr64()) { __builtin_aarch64_set_fpcr64(before_ & ~(1ull << 24)); }
    ~Subnormals() { __builtin_aarch64_set_fpcr64(before_); }

private:
    unsigned long before_;
#endif
};

// Set while the thread runs a part: a region inside one runs on that thread alone, since all threads are in use.
inline thread_local bool in_region = false;

// Marks the calling thread as inside a region for its own lifetime.
class InRegion {
public:
    InRegion() : before_(in_region) { in_region = true; }
    ~InRegion() { in_region = before_; }

private:
    bool before_;
};

struct Region {
    using Body = void (*)(void* context, int64_t begin, int64_t end);

    Body body;
    void* context;
    int64_t count, part;
    std::atomic<bool> failed{false};
    std::exception_ptr error{};  // the first; an exception that left its thread would end the process

    int64_t parts() const { return (count + part - 1) / part; }

    // Runs part `index`; after an exception in any part it does nothing.
    void run(int64_t index) {
        if (failed.load(std::memory_order_relaxed)) return;
        try {
            const Subnormals kept;
            body(context, index * part, std::min((index + 1) * part, count));
        } catch (...) {
            if (!failed.exchange(true)) error = std::current_exception();
        }
    }

    void rethrow() const {
        if (failed) std::rethrow_exception(error);
    }
};

}  // namespace octavo
