/* sleep.c: how an idle engine waits: if that has paid off lately, it polls without pause for a
 * while; then it announces that it sleeps, and sleeps.
 *
 * Spinning is bounded by engine.spin and adapts: work that came within that time would have been
 * found by spinning, so the next spin is that long; work that came later halves it. To wake a
 * sleeping engine, a thread makes a descriptor of its epoll set readable: the engine's own eventfd,
 * or (a poller's client) one of the client's. They are edge-triggered and never read, so no holder
 * of one can swallow another's wake-up, or keep the engine awake without writing again and again.
 */
#include "daemon/engine/core/sleep.h"

#include <limits.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/stack.h"
#include "daemon/engine/core/peers.h"
#include "proto/attn_time.h"

enum {
    LOOKS_A_CLOCK = 8, /* looks at the pollers per look at the clock */
    PAUSES_A_LOOK = 8,
    EVENTS = 64,
};
static const uint64_t MIN_SPIN_NS = 1000; /* below this, don't spin */
static const uint64_t POLITE_NS = 20 * 1000; /* after spinning this long, yield to other threads */
static const uint64_t RECENT_NS = 10 * 1000 * 1000; /* don't spin for pollers silent for longer */

attn_status engine_sleep_init(struct engine *e)
{
    e->spin_ns = e->env.cfg->spin_us * 1000;
    e->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    e->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return e->epoll_fd < 0 || e->wake_fd < 0 ? ATTN_ENOMEM : engine_watch(e, e->wake_fd);
}

void engine_sleep_fini(struct engine *e)
{
    if (e->epoll_fd >= 0)
        close(e->epoll_fd);
    if (e->wake_fd >= 0)
        close(e->wake_fd);
}

attn_status engine_watch(struct engine *e, int fd)
{
    struct epoll_event ev = {.events = EPOLLIN | EPOLLET};
    return epoll_ctl(e->epoll_fd, EPOLL_CTL_ADD, fd, &ev) == 0 ? ATTN_OK : ATTN_ENOMEM;
}

void engine_unwatch(struct engine *e, int fd)
{
    epoll_ctl(e->epoll_fd, EPOLL_CTL_DEL, fd, NULL);
}

void engine_wake(struct engine *e)
{
    uint64_t one = 1;
    if (atomic_load(&e->is_asleep) == 0 || atomic_exchange(&e->is_asleep, 0) == 0)
        return;
    if (write(e->wake_fd, &one, sizeof one) < 0)
        return; /* only after 2^64 - 1 wake-ups */
}

void engine_poller_add(struct engine *e, struct engine_poller *p)
{
    stack_push(&e->pollers, p);
}

bool engine_poll_pollers(struct engine *e)
{
    bool has_work = false;
    for (struct engine_poller *p = atomic_load_explicit(&e->pollers, memory_order_acquire);
         p != NULL; p = p->next)
        has_work |= p->poll(p);
    if (has_work)
        e->polled_ns = clock_now_ns();
    return has_work;
}

bool engine_is_polled(const struct engine *e)
{
    return e->spin_ns >= MIN_SPIN_NS && clock_now_ns() - e->polled_ns < RECENT_NS;
}

bool engine_is_quiet(const struct engine *e)
{
    return stack_is_empty(&e->inbox) && stack_is_empty(&e->tier.came) &&
           !atomic_load(&e->is_stopping) &&
           (is_alone(e) || (stack_is_empty(&e->messages) && stack_is_empty(&e->returned) &&
                            !e->peers->ops->split->has_work(e->split)));
}

/* Polls until there is work or ns have passed. */
static void spin(struct engine *e, uint64_t start_ns, uint64_t ns)
{
    for (uint64_t passed_ns = 0; passed_ns < ns; passed_ns = clock_now_ns() - start_ns) {
        for (int i = 0; i < LOOKS_A_CLOCK; i++) {
            if (engine_poll_pollers(e) || !engine_is_quiet(e))
                return;
            for (int k = 0; k < PAUSES_A_LOOK; k++)
                attn_cpu_pause();
        }
        if (passed_ns > POLITE_NS)
            sched_yield();
    }
}

/* The shortest sleep that the pollers allow, at most ns; 0 while a lane may bring work. */
static uint64_t nap_ns(struct engine *e, uint64_t ns)
{
    for (struct engine_poller *p = atomic_load(&e->pollers); p != NULL; p = p->next) {
        uint64_t most_ns = p->nap_ns != NULL ? p->nap_ns(p) : UINT64_MAX;
        ns = most_ns < ns ? most_ns : ns;
    }
    return clock_now_ns() - e->bell_ns < LANE_SOON_NS ? 0 : ns;
}

static void sleep_until_woken(struct engine *e, uint64_t max_ns)
{
    struct engine_poller *first = atomic_load(&e->pollers);
    atomic_store(&e->is_asleep, 1);
    bool may_sleep = engine_is_quiet(e);
    for (struct engine_poller *p = first; p != NULL; p = p->next)
        /* no short-circuit: every poller gets may_sleep and awake */
        may_sleep = p->may_sleep(p) && may_sleep;
    if (may_sleep) {
        struct epoll_event events[EVENTS];
        uint64_t ms = max_ns / 1000000 + (max_ns % 1000000 != 0);
        epoll_wait(e->epoll_fd, events, EVENTS, ms > INT_MAX ? INT_MAX : (int)ms);
    }
    atomic_store(&e->is_asleep, 0);
    for (struct engine_poller *p = first; p != NULL; p = p->next)
        p->awake(p);
}

void engine_idle(struct engine *e, uint64_t max_ns)
{
    uint64_t start_ns = clock_now_ns(), max_spin_ns = config_now(e->env.cfg, spin_us) * 1000;
    uint64_t polled_ns = e->polled_ns;
    if (engine_is_polled(e))
        spin(e, start_ns, e->spin_ns < max_ns ? e->spin_ns : max_ns);
    max_ns = nap_ns(e, max_ns);
    if (max_ns == 0) {
        sched_yield();
    } else if (e->polled_ns == polled_ns && engine_is_quiet(e)) {
        sleep_until_woken(e, max_ns);
        engine_poll_pollers(e);
    }
    if (e->polled_ns != polled_ns)
        e->spin_ns = e->polled_ns - start_ns <= max_spin_ns ? max_spin_ns : e->spin_ns / 2;
}
