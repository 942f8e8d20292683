/* pool.c: pools and the sequences in them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clients/libattn/client.h"

static attn_status reply_without_body(struct client_request *r, const char *what)
{
    snprintf(r->result.message, sizeof r->result.message, "answer to %s without its body", what);
    return ATTN_EPROTO;
}

/* ---- spec to and from the wire ---- */

struct wire_branches {
    uint32_t segment_tokens[ATTN_MAX_BRANCHES], rates[ATTN_MAX_BRANCHES];
};

struct wire_spec {
    Attnd__PoolSpec spec;
    Attnd__Identity identity;
    Attnd__LayerSpec *layers;
    Attnd__LayerSpec **layer_ptrs;
    struct wire_branches *branches; /* of each layer */
};

static void wire_spec_fini(struct wire_spec *w)
{
    free(w->layers);
    free(w->layer_ptrs);
    free(w->branches);
}

static attn_status put_branches(const struct attn_layer *a, uint32_t layer,
                                struct wire_branches *to, Attnd__LayerSpec *l)
{
    if (a->n_branches > ATTN_MAX_BRANCHES || (a->n_branches > 0 && a->branches == NULL))
        return error_set(ATTN_EINVAL, "layers[%u].branches: %u of them at %p, at most %d are taken",
                         layer, a->n_branches, (const void *)a->branches, ATTN_MAX_BRANCHES);
    for (uint32_t i = 0; i < a->n_branches; i++) {
        to->segment_tokens[i] = a->branches[i].segment_tokens;
        to->rates[i] = a->branches[i].rate;
    }
    l->n_branch_segment_tokens = l->n_branch_rates = a->n_branches;
    l->branch_segment_tokens = to->segment_tokens;
    l->branch_rates = to->rates;
    return ATTN_OK;
}

/* Protobuf-c takes char * and float * and does not write to them. */
static attn_status wire_spec_init(struct wire_spec *w, const struct attn_pool_spec *s)
{
    *w = (struct wire_spec){.spec = ATTND__POOL_SPEC__INIT, .identity = ATTND__IDENTITY__INIT};
    Attnd__PoolSpec *p = &w->spec;
    p->name = (char *)s->name;
    p->num_layers = s->num_layers;
    p->num_q_heads = s->num_q_heads;
    p->num_kv_heads = s->num_kv_heads;
    p->head_dim_k = s->head_dim_k;
    p->head_dim_v = s->head_dim_v;
    p->block_tokens = s->block_tokens;
    p->n_blocks = s->n_blocks;
    p->q_dtype = (Attnd__Dtype)s->q_dtype;
    p->kv_dtype = (Attnd__Dtype)s->kv_dtype;
    p->is_batch_invariant = s->is_batch_invariant != 0;
    p->split = (Attnd__Split)s->split;
    w->identity.model = (char *)(s->model != NULL ? s->model : "");
    w->identity.rope = (char *)(s->rope != NULL ? s->rope : "");
    p->identity = &w->identity;
    if (s->n_layers == 0)
        return ATTN_OK;
    w->layers = calloc(s->n_layers, sizeof *w->layers);
    w->layer_ptrs = calloc(s->n_layers, sizeof(Attnd__LayerSpec *));
    w->branches = calloc(s->n_layers, sizeof *w->branches);
    if (w->layers == NULL || w->layer_ptrs == NULL || w->branches == NULL)
        return error_set(ATTN_ENOMEM, "no memory for a pool's layers");
    for (uint32_t i = 0; i < s->n_layers; i++) {
        const struct attn_layer *a = &s->layers[i];
        Attnd__LayerSpec *l = w->layer_ptrs[i] = &w->layers[i];
        attnd__layer_spec__init(l);
        l->scale = a->scale;
        l->window_tokens = a->window_tokens;
        l->sink_tokens = a->sink_tokens;
        l->soft_cap = a->soft_cap;
        l->is_full = a->is_full != 0;
        l->sink_logits = (float *)a->sink_logits;
        l->n_sink_logits = a->sink_logits != NULL ? s->num_q_heads : 0;
        l->alibi_slopes = (float *)a->alibi_slopes;
        l->n_alibi_slopes = a->alibi_slopes != NULL ? s->num_q_heads : 0;
        attn_status st = put_branches(a, i, &w->branches[i], l);
        if (st != ATTN_OK)
            return st;
    }
    p->n_layers = s->n_layers;
    p->layers = w->layer_ptrs;
    return ATTN_OK;
}

