/* message.h: how the engines of a daemon with several devices communicate; each has a thread of its
 * own. Messages are one-way, calls wait until they are done.
 *
 * A message is pushed before the reply that it belongs to. An engine takes its inbox first and its
 * messages second, but handles the messages first. So it handles a message before any request that
 * the message's reply led to.
 */
#ifndef ATTND_DAEMON_ENGINE_CORE_MESSAGE_H
#define ATTND_DAEMON_ENGINE_CORE_MESSAGE_H

#include "daemon/engine/core/state.h"

struct engine_message {
    struct engine_message *next;
    /* Runs on the thread of the engine that it was pushed to, and owns the message from then on. */
    void (*on_message)(struct engine *e, struct engine_message *m);
};

/* Sends a message. Any thread. */
void engine_message_push(struct engine *e, struct engine_message *m);
/* Takes all messages, oldest first; NULL: none. This and the next: on the engine's thread. */
struct engine_message *engine_messages_take(struct engine *e);
void engine_messages_deliver(struct engine *e, struct engine_message *first);

/* What engine_call_others passes to fn; may be the start of a larger struct. */
struct peer_ask {
    attn_status status; /* set by fn; ATTN_OK before */
    char *why;
    size_t why_bytes;
};
/* Runs fn on the threads of engines [1, n) (here, where one has none), one after the other, and
 * waits for each; lost ones are skipped. Stops at the first that fails, or does not answer
 * (ATTN_EOVERLOAD), with its index in *out_n_done (else n): those before it are done and may have
 * to be undone. */
attn_status engine_call_others(struct engine *primary, uint32_t n,
                               void (*fn)(struct engine *e, void *ask), struct peer_ask *ask,
                               uint32_t *out_n_done);

#endif
