/* pace.c: when to launch a batch, how much it takes, and estimates of time. */
#include "daemon/engine/core/pace.h"

#include "daemon/engine/core/state.h"

enum { LATELY = 16 /* batches in a moving average */ };

void pace_learn(struct pace_cost *c, uint64_t n_visible, uint64_t device_ns)
{
    if (n_visible == 0)
        return;
    c->device_ns += (double)device_ns - c->device_ns / LATELY;
    c->n_visible += (double)n_visible - c->n_visible / LATELY;
}

static double cost_ns(const struct pace_cost *c, uint64_t n_visible)
{
    return c->n_visible > 0 ? (double)n_visible * c->device_ns / c->n_visible : 0;
}

uint64_t pace_cost_ns(const struct pace_cost *c, uint64_t n_visible)
{
    return (uint64_t)cost_ns(c, n_visible);
}

uint64_t pace_due_ns(const struct pace_cost *c, uint64_t n_visible, uint64_t now_ns)
{
    double ns = cost_ns(c, n_visible);
    double due = 0.6 * ns < ns - PACE_WAY_IN_NS ? 0.6 * ns : ns - PACE_WAY_IN_NS;
    return now_ns + (due > 0 ? (uint64_t)due : 0);
}

bool pace_is_long(const struct pace_cost *c, uint64_t n_visible, bool has_others)
{
    double most_ns = has_others ? PACE_LONG_TO_OTHERS_NS : PACE_LONG_NS;
    return c->n_visible > 0 && (double)n_visible * c->device_ns / c->n_visible >= most_ns;
}

uint32_t pace_concurrency(uint32_t last, uint32_t n_now)
{
    last -= (last + LATELY - 1) / LATELY;
    return n_now > last ? n_now : last;
}

uint32_t pace_enough(uint32_t concurrency)
{
    uint32_t half = concurrency / 2 + concurrency % 2;
    return concurrency / 2 > PACE_MIN_ENOUGH ? half : PACE_MIN_ENOUGH;
}

uint32_t pace_ahead(uint32_t n_all, uint32_t n_own, uint32_t share, uint32_t all_shares)
{
    uint64_t n = (uint64_t)n_own * all_shares / share;
    return n < n_all ? (uint32_t)n : n_all;
}

bool pace_is_in_time(uint32_t n_ahead, uint64_t request_ns, uint64_t left_ns)
{
    uint64_t wait_ns = n_ahead * request_ns;
    uint64_t own_ns = wait_ns < PACE_LONG_NS ? wait_ns : PACE_LONG_NS; /* its own batch */
    return 2 * wait_ns + own_ns <= left_ns;
}

uint64_t pace_request_ns(uint64_t last_ns, uint64_t batch_ns, uint32_t n)
{
    return last_ns - last_ns / 8 + batch_ns / n / 8;
}

uint64_t pace_retry_after_us(uint32_t n_held, uint64_t request_ns)
{
    uint64_t us = n_held * request_ns / 1000;
    return us < 100 ? 100 : us > 1000000 ? 1000000 : us;
}