static size_t text_bytes(const char *s)
{
    return s != NULL ? strlen(s) + 1 : 1;
}

static const char *put_text(char **cursor, const char *s)
{
    char *dst = *cursor;
    size_t n = text_bytes(s);
    memcpy(dst, s != NULL ? s : "", n);
    *cursor += n;
    return dst;
}

static const float *put_floats(float **cursor, const float *src, size_t n)
{
    if (n == 0)
        return NULL;
    float *dst = *cursor;
    memcpy(dst, src, n * sizeof *dst);
    *cursor += n;
    return dst;
}

static const struct attn_branch *take_branches(struct attn_branch **cursor,
                                               const Attnd__LayerSpec *l)
{
    struct attn_branch *to = *cursor;
    for (size_t i = 0; i < l->n_branch_rates; i++)
        to[i] = (struct attn_branch){.segment_tokens = l->branch_segment_tokens[i],
                                     .rate = l->branch_rates[i]};
    *cursor += l->n_branch_rates;
    return l->n_branch_rates > 0 ? to : NULL;
}

/* Copies a spec from the wire into *out and one piece of memory behind it. */
static attn_status spec_copy(const Attnd__PoolSpec *w, struct attn_pool_spec *out,
                             void **out_memory)
{
    const char *model = w->identity != NULL ? w->identity->model : NULL;
    const char *rope = w->identity != NULL ? w->identity->rope : NULL;
    size_t n_floats = 0, n_branches = 0;
    for (size_t i = 0; i < w->n_layers; i++) {
        const Attnd__LayerSpec *l = w->layers[i];
        if (l->n_branch_segment_tokens != l->n_branch_rates)
            return ATTN_EPROTO;
        n_floats += l->n_sink_logits + l->n_alibi_slopes;
        n_branches += l->n_branch_rates;
    }
    size_t bytes = w->n_layers * sizeof(struct attn_layer) + n_floats * sizeof(float) +
                   n_branches * sizeof(struct attn_branch) + text_bytes(w->name) +
                   text_bytes(model) + text_bytes(rope);
    void *memory = calloc(1, bytes);
    if (memory == NULL)
        return ATTN_ENOMEM;
    struct attn_layer *layers = memory;
    float *floats = (float *)(layers + w->n_layers);
    struct attn_branch *branches = (struct attn_branch *)(floats + n_floats);
    char *text = (char *)(branches + n_branches);
    for (size_t i = 0; i < w->n_layers; i++) {
        const Attnd__LayerSpec *l = w->layers[i];
        layers[i] = (struct attn_layer){
            .scale = l->scale,
            .window_tokens = l->window_tokens,
            .sink_tokens = l->sink_tokens,
            .soft_cap = l->soft_cap,
            .is_full = l->is_full,
            .sink_logits = put_floats(&floats, l->sink_logits, l->n_sink_logits),
            .alibi_slopes = put_floats(&floats, l->alibi_slopes, l->n_alibi_slopes),
            .n_branches = (uint32_t)l->n_branch_rates,
            .branches = take_branches(&branches, l),
        };
    }
    *out = (struct attn_pool_spec){
        .struct_size = sizeof *out,
        .layer_struct_size = sizeof(struct attn_layer),
        .name = put_text(&text, w->name),
        .num_layers = w->num_layers,
        .num_q_heads = w->num_q_heads,
        .num_kv_heads = w->num_kv_heads,
        .head_dim_k = w->head_dim_k,
        .head_dim_v = w->head_dim_v != 0 ? w->head_dim_v : w->head_dim_k,
        .block_tokens = w->block_tokens,
        .n_blocks = w->n_blocks,
        .q_dtype = (attn_dtype)w->q_dtype,
        .kv_dtype =
            (attn_dtype)(w->kv_dtype != ATTND__DTYPE__DTYPE_NONE ? w->kv_dtype : w->q_dtype),
        .is_batch_invariant = w->is_batch_invariant,
        .split = (attn_split)w->split,
        .n_layers = (uint32_t)w->n_layers,
        .layers = w->n_layers > 0 ? layers : NULL,
        .model = put_text(&text, model),
        .rope = put_text(&text, rope),
    };
    *out_memory = memory;
    return ATTN_OK;
}

/* ---- pools ---- */

struct pool_taking {
    struct attn_pool *pool;
    struct client_hold *hold; /* NULL: taken over */
};

