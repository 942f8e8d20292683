/* e2e_export.c: blocks of sequences out of a daemon and into one: what comes back attends to the
 * bit as before, and is right; what is wrong is refused and changes nothing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/checksum.h"
#include "tests/daemon/e2e/e2e.h"
#include "tests/random.h"

enum { MAX_BLOCKS = 8 };

/* A sequence outside of any daemon. */
struct taken {
    uint32_t layer_len[E2E_LAYERS], n_ids, layout, n_blocks;
    uint64_t adapter, block_bytes;
    bool is_unnamed; /* does not say what its blocks mean */
    uint32_t first_layer, n_layers; /* that a put is of; n_layers 0: all */
    uint64_t sums[2 * MAX_BLOCKS];
    uint8_t *blocks;
    Attnd__Content content; /* without identity: e2e's pools have none */
};

static const struct wire_reply *ask_layers(struct e2e_client *c, const struct e2e_seq *s,
                                           uint32_t first, uint32_t n, uint32_t layer,
                                           uint32_t n_layers)
{
    Attnd__Export x = ATTND__EXPORT__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    x.seq = s->name;
    x.epoch = s->epoch;
    x.first_block = first;
    x.n_blocks = n;
    x.n_tokens = 100;
    x.first_layer = layer;
    x.n_layers = n_layers;
    h.session = c->session;
    h.body_case = ATTND__REQUEST__BODY_EXPORT;
    h.export = &x;
    return e2e_await(c, e2e_send(c, &h, NULL, 0));
}

static const struct wire_reply *ask_export(struct e2e_client *c, const struct e2e_seq *s,
                                           uint32_t first, uint32_t n)
{
    return ask_layers(c, s, first, n, 0, 0);
}

/* The whole sequence, block by block. */
static void take(struct e2e_client *c, const struct e2e_seq *s, struct taken *t)
{
    const struct wire_reply *r = ask_export(c, s, 0, 0);
    assert_int_equal(r->header->status, ATTN_OK);
    const Attnd__ExportReply *x = r->header->export;
    uint32_t longest = 0;
    assert_int_equal(x->n_layer_len, E2E_LAYERS);
    *t = (struct taken){.layout = x->layout, .n_ids = x->n_ids, .block_bytes = x->block_bytes};
    memcpy(t->layer_len, x->layer_len, sizeof t->layer_len);
    assert_string_equal(x->pool_name, "e2e");
    assert_non_null(x->content);
    t->content = *x->content;
    t->content.identity = NULL;
    for (uint32_t l = 0; l < E2E_LAYERS; l++)
        longest = t->layer_len[l] > longest ? t->layer_len[l] : longest;
    t->n_blocks = (longest + E2E_BLOCK_TOKENS - 1) / E2E_BLOCK_TOKENS;
    assert_in_range(t->n_blocks, 1, MAX_BLOCKS);
    t->blocks = malloc(t->n_blocks * t->block_bytes);
    assert_non_null(t->blocks);
    for (uint32_t i = 0; i < t->n_blocks; i++) {
        r = ask_export(c, s, i, 1);
        assert_int_equal(r->header->status, ATTN_OK);
        assert_int_equal(r->payload_bytes, t->block_bytes);
        assert_int_equal(r->header->export->n_sums, 2);
        memcpy(t->blocks + i * t->block_bytes, r->payload, t->block_bytes);
        memcpy(&t->sums[2 * (size_t)i], r->header->export->sums, 16);
    }
    e2e_forget(c);
}

