/* test_engine_idle.c: blocks of idle sequences make way for others and come back: who goes, who
 * waits, what is refused, and what a damaged block costs. The rig compares every patch and table
 * with the cache, and holds moves back until it is told to let them come.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/engine/core/pool_table.h"
#include "daemon/keeper/idle_memory.h"
#include "tests/daemon/engine/engine_rig.h"
#include "tests/random.h"

enum { N_BLOCKS = 64, T = RIG_BLOCK_TOKENS, PAGES = 2 * 4096 /* of a block */ };

static struct rig r;

static void with_idle(struct rig *rig)
{
    rig->cfg.idle_memory_bytes = 4 << 20; /* 512 blocks */
}

static struct kv_stats counts(void)
{
    struct kv_stats s;
    assert_int_equal(kv_check(r.kv), ATTN_OK);
    kv_stats_read(r.kv, &s);
    assert_int_equal(s.blocks_total, s.blocks_free + s.blocks_used + s.blocks_cached);
    return s;
}

/* Blocks of the sequence that are in idle memory; UINT32_MAX: it is not open. */
static uint32_t n_paged_out(uint64_t name)
{
    kv_seq_id id;
    return kv_seq_find(r.kv, 0, name, &id) == ATTN_OK ? kv_idle_n_paged_out(r.kv, id) : UINT32_MAX;
}

/* All layers of a sequence from token pos on. */
static attn_status grow(uint64_t name, uint32_t pos, uint32_t n)
{
    attn_status st = ATTN_OK;
    for (uint32_t l = 0; l < RIG_LAYERS && st == ATTN_OK; l++)
        st = rig_item(&r, name, l, pos, n);
    return st;
}

/* Opened, of so many blocks. */
static void begin(uint64_t name, uint32_t n_blocks)
{
    assert_int_equal(rig_open_seq(&r, name), ATTN_OK);
    for (uint32_t pos = 0; pos < n_blocks * T; pos += 8 * T) {
        uint32_t n = n_blocks * T - pos;
        assert_int_equal(grow(name, pos, n < 8 * T ? n : 8 * T), ATTN_OK);
    }
}

static attn_status end(uint64_t name)
{
    return rig_close_seq(&r, name, rig_epoch(&r, name));
}

static void the_one_used_longest_ago_goes_and_comes_back(void **state)
{
    (void)state;
    rig_open(&r, with_idle);
    for (uint64_t name = 1; name <= 4; name++)
        begin(name, 16);
    assert_int_equal(grow(1, 16 * T - 1, 1), ATTN_OK); /* again: 2 is the oldest now */
    begin(5, 4);
    assert_int_equal(n_paged_out(1), 0);
    assert_int_equal(n_paged_out(2), 8); /* a few more than needed */
    assert_int_equal(n_paged_out(3) + n_paged_out(4) + n_paged_out(5), 0);
    begin(6, 16);
    assert_int_equal(n_paged_out(2), 16);
    assert_int_equal(n_paged_out(3), 0 + counts().blocks_tiered - 16);
    assert_int_equal(grow(2, 16 * T, 1), ATTN_OK); /* whose batch was told its new table */
    assert_int_equal(n_paged_out(2), 0);
    assert_int_equal(rig_len(&r, 2, 0), 16 * T + 1);
    assert_true(stats.idle_out_bytes > 0 && stats.idle_in_bytes > 0 && stats.idle_waits > 0);
    assert_int_equal(stats.blocks_tiered, counts().blocks_tiered);
    assert_int_equal(counts().out_of_blocks, 0);
    rig_close(&r);
}

