/* test_engine.c: what the engine answers and in which order, with a backend the test holds, fails and
 * lets finish when it wants. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine_rig.h"

#define BOTH (WIRE_STEP_APPEND | WIRE_STEP_ATTEND)

static struct rig r;

static const Attnd__Reply *reply_of(uint64_t id)
{
    const Attnd__Reply *reply = rig_reply(&r, id);
    assert_non_null(reply);
    return reply;
}

static void assert_says(const Attnd__Reply *reply, attn_status st, const char *part)
{
    if (reply->status != st || strstr(reply->message, part) == NULL)
        fail_msg("%s \"%s\", expected %s \"%s\"", attn_status_name((attn_status)reply->status),
                 reply->message, attn_status_name(st), part);
}

/* --- sessions and pools ------------------------------------------------------------------------ */

static void requests_without_a_session_are_refused(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    uint64_t session = r.session;
    r.session = 0;
    assert_int_equal(rig_open_seq(&r, 1), ATTN_ENOTFOUND);
    r.session = session ^ 1;
    assert_int_equal(rig_open_seq(&r, 1), ATTN_ENOTFOUND);
    assert_int_equal(rig_item(&r, 1, 0, 0, 1), ATTN_ENOTFOUND);
    r.session = session;
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
    rig_close(&r);
}

static const Attnd__Reply *hello(uint64_t resume, const char *feature)
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
    return rig_call(&r, &h);
}

static void hello_resumes_a_live_session_and_refuses_unknown_features(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    const Attnd__Reply *a = hello(r.session, NULL);
    assert_int_equal(a->status, ATTN_OK);
    assert_true(a->hello->session == r.session);
    assert_int_equal(a->hello->protocol_version, 1);
    assert_int_equal(a->hello->max_step_items, r.cfg.max_step_items);
    assert_says(hello(r.session + 1, NULL), ATTN_ENOTFOUND, "resume_session");
    assert_says(hello(0, "telepathy"), ATTN_ENOTSUP, "telepathy");
    rig_close(&r);
}

static const Attnd__Reply *make_pool(void (*change)(Attnd__PoolSpec *s))
{
    static Attnd__Identity id;
    Attnd__PoolSpec spec = ATTND__POOL_SPEC__INIT;
    Attnd__PoolCreate b = ATTND__POOL_CREATE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    id = (Attnd__Identity)ATTND__IDENTITY__INIT;
    spec.name = "p";
    spec.num_layers = RIG_LAYERS;
    spec.num_q_heads = RIG_Q_HEADS;
    spec.num_kv_heads = RIG_KV_HEADS;
    spec.head_dim_k = RIG_DIM;
    spec.block_tokens = RIG_BLOCK_TOKENS;
    spec.n_blocks = 64;
    spec.q_dtype = ATTND__DTYPE__F32;
    spec.identity = &id;
    if (change != NULL)
        change(&spec);
    b.spec = &spec;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_POOL_CREATE;
    h.pool_create = &b;
    return rig_call(&r, &h);
}

static void say_the_defaults(Attnd__PoolSpec *s)
{
    static Attnd__LayerSpec layer;
    static Attnd__LayerSpec *layers[RIG_LAYERS];
    layer = (Attnd__LayerSpec)ATTND__LAYER_SPEC__INIT;
    layer.scale = 0.35355339f; /* 1 / sqrt(8) */
    for (int i = 0; i < RIG_LAYERS; i++)
        layers[i] = &layer;
    s->n_layers = RIG_LAYERS;
    s->layers = layers;
    s->head_dim_v = RIG_DIM;
    s->kv_dtype = ATTND__DTYPE__F32;
    s->n_blocks = 0;
}
static void more_heads(Attnd__PoolSpec *s)
{
    s->num_q_heads = 8;
}
static void other_model(Attnd__PoolSpec *s)
{
    s->identity->model = "sha256:abc";
}
static void a_window(Attnd__PoolSpec *s)
{
    say_the_defaults(s);
    s->layers[0]->window_tokens = 512;
}
static void a_feature(Attnd__PoolSpec *s)
{
    static char *features[] = {"mla"};
    s->n_required_features = 1;
    s->required_features = features;
}
static void too_many_blocks(Attnd__PoolSpec *s)
{
    s->name = "q";
    s->n_blocks = 200;
}
static void what_is_left(Attnd__PoolSpec *s)
{
    s->name = "q";
    s->n_blocks = 0;
}
static void no_name(Attnd__PoolSpec *s)
{
    s->name = "";
}
static void odd_dim(Attnd__PoolSpec *s)
{
    s->name = "q";
    s->head_dim_k = 9;
}
static void too_many_layers(Attnd__PoolSpec *s)
{
    s->name = "q";
    s->num_layers = 9;
}

static void the_same_pool_again_is_the_same_pool(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    assert_int_equal(make_pool(NULL)->pool->pool, r.pool);
    const Attnd__Reply *a = make_pool(say_the_defaults);
    assert_int_equal(a->status, ATTN_OK);
    assert_int_equal(a->pool->pool, r.pool);
    assert_int_equal(a->pool->spec->n_blocks, 64);
    assert_int_equal(a->pool->spec->head_dim_v, RIG_DIM);
    assert_int_equal(a->pool->n_free_blocks, 64);
    rig_close(&r);
}

static void another_pool_of_the_same_name_is_refused_by_field(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    assert_says(make_pool(more_heads), ATTN_EEXIST, "num_q_heads 4, asked for 8");
    assert_says(make_pool(other_model), ATTN_EEXIST,
                "identity.model \"\", asked for \"sha256:abc\"");
    assert_says(make_pool(a_window), ATTN_EEXIST, "layers[0].window_tokens 0, asked for 512");
    assert_int_equal(r.engine->n_pools, 1);
    rig_close(&r);
}

