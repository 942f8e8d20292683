/* message.h: how the engines of a daemon with several devices speak to each other, each on its own
 * thread: messages, and calls that wait for their end.
 *
 * A message is pushed before the reply that it belongs to; an engine takes its inbox first and its
 * messages then, and handles the messages first, so a message is handled before anything that its
 * reply led to.
 */
#ifndef ATTND_DAEMON_ENGINE_CORE_MESSAGE_H
#define ATTND_DAEMON_ENGINE_CORE_MESSAGE_H

#include "daemon/engine/core/state.h"

struct engine_message {
    struct engine_message *next;
    /* Runs on the thread of the engine that it was pushed to, and owns the message from then on. */
    void (*on_message)(struct engine *e, struct engine_message *m);
};

/* Any thread. */
void engine_message_push(struct engine *e, struct engine_message *m);
/* All that was pushed, the oldest first; NULL: nothing. Its engine's thread, as the next. */
struct engine_message *engine_messages_take(struct engine *e);
void engine_messages_deliver(struct engine *e, struct engine_message *first);

/* Has fn run on the engine's thread, or here where it has none, and waits for it.
 * Errors   ATTN_ETIMEDOUT it did not run and will not; ATTN_ENOMEM */
attn_status engine_call(struct engine *e, void (*fn)(struct engine *e, void *arg), void *arg);

/* The same on all other engines, one after the other, for what all do or none. */
struct peer_ask {
    attn_status status; /* what fn says; ATTN_OK before */
    char *why;
    size_t why_bytes;
};
/* Asks engines [1, n) of a primary; lost ones are passed over. fn is given ask, which a larger
 * struct may begin with. Stops at the first that fails, or does not answer (ATTN_EOVERLOAD), which
 * *out_n_done is then: those before it have done it. */
attn_status engine_call_others(struct engine *primary, uint32_t n,
                               void (*fn)(struct engine *e, void *ask), struct peer_ask *ask,
                               uint32_t *out_n_done);

#endif
