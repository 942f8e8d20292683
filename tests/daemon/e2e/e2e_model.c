/* e2e_model.c: sequences whose tokens are a function of stream, layer and position, and the float64
 * reference of what the daemon should answer about them. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/daemon/e2e/e2e.h"

static attn_dtype dtype;

attn_dtype e2e_dtype(void)
{
    return dtype;
}

bool e2e_all_have_windows;
bool e2e_is_batch_variant;

static bool is_v_in_k(void)
{
    return getenv("E2E_V_IN_K") != NULL;
}

attn_dtype e2e_kv_dtype(void)
{
    const char *name = getenv("E2E_KV_DTYPE");
    if (name == NULL)
        return dtype;
    attn_dtype kv = attn_dtype_parse(name);
    if (kv == ATTN_DTYPE_NONE)
        fail_msg("E2E_KV_DTYPE is %s", name);
    return kv;
}

static struct attn_layer_spec spec_of(uint32_t layer)
{
    struct attn_layer_spec s = {.scale = (float)(1 / sqrt(E2E_DIM))};
    const char *split = getenv("E2E_SPLIT");
    if (layer == 1 && split != NULL && strcmp(split, "tokens") == 0) {
        s.is_full = false; /* such pools have no windows */
    } else if (layer == 1) {
        s.window_tokens = 24;
        s.sink_tokens = 3;
    } else if (layer == 2) {
        s.scale = 0.5f;
        s.soft_cap = 2;
    }
    if (e2e_all_have_windows && layer != 1)
        s.window_tokens = 40 - 8 * layer;
    return s;
}

void e2e_make_pool(struct e2e_client *c, attn_dtype d, uint32_t n_blocks)
{
    Attnd__PoolSpec spec = ATTND__POOL_SPEC__INIT;
    Attnd__PoolCreate b = ATTND__POOL_CREATE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__LayerSpec layer[E2E_LAYERS], *layers[E2E_LAYERS];
    dtype = d;
    for (uint32_t i = 0; i < E2E_LAYERS; i++) {
        struct attn_layer_spec s = spec_of(i);
        layer[i] = (Attnd__LayerSpec)ATTND__LAYER_SPEC__INIT;
        layer[i].scale = s.scale;
        layer[i].window_tokens = s.window_tokens;
        layer[i].sink_tokens = s.sink_tokens;
        layer[i].soft_cap = s.soft_cap;
        layers[i] = &layer[i];
    }
    spec.name = "e2e";
    spec.num_layers = E2E_LAYERS;
    spec.num_q_heads = E2E_Q_HEADS;
    spec.num_kv_heads = E2E_KV_HEADS;
    spec.head_dim_k = E2E_DIM;
    spec.is_v_in_k = is_v_in_k();
    spec.block_tokens = E2E_BLOCK_TOKENS;
    spec.n_blocks = n_blocks;
    spec.q_dtype = (Attnd__Dtype)d;
    spec.kv_dtype = (Attnd__Dtype)e2e_kv_dtype();
    spec.is_batch_invariant = !e2e_is_batch_variant;
    attn_split split = ATTN_SPLIT_AUTO;
    if (getenv("E2E_SPLIT") != NULL && !attn_split_parse(getenv("E2E_SPLIT"), &split))
        fail_msg("E2E_SPLIT is %s", getenv("E2E_SPLIT"));
    spec.split = (Attnd__Split)split;
    spec.n_layers = E2E_LAYERS;
    spec.layers = layers;
    b.spec = &spec;
    h.session = c->session;
    h.body_case = ATTND__REQUEST__BODY_POOL_CREATE;
    h.pool_create = &b;
    const Attnd__Reply *r = e2e_call(c, &h);
    if (r->status != ATTN_OK)
        fail_msg("no pool: %s", r->message);
    c->pool = r->pool->pool;
}

/* --- requests --------------------------------------------------------------------------------- */

static attn_status take_epoch(struct e2e_seq *s, const Attnd__Reply *r)
{
    if (r->status == ATTN_OK)
        s->epoch = r->seq->epoch;
    return (attn_status)r->status;
}

attn_status e2e_open_seq(struct e2e_client *c, struct e2e_seq *s, uint64_t name, uint32_t stream)
{
    Attnd__Open b = ATTND__OPEN__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    s->name = name;
    for (uint32_t i = 0; i < E2E_MAX_TOKENS; i++)
        s->stream[i] = stream;
    b.seq = name;
    b.pool = c->pool;
    h.session = c->session;
    h.body_case = ATTND__REQUEST__BODY_OPEN;
    h.open = &b;
    return take_epoch(s, e2e_call(c, &h));
}

