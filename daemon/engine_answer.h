/* engine_answer.h: how a request leaves the engine. Each leaves once, by one of these functions,
 * and is its transport's after the call.
 */
#ifndef ATTND_DAEMON_ENGINE_ANSWER_H
#define ATTND_DAEMON_ENGINE_ANSWER_H

#include "daemon/engine_state.h"

/* Counts a request that comes in, and one that leaves. Any thread. */
void engine_hold(struct engine *e, uint64_t msg_bytes, uint32_t *out_n, uint64_t *out_bytes);
void engine_let_go(struct engine *e, uint64_t msg_bytes);
/* When a refused client should try again. Any thread. */
uint64_t engine_retry_after_us(const struct engine *e);

/* A status and a sentence. */
void engine_refuse(struct engine *e, struct request *req, attn_status st, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* A reply without tensors. */
void engine_answer(struct engine *e, struct request *req, const Attnd__Reply *header);

/* The same, once request_reply_begin and the caller have built it. */
void engine_answer_built(struct engine *e, struct request *req);

/* Most bytes that the reply of a step takes, head and tensors. */
uint64_t step_reply_bytes(const struct wire_step_layout *layout, uint32_t n_items);
/* Room for the reply's tensors; may be repeated. ATTN_EOVERLOAD: no buffer. */
attn_status step_reserve_reply(struct task *t);
/* All items are done: the statuses, and NaN in the rows of the items that failed. */
void step_answer(struct engine *e, struct task *t);

#endif
