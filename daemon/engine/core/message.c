/* message.c: messages between engines, and calls built on them. A caller waits until the other
 * engine has run its function, and gives up if that has not begun in time. */
#include "daemon/engine/core/message.h"

#include <inttypes.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>

#include "daemon/base/clock.h"
#include "daemon/base/stack.h"
#include "daemon/engine/core/peers.h"

#define PATIENCE_NS (30 * UINT64_C(1000000000))

void engine_message_push(struct engine *e, struct engine_message *m)
{
    stack_push(&e->messages, m);
    engine_wake(e);
}

struct engine_message *engine_messages_take(struct engine *e)
{
    return stack_take_all(&e->messages);
}

void engine_messages_deliver(struct engine *e, struct engine_message *first)
{
    stack_for_each(struct engine_message, m, first)
        m->on_message(e, m);
}

/* --- calls ------------------------------------------------------------------------------------ */

enum call_state { CALL_WAITS, CALL_RUNS, CALL_IS_LEFT }; /* left: the caller has given up */

struct call {
    struct engine_message message; /* first */
    void (*fn)(struct engine *e, void *arg);
    void *arg;
    _Atomic int state;
    sem_t done;
};

static void call_free(struct call *c)
{
    sem_destroy(&c->done);
    free(c);
}

static void call_run(struct engine *e, struct engine_message *m)
{
    struct call *c = (struct call *)m;
    int waits = CALL_WAITS;
    if (!atomic_compare_exchange_strong(&c->state, &waits, CALL_RUNS)) {
        call_free(c);
        return;
    }
    c->fn(e, c->arg);
    sem_post(&c->done); /* the call belongs to the caller again */
}

/* Runs fn on the engine's thread and waits for it. ATTN_ETIMEDOUT: it did not run and will not;
 * ATTN_ENOMEM */
static attn_status engine_call(struct engine *e, void (*fn)(struct engine *e, void *arg), void *arg)
{
    if (!e->has_thread) {
        fn(e, arg);
        return ATTN_OK;
    }
    struct call *c = calloc(1, sizeof *c);
    if (c == NULL)
        return ATTN_ENOMEM;
    *c = (struct call){.message.on_message = call_run, .fn = fn, .arg = arg};
    sem_init(&c->done, 0, 0);
    engine_message_push(e, &c->message);
    while (!clock_wait(&c->done, PATIENCE_NS)) {
        int waits = CALL_WAITS;
        if (atomic_compare_exchange_strong(&c->state, &waits, CALL_IS_LEFT))
            return ATTN_ETIMEDOUT;
        /* it has begun and uses our arguments: wait on */
    }
    call_free(c);
    return ATTN_OK;
}

attn_status engine_call_others(struct engine *primary, uint32_t n,
                               void (*fn)(struct engine *e, void *ask), struct peer_ask *ask,
                               uint32_t *out_n_done)
{
    for (*out_n_done = 1; *out_n_done < n; ++*out_n_done) {
        struct engine *e = peers_at(primary, *out_n_done);
        if (engine_health(e) != ATTN_OK)
            continue;
        ask->status = ATTN_OK;
        if (engine_call(e, fn, ask) != ATTN_OK) {
            snprintf(ask->why, ask->why_bytes, "card %" PRIu32 " does not answer", e->env.card);
            return ATTN_EOVERLOAD;
        }
        if (ask->status != ATTN_OK)
            return ask->status;
    }
    return ATTN_OK;
}