static uint32_t at_most(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static char why[256]; /* of the put before */

/* Puts blocks [first, first + n) into a sequence; the status. */
static attn_status put(struct e2e_client *c, const struct e2e_seq *s, struct taken *t,
                       uint32_t first, uint32_t n)
{
    uint32_t lens[E2E_LAYERS];
    Attnd__Import m = ATTND__IMPORT__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    for (uint32_t l = 0; l < E2E_LAYERS; l++)
        lens[l] = at_most(t->layer_len[l], (first + n) * E2E_BLOCK_TOKENS);
    m.seq = s->name;
    m.epoch = s->epoch;
    m.first_block = first;
    m.layout = t->layout;
    m.content = t->is_unnamed ? NULL : &t->content;
    m.layer_len = lens;
    m.n_layer_len = E2E_LAYERS;
    m.sums = &t->sums[2 * (size_t)first];
    m.n_sums = 2 * (size_t)n;
    m.first_layer = t->first_layer;
    m.n_layers = t->n_layers;
    h.session = c->session;
    h.body_case = ATTND__REQUEST__BODY_IMPORT;
    h.import = &m;
    const struct wire_reply *r = e2e_await(
        c, e2e_send(c, &h, t->blocks + first * t->block_bytes, (size_t)(n * t->block_bytes)));
    attn_status st = (attn_status)r->header->status;
    snprintf(why, sizeof why, "%s", r->header->message);
    e2e_forget(c);
    return st;
}

/* Tokens of every layer; the last layer has fewer. */
static void fill(struct e2e_client *c, struct e2e_seq *s, uint32_t n, uint32_t n_last)
{
    for (uint32_t l = 0; l < E2E_LAYERS; l++)
        assert_int_equal(e2e_item(c, s, l, 0, l == E2E_LAYERS - 1 ? n_last : n), ATTN_OK);
}

static void assert_same(struct e2e_client *ca, struct e2e_seq *a, struct e2e_client *cb,
                        struct e2e_seq *b, const struct taken *t)
{
    for (uint32_t l = 0; l < E2E_LAYERS; l++) {
        size_t na, nb;
        void *ba = e2e_read_back(ca, a, l, t->layer_len[l], &na);
        void *bb = e2e_read_back(cb, b, l, t->layer_len[l], &nb);
        assert_int_equal(na, nb);
        assert_memory_equal(ba, bb, na);
        free(ba);
        free(bb);
    }
}

static uint32_t free_blocks(struct e2e_client *c)
{
    Attnd__PoolDescribe d = ATTND__POOL_DESCRIBE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    d.name = "e2e";
    h.session = c->session;
    h.body_case = ATTND__REQUEST__BODY_POOL_DESCRIBE;
    h.pool_describe = &d;
    const Attnd__Reply *r = e2e_call(c, &h);
    assert_int_equal(r->status, ATTN_OK);
    return r->pool->n_free_blocks;
}

/* Cards tell each other a moment later. */
static void await_free(struct e2e_client *c, uint32_t n)
{
    for (int i = 0; i < 10000 && free_blocks(c) != n; i++)
        e2e_forget(c);
    assert_int_equal(free_blocks(c), n);
}

static struct e2e_seq a, b;

/* From one daemon to another, over each dtype; then both go on alike, and right. */
static void a_sequence_goes_to_another_daemon(void **state)
{
    (void)state;
    const attn_dtype dtypes[] = {ATTN_F32, ATTN_BF16};
    for (size_t i = 0; i < 2; i++) {
        struct e2e from, to;
        struct e2e_client cf, ct;
        struct taken t, again;
        e2e_start(&from, NULL);
        e2e_start(&to, NULL);
        e2e_connect(&cf, &from);
        e2e_connect(&ct, &to);
        e2e_make_pool(&cf, dtypes[i], 32);
        e2e_make_pool(&ct, dtypes[i], 32);
        assert_int_equal(e2e_open_seq(&cf, &a, 7, 3), ATTN_OK);
        assert_int_equal(e2e_open_seq(&ct, &b, 9, 3), ATTN_OK);
        fill(&cf, &a, 70, 45);
        take(&cf, &a, &t);
        for (uint32_t n = 0; n < t.n_blocks; n += 2)
            assert_int_equal(put(&ct, &b, &t, n, at_most(2, t.n_blocks - n)), ATTN_OK);
        assert_int_equal(put(&ct, &b, &t, t.n_blocks - 1, 1), ATTN_OK); /* a repeat */
        assert_same(&cf, &a, &ct, &b, &t);
        take(&ct, &b, &again);
        assert_memory_equal(again.layer_len, t.layer_len, sizeof t.layer_len);
        assert_memory_equal(again.blocks, t.blocks, t.n_blocks * t.block_bytes);
        struct e2e_item item = {.seq = &b, .pos = 70, .n_tokens = 3};
        e2e_step(&ct, 0, &item, 1); /* against the reference */
        item.pos = 45;
        e2e_step(&ct, E2E_LAYERS - 1, &item, 1);
        free(t.blocks);
        free(again.blocks);
        e2e_disconnect(&cf);
        e2e_disconnect(&ct);
        e2e_stop(&from);
        e2e_stop(&to);
    }
}

/* Blocks of equal size of which one field means another thing. */
static void foreign_blocks_are_refused_by_the_field_that_differs(void **state)
{
    (void)state;
    struct e2e d;
    struct e2e_client c;
    struct taken t;
    e2e_start(&d, NULL);
    e2e_connect(&c, &d);
    e2e_make_pool(&c, ATTN_F32, 12);
    assert_int_equal(e2e_open_seq(&c, &a, 7, 3), ATTN_OK);
    assert_int_equal(e2e_open_seq(&c, &b, 9, 3), ATTN_OK);
    fill(&c, &a, 40, 40);
    take(&c, &a, &t);
    uint32_t n_free = free_blocks(&c);
    t.is_unnamed = true;
    assert_int_equal(put(&c, &b, &t, 0, t.n_blocks), ATTN_EINVAL);
    assert_non_null(strstr(why, "import.content is missing"));
    t.is_unnamed = false;
#define DIFFERS(field, value)                                                                      \
    do {                                                                                           \
        Attnd__Content was = t.content;                                                            \
        t.content.field = value;                                                                   \
        assert_int_equal(put(&c, &b, &t, 0, t.n_blocks), ATTN_EINVAL);                             \
        assert_non_null(strstr(why, #field " is "));                                               \
        assert_non_null(strstr(why, " in import, "));                                              \
        t.content = was;                                                                           \
    } while (0)
    DIFFERS(num_kv_heads, E2E_KV_HEADS * 2);
    DIFFERS(head_dim_k, E2E_DIM / 2);
    DIFFERS(head_dim_v, E2E_DIM * 2);
    DIFFERS(block_tokens, E2E_BLOCK_TOKENS * 2);
    DIFFERS(kv_dtype, ATTND__DTYPE__INT8);
    DIFFERS(attention, t.content.attention + 1);
#undef DIFFERS
    Attnd__Identity identity = ATTND__IDENTITY__INIT;
    t.content.identity = &identity;
    identity.model = (char *)"another";
    assert_int_equal(put(&c, &b, &t, 0, t.n_blocks), ATTN_EINVAL);
    assert_string_equal(why, "model is \"another\" in import, \"\" in pool \"e2e\"");
    identity.model = (char *)"";
    identity.rope = (char *)"theta=1";
    assert_int_equal(put(&c, &b, &t, 0, t.n_blocks), ATTN_EINVAL);
    assert_string_equal(why, "rope is \"theta=1\" in import, \"\" in pool \"e2e\"");
    identity.rope = (char *)"";
    await_free(&c, n_free);
    assert_int_equal(put(&c, &b, &t, 0, t.n_blocks), ATTN_OK);
    assert_same(&c, &a, &c, &b, &t);
    free(t.blocks);
    e2e_disconnect(&c);
    e2e_stop(&d);
}

/* Layer l of blocks [first, first + n); the status. */
static attn_status put_layer(struct e2e_client *c, const struct e2e_seq *s, const struct taken *t,
                             uint32_t l, uint32_t first, uint32_t n)
{
    struct taken part = *t;
    uint64_t bytes = t->block_bytes / E2E_LAYERS;
    part.first_layer = l;
    part.n_layers = 1;
    part.block_bytes = bytes;
    part.blocks = malloc(t->n_blocks * bytes);
    assert_non_null(part.blocks);
    for (uint32_t i = 0; i < t->n_blocks; i++) {
        memcpy(part.blocks + i * bytes, t->blocks + i * t->block_bytes + l % E2E_LAYERS * bytes,
               bytes);
        struct checksum sum = checksum_of(part.blocks + i * bytes, bytes);
        part.sums[2 * (size_t)i] = sum.low;
        part.sums[2 * (size_t)i + 1] = sum.high;
    }
    attn_status st = put(c, s, &part, first, n);
    free(part.blocks);
    return st;
}

/* What a block has of a layer is a piece of it, and a sequence of such pieces is the same. */
static void blocks_go_layer_by_layer(void **state)
{
    (void)state;
    struct e2e d;
    struct e2e_client c;
    struct e2e_seq fork;
    struct taken t, again;
    const uint32_t last = E2E_LAYERS - 1;
    e2e_start(&d, NULL);
    e2e_connect(&c, &d);
    e2e_make_pool(&c, ATTN_F32, 16);
    assert_int_equal(e2e_open_seq(&c, &a, 7, 3), ATTN_OK);
    assert_int_equal(e2e_open_seq(&c, &b, 9, 3), ATTN_OK);
    fill(&c, &a, 70, 45);
    take(&c, &a, &t);
    uint64_t bytes = t.block_bytes / E2E_LAYERS;
    for (uint32_t l = 0; l < E2E_LAYERS; l++) {
        const struct wire_reply *r = ask_layers(&c, &a, 1, 2, l, 1);
        assert_int_equal(r->header->status, ATTN_OK);
        assert_int_equal(r->payload_bytes, 2 * bytes);
        assert_int_equal(r->header->export->n_sums, 4);
        for (uint32_t i = 0; i < 2; i++) {
            const uint8_t *piece = (const uint8_t *)r->payload + i * bytes;
            struct checksum sum = checksum_of(piece, bytes);
            assert_memory_equal(piece, t.blocks + (1 + i) * t.block_bytes + l * bytes, bytes);
            assert_memory_equal(&sum, &r->header->export->sums[2 * (size_t)i], sizeof sum);
        }
    }
    assert_int_equal(ask_layers(&c, &a, 0, 1, E2E_LAYERS, 1)->header->status, ATTN_EINVAL);
    assert_int_equal(ask_layers(&c, &a, 0, 1, 1, E2E_LAYERS)->header->status, ATTN_EINVAL);
    assert_int_equal(ask_layers(&c, &a, 0, 1, 1, 0)->header->status, ATTN_EINVAL);

    assert_int_equal(put_layer(&c, &b, &t, E2E_LAYERS, 0, 2), ATTN_EINVAL);
    assert_non_null(strstr(why, "import.first_layer "));
    assert_int_equal(put_layer(&c, &b, &t, 0, 0, 2), ATTN_OK);
    assert_int_equal(put_layer(&c, &b, &t, 0, 2, 1), ATTN_OK);
    assert_int_equal(put_layer(&c, &b, &t, last, 2, 1), ATTN_EINVAL); /* a gap */
    assert_int_equal(put(&c, &b, &t, 0, 2), ATTN_EINVAL); /* layer 0 has something */
    for (uint32_t l = 1; l < E2E_LAYERS; l++)
        assert_int_equal(put_layer(&c, &b, &t, l, 0, 2), ATTN_OK);
    assert_int_equal(put_layer(&c, &b, &t, last, 0, 2), ATTN_OK); /* a repeat */
    /* nobody shares the block that not all layers have, so nothing is copied */
    assert_int_equal(e2e_fork(&c, &b, &fork, 10, 33, 3), ATTN_EINVAL);
    assert_int_equal(e2e_fork(&c, &b, &fork, 10, 32, 3), ATTN_OK);
    for (uint32_t l = 1; l < E2E_LAYERS; l++)
        assert_int_equal(put_layer(&c, &b, &t, l, 2, 1), ATTN_OK);
    for (uint32_t i = 3; i < t.n_blocks; i++)
        for (uint32_t l = 0; l < E2E_LAYERS; l++)
            if (t.layer_len[l] > i * E2E_BLOCK_TOKENS)
                assert_int_equal(put_layer(&c, &b, &t, l, i, 1), ATTN_OK);
    take(&c, &b, &again);
    assert_memory_equal(again.layer_len, t.layer_len, sizeof t.layer_len);
    assert_memory_equal(again.blocks, t.blocks, t.n_blocks * t.block_bytes);
    free(again.blocks);
    assert_same(&c, &a, &c, &b, &t);
    take(&c, &fork, &again);
    assert_memory_equal(again.blocks, t.blocks, 2 * t.block_bytes);
    free(t.blocks);
    free(again.blocks);
    e2e_disconnect(&c);
    e2e_stop(&d);
}

static void a_session_that_ends_in_the_middle_leaves_nothing_behind(void **state)
{
    (void)state;
    struct e2e d;
    struct e2e_client c, gone;
    struct taken t;
    e2e_start(&d, NULL);
    e2e_connect(&c, &d);
    e2e_make_pool(&c, ATTN_F32, 12);
    uint32_t n_free = free_blocks(&c);
    assert_int_equal(e2e_open_seq(&c, &a, 7, 3), ATTN_OK);
    fill(&c, &a, 70, 45);
    take(&c, &a, &t);
    assert_int_equal(e2e_close_seq(&c, &a), ATTN_OK);
    e2e_connect(&gone, &d);
    gone.pool = c.pool;
    assert_int_equal(e2e_open_seq(&gone, &b, 9, 3), ATTN_OK);
    assert_int_equal(put(&gone, &b, &t, 0, 2), ATTN_OK);
    Attnd__Kill kill = ATTND__KILL__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    char session[16];
    snprintf(session, sizeof session, "%08x", (unsigned)(gone.session >> 32));
    kill.session = session;
    h.session = c.session;
    h.body_case = ATTND__REQUEST__BODY_KILL;
    h.kill = &kill;
    assert_int_equal(e2e_call(&c, &h)->status, ATTN_OK);
    assert_int_equal(put(&gone, &b, &t, 2, 1), ATTN_ENOTFOUND);
    await_free(&c, n_free);
    assert_int_equal(ask_export(&c, &b, 0, 0)->header->status, ATTN_ENOTFOUND);
    e2e_disconnect(&gone);
    free(t.blocks);
    e2e_disconnect(&c);
    e2e_stop(&d);
}

/* Who moves a sequence takes it as it has seen it, or not at all. */
static void adoption_at_an_epoch_is_refused_at_another(void **state)
{
    (void)state;
    struct e2e d;
    struct e2e_client c, other;
    e2e_start(&d, NULL);
    e2e_connect(&c, &d);
    e2e_connect(&other, &d);
    e2e_make_pool(&c, ATTN_F32, 12);
    assert_int_equal(e2e_open_seq(&c, &a, 7, 3), ATTN_OK);
    fill(&c, &a, 20, 20);
    Attnd__Adopt adopt = ATTND__ADOPT__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    adopt.seq = a.name;
    adopt.epoch = a.epoch;
    h.session = other.session;
    h.body_case = ATTND__REQUEST__BODY_ADOPT;
    h.adopt = &adopt;
    assert_int_equal(e2e_truncate(&c, &a, 18), ATTN_OK);
    const Attnd__Reply *r = e2e_call(&other, &h);
    assert_int_equal(r->status, ATTN_ESTALE);
    assert_non_null(strstr(r->message, "adopt.epoch is "));
    assert_int_equal(e2e_item(&c, &a, 0, 18, 1), ATTN_OK); /* it is whose it was */
    adopt.epoch = a.epoch;
    r = e2e_call(&other, &h);
    assert_int_equal(r->status, ATTN_OK);
    assert_true(r->seq->epoch > a.epoch);
    assert_int_equal(e2e_item(&c, &a, 0, 19, 1), ATTN_ESTALE);
    e2e_disconnect(&other);
    e2e_disconnect(&c);
    e2e_stop(&d);
}

static void what_is_wrong_is_refused_and_changes_nothing(void **state)
{
    (void)state;
    struct e2e d;
    struct e2e_client c, other;
    struct taken t;
    e2e_start(&d, NULL);
    e2e_connect(&c, &d);
    e2e_make_pool(&c, ATTN_F32, 12);
    assert_int_equal(e2e_open_seq(&c, &a, 7, 3), ATTN_OK);
    assert_int_equal(e2e_open_seq(&c, &b, 9, 3), ATTN_OK);
    fill(&c, &a, 70, 45);
    take(&c, &a, &t);
    uint32_t n_free = free_blocks(&c);
    uint64_t seed = 1;
    for (int i = 0; i < 50; i++) {
        size_t at = random_below(&seed, (uint32_t)(t.n_blocks * t.block_bytes));
        t.blocks[at] ^= 1;
        assert_int_equal(put(&c, &b, &t, 0, t.n_blocks), ATTN_EINVAL);
        t.blocks[at] ^= 1;
    }
    t.layout++;
    assert_int_equal(put(&c, &b, &t, 0, t.n_blocks), ATTN_EINVAL);
    t.layout--;
    t.block_bytes -= 64;
    assert_int_equal(put(&c, &b, &t, 0, t.n_blocks), ATTN_EINVAL);
    t.block_bytes += 64;
    assert_int_equal(put(&c, &b, &t, 1, 1), ATTN_EINVAL); /* a gap */
    assert_int_equal(put(&c, &a, &t, 0, 2), ATTN_EINVAL); /* there is something */
    struct e2e_seq stale = b;
    stale.epoch++;
    assert_int_equal(put(&c, &stale, &t, 0, 1), ATTN_ESTALE);
    e2e_connect(&other, &d);
    assert_int_equal(put(&other, &b, &t, 0, 1), ATTN_ESTALE);
    assert_int_equal(ask_export(&c, &a, 4, 2)->header->status, ATTN_EINVAL);
    assert_int_equal(ask_export(&c, &stale, 0, 0)->header->status, ATTN_ESTALE);
    await_free(&c, n_free);

    assert_int_equal(put(&c, &b, &t, 0, t.n_blocks), ATTN_OK);
    struct e2e_seq more; /* on the card where b is */
    attn_status st = ATTN_OK;
    uint32_t n_more = 0;
    while (st == ATTN_OK) {
        assert_true(n_more < 2);
        n_free -= t.n_blocks; /* of what was put last */
        assert_int_equal(e2e_fork(&c, &b, &more, 10 + n_more++, 0, 3), ATTN_OK);
        st = put(&c, &more, &t, 0, t.n_blocks);
    }
    assert_int_equal(st, ATTN_ENOBLOCKS);
    assert_int_equal(put(&c, &more, &t, 0, 1), ATTN_OK);
    assert_int_equal(e2e_close_seq(&c, &more), ATTN_OK); /* an import that was given up */
    await_free(&c, n_free);
    assert_same(&c, &a, &c, &b, &t);
    free(t.blocks);
    e2e_disconnect(&other);
    e2e_disconnect(&c);
    e2e_stop(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_sequence_goes_to_another_daemon),
        cmocka_unit_test(foreign_blocks_are_refused_by_the_field_that_differs),
        cmocka_unit_test(blocks_go_layer_by_layer),
        cmocka_unit_test(a_session_that_ends_in_the_middle_leaves_nothing_behind),
        cmocka_unit_test(adoption_at_an_epoch_is_refused_at_another),
        cmocka_unit_test(what_is_wrong_is_refused_and_changes_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