static void an_item_waits_for_its_blocks_and_its_batch_goes_without_it(void **state)
{
    (void)state;
    rig_open(&r, with_idle);
    begin(1, 32);
    begin(2, 32);
    begin(3, 16);
    assert_int_equal(n_paged_out(1), 16);
    r.backend.holds_moves = true;
    uint64_t waits = rig_send_item(&r, 1, 0, 32 * T, 1),
             goes = rig_send_item(&r, 3, 0, 16 * T - 1, 1);
    rig_run(&r);
    assert_null(rig_reply(&r, waits));
    assert_int_equal(rig_answer(&r, goes)->status, ATTN_OK);
    uint32_t n_rounds = 0;
    for (; rig_reply(&r, waits) == NULL; n_rounds++) {
        assert_true(r.backend.n_held_moves > 0);
        counts();
        rig_moves_come(&r);
        rig_run(&r);
    }
    assert_in_range(n_rounds, 2, 4); /* out of 2, into 1 */
    assert_int_equal(rig_answer(&r, waits)->status, ATTN_OK);
    assert_int_equal(n_paged_out(3), 0);
    rig_close(&r);
}

static void out_of_blocks_is_for_when_nothing_may_go(void **state)
{
    (void)state;
    rig_open(&r, with_idle);
    begin(1, 40);
    assert_int_equal(rig_open_seq(&r, 2), ATTN_OK);
    for (uint32_t i = 0; i < N_BLOCKS; i++)
        assert_int_equal(grow(2, i * T, T), ATTN_OK);
    assert_int_equal(n_paged_out(1), 40);
    assert_int_equal(rig_item(&r, 2, 0, N_BLOCKS * T, 1), ATTN_ENOBLOCKS); /* it is alone */
    assert_int_equal(grow(1, 40 * T, 1), ATTN_OK); /* then the other one goes */
    assert_int_equal(n_paged_out(1), 0);
    /* what others share stays */
    assert_int_equal(rig_fork(&r, 1, 3, 40 * T), ATTN_OK);
    assert_int_equal(grow(3, 40 * T, T), ATTN_OK);
    assert_int_equal(rig_item(&r, 2, 0, 0, 1), ATTN_ENOBLOCKS);
    assert_int_equal(end(3), ATTN_OK);
    assert_int_equal(rig_item(&r, 2, 0, 0, 1), ATTN_OK);
    rig_close(&r);
}

static void with_little(struct rig *rig)
{
    rig->cfg.idle_memory_bytes = 10 * PAGES; /* for 10 blocks */
}

static void when_idle_memory_is_full_nothing_goes(void **state)
{
    (void)state;
    rig_open(&r, with_little);
    begin(1, 32);
    begin(2, 32);
    begin(3, 10);
    assert_int_equal(counts().blocks_tiered, 10);
    assert_int_equal(rig_item(&r, 3, 0, 10 * T, 1), ATTN_ENOBLOCKS);
    assert_int_equal(end(1), ATTN_OK); /* its pages are free again */
    assert_int_equal(counts().blocks_tiered, 0);
    begin(4, 22);
    begin(5, 10);
    assert_int_equal(counts().blocks_tiered, 10);
    rig_close(&r);
}

static void requests_of_a_sequence_that_has_gone(void **state)
{
    (void)state;
    uint64_t adopted;
    rig_open(&r, with_idle);
    begin(1, 16);
    begin(2, 64); /* so that all of 1 goes */
    assert_int_equal(n_paged_out(1), 16);
    assert_int_equal(rig_truncate(&r, 1, 10 * T + 3), ATTN_OK); /* needs no block */
    assert_int_equal(n_paged_out(1), 11);
    adopted = rig_send_adopt(&r, 1);
    rig_run(&r);
    assert_int_equal(rig_answer(&r, adopted)->status, ATTN_OK);
    assert_int_equal(n_paged_out(1), 11);
    r.backend.holds_moves = true;
    uint64_t fork = rig_send_fork(&r, 1, 3), item = rig_send_item(&r, 1, 0, 10 * T + 3, 1);
    rig_run(&r);
    assert_null(rig_reply(&r, fork));
    while (rig_reply(&r, item) == NULL) {
        assert_true(r.backend.n_held_moves > 0);
        rig_moves_come(&r);
        rig_run(&r);
    }
    r.backend.holds_moves = false;
    assert_int_equal(rig_answer(&r, fork)->status, ATTN_OK);
    assert_int_equal(rig_answer(&r, item)->status, ATTN_OK);
    assert_int_equal(n_paged_out(1), 0);
    assert_int_equal(rig_len(&r, 3, 0), 10 * T + 3);
    assert_int_equal(end(3), ATTN_OK);
    assert_int_equal(grow(2, 64 * T - 1, 1), ATTN_OK);
    assert_true(n_paged_out(1) > 0);
    assert_int_equal(end(1), ATTN_OK);
    assert_int_equal(counts().blocks_tiered, 0);
    rig_close(&r);
}

