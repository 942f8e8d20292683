/* thread.c: the daemon's threads, as coroutines of the one thread that there is. Each runs until it
 * waits for something (time, a condition, a semaphore, another thread's end) and goes on after the
 * event that brings it. The event loop's thread is the world's own stack: where it waits, events
 * run inside of its wait. A process that is gone takes its threads with it, wherever they are.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#define FIBER_LEAVE(save, to_stack, n) __sanitizer_start_switch_fiber(save, to_stack, n)
#define FIBER_ENTER(save, old_stack, n) __sanitizer_finish_switch_fiber(save, old_stack, n)
#else
#define FIBER_LEAVE(save, to_stack, n) ((void)(save), (void)(to_stack), (void)(n))
#define FIBER_ENTER(save, old_stack, n) ((void)(save), (void)(old_stack), (void)(n))
#endif

#include "sim.h"

enum { MAX_THREADS = 48, STACK_BYTES = 1 << 20 };

struct thread {
    ucontext_t at;
    uint8_t *stack; /* stays when the thread is gone */
    void *fake_stack;
    void *(*fn)(void *arg);
    void *arg, *result;
    bool is_used, is_done;
    uint64_t wake_ns; /* it goes on then, whatever is */
    bool (*is_ready)(void *arg); /* or when this is so; NULL: only then */
    void *ready_arg;
    const void *cond; /* that it waits for; NULL: none, or it was signalled */
};

static struct thread threads[MAX_THREADS];
static uint32_t n_threads; /* used and not */
static struct thread *running; /* NULL: the world's own stack */
static ucontext_t world;
static void *world_fake_stack;
static const void *world_stack;
static size_t world_stack_bytes;
static bool is_left; /* the process ended inside of the coroutine */

void *__real_mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset);
void *__wrap_mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset);
int __real_pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*fn)(void *), void *arg);
int __wrap_pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*fn)(void *), void *arg);
int __real_pthread_join(pthread_t t, void **out);
int __wrap_pthread_join(pthread_t t, void **out);
int __real_pthread_mutex_lock(pthread_mutex_t *m);
int __wrap_pthread_mutex_lock(pthread_mutex_t *m);
int __wrap_pthread_cond_wait(pthread_cond_t *c, pthread_mutex_t *m);
int __wrap_pthread_cond_signal(pthread_cond_t *c);
int __wrap_pthread_cond_broadcast(pthread_cond_t *c);
int __wrap_sem_timedwait(sem_t *s, const struct timespec *until);
int __wrap_sem_wait(sem_t *s);
int __wrap_sched_yield(void);
int __wrap_setpriority(int which, id_t who, int value);

/* --- switching -------------------------------------------------------------------------------- */

static void to_world(struct thread *t)
{
    FIBER_LEAVE(t->is_done ? NULL : &t->fake_stack, world_stack, world_stack_bytes);
    swapcontext(&t->at, &world);
    FIBER_ENTER(t->fake_stack, &world_stack, &world_stack_bytes);
}

static void thread_main(void)
{
    FIBER_ENTER(NULL, &world_stack, &world_stack_bytes);
    struct thread *t = running;
    t->result = t->fn(t->arg);
    t->is_done = true;
    to_world(t);
}

static void resume(struct thread *t)
{
    bool was_daemon = sim_is_daemon;
    sim_is_daemon = true;
    running = t;
    FIBER_LEAVE(&world_fake_stack, t->stack, STACK_BYTES);
    swapcontext(&world, &t->at);
    FIBER_ENTER(world_fake_stack, NULL, NULL);
    running = NULL;
    sim_is_daemon = was_daemon;
    if (is_left) {
        is_left = false;
        process_leave();
    }
}

void thread_leave(void)
{
    is_left = running != NULL;
    if (is_left)
        to_world(running);
}

bool thread_is_one(void)
{
    return running != NULL;
}

const void *thread_running(void)
{
    return running;
}

static bool is_due(const struct thread *t)
{
    if (t->cond != NULL)
        return false;
    return sim_now_ns >= t->wake_ns || (t->is_ready != NULL && t->is_ready(t->ready_arg));
}

void threads_run(void)
{
    if (running != NULL)
        return;
    uint32_t first = n_threads > 1 ? sim_below(n_threads) : 0;
    for (uint32_t i = 0; i < n_threads; i++) {
        struct thread *t = &threads[(first + i) % n_threads];
        if (t->is_used && !t->is_done && is_due(t))
            resume(t);
    }
}

static void on_wake(void *arg, uint64_t word)
{
    (void)arg, (void)word; /* threads are looked at after every event */
}

bool thread_wait(bool (*is_ready)(void *arg), void *arg, uint64_t until_ns)
{
    struct thread *t = running;
    if (t == NULL) {
        while (is_ready == NULL || !is_ready(arg))
            if (!sim_step(until_ns))
                return false;
        return true;
    }
    t->is_ready = is_ready;
    t->ready_arg = arg;
    t->wake_ns = until_ns;
    if (until_ns != UINT64_MAX)
        sim_at(until_ns > sim_now_ns ? until_ns - sim_now_ns : 0, SIM_PROCESS, on_wake, NULL, 0);
    to_world(t);
    return is_ready != NULL && is_ready(arg);
}

