/* test_engine_resize.c: pools get fewer blocks and more while steps of theirs wait and are on the
 * device, which says what it was told of tables; and what fails on the way, and comes twice. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/engine/core/pool_table.h"
#include "tests/daemon/engine/engine_rig.h"

enum { N_BLOCKS = 64, N_IDS = 5 * RIG_BLOCK_TOKENS };

static struct rig r;

static uint64_t send_resize(const char *name, uint32_t n_blocks)
{
    Attnd__PoolResize b = ATTND__POOL_RESIZE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.name = (char *)(uintptr_t)name;
    b.n_blocks = n_blocks;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_POOL_RESIZE;
    h.pool_resize = &b;
    return rig_send(&r, &h, NULL, 0);
}

static const Attnd__Reply *resize(const char *name, uint32_t n_blocks)
{
    uint64_t id = send_resize(name, n_blocks);
    rig_run(&r);
    assert_int_equal(kv_check(r.kv), ATTN_OK);
    return rig_answer(&r, id);
}

static void must_resize(const char *name, uint32_t n_blocks)
{
    const Attnd__Reply *reply = resize(name, n_blocks);
    if (reply->status != ATTN_OK)
        fail_msg("%u blocks: %s", n_blocks, reply->message);
    assert_int_equal(reply->pool->spec->n_blocks, n_blocks);
}

static uint32_t n_blocks_of(const char *name)
{
    return pool_find(r.engine, NULL, name)->config.n_blocks;
}

static void append(uint64_t seq, uint32_t pos, uint32_t n)
{
    for (uint32_t at = pos, part; at < pos + n; at += part) {
        part = pos + n - at < 16 ? pos + n - at : 16;
        for (uint32_t l = 0; l < RIG_LAYERS; l++)
            assert_int_equal(rig_item(&r, seq, l, at, part), ATTN_OK);
    }
}

/* Two sequences, the second behind the blocks of one that is gone. */
static void begin(void (*tweak)(struct rig *rig))
{
    rig_open(&r, tweak);
    r.pool = rig_pool(&r, "q", N_BLOCKS);
    for (uint64_t seq = 1; seq <= 3; seq++)
        assert_int_equal(rig_open_seq(&r, seq), ATTN_OK);
    append(1, 0, 20 * RIG_BLOCK_TOKENS);
    append(2, 0, 6 * RIG_BLOCK_TOKENS);
    append(3, 0, 3 * RIG_BLOCK_TOKENS);
    assert_int_equal(rig_close_seq(&r, 1, rig_epoch(&r, 1)), ATTN_OK);
}

static void end(void)
{
    assert_false(r.backend.has_conflict || r.backend.has_patch_conflict ||
                 r.backend.has_table_conflict);
    rig_close(&r);
}

static void what_is_on_the_device_is_waited_for_and_goes_on(void **state)
{
    (void)state;
    begin(NULL);
    r.backend.batch_ns = 3000000;
    uint64_t step[2], last[2];
    for (uint64_t i = 0; i < 2; i++)
        step[i] = rig_send_item(&r, 2 + i, 0, i == 0 ? 48 : 24, 5);
    engine_turn(r.engine, 0); /* they are on the device */
    assert_true(r.backend.n_in_flight > 0);
    uint64_t id = send_resize("q", 12);
    for (uint64_t i = 0; i < 2; i++)
        last[i] = rig_send_item(&r, 2 + i, 1, i == 0 ? 48 : 24, 5);
    rig_run(&r);
    while (rig_reply(&r, last[0]) == NULL || rig_reply(&r, last[1]) == NULL) {
        rig_now_ns += 1000000;
        rig_run(&r);
    }
    assert_int_equal(rig_answer(&r, id)->status, ATTN_OK);
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(rig_answer(&r, step[i])->status, ATTN_OK);
        assert_int_equal(rig_answer(&r, last[i])->status, ATTN_OK);
    }
    assert_true(r.backend.n_copies > 0);
    for (uint32_t i = 0; i < r.backend.n_copies; i++)
        assert_true(r.backend.copies[i].src >= 12 && r.backend.copies[i].dst < 12);
    assert_int_equal(n_blocks_of("q"), 12);
    assert_int_equal(kv_check(r.kv), ATTN_OK);
    r.backend.batch_ns = 0;
    must_resize("q", N_BLOCKS);
    append(2, 48, 100);
    end();
}