static void pools_that_cannot_be_are_refused_by_field(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    assert_says(make_pool(a_feature), ATTN_ENOTSUP, "mla");
    assert_says(make_pool(no_name), ATTN_EINVAL, "name");
    assert_says(make_pool(odd_dim), ATTN_ENOTSUP, "fake backend");
    assert_says(make_pool(too_many_layers), ATTN_EINVAL, "num_layers is 9, 8 are allowed");
    assert_says(make_pool(too_many_blocks), ATTN_ENOMEM, "n_blocks");
    assert_int_equal(r.engine->n_pools, 1);
    const Attnd__Reply *a = make_pool(what_is_left);
    assert_int_equal(a->status, ATTN_OK);
    /* a block is 4 layers x (K and V) x 2 heads x 8 tokens x 8 x 4 bytes = 4 KiB; 1 MiB in all */
    assert_int_equal(a->pool->spec->n_blocks, 256 - 64);
    rig_close(&r);
}

/* --- steps ------------------------------------------------------------------------------------- */

static void outputs_come_back_in_item_order(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    uint64_t seq[] = {7, 3, 5};
    uint32_t pos[] = {0, 0, 0}, n[] = {2, 1, 3};
    for (int i = 0; i < 3; i++)
        assert_int_equal(rig_open_seq(&r, seq[i]), ATTN_OK);
    struct rig_step s = {
        .flags = BOTH | WIRE_STEP_LSE, .n_items = 3, .seq = seq, .pos = pos, .n_tokens = n};
    uint64_t id = rig_send_step(&r, &s);
    rig_run(&r);
    assert_int_equal(reply_of(id)->status, ATTN_OK);
    assert_int_equal(reply_of(id)->step->n_item_status, 0);
    assert_int_equal(reply_of(id)->device_ns, 1000);
    const struct wire_reply *w = rig_wire_reply(&r, id);
    const uint32_t row = RIG_Q_HEADS * RIG_DIM, expect[] = {0, 1, 0, 0, 1, 2};
    const float *out = (const float *)(void *)w->payload, *lse = out + 6 * row;
    assert_int_equal(w->payload_bytes, 6 * row * 4 + 6 * RIG_Q_HEADS * 4);
    for (uint32_t t = 0; t < 6; t++) {
        assert_true(out[t * row] == (float)expect[t] + 1);
        assert_true(out[t * row + row - 1] == (float)expect[t] + 1);
        assert_true(lse[t * RIG_Q_HEADS + 3] == -(float)expect[t]);
    }
    assert_int_equal(rig_len(&r, 5, 0), 3);
    assert_int_equal(rig_len(&r, 5, 1), 0);
    assert_int_equal(r.backend.n_batches, 1);
    rig_close(&r);
}

static void a_wrong_item_fails_alone_with_nan_rows(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    uint64_t seq[] = {1, 99, 2, 3, 4};
    uint32_t pos[] = {0, 0, 5, 0, 0}, n[] = {1, 1, 1, 1, 2}, epoch[] = {1, 1, 1, 2, 1};
    for (uint64_t i = 1; i <= 4; i++)
        assert_int_equal(rig_open_seq(&r, i), ATTN_OK);
    struct rig_step s = {.flags = BOTH | WIRE_STEP_LSE,
                         .n_items = 5,
                         .seq = seq,
                         .pos = pos,
                         .n_tokens = n,
                         .epoch = epoch};
    uint64_t id = rig_send_step(&r, &s);
    rig_run(&r);
    assert_says(reply_of(id), ATTN_ENOTFOUND, "item 1 (sequence 99): no such sequence");
    const Attnd__StepReply *b = reply_of(id)->step;
    const int32_t expect[] = {ATTN_OK, ATTN_ENOTFOUND, ATTN_EINVAL, ATTN_ESTALE, ATTN_OK};
    assert_int_equal(b->n_item_status, 5);
    assert_memory_equal(b->item_status, expect, sizeof expect);
    const uint32_t row = RIG_Q_HEADS * RIG_DIM;
    const float *out = (const float *)(void *)rig_wire_reply(&r, id)->payload;
    const float *lse = out + 6 * row;
    for (uint32_t t = 0; t < 6; t++) {
        bool is_nan = t >= 1 && t <= 3;
        for (uint32_t k = 0; k < row; k++)
            assert_int_equal(out[t * row + k] != out[t * row + k], is_nan);
        for (uint32_t k = 0; k < RIG_Q_HEADS; k++)
            assert_int_equal(lse[t * RIG_Q_HEADS + k] != lse[t * RIG_Q_HEADS + k], is_nan);
    }
    assert_int_equal(rig_len(&r, 1, 0), 1);
    assert_int_equal(rig_len(&r, 2, 0), 0);
    assert_int_equal(rig_len(&r, 3, 0), 0);
    assert_int_equal(rig_len(&r, 4, 0), 2);
    rig_close(&r);
}

struct bad_step {
    uint32_t pool, layer, flags, n_items;
    int dtype;
    uint64_t seq[2];
    uint32_t n_tokens;
    int extra_bytes;
    attn_status status;
    const char *part;
};

