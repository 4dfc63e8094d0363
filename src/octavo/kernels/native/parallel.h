// Threads: those of the OpenMP runtime that torch has brought into the process.
//
// A runtime of our own would put a second team of threads beside torch's, which spin for a while after each of its
// operations: two teams on one set of cores make both many times slower. torch makes its runtime's symbols global, so
// they are found at run time and nothing is linked. Where there are none, everything runs on the calling thread.
#pragma once

#include <cstdint>

namespace octavo {

// Whether torch's runtime was found.
bool has_threads();

// Ends the calling thread's team, whose other threads wait for its next work; it has a new one as soon as it needs one. The
// runtime counts all teams' threads, and where they are more than there are cores none of them spins any more: each
// operation then wakes threads that sleep, which made a decoder's steps of 16 rows 1.4 to 1.8 times as long.
void release_threads();

// How many the calling thread may use: torch.set_num_threads' number if it was called there, or torch has worked there since,
// else OMP_NUM_THREADS'. 1 without a runtime and inside another parallel region.
int max_threads();

using Body = void (*)(void* context, int64_t begin, int64_t end);

// Runs body(context, begin, end) over [0, count) in parts of at least `grain`, on at most max_threads() threads. What a part
// throws ends the others early and is thrown again, the first of it.
void parallel_for(int64_t count, int64_t grain, Body body, void* context);

template <class F>
void parallel_for(int64_t count, int64_t grain, const F& f) {
    parallel_for(
        count, grain,
        [](void* context, int64_t begin, int64_t end) { (*static_cast<const F*>(context))(begin, end); },
        const_cast<void*>(static_cast<const void*>(&f)));
}

}  // namespace octavo
