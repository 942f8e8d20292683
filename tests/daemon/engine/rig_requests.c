/* rig_requests.c: the requests of engine_rig.h, one function each. */
#include "tests/daemon/engine/engine_rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

uint64_t rig_hello(struct rig *r, const char *name)
{
    Attnd__Hello b = ATTND__HELLO__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.protocol_version = 1;
    b.client_name = (char *)(uintptr_t)name;
    h.body_case = ATTND__REQUEST__BODY_HELLO;
    h.hello = &b;
    const Attnd__Reply *reply = rig_call(r, &h);
    assert_int_equal(reply->status, ATTN_OK);
    assert_int_equal(reply->body_case, ATTND__REPLY__BODY_HELLO);
    assert_true(reply->hello->session != 0);
    return reply->hello->session;
}

static const Attnd__Reply *pool_create_reply(struct rig *r, const char *name, uint32_t n_blocks,
                                             Attnd__LayerSpec *of_all, Attnd__Split split)
{
    Attnd__PoolSpec spec = ATTND__POOL_SPEC__INIT;
    Attnd__PoolCreate b = ATTND__POOL_CREATE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    spec.name = (char *)(uintptr_t)name;
    spec.num_layers = RIG_LAYERS;
    spec.num_q_heads = RIG_Q_HEADS;
    spec.num_kv_heads = RIG_KV_HEADS;
    spec.head_dim_k = r->head_dim;
    spec.block_tokens = split == ATTND__SPLIT__SPLIT_TOKENS ? RIG_SPLIT_TOKENS : RIG_BLOCK_TOKENS;
    spec.n_blocks = n_blocks;
    spec.q_dtype = ATTND__DTYPE__F32;
    spec.layers = &of_all;
    spec.n_layers = of_all != NULL;
    spec.split = split;
    b.spec = &spec;
    h.session = r->session;
    h.body_case = ATTND__REQUEST__BODY_POOL_CREATE;
    h.pool_create = &b;
    return rig_call(r, &h);
}

static uint32_t pool_made(const Attnd__Reply *reply)
{
    if (reply->status != ATTN_OK)
        fail_msg("no pool: %s", reply->message);
    assert_int_equal(reply->body_case, ATTND__REPLY__BODY_POOL);
    return reply->pool->pool;
}

uint32_t rig_pool(struct rig *r, const char *name, uint32_t n_blocks)
{
    return rig_pool_of_split(r, name, n_blocks, ATTND__SPLIT__SPLIT_WHOLE);
}

uint32_t rig_pool_of_split(struct rig *r, const char *name, uint32_t n_blocks, Attnd__Split split)
{
    return pool_made(pool_create_reply(r, name, n_blocks, NULL, split));
}

uint32_t rig_pool_of_windows(struct rig *r, const char *name, uint32_t n_blocks,
                             uint32_t window_tokens, uint32_t sink_tokens)
{
    Attnd__LayerSpec l = ATTND__LAYER_SPEC__INIT;
    l.window_tokens = window_tokens;
    l.sink_tokens = sink_tokens;
    return pool_made(pool_create_reply(r, name, n_blocks, &l, ATTND__SPLIT__SPLIT_WHOLE));
}

const Attnd__Reply *rig_make_pool(struct rig *r, const char *name)
{
    return pool_create_reply(r, name, 64, NULL, ATTND__SPLIT__SPLIT_WHOLE);
}

static attn_status status_of(struct rig *r, uint64_t id)
{
    rig_run(r);
    return (attn_status)rig_answer(r, id)->status;
}

uint64_t rig_send_open(struct rig *r, uint64_t seq)
{
    return rig_send_open_with(r, seq, &(struct kv_tokens){0});
}

uint64_t rig_send_open_with(struct rig *r, uint64_t seq, const struct kv_tokens *t)
{
    Attnd__Open b = ATTND__OPEN__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.seq = seq;
    b.pool = r->pool;
    b.tokens = (uint32_t *)(uintptr_t)t->ids;
    b.n_tokens = t->n;
    b.adapter = t->adapter;
    h.session = r->session;
    h.body_case = ATTND__REQUEST__BODY_OPEN;
    h.open = &b;
    return rig_send(r, &h, NULL, 0);
}

attn_status rig_open_seq(struct rig *r, uint64_t seq)
{
    return status_of(r, rig_send_open(r, seq));
}