static void a_copy_that_comes_late_changes_nothing(void **state)
{
    (void)state;
    begin(NULL);
    r.keeps_sent = true;
    uint64_t first = send_resize("q", 20), second;
    rig_run(&r);
    second = send_resize("q", 40);
    rig_run(&r);
    assert_int_equal(rig_answer(&r, second)->pool->spec->n_blocks, 40);
    rig_forget(&r);
    rig_resend(&r, first);
    rig_run(&r);
    assert_int_equal(rig_answer(&r, first)->status, ATTN_OK);
    assert_int_equal(rig_answer(&r, first)->pool->spec->n_blocks, 40);
    assert_int_equal(n_blocks_of("q"), 40);
    struct engine_kept kept = rig_succeed(&r, NULL);
    assert_int_equal(kept.n_dropped, 0);
    assert_int_equal(n_blocks_of("q"), 40);
    rig_resend(&r, first);
    rig_run(&r);
    assert_int_equal(n_blocks_of("q"), 40);
    append(2, 48, 30);
    end();
}

static void a_device_that_does_not_copy_leaves_the_pool_as_it_was(void **state)
{
    (void)state;
    begin(NULL);
    r.backend.fail_submit = ATTN_ENOMEM;
    rig_assert_says(resize("q", 12), ATTN_EINTERNAL, "the device refused to copy blocks");
    assert_int_equal(n_blocks_of("q"), N_BLOCKS);
    r.backend.fail_batch = ATTN_EINTERNAL;
    rig_assert_says(resize("q", 12), ATTN_EDEVICE, "the device failed to copy blocks");
    assert_int_equal(n_blocks_of("q"), N_BLOCKS);
    append(2, 48, 30);
    must_resize("q", 14);
    r.backend.fail_resize = ATTN_ENOMEM;
    rig_assert_says(resize("q", 20), ATTN_ENOMEM, "the fake backend was told to fail");
    assert_int_equal(n_blocks_of("q"), 14);
    r.backend.fail_resize = ATTN_OK;
    must_resize("q", 20);
    append(3, 24, 30);
    end();
}

static void a_pool_behind_is_in_the_way(void **state)
{
    char says[96];
    (void)state;
    begin(NULL);
    must_resize("q", 20);
    rig_pool(&r, "between", 30);
    snprintf(says, sizeof says, "n_blocks is 64, pool \"q\" has room for 20 where it is");
    rig_assert_says(resize("q", N_BLOCKS), ATTN_ENOMEM, says);
    must_resize("between", 44);
    rig_assert_says(resize("between", 45), ATTN_OK, "");
    end();
}

/* Blocks that its window has left behind are named by the table, and have no owner. */
static void a_sequence_whose_window_has_moved_on_goes_on(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    r.pool = rig_pool_of_windows(&r, "windows", N_BLOCKS, 16, 4);
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
    for (uint32_t pos = 0; pos < 40 * RIG_BLOCK_TOKENS; pos += 16)
        append(1, pos, 16);
    must_resize("windows", 8);
    for (uint32_t pos = 40 * RIG_BLOCK_TOKENS; pos < 80 * RIG_BLOCK_TOKENS; pos += 16)
        append(1, pos, 16);
    struct engine_kept kept = rig_succeed(&r, NULL);
    assert_int_equal(kept.n_dropped, 0);
    append(1, 80 * RIG_BLOCK_TOKENS, 16);
    must_resize("windows", 20);
    append(1, 82 * RIG_BLOCK_TOKENS, 16);
    end();
}

static void with_host(struct rig *rig)
{
    rig->cfg.host_memory_bytes = 4 << 20;
}

static uint32_t run_prompt(uint64_t name, uint32_t prompt)
{
    uint32_t ids[N_IDS];
    for (uint32_t i = 0; i < N_IDS; i++)
        ids[i] = prompt * 1000003u + i;
    uint64_t id = rig_send_open_with(&r, name, &(struct kv_tokens){.ids = ids, .n = N_IDS});
    rig_run(&r);
    assert_int_equal(rig_answer(&r, id)->status, ATTN_OK);
    uint32_t n = rig_answer(&r, id)->seq->cached_tokens;
    for (uint32_t l = 0; l < RIG_LAYERS; l++)
        assert_int_equal(rig_item(&r, name, l, n, N_IDS - n), ATTN_OK);
    assert_int_equal(rig_close_seq(&r, name, rig_epoch(&r, name)), ATTN_OK);
    return n;
}

