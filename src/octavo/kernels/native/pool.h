// Thread pool for a busy machine: a region ends when its parts are done, not when all threads have arrived.
//
// The caller takes parts like the others, and waits only for parts that others have begun; a thread that comes late finds none
// left. Between regions threads spin some 20 µs, then sleep, so that other work has the core, and are woken only for regions
// that turn out to be long. A thread that lost its core in the middle of a part pauses for 50 ms: fewer threads then work.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "region.h"

namespace octavo {

class Pool {
public:
    using Start = void (*)(Pool& pool, int index);  // lets a thread run help(index)

    explicit Pool(Start start = in_thread) : start_(start) {}

    // Runs the region on at most `threads` threads, the caller's among them. On the caller's alone while another thread's
    // region runs, and inside a part.
    void run(Region& region, int threads);

    // A helper thread's loop; never returns.
    [[noreturn]] void help(int index);

    static void in_thread(Pool& pool, int index);

private:
    void begin(Region& region, int helpers);
    void wait_for_parts(int index);
    void wait_for_helpers();
    template <class F>
    void take_parts(const F& go_on);
    void run_part(int64_t left);
    void wake_helpers();
    bool has_parts_for(int index) const { return left_ > 0 && index < helpers_; }

    const Start start_;
    std::mutex turn_;  // held by the thread whose region runs
    int started_ = 0;  // helpers, ever

    // Read only by a thread that has claimed a part; the caller changes it when no part is left and all are done.
    Region* region_ = nullptr;
    std::atomic<int64_t> left_{0}, unfinished_{0};  // unclaimed parts; parts that are not done
    std::atomic<int> helpers_{0}, asleep_{0};
    std::mutex mutex_;  // of both condition variables
    std::condition_variable begun_, finished_;
};

}  // namespace octavo
