// parallel_for: on torch's OpenMP threads while cores are free, on octavo's own (pool.h) while the machine is busy.
//
// Torch's threads spin for a while after each of its operations. Own threads beside them made a training step on idle cores
// 1.12 to 1.14 times as long. On a busy machine OpenMP's regions wait for threads that have no core, several ms each. So a
// region that had to wait (busy_period.h) puts the following ones on the pool for a while. In a forked child, where the runtime
// would wait for threads that do not exist there, all regions run on the pool. Results do not depend on any of this: kernels
// fix their order of additions.
#pragma once

#include <cstdint>

#include "region.h"

namespace octavo {

// Whether an OpenMP runtime was found in the process.
bool has_threads();

// Ends the calling thread's OpenMP team, whose other threads wait for its next work; the next region makes a new one.
// The runtime counts all teams' threads, and where they are more than there are cores none of them spins any more: each
// operation then wakes threads that sleep, which made a decoder's steps of 16 rows 1.4 to 1.8 times as long.
void release_threads();

// The number of threads the calling thread may use: torch.set_num_threads' number if it was called there, or torch has worked
// there since, else OMP_NUM_THREADS'. Where that is the number of cores, the default, at most limit_threads'. 1 without a
// runtime and inside another parallel region.
int max_threads();

// Sets the most threads that a container's CPU quota allows.
void limit_threads(int most);

// Runs an empty region, which detects whether the calling thread's team has a core each, as every larger region does.
void check_threads();

// Whether regions run on the pool now; and makes them for some seconds, for tests and benchmarks.
bool is_busy();
void assume_busy(double seconds);

using Body = Region::Body;

// Runs body(context, begin, end) over [0, count) in parts of at least `grain`, on at most max_threads() threads. An exception
// in a part ends the others early; the first is thrown again on the calling thread.
void parallel_for(int64_t count, int64_t grain, Body body, void* context);

template <class F>
void parallel_for(int64_t count, int64_t grain, const F& f) {
    parallel_for(
        count, grain,
        [](void* context, int64_t begin, int64_t end) { (*static_cast<const F*>(context))(begin, end); },
        const_cast<void*>(static_cast<const void*>(&f)));
}

}  // namespace octavo
