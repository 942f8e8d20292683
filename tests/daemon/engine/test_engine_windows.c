/* test_engine_windows.c: pools whose layers all have windows: what a sequence holds however long it
 * is, and what is refused behind that. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/daemon/engine/engine_rig.h"

enum {
    WINDOW = 20,
    SINKS = 3, /* one block */
    HELD = 1 + (WINDOW + RIG_BLOCK_TOKENS - 2) / RIG_BLOCK_TOKENS + 1, /* sinks, window, and one */
};

static struct rig r;

static void begin(uint32_t n_blocks)
{
    rig_open(&r, NULL);
    r.pool = rig_pool_of_windows(&r, "windows", n_blocks, WINDOW, SINKS);
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
}

static void append(uint64_t seq, uint32_t pos, uint32_t n)
{
    for (uint32_t l = 0; l < RIG_LAYERS; l++)
        assert_int_equal(rig_item(&r, seq, l, pos, n), ATTN_OK);
}

static uint64_t n_used(void)
{
    struct kv_stats s;
    kv_stats_read(r.kv, &s);
    return s.blocks_used;
}

/* The reply to a step that only attends. */
static const Attnd__Reply *attend(uint64_t seq, uint32_t pos)
{
    uint32_t n = 1;
    struct rig_step s = {
        .flags = WIRE_STEP_ATTEND, .n_items = 1, .seq = &seq, .pos = &pos, .n_tokens = &n};
    uint64_t id = rig_send_step(&r, &s);
    rig_run(&r);
    return rig_answer(&r, id);
}

static void a_sequence_of_any_length_holds_its_window_and_a_block(void **state)
{
    (void)state;
    begin(HELD); /* no more than one sequence needs */
    for (uint32_t pos = 0; pos < 30 * RIG_BLOCK_TOKENS; pos++) {
        append(1, pos, 1);
        assert_true(n_used() <= HELD);
    }
    assert_int_equal(rig_close_seq(&r, 1, rig_epoch(&r, 1)), ATTN_OK);
    assert_int_equal(n_used(), 0);
    rig_close(&r);
}

static void the_layer_that_is_furthest_back_keeps_its_blocks(void **state)
{
    (void)state;
    begin(64);
    append(1, 0, 90);
    for (uint32_t l = 0; l + 1 < RIG_LAYERS; l++)
        assert_int_equal(rig_item(&r, 1, l, 90, 2), ATTN_OK);
    uint64_t before = n_used();
    assert_int_equal(before, 12);
    assert_int_equal(rig_item(&r, 1, RIG_LAYERS - 1, 0, 90), ATTN_OK); /* again, all of it */
    assert_int_equal(n_used(), before);
    assert_int_equal(rig_item(&r, 1, RIG_LAYERS - 1, 90, 2), ATTN_OK);
    assert_int_equal(n_used(), HELD);
    append(1, 90, 2); /* the latest append of each layer may be repeated */
    rig_close(&r);
}

static void what_would_see_freed_tokens_is_refused_by_name(void **state)
{
    (void)state;
    begin(64);
    append(1, 0, 90);
    append(1, 90, 1);
    assert_int_equal(n_used(), HELD);
    uint64_t id = rig_send_item(&r, 1, 0, 60, 1);
    rig_run(&r);
    rig_assert_says(rig_answer(&r, id), ATTN_EINVAL, "a query at 60 sees tokens that are freed");
    rig_assert_says(attend(1, 60), ATTN_EINVAL, "windows of 20, of tokens 8 to 63 nothing is left");
    assert_int_equal(attend(1, 88)->status, ATTN_OK);
    assert_int_equal(rig_truncate(&r, 1, 60), ATTN_EINVAL);
    assert_int_equal(rig_fork(&r, 1, 2, 60), ATTN_EINVAL);

    Attnd__Export x = ATTND__EXPORT__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    x.seq = 1;
    x.n_blocks = 3;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_EXPORT;
    h.export = &x;
    rig_assert_says(rig_call(&r, &h), ATTN_EINVAL, "blocks 1 to 7 are freed");

    assert_int_equal(rig_fork(&r, 1, 2, 90), ATTN_OK); /* shares what is left */
    append(2, 90, 40);
    assert_int_equal(rig_truncate(&r, 1, 88), ATTN_OK);
    append(1, 88, 1);
    assert_int_equal(rig_truncate(&r, 1, 2), ATTN_OK); /* into the tokens that all keep */
    append(1, 2, 90);
    rig_close(&r);
}

