/* engine_rig.c: fake backend, fake transport, fake clock. */
#include "engine_rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/clock.h"
#include "daemon/log.h"
#include "fake_host.h"
#include "kernels/kv_layout.h"

uint64_t rig_now_ns;

static struct rig *current; /* cmocka runs one test at a time */

/* --- the backend ------------------------------------------------------------------------------ */

struct backend_pool {
    struct backend *backend;
    uint64_t place;
    struct backend_pool_config config;
};

static const char *fake_last_error(const struct backend *b)
{
    (void)b;
    return "the fake backend was told to fail";
}

static void fake_info(const struct backend *b, struct backend_info *out)
{
    *out = (struct backend_info){.name = "fake",
                                 .device = "none",
                                 .kv_bytes = b->kv_bytes,
                                 .max_in_flight = b->max_in_flight,
                                 .n_processors = 1};
}

static attn_status fake_pool_check(struct backend *b, const struct backend_pool_config *c)
{
    (void)b;
    assert_true(c->n_blocks > 0);
    return c->head_dim_k % 8 == 0 ? ATTN_OK : ATTN_ENOTSUP;
}

static uint64_t fake_pool_bytes(const struct backend *b, const struct backend_pool_config *c)
{
    (void)b;
    return kv_layout_of(c).block_bytes * c->n_blocks;
}

static attn_status fake_pool_open(struct backend *b, const struct backend_pool_config *c,
                                  struct backend_pool **out_pool)
{
    if (b->max_pools != 0 && b->n_pools == b->max_pools)
        return b->over_max_pools;
    b->n_pools++;
    struct backend_pool *p = test_malloc(sizeof *p);
    p->config = *c;
    p->backend = b;
    p->place = c->kv_place != 0 ? c->kv_place : ++b->last_place;
    b->used_bytes += fake_pool_bytes(b, c);
    assert_true(b->used_bytes <= b->kv_bytes);
    *out_pool = p;
    return ATTN_OK;
}

static attn_status fake_blocks_scrub(struct backend_pool *p, const uint32_t *blocks, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        assert_true(blocks[i] < p->config.n_blocks);
    p->backend->n_scrubbed += n;
    return ATTN_OK;
}

/* All zeros: the cache has no bytes. */
static attn_status fake_block_read(struct backend_pool *p, uint32_t block, void *out_bytes)
{
    assert_true(block < p->config.n_blocks);
    memset(out_bytes, 0, kv_layout_of(&p->config).block_bytes);
    return ATTN_OK;
}

static uint64_t fake_pool_place(const struct backend_pool *p)
{
    return p->place;
}

static void fake_pool_close(struct backend_pool *p)
{
    p->backend->n_pools--;
    p->backend->used_bytes -= fake_pool_bytes(p->backend, &p->config);
    test_free(p);
}

static void note_conflicts(struct backend *b, const struct backend_batch *batch)
{
    for (uint32_t i = 0; i < batch->n_items; i++) {
        const struct backend_item *x = &batch->items[i];
        for (uint32_t k = 0; k < i; k++)
            b->has_conflict |=
                x->table_row == batch->items[k].table_row && x->layer == batch->items[k].layer;
        for (uint32_t f = 0; f < b->n_in_flight; f++)
            for (uint32_t k = 0; k < b->in_flight[f]->n_items; k++)
                b->has_conflict |= x->table_row == b->in_flight[f]->items[k].table_row &&
                                   x->layer == b->in_flight[f]->items[k].layer;
    }
}

/* They are applied in any order: all that name an entry which is read agree with the cache. */
static void note_patch_conflicts(struct backend *b, const struct backend_batch *batch)
{
    for (uint32_t i = 0; i < batch->n_patches; i++) {
        const struct backend_patch *x = &batch->patches[i];
        struct kv_seq_info info;
        kv_seq_info(current->kv, (kv_seq_id){x->row}, &info);
        bool is_read = x->index < info.n_blocks && info.pool.index == current->pool - 1;
        b->has_patch_conflict |= is_read && info.block_table[x->index] != x->block;
    }
}

