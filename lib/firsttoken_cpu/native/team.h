// Threads that share the items of one phase after another. None waits for another's arrival: a thread that was not let run
// finds a phase done and goes on to the next, so that only an item in its hands holds the others up. With a barrier between
// phases, which a step has 200 of, a step beside a busy process took a hundred times as long.

#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

// A thread of the team, and where it is.
class Member;

class Team {
public:
    Team(int threads, int64_t phases) : threads_(threads), counters_(phases * (threads + 1)) {}

private:
    friend class Member;
    struct alignas(64) Counter {  // a line of the cache of its own
        std::atomic<int64_t> value{0};
    };

    const int threads_;
    std::atomic<int> joined_{0};
    std::vector<Counter> counters_;  // of a phase: what is taken of each thread's items, and how many are done
};

class Member {
public:
    explicit Member(Team& team) : team_(team), index_(team.joined_.fetch_add(1)) {}

    // Calls work(i) for each i below items, once in the whole team, and returns when all are done. A thread begins with those
    // of its own, which lie side by side, and then takes those that others have not come to.
    template <class Work>
    void share(int64_t items, Work&& work) {
        Team::Counter* const taken = &team_.counters_[phase_++ * (team_.threads_ + 1)];
        std::atomic<int64_t>& done = taken[team_.threads_].value;
        for (int turn = 0; turn < team_.threads_; ++turn) {
            const int thread = (index_ + turn) % team_.threads_;
            const int64_t first = items * thread / team_.threads_, last = items * (thread + 1) / team_.threads_;
            // who is about to end has the next item's bytes on their way: it is left to it
            if (turn == 1)
                for (int tries = 0; tries < GRACE && done.load(std::memory_order_acquire) < items; ++tries) pause();
            int64_t count = 0;
            for (int64_t item; (item = first + taken[thread].value.fetch_add(1, std::memory_order_relaxed)) < last; ++count)
                work(item);
            if (count) done.fetch_add(count, std::memory_order_release);
        }
        for (int tries = 0; done.load(std::memory_order_acquire) < items; ++tries)
            if (tries < SPINS) pause();
            else std::this_thread::yield();
    }

private:
    static constexpr int GRACE = 100, SPINS = 1000;  // pauses: one and some ten microseconds

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    Team& team_;
    const int index_;
    int64_t phase_ = 0;
};

// Calls work(member) in each of so many threads, in which member.share is called phases times at most.
template <class Work>
void with_team(int threads, int64_t phases, Work&& work) {
    Team team(threads, phases);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Member member(team);
        work(member);
    }
}

}  // namespace
