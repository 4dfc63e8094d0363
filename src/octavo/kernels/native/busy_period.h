// When the machine counts as busy: for a while after a region of work waited for a thread that had no core.
//
// How busy it is cannot be read anywhere that containers, quotas and other guests of a host would all show. A late thread
// shows it: on free cores threads end a region within a part of each other, on a busy one a thread waits for its turn, which
// are milliseconds.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace octavo {

// Whether a region that was late by `wait` shows that a thread had no core, after `work`, in which the caller did `parts`.
// Both in ns. A thread may have begun a last part when the caller was done, on a core half as fast; and a caller that did
// none came late itself.
inline bool shows_busy_core(int64_t work, int64_t wait, int64_t parts) {
    constexpr int64_t LEAST = 2'000'000;  // below a scheduler's turn, above its noise
    return parts > 0 && wait > LEAST && wait > 2 * work / parts;
}

// Times are in ns, of any one clock.
class BusyPeriod {
public:
    // A period's end costs a late region where the machine is busy, so each that follows soon is longer.
    static constexpr int64_t SHORTEST = 50'000'000, LONGEST = 2'000'000'000, GROWTH = 4;

    bool contains(int64_t now) const { return now < end(); }
    int64_t end() const { return end_.load(std::memory_order_relaxed); }

    // A thread was late: begins a period, unless one lasts.
    void begin(int64_t now) {
        int64_t before = end();
        if (now < before) return;
        const int64_t length = length_.load(std::memory_order_relaxed);
        const int64_t next = now - before <= std::max(length, SHORTEST) ? std::clamp(GROWTH * length, SHORTEST, LONGEST) : SHORTEST;
        if (end_.compare_exchange_strong(before, now + next)) length_ = next;
    }

    // Of a length that is given: for tests.
    void set(int64_t now, int64_t length) {
        length_ = length;
        end_ = now + length;
    }

private:
    static constexpr int64_t NEVER = INT64_MIN / 2;
    std::atomic<int64_t> end_{NEVER}, length_{0};
};

}  // namespace octavo
