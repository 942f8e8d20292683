/* health.c: heartbeats of threads and the state of the process. Each value is one atomic and is
 * copied to its gauge. */
#include "daemon/base/health.h"

#include <stdatomic.h>

#include "daemon/base/clock.h"
#include "daemon/base/stats.h"

static _Atomic uint64_t beat_ns[HEALTH_N_THREADS]; /* 0: not running */
static _Atomic bool ready, draining, settings_good = true;
static _Atomic uint64_t n_wrong;

static void set_beat(enum health_thread who, uint64_t ns)
{
    atomic_store_explicit(&beat_ns[who], ns, memory_order_relaxed);
    if (who == HEALTH_LOOP)
        stats_set(loop_beat_at_ns, ns);
    else if (who == HEALTH_ENGINE)
        stats_set(engine_beat_at_ns, ns);
}

void health_beat(enum health_thread who)
{
    set_beat(who, clock_now_ns());
}

bool health_is_there(enum health_thread who)
{
    return who == HEALTH_ENGINE || who == HEALTH_LOOP ||
           atomic_load_explicit(&beat_ns[who], memory_order_relaxed) != 0;
}

void health_end(enum health_thread who)
{
    set_beat(who, 0);
}

bool health_is_stalled(enum health_thread who, uint64_t timeout_ns, uint64_t *out_silent_ns)
{
    uint64_t at_ns = atomic_load_explicit(&beat_ns[who], memory_order_relaxed);
    uint64_t now_ns = clock_now_ns();
    if (at_ns == 0 || now_ns < at_ns || now_ns - at_ns <= timeout_ns)
        return false;
    *out_silent_ns = now_ns - at_ns;
    return true;
}

const char *health_thread_name(enum health_thread who)
{
    static const char *const names[HEALTH_N_THREADS] = {
        "engine",           "engine of card 1", "engine of card 2",
        "engine of card 3", "engine of card 4", "engine of card 5",
        "engine of card 6", "engine of card 7", "event loop"};
    return names[who];
}

void health_set_ready(bool is_ready)
{
    atomic_store(&ready, is_ready);
    stats_set(is_ready, is_ready);
}

bool health_is_ready(void)
{
    return atomic_load(&ready);
}

void health_set_settings_good(bool is_good)
{
    atomic_store(&settings_good, is_good);
    stats_set(settings_are_good, is_good);
}

bool health_settings_are_good(void)
{
    return atomic_load(&settings_good);
}

void health_set_draining(bool is_draining)
{
    atomic_store(&draining, is_draining);
    stats_set(is_draining, is_draining);
}

bool health_is_draining(void)
{
    return atomic_load(&draining);
}

void health_found_wrong(void)
{
    atomic_fetch_add(&n_wrong, 1);
    stats_add(canary_wrong, 1);
}

uint64_t health_n_wrong(void)
{
    return atomic_load(&n_wrong);
}