static attn_status fake_submit(struct backend *b, struct backend_batch *batch)
{
    if (b->fail_submit != ATTN_OK) {
        attn_status st = b->fail_submit;
        b->fail_submit = ATTN_OK;
        return st;
    }
    assert_true(b->n_in_flight < b->max_in_flight);
    note_conflicts(b, batch);
    note_patch_conflicts(b, batch);
    if (b->n_batches < RIG_MAX_LOGGED && b->n_items + batch->n_items <= RIG_MAX_LOGGED &&
        b->n_copies + batch->n_copies <= RIG_MAX_LOGGED) {
        b->batches[b->n_batches++] = (struct rig_batch){
            b->n_items, batch->n_items, batch->n_patches, b->n_copies, batch->n_copies};
        for (uint32_t i = 0; i < batch->n_copies; i++)
            b->copies[b->n_copies++] = batch->copies[i];
        for (uint32_t i = 0; i < batch->n_items; i++) {
            const struct backend_item *x = &batch->items[i];
            b->items[b->n_items++] =
                (struct rig_item){x->table_row, x->layer, x->pos, x->n_tokens, x->flags};
        }
    }
    uint64_t start_ns = rig_now_ns + b->launch_ns;
    start_ns = start_ns > b->last_end_ns ? start_ns : b->last_end_ns;
    b->idle_ns += start_ns - b->last_end_ns;
    b->last_end_ns = start_ns + b->batch_ns + batch->n_items * b->item_ns;
    b->end_ns[b->n_in_flight] = b->last_end_ns;
    b->in_flight[b->n_in_flight++] = batch;
    return ATTN_OK;
}

static void compute(const struct backend_batch *batch)
{
    const struct backend_pool_config *c = &batch->pool->config;
    for (uint32_t i = 0; i < batch->n_items; i++) {
        const struct backend_item *x = &batch->items[i];
        uint32_t n_blocks = (x->pos + x->n_tokens + c->block_tokens - 1) / c->block_tokens;
        for (uint32_t k = 0; k < n_blocks; k++)
            assert_true(x->block_table[k] < c->n_blocks);
        if (!(x->flags & BACKEND_ATTEND))
            continue;
        float *out = x->out;
        size_t row = (size_t)c->num_q_heads * c->head_dim_v;
        for (uint32_t t = 0; t < x->n_tokens; t++) {
            for (size_t k = 0; k < row; k++)
                out[t * row + k] = (float)(x->pos + t + 1);
            for (uint32_t h = 0; x->lse != NULL && h < c->num_q_heads; h++)
                x->lse[t * c->num_q_heads + h] = -(float)(x->pos + t);
        }
    }
}

static struct backend_batch *fake_poll(struct backend *b, uint64_t wait_ns)
{
    if (b->is_held || b->n_in_flight == 0 || b->end_ns[0] > rig_now_ns) {
        rig_now_ns += wait_ns; /* to wait is what lets this clock go on */
        return NULL;
    }
    struct backend_batch *batch = b->in_flight[0];
    b->n_in_flight--;
    for (uint32_t i = 0; i < b->n_in_flight; i++) {
        b->in_flight[i] = b->in_flight[i + 1];
        b->end_ns[i] = b->end_ns[i + 1];
    }
    batch->status = b->fail_batch;
    b->fail_batch = ATTN_OK;
    batch->device_ns = b->item_ns ? b->batch_ns + batch->n_items * b->item_ns : 1000;
    if (batch->status == ATTN_OK)
        compute(batch);
    for (uint32_t i = 0; i < batch->n_signals && batch->status == ATTN_OK; i++)
        *batch->signals[i].word = batch->signals[i].value;
    return batch;
}

const struct backend_ops rig_backend_ops = {
    .abi = BACKEND_ABI,
    .name = "fake",
    .last_error = fake_last_error,
    .info = fake_info,
    .pool_check = fake_pool_check,
    .pool_bytes = fake_pool_bytes,
    .pool_open = fake_pool_open,
    .block_read = fake_block_read,
    .blocks_scrub = fake_blocks_scrub,
    .pool_place = fake_pool_place,
    .pool_close = fake_pool_close,
    .submit = fake_submit,
    .poll = fake_poll,
    .host_alloc = fake_host_alloc,
    .host_free = fake_host_free,
};

/* --- the transport ---------------------------------------------------------------------------- */

static void fake_reply(struct request *req)
{
    struct rig_answer *a = test_calloc(1, sizeof *a);
    char why[256];
    a->req = req;
    wire_arena_init(&a->arena, NULL, 0, WIRE_ARENA_LIMIT_BYTES);
    attn_status st = wire_reply_decode(req->reply->data + req->reply->offset, req->reply->n_bytes,
                                       &a->arena, &a->reply, why, sizeof why);
    if (st != ATTN_OK)
        fail_msg("a reply does not decode: %s", why);
    a->next = current->answers;
    current->answers = a;
}

