#include "parallel.h"

#include <dlfcn.h>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include <algorithm>

namespace octavo {
namespace {

// GNU's entry point, which the runtimes of LLVM and Intel have too.
struct Runtime {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
    int (*max_threads)() = nullptr;
    int (*thread_number)() = nullptr;
    int (*team_size)() = nullptr;
    int (*in_parallel)() = nullptr;

    Runtime() {
        find(parallel, "GOMP_parallel");
        find(max_threads, "omp_get_max_threads");
        find(thread_number, "omp_get_thread_num");
        find(team_size, "omp_get_num_threads");
        find(in_parallel, "omp_in_parallel");
    }

    bool complete() const { return parallel && max_threads && thread_number && team_size && in_parallel; }

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

struct Region {
    Body body;
    void* context;
    int64_t count;
};

void run(Body body, void* context, int64_t begin, int64_t end) {
    const Subnormals kept;
    body(context, begin, end);
}

void run_part(void* argument) {
    const Region& region = *static_cast<Region*>(argument);
    const int64_t threads = runtime().team_size(), own = runtime().thread_number();
    const int64_t begin = region.count * own / threads, end = region.count * (own + 1) / threads;
    if (begin < end) run(region.body, region.context, begin, end);
}

}  // namespace

bool has_threads() { return runtime().complete(); }

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
    Region region{body, context, count};
    runtime().parallel(run_part, &region, static_cast<unsigned>(threads), 0);
}

}  // namespace octavo
