/* answer.h: how a request leaves the engine. Each leaves once, by engine_end, engine_refuse or
 * step_answer; after that call it belongs to its transport.
 */
#ifndef ATTND_DAEMON_ENGINE_CORE_ANSWER_H
#define ATTND_DAEMON_ENGINE_CORE_ANSWER_H

#include "daemon/engine/core/state.h"

/* How long a refused client should wait before it tries again. Any thread. */
uint64_t engine_retry_after_us(const struct engine *e);

/* A reply being built: a handler fills it in and returns a status; engine_end sends it. */
struct answer {
    Attnd__Reply header; /* sent on ATTN_OK; a reply without a body says only that */
    union {
        Attnd__HelloReply hello;
        Attnd__PoolReply pool;
        Attnd__SeqReply seq;
        Attnd__StatsReply stats;
        Attnd__ExportReply export;
        Attnd__ProbeReply probe;
        Attnd__Moved moved;
        Attnd__Note note;
    } body;
    char *text; /* what body.stats points to; from malloc, freed by engine_end; NULL: none */
    bool is_built; /* req->reply is complete already: header is not used */
    bool is_later; /* send nothing now: the request waits, or is gone already */
    char why[2 * WHY_BYTES]; /* sent on any other status */
};

void answer_init(struct answer *a);
/* Chooses the reply's body and returns it, its fields unset. What they will point to must live
 * until engine_end. */
Attnd__HelloReply *answer_hello(struct answer *a);
Attnd__PoolReply *answer_pool(struct answer *a);
Attnd__SeqReply *answer_seq(struct answer *a);
Attnd__ExportReply *answer_export(struct answer *a);
Attnd__ProbeReply *answer_probe(struct answer *a);
Attnd__Moved *answer_moved(struct answer *a);
Attnd__Note *answer_note(struct answer *a);
void answer_text(struct answer *a); /* the body is a->text */
/* Sets the reason for a refusal; returns st, which is not ATTN_OK. */
attn_status answer_no(struct answer *a, attn_status st, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Answers with what a handler filled in (ATTN_OK) or with st and its reason. Uses up the answer. */
void engine_end(struct engine *e, struct request *req, attn_status st, struct answer *a);
/* Answers with st, which is not ATTN_OK, and a reason. */
void engine_refuse(struct engine *e, struct request *req, attn_status st, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Most bytes of a step's reply, head and tensors. */
uint64_t step_reply_bytes(const struct wire_step_layout *layout, uint32_t n_items);
/* Reserves room for the reply's tensors; may be repeated. ATTN_EOVERLOAD: no buffer. */
attn_status step_reserve_reply(struct engine *e, struct task *t);
/* Answers a step whose items are all done: their statuses, and NaN in the rows of failed ones. */
void step_answer(struct engine *e, struct task *t);

#endif
