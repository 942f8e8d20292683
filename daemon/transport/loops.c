/* loops.c: threads that run event loops, and calls on them: a call is pushed on the loop's stack,
 * the loop is woken, and the caller waits for its semaphore.
 */
#define _GNU_SOURCE /* sched_getaffinity, pthread_setname_np */
#include "daemon/transport/loops.h"

#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <uv.h>

#include "daemon/base/clock.h"
#include "daemon/base/stack.h"

enum { CORES_A_LOOP = 4, MOST_BY_CORES = 8 };

struct call {
    struct call *next;
    void (*fn)(void *arg);
    void *arg;
    sem_t is_done;
};

struct loop_thread {
    uint32_t number; /* from 1 */
    uv_loop_t uv;
    uv_async_t async; /* sent when calls have come, or to see whether it turns */
    _Atomic(struct call *) calls; /* a stack */
    _Atomic bool is_asked; /* loops_have_turned has sent it, and it has not turned since */
    pthread_t thread;
};

struct loops {
    uint32_t n, next;
    struct loop at[LOOPS_MAX];
    uv_idle_t spinners[LOOPS_MAX]; /* while one is started, libuv asks the kernel without waiting */
};

static void on_async(uv_async_t *async)
{
    struct loop_thread *t = async->data;
    atomic_store(&t->is_asked, false);
    stack_for_each(struct call, c, stack_take_all(&t->calls)) {
        c->fn(c->arg);
        sem_post(&c->is_done); /* c is gone */
    }
}

static void on_idle(uv_idle_t *spinner)
{
    const struct loop *l = spinner->data;
    uint64_t worked_ns = atomic_load(&l->worked_ns); /* first: it may be set meanwhile */
    if (clock_now_ns() - worked_ns >= l->spin_ns)
        uv_idle_stop(spinner);
}

void loop_stay(struct loop *l)
{
    atomic_store(&l->worked_ns, clock_now_ns());
}

void loop_worked(struct loop *l, uint64_t spin_us)
{
    if (spin_us == 0)
        return;
    loop_stay(l);
    l->spin_ns = spin_us * 1000;
    uv_idle_start(l->spinner, on_idle);
}

static void *loop_main(void *arg)
{
    struct loop_thread *t = arg;
    char name[16];
    snprintf(name, sizeof name, "attnd-loop%u", t->number);
    pthread_setname_np(pthread_self(), name);
    uv_run(&t->uv, UV_RUN_DEFAULT);
    return NULL;
}

/* What every loop has, made before it runs, or on its thread. */
static void spinner_open(struct loops *loops, uint32_t i, uv_loop_t *uv)
{
    struct loop *l = &loops->at[i];
    l->uv = uv;
    l->spinner = &loops->spinners[i];
    uv_idle_init(uv, l->spinner);
    l->spinner->data = l;
}

static struct loop_thread *thread_open(struct loops *loops, uint32_t number)
{
    struct loop_thread *t = calloc(1, sizeof *t);
    if (t == NULL)
        return NULL;
    if (uv_loop_init(&t->uv) != 0) {
        free(t);
        return NULL;
    }
    t->number = number;
    t->async.data = t;
    spinner_open(loops, number, &t->uv);
    bool has_async = uv_async_init(&t->uv, &t->async, on_async) == 0;
    if (has_async && pthread_create(&t->thread, NULL, loop_main, t) == 0)
        return t;
    if (has_async)
        uv_close((uv_handle_t *)&t->async, NULL);
    uv_close((uv_handle_t *)loops->at[number].spinner, NULL);
    uv_run(&t->uv, UV_RUN_DEFAULT);
    uv_loop_close(&t->uv);
    free(t);
    return NULL;
}

uint32_t loops_of_cores(void)
{
    cpu_set_t set;
    uint32_t n = 1;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        n = (uint32_t)CPU_COUNT(&set) / CORES_A_LOOP;
    return n < 1 ? 1 : n > MOST_BY_CORES ? MOST_BY_CORES : n;
}

attn_status loops_open(uv_loop_t *first, uint32_t n, struct loops **out_loops)
{
    struct loops *loops = calloc(1, sizeof *loops);
    if (loops == NULL)
        return ATTN_ENOMEM;
    spinner_open(loops, 0, first);
    for (loops->n = 1; loops->n < n; loops->n++) {
        struct loop *l = &loops->at[loops->n];
        l->thread = thread_open(loops, loops->n);
        if (l->thread == NULL) {
            loops_close(loops);
            return ATTN_ENOMEM;
        }
    }
    *out_loops = loops;
    return ATTN_OK;
}

static void end(void *arg)
{
    struct loop *l = arg;
    uv_close((uv_handle_t *)l->spinner, NULL);
    uv_close((uv_handle_t *)&l->thread->async, NULL);
}

void loops_close(struct loops *loops)
{
    if (loops == NULL)
        return;
    for (uint32_t i = 1; i < loops->n; i++) {
        struct loop_thread *t = loops->at[i].thread;
        loop_call(&loops->at[i], end, &loops->at[i]);
        pthread_join(t->thread, NULL);
        uv_loop_close(&t->uv);
        free(t);
    }
    if (!uv_is_closing((uv_handle_t *)loops->at[0].spinner))
        uv_close((uv_handle_t *)loops->at[0].spinner, NULL);
    uv_run(loops->at[0].uv, UV_RUN_NOWAIT);
    free(loops);
}

uint32_t loops_count(const struct loops *loops)
{
    return loops->n;
}

struct loop *loops_at(struct loops *loops, uint32_t i)
{
    return &loops->at[i];
}

uint32_t loops_choose(struct loops *loops)
{
    uint32_t first = loops->next++, best = 0, least = UINT32_MAX;
    for (uint32_t k = 0; k < loops->n; k++) {
        uint32_t i = (first + k) % loops->n, n_peers = atomic_load(&loops->at[i].n_peers);
        if (n_peers < least) {
            least = n_peers;
            best = i;
        }
    }
    return best;
}

void loop_call(struct loop *l, void (*fn)(void *arg), void *arg)
{
    struct loop_thread *t = l->thread;
    if (t == NULL) {
        fn(arg);
        return;
    }
    struct call c = {.fn = fn, .arg = arg};
    sem_init(&c.is_done, 0, 0);
    (void)stack_push(&t->calls, &c);
    uv_async_send(&t->async);
    while (sem_wait(&c.is_done) != 0)
        continue; /* a signal came */
    sem_destroy(&c.is_done);
}

bool loops_have_turned(struct loops *loops)
{
    bool have_all = true;
    for (uint32_t i = 1; i < loops->n; i++) {
        struct loop_thread *t = loops->at[i].thread;
        if (atomic_exchange(&t->is_asked, true))
            have_all = false;
        else
            uv_async_send(&t->async);
    }
    return have_all;
}