static const struct transport_ops fake_transport = {.label = STATS_IPC, .reply = fake_reply};

/* --- the rig ---------------------------------------------------------------------------------- */

static uint64_t fake_clock(void)
{
    return rig_now_ns;
}

void rig_open(struct rig *r, void (*tweak)(struct rig *r))
{
    char why[512] = "";
    memset(r, 0, sizeof *r);
    memset(&stats, 0, sizeof stats);
    current = r;
    log_init(LOG_LEVEL_ERROR, LOG_FORMAT_LOGFMT);
    rig_now_ns = 1000000000;
    clock_use(fake_clock);
    r->next_id = 1;
    r->backend.kv_bytes = 1 << 20;
    r->backend.max_in_flight = 2;
    r->cfg = (struct config){
        .max_sequences = 256,
        .max_seq_tokens = 4096,
        .max_pools = 4,
        .max_layers = 8,
        .max_message_bytes = 1 << 20,
        .io_memory_bytes = 8 << 20,
        .max_batch_items = 64,
        .max_batch_tokens = 256,
        .max_step_items = 32,
        .max_step_tokens = 128,
        .max_queue_requests = 512,
        .max_queue_bytes = 4 << 20,
        .default_timeout_us = 1000000,
        .max_timeout_us = 10000000,
        .max_sessions = 16,
        .max_peer_sessions = 16,
        .lease_us = 30000000,
    };
    if (tweak != NULL)
        tweak(r);
    assert_int_equal(
        iobuf_pool_open(&rig_backend_ops, &r->backend, r->cfg.io_memory_bytes, &r->bufs), ATTN_OK);
    if (own_engine_open(&r->own, &r->cfg, &rig_backend_ops, &r->backend, r->bufs, &r->engine, why,
                        sizeof why) != ATTN_OK)
        fail_msg("the engine does not open: %s", why);
    r->kv = r->own.kv;
    r->sessions = r->own.sessions;
    r->session = rig_hello(r, "test");
    r->pool = rig_pool(r, "p", 64);
}

static void close_engine(struct rig *r)
{
    for (uint32_t i = 0; i < r->engine->n_pools; i++)
        if (r->engine->pools[i].device != NULL)
            test_free(r->engine->pools[i].device);
    assert_int_equal(engine_close(r->engine), ATTN_OK);
}

void rig_close(struct rig *r)
{
    r->backend.is_held = false;
    rig_run(r);
    assert_int_equal(atomic_load(&r->engine->n_held), 0);
    assert_int_equal(atomic_load(&r->engine->held_bytes), 0);
    assert_false(r->backend.has_conflict);
    assert_false(r->backend.has_patch_conflict);
    if (kv_check(r->kv) != ATTN_OK)
        fail_msg("the cache is inconsistent: %s", kv_last_error(r->kv));
    for (uint32_t i = 0; i < r->cfg.max_sequences; i++)
        assert_false(seq_is_busy(r->engine, i));
    uint64_t answered = 0;
    for (uint32_t i = 0; i < STATS_N_STATUS; i++)
        answered += atomic_load(&stats.steps_answered[i]);
    assert_int_equal(stats_get(steps_received), answered);
    assert_int_equal(stats_get(steps_in_flight), 0);
    assert_int_equal(stats_get(queue_requests), 0);

    close_engine(r);
    own_parts_close(&r->own);
    clock_use(NULL);
    while (r->answers != NULL) {
        struct rig_answer *a = r->answers;
        r->answers = a->next;
        wire_arena_reset(&a->arena);
        request_free(a->req);
        test_free(a);
    }
    while (r->sent != NULL) {
        struct rig_sent *s = r->sent;
        r->sent = s->next;
        test_free(s);
    }
    iobuf_pool_close(r->bufs);
}

attn_status rig_try_to_succeed(struct rig *r, void (*change)(struct rig *r),
                               struct engine_kept *out_kept)
{
    char why[512] = "";
    close_engine(r);
    if (change != NULL)
        change(r);
    int fd = dup(kv_fd(r->kv));
    own_parts_close(&r->own);
    r->backend.used_bytes = r->backend.n_pools = 0;
    if (own_engine_take(&r->own, fd, &r->cfg, &rig_backend_ops, &r->backend, r->bufs, &r->engine,
                        why, sizeof why) != ATTN_OK)
        fail_msg("the successor does not open: %s", why);
    close(fd);
    r->kv = r->own.kv;
    r->sessions = r->own.sessions;
    return engine_restore(r->engine, out_kept);
}