/* What export says of a sequence. */
static const Attnd__ExportReply *look(uint64_t seq)
{
    Attnd__Export x = ATTND__EXPORT__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    x.seq = seq;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_EXPORT;
    h.export = &x;
    const Attnd__Reply *reply = rig_call(&r, &h);
    assert_int_equal(reply->status, ATTN_OK);
    return reply->export;
}

/* An import that frees blocks [first, past) of a sequence, whose layers then have `lens`. */
static const Attnd__Reply *free_to(uint64_t seq, uint32_t first, uint32_t past, uint32_t len,
                                   const Attnd__ExportReply *of, uint32_t first_block)
{
    Attnd__Import m = ATTND__IMPORT__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    uint32_t lens[RIG_LAYERS];
    for (uint32_t l = 0; l < RIG_LAYERS; l++)
        lens[l] = len;
    m.seq = seq;
    m.epoch = rig_epoch(&r, seq);
    m.first_block = first_block;
    m.layout = of->layout;
    m.n_layer_len = RIG_LAYERS;
    m.layer_len = lens;
    m.content = of->content;
    m.freed_first = first;
    m.freed_past = past;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_IMPORT;
    h.import = &m;
    return rig_call(&r, &h);
}

static void a_sequence_is_made_with_what_is_freed_or_refused_by_name(void **state)
{
    (void)state;
    Attnd__Identity identity = ATTND__IDENTITY__INIT;
    Attnd__Content content = ATTND__CONTENT__INIT;
    Attnd__ExportReply of = ATTND__EXPORT_REPLY__INIT;
    begin(64);
    append(1, 0, 90);
    append(1, 90, 1);
    const Attnd__ExportReply *x = look(1);
    assert_int_equal(x->freed_first, 1);
    assert_int_equal(x->freed_past, 8);
    content = *x->content; /* replies come and go */
    content.identity = NULL;
    if (x->content->identity != NULL)
        content.identity = &identity;
    of.layout = x->layout;
    of.content = &content;

    assert_int_equal(rig_open_seq(&r, 2), ATTN_OK);
    append(2, 0, RIG_BLOCK_TOKENS);
    uint32_t len = 8 * RIG_BLOCK_TOKENS, before = (uint32_t)n_used();
    rig_assert_says(free_to(2, 0, 8, len, &of, 8), ATTN_EINVAL, "pool windows keeps 1");
    rig_assert_says(free_to(2, 1, 1, RIG_BLOCK_TOKENS, &of, 1), ATTN_EINVAL, "from 1 to 1");
    rig_assert_says(free_to(2, 1, 0, RIG_BLOCK_TOKENS, &of, 0), ATTN_EINVAL, "from 1 to 0");
    rig_assert_says(free_to(2, 1, 8, len, &of, 7), ATTN_EINVAL, "import.first_block is 7");
    rig_assert_says(free_to(2, 1, 8, len - 1, &of, 8), ATTN_EINVAL, "import.layer_len[0] is 63");
    rig_assert_says(free_to(2, 1, UINT32_MAX / 8, UINT32_MAX / 8 * 8, &of, UINT32_MAX / 8),
                    ATTN_EINVAL, "at most");
    content.attention++;
    rig_assert_says(free_to(2, 1, 8, len, &of, 8), ATTN_EINVAL, "attention is ");
    content.attention--;
    assert_int_equal(n_used(), before);
    assert_int_equal(look(2)->freed_past, 0);
    assert_int_equal(look(2)->layer_len[0], RIG_BLOCK_TOKENS);

    assert_int_equal(free_to(2, 1, 8, len, &of, 8)->status, ATTN_OK);
    assert_int_equal(free_to(2, 1, 8, len, &of, 8)->status, ATTN_OK); /* again */
    assert_int_equal(n_used(), before);
    assert_int_equal(look(2)->freed_past, 8);
    assert_int_equal(look(2)->layer_len[RIG_LAYERS - 1], len);
    uint64_t id = rig_send_item(&r, 2, 0, len, 1); /* its window is not there yet */
    rig_run(&r);
    rig_assert_says(rig_answer(&r, id), ATTN_EINVAL, "sees tokens that are freed");
    rig_succeed(&r, NULL);
    assert_int_equal(look(2)->freed_past, 8);
    assert_int_equal(rig_truncate(&r, 2, RIG_BLOCK_TOKENS), ATTN_OK); /* to what is kept */
    append(2, RIG_BLOCK_TOKENS, 20);

    /* of what it has, more goes; a layer that ends inside is refused */
    append(2, RIG_BLOCK_TOKENS + 20, 20);
    assert_int_equal(rig_close_seq(&r, 1, rig_epoch(&r, 1)), ATTN_OK);
    before = (uint32_t)n_used();
    assert_int_equal(look(2)->freed_past, 0);
    rig_assert_says(free_to(2, 1, 7, 56, &of, 7), ATTN_EINVAL, "a layer ends between them");
    assert_int_equal(n_used(), before);
    assert_int_equal(free_to(2, 1, 3, 48, &of, 3)->status, ATTN_OK);
    assert_int_equal(n_used(), before - 2);
    append(2, 48, 10);
    rig_close(&r);
}