static void a_wrong_step_is_refused_and_changes_nothing(void **state)
{
    (void)state;
    static const struct bad_step cases[] = {
        {9, 0, BOTH, 1, 1, {1}, 1, 0, ATTN_ENOTFOUND, "step.pool is 9"},
        {0, 0, BOTH, 1, 1, {1}, 1, 0, ATTN_ENOTFOUND, "step.pool is 0"},
        {1, 4, BOTH, 1, 1, {1}, 1, 0, ATTN_EINVAL, "step.layer is 4"},
        {1, 0, 0, 1, 1, {1}, 1, 0, ATTN_EINVAL, "flags is 0x0"},
        {1, 0, 8 | BOTH, 1, 1, {1}, 1, 0, ATTN_EINVAL, "flags is 0xb"},
        {1, 0, BOTH, 1, 3, {1}, 1, 0, ATTN_EINVAL, "dtype is bf16"},
        {1, 0, BOTH, 1, 1, {1}, 0, 0, ATTN_EINVAL, "n_tokens[0] is 0"},
        {1, 0, BOTH, 1, 1, {1}, 1, 4, ATTN_EINVAL, "payload has"},
        {1, 0, BOTH, 1, 1, {1}, 1, -4, ATTN_EINVAL, "payload has"},
        {1, 0, BOTH, 2, 1, {1, 1}, 1, 0, ATTN_EINVAL, "step.seq[1] 1 is in this step twice"},
        {1, 0, BOTH, 1, 1, {1}, 129, 0, ATTN_EINVAL, "129 tokens, 128 are allowed"},
        {1, 0, BOTH, 0, 1, {1}, 1, 0, ATTN_EINVAL, "no items"},
    };
    rig_open(&r, NULL);
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
    static uint8_t payload[1 << 17];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const struct bad_step *c = &cases[i];
        uint64_t seq[2] = {c->seq[0], c->seq[1]};
        uint32_t ones[2] = {1, 1}, pos[2] = {0, 0}, n[2] = {c->n_tokens, c->n_tokens};
        Attnd__Step b = ATTND__STEP__INIT;
        Attnd__Request h = ATTND__REQUEST__INIT;
        b.pool = c->pool;
        b.layer = c->layer;
        b.flags = c->flags;
        b.dtype = (Attnd__Dtype)c->dtype;
        b.n_seq = b.n_epoch = b.n_pos = b.n_n_tokens = c->n_items;
        b.seq = seq;
        b.epoch = ones;
        b.pos = pos;
        b.n_tokens = n;
        h.session = r.session;
        h.body_case = ATTND__REQUEST__BODY_STEP;
        h.step = &b;
        size_t bytes =
            (size_t)c->n_items * c->n_tokens * (RIG_Q_HEADS + 2 * RIG_KV_HEADS) * RIG_DIM * 4;
        uint64_t id = rig_send(&r, &h, payload, (size_t)((int64_t)bytes + c->extra_bytes));
        rig_run(&r);
        assert_says(reply_of(id), c->status, c->part);
        assert_int_equal(rig_wire_reply(&r, id)->payload_bytes, 0);
        assert_int_equal(rig_len(&r, 1, 0), 0);
    }
    assert_int_equal(r.backend.n_batches, 0);
    assert_int_equal(rig_item(&r, 1, 0, 0, 1), ATTN_OK); /* stamps of refused steps do no harm */
    rig_close(&r);
}

static void too_many_items_are_refused(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    uint64_t seq[33];
    uint32_t pos[33] = {0}, n[33];
    for (uint32_t i = 0; i < 33; i++) {
        seq[i] = i + 1;
        n[i] = 1;
        assert_int_equal(rig_open_seq(&r, seq[i]), ATTN_OK);
    }
    struct rig_step s = {.flags = BOTH, .n_items = 33, .seq = seq, .pos = pos, .n_tokens = n};
    uint64_t id = rig_send_step(&r, &s);
    rig_run(&r);
    assert_says(reply_of(id), ATTN_EINVAL, "33 items, 32 are allowed");
    s.n_items = 32;
    id = rig_send_step(&r, &s);
    rig_run(&r);
    assert_int_equal(reply_of(id)->status, ATTN_OK);
    rig_close(&r);
}

static void attending_what_is_not_there_fails(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
    assert_int_equal(rig_item(&r, 1, 0, 0, 4), ATTN_OK);
    uint64_t seq = 1;
    uint32_t pos = 3, n = 1;
    struct rig_step s = {
        .flags = WIRE_STEP_ATTEND, .n_items = 1, .seq = &seq, .pos = &pos, .n_tokens = &n};
    uint64_t id = rig_send_step(&r, &s);
    rig_run(&r);
    assert_int_equal(reply_of(id)->status, ATTN_OK);
    pos = 4;
    id = rig_send_step(&r, &s);
    rig_run(&r);
    assert_says(reply_of(id), ATTN_EINVAL, "pos 4 + n_tokens 1 is not appended yet");
    pos = 0;
    s.layer = 2;
    id = rig_send_step(&r, &s);
    rig_run(&r);
    assert_says(reply_of(id), ATTN_EINVAL, "layer 2 has 0 tokens");
    rig_close(&r);
}

static void repeated_steps_leave_the_length_alone(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
    assert_int_equal(rig_item(&r, 1, 0, 0, 10), ATTN_OK);
    assert_int_equal(rig_item(&r, 1, 0, 10, 1), ATTN_OK);
    assert_int_equal(rig_item(&r, 1, 0, 10, 1), ATTN_OK);
    assert_int_equal(rig_item(&r, 1, 0, 0, 10), ATTN_OK);
    assert_int_equal(rig_len(&r, 1, 0), 11);
    assert_int_equal(rig_item(&r, 1, 0, 12, 1), ATTN_EINVAL);
    assert_int_equal(rig_len(&r, 1, 0), 11);
    rig_close(&r);
}

/* --- batching ---------------------------------------------------------------------------------- */

static void open_many(uint64_t first, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        assert_int_equal(rig_open_seq(&r, first + i), ATTN_OK);
}

