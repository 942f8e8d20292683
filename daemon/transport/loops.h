/* loops.h: the event loops that serve connections. The first is the caller's, who runs it on the
 * thread that opens and closes all of this: it listens, and has signals, deadlines of the process
 * and shared memory, too. Each other one has a thread here.
 *
 * A connection belongs to one loop from the moment it is handed over until it is freed, and all of
 * its callbacks run there. What connections of all loops count in (transport_env, shares, buffers,
 * statistics) is atomic or has a lock. Whoever needs something of all connections asks each loop by
 * loop_call.
 */
#ifndef ATTND_DAEMON_TRANSPORT_LOOPS_H
#define ATTND_DAEMON_TRANSPORT_LOOPS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/attn_types.h"

enum { LOOPS_MAX = 64 };

struct uv_loop_s;
struct loops;

struct loop {
    struct uv_loop_s *uv;
    _Atomic uint32_t n_peers; /* connections that it has, or that are on their way to it */
    struct loop_thread *thread; /* NULL: the first, which has none here */
    struct uv_idle_s *spinner; /* runs while the loop does not sleep */
    _Atomic uint64_t worked_ns; /* when it had something to do last */
    uint64_t spin_ns; /* how long it watches then */
};

/* How many to begin where nothing else is said: by the cores that this process may use. */
uint32_t loops_of_cores(void);
/* Begins n loops, 1 to LOOPS_MAX, with the caller's as the first. ATTN_ENOMEM: no memory,
 * descriptors or threads. */
attn_status loops_open(struct uv_loop_s *first, uint32_t n, struct loops **out_loops);
/* Ends the other loops, once all that is on them is closing: waits for the last callbacks. NULL is
 * fine. First loop's thread, like all below. */
void loops_close(struct loops *loops);

uint32_t loops_count(const struct loops *loops);
struct loop *loops_at(struct loops *loops, uint32_t i);
/* The loop with the fewest connections, in turn where several have as few. */
uint32_t loops_choose(struct loops *loops);
/* Calls fn(arg) on the loop's thread, between two callbacks, and waits until it has returned. fn
 * must not wait for the first loop. */
void loop_call(struct loop *l, void (*fn)(void *arg), void *arg);
/* The loop had something to do: it does not sleep for the next spin_us. On its thread. */
void loop_worked(struct loop *l, uint64_t spin_us);
/* If it does not sleep, it watches for as long again. Any thread. */
void loop_stay(struct loop *l);
/* Whether every other loop has turned since the last time this was asked, which it never waits
 * for. */
bool loops_have_turned(struct loops *loops);

#endif