struct engine_kept rig_succeed(struct rig *r, void (*change)(struct rig *r))
{
    struct engine_kept kept;
    rig_run(r);
    assert_int_equal(rig_try_to_succeed(r, change, &kept), ATTN_OK);
    return kept;
}

void rig_run(struct rig *r)
{
    while (engine_turn(r->engine, 0))
        ;
}

static void submit(struct rig *r, struct request *req)
{
    char why[256];
    attn_status st = request_decode(req, rig_now_ns, r->cfg.default_timeout_us,
                                    r->cfg.max_timeout_us, why, sizeof why);
    if (st != ATTN_OK)
        fail_msg("a request does not decode: %s", why);
    req->principal = r->principal;
    engine_submit(r->engine, req);
}

static void keep_sent(struct rig *r, uint64_t id, const struct iobuf *msg)
{
    if (!r->keeps_sent)
        return;
    struct rig_sent *s = test_malloc(sizeof *s + msg->n_bytes);
    *s = (struct rig_sent){.next = r->sent, .id = id, .n_bytes = msg->n_bytes};
    memcpy(s->bytes, msg->data, msg->n_bytes);
    r->sent = s;
}

uint64_t rig_send(struct rig *r, Attnd__Request *h, const void *payload, size_t payload_bytes)
{
    uint64_t id = r->next_id++;
    size_t head = wire_request_head_bytes(h);
    struct request *req =
        request_new(&fake_transport, NULL, r->share, r->bufs, head + payload_bytes);
    assert_non_null(req);
    wire_request_head_encode(h, id, payload_bytes, req->msg->data);
    if (payload_bytes > 0)
        memcpy(req->msg->data + head, payload, payload_bytes);
    keep_sent(r, id, req->msg);
    submit(r, req);
    return id;
}

void rig_resend(struct rig *r, uint64_t id)
{
    const struct rig_sent *s = r->sent;
    while (s->id != id)
        s = s->next;
    struct request *req = request_new(&fake_transport, NULL, r->share, r->bufs, s->n_bytes);
    assert_non_null(req);
    memcpy(req->msg->data, s->bytes, s->n_bytes);
    submit(r, req);
}

const struct wire_reply *rig_wire_reply(struct rig *r, uint64_t id)
{
    for (struct rig_answer *a = r->answers; a != NULL; a = a->next)
        if (a->reply.request_id == id)
            return &a->reply;
    return NULL;
}

const Attnd__Reply *rig_reply(struct rig *r, uint64_t id)
{
    const struct wire_reply *w = rig_wire_reply(r, id);
    return w == NULL ? NULL : w->header;
}

const Attnd__Reply *rig_call(struct rig *r, Attnd__Request *h)
{
    uint64_t id = rig_send(r, h, NULL, 0);
    rig_run(r);
    const Attnd__Reply *reply = rig_reply(r, id);
    assert_non_null(reply);
    return reply;
}

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

static const Attnd__Reply *pool_create_reply(struct rig *r, const char *name, uint32_t n_blocks)
{
    Attnd__PoolSpec spec = ATTND__POOL_SPEC__INIT;
    Attnd__PoolCreate b = ATTND__POOL_CREATE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    spec.name = (char *)(uintptr_t)name;
    spec.num_layers = RIG_LAYERS;
    spec.num_q_heads = RIG_Q_HEADS;
    spec.num_kv_heads = RIG_KV_HEADS;
    spec.head_dim_k = RIG_DIM;
    spec.block_tokens = RIG_BLOCK_TOKENS;
    spec.n_blocks = n_blocks;
    spec.q_dtype = ATTND__DTYPE__F32;
    b.spec = &spec;
    h.session = r->session;
    h.body_case = ATTND__REQUEST__BODY_POOL_CREATE;
    h.pool_create = &b;
    return rig_call(r, &h);
}

uint32_t rig_pool(struct rig *r, const char *name, uint32_t n_blocks)
{
    const Attnd__Reply *reply = pool_create_reply(r, name, n_blocks);
    if (reply->status != ATTN_OK)
        fail_msg("no pool: %s", reply->message);
    assert_int_equal(reply->body_case, ATTND__REPLY__BODY_POOL);
    return reply->pool->pool;
}

const Attnd__Reply *rig_make_pool(struct rig *r, const char *name)
{
    return pool_create_reply(r, name, 64);
}

