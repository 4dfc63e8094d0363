// The OpenMP runtime of torch, called through symbols found at run time (torch loads it with global symbols). Nothing is
// linked: a second runtime in the process would have threads of its own beside torch's.
#pragma once

#include <cstdint>

namespace octavo {

// Entry points; null without a runtime. GOMP_parallel is GNU's, which the runtimes of LLVM and Intel offer too.
struct OpenMP {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
    int (*max_threads)() = nullptr;
    int (*processors)() = nullptr;
    int (*in_parallel)() = nullptr;
    int (*pause)(int) = nullptr;  // since OpenMP 5.0
    bool is_gnu = false;

    static const OpenMP& runtime();

    bool is_complete() const { return parallel && max_threads && processors && in_parallel; }
    void end_team() const;  // of the calling thread

private:
    OpenMP();
};

// Until then (in now_ns() time), threads that wait at the end of an operation sleep instead of spinning, torch's operations
// included: on a busy machine a spinning thread holds the core of the thread that it waits for. GNU's runtime only.
void wait_asleep(int64_t until);

int64_t now_ns();

}  // namespace octavo
