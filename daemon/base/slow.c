/* slow.c: keeps slow steps in a ring under a mutex; they are few. */
#include "daemon/base/slow.h"

#include <pthread.h>
#include <stdatomic.h>

static _Atomic uint64_t threshold_ns;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct slow_step ring[SLOW_MAX];
static uint64_t n_added;

void slow_set_threshold_ns(uint64_t ns)
{
    atomic_store(&threshold_ns, ns);
}

bool slow_is(uint64_t total_ns)
{
    uint64_t least = atomic_load_explicit(&threshold_ns, memory_order_relaxed);
    return least != 0 && total_ns >= least;
}

void slow_add(const struct slow_step *s)
{
    pthread_mutex_lock(&lock);
    struct slow_step *place = &ring[n_added % SLOW_MAX];
    *place = *s;
    place->number = ++n_added;
    pthread_mutex_unlock(&lock);
}

uint32_t slow_read(struct slow_step out[SLOW_MAX])
{
    pthread_mutex_lock(&lock);
    uint32_t n = n_added < SLOW_MAX ? (uint32_t)n_added : SLOW_MAX;
    for (uint32_t i = 0; i < n; i++)
        out[i] = ring[(n_added - n + i) % SLOW_MAX];
    pthread_mutex_unlock(&lock);
    return n;
}