static void a_busy_device_collects_what_arrives(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    open_many(1, 10);
    r.backend.is_held = true;
    for (uint64_t i = 1; i <= 10; i++) {
        rig_send_item(&r, i, (uint32_t)i % RIG_LAYERS, 0, 1);
        rig_run(&r);
    }
    assert_int_equal(r.backend.n_batches, 2); /* both slots taken, eight steps wait */
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(r.backend.n_batches, 3);
    assert_int_equal(r.backend.batches[2].n_items, 8); /* of different layers and sequences */
    rig_close(&r);
}

static void items_of_one_sequence_and_layer_go_one_after_another(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    open_many(1, 2);
    r.backend.is_held = true;
    uint64_t id[6];
    for (uint32_t i = 0; i < 5; i++)
        id[i] = rig_send_item(&r, 1, 0, i, 1);
    id[5] = rig_send_item(&r, 1, 1, 0, 1); /* behind the others: order of arrival */
    rig_run(&r);
    assert_int_equal(r.backend.n_items, 1);
    r.backend.is_held = false;
    rig_run(&r);
    for (uint32_t i = 0; i < 6; i++)
        assert_int_equal(reply_of(id[i])->status, ATTN_OK);
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(r.backend.items[i].pos, i);
    assert_int_equal(rig_len(&r, 1, 0), 5);
    assert_int_equal(rig_len(&r, 1, 1), 1);
    rig_close(&r);
}

static void layers_of_one_sequence_share_a_batch(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    open_many(1, 1);
    for (uint32_t l = 0; l < RIG_LAYERS; l++)
        rig_send_item(&r, 1, l, 0, 9);
    rig_run(&r);
    assert_int_equal(r.backend.n_batches, 1);
    assert_int_equal(r.backend.batches[0].n_items, RIG_LAYERS);
    assert_int_equal(r.backend.batches[0].n_patches, 2); /* two blocks, for all layers at once */
    rig_close(&r);
}

static uint64_t send_wide(uint64_t first, uint32_t n_items, uint32_t pos_of_all)
{
    uint64_t seq[64];
    uint32_t pos[64], n[64];
    for (uint32_t i = 0; i < n_items; i++) {
        seq[i] = first + i;
        pos[i] = pos_of_all;
        n[i] = 1;
    }
    struct rig_step s = {.flags = BOTH, .n_items = n_items, .seq = seq, .pos = pos, .n_tokens = n};
    return rig_send_step(&r, &s);
}

static void batches_of_fifty(struct rig *rig)
{
    rig->cfg.max_batch_items = 50;
}

static void a_step_stays_whole_if_a_batch_can_hold_it(void **state)
{
    (void)state;
    rig_open(&r, batches_of_fifty);
    open_many(1, 60);
    send_wide(1, 20, 0);
    send_wide(21, 20, 0);
    send_wide(41, 20, 0);
    rig_run(&r);
    assert_int_equal(r.backend.n_batches, 2);
    assert_int_equal(r.backend.batches[0].n_items, 40);
    assert_int_equal(r.backend.batches[1].n_items, 20);
    rig_close(&r);
}

static void small_batches(struct rig *rig)
{
    rig->cfg.max_batch_items = 4;
}

static void a_step_larger_than_a_batch_is_split_and_answered_once(void **state)
{
    (void)state;
    rig_open(&r, small_batches);
    open_many(1, 10);
    uint64_t id = send_wide(1, 10, 0);
    rig_run(&r);
    assert_int_equal(r.backend.n_batches, 3);
    assert_int_equal(reply_of(id)->status, ATTN_OK);
    const float *out = (const float *)(void *)rig_wire_reply(&r, id)->payload;
    for (uint32_t i = 0; i < 10 * RIG_Q_HEADS * RIG_DIM; i++)
        assert_true(out[i] == 1.0f);
    rig_close(&r);
}

static void an_item_that_waits_holds_only_its_own_step(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    open_many(1, 3);
    r.backend.is_held = true;
    uint64_t a = rig_send_item(&r, 1, 0, 0, 1);
    rig_run(&r);
    uint64_t b = send_wide(1, 2, 1); /* sequence 1 waits; sequence 2 has a gap and fails */
    uint64_t c = rig_send_item(&r, 3, 0, 0, 1);
    rig_run(&r);
    assert_int_equal(r.backend.n_batches, 2);
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(reply_of(a)->status, ATTN_OK);
    assert_says(reply_of(b), ATTN_EINVAL, "item 1 (sequence 2): pos is 1, layer 0 has 0 tokens");
    assert_int_equal(reply_of(b)->step->item_status[0], ATTN_OK);
    assert_int_equal(reply_of(c)->status, ATTN_OK);
    assert_int_equal(rig_len(&r, 1, 0), 2);
    rig_close(&r);
}

/* --- control requests and work in flight ------------------------------------------------------- */

static uint64_t send_truncate(uint64_t seq, uint32_t len)
{
    Attnd__Truncate b = ATTND__TRUNCATE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.seq = seq;
    b.epoch = 1;
    b.len = len;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_TRUNCATE;
    h.truncate = &b;
    return rig_send(&r, &h, NULL, 0);
}

static uint64_t send_close(uint64_t seq)
{
    Attnd__Close b = ATTND__CLOSE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.seq = seq;
    b.epoch = 1;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_CLOSE;
    h.close = &b;
    return rig_send(&r, &h, NULL, 0);
}

static uint64_t send_open(uint64_t seq)
{
    Attnd__Open b = ATTND__OPEN__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.seq = seq;
    b.pool = r.pool;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_OPEN;
    h.open = &b;
    return rig_send(&r, &h, NULL, 0);
}

