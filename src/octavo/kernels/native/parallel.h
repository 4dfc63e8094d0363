// Threads: those of the OpenMP runtime that torch has brought into the process, while the machine has cores for them.
//
// Threads of our own beside torch's, which spin for a while after each of its operations, lose where the machine is idle: a
// training step took 1.12 to 1.14 times as long. Where it is busy, OpenMP's regions wait for threads that have no core, for
// several ms each. So a region that had to wait (busy_period.h) puts the following ones on our own threads (pool.h) for a
// while. In a forked child, where the runtime would wait for threads that it does not have, all regions run on them.
#pragma once

#include <cstdint>

#include "region.h"

namespace octavo {

// Whether torch's runtime was found.
bool has_threads();

// Ends the calling thread's OpenMP team, whose other threads wait for its next work; it has a new one as soon as it needs one.
// The runtime counts all teams' threads, and where they are more than there are cores none of them spins any more: each
// operation then wakes threads that sleep, which made a decoder's steps of 16 rows 1.4 to 1.8 times as long.
void release_threads();

// How many the calling thread may use: torch.set_num_threads' number if it was called there, or torch has worked there since,
// else OMP_NUM_THREADS'. Where that is the number of cores, the default, at most limit_threads'. 1 without a runtime
// and inside another parallel region.
int max_threads();

// What a container's quota allows.
void limit_threads(int most);

// Looks whether the calling thread's team finds a core each; every larger region looks, too.
void check_threads();

// Whether regions run on our own threads now, and lets them for a time: a test's or a benchmark's.
bool is_busy();
void assume_busy(double seconds);

using Body = Region::Body;

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
