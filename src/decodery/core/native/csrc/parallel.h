// The threads of one process: a pool that runs one job at a time, and the barrier between the stages of a job.
#pragma once
#include <pthread.h>
#include <stdint.h>
#if defined(__x86_64__) || defined(__i386__)
#define DECODERY_PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define DECODERY_PAUSE() __asm__ __volatile__("yield")
#else
#define DECODERY_PAUSE() ((void)0)
#endif

constexpr int32_t barrier_spins = 1000;
constexpr int32_t watched_cores = 64;

// Threads wait spinning, because a stage takes microseconds. One that waits long sleeps: its core is then free to run
// the thread it waits for, which another process may have pushed aside. If it is this team's own thread that shares the
// core, the one that waits moves to another core first: of two threads of which one always sleeps the system sees no
// cause to move either, and they would take turns for seconds.
struct Team {
    alignas(64) int32_t arrived = 0;
    alignas(64) int32_t generation = 0;
    alignas(64) int32_t next = 0;    // next work item of a stage whose items are handed out one by one
    alignas(64) int32_t sleepers = 0;
    int32_t threads = 1;
    int32_t cores[watched_cores];    // where each thread was last seen
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t moved = PTHREAD_COND_INITIALIZER;

    Team() {
        for (int32_t& core : cores) core = -1;
    }
    void barrier(int32_t thread) {
        const int32_t seen = __atomic_load_n(&generation, __ATOMIC_RELAXED);
        if (threads == 1 || __atomic_add_fetch(&arrived, 1, __ATOMIC_ACQ_REL) == threads) {
            arrived = 0;
            next = 0;
            __atomic_store_n(&generation, seen + 1, __ATOMIC_SEQ_CST);
            if (__atomic_load_n(&sleepers, __ATOMIC_SEQ_CST) > 0) wake();
            return;
        }
        if (spin(seen)) return;
        if (part(thread) && spin(seen)) return;
        sleep(seen);
    }
    bool spin(int32_t seen) const {
        for (int32_t spins = 0; spins < barrier_spins; ++spins) {
            if (__atomic_load_n(&generation, __ATOMIC_ACQUIRE) != seen) return true;
            DECODERY_PAUSE();
        }
        return false;
    }
    int32_t take() { return __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED); }

    void arrive(int32_t thread);    // notes the core it runs on
    bool part(int32_t thread);      // leaves a core that another thread of the team was last seen on; whether it did
    void sleep(int32_t seen);
    void wake();
};

// job(context, thread, team) runs once on every thread; returns when all are done.
using Job = void (*)(void* context, int32_t thread, Team& team);
void run_parallel(int32_t threads, Job job, void* context);

struct Range {
    int32_t begin, end;
};
// Thread `thread`'s share of `count` items: contiguous, sizes differ by at most one.
inline Range share(int32_t count, int32_t thread, int32_t threads) {
    return {int32_t(int64_t(count) * thread / threads), int32_t(int64_t(count) * (thread + 1) / threads)};
}
