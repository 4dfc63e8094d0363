// The OpenMP runtime that torch has brought into the process. torch makes its symbols global, so they are found at run time
// and nothing is linked.
#pragma once

#include <cstdint>

namespace octavo {

// GNU's entry point, which the runtimes of LLVM and Intel have too.
struct OpenMP {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
    int (*max_threads)() = nullptr;
    int (*processors)() = nullptr;
    int (*in_parallel)() = nullptr;
    int (*pause)(int) = nullptr;  // since OpenMP 5.0
    bool is_gnu = false;

    static const OpenMP& runtime();

    bool is_complete() const { return parallel && max_threads && processors && in_parallel; }
    void end_team() const;  // the calling thread's

private:
    OpenMP();
};

// Lets threads that wait at the end of an operation sleep until then, torch's operations included: one that spins keeps the
// core from the thread that it waits for. Of GNU's runtime only. Time is that of now_ns().
void wait_asleep(int64_t until);

int64_t now_ns();

}  // namespace octavo
