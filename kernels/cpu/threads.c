/* threads.c: workers that spin for some microseconds after a job, then sleep on a futex.
 *
 * `job` counts starts and ends: odd while a job is open. A worker joins by raising n_joined and
 * then looking at `job` again; the caller ends a job by making `job` even and then waiting for
 * n_joined to fall to 0. Both sides write first and read after (seq_cst), so no worker works on a
 * closed job.
 */
#define _GNU_SOURCE
#include "kernels/cpu/threads.h"
#include "proto/attn_time.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAX_THREADS 256
#define SPINS 2000 /* some 20 to 60 us */

struct cpu_threads {
    _Alignas(64) _Atomic uint32_t job;
    _Atomic uint32_t n_asleep;
    _Atomic bool is_closing;
    cpu_job_fn fn;
    void *arg;
    _Alignas(64) _Atomic uint32_t n_joined;
    uint32_t n_threads;
    uint32_t n_started;
    struct worker {
        pthread_t id;
        struct cpu_threads *t;
        uint32_t index;
    } workers[MAX_THREADS];
};

static void futex_wait(_Atomic uint32_t *word, uint32_t seen)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake_all(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* Waits until job is no longer `seen`. */
static uint32_t wait_for_change(struct cpu_threads *t, uint32_t seen)
{
    uint32_t job;
    for (uint32_t i = 0; i < SPINS; i++) {
        if ((job = atomic_load(&t->job)) != seen)
            return job;
        attn_cpu_pause();
    }
    atomic_fetch_add(&t->n_asleep, 1);
    while ((job = atomic_load(&t->job)) == seen)
        futex_wait(&t->job, seen);
    atomic_fetch_sub(&t->n_asleep, 1);
    return job;
}

static void *worker_main(void *arg)
{
    struct worker *w = arg;
    struct cpu_threads *t = w->t;
    uint32_t job = 0;
    pthread_setname_np(pthread_self(), "attnd-cpu");
    while (!atomic_load(&t->is_closing)) {
        if (job % 2 == 1) {
            atomic_fetch_add(&t->n_joined, 1);
            if (atomic_load(&t->job) == job)
                t->fn(t->arg, w->index);
            if (atomic_fetch_sub(&t->n_joined, 1) == 1)
                futex_wake_all(&t->n_joined);
        }
        job = wait_for_change(t, job);
    }
    return NULL;
}

static uint32_t processors(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0)
        return (uint32_t)CPU_COUNT(&set);
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (uint32_t)n : 1;
}

attn_status cpu_threads_open(uint32_t n_threads, struct cpu_threads **out_t)
{
    struct cpu_threads *t = aligned_alloc(64, sizeof *t);
    if (t == NULL)
        return ATTN_ENOMEM;
    *t = (struct cpu_threads){.n_threads = n_threads ? n_threads : processors()};
    if (t->n_threads > MAX_THREADS)
        t->n_threads = MAX_THREADS;

    /* signals belong to the process's own threads */
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    for (uint32_t i = 1; i < t->n_threads; i++) {
        t->workers[i] = (struct worker){.t = t, .index = i};
        if (pthread_create(&t->workers[i].id, NULL, worker_main, &t->workers[i]) != 0)
            break;
        t->n_started++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (t->n_started + 1 < t->n_threads) {
        cpu_threads_close(t);
        return ATTN_ENOMEM;
    }
    *out_t = t;
    return ATTN_OK;
}

void cpu_threads_close(struct cpu_threads *t)
{
    if (t == NULL)
        return;
    atomic_store(&t->is_closing, true);
    atomic_fetch_add(&t->job, 2); /* stays even: no job */
    futex_wake_all(&t->job);
    for (uint32_t i = 1; i <= t->n_started; i++)
        pthread_join(t->workers[i].id, NULL);
    free(t);
}

uint32_t cpu_threads_count(const struct cpu_threads *t)
{
    return t->n_threads;
}

void cpu_threads_run(struct cpu_threads *t, cpu_job_fn fn, void *arg)
{
    if (t->n_started == 0) {
        fn(arg, 0);
        return;
    }
    t->fn = fn;
    t->arg = arg;
    atomic_fetch_add(&t->job, 1);
    if (atomic_load(&t->n_asleep) > 0)
        futex_wake_all(&t->job);
    fn(arg, 0);
    atomic_fetch_add(&t->job, 1);

    uint32_t joined;
    for (uint32_t i = 0; (joined = atomic_load(&t->n_joined)) != 0; i++) {
        if (i < SPINS)
            attn_cpu_pause();
        else
            futex_wait(&t->n_joined, joined);
    }
}
