/* calls.c: several requests on sequences in one message, and what an open would find.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clients/libattn/pool/pool.h"

/* The calls of one message, and their bodies. */
struct message {
    const struct attn_pool *pool;
    struct attn_seq_call *calls; /* [n], the caller's */
    uint32_t n;
    Attnd__Call *call[WIRE_MAX_CALLS], at[WIRE_MAX_CALLS];
    union {
        Attnd__Open open;
        Attnd__Fork fork;
        Attnd__Truncate truncate;
        Attnd__Close close;
        Attnd__Adopt adopt;
        Attnd__Tokens tokens;
        Attnd__Probe probe;
        Attnd__Commit commit;
    } body[WIRE_MAX_CALLS];
};

static void probe_fill(Attnd__Probe *b, const attn_pool *p, const struct attn_tokens *t)
{
    attnd__probe__init(b);
    b->pool = p->id;
    b->tokens = (uint32_t *)(uintptr_t)t->ids; /* packing only reads it */
    b->n_tokens = t->n;
    b->adapter = t->adapter;
}

static void probe_take(const Attnd__ProbeReply *b, struct attn_probe *out)
{
    *out = (struct attn_probe){.cached_tokens = b->cached_tokens,
                               .tier_tokens = b->tier_tokens,
                               .n_blocks = b->n_blocks,
                               .n_free_blocks = b->n_free_blocks,
                               .n_reserved_blocks = b->n_reserved_blocks};
}

/* Fills in what is sent of the call, as the message's next one. */
static void call_fill(struct message *m, const struct attn_seq_call *c)
{
    Attnd__Call *to = &m->at[m->n];
    attnd__call__init(to);
    to->open = &m->body[m->n].open; /* whichever it is: a union of pointers to a union */
    m->call[m->n++] = to;
    uint32_t *ids = (uint32_t *)(uintptr_t)c->tokens.ids; /* packing only reads it */
    switch (c->kind) {
    case ATTN_CALL_OPEN:
        to->body_case = ATTND__CALL__BODY_OPEN;
        attnd__open__init(to->open);
        *to->open = (Attnd__Open){.base = to->open->base,
                                  .seq = c->seq.id,
                                  .pool = m->pool->id,
                                  .n_tokens = c->tokens.n,
                                  .tokens = ids,
                                  .adapter = c->tokens.adapter};
        return;
    case ATTN_CALL_ADOPT:
        to->body_case = ATTND__CALL__BODY_ADOPT;
        attnd__adopt__init(to->adopt);
        to->adopt->seq = c->seq.id;
        return;
    case ATTN_CALL_FORK:
        to->body_case = ATTND__CALL__BODY_FORK;
        attnd__fork__init(to->fork);
        to->fork->seq = c->seq.id;
        to->fork->epoch = c->seq.epoch;
        to->fork->new_seq = c->new_id;
        to->fork->has_len = c->len != ATTN_ALL_TOKENS;
        to->fork->len = to->fork->has_len ? c->len : 0;
        return;
    case ATTN_CALL_TOKENS:
        to->body_case = ATTND__CALL__BODY_TOKENS;
        attnd__tokens__init(to->tokens);
        *to->tokens = (Attnd__Tokens){.base = to->tokens->base,
                                      .seq = c->seq.id,
                                      .epoch = c->seq.epoch,
                                      .pos = c->pos,
                                      .n_tokens = c->tokens.n,
                                      .tokens = ids};
        return;
    case ATTN_CALL_TRUNCATE:
        to->body_case = ATTND__CALL__BODY_TRUNCATE;
        attnd__truncate__init(to->truncate);
        to->truncate->seq = c->seq.id;
        to->truncate->epoch = c->seq.epoch;
        to->truncate->len = c->len;
        return;
    case ATTN_CALL_COMMIT:
        to->body_case = ATTND__CALL__BODY_COMMIT;
        attnd__commit__init(to->commit);
        to->commit->seq = c->seq.id;
        to->commit->epoch = c->seq.epoch;
        to->commit->nodes = ids;
        to->commit->n_nodes = c->tokens.n;
        return;
    case ATTN_CALL_CLOSE:
        to->body_case = ATTND__CALL__BODY_CLOSE;
        attnd__close__init(to->close);
        to->close->seq = c->seq.id;
        to->close->epoch = c->seq.epoch;
        return;
    case ATTN_CALL_PROBE:
        to->body_case = ATTND__CALL__BODY_PROBE;
        probe_fill(to->probe, m->pool, &c->tokens);
        return;
    }
}

