#include "parallel.h"

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
        if (!closing) pool.job(pool.context, worker.thread, pool.team);
        pool.team.barrier();
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
    pool->team.barrier();
    // The workers may still be leaving the barrier: the few bytes of a closed pool are left to the process.
}

Pool* current = nullptr;
pthread_mutex_t one_job = PTHREAD_MUTEX_INITIALIZER;

// A forked child has none of its parent's workers; it starts its own at its first job.
void before_fork() { pthread_mutex_lock(&one_job); }
void parent_after_fork() { pthread_mutex_unlock(&one_job); }
void child_after_fork() {
    current = nullptr;
    pthread_mutex_init(&one_job, nullptr);
}
const int registered = pthread_atfork(before_fork, parent_after_fork, child_after_fork);

}  // namespace

void run_parallel(int32_t threads, Job job, void* context) {
    pthread_mutex_lock(&one_job);
    if (current != nullptr && current->asked != threads) {
        close(current);
        current = nullptr;
    }
    if (current == nullptr) current = create(threads);
    Pool& pool = *current;
    start(pool, job, context);
    job(context, 0, pool.team);
    pool.team.barrier();
    pthread_mutex_unlock(&one_job);
}
