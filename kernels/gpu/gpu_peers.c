/* gpu_peers.c: which devices of this process reach each other's memory. Every backend that opens is
 * made known to those that are open, both ways; where there is a link, KV memory and regions are
 * mapped on both sides, so copies go over it and kernels read and write what lies there.
 */
#include "kernels/gpu/gpu_host.h"

#include <pthread.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct backend *opened;

static void reach(struct backend *b, struct backend *other)
{
    if (runtime_range_reach(&other->kv, other->config.device_index, b->config.device_index) == 0)
        __atomic_fetch_or(&b->reached, 1ull << other->config.device_index, __ATOMIC_RELEASE);
}

static bool is_another(const struct backend *a, const struct backend *b)
{
    return a->config.device_index != b->config.device_index && a->config.device_index < 64 &&
           b->config.device_index < 64;
}

void gpu_peers_join(struct backend *b)
{
    pthread_mutex_lock(&lock);
    for (struct backend *other = opened; other; other = other->next_opened) {
        if (!is_another(b, other))
            continue;
        reach(b, other);
        reach(other, b);
    }
    b->next_opened = opened;
    opened = b;
    pthread_mutex_unlock(&lock);
}

void gpu_peers_leave(struct backend *b)
{
    pthread_mutex_lock(&lock);
    struct backend **at = &opened;
    while (*at && *at != b)
        at = &(*at)->next_opened;
    if (*at)
        *at = b->next_opened;
    pthread_mutex_unlock(&lock);
}

uint64_t gpu_reached(const struct backend *b)
{
    return __atomic_load_n(&b->reached, __ATOMIC_ACQUIRE);
}

bool gpu_reaches(const struct backend *b, int device)
{
    return device == b->config.device_index || (device < 64 && (gpu_reached(b) >> device & 1));
}