static uint64_t send_close(struct rig *r, uint64_t seq, uint32_t epoch)
{
    Attnd__Close b = ATTND__CLOSE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.seq = seq;
    b.epoch = epoch;
    h.session = r->session;
    h.body_case = ATTND__REQUEST__BODY_CLOSE;
    h.close = &b;
    return rig_send(r, &h, NULL, 0);
}

uint64_t rig_send_close(struct rig *r, uint64_t seq)
{
    return send_close(r, seq, rig_epoch(r, seq));
}

attn_status rig_close_seq(struct rig *r, uint64_t seq, uint32_t epoch)
{
    return status_of(r, send_close(r, seq, epoch));
}

attn_status rig_tokens(struct rig *r, uint64_t seq, uint32_t pos, const uint32_t *ids, uint32_t n)
{
    Attnd__Tokens b = ATTND__TOKENS__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.seq = seq;
    b.epoch = rig_epoch(r, seq);
    b.pos = pos;
    b.tokens = (uint32_t *)(uintptr_t)ids;
    b.n_tokens = n;
    h.session = r->session;
    h.body_case = ATTND__REQUEST__BODY_TOKENS;
    h.tokens = &b;
    return status_of(r, rig_send(r, &h, NULL, 0));
}

static uint64_t send_fork(struct rig *r, uint64_t seq, uint64_t new_seq, const uint32_t *len)
{
    Attnd__Fork b = ATTND__FORK__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.seq = seq;
    b.epoch = rig_epoch(r, seq);
    b.new_seq = new_seq;
    b.has_len = len != NULL;
    b.len = len != NULL ? *len : 0;
    h.session = r->session;
    h.body_case = ATTND__REQUEST__BODY_FORK;
    h.fork = &b;
    return rig_send(r, &h, NULL, 0);
}

uint64_t rig_send_fork(struct rig *r, uint64_t seq, uint64_t new_seq)
{
    return send_fork(r, seq, new_seq, NULL);
}

attn_status rig_fork(struct rig *r, uint64_t seq, uint64_t new_seq, uint32_t len)
{
    return status_of(r, send_fork(r, seq, new_seq, &len));
}

uint64_t rig_send_truncate(struct rig *r, uint64_t seq, uint32_t len)
{
    Attnd__Truncate b = ATTND__TRUNCATE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.seq = seq;
    b.epoch = rig_epoch(r, seq);
    b.len = len;
    h.session = r->session;
    h.body_case = ATTND__REQUEST__BODY_TRUNCATE;
    h.truncate = &b;
    return rig_send(r, &h, NULL, 0);
}

uint64_t rig_send_commit(struct rig *r, uint64_t seq, const uint32_t *nodes, uint32_t n)
{
    Attnd__Commit b = ATTND__COMMIT__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.seq = seq;
    b.epoch = rig_epoch(r, seq);
    b.nodes = (uint32_t *)(uintptr_t)nodes;
    b.n_nodes = n;
    h.session = r->session;
    h.body_case = ATTND__REQUEST__BODY_COMMIT;
    h.commit = &b;
    return rig_send(r, &h, NULL, 0);
}

attn_status rig_truncate(struct rig *r, uint64_t seq, uint32_t len)
{
    return status_of(r, rig_send_truncate(r, seq, len));
}

uint64_t rig_send_step(struct rig *r, const struct rig_step *s)
{
    uint32_t now[64];
    char why[256];
    assert_true(s->n_items <= 64);
    for (uint32_t i = 0; i < s->n_items; i++)
        now[i] = rig_epoch(r, s->seq[i]);
    Attnd__Step b = ATTND__STEP__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.pool = r->pool;
    b.layer = s->layer;
    b.flags = s->flags;
    b.dtype = ATTND__DTYPE__F32;
    b.n_seq = b.n_epoch = b.n_pos = b.n_n_tokens = s->n_items;
    b.seq = (uint64_t *)(uintptr_t)s->seq;
    b.epoch = s->epoch == NULL ? now : (uint32_t *)(uintptr_t)s->epoch;
    b.pos = (uint32_t *)(uintptr_t)s->pos;
    b.n_tokens = (uint32_t *)(uintptr_t)s->n_tokens;
    b.parent = (int32_t *)(uintptr_t)s->parents;
    for (uint32_t i = 0; i < s->n_items && s->parents != NULL; i++)
        b.n_parent += s->n_tokens[i];
    b.n_indices = s->n_indices;
    b.index_tokens = s->index_tokens;
    b.choose_blocks = s->choose_blocks;
    b.key_base = (uint32_t *)(uintptr_t)s->key_base;
    b.n_key_base = s->key_base != NULL ? s->n_items : 0;
    b.n_keys = (uint32_t *)(uintptr_t)s->n_keys;
    b.n_n_keys = s->n_keys != NULL ? s->n_items : 0;
    h.session = r->session;
    h.timeout_us = s->timeout_us;
    h.body_case = ATTND__REQUEST__BODY_STEP;
    h.step = &b;
    struct wire_step_layout l;
    if (wire_step_layout_of(&b,
                            &(struct wire_shape){RIG_Q_HEADS, RIG_KV_HEADS, r->head_dim,
                                                 r->head_dim, false, ATTN_F32, 0, 0},
                            &l, why, sizeof why) != ATTN_OK)
        fail_msg("the test's step is wrong: %s", why);
    uint8_t *payload = test_calloc(1, l.request_bytes);
    if (s->indices != NULL)
        memcpy(payload + l.indices_offset, s->indices, l.request_bytes - l.indices_offset);
    uint64_t id = rig_send(r, &h, payload, l.request_bytes);
    test_free(payload);
    return id;
}

