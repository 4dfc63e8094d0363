#include "parallel.h"

#include <dlfcn.h>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <exception>

namespace octavo {
namespace {

// GNU's entry point, which the runtimes of LLVM and Intel have too.
struct Runtime {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
    int (*max_threads)() = nullptr;
    int (*in_parallel)() = nullptr;
    int (*pause)(int) = nullptr;  // since OpenMP 5.0

    Runtime() {
        find(parallel, "GOMP_parallel");
        find(max_threads, "omp_get_max_threads");
        find(in_parallel, "omp_in_parallel");
        find(pause, "omp_pause_resource_all");
    }

    bool complete() const { return parallel && max_threads && in_parallel; }

private:
    template <class F>
    static void find(F& function, const char* name) {
        function = reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name));
    }
};

const Runtime& runtime() {
    static const Runtime found;
    return found;
}

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

constexpr int64_t TURNS = 8;  // of every thread, if all are equally fast

// Threads take parts as they come: cores are not equally fast, and some have other work.
struct Region {
    Body body;
    void* context;
    int64_t count, part;
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error;  // the first; none may leave a thread, which would end the process
};

void run(Body body, void* context, int64_t begin, int64_t end) {
    const Subnormals kept;
    body(context, begin, end);
}

void run_parts(void* argument) {
    Region& region = *static_cast<Region*>(argument);
    for (;;) {
        const int64_t begin = region.next.fetch_add(region.part, std::memory_order_relaxed);
        if (begin >= region.count) return;
        try {
            run(region.body, region.context, begin, std::min(begin + region.part, region.count));
        } catch (...) {
            if (!region.failed.exchange(true)) region.error = std::current_exception();
            region.next = region.count;
        }
    }
}

}  // namespace

bool has_threads() { return runtime().complete(); }

void release_threads() {
    constexpr int soft = 1;
    if (runtime().pause) runtime().pause(soft);
}

int max_threads() {
    const Runtime& r = runtime();
    return r.complete() && !r.in_parallel() ? std::max(1, r.max_threads()) : 1;
}

void parallel_for(int64_t count, int64_t grain, Body body, void* context) {
    const int64_t parts = count / std::max<int64_t>(grain, 1);
    const int threads = static_cast<int>(std::min<int64_t>(max_threads(), parts));
    if (threads <= 1) {
        if (count > 0) run(body, context, 0, count);
        return;
    }
    const int64_t part = std::max<int64_t>({grain, 1, count / (threads * TURNS)});
    Region region{body, context, count, part};
    runtime().parallel(run_parts, &region, static_cast<unsigned>(threads), 0);
    if (region.failed) std::rethrow_exception(region.error);
}

}  // namespace octavo
