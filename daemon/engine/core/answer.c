/* answer.c: replies to steps and to control requests, and refusals.
 *
 * A step's reply is built in place: the backend writes its tensors into a buffer that leaves room
 * in front for a head of any length. The head is written last, so that it ends where the tensors
 * begin.
 */
#include "daemon/engine/core/answer.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/stats.h"
#include "daemon/engine/core/pace.h"
#include "daemon/engine/core/peers.h"

/* Most bytes of a reply's head without its item statuses: preamble, all other fields, padding. */
enum { REPLY_HEAD_BYTES = WIRE_PREAMBLE_BYTES + WHY_BYTES + 64 };

uint64_t engine_retry_after_us(const struct engine *e)
{
    return pace_retry_after_us(atomic_load_explicit(&e->queue.n_requests, memory_order_relaxed),
                               atomic_load_explicit(&e->task_ns, memory_order_relaxed));
}

static void send_why(struct engine *e, struct request *req, attn_status st, const char *why)
{
    request_reply_error(req, st, attn_status_is_retryable(st) ? engine_retry_after_us(e) : 0, "%s",
                        why);
}

void engine_refuse(struct engine *e, struct request *req, attn_status st, const char *format, ...)
{
    char why[2 * WHY_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(why, sizeof why, format, args);
    va_end(args);
    send_why(e, req, st, why);
}

/* --- what handlers fill in -------------------------------------------------------------------- */

void answer_init(struct answer *a)
{
    attnd__reply__init(&a->header);
    a->text = NULL;
    a->is_built = a->is_later = false;
    a->why[0] = '\0';
}

Attnd__HelloReply *answer_hello(struct answer *a)
{
    attnd__hello_reply__init(&a->body.hello);
    a->header.body_case = ATTND__REPLY__BODY_HELLO;
    return a->header.hello = &a->body.hello;
}

Attnd__PoolReply *answer_pool(struct answer *a)
{
    attnd__pool_reply__init(&a->body.pool);
    a->header.body_case = ATTND__REPLY__BODY_POOL;
    return a->header.pool = &a->body.pool;
}

Attnd__SeqReply *answer_seq(struct answer *a)
{
    attnd__seq_reply__init(&a->body.seq);
    a->header.body_case = ATTND__REPLY__BODY_SEQ;
    return a->header.seq = &a->body.seq;
}

Attnd__ExportReply *answer_export(struct answer *a)
{
    attnd__export_reply__init(&a->body.export);
    a->header.body_case = ATTND__REPLY__BODY_EXPORT;
    return a->header.export = &a->body.export;
}

Attnd__ProbeReply *answer_probe(struct answer *a)
{
    attnd__probe_reply__init(&a->body.probe);
    a->header.body_case = ATTND__REPLY__BODY_PROBE;
    return a->header.probe = &a->body.probe;
}

Attnd__Moved *answer_moved(struct answer *a)
{
    attnd__moved__init(&a->body.moved);
    a->header.body_case = ATTND__REPLY__BODY_MOVED;
    return a->header.moved = &a->body.moved;
}

Attnd__Note *answer_note(struct answer *a)
{
    attnd__note__init(&a->body.note);
    a->header.body_case = ATTND__REPLY__BODY_NOTE;
    return a->header.note = &a->body.note;
}

void answer_text(struct answer *a)
{
    attnd__stats_reply__init(&a->body.stats);
    a->body.stats.json = a->text;
    a->header.body_case = ATTND__REPLY__BODY_STATS;
    a->header.stats = &a->body.stats;
}

attn_status answer_no(struct answer *a, attn_status st, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(a->why, sizeof a->why, format, args);
    va_end(args);
    return st;
}

/* Encodes the reply's message from its header. */
static attn_status build(struct request *req, struct answer *a)
{
    uint8_t *payload;
    attn_status st = request_reply_begin(req, &a->header, 0, &payload);
    if (st == ATTN_EINVAL)
        return answer_no(a, st, "the reply does not fit into the room of %zu bytes given for it",
                         req->room->capacity_bytes);
    return st == ATTN_OK ? st : answer_no(a, st, "no message buffer is left for the reply");
}

void engine_end(struct engine *e, struct request *req, attn_status st, struct answer *a)
{
    if (st == ATTN_OK && !a->is_built)
        st = build(req, a);
    free(a->text);
    if (st == ATTN_OK)
        request_reply(req, ATTN_OK);
    else
        send_why(e, req, st, a->why);
}

/* --- steps ------------------------------------------------------------------------------------ */

static size_t head_room(uint32_t n_items)
{
    size_t head = REPLY_HEAD_BYTES + n_items;
    return (head + WIRE_ALIGN - 1) / WIRE_ALIGN * WIRE_ALIGN;
}

uint64_t step_reply_bytes(const struct wire_step_layout *layout, uint32_t n_items)
{
    return layout->reply_bytes + head_room(n_items);
}

attn_status step_reserve_reply(struct engine *e, struct task *t)
{
    if (t->payload != NULL)
        return ATTN_OK;
    if (t->req->shard != NULL)
        return e->peers->ops->step_reserve(t, head_room(t->n_items));
    if (t->req->bell != NULL) {
        t->payload = t->req->bell->out;
        return ATTN_OK;
    }
    size_t head = head_room(t->n_items);
    attn_status st = request_reply_reserve(t->req, head + t->layout.reply_bytes);
    if (st != ATTN_OK)
        return st;
    t->head_room = head;
    t->payload = t->req->reply->data + head;
    return ATTN_OK;
}

static void fill_nan(uint8_t *dst, size_t n, attn_dtype dtype)
{
    if (dtype == ATTN_F32) {
        uint32_t nan = 0x7fc00000;
        for (size_t i = 0; i < n; i++)
            memcpy(dst + 4 * i, &nan, 4);
    } else {
        uint16_t nan = dtype == ATTN_BF16 ? 0x7fc0 : 0x7e00;
        for (size_t i = 0; i < n; i++)
            memcpy(dst + 2 * i, &nan, 2);
    }
}

static void fill_failed_rows(struct task *t)
{
    const struct backend_pool_config *c = &t->pool->config;
    size_t row = (size_t)c->num_q_heads * backend_out_dim(c), e = attn_dtype_bytes(c->q_dtype);
    for (uint32_t i = t->first_failed; i < t->n_items; i++) {
        const struct item *it = &t->items[i];
        if (t->item_status[i] == ATTN_OK)
            continue;
        if (t->flags & WIRE_STEP_ATTEND)
            fill_nan(t->payload + t->layout.out_offset + it->row * row * e, it->n_tokens * row,
                     c->q_dtype);
        if (t->flags & WIRE_STEP_LSE)
            fill_nan(t->payload + t->layout.lse_offset + (size_t)it->row * c->num_q_heads * 4,
                     (size_t)it->n_tokens * c->num_q_heads, ATTN_F32);
    }
}

/* Clears the gap between out and lse, which still has bytes of the buffer's previous use. */
static void clear_gap(struct task *t)
{
    const struct backend_pool_config *c = &t->pool->config;
    uint64_t end = t->layout.out_offset + t->layout.n_tokens * c->num_q_heads * backend_out_dim(c) *
                                              attn_dtype_bytes(c->q_dtype);
    if (t->flags & WIRE_STEP_LSE)
        memset(t->payload + end, 0, t->layout.lse_offset - end);
}

/* The device wrote a bell's outputs, those of failed rows too: its worker gets only the status. */
static void bell_answer(struct task *t)
{
    struct request *req = t->req;
    attn_status st = ATTN_OK;
    req->why = "";
    if (t->first_failed < t->n_items) {
        st = (attn_status)t->item_status[t->first_failed];
        req->why = t->why;
    }
    request_reply(req, st);
}

void step_answer(struct engine *e, struct task *t)
{
    struct request *req = t->req;
    if (req->shard != NULL) {
        request_reply(req, e->peers->ops->step_done(t));
        return;
    }
    stats_add(step_items, t->n_items);
    stats_add(step_tokens, t->layout.n_tokens);
    if (req->bell != NULL) {
        bell_answer(t);
        return;
    }
    if (step_reserve_reply(e, t) != ATTN_OK) {
        engine_refuse(e, req, ATTN_EOVERLOAD, "no message buffer for a reply of %" PRIu64 " bytes",
                      t->layout.reply_bytes);
        return;
    }
    Attnd__StepReply body = ATTND__STEP_REPLY__INIT;
    Attnd__Reply header = ATTND__REPLY__INIT;
    attn_status st = ATTN_OK;
    header.body_case = ATTND__REPLY__BODY_STEP;
    header.step = &body;
    if (t->first_failed < t->n_items) {
        st = (attn_status)t->item_status[t->first_failed];
        header.status = st;
        header.message = t->why;
        body.n_item_status = t->n_items;
        body.item_status = t->item_status;
        fill_failed_rows(t);
    }
    clear_gap(t);
    if (req->batched_ns != 0)
        header.queue_ns = req->batched_ns - req->received_ns;
    header.device_ns = req->device_ns;

    size_t head = wire_reply_head_bytes(&header);
    req->reply->offset = t->head_room - head;
    req->reply->n_bytes = head + t->layout.reply_bytes;
    wire_reply_head_encode(&header, req->wire.request_id, t->layout.reply_bytes,
                           req->reply->data + req->reply->offset);
    request_reply(req, st);
}