static void control_waits_for_work_and_work_for_control(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    open_many(1, 1);
    r.backend.is_held = true;
    uint64_t a = rig_send_item(&r, 1, 0, 0, 5);
    uint64_t b = send_truncate(1, 3);
    uint64_t c = rig_send_item(&r, 1, 0, 3, 4); /* right only after the truncation */
    rig_run(&r);
    assert_null(rig_reply(&r, b));
    assert_int_equal(r.backend.n_items, 1);
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(reply_of(a)->status, ATTN_OK);
    assert_int_equal(reply_of(b)->status, ATTN_OK);
    assert_int_equal(reply_of(c)->status, ATTN_OK);
    assert_int_equal(rig_len(&r, 1, 0), 7);
    rig_close(&r);
}

static void a_closed_name_may_be_opened_again_at_once(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    open_many(1, 1);
    r.backend.is_held = true;
    uint64_t a = rig_send_item(&r, 1, 0, 0, 5);
    rig_run(&r);
    uint64_t b = send_close(1), c = rig_send_item(&r, 1, 0, 5, 1), d = send_open(1);
    uint64_t f = rig_send_item(&r, 1, 0, 0, 2), g = send_close(1), h = send_close(1);
    uint64_t i = send_open(1);
    rig_run(&r);
    assert_null(rig_reply(&r, b));
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(reply_of(a)->status, ATTN_OK);
    assert_int_equal(reply_of(b)->status, ATTN_OK);
    assert_int_equal(reply_of(c)->status, ATTN_ENOTFOUND);
    assert_int_equal(reply_of(d)->status, ATTN_OK);
    assert_int_equal(reply_of(f)->status, ATTN_OK);
    assert_int_equal(reply_of(g)->status, ATTN_OK);
    assert_int_equal(reply_of(h)->status, ATTN_ENOTFOUND);
    assert_int_equal(reply_of(i)->status, ATTN_OK);
    assert_int_equal(rig_len(&r, 1, 0), 0);
    rig_close(&r);
}

static void a_repeated_open_is_the_same_sequence(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    uint64_t a = send_open(1);
    r.next_id = a;
    send_open(1); /* the same request id: a repeated message */
    rig_run(&r);
    for (struct rig_answer *x = r.answers; x != NULL; x = x->next)
        assert_int_equal(x->reply.header->status, ATTN_OK);
    assert_int_equal(rig_open_seq(&r, 1), ATTN_EEXIST);
    rig_close(&r);
}

static void a_write_into_a_shared_block_runs_alone(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    open_many(1, 1);
    for (uint32_t l = 0; l < RIG_LAYERS; l++)
        assert_int_equal(rig_item(&r, 1, l, 0, 12), ATTN_OK);
    assert_int_equal(rig_fork(&r, 1, 2, 12), ATTN_OK);
    r.backend.is_held = true;
    uint32_t first = r.backend.n_batches;
    uint64_t id[RIG_LAYERS];
    for (uint32_t l = 0; l < RIG_LAYERS; l++)
        id[l] = rig_send_item(&r, 2, l, 12, 1);
    rig_run(&r);
    assert_int_equal(r.backend.n_batches, first + 1);
    assert_int_equal(r.backend.batches[first].n_items, 1);
    assert_int_equal(r.backend.batches[first].n_copies, 1);
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(r.backend.n_batches,
                     first + 2); /* the other layers together, without copies */
    assert_int_equal(r.backend.batches[first + 1].n_items, RIG_LAYERS - 1);
    assert_int_equal(r.backend.batches[first + 1].n_copies, 0);
    for (uint32_t l = 0; l < RIG_LAYERS; l++) {
        assert_int_equal(reply_of(id[l])->status, ATTN_OK);
        assert_int_equal(rig_len(&r, 2, l), 13);
        assert_int_equal(rig_len(&r, 1, l), 12);
    }
    rig_close(&r);
}

static void a_copy_waits_for_readers_of_the_table(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    open_many(1, 1);
    for (uint32_t l = 0; l < RIG_LAYERS; l++)
        assert_int_equal(rig_item(&r, 1, l, 0, 12), ATTN_OK);
    assert_int_equal(rig_fork(&r, 1, 2, 12), ATTN_OK);
    r.backend.is_held = true;
    uint64_t seq = 2;
    uint32_t pos = 11, n = 1, first = r.backend.n_batches;
    struct rig_step s = {.layer = 3,
                         .flags = WIRE_STEP_ATTEND,
                         .n_items = 1,
                         .seq = &seq,
                         .pos = &pos,
                         .n_tokens = &n};
    uint64_t a = rig_send_step(&r, &s);
    rig_run(&r);
    uint64_t b = rig_send_item(&r, 2, 0, 12, 1);
    rig_run(&r);
    assert_int_equal(r.backend.n_batches, first + 1);
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(reply_of(a)->status, ATTN_OK);
    assert_int_equal(reply_of(b)->status, ATTN_OK);
    assert_int_equal(r.backend.batches[first + 1].n_copies, 1);
    rig_close(&r);
}

/* --- failures ---------------------------------------------------------------------------------- */

static void a_failed_batch_fails_its_items_only(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    open_many(1, 3);
    assert_int_equal(rig_item(&r, 1, 0, 0, 12), ATTN_OK);
    assert_int_equal(rig_fork(&r, 1, 9, 0), ATTN_OK);
    r.backend.is_held = true;
    uint64_t a = rig_send_item(&r, 1, 0, 12, 30);
    rig_run(&r);
    uint64_t b = rig_send_item(&r, 2, 0, 0, 3);
    rig_run(&r);
    uint64_t c =
        rig_send_item(&r, 1, 0, 12, 1); /* waits for a, and is right whether a fails or not */
    r.backend.fail_batch = ATTN_EINTERNAL;
    r.backend.is_held = false;
    rig_run(&r);
    assert_says(reply_of(a), ATTN_EINTERNAL, "item 0 (sequence 1): the fake backend");
    assert_int_equal(reply_of(b)->status, ATTN_OK);
    assert_int_equal(reply_of(c)->status, ATTN_OK);
    assert_int_equal(rig_len(&r, 1, 0), 13);
    assert_int_equal(rig_len(&r, 2, 0), 3);
    rig_close(&r);
}