uint64_t rig_send_item(struct rig *r, uint64_t seq, uint32_t layer, uint32_t pos, uint32_t n_tokens)
{
    struct rig_step s = {.layer = layer,
                         .flags = WIRE_STEP_APPEND | WIRE_STEP_ATTEND,
                         .n_items = 1,
                         .seq = &seq,
                         .pos = &pos,
                         .n_tokens = &n_tokens};
    return rig_send_step(r, &s);
}

attn_status rig_item(struct rig *r, uint64_t seq, uint32_t layer, uint32_t pos, uint32_t n_tokens)
{
    return status_of(r, rig_send_item(r, seq, layer, pos, n_tokens));
}

uint32_t rig_epoch(struct rig *r, uint64_t seq)
{
    kv_seq_id id;
    struct kv_seq_info info;
    if (r->epoch != 0)
        return r->epoch;
    struct kv *kv = r->kv;
    if (r->second != NULL && kv_seq_find(kv, TENANT_OPERATOR, seq, &id) != ATTN_OK)
        kv = r->second_fixture.kv;
    if (kv_seq_find(kv, TENANT_OPERATOR, seq, &id) != ATTN_OK)
        return 1;
    kv_seq_info(kv, id, &info);
    return info.epoch;
}

uint32_t rig_len(struct rig *r, uint64_t seq, uint32_t layer)
{
    kv_seq_id id;
    struct kv_seq_info info;
    assert_int_equal(kv_seq_find(r->kv, TENANT_OPERATOR, seq, &id), ATTN_OK);
    kv_seq_info(r->kv, id, &info);
    return info.layer_len[layer];
}

void rig_open_many(struct rig *r, uint64_t first, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        assert_int_equal(rig_open_seq(r, first + i), ATTN_OK);
}

uint64_t rig_send_wide(struct rig *r, uint64_t first, uint32_t n_items, uint32_t pos_of_all)
{
    uint64_t seq[64];
    uint32_t pos[64], n[64];
    for (uint32_t i = 0; i < n_items; i++) {
        seq[i] = first + i;
        pos[i] = pos_of_all;
        n[i] = 1;
    }
    struct rig_step s = {.flags = WIRE_STEP_APPEND | WIRE_STEP_ATTEND,
                         .n_items = n_items,
                         .seq = seq,
                         .pos = pos,
                         .n_tokens = n};
    return rig_send_step(r, &s);
}

const Attnd__Reply *rig_hello_with(struct rig *r, uint64_t resume, const char *feature)
{
    Attnd__Hello b = ATTND__HELLO__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    char *features[] = {(char *)(uintptr_t)feature};
    b.protocol_version = 7;
    b.resume_session = resume;
    b.n_required_features = feature != NULL;
    b.required_features = features;
    h.body_case = ATTND__REQUEST__BODY_HELLO;
    h.hello = &b;
    return rig_call(r, &h);
}

uint64_t rig_send_adopt(struct rig *r, uint64_t seq)
{
    Attnd__Adopt b = ATTND__ADOPT__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.seq = seq;
    h.session = r->session;
    h.body_case = ATTND__REQUEST__BODY_ADOPT;
    h.adopt = &b;
    return rig_send(r, &h, NULL, 0);
}

const Attnd__Reply *rig_adopt(struct rig *r, uint64_t seq)
{
    uint64_t id = rig_send_adopt(r, seq);
    rig_run(r);
    return rig_answer(r, id);
}
