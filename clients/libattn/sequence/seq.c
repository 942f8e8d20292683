/* seq.c: sequences of a pool: opening, forking, adopting, truncating and closing them, the ids of
 * their tokens, and how long their shared blocks stay. Each call is a request and its answer.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clients/libattn/pool/pool.h"

struct seq_taking {
    const struct attn_pool *pool;
    struct attn_seq seq;
    uint32_t n_cached;
    uint32_t *layer_len; /* [num_layers] or NULL */
    bool has_layer_len; /* this request's answer carries it */
};

static attn_status take_seq(struct client_request *r, const struct wire_reply *reply)
{
    struct seq_taking *t = r->take_arg;
    const Attnd__SeqReply *b = reply->header->seq;
    uint32_t num_layers = t->pool->spec.num_layers;
    if (reply->header->body_case != ATTND__REPLY__BODY_SEQ)
        return pool_reply_without_body(r, "a sequence request");
    if (b->pool != t->pool->id) {
        snprintf(r->result.message, sizeof r->result.message,
                 "sequence %llu is in pool %u, not in pool %u (\"%s\")",
                 (unsigned long long)t->seq.id, b->pool, t->pool->id, t->pool->spec.name);
        return ATTN_EINVAL;
    }
    if (t->has_layer_len && b->n_layer_len != num_layers) {
        snprintf(r->result.message, sizeof r->result.message,
                 "sequence reply with %zu layer lengths, expected %u", b->n_layer_len, num_layers);
        return ATTN_EPROTO;
    }
    t->seq.epoch = b->epoch;
    t->n_cached = b->cached_tokens;
    if (t->layer_len != NULL)
        memcpy(t->layer_len, b->layer_len, num_layers * sizeof(uint32_t));
    return ATTN_OK;
}

static attn_status seq_call(attn_pool *p, Attnd__Request *req, uint64_t id, uint64_t timeout_us,
                            struct attn_seq *out_seq, uint32_t *out_layer_len, bool has_layer_len)
{
    struct seq_taking t = {
        .pool = p, .seq.id = id, .layer_len = out_layer_len, .has_layer_len = has_layer_len};
    attn_status st = client_call(p->client, req, timeout_us, take_seq, &t);
    if (st == ATTN_OK)
        *out_seq = t.seq;
    return st;
}

static attn_status seq_check(const attn_pool *p, const void *seq, const char *what)
{
    if (p == NULL || seq == NULL)
        return error_set(ATTN_EINVAL, "pool or %s is NULL", what);
    attn_status st = client_check(p->client);
    return st == ATTN_OK ? pool_check(p) : st;
}

attn_status attn_seq_open(attn_pool *p, uint64_t id, uint64_t timeout_us, struct attn_seq *out_seq)
{
    const struct attn_tokens none = {0};
    uint32_t n_cached;
    return attn_seq_open_with(p, id, &none, timeout_us, out_seq, &n_cached);
}

/* Of a message, at five bytes each and what else it has. */
static uint32_t ids_at_once(struct attn_client *c)
{
    enum { OTHERS_BYTES = 4 << 10, ID_BYTES = 5 };
    uint64_t most = client_info(c).max_message_bytes;
    uint64_t n = most > 2 * OTHERS_BYTES ? (most - OTHERS_BYTES) / ID_BYTES : 1;
    return n < WIRE_MAX_TOKENS ? (uint32_t)n : WIRE_MAX_TOKENS;
}