attn_status rig_open_seq(struct rig *r, uint64_t seq)
{
    Attnd__Open b = ATTND__OPEN__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.seq = seq;
    b.pool = r->pool;
    h.session = r->session;
    h.body_case = ATTND__REQUEST__BODY_OPEN;
    h.open = &b;
    return (attn_status)rig_call(r, &h)->status;
}

attn_status rig_close_seq(struct rig *r, uint64_t seq, uint32_t epoch)
{
    Attnd__Close b = ATTND__CLOSE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.seq = seq;
    b.epoch = epoch;
    h.session = r->session;
    h.body_case = ATTND__REQUEST__BODY_CLOSE;
    h.close = &b;
    return (attn_status)rig_call(r, &h)->status;
}

uint64_t rig_send_fork(struct rig *r, uint64_t seq, uint64_t new_seq)
{
    Attnd__Fork b = ATTND__FORK__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.seq = seq;
    b.epoch = rig_epoch(r, seq);
    b.new_seq = new_seq;
    h.session = r->session;
    h.body_case = ATTND__REQUEST__BODY_FORK;
    h.fork = &b;
    return rig_send(r, &h, NULL, 0);
}

attn_status rig_fork(struct rig *r, uint64_t seq, uint64_t new_seq, uint32_t len)
{
    Attnd__Fork b = ATTND__FORK__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.seq = seq;
    b.epoch = rig_epoch(r, seq);
    b.new_seq = new_seq;
    b.has_len = true;
    b.len = len;
    h.session = r->session;
    h.body_case = ATTND__REQUEST__BODY_FORK;
    h.fork = &b;
    return (attn_status)rig_call(r, &h)->status;
}

attn_status rig_truncate(struct rig *r, uint64_t seq, uint32_t len)
{
    Attnd__Truncate b = ATTND__TRUNCATE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.seq = seq;
    b.epoch = rig_epoch(r, seq);
    b.len = len;
    h.session = r->session;
    h.body_case = ATTND__REQUEST__BODY_TRUNCATE;
    h.truncate = &b;
    return (attn_status)rig_call(r, &h)->status;
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
    h.session = r->session;
    h.timeout_us = s->timeout_us;
    h.body_case = ATTND__REQUEST__BODY_STEP;
    h.step = &b;
    struct wire_step_layout l;
    if (wire_step_layout_of(&b, RIG_Q_HEADS, RIG_KV_HEADS, RIG_DIM, RIG_DIM, ATTN_F32, &l, why,
                            sizeof why) != ATTN_OK)
        fail_msg("the test's step is wrong: %s", why);
    void *payload = test_calloc(1, l.request_bytes);
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
    uint64_t id = rig_send_item(r, seq, layer, pos, n_tokens);
    rig_run(r);
    const Attnd__Reply *reply = rig_reply(r, id);
    assert_non_null(reply);
    return (attn_status)reply->status;
}

uint32_t rig_epoch(struct rig *r, uint64_t seq)
{
    kv_seq_id id;
    struct kv_seq_info info;
    if (r->epoch != 0)
        return r->epoch;
    if (kv_seq_find(r->kv, TENANT_OPERATOR, seq, &id) != ATTN_OK)
        return 1;
    kv_seq_info(r->kv, id, &info);
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

uint64_t rig_send_close(struct rig *r, uint64_t seq)
{
    Attnd__Close b = ATTND__CLOSE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.seq = seq;
    b.epoch = rig_epoch(r, seq);
    h.session = r->session;
    h.body_case = ATTND__REQUEST__BODY_CLOSE;
    h.close = &b;
    return rig_send(r, &h, NULL, 0);
}

uint64_t rig_send_open(struct rig *r, uint64_t seq)
{
    Attnd__Open b = ATTND__OPEN__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.seq = seq;
    b.pool = r->pool;
    h.session = r->session;
    h.body_case = ATTND__REQUEST__BODY_OPEN;
    h.open = &b;
    return rig_send(r, &h, NULL, 0);
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

const Attnd__Reply *rig_answer(struct rig *r, uint64_t id)
{
    const Attnd__Reply *reply = rig_reply(r, id);
    assert_non_null(reply);
    return reply;
}

void rig_assert_says(const Attnd__Reply *reply, attn_status st, const char *part)
{
    if (reply->status != st || strstr(reply->message, part) == NULL)
        fail_msg("%s \"%s\", expected %s \"%s\"", attn_status_name((attn_status)reply->status),
                 reply->message, attn_status_name(st), part);
}
