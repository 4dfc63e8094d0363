// The pool's threads (pool.h): claiming parts, sleeping and waking.
#include "pool.h"

#include <time.h>

#include <chrono>
#include <system_error>
#include <thread>

namespace octavo {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int SPINS = 1000;  // some 20 µs: longer than between two regions of a decoder's layer, so helpers are awake for the next
// The caller works alone this long before it wakes helpers: waking one takes about 10 µs, mostly of the caller's time.
constexpr auto ALONE = std::chrono::microseconds(50);
// A helper that stood still longer than LOST had no core; it leaves the regions of the next REST to the others.
constexpr auto LOST = std::chrono::milliseconds(1), REST = std::chrono::milliseconds(50);

// Tells the core that this is a spin loop: it yields to the other hardware thread.
void pause() {
#if defined(__SSE2__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Wall-clock time less CPU time of the calling thread: how long it had no core, or waited for a page.
class Standstill {
public:
    bool is_long() const { return (Clock::now() - begun_) - (cpu_time() - used_) > LOST; }

private:
    static std::chrono::nanoseconds cpu_time() {
        timespec used{};
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
        return std::chrono::seconds(used.tv_sec) + std::chrono::nanoseconds(used.tv_nsec);
    }

    const Clock::time_point begun_ = Clock::now();
    const std::chrono::nanoseconds used_ = cpu_time();
};

// Spins for `condition`; false if it did not come in SPINS turns.
template <class F>
bool comes_soon(const F& condition) {
    for (int i = 0; i < SPINS; ++i) {
        if (condition()) return true;
        pause();
    }
    return false;
}

}  // namespace

template <class F>
void Pool::take_parts(const F& go_on) {
    const InRegion taking;
    for (int64_t left = left_; left > 0 && go_on(); left = left_)
        // A claim by compare and swap never takes left_ below 0, so a helper that is late by a region claims a part of the new
        // one or none.
        if (left_.compare_exchange_weak(left, left - 1)) run_part(left);
}

void Pool::in_thread(Pool& pool, int index) {
    std::thread([&pool, index] { pool.help(index); }).detach();
}

void Pool::run(Region& region, int threads) {
    const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn) {  // another thread's region is running
        for (int64_t i = 0; i < region.parts(); ++i) region.run(i);
        return;
    }
    begin(region, threads - 1);
    const auto later = Clock::now() + ALONE;
    take_parts([later] { return Clock::now() < later; });
    wake_helpers();
    take_parts([] { return true; });
    wait_for_helpers();
}

void Pool::begin(Region& region, int helpers) {
    try {
        for (; started_ < helpers; ++started_) start_(*this, started_);
    } catch (const std::system_error&) {  // out of memory or thread limit: the threads there are do all parts
    }
    // left_ last: it publishes the region.
    region_ = &region;
    helpers_ = helpers;
    unfinished_ = region.parts();
    left_ = region.parts();
}

void Pool::wake_helpers() {
    if (left_ == 0 || asleep_ == 0) return;  // no wake-up is lost: a sleeper counts itself, then reads left_
    { const std::lock_guard<std::mutex> lock(mutex_); }
    begun_.notify_all();
}

void Pool::help(int index) {
    for (;;) {
        wait_for_parts(index);
        const Standstill standstill;
        take_parts([&standstill] { return !standstill.is_long(); });
        if (standstill.is_long()) std::this_thread::sleep_for(REST);  // this region waited for it; the next ones shall not
    }
}

void Pool::wait_for_parts(int index) {
    const auto ready = [this, index] { return has_parts_for(index); };
    if (comes_soon(ready)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    ++asleep_;
    begun_.wait(lock, ready);
    --asleep_;
}

void Pool::run_part(int64_t left) {
    region_->run(region_->parts() - left);
    if (--unfinished_ > 0) return;
    { const std::lock_guard<std::mutex> lock(mutex_); }  // not read any more: the region may be gone
    finished_.notify_one();
}

void Pool::wait_for_helpers() {
    const auto done = [this] { return unfinished_ == 0; };
    if (comes_soon(done)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, done);  // asleep: the core may be what the helper waits for
}

}  // namespace octavo