/* --- answers ---------------------------------------------------------------------------------- */

static attn_status fail(struct attn_seq_call *c, attn_status st, const char *sentence)
{
    c->error.status = st;
    snprintf(c->error.message, sizeof c->error.message, "%s", sentence);
    return st;
}

static attn_status seq_take(const struct message *m, struct attn_seq_call *c,
                            const Attnd__SeqReply *b)
{
    uint32_t num_layers = m->pool->spec.num_layers;
    char why[ATTN_MESSAGE_BYTES];
    bool has_lens = c->kind == ATTN_CALL_ADOPT || c->kind == ATTN_CALL_FORK;
    if (b->pool != m->pool->id) {
        snprintf(why, sizeof why, "sequence %llu is in pool %u, not in pool %u (\"%.63s\")",
                 (unsigned long long)c->seq.id, b->pool, m->pool->id, m->pool->spec.name);
        return fail(c, ATTN_EINVAL, why);
    }
    if (has_lens && b->n_layer_len != num_layers) {
        snprintf(why, sizeof why, "%zu layer lengths, expected %u", b->n_layer_len, num_layers);
        return fail(c, ATTN_EPROTO, why);
    }
    if (c->kind == ATTN_CALL_FORK)
        c->seq.id = c->new_id;
    c->seq.epoch = b->epoch;
    c->n_cached = b->cached_tokens;
    if (has_lens && c->layer_len != NULL)
        memcpy(c->layer_len, b->layer_len, num_layers * sizeof(uint32_t));
    return ATTN_OK;
}

/* Takes the answer of one call. was_sent_again: the first copy may have closed the sequence. */
static void call_take(const struct message *m, struct attn_seq_call *c, const Attnd__CallReply *b,
                      bool was_sent_again)
{
    attn_status st = (attn_status)b->status;
    c->error = (struct attn_error){.status = st, .retry_after_us = b->retry_after_us};
    bool is_closed =
        c->kind == ATTN_CALL_CLOSE && was_sent_again && (st == ATTN_ENOTFOUND || st == ATTN_EMOVED);
    if (is_closed) {
        c->error.status = ATTN_OK;
        return;
    }
    if (st != ATTN_OK) {
        fail(c, st, b->message[0] != '\0' ? b->message : attn_status_message(st));
        return;
    }
    if (b->body_case == ATTND__CALL_REPLY__BODY_SEQ && c->kind != ATTN_CALL_PROBE)
        seq_take(m, c, b->seq);
    else if (b->body_case == ATTND__CALL_REPLY__BODY_PROBE && c->kind == ATTN_CALL_PROBE)
        probe_take(b->probe, &c->probe);
    else if (c->kind != ATTN_CALL_CLOSE)
        fail(c, ATTN_EPROTO, "malformed reply: the call's answer lacks its body");
}

static attn_status take_calls(struct client_request *r, const struct wire_reply *reply)
{
    struct message *m = r->take_arg;
    const Attnd__Reply *h = reply->header;
    if (h->body_case != ATTND__REPLY__BODY_CALLS)
        return pool_reply_without_body(r, "several calls");
    if (h->calls->n_calls != m->n) {
        snprintf(r->result.message, sizeof r->result.message, "%zu answers to %u calls",
                 h->calls->n_calls, m->n);
        return ATTN_EPROTO;
    }
    for (uint32_t i = 0; i < m->n; i++)
        call_take(m, &m->calls[i], h->calls->calls[i], r->result.n_sends > 1);
    return ATTN_OK;
}

static attn_status take_probe(struct client_request *r, const struct wire_reply *reply)
{
    if (reply->header->body_case != ATTND__REPLY__BODY_PROBE)
        return pool_reply_without_body(r, "a probe");
    probe_take(reply->header->probe, r->take_arg);
    return ATTN_OK;
}

/* --- calls ------------------------------------------------------------------------------------ */

static attn_status check(const attn_pool *p, bool is_whole, const char *what)
{
    if (p == NULL || !is_whole)
        return error_set(ATTN_EINVAL, "pool or %s is NULL", what);
    attn_status st = client_check(p->client);
    return st == ATTN_OK ? pool_check(p) : st;
}