static void what_is_closed_on_its_way_has_no_owner(void **state)
{
    (void)state;
    rig_open(&r, with_idle);
    begin(1, 32);
    begin(2, 32);
    assert_int_equal(rig_open_seq(&r, 3), ATTN_OK);
    r.backend.holds_moves = true;
    uint64_t item = rig_send_item(&r, 3, 0, 0, 2 * T);
    rig_run(&r);
    assert_int_equal(r.backend.n_held_moves, 1); /* out of 1 */
    assert_int_equal(end(1), ATTN_OK);
    begin(1, 2); /* another one of that name, most likely in the same row */
    counts();
    rig_moves_come(&r);
    rig_run(&r);
    assert_int_equal(rig_answer(&r, item)->status, ATTN_OK);
    assert_int_equal(counts().blocks_tiered, 0);
    r.backend.holds_moves = false;
    assert_int_equal(end(1), ATTN_OK);
    begin(4, 60);
    assert_true(n_paged_out(2) > 0);
    r.backend.holds_moves = true;
    uint64_t gone = rig_send_item(&r, 2, 0, 32 * T, 1);
    rig_run(&r);
    for (uint32_t i = 0; i < 4 && n_paged_out(2) == 32; i++) { /* until it comes */
        rig_moves_come(&r);
        rig_run(&r);
    }
    rig_now_ns += r.cfg.max_timeout_us * 1000 + 1;
    rig_run(&r);
    assert_int_equal(rig_answer(&r, gone)->status, ATTN_EDEADLINE);
    assert_int_equal(end(2), ATTN_OK);
    counts();
    r.backend.holds_moves = false;
    rig_moves_come(&r);
    rig_run(&r);
    assert_int_equal(n_paged_out(2), UINT32_MAX);
    rig_close(&r);
}

static void the_oldest_request_gets_on_though_all_wait(void **state)
{
    (void)state;
    uint64_t request[4];
    rig_open(&r, with_idle);
    for (uint64_t name = 1; name <= 4; name++)
        begin(name, 40); /* each of them is more than half of the pool */
    for (uint32_t round = 0; round < 5; round++) {
        for (uint32_t i = 0; i < 4; i++)
            request[i] = rig_send_item(&r, 1 + (i * 3 + round) % 4, round % RIG_LAYERS,
                                       40 * T + round / RIG_LAYERS, 1);
        rig_run(&r);
        for (uint32_t i = 0; i < 4; i++)
            rig_assert_says(rig_answer(&r, request[i]), ATTN_OK, "");
        counts();
    }
    uint64_t names[] = {1, 2, 3, 4}; /* and all in one step */
    uint32_t pos[] = {40 * T, 40 * T, 40 * T, 40 * T}, n[] = {T, T, T, T};
    uint64_t step =
        rig_send_step(&r, &(struct rig_step){.layer = 2,
                                             .flags = WIRE_STEP_APPEND | WIRE_STEP_ATTEND,
                                             .n_items = 4,
                                             .seq = names,
                                             .pos = pos,
                                             .n_tokens = n});
    rig_run(&r);
    assert_int_equal(rig_answer(&r, step)->status, ATTN_OK);
    assert_int_equal(counts().out_of_blocks, 0);
    rig_close(&r);
}

static uint8_t *place_of(uint32_t entry)
{
    return r.fixture.idle.base + (size_t)(entry & ~KV_PLACE) * KV_PAGE_BYTES;
}

