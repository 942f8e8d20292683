/* pace.h: when to launch a batch and how much it takes. Pure functions: no engine, no clock.
 *
 * An idle device gets all ready items at once. Behind a batch in flight the next one gains nothing
 * by an early launch, and loses what it would still collect. It goes when the device should be six
 * tenths through, but PACE_WAY_IN_NS before the end at the latest: early enough that its way in,
 * over the bus and from the caches of cores that may be asleep, is done in time; late enough that
 * workers who were answered meanwhile are in it.
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
};

/* A batch that saw n_visible cached tokens took device_ns. The cost is of about the last sixteen
 * batches, not of single ones: of two that ran beside each other the later seems to have taken next
 * to nothing. */
void pace_learn(struct pace_cost *c, uint64_t n_visible, uint64_t device_ns);
/* What a batch of n_visible cached tokens will probably take; 0: nothing is known yet. */
uint64_t pace_cost_ns(const struct pace_cost *c, uint64_t n_visible);

/* When the batch after one of n_visible cached tokens may follow, if the device begins with that
 * one now. */
uint64_t pace_due_ns(const struct pace_cost *c, uint64_t n_visible, uint64_t now_ns);

/* The most items lately ready or in flight at a time, from the last answer and the number now. */
uint32_t pace_concurrency(uint32_t last, uint32_t n_now);
/* Items that fill a batch when another can run behind it. Workers answered together return
 * together; if one batch took all of them, device and workers would take turns waiting. So a batch
 * takes half of the concurrency. */
uint32_t pace_enough(uint32_t concurrency);

/* A batch that sees n_visible cached tokens is so long that more items would not make it cheaper:
 * they would only let everybody in it, and everybody behind it, wait longer. */
bool pace_is_long(const struct pace_cost *c, uint64_t n_visible);

/* How many of the n_all held requests go before the next one of a flow that holds n_own; all_shares
 * is the sum of the shares of flows with requests. */
uint32_t pace_ahead(uint32_t n_all, uint32_t n_own, uint32_t share, uint32_t all_shares);

/* Whether a request behind n_ahead others of request_ns each is answered within left_ns, even at
 * twice that time. */
bool pace_is_in_time(uint32_t n_ahead, uint64_t request_ns, uint64_t left_ns);

/* The recent time that a request takes, from the last answer and n requests that took batch_ns. */
uint64_t pace_request_ns(uint64_t last_ns, uint64_t batch_ns, uint32_t n);
/* When a request that was refused with n_held in the queue should come back: 0.1 ms to 1 s. */
uint64_t pace_retry_after_us(uint32_t n_held, uint64_t request_ns);

#endif