void thread_sleep(uint64_t ns)
{
    thread_wait(NULL, NULL, sim_now_ns + ns);
}

void thread_lose_core(void)
{
    if (running != NULL && sim_has_faults && sim_chance(100 * sim_plan.stop))
        thread_sleep(sim_between(SIM_US, 5 * SIM_MS));
}

/* --- life ------------------------------------------------------------------------------------- */

/* Apart from thread_start(), whose variables need not outlive a getcontext() that returns twice. */
static void make_context(struct thread *t)
{
    getcontext(&t->at);
    t->at.uc_stack.ss_sp = t->stack;
    t->at.uc_stack.ss_size = STACK_BYTES;
    t->at.uc_link = NULL;
    makecontext(&t->at, thread_main, 0);
}

uint32_t thread_start(void *(*fn)(void *arg), void *arg)
{
    uint32_t i = 0;
    while (i < n_threads && threads[i].is_used)
        i++;
    if (i == MAX_THREADS)
        sim_fail("the daemon has more than %u threads", MAX_THREADS);
    n_threads = i == n_threads ? n_threads + 1 : n_threads;
    struct thread *t = &threads[i];
    uint8_t *stack = t->stack;
    if (stack == NULL)
        stack = __real_mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED)
        sim_fail("no memory for a thread's stack");
    *t = (struct thread){.stack = stack, .fn = fn, .arg = arg, .is_used = true};
    uint64_t delay_ns = sim_below(30000);
    t->wake_ns = sim_now_ns + delay_ns;
    make_context(t);
    sim_at(delay_ns, SIM_PROCESS, on_wake, NULL, 0);
    return i;
}

static bool is_done(void *arg)
{
    const struct thread *t = arg;
    return t->is_done;
}

void *thread_join(uint32_t thread)
{
    struct thread *t = &threads[thread];
    thread_wait(is_done, t, UINT64_MAX);
    t->is_used = false;
    return t->result;
}

void threads_forget(void)
{
    for (uint32_t i = 0; i < n_threads; i++)
        threads[i].is_used = false;
    n_threads = 0;
    running = NULL;
}

/* --- as the daemon calls them ----------------------------------------------------------------- */

int __wrap_pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*fn)(void *), void *arg)
{
    if (!sim_is_daemon)
        return __real_pthread_create(t, a, fn, arg);
    if (memory_fails())
        return EAGAIN;
    *t = (pthread_t)thread_start(fn, arg);
    return 0;
}

int __wrap_pthread_join(pthread_t t, void **out)
{
    if (!sim_is_daemon)
        return __real_pthread_join(t, out);
    void *result = thread_join((uint32_t)t);
    if (out != NULL)
        *out = result;
    return 0;
}

int __wrap_pthread_mutex_lock(pthread_mutex_t *m)
{
    if (!sim_is_daemon)
        return __real_pthread_mutex_lock(m);
    while (pthread_mutex_trylock(m) == EBUSY) { /* another waits inside of it */
        process_point();
        thread_sleep(sim_between(100, 5000));
    }
    return 0;
}

static bool is_signalled(void *arg)
{
    const struct thread *t = arg;
    return t->cond == NULL;
}

int __wrap_pthread_cond_wait(pthread_cond_t *c, pthread_mutex_t *m)
{
    if (running == NULL)
        sim_fail("the event loop waits for a condition");
    running->cond = c;
    pthread_mutex_unlock(m);
    thread_wait(is_signalled, running, UINT64_MAX);
    return __wrap_pthread_mutex_lock(m);
}

static int signal_some(const pthread_cond_t *c, uint32_t most)
{
    for (uint32_t i = 0; i < n_threads && most > 0; i++) {
        if (!threads[i].is_used || threads[i].cond != c)
            continue;
        threads[i].cond = NULL;
        most--;
    }
    if (sim_is_daemon)
        sim_at(sim_below(20000), SIM_PROCESS, on_wake, NULL, 0);
    return 0;
}

int __wrap_pthread_cond_signal(pthread_cond_t *c)
{
    return signal_some(c, 1);
}

int __wrap_pthread_cond_broadcast(pthread_cond_t *c)
{
    return signal_some(c, UINT32_MAX);
}

static bool is_posted(void *arg)
{
    int n = 0;
    sem_getvalue(arg, &n);
    return n > 0;
}

/* Only the daemon's patience between cards uses it: 30 s. */
int __wrap_sem_timedwait(sem_t *s, const struct timespec *until)
{
    (void)until;
    process_point();
    if (!thread_wait(is_posted, s, sim_now_ns + 30 * SIM_S)) {
        errno = ETIMEDOUT;
        return -1;
    }
    process_point();
    return sem_trywait(s);
}

int __wrap_sem_wait(sem_t *s)
{
    process_point();
    thread_wait(is_posted, s, UINT64_MAX);
    return sem_trywait(s);
}

int __wrap_sched_yield(void)
{
    process_point();
    thread_sleep(sim_between(200, 20000));
    return 0;
}

int __wrap_setpriority(int which, id_t who, int value)
{
    (void)which, (void)who, (void)value;
    return 0;
}