static void a_failed_copy_is_undone(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    open_many(1, 1);
    for (uint32_t l = 0; l < RIG_LAYERS; l++)
        assert_int_equal(rig_item(&r, 1, l, 0, 12), ATTN_OK);
    assert_int_equal(rig_fork(&r, 1, 2, 12), ATTN_OK);
    kv_seq_id one, two;
    struct kv_seq_info x, y;
    assert_int_equal(kv_seq_find(r.engine->kv, TENANT, 1, &one), ATTN_OK);
    assert_int_equal(kv_seq_find(r.engine->kv, TENANT, 2, &two), ATTN_OK);
    for (int i = 0; i < 2; i++) {
        if (i == 0)
            r.backend.fail_submit = ATTN_EINTERNAL;
        else
            r.backend.fail_batch = ATTN_EINTERNAL;
        assert_int_equal(rig_item(&r, 2, 0, 12, 1), ATTN_EINTERNAL);
        kv_seq_info(r.engine->kv, one, &x);
        kv_seq_info(r.engine->kv, two, &y);
        assert_int_equal(x.block_table[1], y.block_table[1]);
        assert_int_equal(y.layer_len[0], 12);
        assert_int_equal(kv_check(r.engine->kv), ATTN_OK);
        assert_int_equal(r.engine->pools[0].fx.n_copies, 0);
    }
    assert_int_equal(rig_item(&r, 2, 0, 12, 1), ATTN_OK);
    rig_close(&r);
}

static void a_lost_device_is_told_to_everyone(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    open_many(1, 4);
    r.backend.is_held = true;
    uint64_t a = rig_send_item(&r, 1, 0, 0, 1);
    rig_run(&r);
    uint64_t b = rig_send_item(&r, 2, 0, 0, 1);
    rig_run(&r);
    uint64_t c = rig_send_item(&r, 3, 0, 0, 1), d = rig_send_item(&r, 1, 0, 1, 1);
    rig_run(&r);
    assert_int_equal(engine_health(r.engine), ATTN_OK);
    r.backend.fail_batch = ATTN_EDEVICE;
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(engine_health(r.engine), ATTN_EDEVICE);
    assert_int_equal(reply_of(a)->status, ATTN_EDEVICE);
    assert_int_equal(reply_of(b)->status, ATTN_OK); /* the backend said so */
    assert_int_equal(reply_of(c)->status, ATTN_EDEVICE);
    assert_int_equal(reply_of(d)->status, ATTN_EDEVICE);
    assert_int_equal(rig_item(&r, 4, 0, 0, 1), ATTN_EDEVICE);
    rig_close(&r);
}

static void out_of_blocks_fails_that_item_alone(void **state)
{
    (void)state;
    rig_open(&r, NULL); /* 64 blocks of 8 tokens */
    open_many(1, 5);
    for (uint64_t i = 1; i <= 4; i++)
        assert_int_equal(rig_item(&r, i, 0, 0, 120), ATTN_OK); /* 15 blocks each */
    uint64_t seq[] = {5, 1};
    uint32_t pos[] = {0, 119}, n[] = {40, 1};
    struct rig_step s = {.flags = BOTH, .n_items = 2, .seq = seq, .pos = pos, .n_tokens = n};
    uint64_t id = rig_send_step(&r, &s);
    rig_run(&r);
    assert_says(reply_of(id), ATTN_ENOBLOCKS, "needs 5 blocks");
    assert_int_equal(reply_of(id)->step->item_status[1], ATTN_OK);
    assert_int_equal(rig_len(&r, 5, 0), 0);
    assert_int_equal(rig_close_seq(&r, 1, 1), ATTN_OK);
    assert_int_equal(rig_item(&r, 5, 0, 0, 40), ATTN_OK);
    rig_close(&r);
}

static void no_room_for_replies_is_an_overload(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    open_many(1, 1);
    struct iobuf *all[4096];
    uint32_t n = 0;
    uint64_t id = rig_send_item(&r, 1, 0, 0, 100);
    while (n < 4096 && (all[n] = iobuf_acquire(r.bufs, 4096)) != NULL)
        n++;
    rig_run(&r);
    assert_int_equal(reply_of(id)->status, ATTN_EOVERLOAD);
    assert_true(reply_of(id)->retry_after_us > 0);
    assert_int_equal(rig_len(&r, 1, 0), 0);
    while (n > 0)
        iobuf_release(all[--n]);
    assert_int_equal(rig_item(&r, 1, 0, 0, 100), ATTN_OK);
    rig_close(&r);
}

/* --- deadlines, overload, leases, drain -------------------------------------------------------- */

static void a_step_past_its_deadline_is_never_run(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    open_many(1, 3);
    r.backend.is_held = true;
    uint64_t a = rig_send_item(&r, 1, 0, 0, 1);
    rig_run(&r);
    uint64_t b = rig_send_item(&r, 2, 0, 0, 1);
    rig_run(&r);
    uint64_t c = rig_send_item(&r, 3, 0, 0, 1), d = rig_send_item(&r, 1, 0, 1, 1);
    uint64_t f = send_truncate(1, 0);
    rig_run(&r);
    rig_now_ns += 999999999;
    rig_run(&r);
    assert_null(rig_reply(&r, c));
    rig_now_ns += 1;
    rig_run(&r);
    assert_says(reply_of(c), ATTN_EDEADLINE, "1000000 us passed");
    assert_int_equal(reply_of(d)->status, ATTN_EDEADLINE);
    assert_int_equal(reply_of(f)->status, ATTN_EDEADLINE);
    assert_int_equal(rig_wire_reply(&r, c)->payload_bytes, 0);
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(reply_of(a)->status, ATTN_OK); /* was on the device already */
    assert_int_equal(reply_of(b)->status, ATTN_OK);
    assert_int_equal(r.backend.n_items, 2);
    assert_int_equal(rig_len(&r, 1, 0), 1);
    assert_int_equal(rig_len(&r, 3, 0), 0);
    assert_int_equal(rig_item(&r, 1, 0, 1, 1), ATTN_OK);
    rig_close(&r);
}