static void what_makes_way_goes_to_host_memory_and_comes_back(void **state)
{
    (void)state;
    rig_open(&r, with_host);
    r.pool = rig_pool(&r, "q", N_BLOCKS);
    for (uint32_t prompt = 0; prompt < 6; prompt++)
        assert_int_equal(run_prompt(100 + prompt, prompt), 0);
    must_resize("q", 7);
    for (uint32_t prompt = 0; prompt < 6; prompt++)
        assert_int_equal(run_prompt(200 + prompt, prompt), N_IDS - RIG_BLOCK_TOKENS);
    must_resize("q", N_BLOCKS);
    for (uint32_t prompt = 0; prompt < 6; prompt++)
        assert_int_equal(run_prompt(300 + prompt, prompt), N_IDS - RIG_BLOCK_TOKENS);
    end();
}

static void with_second(struct rig *rig)
{
    rig->has_second = true;
}

static uint32_t n_blocks_there(void)
{
    const struct pool *p = pool_find(r.second, NULL, "q");
    return p->config.n_blocks;
}

static void all_cards_do_it_or_none(void **state)
{
    (void)state;
    rig_open(&r, with_second);
    r.pool = rig_pool(&r, "q", N_BLOCKS);
    assert_int_equal(n_blocks_there(), N_BLOCKS);
    must_resize("q", 30);
    assert_int_equal(n_blocks_there(), 30);
    r.second_backend.fail_resize = ATTN_ENOMEM;
    rig_assert_says(resize("q", 40), ATTN_ENOMEM, "the fake backend was told to fail");
    assert_int_equal(n_blocks_of("q"), 30);
    assert_int_equal(n_blocks_there(), 30);
    r.second_backend.fail_resize = ATTN_OK;
    must_resize("q", 40);
    assert_int_equal(n_blocks_there(), 40);
    end();
}

static void all_shards_of_a_split_pool_do_it_or_none(void **state)
{
    (void)state;
    rig_open(&r, with_second);
    r.pool = rig_pool_of_split(&r, "q", 8, ATTND__SPLIT__SPLIT_HEADS);
    uint64_t bytes = r.second_backend.used_bytes;
    must_resize("q", 4);
    assert_int_equal(n_blocks_there(), 4);
    assert_true(r.second_backend.used_bytes < bytes);
    must_resize("q", 12);
    assert_int_equal(n_blocks_there(), 12);
    bytes = r.second_backend.used_bytes;

    r.second_backend.fail_resize = ATTN_ENOMEM;
    rig_assert_says(resize("q", 20), ATTN_ENOMEM, "card 1: the fake backend was told to fail");
    r.second_backend.fail_resize = ATTN_OK;
    assert_int_equal(n_blocks_of("q"), 12);
    assert_int_equal(n_blocks_there(), 12);
    r.backend.fail_resize = ATTN_ENOMEM; /* the other has done it by then */
    rig_assert_says(resize("q", 20), ATTN_ENOMEM, "card 0: the fake backend was told to fail");
    r.backend.fail_resize = ATTN_OK;
    assert_int_equal(n_blocks_of("q"), 12);
    assert_int_equal(n_blocks_there(), 12);
    assert_int_equal(r.second_backend.used_bytes, bytes);
    rig_assert_says(resize("q", 1u << 28), ATTN_ENOMEM, "n_blocks is 268435456, pool");

    r.second_backend.fail_resize = ATTN_EDEVICE; /* it only keeps its memory */
    must_resize("q", 5);
    assert_int_equal(n_blocks_there(), 12);
    r.second_backend.fail_resize = ATTN_OK;
    must_resize("q", 9);
    assert_int_equal(n_blocks_there(), 9);
    end();
}

/* --- a kill between two cards ----------------------------------------------------------------- */

static struct kv *killed_of(const struct rig *rig, uint32_t card)
{
    return card == 0 ? rig->fixture.kv : rig->second_fixture.kv;
}

static uint32_t killed_size[2]; /* of pool "q" in each card's cache when the process dies */