static void a_damaged_block_costs_its_sequence_and_nothing_else(void **state)
{
    (void)state;
    rig_open(&r, with_idle);
    uint64_t block_bytes = pool_block_bytes(&r.engine->pools[0]);
    for (uint32_t what = 0; what < 4; what++) {
        uint64_t name = 10 + what * 10, n_damaged = stats.idle_damaged;
        kv_seq_id id;
        struct kv_seq_info info;
        begin(name, 16);
        begin(name + 1, 16);
        begin(name + 2, 48);
        assert_int_equal(n_paged_out(name), 16);
        assert_int_equal(kv_seq_find(r.kv, 0, name, &id), ATTN_OK);
        kv_seq_info(r.kv, id, &info);
        uint8_t *place = place_of(info.block_table[7]);
        if (what == 0)
            place[block_bytes / 3] ^= 4;
        else if (what == 1)
            place[block_bytes + 2] ^= 1; /* its checksum */
        else if (what == 2)
            place[block_bytes + 16] ^= 1; /* its owner */
        else /* another block of the same sequence's, all of it */
            memcpy(place, r.fixture.idle.base + (size_t)(info.block_table[3] & ~KV_PLACE) * PAGES,
                   PAGES);
        assert_int_equal(rig_item(&r, name, 0, 16 * T, 1), ATTN_ENOTFOUND);
        assert_int_equal(stats.idle_damaged, n_damaged + 1);
        assert_int_equal(n_paged_out(name), UINT32_MAX);
        assert_int_equal(grow(name + 1, 16 * T, 1), ATTN_OK);
        for (uint32_t i = 1; i < 3; i++)
            assert_int_equal(end(name + i), ATTN_OK);
        assert_int_equal(counts().blocks_tiered, 0);
    }
    rig_close(&r);
}

static void without_memory(struct rig *rig)
{
    idle_memory_close(&rig->fixture.idle);
    rig->fixture.idle = (struct idle_memory){0};
}

static void a_successor_serves_them_if_it_is_given_the_memory(void **state)
{
    (void)state;
    for (uint32_t is_given = 0; is_given < 2; is_given++) {
        rig_open(&r, with_idle);
        begin(1, 32);
        begin(2, 32);
        begin(3, 16);
        assert_int_equal(n_paged_out(1), 16);
        struct engine_kept kept = rig_succeed(&r, is_given ? NULL : without_memory);
        assert_int_equal(kept.n_dropped, is_given ? 0 : 1);
        assert_int_equal(kept.n_sequences, is_given ? 3 : 2);
        assert_int_equal(n_paged_out(1), is_given ? 16 : UINT32_MAX);
        if (is_given) {
            assert_int_equal(grow(1, 32 * T, 1), ATTN_OK);
            assert_true(n_paged_out(2) > 0); /* in the order of their rows */
        }
        assert_int_equal(grow(3, 16 * T, T), ATTN_OK);
        counts();
        rig_close(&r);
    }
}

static void moves_that_fail_lose_nothing(void **state)
{
    (void)state;
    rig_open(&r, with_idle);
    begin(1, 32);
    begin(2, 32);
    assert_int_equal(rig_open_seq(&r, 3), ATTN_OK);
    r.backend.holds_moves = true;
    r.backend.fail_read = ATTN_ENOMEM;
    uint64_t item = rig_send_item(&r, 3, 0, 0, 1);
    rig_run(&r);
    r.backend.fail_read = ATTN_OK;
    while (rig_reply(&r, item) == NULL) {
        rig_moves_come(&r);
        rig_run(&r);
    }
    assert_int_equal(rig_answer(&r, item)->status, ATTN_OK);
    assert_int_equal(n_paged_out(1), 8);
    r.backend.fail_write = ATTN_ENOMEM;
    item = rig_send_item(&r, 1, 0, 32 * T, 1);
    rig_run(&r);
    rig_moves_come(&r); /* out of 2 */
    rig_run(&r);
    r.backend.fail_write = ATTN_OK;
    while (rig_reply(&r, item) == NULL) {
        rig_moves_come(&r);
        rig_run(&r);
    }
    assert_int_equal(rig_answer(&r, item)->status, ATTN_OK);
    assert_int_equal(stats.idle_damaged, 0);
    rig_close(&r);
}

/* Sequences of twice the pool and more, steps, forks, truncations and closes by chance; moves come
 * when they please, and a successor takes over now and then. */