static void a_partly_launched_step_gives_up_the_rest(void **state)
{
    (void)state;
    rig_open(&r, small_batches);
    open_many(1, 10);
    r.backend.is_held = true;
    uint64_t id = send_wide(1, 10, 0);
    rig_run(&r);
    rig_now_ns += 1000000000;
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(reply_of(id)->status, ATTN_EDEADLINE);
    assert_int_equal(reply_of(id)->step->n_item_status, 10);
    for (uint32_t i = 0; i < 10; i++)
        assert_int_equal(reply_of(id)->step->item_status[i], i < 8 ? ATTN_OK : ATTN_EDEADLINE);
    assert_int_equal(rig_len(&r, 8, 0), 1);
    assert_int_equal(rig_len(&r, 9, 0), 0);
    rig_close(&r);
}

static void small_queue(struct rig *rig)
{
    rig->cfg.max_queue_requests = 5;
}

static void overload_is_an_answer(void **state)
{
    (void)state;
    rig_open(&r, small_queue);
    open_many(1, 8);
    r.backend.is_held = true;
    uint64_t id[8];
    for (uint64_t i = 0; i < 8; i++)
        id[i] = rig_send_item(&r, i + 1, 0, 0, 1);
    for (uint32_t i = 5; i < 8; i++) { /* answered before the engine ran */
        assert_says(reply_of(id[i]), ATTN_EOVERLOAD, "5 requests are queued");
        assert_true(reply_of(id[i])->retry_after_us >= 100);
    }
    r.backend.is_held = false;
    rig_run(&r);
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(reply_of(id[i])->status, ATTN_OK);
    assert_int_equal(rig_item(&r, 8, 0, 0, 1), ATTN_OK);
    r.cfg.max_queue_requests = 512;
    r.cfg.max_queue_bytes = 10;
    engine_reload(r.engine, &r.cfg);
    assert_int_equal(rig_item(&r, 8, 0, 1, 1), ATTN_EOVERLOAD);
    r.cfg.max_queue_bytes = 1 << 20;
    engine_reload(r.engine, &r.cfg);
    rig_close(&r);
}

static void silence_ends_a_lease_in_slices(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    uint64_t first = r.session;
    open_many(1, 150);
    r.session = rig_hello(&r, "other");
    open_many(1000, 1);
    rig_now_ns += 29000000000;
    assert_int_equal(rig_item(&r, 1000, 0, 0, 1), ATTN_OK); /* renews the second only */
    assert_int_equal(session_count(r.engine->sessions), 2);
    rig_now_ns += 1000000000;
    engine_turn(r.engine, 0);
    assert_int_equal(session_count(r.engine->sessions), 1);
    assert_int_equal(stats_get(sequences_expired), 64);
    assert_int_equal(rig_item(&r, 1000, 0, 1, 1), ATTN_OK);
    rig_run(&r);
    assert_int_equal(stats_get(sequences_expired), 150);
    assert_int_equal(stats_get(sequences), 1);
    assert_int_equal(stats_get(leases_expired), 1);
    r.session = first;
    assert_int_equal(rig_open_seq(&r, 1), ATTN_ENOTFOUND);
    r.session = rig_hello(&r, "again");
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
    rig_close(&r);
}

static void work_in_flight_keeps_a_lease(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    open_many(1, 2);
    r.backend.is_held = true;
    uint64_t a = rig_send_item(&r, 1, 0, 0, 1);
    rig_run(&r);
    rig_now_ns += 60000000000;
    rig_run(&r);
    assert_int_equal(session_count(r.engine->sessions), 1);
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(reply_of(a)->status, ATTN_OK);
    assert_int_equal(rig_item(&r, 1, 0, 1, 1), ATTN_OK);
    rig_close(&r);
}

static const Attnd__Reply *adopt(uint64_t seq)
{
    Attnd__Adopt b = ATTND__ADOPT__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.seq = seq;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_ADOPT;
    h.adopt = &b;
    return rig_call(&r, &h);
}

static void an_adopted_sequence_refuses_its_old_owner(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    uint64_t dead = r.session;
    open_many(1, 1);
    assert_int_equal(rig_item(&r, 1, 0, 0, 5), ATTN_OK);
    assert_int_equal(rig_item(&r, 1, 1, 0, 4), ATTN_OK);
    r.session = rig_hello(&r, "heir");
    assert_int_equal(rig_item(&r, 1, 0, 5, 1), ATTN_ESTALE); /* not its own yet */
    const Attnd__Reply *a = adopt(1);
    assert_int_equal(a->status, ATTN_OK);
    assert_int_equal(a->seq->epoch, 2);
    assert_int_equal(a->seq->n_layer_len, RIG_LAYERS);
    assert_int_equal(a->seq->layer_len[0], 5);
    assert_int_equal(a->seq->layer_len[1], 4);
    assert_int_equal(a->seq->pool, r.pool);
    uint64_t seq = 1, heir = r.session;
    uint32_t pos = 5, n = 1, two = 2;
    struct rig_step s = {
        .flags = BOTH, .n_items = 1, .seq = &seq, .pos = &pos, .n_tokens = &n, .epoch = &two};
    r.session = dead;
    uint64_t id = rig_send_item(&r, 1, 0, 5, 1);
    rig_run(&r);
    assert_says(reply_of(id), ATTN_ESTALE, "epoch is 1, the sequence is at 2");
    id = rig_send_step(&r, &s);
    rig_run(&r);
    assert_says(reply_of(id), ATTN_ESTALE, "belongs to another session");
    assert_int_equal(rig_truncate(&r, 1, 0), ATTN_ESTALE);
    assert_int_equal(rig_close_seq(&r, 1, 2), ATTN_ESTALE);
    r.session = heir;
    id = rig_send_step(&r, &s);
    rig_run(&r);
    assert_int_equal(reply_of(id)->status, ATTN_OK);
    assert_int_equal(rig_len(&r, 1, 0), 6);
    assert_int_equal(adopt(77)->status, ATTN_ENOTFOUND);
    rig_close(&r);
}