/* As far as one card's cache goes, with nothing in use that must move. */
static void set_sizes(struct rig *rig)
{
    for (uint32_t card = 0; card < 2; card++) {
        struct kv *kv = killed_of(rig, card);
        struct kv_pool_spec spec;
        struct kv_shrink s;
        kv_pool_id pool;
        uint32_t n_free;
        assert_int_equal(kv_pool_find(kv, 0, "q", &pool), ATTN_OK);
        assert_int_equal(kv_pool_info(kv, pool, &spec, &n_free), ATTN_OK);
        if (killed_size[card] > spec.n_blocks)
            assert_int_equal(kv_pool_grow(kv, pool, killed_size[card]), ATTN_OK);
        if (killed_size[card] >= spec.n_blocks || killed_size[card] == 0)
            continue;
        assert_int_equal(kv_pool_shrink_begin(kv, pool, killed_size[card], &s), ATTN_OK);
        kv_pool_shrink_end(kv, &s);
        kv_shrink_fini(&s);
    }
}

static void assert_common(uint32_t n_blocks)
{
    assert_int_equal(n_blocks_of("q"), n_blocks);
    assert_int_equal(n_blocks_there(), n_blocks);
    assert_int_equal(kv_check(r.fixture.kv), ATTN_OK);
    assert_int_equal(kv_check(r.second_fixture.kv), ATTN_OK);
}

static void a_kill_between_cards_leaves_the_primarys_size(void **state)
{
    (void)state;
    static const uint32_t sizes[] = {N_BLOCKS, 40, 80};
    for (uint32_t a = 0; a < 3; a++)
        for (uint32_t b = 0; b < 3; b++) {
            rig_open(&r, with_second);
            r.pool = rig_pool(&r, "q", N_BLOCKS);
            killed_size[0] = sizes[a];
            killed_size[1] = sizes[b];
            rig_succeed(&r, set_sizes);
            assert_common(sizes[a]);
            must_resize("q", sizes[b]); /* the request that was not answered */
            assert_common(sizes[b]);
            end();
        }
    for (uint32_t a = 0; a < 3; a++) {
        rig_open(&r, with_second);
        r.pool = rig_pool_of_split(&r, "q", N_BLOCKS, ATTND__SPLIT__SPLIT_HEADS);
        must_resize("q", 50);
        killed_size[0] = sizes[a];
        killed_size[1] = 0; /* its cache has no blocks of it */
        rig_succeed(&r, set_sizes);
        assert_common(sizes[a]);
        must_resize("q", 30);
        assert_common(30);
        rig_succeed(&r, NULL);
        assert_common(30);
        end();
    }
}

/* The other card can't: it has too many blocks in use, or no memory. */
static void a_size_that_some_card_cannot_have_is_given_up(void **state)
{
    (void)state;
    struct kv_stats there;
    kv_seq_id id;
    rig_open(&r, with_second);
    r.pool = rig_pool(&r, "q", N_BLOCKS);
    for (uint64_t seq = 1; seq <= 6; seq++) {
        assert_int_equal(rig_open_seq(&r, seq), ATTN_OK);
        append(seq, 0, 10 * RIG_BLOCK_TOKENS);
    }
    for (uint64_t seq = 1; seq <= 6; seq++)
        if (kv_seq_find(r.kv, 0, seq, &id) == ATTN_OK)
            assert_int_equal(rig_close_seq(&r, seq, rig_epoch(&r, seq)), ATTN_OK);
    kv_stats_read(r.second_fixture.kv, &there);
    assert_true(there.blocks_used >= 10);
    killed_size[0] = (uint32_t)there.blocks_used - 1;
    killed_size[1] = N_BLOCKS;
    rig_succeed(&r, set_sizes);
    assert_common(N_BLOCKS);

    killed_size[0] = 80;
    r.second_backend.fail_resize = ATTN_ENOMEM;
    rig_succeed(&r, set_sizes);
    r.second_backend.fail_resize = ATTN_OK;
    assert_common(N_BLOCKS);
    end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_on_the_device_is_waited_for_and_goes_on),
        cmocka_unit_test(a_copy_that_comes_late_changes_nothing),
        cmocka_unit_test(a_device_that_does_not_copy_leaves_the_pool_as_it_was),
        cmocka_unit_test(a_pool_behind_is_in_the_way),
        cmocka_unit_test(a_sequence_whose_window_has_moved_on_goes_on),
        cmocka_unit_test(what_makes_way_goes_to_host_memory_and_comes_back),
        cmocka_unit_test(all_cards_do_it_or_none),
        cmocka_unit_test(all_shards_of_a_split_pool_do_it_or_none),
        cmocka_unit_test(a_kill_between_cards_leaves_the_primarys_size),
        cmocka_unit_test(a_size_that_some_card_cannot_have_is_given_up),
    };
    return cmocka_run_group_tests_name("engine_resize", tests, NULL, NULL);
}