static void anything_by_turns(void **state)
{
    (void)state;
    enum { N = 12, MOST = 24 * T, ROUNDS = 4000 };
    uint64_t seed = 4711;
    uint32_t len[N] = {0}, n_ok = 0;
    bool is_open[N] = {0};
    rig_open(&r, with_idle);
    for (uint32_t i = 0; i < ROUNDS; i++) {
        uint64_t random = random_mixed(&seed);
        uint32_t k = (random >> 33) % N, what = (random >> 40) % 100;
        uint64_t name = 1 + k, request = 0;
        uint32_t n = 1 + (random >> 48) % (3 * T);
        r.backend.holds_moves = random >> 60 & 1;
        if (!is_open[k]) {
            assert_int_equal(rig_open_seq(&r, name), ATTN_OK);
            is_open[k] = true;
            len[k] = 0;
        } else if (what < 3 || len[k] + n > MOST) {
            request = rig_send_close(&r, name);
            is_open[k] = false;
        } else if (what < 10) {
            len[k] -= len[k] / 3;
            request = rig_send_truncate(&r, name, len[k]);
        } else if (what < 15 && !is_open[(k + 1) % N]) {
            request = rig_send_fork(&r, name, 1 + (k + 1) % N);
            is_open[(k + 1) % N] = true;
            len[(k + 1) % N] = len[k];
        } else if (what == 50) {
            r.backend.holds_moves = false;
            rig_moves_come(&r);
            rig_succeed(&r, NULL);
        } else {
            for (uint32_t l = 0; l + 1 < RIG_LAYERS; l++)
                rig_send_item(&r, name, l, len[k], n);
            request = rig_send_item(&r, name, RIG_LAYERS - 1, len[k], n);
            len[k] += n;
        }
        rig_run(&r);
        while (request != 0 && rig_reply(&r, request) == NULL) {
            assert_true(r.backend.n_held_moves > 0);
            rig_moves_come(&r);
            rig_run(&r);
        }
        if (request != 0) {
            assert_int_equal(rig_answer(&r, request)->status, ATTN_OK);
            n_ok++;
        }
        counts();
        rig_forget(&r);
    }
    r.backend.holds_moves = false;
    rig_moves_come(&r);
    rig_run(&r);
    for (uint32_t k = 0; k < N; k++)
        for (uint32_t l = 0; is_open[k] && l < RIG_LAYERS; l++)
            assert_int_equal(rig_len(&r, 1 + k, l), len[k]);
    assert_true(n_ok > ROUNDS / 2 && stats.idle_out_bytes > 1 << 20);
    assert_int_equal(stats.idle_damaged, 0);
    rig_close(&r);
}

/* Steps of several sequences, many of them outstanding, of which no more than one or two fit at a
 * time: all are answered, none for want of blocks. */
static void a_crowd_whose_requests_all_wait_gets_on(void **state)
{
    (void)state;
    enum { N = 10, STEPS = 6, MOST = 30 * T, ROUNDS = 300 };
    uint64_t seed = 99;
    uint32_t len[N] = {0};
    rig_open(&r, with_idle);
    for (uint32_t k = 0; k < N; k++)
        begin(1 + k, 20 + k % 3 * 5), len[k] = (20 + k % 3 * 5) * T;
    for (uint32_t i = 0; i < ROUNDS; i++) {
        uint64_t request[STEPS];
        for (uint32_t s = 0; s < STEPS; s++) { /* a layer each; RIG_LAYERS of them are a token's */
            uint64_t names[4];
            uint32_t pos[4], n[4];
            uint64_t random = random_mixed(&seed);
            uint32_t first = (random >> 33) % N, n_items = 1 + (random >> 40) % 4;
            for (uint32_t k = 0; k < n_items; k++) {
                uint32_t which = (first + k * 3) % N;
                names[k] = 1 + which;
                pos[k] = len[which] - 1; /* again: a retry takes no block, but needs all */
                n[k] = 1;
            }
            request[s] =
                rig_send_step(&r, &(struct rig_step){.layer = s % RIG_LAYERS,
                                                     .flags = WIRE_STEP_APPEND | WIRE_STEP_ATTEND,
                                                     .n_items = n_items,
                                                     .seq = names,
                                                     .pos = pos,
                                                     .n_tokens = n});
        }
        r.backend.holds_moves = i % 3 == 0;
        rig_run(&r);
        for (uint32_t s = 0; s < STEPS; s++) {
            while (rig_reply(&r, request[s]) == NULL) {
                assert_true(r.backend.n_held_moves > 0);
                rig_moves_come(&r);
                rig_run(&r);
            }
            rig_assert_says(rig_answer(&r, request[s]), ATTN_OK, "");
        }
        counts();
        rig_forget(&r);
        uint32_t k = i % N;
        if (len[k] + 5 <= MOST) {
            rig_moves_come(&r);
            r.backend.holds_moves = false;
            assert_int_equal(grow(1 + k, len[k], 5), ATTN_OK);
            len[k] += 5;
        }
    }
    assert_int_equal(counts().out_of_blocks, 0);
    rig_moves_come(&r);
    rig_run(&r);
    rig_close(&r);
}

