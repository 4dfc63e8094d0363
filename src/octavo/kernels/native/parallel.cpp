// The selection between OpenMP and the pool for a region (parallel.h).
#include "parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <thread>

#include "busy_period.h"
#include "openmp.h"
#include "pool.h"

namespace octavo {
namespace {

// Parts a thread, if all are equally fast. The caller waits for a late thread's last part, an eighth of its share.
constexpr int64_t TURNS = 8;

std::atomic<int> limit{INT_MAX};
BusyPeriod busy;

// Threads do not survive a fork, so a child gets a new pool. Pools are never destroyed: their threads live as long as the
// process.
std::atomic<Pool*> pool{new Pool};
std::atomic<bool> forked{false};
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] {
    pool = new Pool;
    forked = true;
});

// An OpenMP region: threads take parts from a shared counter, since cores are not equally fast and some have other work
// (prefill became 15 % faster than with fixed halves). The caller notes how many parts it did and when it ran out, for
// shows_busy_core().
struct Team {
    Region& region;
    const std::thread::id caller = std::this_thread::get_id();
    std::atomic<int64_t> next{0};
    int64_t taken = 0, idle_since = 0;  // the caller's

    static void take_parts(void* argument) {
        Team& team = *static_cast<Team*>(argument);
        const InRegion taking;
        const int64_t parts = team.region.parts();
        int64_t taken = 0;
        for (int64_t i; (i = team.next.fetch_add(1, std::memory_order_relaxed)) < parts; ++taken) team.region.run(i);
        if (std::this_thread::get_id() != team.caller) return;
        team.taken = taken;
        team.idle_since = now_ns();
    }
};

void run_on_team(Region& region, int threads, int64_t begun) {
    Team team{region};
    OpenMP::runtime().parallel(Team::take_parts, &team, static_cast<unsigned>(threads), 0);
    const int64_t ended = now_ns();
    // GOMP_parallel returns when every thread has arrived: the wait beyond the caller's own end is measured.
    if (!shows_busy_core(team.idle_since - begun, ended - team.idle_since, team.taken)) return;
    busy.begin(ended);
    wait_asleep(busy.end());
}

void run_region(Region& region, int threads) {
    const int64_t now = now_ns();
    if (forked || busy.contains(now)) pool.load()->run(region, threads);
    else run_on_team(region, threads, now);
    region.rethrow();
}

}  // namespace

bool has_threads() { return OpenMP::runtime().is_complete(); }

void release_threads() { OpenMP::runtime().end_team(); }

int max_threads() {
    const OpenMP& openmp = OpenMP::runtime();
    if (in_region || !openmp.is_complete() || openmp.in_parallel()) return 1;
    const int threads = openmp.max_threads();
    const int most = limit;
    return std::max(1, threads > most && threads == openmp.processors() ? most : threads);  // processors() is a system call
}

void limit_threads(int most) { limit = most; }

void check_threads() {
    parallel_for(max_threads(), 1, [](int64_t, int64_t) {});
}

bool is_busy() { return busy.contains(now_ns()); }

void assume_busy(double seconds) {
    busy.set(now_ns(), static_cast<int64_t>(seconds * 1e9));
    wait_asleep(busy.end());
}

void parallel_for(int64_t count, int64_t grain, Body body, void* context) {
    const int64_t parts = count / std::max<int64_t>(grain, 1);
    const int threads = static_cast<int>(std::min<int64_t>(max_threads(), parts));
    Region region{body, context, count, std::max<int64_t>(count, 1)};
    // One part is the region itself, on the caller, without a thread.
    if (threads > 1) {
        region.part = std::max<int64_t>({grain, 1, count / (threads * TURNS)});
        run_region(region, threads);
    } else if (count > 0) {
        region.run(0);
        region.rethrow();
    }
}

}  // namespace octavo