static void draining_refuses_what_is_new_and_finishes_what_is_not(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    open_many(1, 1);
    assert_false(engine_is_drained(r.engine));
    r.backend.is_held = true;
    uint64_t a = rig_send_item(&r, 1, 0, 0, 1);
    rig_run(&r);
    engine_drain(r.engine);
    assert_false(engine_is_drained(r.engine));
    assert_int_equal(rig_open_seq(&r, 2), ATTN_EDRAINING);
    assert_int_equal(hello(0, NULL)->status, ATTN_EDRAINING);
    assert_int_equal(hello(r.session, NULL)->status, ATTN_OK);
    assert_int_equal(make_pool(what_is_left)->status, ATTN_EDRAINING);
    assert_int_equal(make_pool(NULL)->status, ATTN_OK);
    uint64_t b = rig_send_item(&r, 1, 0, 1, 1);
    rig_run(&r);
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(reply_of(a)->status, ATTN_OK);
    assert_int_equal(reply_of(b)->status, ATTN_OK);
    assert_int_equal(rig_fork(&r, 1, 5, 1), ATTN_EDRAINING);
    assert_true(engine_is_drained(r.engine));
    rig_close(&r);
}

static void what_is_not_built_is_refused_by_name(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    Attnd__Export x = ATTND__EXPORT__INIT;
    Attnd__Import i = ATTND__IMPORT__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_EXPORT;
    h.export = &x;
    assert_says(rig_call(&r, &h), ATTN_ENOTSUP, "export");
    h.body_case = ATTND__REQUEST__BODY_IMPORT;
    h.import = &i;
    assert_says(rig_call(&r, &h), ATTN_ENOTSUP, "import");
    rig_close(&r);
}

static void stats_are_answered_as_json(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    Attnd__Stats b = ATTND__STATS__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_STATS;
    h.stats = &b;
    const Attnd__Reply *a = rig_call(&r, &h);
    assert_int_equal(a->status, ATTN_OK);
    assert_true(a->stats->json[0] == '{');
    assert_non_null(strstr(a->stats->json, "sessions"));
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(requests_without_a_session_are_refused),
        cmocka_unit_test(hello_resumes_a_live_session_and_refuses_unknown_features),
        cmocka_unit_test(the_same_pool_again_is_the_same_pool),
        cmocka_unit_test(another_pool_of_the_same_name_is_refused_by_field),
        cmocka_unit_test(pools_that_cannot_be_are_refused_by_field),
        cmocka_unit_test(outputs_come_back_in_item_order),
        cmocka_unit_test(a_wrong_item_fails_alone_with_nan_rows),
        cmocka_unit_test(a_wrong_step_is_refused_and_changes_nothing),
        cmocka_unit_test(too_many_items_are_refused),
        cmocka_unit_test(attending_what_is_not_there_fails),
        cmocka_unit_test(repeated_steps_leave_the_length_alone),
        cmocka_unit_test(a_busy_device_collects_what_arrives),
        cmocka_unit_test(items_of_one_sequence_and_layer_go_one_after_another),
        cmocka_unit_test(layers_of_one_sequence_share_a_batch),
        cmocka_unit_test(a_step_stays_whole_if_a_batch_can_hold_it),
        cmocka_unit_test(a_step_larger_than_a_batch_is_split_and_answered_once),
        cmocka_unit_test(an_item_that_waits_holds_only_its_own_step),
        cmocka_unit_test(control_waits_for_work_and_work_for_control),
        cmocka_unit_test(a_closed_name_may_be_opened_again_at_once),
        cmocka_unit_test(a_repeated_open_is_the_same_sequence),
        cmocka_unit_test(a_write_into_a_shared_block_runs_alone),
        cmocka_unit_test(a_copy_waits_for_readers_of_the_table),
        cmocka_unit_test(a_failed_batch_fails_its_items_only),
        cmocka_unit_test(a_failed_copy_is_undone),
        cmocka_unit_test(a_lost_device_is_told_to_everyone),
        cmocka_unit_test(out_of_blocks_fails_that_item_alone),
        cmocka_unit_test(no_room_for_replies_is_an_overload),
        cmocka_unit_test(a_step_past_its_deadline_is_never_run),
        cmocka_unit_test(a_partly_launched_step_gives_up_the_rest),
        cmocka_unit_test(overload_is_an_answer),
        cmocka_unit_test(silence_ends_a_lease_in_slices),
        cmocka_unit_test(work_in_flight_keeps_a_lease),
        cmocka_unit_test(an_adopted_sequence_refuses_its_old_owner),
        cmocka_unit_test(draining_refuses_what_is_new_and_finishes_what_is_not),
        cmocka_unit_test(what_is_not_built_is_refused_by_name),
        cmocka_unit_test(stats_are_answered_as_json),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