static void with_both(struct rig *rig)
{
    with_idle(rig);
    rig->cfg.host_memory_bytes = 1 << 20;
}

/* Opens a sequence of a prompt of so many blocks and computes what is not cached; how much was. */
static uint32_t begin_with(uint64_t name, uint32_t prompt, uint32_t n_blocks)
{
    uint32_t ids[32 * T], n = n_blocks * T;
    for (uint32_t i = 0; i < n; i++)
        ids[i] = prompt * 1000003u + i * 2654435761u;
    uint64_t request = rig_send_open_with(&r, name, &(struct kv_tokens){.ids = ids, .n = n});
    rig_run(&r);
    const Attnd__Reply *reply = rig_answer(&r, request);
    assert_int_equal(reply->status, ATTN_OK);
    uint32_t n_cached = reply->seq->cached_tokens;
    for (uint32_t pos = n_cached; pos < n; pos += 8 * T)
        assert_int_equal(grow(name, pos, n - pos < 8 * T ? n - pos : 8 * T), ATTN_OK);
    return n_cached;
}

/* What is published of a sequence that goes is found no more until the sequence goes on; cached
 * blocks go before it, and others' tokens are never mixed up. */
static void sequences_of_known_tokens_go_too(void **state)
{
    (void)state;
    for (uint32_t tiers = 0; tiers < 2; tiers++) {
        rig_open(&r, tiers ? with_both : with_idle);
        assert_int_equal(begin_with(1, 1, 24), 0);
        assert_int_equal(begin_with(2, 2, 24), 0);
        assert_int_equal(begin_with(3, 3, 8), 0);
        assert_int_equal(end(3), ATTN_OK);
        assert_int_equal(counts().blocks_cached, 8);
        assert_int_equal(begin_with(4, 4, 16), 0);
        assert_int_equal(n_paged_out(1) + n_paged_out(2), 0); /* what was cached has gone */
        assert_int_equal(counts().blocks_published, 64);
        assert_int_equal(begin_with(5, 5, 24), 0);
        assert_int_equal(n_paged_out(1), 24);
        assert_int_equal(begin_with(6, 1, 24), 0); /* the same prompt: it is not there */
        assert_int_equal(end(6), ATTN_OK);
        assert_int_equal(end(5), ATTN_OK);
        assert_int_equal(grow(1, 24 * T, 1), ATTN_OK);
        assert_int_equal(n_paged_out(1), 0);
        assert_int_equal(begin_with(7, 1, 24), 23 * T); /* from this one's, or the closed one's */
        assert_int_equal(counts().out_of_blocks, 0);
        rig_close(&r);
    }
}

void *__real_calloc(size_t n, size_t size);
void *__wrap_calloc(size_t n, size_t size);
static uint32_t calls_left; /* 0: none fails */
void *__wrap_calloc(size_t n, size_t size)
{
    return calls_left > 0 && --calls_left == 0 ? NULL : __real_calloc(n, size);
}

