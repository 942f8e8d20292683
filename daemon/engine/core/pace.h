/* pace.h: when to launch a batch and how much it takes. Pure functions: no engine, no clock.
 *
 * An idle device gets all ready items at once. Behind a batch in flight, launching early gains
 * nothing and misses items that become ready meanwhile. So the next batch goes when the device
 * should be six tenths through, but at the latest PACE_WAY_IN_NS before the end: early enough to
 * reach the device in time, over the bus and from the caches of cores that may be asleep; late
 * enough to include workers that were answered meanwhile.
 */
#ifndef ATTND_DAEMON_ENGINE_CORE_PACE_H
#define ATTND_DAEMON_ENGINE_CORE_PACE_H

#include <stdbool.h>
#include <stdint.h>

struct pace_cost;

enum {
    PACE_WAY_IN_NS = 120000,
    PACE_MIN_ENOUGH = 8,
    PACE_LONG_NS = 10000000,
    PACE_LONG_TO_OTHERS_NS = 1000000,
    PACE_LATELY_NS = 1000000000,
};

/* Records that a batch that saw n_visible cached tokens took device_ns. Averages about the last
 * sixteen batches, since single ones mislead: of two that overlap, the later seems to take next to
 * nothing. */
void pace_learn(struct pace_cost *c, uint64_t n_visible, uint64_t device_ns);
/* Expected device time of a batch that sees n_visible cached tokens; 0: unknown yet. */
uint64_t pace_cost_ns(const struct pace_cost *c, uint64_t n_visible);

/* When the next batch may be launched, if the device now begins one that sees n_visible cached
 * tokens. */
uint64_t pace_due_ns(const struct pace_cost *c, uint64_t n_visible, uint64_t now_ns);

/* The recent maximum of items ready or in flight at a time, from its last value and the number
 * now. */
uint32_t pace_concurrency(uint32_t last, uint32_t n_now);
/* How many items fill a batch when another can run behind it: half of the concurrency. Workers
 * answered together return together; if one batch took all of them, device and workers would take
 * turns waiting. */
uint32_t pace_enough(uint32_t concurrency);

/* Whether a batch that sees n_visible cached tokens is so long that more items would not make it
 * cheaper, but only delay every item in it and behind it. has_others: other tenants have lately
 * sent steps, which wait for it as long as its own. */
bool pace_is_long(const struct pace_cost *c, uint64_t n_visible, bool has_others);

/* How many of the n_all held requests go before the next one of a flow that holds n_own; all_shares
 * is the sum of the shares of flows with requests. */
uint32_t pace_ahead(uint32_t n_all, uint32_t n_own, uint32_t share, uint32_t all_shares);

/* Whether a request behind n_ahead others of request_ns each is answered within left_ns, even at
 * twice that time. */
bool pace_is_in_time(uint32_t n_ahead, uint64_t request_ns, uint64_t left_ns);

/* The recent mean time per request, from its last value and n requests that took batch_ns. */
uint64_t pace_request_ns(uint64_t last_ns, uint64_t batch_ns, uint32_t n);
/* How long a request refused with n_held in the queue should wait: 0.1 ms to 1 s. */
uint64_t pace_retry_after_us(uint32_t n_held, uint64_t request_ns);

#endif
