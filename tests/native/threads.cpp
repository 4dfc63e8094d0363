// The pool of threads and the busy period: what must hold whichever thread comes when. Helpers that come late, or never, are
// put in by hand, so that nothing here depends on time. Runs under ThreadSanitizer too (scripts/sanitize.sh).
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "busy_period.h"
#include "pool.h"

using octavo::BusyPeriod;
using octavo::InRegion;
using octavo::Pool;
using octavo::Region;
using octavo::shows_busy_core;

namespace {

int wrong = 0;

void expect(bool holds, const char* what) {
    if (holds) return;
    std::printf("threads: WRONG: %s\n", what);
    ++wrong;
}

// Counts how often every element is in a part.
struct Visits {
    explicit Visits(int64_t count) : each(static_cast<size_t>(count)) {}

    static void body(void* context, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) static_cast<Visits*>(context)->each[static_cast<size_t>(i)].fetch_add(1);
    }

    bool all_once() const {
        for (const auto& visits : each)
            if (visits != 1) return false;
        return true;
    }

    std::vector<std::atomic<int>> each;
};

bool runs_once(Pool& pool, int64_t count, int64_t part, int threads) {
    Visits visits(count);
    Region region{Visits::body, &visits, count, part};
    pool.run(region, threads);
    return visits.all_once();
}

void every_part_once() {
    Pool& pool = *new Pool;  // its threads never end
    bool all = true;
    for (int i = 0; i < 2000; ++i) all &= runs_once(pool, 1 + i % 97, 1 + i % 7, 2 + i % 3);
    expect(all, "every part runs once");
}

void helpers_that_never_come() {
    Pool pool([](Pool&, int) {});
    bool all = true;
    for (int i = 0; i < 100; ++i) all &= runs_once(pool, 64, 1, 4);
    expect(all, "the caller does all parts where no helper comes");
}

void helpers_that_cannot_start() {
    Pool pool([](Pool&, int) { throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again)); });
    expect(runs_once(pool, 64, 1, 4) && runs_once(pool, 64, 1, 4), "a region needs no helper");
}

std::atomic<bool> may_come{false};

void a_helper_that_comes_late() {
    Pool& pool = *new Pool([](Pool& own, int index) {
        std::thread([&own, index] {
            while (!may_come) std::this_thread::yield();
            own.help(index);
        }).detach();
    });
    expect(runs_once(pool, 64, 1, 2), "a region ends before its helper comes");
    may_come = true;
    bool all = true;
    for (int i = 0; i < 2000; ++i) all &= runs_once(pool, 64, 1, 2);
    expect(all, "a helper that comes late finds nothing of an ended region");
}

// The last two parts wait for each other, so two threads must have them. The first is so long that sleeping helpers are woken.
struct Meeting {
    static void body(void* context, int64_t begin, int64_t) {
        if (begin == 0) return std::this_thread::sleep_for(std::chrono::milliseconds(1));
        Meeting& meeting = *static_cast<Meeting*>(context);
        std::unique_lock<std::mutex> lock(meeting.mutex);
        ++meeting.here;
        meeting.threads.notify_all();
        meeting.threads.wait(lock, [&] { return meeting.here == 2; });
    }

    std::mutex mutex;
    std::condition_variable threads;
    int here = 0;
};

void sleeping_helpers_wake_for_long_regions() {
    Pool& pool = *new Pool;
    for (int i = 0; i < 20; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));  // longer than a helper spins
        Meeting meeting;
        Region region{Meeting::body, &meeting, 3, 1};
        pool.run(region, 2);
    }
}

void an_exception_ends_a_region_early() {
    Pool& pool = *new Pool;
    std::atomic<int> after{0};
    Region region{[](void* context, int64_t begin, int64_t) {
                      if (begin == 0) throw std::runtime_error("the first part");
                      static_cast<std::atomic<int>*>(context)->fetch_add(1);
                  },
                  &after, 8, 1};
    std::string told;
    try {
        pool.run(region, 2);
        region.rethrow();
    } catch (const std::runtime_error& error) {
        told = error.what();
    }
    expect(told == "the first part" && after < 8, "what a part throws is thrown again");
    expect(runs_once(pool, 64, 1, 2), "a pool works after an exception");
}

void callers_at_once() {
    Pool& pool = *new Pool;
    std::atomic<bool> all{true};
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 4; ++caller)
        callers.emplace_back([&] {
            for (int i = 0; i < 500; ++i)
                if (!runs_once(pool, 50, 1, 3)) all = false;
        });
    for (std::thread& caller : callers) caller.join();
    expect(all, "several callers at once have all their parts done");
}

void parts_know_that_they_are_parts() {
    Pool& pool = *new Pool;
    std::atomic<int> outside{0};
    Region region{[](void* context, int64_t, int64_t) { *static_cast<std::atomic<int>*>(context) += !octavo::in_region; },
                  &outside, 64, 1};
    pool.run(region, 3);
    expect(outside == 0 && !octavo::in_region, "a part is inside a region, and its caller is not any more");
}

void busy_periods() {
    BusyPeriod period;
    expect(!period.contains(0) && !period.contains(int64_t{1} << 60), "a machine begins as idle");
    period.begin(0);
    expect(period.contains(0) && period.contains(BusyPeriod::SHORTEST - 1) && !period.contains(BusyPeriod::SHORTEST), "the first period is short");
    period.begin(5);
    expect(period.end() == BusyPeriod::SHORTEST, "a late region in a period does not lengthen it");
    int64_t length = BusyPeriod::SHORTEST;
    for (int i = 0; i < 20; ++i) {
        const int64_t now = period.end() + 1;
        period.begin(now);
        length = std::min(BusyPeriod::GROWTH * length, BusyPeriod::LONGEST);
        expect(period.end() == now + length, "one that follows soon is longer, to a limit");
    }
    const int64_t later = period.end() + BusyPeriod::LONGEST + 1;
    period.begin(later);
    expect(period.end() == later + BusyPeriod::SHORTEST, "after as long without a late region they are short again");
}

void lateness() {
    constexpr int64_t ms = 1'000'000;
    expect(shows_busy_core(ms, 7 * ms, 8), "a wait of many parts shows a busy core");
    expect(shows_busy_core(0, 4 * ms, 1), "so does a thread that is late for no work");
    expect(!shows_busy_core(ms, ms, 8), "a millisecond is noise");
    expect(!shows_busy_core(80 * ms, 15 * ms, 8), "a last part that took its time is no late thread");
    expect(!shows_busy_core(0, 4 * ms, 0), "a caller that came last waits for a part");
}

}  // namespace

int main() {
    every_part_once();
    helpers_that_never_come();
    helpers_that_cannot_start();
    a_helper_that_comes_late();
    sleeping_helpers_wake_for_long_regions();
    an_exception_ends_a_region_early();
    callers_at_once();
    parts_know_that_they_are_parts();
    busy_periods();
    lateness();
    std::puts(wrong ? "threads: WRONG" : "threads: all right");
    std::fflush(stdout);
    std::_Exit(wrong ? EXIT_FAILURE : EXIT_SUCCESS);  // the pools' threads are still there
}
