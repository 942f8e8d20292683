/* calls.c: carries out the calls of one message. Each is a request of its own, submitted as if it
 * had come alone, once the one before it is answered: so it is routed, charged, made to wait and
 * recognized when repeated like any other. One is under way at a time; its memory is used for the
 * next. The message is answered when the last one is.
 *
 * An answer may come within the submission or from any engine's thread. Of the two, whichever ends
 * last goes on with the next call, so that calls that are answered at once do not nest.
 */
#include "daemon/engine/seq/calls.h"

#include <inttypes.h>
#include <stdatomic.h>

enum { REPLY_BYTES = 4096 }; /* of a call: lengths of WIRE_MAX_LAYERS, or an error's sentence */
static_assert(REPLY_BYTES >= 5 * WIRE_MAX_LAYERS + (int)REQUEST_MIN_MSG_BYTES, "a reply fits");

struct calls {
    struct engine *engine;
    struct request *req; /* the message */
    size_t n, at; /* calls; the one under way */
    atomic_bool is_met; /* its submission has returned, or its answer has come */
    struct request call; /* the one under way */
    Attnd__Request header; /* its header */
    struct iobuf room; /* for its reply */
    Attnd__CallReply *replies; /* [n] */
    Attnd__CallReply **list; /* [n] to them */
    _Alignas(WIRE_ALIGN) uint8_t room_bytes[REPLY_BYTES];
};

static void note_reply(struct calls *c)
{
    Attnd__CallReply *to = &c->replies[c->at];
    struct iobuf *msg = c->call.reply;
    struct wire_reply reply;
    char why[WHY_BYTES];
    attn_status st = wire_reply_decode(msg->data + msg->offset, msg->n_bytes, &c->req->arena,
                                       &reply, why, sizeof why);
    if (st != ATTN_OK) {
        to->status = st;
        return;
    }
    const Attnd__Reply *h = reply.header;
    to->status = h->status;
    to->message = h->message;
    to->retry_after_us = h->retry_after_us;
    if (h->body_case == ATTND__REPLY__BODY_SEQ) {
        to->body_case = ATTND__CALL_REPLY__BODY_SEQ;
        to->seq = h->seq;
    } else if (h->body_case == ATTND__REPLY__BODY_PROBE) {
        to->body_case = ATTND__CALL_REPLY__BODY_PROBE;
        to->probe = h->probe;
    }
}

static void finish(struct calls *c)
{
    struct engine *e = c->engine;
    struct answer a;
    Attnd__CallsReply body = ATTND__CALLS_REPLY__INIT;
    body.n_calls = c->n;
    body.calls = c->list;
    answer_init(&a);
    a.header.body_case = ATTND__REPLY__BODY_CALLS;
    a.header.calls = &body;
    engine_end(e, c->req, ATTN_OK, &a); /* frees c, which is in the message's arena */
    atomic_fetch_sub(&e->n_calls, 1);
}

static void call_reply(struct request *call);

/* Makes the next call a request. */
static void call_begin(struct calls *c)
{
    static const struct transport_ops ops = {.label = STATS_IPC, .reply = call_reply};
    const struct request *req = c->req;
    const Attnd__Call *what = req->wire.header->calls->calls[c->at];
    struct request *call = &c->call;
    attnd__request__init(&c->header);
    c->header.session = req->wire.header->session;
    c->header.timeout_us = req->wire.header->timeout_us;
    c->header.body_case = (Attnd__Request__BodyCase)what->body_case; /* the schema's promise */
    c->header.open = what->open; /* whichever it is */
    request_init(call, &ops, c);
    call->principal = req->principal;
    call->msg = req->msg;
    call->room = &c->room;
    call->wire =
        (struct wire_request){.request_id = req->wire.request_id + c->at, .header = &c->header};
    call->received_ns = req->received_ns;
    call->deadline_ns = req->deadline_ns;
    c->room = (struct iobuf){.data = c->room_bytes, .capacity_bytes = REPLY_BYTES};
    atomic_store_explicit(&c->is_met, false, memory_order_relaxed);
}

/* Whether the other side, of submission and answer, was here before: then it is our turn to go
 * on. */
static bool is_second(struct calls *c)
{
    return atomic_exchange(&c->is_met, true);
}

/* Carries out calls until one has to wait, or all are done. */
static void go_on(struct calls *c)
{
    while (c->at < c->n) {
        call_begin(c);
        engine_submit(c->engine, &c->call);
        if (!is_second(c))
            return;
    }
    finish(c);
}

static void call_reply(struct request *call)
{
    struct calls *c = call->peer;
    note_reply(c);
    wire_arena_reset(&call->arena);
    c->at++;
    if (is_second(c))
        go_on(c);
}

/* Checks what decides whether the message can be carried out at all. */
static attn_status calls_check(const struct request *req, struct answer *a)
{
    const Attnd__Calls *calls = req->wire.header->calls;
    if (calls->n_calls == 0)
        return answer_no(a, ATTN_EINVAL, "calls.calls is empty");
    if (req->wire.request_id > UINT64_MAX - calls->n_calls)
        return answer_no(a, ATTN_EINVAL, "request id %" PRIu64 " leaves no ids for %zu calls",
                         req->wire.request_id, calls->n_calls);
    for (size_t i = 0; i < calls->n_calls; i++)
        if (calls->calls[i]->body_case == ATTND__CALL__BODY__NOT_SET)
            return answer_no(a, ATTN_ENOTSUP,
                             "calls.calls[%zu] is empty, or a request that can't be one of several",
                             i);
    return ATTN_OK;
}

attn_status calls_run(struct engine *e, struct request *req, uint32_t session, struct answer *a)
{
    (void)session; /* each call looks for it */
    size_t n = req->wire.header->calls->n_calls;
    attn_status st = calls_check(req, a);
    if (st != ATTN_OK)
        return st;
    struct calls *c = wire_arena_alloc(&req->arena, sizeof *c + WIRE_ALIGN);
    Attnd__CallReply *replies = wire_arena_alloc(&req->arena, n * sizeof *replies);
    Attnd__CallReply **list = wire_arena_alloc(&req->arena, n * sizeof *list);
    if (c == NULL || replies == NULL || list == NULL)
        return answer_no(a, ATTN_ENOMEM, "no memory for %zu calls", n);
    c = (struct calls *)(((uintptr_t)c + WIRE_ALIGN - 1) / WIRE_ALIGN * WIRE_ALIGN);
    c->engine = e;
    c->req = req;
    c->n = n;
    c->at = 0;
    c->replies = replies;
    c->list = list;
    for (size_t i = 0; i < n; i++) {
        attnd__call_reply__init(&replies[i]);
        list[i] = &replies[i];
    }
    a->is_later = true;
    atomic_fetch_add(&e->n_calls, 1);
    go_on(c);
    return ATTN_OK;
}