attn_status e2e_fork(struct e2e_client *c, const struct e2e_seq *src, struct e2e_seq *s,
                     uint64_t name, uint32_t len, uint32_t stream)
{
    Attnd__Fork b = ATTND__FORK__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    *s = *src;
    s->name = name;
    for (uint32_t i = len; i < E2E_MAX_TOKENS; i++)
        s->stream[i] = stream;
    b.seq = src->name;
    b.epoch = src->epoch;
    b.new_seq = name;
    b.len = len;
    b.has_len = true;
    h.session = c->session;
    h.body_case = ATTND__REQUEST__BODY_FORK;
    h.fork = &b;
    return take_epoch(s, e2e_call(c, &h));
}

attn_status e2e_truncate(struct e2e_client *c, struct e2e_seq *s, uint32_t len)
{
    Attnd__Truncate b = ATTND__TRUNCATE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.seq = s->name;
    b.epoch = s->epoch;
    b.len = len;
    h.session = c->session;
    h.body_case = ATTND__REQUEST__BODY_TRUNCATE;
    h.truncate = &b;
    return take_epoch(s, e2e_call(c, &h));
}

attn_status e2e_close_seq(struct e2e_client *c, const struct e2e_seq *s)
{
    Attnd__Close b = ATTND__CLOSE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.seq = s->name;
    b.epoch = s->epoch;
    h.session = c->session;
    h.body_case = ATTND__REQUEST__BODY_CLOSE;
    h.close = &b;
    uint64_t n_retries = c->n_retries;
    attn_status st = (attn_status)e2e_call(c, &h)->status;
    /* of two copies that wait for the sequence, the second is answered first */
    return st == ATTN_ENOTFOUND && c->n_retries > n_retries ? ATTN_OK : st;
}

attn_status e2e_adopt(struct e2e_client *c, struct e2e_seq *s, uint32_t layer_len[E2E_LAYERS])
{
    Attnd__Adopt b = ATTND__ADOPT__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.seq = s->name;
    h.session = c->session;
    h.body_case = ATTND__REQUEST__BODY_ADOPT;
    h.adopt = &b;
    const Attnd__Reply *r = e2e_call(c, &h);
    if (r->status != ATTN_OK)
        return (attn_status)r->status;
    assert_int_equal(r->seq->n_layer_len, E2E_LAYERS);
    s->epoch = r->seq->epoch;
    c->pool = r->seq->pool;
    memcpy(layer_len, r->seq->layer_len, E2E_LAYERS * sizeof *layer_len);
    return ATTN_OK;
}

/* --- tokens ----------------------------------------------------------------------------------- */

enum tensor { TENSOR_Q, TENSOR_K, TENSOR_V };

/* Uniform in (-1, 1), never 0. */
static double value(uint32_t stream, uint32_t layer, uint32_t pos, enum tensor t, uint32_t i)
{
    uint64_t x = ((uint64_t)stream << 32 | pos) * 0x9e3779b97f4a7c15u;
    x ^= ((uint64_t)layer << 40 | (uint64_t)t << 32 | i) * 0xbf58476d1ce4e5b9u;
    x ^= x >> 29;
    x *= 0x94d049bb133111ebu;
    x ^= x >> 32;
    return ((double)(x >> 12) + 0.5) * 0x1p-51 - 1;
}

static void put_row(void *dst, size_t row, const struct e2e_seq *s, uint32_t layer, uint32_t pos,
                    enum tensor t, uint32_t heads)
{
    for (uint32_t i = 0; i < heads * E2E_DIM; i++)
        reference_put(dtype, dst, row * heads * E2E_DIM + i,
                      value(s->stream[pos], layer, pos, t, i));
}

void e2e_build_step(struct e2e_step *s, const struct e2e_client *c, uint32_t layer, uint32_t flags,
                    const struct e2e_item *items, uint32_t n_items)
{
    char why[256];
    assert_true(n_items <= E2E_MAX_ITEMS);
    attnd__step__init(&s->wire);
    for (uint32_t i = 0; i < n_items; i++) {
        s->seq[i] = items[i].seq->name;
        s->epoch[i] = items[i].seq->epoch;
        s->pos[i] = items[i].pos;
        s->n_tokens[i] = items[i].n_tokens;
    }
    s->wire.pool = c->pool;
    s->wire.layer = layer;
    s->wire.flags = flags;
    s->wire.dtype = (Attnd__Dtype)dtype;
    s->wire.n_seq = s->wire.n_epoch = s->wire.n_pos = s->wire.n_n_tokens = n_items;
    s->wire.seq = s->seq;
    s->wire.epoch = s->epoch;
    s->wire.pos = s->pos;
    s->wire.n_tokens = s->n_tokens;
    if (wire_step_layout_of(&s->wire,
                            &(struct wire_shape){E2E_Q_HEADS, E2E_KV_HEADS, E2E_DIM, E2E_DIM,
                                                 is_v_in_k(), dtype, 0, 0},
                            &s->layout, why, sizeof why) != ATTN_OK)
        fail_msg("the test's step is wrong: %s", why);
}