static attn_status call_check(const struct attn_seq_call *c, uint32_t i)
{
    if (c->struct_size != sizeof *c)
        return error_set(ATTN_EINVAL, "calls[%u].struct_size is %u, not %zu", i, c->struct_size,
                         sizeof *c);
    if (c->kind < ATTN_CALL_OPEN || c->kind > ATTN_CALL_COMMIT)
        return error_set(ATTN_EINVAL, "calls[%u].kind is %d, not in 1..%d", i, (int)c->kind,
                         (int)ATTN_CALL_COMMIT);
    if (c->kind == ATTN_CALL_COMMIT && c->tokens.n > WIRE_MAX_TREE_NODES)
        return error_set(ATTN_EINVAL, "calls[%u].tokens.n is %u, a tree has %u nodes at most", i,
                         c->tokens.n, WIRE_MAX_TREE_NODES);
    if (c->tokens.ids == NULL && c->tokens.n > 0)
        return error_set(ATTN_EINVAL, "calls[%u].tokens.ids is NULL, n is %u", i, c->tokens.n);
    return ATTN_OK;
}

/* The most bytes of a call in a message. */
static uint64_t call_bytes(const struct attn_seq_call *c)
{
    enum { OTHERS_BYTES = 64, ID_BYTES = 5 };
    return OTHERS_BYTES + (uint64_t)ID_BYTES * c->tokens.n;
}

/* Sends as many of the n calls as a message holds; *out_n of them are answered. */
static attn_status send_some(attn_pool *p, struct attn_seq_call *calls, uint32_t n,
                             uint64_t timeout_us, struct message *m, uint32_t *out_n)
{
    uint64_t bytes = WIRE_MAX_HEADER_BYTES, left = client_info(p->client).max_message_bytes;
    left = (left < bytes ? left : bytes) - 2 * WIRE_ALIGN;
    m->n = 0;
    while (m->n < n && m->n < WIRE_MAX_CALLS) {
        bytes = call_bytes(&calls[m->n]);
        if (m->n > 0 && bytes > left)
            break;
        call_fill(m, &calls[m->n]);
        left -= bytes < left ? bytes : left;
    }
    m->calls = calls;
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__Calls body = ATTND__CALLS__INIT;
    body.n_calls = m->n;
    body.calls = m->call;
    req.body_case = ATTND__REQUEST__BODY_CALLS;
    req.calls = &body;
    attn_status st = client_call(p->client, &req, timeout_us, take_calls, m);
    *out_n = st == ATTN_OK ? m->n : 0;
    return st;
}

attn_status attn_seq_calls(attn_pool *p, struct attn_seq_call *calls, uint32_t n,
                           uint64_t timeout_us, uint32_t *n_done)
{
    attn_status st = check(p, calls != NULL || n == 0, "calls");
    for (uint32_t i = 0; i < n && st == ATTN_OK; i++)
        st = call_check(&calls[i], i);
    if (n_done != NULL)
        *n_done = 0;
    if (st != ATTN_OK || n == 0)
        return st;
    struct message *m = malloc(sizeof *m);
    if (m == NULL)
        return error_set(ATTN_ENOMEM, "no memory for %u calls", n);
    m->pool = p;
    for (uint32_t at = 0, n_some; at < n && st == ATTN_OK; at += n_some) {
        st = send_some(p, calls + at, n - at, timeout_us, m, &n_some);
        if (n_done != NULL)
            *n_done = at + n_some;
    }
    free(m);
    return st;
}

attn_status attn_seq_probe(attn_pool *p, const struct attn_tokens *t, uint64_t timeout_us,
                           struct attn_probe *out)
{
    attn_status st =
        check(p, t != NULL && out != NULL && (t->ids != NULL || t->n == 0), "t, t->ids or out");
    if (st != ATTN_OK)
        return st;
    struct attn_probe taken;
    Attnd__Probe body;
    Attnd__Request req = ATTND__REQUEST__INIT;
    probe_fill(&body, p, t);
    if (body.n_tokens > WIRE_MAX_TOKENS)
        body.n_tokens = WIRE_MAX_TOKENS;
    req.body_case = ATTND__REQUEST__BODY_PROBE;
    req.probe = &body;
    st = client_call(p->client, &req, timeout_us, take_probe, &taken);
    if (st == ATTN_OK)
        *out = taken;
    return st;
}
