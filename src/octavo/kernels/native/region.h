// A region of work: [0, count) in parts, whose first exception ends it early.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace octavo {

// Subnormal numbers count as what they are, whatever torch.set_flush_denormal says: codes are made of them.
class Subnormals {
public:
#if defined(__SSE2__)
    Subnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ & ~0x8040u); }  // FTZ, DAZ
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

inline thread_local bool in_region = false;

// While a thread takes parts: a region inside a part is the thread's alone.
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
    std::exception_ptr error{};  // the first; none may leave a thread, which would end the process

    int64_t parts() const { return (count + part - 1) / part; }

    // Each part once. After an exception the rest does nothing.
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