attn_status attn_seq_open_with(attn_pool *p, uint64_t id, const struct attn_tokens *t,
                               uint64_t timeout_us, struct attn_seq *out_seq, uint32_t *out_cached)
{
    bool is_whole = t != NULL && out_cached != NULL && (t->ids != NULL || t->n == 0);
    attn_status st = seq_check(p, is_whole ? out_seq : NULL, "t, t->ids, out_seq or out_cached");
    if (st != ATTN_OK)
        return st;
    uint32_t n_most = ids_at_once(p->client), n_asked = t->n < n_most ? t->n : n_most;
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__Open open = ATTND__OPEN__INIT;
    open.seq = id;
    open.pool = p->id;
    open.tokens = (uint32_t *)(uintptr_t)t->ids; /* packing only reads it */
    open.n_tokens = n_asked;
    open.adapter = t->adapter;
    req.body_case = ATTND__REQUEST__BODY_OPEN;
    req.open = &open;
    struct seq_taking taking = {.pool = p, .seq.id = id};
    st = client_call(p->client, &req, timeout_us, take_seq, &taking);
    if (st != ATTN_OK)
        return st;
    *out_seq = taking.seq;
    *out_cached = taking.n_cached;
    if (t->n > n_asked)
        st = attn_seq_tokens(p, out_seq, n_asked, t->ids + n_asked, t->n - n_asked, timeout_us);
    if (st != ATTN_OK)
        attn_seq_close(p, out_seq, timeout_us); /* the caller has none */
    return st;
}

static attn_status tokens_send(attn_pool *p, const struct attn_seq *seq, uint32_t pos,
                               const uint32_t *ids, uint32_t n, uint64_t timeout_us)
{
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__Tokens tokens = ATTND__TOKENS__INIT;
    struct attn_seq same;
    tokens.seq = seq->id;
    tokens.epoch = seq->epoch;
    tokens.pos = pos;
    tokens.tokens = (uint32_t *)(uintptr_t)ids; /* packing only reads it */
    tokens.n_tokens = n;
    req.body_case = ATTND__REQUEST__BODY_TOKENS;
    req.tokens = &tokens;
    return seq_call(p, &req, seq->id, timeout_us, &same, NULL, false);
}

attn_status attn_seq_tokens(attn_pool *p, const struct attn_seq *seq, uint32_t pos,
                            const uint32_t *ids, uint32_t n, uint64_t timeout_us)
{
    attn_status st = seq_check(p, ids != NULL ? seq : NULL, "seq or ids");
    if (st == ATTN_OK && n > UINT32_MAX - pos)
        return error_set(ATTN_EINVAL, "n is %u, pos %u: too far", n, pos);
    uint32_t n_most = st == ATTN_OK ? ids_at_once(p->client) : 0;
    for (uint32_t n_part; st == ATTN_OK && n > 0; pos += n_part, ids += n_part, n -= n_part) {
        n_part = n < n_most ? n : n_most;
        st = tokens_send(p, seq, pos, ids, n_part, timeout_us);
    }
    return st;
}

attn_status attn_seq_retain(attn_pool *p, const struct attn_seq *seq,
                            const struct attn_retention *r, uint32_t n, uint64_t timeout_us)
{
    attn_status st = seq_check(p, r != NULL ? seq : NULL, "seq or r");
    if (st == ATTN_OK && (n < 1 || n > WIRE_MAX_RETENTIONS))
        return error_set(ATTN_EINVAL, "n is %u, not in 1..%d", n, WIRE_MAX_RETENTIONS);
    if (st != ATTN_OK)
        return st;
    Attnd__Retention ranges[WIRE_MAX_RETENTIONS], *list[WIRE_MAX_RETENTIONS];
    for (uint32_t i = 0; i < n; i++) {
        attnd__retention__init(&ranges[i]);
        ranges[i].first_token = r[i].first_token;
        ranges[i].priority = r[i].priority;
        ranges[i].time_to_live_s = r[i].time_to_live_s;
        ranges[i].is_pinned = r[i].is_pinned != 0;
        list[i] = &ranges[i];
    }
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__Tokens tokens = ATTND__TOKENS__INIT;
    struct attn_seq same;
    tokens.seq = seq->id;
    tokens.epoch = seq->epoch;
    tokens.retention = list;
    tokens.n_retention = n;
    req.body_case = ATTND__REQUEST__BODY_TOKENS;
    req.tokens = &tokens;
    return seq_call(p, &req, seq->id, timeout_us, &same, NULL, false);
}

