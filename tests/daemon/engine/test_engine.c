/* test_engine.c: sessions, pools and steps: what the engine answers, and what it refuses. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/daemon/engine/engine_rig.h"

#define BOTH (WIRE_STEP_APPEND | WIRE_STEP_ATTEND)

static struct rig r;

/* --- sessions and pools ----------------------------------------------------------------------- */

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

static void hello_resumes_a_live_session_and_refuses_unknown_features(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    const Attnd__Reply *a = rig_hello_with(&r, r.session, NULL);
    assert_int_equal(a->status, ATTN_OK);
    assert_true(a->hello->session == r.session);
    assert_int_equal(a->hello->protocol_version, 1);
    assert_int_equal(a->hello->max_step_items, r.cfg.max_step_items);
    assert_int_equal(a->hello->max_sequences, r.cfg.max_sequences);
    rig_assert_says(rig_hello_with(&r, r.session + 1, NULL), ATTN_ENOTFOUND, "resume_session");
    rig_assert_says(rig_hello_with(&r, 0, "telepathy"), ATTN_ENOTSUP, "telepathy");
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
static void v_in_k(Attnd__PoolSpec *s)
{
    s->is_v_in_k = true;
}
static void latent(Attnd__PoolSpec *s)
{
    static char *feature = "v_in_k";
    s->name = "latent";
    s->num_q_heads = 3;
    s->num_kv_heads = 1;
    s->head_dim_k = 24;
    s->head_dim_v = 16;
    s->is_v_in_k = true;
    s->n_required_features = 1;
    s->required_features = &feature;
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
static void dilated(Attnd__PoolSpec *s)
{
    static uint32_t segments[] = {16, 64}, rates[] = {1, 4};
    static char *features[] = {"dilated"};
    say_the_defaults(s);
    s->name = "dilated";
    s->n_blocks = 2;
    s->n_required_features = 1;
    s->required_features = features;
    s->layers[0]->n_branch_segment_tokens = s->layers[0]->n_branch_rates = 2;
    s->layers[0]->branch_segment_tokens = segments;
    s->layers[0]->branch_rates = rates;
}
static void other_rates(Attnd__PoolSpec *s)
{
    static uint32_t rates[] = {1, 2};
    dilated(s);
    s->layers[0]->branch_rates = rates;
}
static void a_rate_missing(Attnd__PoolSpec *s)
{
    dilated(s);
    s->name = "q";
    s->layers[0]->n_branch_rates = 1;
}
static void nine_branches(Attnd__PoolSpec *s)
{
    static uint32_t nine[] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    dilated(s);
    s->name = "q";
    s->layers[0]->n_branch_rates = s->layers[0]->n_branch_segment_tokens = 9;
    s->layers[0]->branch_segment_tokens = s->layers[0]->branch_rates = nine;
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
    rig_assert_says(make_pool(more_heads), ATTN_EEXIST, "num_q_heads 4, asked for 8");
    rig_assert_says(make_pool(v_in_k), ATTN_EEXIST, "is_v_in_k 0, asked for 1");
    rig_assert_says(make_pool(other_model), ATTN_EEXIST,
                    "identity.model \"\", asked for \"sha256:abc\"");
    rig_assert_says(make_pool(a_window), ATTN_EEXIST, "layers[0].window_tokens 0, asked for 512");
    assert_int_equal(r.engine->n_pools, 1);
    const Attnd__LayerSpec *l = make_pool(dilated)->pool->spec->layers[0];
    assert_int_equal(l->n_branch_rates, 2);
    assert_int_equal(l->branch_segment_tokens[1], 64);
    assert_int_equal(l->branch_rates[1], 4);
    rig_assert_says(make_pool(other_rates), ATTN_EEXIST, "layers[0].branch_rates 4, asked for 2");
    rig_close(&r);
}

static void pools_that_cannot_be_are_refused_by_field(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    rig_assert_says(make_pool(a_feature), ATTN_ENOTSUP, "mla");
    rig_assert_says(make_pool(no_name), ATTN_EINVAL, "name");
    rig_assert_says(make_pool(a_rate_missing), ATTN_EINVAL,
                    "layers[0].branch_rates has 1 entries, branch_segment_tokens 2");
    rig_assert_says(make_pool(nine_branches), ATTN_EINVAL,
                    "layers[0].branch_segment_tokens has 9 entries, at most 8");
    rig_assert_says(make_pool(odd_dim), ATTN_ENOTSUP, "fake backend");
    rig_assert_says(make_pool(too_many_layers), ATTN_EINVAL, "num_layers is 9, 8 are allowed");
    rig_assert_says(make_pool(too_many_blocks), ATTN_ENOMEM, "n_blocks");
    assert_int_equal(r.engine->n_pools, 1);
    const Attnd__Reply *a = make_pool(what_is_left);
    assert_int_equal(a->status, ATTN_OK);
    /* a block is 4 layers x (K and V) x 2 heads x 8 tokens x 8 x 4 bytes = 4 KiB; 1 MiB in all, and
     * a pool that asks for no number takes half of what is left */
    assert_int_equal(a->pool->spec->n_blocks, (256 - 64) / 2);
    rig_close(&r);
}

/* --- steps ------------------------------------------------------------------------------------ */

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
    assert_int_equal(rig_answer(&r, id)->status, ATTN_OK);
    assert_int_equal(rig_answer(&r, id)->step->n_item_status, 0);
    assert_int_equal(rig_answer(&r, id)->device_ns, 1000);
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
    rig_assert_says(rig_answer(&r, id), ATTN_ENOTFOUND, "item 1 (sequence 99): no such sequence");
    const Attnd__StepReply *b = rig_answer(&r, id)->step;
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

static uint64_t send_latent(uint32_t pool, uint64_t seq, size_t payload_bytes)
{
    static uint8_t payload[1 << 10];
    uint32_t one = 1, pos = 0, two = 2;
    Attnd__Step b = ATTND__STEP__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.pool = pool;
    b.flags = BOTH;
    b.dtype = ATTND__DTYPE__F32;
    b.n_seq = b.n_epoch = b.n_pos = b.n_n_tokens = 1;
    b.seq = &seq;
    b.epoch = &one;
    b.pos = &pos;
    b.n_tokens = &two;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_STEP;
    h.step = &b;
    uint64_t id = rig_send(&r, &h, payload, payload_bytes);
    rig_run(&r);
    return id;
}

/* Two tokens: q of 3 heads of 24 elements and one k; out of 3 heads of 16. */
static void a_step_where_v_is_in_k_has_q_and_k_alone(void **state)
{
    (void)state;
    const size_t q = 2 * 3 * 24 * 4, k = 2 * 24 * 4, v = 2 * 16 * 4;
    rig_open(&r, NULL);
    const Attnd__Reply *a = make_pool(latent);
    assert_int_equal(a->status, ATTN_OK);
    const uint32_t pool = a->pool->pool;
    assert_true(a->pool->spec->is_v_in_k);
    assert_int_equal(a->pool->spec->head_dim_v, 16);
    Attnd__Open open = ATTND__OPEN__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    open.seq = 5;
    open.pool = pool;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_OPEN;
    h.open = &open;
    assert_int_equal(rig_call(&r, &h)->status, ATTN_OK);
    rig_assert_says(rig_answer(&r, send_latent(pool, 5, q + k + v)), ATTN_EINVAL,
                    "payload has 896 bytes, 2 tokens with flags 3 need 768: without v, which is "
                    "in k (is_v_in_k)");
    assert_int_equal(r.backend.n_batches, 0);
    uint64_t id = send_latent(pool, 5, q + k);
    assert_int_equal(rig_answer(&r, id)->status, ATTN_OK);
    assert_int_equal(rig_wire_reply(&r, id)->payload_bytes, 2 * 3 * 16 * 4);
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
        {1, 0, 256 | BOTH, 1, 1, {1}, 1, 0, ATTN_EINVAL, "flags is 0x103"},
        {1, 0, BOTH, 1, 3, {1}, 1, 0, ATTN_EINVAL, "dtype is bf16"},
        {1, 0, BOTH, 1, 4, {1}, 1, 0, ATTN_EINVAL, "fp8_e4m3 (4), the pool's q_dtype is f32"},
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
        rig_assert_says(rig_answer(&r, id), c->status, c->part);
        assert_int_equal(rig_wire_reply(&r, id)->payload_bytes, 0);
        assert_int_equal(rig_len(&r, 1, 0), 0);
    }
    assert_int_equal(r.backend.n_batches, 0);
    assert_int_equal(rig_item(&r, 1, 0, 0, 1), ATTN_OK); /* stamps of refused steps do no harm */
    rig_close(&r);
}

/* Answers: ok, or refused as this says. */
static void expect_sparse(const struct rig_step *s, attn_status status, const char *part)
{
    uint64_t id = rig_send_step(&r, s);
    rig_run(&r);
    if (status == ATTN_OK)
        assert_int_equal(rig_answer(&r, id)->status, ATTN_OK);
    else
        rig_assert_says(rig_answer(&r, id), status, part);
}

static void a_sparse_step_visits_and_is_charged_what_it_names(void **state)
{
    (void)state;
    static const int32_t tokens[2][5] = {{70, 3, 3, 100, -1}, {9, -1, 101, 50, 9}};
    static const int32_t blocks[2][2] = {{12, 0}, {-1, 12}}; /* of 8; the queries at 100 and 101 */
    static const int32_t ahead[2][1] = {{101}, {101}};
    static int32_t many[128][4097];
    const uint64_t seq = 1;
    uint32_t pos = 100, n = 2;
    rig_open(&r, NULL);
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
    assert_int_equal(rig_item(&r, 1, 0, 0, 100), ATTN_OK);
    struct rig_step s = {.flags = BOTH | WIRE_STEP_SPARSE,
                         .n_items = 1,
                         .seq = &seq,
                         .pos = &pos,
                         .n_tokens = &n,
                         .indices = ahead[0],
                         .n_indices = 1};
    expect_sparse(&s, ATTN_EINVAL, "indices[0][0] is 101 of 1 tokens each: the query at 100 sees");
    assert_int_equal(rig_len(&r, 1, 0), 100);
    s.indices = tokens[0];
    s.n_indices = 5;
    expect_sparse(&s, ATTN_OK, NULL);
    const struct rig_item *last = &r.backend.items[r.backend.n_items - 1];
    assert_int_equal(last->n_listed, 6);
    assert_int_equal(last->first_listed, 3);
    assert_int_equal(r.engine->batches[0].n_visible, 3); /* of a query, not 102 */
    s.indices = blocks[0];
    s.n_indices = 2;
    s.index_tokens = 8;
    expect_sparse(&s, ATTN_OK, NULL);
    last = &r.backend.items[r.backend.n_items - 1];
    assert_int_equal(last->n_listed, 5 + 8 + 6); /* 96 to the query's own */
    assert_int_equal(last->first_listed, 0);
    const uint32_t n_batches = r.backend.n_batches;
    s.indices = many[0];
    s.n_indices = 4097;
    s.index_tokens = 1;
    n = 128;
    pos = 0;
    expect_sparse(&s, ATTN_EINVAL,
                  "step.n_indices is 4097, times 128 tokens: a step has at most 524288");
    assert_int_equal(r.backend.n_batches, n_batches);
    rig_close(&r);
}

static void lack_lists(struct rig *x)
{
    x->backend.lacks_lists = true;
}

static void a_backend_without_lists_refuses_sparse_steps_by_name(void **state)
{
    (void)state;
    static const int32_t index = 0;
    const uint64_t seq = 1;
    const uint32_t pos = 0, n = 1;
    rig_open(&r, lack_lists);
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
    const struct rig_step s = {.flags = BOTH | WIRE_STEP_SPARSE,
                               .n_items = 1,
                               .seq = &seq,
                               .pos = &pos,
                               .n_tokens = &n,
                               .indices = &index,
                               .n_indices = 1};
    expect_sparse(&s, ATTN_ENOTSUP, "can't have sparse steps: its backend has none");
    rig_close(&r);
}

static void a_step_that_chooses_is_charged_what_it_visits(void **state)
{
    (void)state;
    const uint64_t seq = 1;
    uint32_t pos = 100, n = 2;
    rig_open(&r, NULL);
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
    assert_int_equal(rig_item(&r, 1, 0, 0, 100), ATTN_OK);
    struct rig_step s = {.flags = BOTH | WIRE_STEP_CHOOSE,
                         .n_items = 1,
                         .seq = &seq,
                         .pos = &pos,
                         .n_tokens = &n,
                         .choose_blocks = 3};
    expect_sparse(&s, ATTN_OK, NULL);
    assert_int_equal(r.backend.items[r.backend.n_items - 1].n_chosen, 3);
    assert_int_equal(r.engine->batches[0].n_visible, 3 * RIG_BLOCK_TOKENS);
    pos = 102;
    s.choose_blocks = 1000; /* all */
    expect_sparse(&s, ATTN_OK, NULL);
    assert_int_equal(r.engine->batches[0].n_visible, 104);
    rig_close(&r);
}

static void lack_choice(struct rig *x)
{
    x->backend.lacks_choice = true;
}

static void a_backend_without_choice_refuses_steps_that_choose_by_name(void **state)
{
    (void)state;
    const uint64_t seq = 1;
    const uint32_t pos = 0, n = 1;
    rig_open(&r, lack_choice);
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
    const struct rig_step s = {.flags = BOTH | WIRE_STEP_CHOOSE,
                               .n_items = 1,
                               .seq = &seq,
                               .pos = &pos,
                               .n_tokens = &n,
                               .choose_blocks = 1};
    expect_sparse(&s, ATTN_ENOTSUP, "can't have steps that choose: its backend has none");
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
    rig_assert_says(rig_answer(&r, id), ATTN_EINVAL, "33 items, 32 are allowed");
    s.n_items = 32;
    id = rig_send_step(&r, &s);
    rig_run(&r);
    assert_int_equal(rig_answer(&r, id)->status, ATTN_OK);
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
    assert_int_equal(rig_answer(&r, id)->status, ATTN_OK);
    pos = 4;
    id = rig_send_step(&r, &s);
    rig_run(&r);
    rig_assert_says(rig_answer(&r, id), ATTN_EINVAL, "pos 4 + n_tokens 1 is not appended yet");
    pos = 0;
    s.layer = 2;
    id = rig_send_step(&r, &s);
    rig_run(&r);
    rig_assert_says(rig_answer(&r, id), ATTN_EINVAL, "layer 2 has 0 tokens");
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
        cmocka_unit_test(a_sparse_step_visits_and_is_charged_what_it_names),
        cmocka_unit_test(a_backend_without_lists_refuses_sparse_steps_by_name),
        cmocka_unit_test(a_step_that_chooses_is_charged_what_it_visits),
        cmocka_unit_test(a_backend_without_choice_refuses_steps_that_choose_by_name),
        cmocka_unit_test(a_step_where_v_is_in_k_has_q_and_k_alone),
        cmocka_unit_test(too_many_items_are_refused),
        cmocka_unit_test(attending_what_is_not_there_fails),
        cmocka_unit_test(repeated_steps_leave_the_length_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
