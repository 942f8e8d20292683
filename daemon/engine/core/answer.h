/* answer.h: how a request leaves the engine. Each leaves once, by engine_end, engine_refuse
 * or step_answer, and is its transport's after the call.
 */
#ifndef ATTND_DAEMON_ENGINE_CORE_ANSWER_H
#define ATTND_DAEMON_ENGINE_CORE_ANSWER_H

#include "daemon/engine/core/state.h"

/* When a refused client should try again. Any thread. */
uint64_t engine_retry_after_us(const struct engine *e);

/* A reply being built: a handler fills it in and returns a status; engine_end sends it. */
struct answer {
    Attnd__Reply header; /* if all is well; without a body it says just that */
    union {
        Attnd__HelloReply hello;
        Attnd__PoolReply pool;
        Attnd__SeqReply seq;
        Attnd__StatsReply stats;
        Attnd__ExportReply export;
    } body;
    char *text; /* from malloc, the answer's: what body.stats points to; NULL: none */
    bool is_built; /* the reply is in req->reply: header is not looked at */
    bool is_later; /* the request waits, or is gone already: nothing is sent now */
    char why[2 * WHY_BYTES]; /* if not */
};

void answer_init(struct answer *a);
/* The body that the answer has; its fields are unset, and what it will point to must live until
 * engine_end. */
Attnd__HelloReply *answer_hello(struct answer *a);
Attnd__PoolReply *answer_pool(struct answer *a);
Attnd__SeqReply *answer_seq(struct answer *a);
Attnd__ExportReply *answer_export(struct answer *a);
void answer_text(struct answer *a); /* a->text */
/* Says why not; returns st, which is not ATTN_OK. */
attn_status answer_no(struct answer *a, attn_status st, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Answers with st: what a handler has filled in, or why not. The answer is used up. */
void engine_end(struct engine *e, struct request *req, attn_status st, struct answer *a);
/* The same of a status that is not ATTN_OK and a sentence. */
void engine_refuse(struct engine *e, struct request *req, attn_status st, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Most bytes that the reply of a step takes, head and tensors. */
uint64_t step_reply_bytes(const struct wire_step_layout *layout, uint32_t n_items);
/* Room for the reply's tensors; may be repeated. ATTN_EOVERLOAD: no buffer. */
attn_status step_reserve_reply(struct engine *e, struct task *t);
/* All items are done: the statuses, and NaN in the rows of the items that failed. */
void step_answer(struct engine *e, struct task *t);

#endif
