// OpenMP entry points and the team that makes GNU's runtime wait asleep (openmp.h).
#include "openmp.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace octavo {
namespace {

template <class F>
void find(F& function, const char* name) {
    function = reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name));
}

// GNU's runtime has no call that sets how its threads wait: they spin for milliseconds unless the threads of all teams are more
// than the cores. So one thread of octavo's keeps an extra team of as many threads as are missing, which only sleep. No result
// depends on it. Where the system can start no more threads, the team is left out, since failing to start one inside the
// runtime ends the process; can_start() tries first.
class SleepingTeam {
public:
    void keep(int64_t until) {
        const std::lock_guard<std::mutex> lock(mutex_);
        until_ = until;
        const OpenMP& openmp = OpenMP::runtime();
        // max_threads() of torch's team plus these exceed the processors.
        size_ = static_cast<unsigned>(std::max(2, openmp.processors() - openmp.max_threads() + 2));
        if (!started_) started_ = can_start([this] { run(); });
        begun_.notify_one();
    }

private:
    [[noreturn]] void run() {
        const OpenMP& openmp = OpenMP::runtime();
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            begun_.wait(lock, [this] { return now_ns() < until_; });
            if (can_start([] {})) openmp.parallel([](void*) {}, nullptr, size_, 0);
            for (int64_t left; (left = until_ - now_ns()) > 0;) begun_.wait_for(lock, std::chrono::nanoseconds(left));
            openmp.end_team();
        }
    }

    template <class F>
    static bool can_start(const F& work) {
        try {
            std::thread(work).detach();
        } catch (const std::system_error&) {
            return false;
        }
        return true;
    }

    std::mutex mutex_;
    std::condition_variable begun_;
    bool started_ = false;
    int64_t until_ = 0;
    unsigned size_ = 2;
};

}  // namespace

OpenMP::OpenMP() {
    find(parallel, "GOMP_parallel");
    find(max_threads, "omp_get_max_threads");
    find(processors, "omp_get_num_procs");
    find(in_parallel, "omp_in_parallel");
    find(pause, "omp_pause_resource_all");
    // LLVM's and Intel's runtimes have kmp_* calls, GNU's has none.
    is_gnu = dlsym(RTLD_DEFAULT, "kmp_set_blocktime") == nullptr;
}

const OpenMP& OpenMP::runtime() {
    static const OpenMP found;
    return found;
}

void OpenMP::end_team() const {
    constexpr int soft = 1;  // omp_pause_soft: threads end, settings stay
    if (pause) pause(soft);
}

void wait_asleep(int64_t until) {
    static SleepingTeam& team = *new SleepingTeam;  // its thread lives as long as the process
    const OpenMP& openmp = OpenMP::runtime();
    if (openmp.is_complete() && openmp.pause && openmp.is_gnu) team.keep(until);
}

int64_t now_ns() {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace octavo