static attn_status take_pool(struct client_request *r, const struct wire_reply *reply)
{
    const Attnd__PoolReply *b = reply->header->pool;
    if (reply->header->body_case != ATTND__REPLY__BODY_POOL || b->spec == NULL)
        return reply_without_body(r, "a pool request");
    struct pool_taking *t = r->take_arg;
    struct attn_pool *p = t->pool;
    p->id = b->pool;
    p->n_free_blocks = b->n_free_blocks;
    attn_status st = spec_copy(b->spec, &p->spec, &p->memory);
    if (st != ATTN_OK)
        snprintf(r->result.message, sizeof r->result.message,
                 st == ATTN_EPROTO ? "branch_segment_tokens and branch_rates differ in length"
                                   : "no memory for a pool's spec");
    if (st == ATTN_OK) {
        hold_add(p, t->hold, r->id);
        t->hold = NULL;
    }
    return st;
}

static attn_status pool_call(struct attn_client *c, Attnd__Request *req, uint64_t timeout_us,
                             struct attn_pool **out_pool)
{
    attn_status st = client_check(c);
    if (st != ATTN_OK)
        return st;
    struct attn_pool *p = calloc(1, sizeof *p);
    struct pool_taking t = {.pool = p, .hold = calloc(1, sizeof *t.hold)};
    if (p == NULL || t.hold == NULL) {
        st = error_set(ATTN_ENOMEM, "no memory for a pool");
    } else {
        p->client = c;
        p->session_number = atomic_load(&c->session_number);
        st = client_call(c, req, timeout_us, take_pool, &t);
    }
    free(t.hold);
    if (st == ATTN_OK)
        *out_pool = p;
    else
        attn_pool_close(p);
    return st;
}

attn_status attn_pool_create(attn_client *c, const struct attn_pool_spec *spec, uint64_t timeout_us,
                             attn_pool **out_pool)
{
    attn_status st = client_check(c);
    if (st != ATTN_OK)
        return st;
    if (spec == NULL || out_pool == NULL || spec->name == NULL)
        return error_set(ATTN_EINVAL, "spec, spec->name or out_pool is NULL");
    if (spec->struct_size != sizeof *spec || spec->layer_struct_size != sizeof(struct attn_layer))
        return error_set(
            ATTN_EINVAL, "attn_pool_spec sizes %u and %u: this library knows %zu and %zu",
            spec->struct_size, spec->layer_struct_size, sizeof *spec, sizeof(struct attn_layer));
    if (spec->n_layers > WIRE_MAX_LAYERS || spec->num_q_heads > WIRE_MAX_HEADS ||
        (spec->n_layers > 0 && spec->layers == NULL))
        return error_set(ATTN_EINVAL, "%u layers, %u q heads: expected at most %u and %u",
                         spec->n_layers, spec->num_q_heads, WIRE_MAX_LAYERS, WIRE_MAX_HEADS);

    struct wire_spec w;
    st = wire_spec_init(&w, spec);
    if (st == ATTN_OK) {
        Attnd__Request req = ATTND__REQUEST__INIT;
        Attnd__PoolCreate create = ATTND__POOL_CREATE__INIT;
        create.spec = &w.spec;
        req.body_case = ATTND__REQUEST__BODY_POOL_CREATE;
        req.pool_create = &create;
        st = pool_call(c, &req, timeout_us, out_pool);
    }
    wire_spec_fini(&w);
    return st;
}

attn_status attn_pool_describe(attn_client *c, const char *name, uint64_t timeout_us,
                               attn_pool **out_pool)
{
    if (name == NULL || out_pool == NULL)
        return error_set(ATTN_EINVAL, "name or out_pool is NULL");
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__PoolDescribe describe = ATTND__POOL_DESCRIBE__INIT;
    describe.name = (char *)name;
    req.body_case = ATTND__REQUEST__BODY_POOL_DESCRIBE;
    req.pool_describe = &describe;
    return pool_call(c, &req, timeout_us, out_pool);
}

void attn_pool_close(attn_pool *p)
{
    if (p == NULL)
        return;
    free(p->memory);
    free(p);
}

const struct attn_pool_spec *attn_pool_spec_of(const attn_pool *p)
{
    return &p->spec;
}

uint32_t attn_pool_free_blocks(const attn_pool *p)
{
    return p->n_free_blocks;
}

/* ---- sequences ---- */

attn_status pool_check(const struct attn_pool *p)
{
    if (p->session_number == atomic_load(&p->client->session_number))
        return ATTN_OK;
    return error_set_gone(
        ATTN_GONE_POOL,
        "pool \"%.100s\" is of a session before attn_client_reopen: create it again", p->spec.name);
}

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
        return reply_without_body(r, "a sequence request");
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