static void a_successor_goes_on_with_what_is_left(void **state)
{
    (void)state;
    begin(HELD);
    for (uint32_t pos = 0; pos < 100; pos++)
        append(1, pos, 1);
    rig_succeed(&r, NULL);
    assert_true(n_used() <= HELD);
    for (uint32_t pos = 100; pos < 140; pos++)
        append(1, pos, 1);
    rig_close(&r);
}

static void one_layer_without_a_window_keeps_everything(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
    append(1, 0, 90);
    append(1, 90, 1);
    assert_int_equal(n_used(), 12);
    assert_int_equal(rig_truncate(&r, 1, 5), ATTN_OK);
    rig_close(&r);
}

/* The reply to a query at pos behind n_keys tokens of sequence 1, which is the part from key_base
 * on. */
static const Attnd__Reply *attend_behind(uint32_t key_base, uint32_t pos, uint32_t n_keys)
{
    static const uint64_t seq = 1;
    const uint32_t n = 1;
    struct rig_step s = {.flags = WIRE_STEP_ATTEND | WIRE_STEP_FULL | WIRE_STEP_PART,
                         .n_items = 1,
                         .seq = &seq,
                         .pos = &pos,
                         .n_tokens = &n,
                         .key_base = &key_base,
                         .n_keys = &n_keys};
    uint64_t id = rig_send_step(&r, &s);
    rig_run(&r);
    return rig_answer(&r, id);
}

static void queries_behind_a_part_see_what_their_windows_reach(void **state)
{
    (void)state;
    begin(64);
    append(1, 0, 90);
    append(1, 90, 1); /* frees what no later query of the part sees */
    const uint32_t far = 1000000; /* more than a sequence may have */
    assert_int_equal(attend_behind(SINKS - 1, far, 91)->status, ATTN_OK);
    const struct rig_item *d = &r.backend.items[r.backend.n_items - 1];
    assert_int_equal(d->flags, BACKEND_ATTEND | BACKEND_FULL);
    assert_int_equal(d->pos + d->n_tokens, 91);
    assert_int_equal(d->pos + d->ahead, far);
    assert_int_equal(d->key_base, SINKS - 1);
    assert_int_equal(r.engine->batches[0].n_visible, 1); /* the last sink token */
    assert_int_equal(attend_behind(0, 92, 91)->status, ATTN_OK);
    assert_int_equal(r.engine->batches[0].n_visible, SINKS + WINDOW - 2);
    rig_assert_says(attend_behind(0, 93, 92), ATTN_EINVAL, "n_keys is 92, layer 0 of the part has");
    rig_assert_says(attend_behind(0, 40, 40), ATTN_EINVAL, "sees tokens that are freed");
    rig_close(&r);
}

static void lack_parts(struct rig *x)
{
    x->backend.lacks_parts = true;
}

static void a_backend_without_parts_refuses_those_that_need_it_by_name(void **state)
{
    (void)state;
    rig_open(&r, lack_parts);
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
    append(1, 0, 9);
    assert_int_equal(attend_behind(77, 20, 9)->status, ATTN_OK); /* sees all, wherever it is */
    assert_int_equal(rig_close_seq(&r, 1, rig_epoch(&r, 1)), ATTN_OK);
    r.pool = rig_pool_of_windows(&r, "windows", 16, WINDOW, SINKS);
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
    append(1, 0, 9);
    rig_assert_says(attend_behind(77, 20, 9), ATTN_ENOTSUP,
                    "step.key_base: layer 0 has a window (window_tokens), and the backend of pool "
                    "windows has no parts");
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(queries_behind_a_part_see_what_their_windows_reach),
        cmocka_unit_test(a_backend_without_parts_refuses_those_that_need_it_by_name),
        cmocka_unit_test(a_sequence_of_any_length_holds_its_window_and_a_block),
        cmocka_unit_test(the_layer_that_is_furthest_back_keeps_its_blocks),
        cmocka_unit_test(what_would_see_freed_tokens_is_refused_by_name),
        cmocka_unit_test(a_sequence_is_made_with_what_is_freed_or_refused_by_name),
        cmocka_unit_test(a_successor_goes_on_with_what_is_left),
        cmocka_unit_test(one_layer_without_a_window_keeps_everything),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