void e2e_fill_step(const struct e2e_step *s, uint32_t layer, const struct e2e_item *items,
                   uint8_t *payload)
{
    size_t row = 0;
    for (uint32_t i = 0; i < s->wire.n_seq; i++) {
        for (uint32_t t = 0; t < items[i].n_tokens; t++, row++) {
            const struct e2e_seq *q = items[i].seq;
            uint32_t p = items[i].pos + t;
            if (s->wire.flags & WIRE_STEP_ATTEND)
                put_row(payload + s->layout.q_offset, row, q, layer, p, TENSOR_Q, E2E_Q_HEADS);
            if (s->wire.flags & WIRE_STEP_APPEND) {
                put_row(payload + s->layout.k_offset, row, q, layer, p, TENSOR_K, E2E_KV_HEADS);
                if (!is_v_in_k())
                    put_row(payload + s->layout.v_offset, row, q, layer, p, TENSOR_V, E2E_KV_HEADS);
            }
        }
    }
}

/* Fills tensors in, or leaves them zero. */
static uint64_t send_step(struct e2e_client *c, uint32_t layer, uint32_t flags,
                          const struct e2e_item *items, uint32_t n_items, uint64_t timeout_us,
                          bool is_zero)
{
    struct e2e_step s;
    Attnd__Request h = ATTND__REQUEST__INIT;
    e2e_build_step(&s, c, layer, flags, items, n_items);
    h.session = c->session;
    h.timeout_us = timeout_us;
    h.body_case = ATTND__REQUEST__BODY_STEP;
    h.step = &s.wire;
    uint8_t *payload = calloc(1, s.layout.request_bytes);
    if (!is_zero)
        e2e_fill_step(&s, layer, items, payload);
    uint64_t id = e2e_send(c, &h, payload, s.layout.request_bytes);
    free(payload);
    return id;
}

uint64_t e2e_send_step(struct e2e_client *c, uint32_t layer, uint32_t flags,
                       const struct e2e_item *items, uint32_t n_items, uint64_t timeout_us)
{
    return send_step(c, layer, flags, items, n_items, timeout_us, false);
}

uint64_t e2e_send_zeros(struct e2e_client *c, uint32_t layer, const struct e2e_item *item,
                        uint64_t timeout_us)
{
    return send_step(c, layer, E2E_BOTH, item, 1, timeout_us, true);
}

/* --- the reference ---------------------------------------------------------------------------- */

/* A token's K or V, as the cache reads it back: floats [E2E_KV_HEADS][E2E_DIM]. */
static void put_cached_row(float *dst, const struct e2e_seq *s, uint32_t layer, uint32_t pos,
                           enum tensor t)
{
    float sent[E2E_KV_HEADS * E2E_DIM];
    put_row(sent, 0, s, layer, pos, t, E2E_KV_HEADS);
    for (uint32_t h = 0; h < E2E_KV_HEADS; h++)
        reference_cached_row(dtype, e2e_kv_dtype(), sent, h * E2E_DIM, E2E_DIM, dst + h * E2E_DIM);
}

