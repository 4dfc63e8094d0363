// Detection of a busy machine: it counts as busy for a while after a parallel region waited for a thread that had no core.
//
// No counter shows the load of containers, quotas and other guests of a host together. A late thread does: on free cores
// threads end a region within a part of each other, on a busy core a thread waits for its turn, which takes milliseconds. The
// times are measured in benchmarks/results/busy_*.md, the rules tested in tests/native/threads.cpp.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace octavo {

// Whether a region shows that a thread had no core: the caller did `parts` parts in `work` ns and then waited `wait` ns for the
// others. Up to two parts' time is normal: a thread may have begun its last part as the caller ended, on a core half as fast. A
// caller that did no part was late itself, and proves nothing.
inline bool shows_busy_core(int64_t work, int64_t wait, int64_t parts) {
    constexpr int64_t LEAST = 2'000'000;  // below a scheduler's turn, above its noise
    return parts > 0 && wait > LEAST && wait > 2 * work / parts;
}

// The end of the busy period, shared by all threads without a lock. Times are in ns, of any one clock.
class BusyPeriod {
public:
    // Each end of a period costs one late region if the machine is still busy, so a period that follows soon is four times as
    // long.
    static constexpr int64_t SHORTEST = 50'000'000, LONGEST = 2'000'000'000, GROWTH = 4;

    bool contains(int64_t now) const { return now < end(); }
    int64_t end() const { return end_.load(std::memory_order_relaxed); }

    // A thread was late: begins a period, unless one lasts.
    void begin(int64_t now) {
        int64_t before = end();
        if (now < before) return;
        const int64_t length = length_.load(std::memory_order_relaxed);
        const int64_t next = now - before <= std::max(length, SHORTEST) ? std::clamp(GROWTH * length, SHORTEST, LONGEST) : SHORTEST;
        // Of threads that come here together, one begins the period.
        if (end_.compare_exchange_strong(before, now + next)) length_ = next;
    }

    // A period of a given length, for tests and benchmarks.
    void set(int64_t now, int64_t length) {
        length_ = length;
        end_ = now + length;
    }

private:
    static constexpr int64_t NEVER = INT64_MIN / 2;
    std::atomic<int64_t> end_{NEVER}, length_{0};
};

}  // namespace octavo
