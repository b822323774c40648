#include "parallel.h"
#if defined(__linux__)
#include <sched.h>
#endif

void Team::arrive(int32_t thread) {
#if defined(__linux__)
    if (thread < watched_cores) __atomic_store_n(&cores[thread], sched_getcpu(), __ATOMIC_RELAXED);
#else
    (void)thread;
#endif
}

bool Team::part(int32_t thread) {
#if defined(__linux__)
    arrive(thread);
    const int32_t here = sched_getcpu();
    bool shared = false;
    for (int32_t other = 0; other < threads && other < watched_cores; ++other)
        shared |= other != thread && __atomic_load_n(&cores[other], __ATOMIC_RELAXED) == here;
    cpu_set_t allowed;
    if (!shared || here < 0 || here >= CPU_SETSIZE || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return false;
    cpu_set_t others = allowed;
    CPU_CLR(here, &others);
    // Forbidding the core moves the thread at once; where it may run afterwards stays as it was.
    if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0) return false;
    sched_setaffinity(0, sizeof allowed, &allowed);
    arrive(thread);
    return true;
#else
    (void)thread;
    return false;
#endif
}

void Team::sleep(int32_t seen) {
    pthread_mutex_lock(&mutex);
    __atomic_add_fetch(&sleepers, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&generation, __ATOMIC_SEQ_CST) == seen) pthread_cond_wait(&moved, &mutex);
    __atomic_sub_fetch(&sleepers, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&mutex);
}

void Team::wake() {
    pthread_mutex_lock(&mutex);
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&mutex);
}

namespace {

// How long an idle worker watches for the next job before it sleeps: longer than the pause between two passes of a
// decoding loop, short enough not to be noticed as load.
constexpr int32_t idle_spins = 20000;

struct Pool {
    Team team;
    int32_t asked = 1;    // the team is smaller where the system refused a thread
    Job job = nullptr;
    void* context = nullptr;
    alignas(64) int64_t epoch = 0;
    alignas(64) int32_t parked = 0;
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
    bool closing = false;
};

struct Worker {
    Pool* pool;
    int32_t thread;
};

void await_epoch(Pool& pool, int64_t seen) {
    for (int32_t spins = 0; spins < idle_spins; ++spins) {
        if (__atomic_load_n(&pool.epoch, __ATOMIC_ACQUIRE) != seen) return;
        DECODERY_PAUSE();
    }
    pthread_mutex_lock(&pool.mutex);
    __atomic_add_fetch(&pool.parked, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&pool.epoch, __ATOMIC_SEQ_CST) == seen) pthread_cond_wait(&pool.wake, &pool.mutex);
    __atomic_sub_fetch(&pool.parked, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&pool.mutex);
}

void* work(void* argument) {
    const Worker worker = *static_cast<Worker*>(argument);
    delete static_cast<Worker*>(argument);
    Pool& pool = *worker.pool;
    for (int64_t seen = 0;; ++seen) {
        await_epoch(pool, seen);
        const bool closing = pool.closing;
        pool.team.arrive(worker.thread);
        if (!closing) pool.job(pool.context, worker.thread, pool.team);
        pool.team.barrier(worker.thread);
        if (closing) return nullptr;
    }
}

void start(Pool& pool, Job job, void* context) {
    pool.job = job;
    pool.context = context;
    __atomic_add_fetch(&pool.epoch, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&pool.parked, __ATOMIC_SEQ_CST) > 0) {
        pthread_mutex_lock(&pool.mutex);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.mutex);
    }
}

Pool* create(int32_t threads) {
    Pool* pool = new Pool;
    pool->asked = threads;
    for (int32_t thread = 1; thread < threads; ++thread) {
        pthread_t id;
        if (pthread_create(&id, nullptr, work, new Worker{pool, thread}) != 0) break;
        pthread_detach(id);
        pool->team.threads = thread + 1;
    }
    return pool;
}

void close(Pool* pool) {
    pool->closing = true;
    start(*pool, nullptr, nullptr);
    pool->team.barrier(0);
    // The workers may still be leaving the barrier: the few bytes of a closed pool are left to the process.
}

Pool* current = nullptr;
pthread_mutex_t one_job = PTHREAD_MUTEX_INITIALIZER;

#if !defined(_WIN32)
// A forked child has none of its parent's workers; it starts its own at its first job.
void before_fork() { pthread_mutex_lock(&one_job); }
void parent_after_fork() { pthread_mutex_unlock(&one_job); }
void child_after_fork() {
    current = nullptr;
    pthread_mutex_init(&one_job, nullptr);
}
const int registered = pthread_atfork(before_fork, parent_after_fork, child_after_fork);
#endif

}  // namespace

void run_parallel(int32_t threads, Job job, void* context) {
    if (threads == 1) {
        // Nobody to wait for, so that several of these may run at a time, beside one that takes the pool.
        Team team;
        job(context, 0, team);
        return;
    }
    pthread_mutex_lock(&one_job);
    if (current != nullptr && current->asked != threads) {
        close(current);
        current = nullptr;
    }
    if (current == nullptr) current = create(threads);
    Pool& pool = *current;
    start(pool, job, context);
    pool.team.arrive(0);
    job(context, 0, pool.team);
    pool.team.barrier(0);
    pthread_mutex_unlock(&one_job);
}