static void check_item(const uint8_t *out, const float *lse, uint32_t layer,
                       const struct e2e_item *it)
{
    size_t e = attn_dtype_bytes(dtype), n_kv = it->pos + it->n_tokens;
    const size_t q_row = E2E_Q_HEADS * E2E_DIM, kv_row = E2E_KV_HEADS * E2E_DIM;
    void *sent = calloc(it->n_tokens * q_row, e);
    float *q = calloc(it->n_tokens * q_row, sizeof *q), *k = calloc(n_kv * kv_row, sizeof *k),
          *v = calloc(n_kv * kv_row, sizeof *v);
    double *ref = calloc(it->n_tokens * q_row, sizeof *ref);
    double *ref_lse = calloc((size_t)it->n_tokens * E2E_Q_HEADS, sizeof *ref_lse);
    for (uint32_t t = 0; t < it->n_tokens; t++)
        put_row(sent, t, it->seq, layer, it->pos + t, TENSOR_Q, E2E_Q_HEADS);
    for (size_t i = 0; i < it->n_tokens * q_row; i++)
        q[i] = (float)reference_get(dtype, sent, i);
    for (uint32_t t = 0; t < n_kv; t++) {
        put_cached_row(k + t * kv_row, it->seq, layer, t, TENSOR_K);
        put_cached_row(v + t * kv_row, it->seq, layer, t, is_v_in_k() ? TENSOR_K : TENSOR_V);
    }
    struct attn_layer_spec spec = spec_of(layer);
    assert_int_equal(reference_attend(&spec, E2E_Q_HEADS, E2E_KV_HEADS, E2E_DIM, E2E_DIM, ATTN_F32,
                                      q, it->n_tokens, it->pos, k, v, (uint32_t)n_kv, ref, ref_lse),
                     ATTN_OK);
    struct reference_bound bound = reference_bound_of(dtype, dtype);
    double diff2 = 0, ref2 = 0;
    for (size_t i = 0; i < it->n_tokens * q_row; i++) {
        double x = reference_get(dtype, out, i), d = fabs(x - ref[i]);
        if (!(d <= bound.atol + bound.rtol * fabs(ref[i])))
            fail_msg("sequence %llu layer %u pos %u: output %zu is %g, the reference %g",
                     (unsigned long long)it->seq->name, layer, it->pos, i, x, ref[i]);
        diff2 += d * d;
        ref2 += ref[i] * ref[i];
    }
    assert_true(ref2 > 0 && sqrt(diff2 / ref2) < bound.l2);
    for (size_t i = 0; lse != NULL && i < (size_t)it->n_tokens * E2E_Q_HEADS; i++)
        if (!(fabs(lse[i] - ref_lse[i]) <= bound.lse_atol + bound.lse_rtol * fabs(ref_lse[i])))
            fail_msg("sequence %llu layer %u: lse %zu is %g, the reference %g",
                     (unsigned long long)it->seq->name, layer, i, (double)lse[i], ref_lse[i]);
    free(sent);
    free(q);
    free(k);
    free(v);
    free(ref);
    free(ref_lse);
}

void e2e_check_step(const struct wire_reply *r, uint32_t layer, uint32_t flags,
                    const struct e2e_item *items, uint32_t n_items)
{
    if (r->header->status != ATTN_OK)
        fail_msg("%s: %s", attn_status_name((attn_status)r->header->status), r->header->message);
    size_t n_tokens = 0, row = 0, row_bytes = E2E_Q_HEADS * E2E_DIM * attn_dtype_bytes(dtype);
    for (uint32_t i = 0; i < n_items; i++)
        n_tokens += items[i].n_tokens;
    size_t lse_offset = (n_tokens * row_bytes + 63) / 64 * 64;
    bool has_lse = flags & WIRE_STEP_LSE;
    assert_int_equal(r->payload_bytes, has_lse ? lse_offset + n_tokens * E2E_Q_HEADS * sizeof(float)
                                               : n_tokens * row_bytes);
    for (uint32_t i = 0; i < n_items; i++) {
        const float *lse = (const float *)(void *)(r->payload + lse_offset) + row * E2E_Q_HEADS;
        check_item(r->payload + row * row_bytes, has_lse ? lse : NULL, layer, &items[i]);
        row += items[i].n_tokens;
    }
}

void e2e_step(struct e2e_client *c, uint32_t layer, const struct e2e_item *items, uint32_t n_items)
{
    uint32_t flags = E2E_BOTH | WIRE_STEP_LSE;
    uint64_t id = e2e_send_step(c, layer, flags, items, n_items, 0);
    e2e_check_step(e2e_await(c, id), layer, flags, items, n_items);
}

attn_status e2e_item(struct e2e_client *c, struct e2e_seq *s, uint32_t layer, uint32_t pos,
                     uint32_t n_tokens)
{
    struct e2e_item it = {s, pos, n_tokens};
    return (attn_status)e2e_await(c, e2e_send_step(c, layer, E2E_BOTH, &it, 1, 0))->header->status;
}

void *e2e_read_back(struct e2e_client *c, struct e2e_seq *s, uint32_t layer, uint32_t len,
                    size_t *out_bytes)
{
    struct e2e_item it = {s, 0, len};
    const struct wire_reply *r =
        e2e_await(c, e2e_send_step(c, layer, WIRE_STEP_ATTEND | WIRE_STEP_LSE, &it, 1, 0));
    if (r->header->status != ATTN_OK)
        fail_msg("reading back: %s", r->header->message);
    void *copy = malloc(r->payload_bytes);
    memcpy(copy, r->payload, r->payload_bytes);
    *out_bytes = r->payload_bytes;
    return copy;
}