static void when_memory_is_short_items_fail_and_nothing_is_lost(void **state)
{
    (void)state;
    uint32_t n_failed = 0;
    for (uint32_t call = 1; call < 6; call++) {
        rig_open(&r, with_idle);
        begin(1, 32);
        begin(2, 32);
        begin(3, 16);
        assert_int_equal(n_paged_out(1), 16);
        calls_left = call;
        uint64_t request = rig_send_item(&r, 1, 0, 32 * T, 1);
        rig_run(&r);
        attn_status st = (attn_status)rig_answer(&r, request)->status;
        calls_left = 0;
        assert_true(st == ATTN_OK || st == ATTN_ENOBLOCKS);
        n_failed += st != ATTN_OK;
        assert_int_equal(grow(1, 32 * T, 1), ATTN_OK);
        assert_int_equal(grow(2, 32 * T, 1), ATTN_OK);
        counts();
        rig_close(&r);
    }
    assert_true(n_failed >= 2); /* one out, one in */
}

enum { UID = 5000, QUOTA_BLOCKS = 10 };

static void with_quota(struct rig *rig)
{
    char path[64], why[256];
    snprintf(path, sizeof path, "/tmp/attnd_idle_%ld", (long)getpid());
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fchmod(fileno(f), 0600), 0);
    fprintf(f, "[t]\nusers = %d\nhost_bytes = %d\n", UID, QUOTA_BLOCKS * 4096 + 100);
    fclose(f);
    if (tenants_open(path, &rig->fixture.tenants, why, sizeof why) != ATTN_OK)
        fail_msg("%s", why);
    unlink(path);
    rig->principal = (struct principal){.kind = PRINCIPAL_USER, .uid = UID};
    with_idle(rig);
}

static void at_a_tenants_quota_its_sequences_stay(void **state)
{
    (void)state;
    rig_open(&r, with_quota);
    assert_int_equal(pool_block_bytes(&r.engine->pools[0]), 4096);
    begin(1, 32);
    begin(2, 32);
    begin(3, QUOTA_BLOCKS);
    assert_int_equal(counts().blocks_tiered, QUOTA_BLOCKS);
    assert_int_equal(rig_item(&r, 3, 0, QUOTA_BLOCKS * T, 1), ATTN_ENOBLOCKS);
    assert_int_equal(end(1), ATTN_OK); /* whose blocks were there */
    assert_int_equal(grow(3, QUOTA_BLOCKS * T, 1), ATTN_OK);
    r.epoch = 2; /* behind the one that was closed */
    begin(4, 64 - 32 - QUOTA_BLOCKS - 1 + QUOTA_BLOCKS);
    assert_int_equal(counts().blocks_tiered, QUOTA_BLOCKS);
    struct tenants *t = r.fixture.tenants;
    rig_close(&r);
    tenants_close(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_one_used_longest_ago_goes_and_comes_back),
        cmocka_unit_test(an_item_waits_for_its_blocks_and_its_batch_goes_without_it),
        cmocka_unit_test(out_of_blocks_is_for_when_nothing_may_go),
        cmocka_unit_test(when_idle_memory_is_full_nothing_goes),
        cmocka_unit_test(requests_of_a_sequence_that_has_gone),
        cmocka_unit_test(what_is_closed_on_its_way_has_no_owner),
        cmocka_unit_test(the_oldest_request_gets_on_though_all_wait),
        cmocka_unit_test(a_damaged_block_costs_its_sequence_and_nothing_else),
        cmocka_unit_test(a_successor_serves_them_if_it_is_given_the_memory),
        cmocka_unit_test(moves_that_fail_lose_nothing),
        cmocka_unit_test(anything_by_turns),
        cmocka_unit_test(sequences_of_known_tokens_go_too),
        cmocka_unit_test(when_memory_is_short_items_fail_and_nothing_is_lost),
        cmocka_unit_test(at_a_tenants_quota_its_sequences_stay),
        cmocka_unit_test(a_crowd_whose_requests_all_wait_gets_on),
    };
    return cmocka_run_group_tests_name("engine_idle", tests, NULL, NULL);
}