attn_status attn_seq_fork(attn_pool *p, const struct attn_seq *seq, uint64_t new_id, uint32_t len,
                          uint64_t timeout_us, struct attn_seq *out_seq, uint32_t *out_layer_len)
{
    attn_status st = seq_check(p, seq != NULL ? out_seq : NULL, "seq or out_seq");
    if (st != ATTN_OK)
        return st;
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__Fork fork = ATTND__FORK__INIT;
    fork.seq = seq->id;
    fork.epoch = seq->epoch;
    fork.new_seq = new_id;
    fork.has_len = len != ATTN_ALL_TOKENS;
    fork.len = fork.has_len ? len : 0;
    req.body_case = ATTND__REQUEST__BODY_FORK;
    req.fork = &fork;
    return seq_call(p, &req, new_id, timeout_us, out_seq, out_layer_len, true);
}

attn_status attn_seq_adopt(attn_pool *p, uint64_t id, uint64_t timeout_us, struct attn_seq *out_seq,
                           uint32_t *out_layer_len)
{
    attn_status st = seq_check(p, out_seq, "out_seq");
    if (st != ATTN_OK)
        return st;
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__Adopt adopt = ATTND__ADOPT__INIT;
    adopt.seq = id;
    req.body_case = ATTND__REQUEST__BODY_ADOPT;
    req.adopt = &adopt;
    return seq_call(p, &req, id, timeout_us, out_seq, out_layer_len, true);
}

attn_status attn_seq_truncate(attn_pool *p, struct attn_seq *seq, uint32_t len, uint64_t timeout_us)
{
    attn_status st = seq_check(p, seq, "seq");
    if (st != ATTN_OK)
        return st;
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__Truncate truncate = ATTND__TRUNCATE__INIT;
    truncate.seq = seq->id;
    truncate.epoch = seq->epoch;
    truncate.len = len;
    req.body_case = ATTND__REQUEST__BODY_TRUNCATE;
    req.truncate = &truncate;
    return seq_call(p, &req, seq->id, timeout_us, seq, NULL, false);
}

attn_status attn_seq_commit(attn_pool *p, struct attn_seq *seq, const uint32_t *nodes, uint32_t n,
                            uint64_t timeout_us)
{
    attn_status st = seq_check(p, nodes != NULL || n == 0 ? seq : NULL, "seq or nodes");
    if (st != ATTN_OK)
        return st;
    if (n > WIRE_MAX_TREE_NODES)
        return error_set(ATTN_EINVAL, "n is %u, a tree has %u nodes at most", n,
                         WIRE_MAX_TREE_NODES);
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__Commit commit = ATTND__COMMIT__INIT;
    commit.seq = seq->id;
    commit.epoch = seq->epoch;
    commit.nodes = (uint32_t *)(uintptr_t)nodes; /* packing only reads it */
    commit.n_nodes = n;
    req.body_case = ATTND__REQUEST__BODY_COMMIT;
    req.commit = &commit;
    return seq_call(p, &req, seq->id, timeout_us, seq, NULL, false);
}

attn_status attn_seq_close(attn_pool *p, const struct attn_seq *seq, uint64_t timeout_us)
{
    attn_status st = seq_check(p, seq, "seq");
    if (st == ATTN_ENOTFOUND)
        return ATTN_OK; /* went with its session */
    if (st != ATTN_OK)
        return st;
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__Close close = ATTND__CLOSE__INIT;
    close.seq = seq->id;
    close.epoch = seq->epoch;
    req.body_case = ATTND__REQUEST__BODY_CLOSE;
    req.close = &close;
    st = client_call(p->client, &req, timeout_us, NULL, NULL);
    return st == ATTN_ENOTFOUND && attn_last_error_gone() == ATTN_GONE_SESSION ? ATTN_OK : st;
}
