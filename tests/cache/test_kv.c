/* test_kv.c: the cache's contract, one sentence a test. */
#define _GNU_SOURCE
#include "tests/cache/kv_test.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cache/siphash.h"

#define NAME 77u
#define TENANT 3u
#define OWNER 2u

static const struct kv_config config = {.max_pools = 3,
                                        .max_blocks = 64,
                                        .max_sequences = 8,
                                        .max_seq_blocks = 16,
                                        .max_layers = 3,
                                        .max_owners = 4};

struct fixture {
    struct kv *kv;
    kv_pool_id pool; /* 2 layers, blocks of 4, 12 blocks */
    struct test_fx t;
};

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    f->kv = test_kv_open(&config, -1);
    f->pool = test_pool(f->kv, "pool", 2, 4, 12);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    test_check(f->kv);
    kv_close(f->kv);
    free(f);
    return 0;
}

static kv_seq_id open_seq(struct fixture *f, uint64_t name)
{
    kv_seq_id seq = {UINT32_MAX};
    assert_status(f->kv, ATTN_OK, kv_seq_open(f->kv, TENANT, name, f->pool, OWNER, 1, &seq));
    return seq;
}

static void append(struct fixture *f, kv_seq_id seq, uint32_t layer, uint32_t pos, uint32_t n)
{
    assert_status(f->kv, ATTN_OK,
                  kv_append_reserve(f->kv, seq, layer, pos, n, test_fx_reset(&f->t)));
    kv_append_commit(f->kv, seq, layer, pos, n);
}

static void append_all(struct fixture *f, kv_seq_id seq, uint32_t pos, uint32_t n)
{
    append(f, seq, 0, pos, n);
    append(f, seq, 1, pos, n);
}

static struct kv_seq_info info_of(struct fixture *f, kv_seq_id seq)
{
    struct kv_seq_info i;
    kv_seq_info(f->kv, seq, &i);
    return i;
}

static struct kv_stats stats_of(struct fixture *f)
{
    struct kv_stats s;
    kv_stats_read(f->kv, &s);
    return s;
}

static struct kv_effects *fx_of(struct fixture *f)
{
    return test_fx_reset(&f->t);
}

static void siphash_gives_the_published_vectors(void **state)
{
    (void)state;
    uint64_t key[2] = {UINT64_C(0x0706050403020100), UINT64_C(0x0f0e0d0c0b0a0908)};
    uint8_t in[15];
    for (uint8_t i = 0; i < sizeof in; i++)
        in[i] = i;
    assert_true(siphash(key, in, 0) == UINT64_C(0x726fdb47dd0e0e31));
    assert_true(siphash(key, in, 15) == UINT64_C(0xa129ca6149be45e5));
}

static void config_out_of_range_is_refused_by_name(void **state)
{
    (void)state;
    struct kv *kv = (void *)&config;
    char why[256];
    struct kv_config c = config;
    c.max_layers = 0;
    assert_int_equal(kv_open(&c, -1, &kv, why, sizeof why), ATTN_EINVAL);
    assert_string_equal(why, "max_layers is 0, not in 1..4096");
    c = config;
    c.max_sequences = UINT32_MAX;
    assert_int_equal(kv_open(&c, -1, &kv, why, sizeof why), ATTN_EINVAL);
    assert_non_null(strstr(why, "max_sequences is 4294967295"));
    c.max_sequences = c.max_seq_blocks = 1u << 26;
    assert_int_equal(kv_open(&c, -1, &kv, why, sizeof why), ATTN_EINVAL);
    assert_non_null(strstr(why, "tables too large"));
    assert_ptr_equal(kv, &config);
}

static void a_pool_made_again_is_the_same_pool(void **state)
{
    struct fixture *f = *state;
    assert_int_equal(test_pool(f->kv, "pool", 2, 4, 12).index, f->pool.index);
    assert_int_equal(stats_of(f).pools, 1);
    struct kv_pool_spec s;
    uint32_t n_free;
    assert_int_equal(kv_pool_info(f->kv, f->pool, &s, &n_free), ATTN_OK);
    assert_string_equal(s.name, "pool");
    assert_int_equal(s.n_layers, 2);
    assert_int_equal(s.block_tokens, 4);
    assert_int_equal(s.n_blocks, 12);
    assert_int_equal(n_free, 12);
    assert_int_equal(s.spec_bytes, 4);
    assert_memory_equal(s.spec, "pool", 4);
    kv_pool_id found;
    assert_int_equal(kv_pool_find(f->kv, "pool", &found), ATTN_OK);
    assert_int_equal(found.index, f->pool.index);
    assert_status(f->kv, ATTN_ENOTFOUND, kv_pool_find(f->kv, "other", &found));
    assert_says(f->kv, "pool other");
    assert_int_equal(kv_pool_info(f->kv, (kv_pool_id){1}, &s, &n_free), ATTN_ENOTFOUND);
    assert_int_equal(kv_pool_info(f->kv, (kv_pool_id){99}, &s, &n_free), ATTN_ENOTFOUND);
}

static void a_pool_with_the_same_name_and_another_spec_is_refused_by_field(void **state)
{
    struct fixture *f = *state;
    kv_pool_id pool;
    const struct kv_pool_spec same = {.name = "pool",
                                      .n_layers = 2,
                                      .block_tokens = 4,
                                      .n_blocks = 12,
                                      .spec = (const uint8_t *)"pool",
                                      .spec_bytes = 4};
    struct kv_pool_spec s = same;
    s.n_layers = 3;
    assert_status(f->kv, ATTN_EEXIST, kv_pool_create(f->kv, &s, &pool));
    assert_says(f->kv, "n_layers 2, not 3");
    s = same;
    s.block_tokens = 8;
    assert_status(f->kv, ATTN_EEXIST, kv_pool_create(f->kv, &s, &pool));
    assert_says(f->kv, "block_tokens 4, not 8");
    s = same;
    s.n_blocks = 13;
    assert_status(f->kv, ATTN_EEXIST, kv_pool_create(f->kv, &s, &pool));
    assert_says(f->kv, "n_blocks 12, not 13");
    s = same;
    s.spec = (const uint8_t *)"pooL";
    assert_status(f->kv, ATTN_EEXIST, kv_pool_create(f->kv, &s, &pool));
    s.spec_bytes = 3;
    assert_status(f->kv, ATTN_EEXIST, kv_pool_create(f->kv, &s, &pool));
}

static void a_pool_that_does_not_fit_is_refused_by_field(void **state)
{
    struct fixture *f = *state;
    kv_pool_id pool;
    const struct kv_pool_spec good = {.name = "b", .n_layers = 1, .block_tokens = 4, .n_blocks = 1};
    struct kv_pool_spec s = good;
    s.name[0] = '\0';
    assert_status(f->kv, ATTN_EINVAL, kv_pool_create(f->kv, &s, &pool));
    memset(s.name, 'x', sizeof s.name);
    assert_status(f->kv, ATTN_EINVAL, kv_pool_create(f->kv, &s, &pool));
    s = good;
    s.n_layers = 4;
    assert_status(f->kv, ATTN_EINVAL, kv_pool_create(f->kv, &s, &pool));
    assert_says(f->kv, "n_layers is 4");
    s = good;
    s.block_tokens = 6;
    assert_status(f->kv, ATTN_EINVAL, kv_pool_create(f->kv, &s, &pool));
    assert_says(f->kv, "block_tokens is 6");
    s = good;
    s.n_blocks = 0;
    assert_status(f->kv, ATTN_EINVAL, kv_pool_create(f->kv, &s, &pool));
    s = good;
    s.spec_bytes = KV_SPEC_BYTES + 1;
    s.spec = (const uint8_t *)"";
    assert_status(f->kv, ATTN_EINVAL, kv_pool_create(f->kv, &s, &pool));
    s = good;
    s.n_blocks = 53;
    assert_status(f->kv, ATTN_ENOMEM, kv_pool_create(f->kv, &s, &pool));
    assert_says(f->kv, "n_blocks is 53, 52 are left");
    test_pool(f->kv, "b", 1, 4, 50);
    test_pool(f->kv, "c", 1, 4, 2);
    s = (struct kv_pool_spec){.name = "d", .n_layers = 1, .block_tokens = 4, .n_blocks = 1};
    assert_status(f->kv, ATTN_ENOMEM, kv_pool_create(f->kv, &s, &pool));
    assert_says(f->kv, "all 3 pools");
}

static void pools_give_out_ids_of_their_own(void **state)
{
    struct fixture *f = *state;
    kv_pool_id other = test_pool(f->kv, "other", 1, 4, 12);
    kv_seq_id a = open_seq(f, NAME), b;
    assert_status(f->kv, ATTN_OK, kv_seq_open(f->kv, TENANT, 1, other, OWNER, 1, &b));
    append(f, a, 0, 0, 4);
    append(f, b, 0, 0, 4);
    assert_int_equal(info_of(f, a).block_table[0], 0);
    assert_int_equal(info_of(f, b).block_table[0], 0);
    assert_int_equal(stats_of(f).blocks_used, 2);
    assert_int_equal(stats_of(f).blocks_shared, 0);
}

static void a_new_sequence_is_empty_and_found_by_tenant_and_name(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = open_seq(f, NAME), found = {99};
    assert_status(f->kv, ATTN_OK, kv_seq_find(f->kv, TENANT, NAME, &found));
    assert_int_equal(found.index, seq.index);
    struct kv_seq_info i = info_of(f, seq);
    assert_int_equal(i.name, NAME);
    assert_int_equal(i.tenant, TENANT);
    assert_int_equal(i.pool.index, f->pool.index);
    assert_int_equal(i.epoch, 1);
    assert_int_equal(i.owner, OWNER);
    assert_int_equal(i.n_blocks, 0);
    assert_int_equal(i.layer_len[0] + i.layer_len[1], 0);
    found.index = 99;
    assert_status(f->kv, ATTN_ENOTFOUND, kv_seq_find(f->kv, TENANT + 1, NAME, &found));
    assert_says(f->kv, "sequence 77 of tenant 4");
    assert_status(f->kv, ATTN_ENOTFOUND, kv_seq_find(f->kv, TENANT, NAME + 1, &found));
    assert_int_equal(found.index, 99);
}

static void an_open_repeated_while_empty_gives_the_same_sequence(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = open_seq(f, NAME), again = {99};
    assert_status(f->kv, ATTN_OK, kv_seq_open(f->kv, TENANT, NAME, f->pool, OWNER, 1, &again));
    assert_int_equal(again.index, seq.index);
    assert_int_equal(stats_of(f).opens, 1);
    assert_status(f->kv, ATTN_EEXIST, kv_seq_open(f->kv, TENANT, NAME, f->pool, OWNER, 2, &again));
    assert_says(f->kv, "sequence 77 of tenant 3");
    assert_status(f->kv, ATTN_EEXIST,
                  kv_seq_open(f->kv, TENANT, NAME, f->pool, OWNER + 1, 1, &again));
    append(f, seq, 1, 0, 1);
    assert_status(f->kv, ATTN_EEXIST, kv_seq_open(f->kv, TENANT, NAME, f->pool, OWNER, 1, &again));
}

static void opening_needs_a_pool_an_owner_and_a_free_record(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = {99};
    assert_status(f->kv, ATTN_ENOTFOUND,
                  kv_seq_open(f->kv, TENANT, 1, (kv_pool_id){2}, OWNER, 1, &seq));
    assert_status(f->kv, ATTN_EINVAL, kv_seq_open(f->kv, TENANT, 1, f->pool, 4, 1, &seq));
    assert_says(f->kv, "owner is 4, at most 3");
    for (uint64_t i = 0; i < config.max_sequences; i++)
        open_seq(f, i);
    assert_status(f->kv, ATTN_EOVERLOAD, kv_seq_open(f->kv, TENANT, NAME, f->pool, OWNER, 1, &seq));
    assert_says(f->kv, "all 8 sequences");
    assert_int_equal(seq.index, 99);
    assert_status(f->kv, ATTN_OK, kv_seq_find(f->kv, TENANT, 5, &seq));
    kv_seq_close(f->kv, seq);
    assert_int_equal(open_seq(f, NAME).index, seq.index);
}

static void appends_take_blocks_at_the_first_layer_that_needs_them(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = open_seq(f, NAME);
    struct kv_effects *fx = fx_of(f);
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, seq, 1, 0, 6, fx));
    assert_int_equal(fx->n_patches, 2);
    assert_int_equal(fx->n_copies, 0);
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(fx->patches[i].row, seq.index);
        assert_int_equal(fx->patches[i].index, i);
        assert_int_equal(fx->patches[i].block, info_of(f, seq).block_table[i]);
    }
    assert_int_equal(info_of(f, seq).layer_len[1], 0);
    kv_append_commit(f->kv, seq, 1, 0, 6);
    assert_int_equal(info_of(f, seq).layer_len[1], 6);
    assert_int_equal(info_of(f, seq).layer_len[0], 0);
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, seq, 0, 0, 6, fx_of(f)));
    assert_int_equal(f->t.fx.n_patches, 0);
    kv_append_commit(f->kv, seq, 0, 0, 6);
    assert_int_equal(stats_of(f).blocks_used, 2);
    assert_int_equal(stats_of(f).blocks_free, 10);
}

static void a_gap_is_refused_with_both_numbers(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = open_seq(f, NAME);
    append(f, seq, 0, 0, 5);
    assert_status(f->kv, ATTN_EINVAL, kv_append_reserve(f->kv, seq, 0, 7, 1, fx_of(f)));
    assert_says(f->kv, "sequence 77: pos is 7, layer 0 has 5 tokens");
    assert_status(f->kv, ATTN_EINVAL, kv_append_reserve(f->kv, seq, 1, 1, 1, fx_of(f)));
    assert_says(f->kv, "pos is 1, layer 1 has 0 tokens");
    assert_int_equal(f->t.fx.n_patches, 0);
}

static void a_retry_that_overlaps_the_end_is_counted_once(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = open_seq(f, NAME);
    append(f, seq, 0, 0, 5);
    append(f, seq, 0, 0, 5);
    assert_int_equal(info_of(f, seq).layer_len[0], 5);
    append(f, seq, 0, 3, 1);
    assert_int_equal(info_of(f, seq).layer_len[0], 5);
    append(f, seq, 0, 3, 6);
    assert_int_equal(info_of(f, seq).layer_len[0], 9);
    assert_int_equal(info_of(f, seq).n_blocks, 3);
}

static void bad_ranges_are_refused_by_field(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = open_seq(f, NAME);
    assert_status(f->kv, ATTN_EINVAL, kv_append_reserve(f->kv, seq, 2, 0, 1, fx_of(f)));
    assert_says(f->kv, "layer is 2, pool pool has 2");
    assert_status(f->kv, ATTN_EINVAL, kv_append_reserve(f->kv, seq, 0, 0, 0, fx_of(f)));
    assert_says(f->kv, "n_tokens is 0");
    assert_status(f->kv, ATTN_EINVAL, kv_append_reserve(f->kv, seq, 0, 0, 65, fx_of(f)));
    assert_says(f->kv, "pos 0 + n_tokens 65 is over 64");
    assert_status(f->kv, ATTN_EINVAL, kv_append_reserve(f->kv, seq, 0, 0, UINT32_MAX, fx_of(f)));
    assert_status(f->kv, ATTN_ENOTFOUND,
                  kv_append_reserve(f->kv, (kv_seq_id){7}, 0, 0, 1, fx_of(f)));
    assert_status(f->kv, ATTN_ENOTFOUND,
                  kv_append_reserve(f->kv, (kv_seq_id){UINT32_MAX}, 0, 0, 1, fx_of(f)));
}

static void out_of_blocks_changes_nothing(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = open_seq(f, NAME), other = open_seq(f, 1);
    append(f, seq, 0, 0, 40);
    append(f, other, 0, 0, 4);
    assert_status(f->kv, ATTN_ENOBLOCKS, kv_append_reserve(f->kv, other, 0, 4, 8, fx_of(f)));
    assert_says(f->kv, "sequence 1: needs 2 blocks, pool pool has 1 free");
    assert_int_equal(f->t.fx.n_patches, 0);
    assert_int_equal(info_of(f, other).n_blocks, 1);
    assert_int_equal(stats_of(f).out_of_blocks, 1);
    append(f, other, 0, 4, 4);
    assert_int_equal(stats_of(f).blocks_free, 0);
    kv_seq_close(f->kv, seq);
    assert_int_equal(stats_of(f).blocks_free, 10);
}

static void full_effects_refuse_the_append_and_change_nothing(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = open_seq(f, NAME);
    struct kv_effects *fx = fx_of(f);
    fx->patches_capacity = 1;
    assert_status(f->kv, ATTN_EOVERLOAD, kv_append_reserve(f->kv, seq, 0, 0, 5, fx));
    assert_int_equal(fx->n_patches, 0);
    assert_int_equal(stats_of(f).blocks_used, 0);
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, seq, 0, 0, 4, fx));
    kv_append_commit(f->kv, seq, 0, 0, 4);
}

static void cancel_gives_new_blocks_back_unless_another_append_uses_them(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = open_seq(f, NAME);
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, seq, 0, 0, 10, fx_of(f)));
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, seq, 1, 0, 5, fx_of(f)));
    assert_status(f->kv, ATTN_OK, kv_append_cancel(f->kv, seq, 0, 0, 10, fx_of(f)));
    assert_int_equal(info_of(f, seq).n_blocks, 3);
    kv_append_commit(f->kv, seq, 1, 0, 5);
    assert_int_equal(info_of(f, seq).n_blocks, 2);
    assert_int_equal(info_of(f, seq).layer_len[0], 0);
    assert_int_equal(info_of(f, seq).layer_len[1], 5);
    assert_int_equal(stats_of(f).blocks_used, 2);
}

static void a_commit_that_nobody_reserved_changes_nothing(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = open_seq(f, NAME);
    append(f, seq, 0, 0, 3);
    kv_append_commit(f->kv, seq, 0, 3, 1);
    assert_int_equal(info_of(f, seq).layer_len[0], 3);
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, seq, 0, 3, 1, fx_of(f)));
    kv_append_commit(f->kv, seq, 0, 3, 50); /* past what the table covers */
    assert_int_equal(info_of(f, seq).layer_len[0], 3);
    kv_append_commit(f->kv, (kv_seq_id){6}, 0, 0, 1);
    assert_status(f->kv, ATTN_OK, kv_append_cancel(f->kv, seq, 0, 0, 1, fx_of(f)));
}

/* A sequence of 10 tokens (blocks of 4) and a fork at len. */
static kv_seq_id fork_at(struct fixture *f, kv_seq_id *src, uint32_t len)
{
    kv_seq_id child = {99};
    *src = open_seq(f, NAME);
    append_all(f, *src, 0, 10);
    assert_status(f->kv, ATTN_OK,
                  kv_seq_fork(f->kv, *src, NAME + 1, len, OWNER + 1, 5, fx_of(f), &child));
    return child;
}

static void fork_shares_blocks_until_first_append(void **state)
{
    struct fixture *f = *state;
    kv_seq_id src, child = fork_at(f, &src, 6);
    struct kv_seq_info a = info_of(f, src), b = info_of(f, child);
    assert_int_equal(b.tenant, TENANT);
    assert_int_equal(b.owner, OWNER + 1);
    assert_int_equal(b.n_blocks, 2);
    assert_int_equal(b.layer_len[0], 6);
    assert_int_equal(b.layer_len[1], 6);
    assert_int_equal(f->t.fx.n_patches, 2);
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(b.block_table[i], a.block_table[i]);
        assert_int_equal(f->t.fx.patches[i].row, child.index);
        assert_int_equal(f->t.fx.patches[i].index, i);
        assert_int_equal(f->t.fx.patches[i].block, a.block_table[i]);
    }
    assert_int_equal(stats_of(f).blocks_shared, 2);
    assert_int_equal(stats_of(f).blocks_used, 3);

    uint32_t shared = b.block_table[1];
    assert_true(kv_append_copies(f->kv, child, 6, 1));
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, child, 0, 6, 1, fx_of(f)));
    assert_int_equal(f->t.fx.n_copies, 1);
    assert_int_equal(f->t.copies[0].src, shared);
    assert_int_equal(f->t.copies[0].dst, b.block_table[1]);
    assert_int_not_equal(b.block_table[1], shared);
    assert_int_equal(a.block_table[1], shared);
    assert_int_equal(f->t.fx.n_patches, 1);
    assert_int_equal(f->t.patches[0].block, b.block_table[1]);
    assert_true(kv_seq_has_pending_copy(f->kv, child));
    assert_false(kv_seq_has_pending_copy(f->kv, src));
    kv_append_commit(f->kv, child, 0, 6, 1);
    assert_false(kv_seq_has_pending_copy(f->kv, child));
    assert_int_equal(stats_of(f).blocks_shared, 1);
    assert_int_equal(stats_of(f).blocks_used, 4);
    assert_false(kv_append_copies(f->kv, child, 7, 1));
    assert_false(kv_append_copies(f->kv, src, 6, 1));
    assert_int_equal(stats_of(f).copies, 1);
}

static void a_cancelled_copy_brings_the_shared_block_back(void **state)
{
    struct fixture *f = *state;
    kv_seq_id src, child = fork_at(f, &src, 9);
    struct kv_seq_info b = info_of(f, child);
    uint32_t before[3];
    memcpy(before, b.block_table, sizeof before);
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, child, 1, 2, 8, fx_of(f)));
    assert_int_equal(f->t.fx.n_copies, 3);
    struct kv_effects *fx = fx_of(f);
    fx->patches_capacity = 2;
    assert_status(f->kv, ATTN_EOVERLOAD, kv_append_cancel(f->kv, child, 1, 2, 8, fx));
    assert_true(kv_seq_has_pending_copy(f->kv, child));
    assert_status(f->kv, ATTN_OK, kv_append_cancel(f->kv, child, 1, 2, 8, fx_of(f)));
    assert_int_equal(f->t.fx.n_patches, 3);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(f->t.patches[i].block, before[f->t.patches[i].index]);
        assert_int_equal(b.block_table[i], before[i]);
    }
    assert_int_equal(stats_of(f).blocks_used, 3);
    assert_int_equal(stats_of(f).blocks_shared, 3);
}

static void a_copy_is_alone_on_its_sequence(void **state)
{
    struct fixture *f = *state;
    kv_seq_id src, child = fork_at(f, &src, 8), other;
    /* In place (a new block), so two may be outstanding; a copy must wait for both. */
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, child, 0, 8, 1, fx_of(f)));
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, child, 1, 8, 1, fx_of(f)));
    assert_status(f->kv, ATTN_EOVERLOAD, kv_append_reserve(f->kv, child, 0, 7, 1, fx_of(f)));
    assert_says(f->kv, "1 copies wait for 2 appends");
    assert_status(f->kv, ATTN_EOVERLOAD, kv_seq_truncate(f->kv, child, 8));
    kv_append_commit(f->kv, child, 0, 8, 1);
    kv_append_commit(f->kv, child, 1, 8, 1);
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, child, 0, 7, 1, fx_of(f)));
    assert_status(f->kv, ATTN_EOVERLOAD, kv_append_reserve(f->kv, child, 1, 9, 1, fx_of(f)));
    assert_says(f->kv, "a copy is pending");
    assert_status(f->kv, ATTN_EOVERLOAD,
                  kv_seq_fork(f->kv, child, 5, 4, OWNER, 1, fx_of(f), &other));
    assert_status(f->kv, ATTN_EOVERLOAD, kv_seq_truncate(f->kv, child, 4));
    kv_append_commit(f->kv, child, 0, 7, 1);
}

static void closing_with_a_copy_pending_lets_go_of_both_blocks(void **state)
{
    struct fixture *f = *state;
    kv_seq_id src, child = fork_at(f, &src, 6);
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, child, 0, 6, 1, fx_of(f)));
    assert_int_equal(stats_of(f).blocks_used, 4);
    kv_seq_close(f->kv, child);
    assert_int_equal(stats_of(f).blocks_used, 3);
    assert_int_equal(stats_of(f).blocks_shared, 0);
    test_check(f->kv);
    kv_seq_close(f->kv, src);
    assert_int_equal(stats_of(f).blocks_used, 0);
}

static void a_full_journal_refuses_the_copy(void **state)
{
    struct fixture *f = *state;
    /* The journal has room for one copy a sequence and one whole row: 8 + 16. */
    kv_pool_id big = test_pool(f->kv, "big", 1, 4, 52);
    kv_seq_id src, a, b;
    assert_status(f->kv, ATTN_OK, kv_seq_open(f->kv, TENANT, 0, big, OWNER, 1, &src));
    append(f, src, 0, 0, 64);
    assert_status(f->kv, ATTN_OK, kv_seq_fork(f->kv, src, 1, 64, OWNER, 1, fx_of(f), &a));
    assert_status(f->kv, ATTN_OK, kv_seq_fork(f->kv, src, 2, 64, OWNER, 1, fx_of(f), &b));
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, a, 0, 0, 64, fx_of(f)));
    assert_int_equal(f->t.fx.n_copies, 16);
    assert_status(f->kv, ATTN_EOVERLOAD, kv_append_reserve(f->kv, b, 0, 0, 36, fx_of(f)));
    assert_says(f->kv, "needs 9 copies, the journal has 8");
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, b, 0, 0, 32, fx_of(f)));
    assert_status(f->kv, ATTN_OK, kv_append_cancel(f->kv, a, 0, 0, 64, fx_of(f)));
    kv_append_commit(f->kv, b, 0, 0, 32);
}

static void a_fork_repeated_before_appends_gives_the_same_sequence(void **state)
{
    struct fixture *f = *state;
    kv_seq_id src, child = fork_at(f, &src, 6), again = {99};
    assert_status(f->kv, ATTN_OK,
                  kv_seq_fork(f->kv, src, NAME + 1, 6, OWNER + 1, 5, fx_of(f), &again));
    assert_int_equal(again.index, child.index);
    assert_int_equal(f->t.fx.n_patches, 0);
    assert_status(f->kv, ATTN_EEXIST,
                  kv_seq_fork(f->kv, src, NAME + 1, 7, OWNER + 1, 5, fx_of(f), &again));
    assert_status(f->kv, ATTN_EEXIST,
                  kv_seq_open(f->kv, TENANT, NAME + 1, f->pool, OWNER + 1, 5, &again));
    append(f, child, 0, 6, 1);
    assert_status(f->kv, ATTN_EEXIST,
                  kv_seq_fork(f->kv, src, NAME + 1, 6, OWNER + 1, 5, fx_of(f), &again));
}

static void a_fork_past_a_layers_end_is_refused_with_both_numbers(void **state)
{
    struct fixture *f = *state;
    kv_seq_id src = open_seq(f, NAME), child;
    append(f, src, 0, 0, 10);
    append(f, src, 1, 0, 7);
    assert_status(f->kv, ATTN_EINVAL, kv_seq_fork(f->kv, src, 1, 8, OWNER, 1, fx_of(f), &child));
    assert_says(f->kv, "fork at 8, layer 1 has 7 tokens");
    assert_status(f->kv, ATTN_OK, kv_seq_fork(f->kv, src, 1, 7, OWNER, 1, fx_of(f), &child));
    struct kv_effects *fx = fx_of(f);
    fx->patches_capacity = 1;
    assert_status(f->kv, ATTN_EOVERLOAD, kv_seq_fork(f->kv, src, 2, 7, OWNER, 1, fx, &child));
    assert_status(f->kv, ATTN_ENOTFOUND, kv_seq_find(f->kv, TENANT, 2, &child));
    assert_status(f->kv, ATTN_OK, kv_seq_fork(f->kv, src, 3, 0, OWNER, 1, fx_of(f), &child));
    assert_int_equal(info_of(f, child).n_blocks, 0);
}

static void truncate_cuts_every_layer_and_lets_go_of_blocks(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = open_seq(f, NAME);
    append(f, seq, 0, 0, 10);
    append(f, seq, 1, 0, 3);
    assert_status(f->kv, ATTN_EINVAL, kv_seq_truncate(f->kv, seq, 11));
    assert_says(f->kv, "len is 11, its longest layer has 10");
    assert_status(f->kv, ATTN_OK, kv_seq_truncate(f->kv, seq, 5));
    assert_int_equal(info_of(f, seq).layer_len[0], 5);
    assert_int_equal(info_of(f, seq).layer_len[1], 3);
    assert_int_equal(info_of(f, seq).n_blocks, 2);
    assert_status(f->kv, ATTN_OK, kv_seq_truncate(f->kv, seq, 0));
    assert_int_equal(stats_of(f).blocks_used, 0);
    assert_int_equal(stats_of(f).truncates, 2);
}

static void adoption_raises_the_epoch_and_moves_the_owner(void **state)
{
    struct fixture *f = *state;
    kv_seq_id a = open_seq(f, 1), b = open_seq(f, 2), c = open_seq(f, 3), any;
    uint32_t epoch = 0;
    assert_status(f->kv, ATTN_OK, kv_seq_adopt(f->kv, b, 0, &epoch));
    assert_int_equal(epoch, 2);
    assert_int_equal(info_of(f, b).epoch, 2);
    assert_int_equal(info_of(f, b).owner, 0);
    assert_status(f->kv, ATTN_OK, kv_owner_any(f->kv, 0, &any));
    assert_int_equal(any.index, b.index);
    assert_status(f->kv, ATTN_EINVAL, kv_seq_adopt(f->kv, b, 4, &epoch));
    assert_status(f->kv, ATTN_OK, kv_seq_adopt(f->kv, b, KV_NO_OWNER, &epoch));
    assert_int_equal(epoch, 3);
    assert_status(f->kv, ATTN_ENOTFOUND, kv_owner_any(f->kv, 0, &any));
    assert_status(f->kv, ATTN_ENOTFOUND, kv_owner_any(f->kv, KV_NO_OWNER, &any));
    /* Freeing an owner's sequences in slices. */
    uint32_t n = 0;
    for (; kv_owner_any(f->kv, OWNER, &any) == ATTN_OK; n++) {
        assert_true(any.index == a.index || any.index == c.index);
        kv_seq_close(f->kv, any);
        test_check(f->kv);
    }
    assert_int_equal(n, 2);
    assert_status(f->kv, ATTN_ENOTFOUND, kv_seq_adopt(f->kv, a, 0, &epoch));
}

static void a_closed_sequence_answers_nothing(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = open_seq(f, NAME), other;
    append_all(f, seq, 0, 9);
    kv_seq_close(f->kv, seq);
    kv_seq_close(f->kv, seq);
    assert_int_equal(stats_of(f).closes, 1);
    assert_int_equal(stats_of(f).blocks_used, 0);
    assert_null(info_of(f, seq).block_table);
    assert_status(f->kv, ATTN_ENOTFOUND, kv_seq_find(f->kv, TENANT, NAME, &other));
    assert_status(f->kv, ATTN_ENOTFOUND, kv_seq_truncate(f->kv, seq, 0));
    assert_status(f->kv, ATTN_ENOTFOUND, kv_seq_fork(f->kv, seq, 1, 0, OWNER, 1, fx_of(f), &other));
    assert_false(kv_seq_has_pending_copy(f->kv, seq));
    assert_false(kv_append_copies(f->kv, (kv_seq_id){1000}, 0, 1));
}

static void a_successor_finds_what_was_committed(void **state)
{
    struct fixture *f = *state;
    kv_seq_id src, child = fork_at(f, &src, 6), found;
    uint32_t epoch, table[3];
    assert_status(f->kv, ATTN_OK, kv_seq_adopt(f->kv, src, 0, &epoch));
    memcpy(table, info_of(f, src).block_table, sizeof table);
    uint32_t child_block = info_of(f, child).block_table[1];
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, child, 0, 6, 1, fx_of(f)));
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, src, 1, 10, 20, fx_of(f)));

    struct kv *next = test_kv_open(&config, kv_fd(f->kv));
    kv_close(f->kv);
    f->kv = next;
    test_check(f->kv);
    assert_status(f->kv, ATTN_OK, kv_seq_find(f->kv, TENANT, NAME, &found));
    assert_int_equal(found.index, src.index);
    struct kv_seq_info i = info_of(f, src);
    assert_int_equal(i.epoch, 2);
    assert_int_equal(i.owner, 0);
    assert_int_equal(i.n_blocks, 3);
    assert_int_equal(i.layer_len[0], 10);
    assert_int_equal(i.layer_len[1], 10);
    assert_memory_equal(i.block_table, table, sizeof table);
    assert_int_equal(info_of(f, child).block_table[1], child_block);
    assert_false(kv_seq_has_pending_copy(f->kv, child));
    assert_int_equal(stats_of(f).blocks_used, 3);
    assert_int_equal(stats_of(f).damaged, 0);
    kv_pool_id pool;
    assert_status(f->kv, ATTN_OK, kv_pool_find(f->kv, "pool", &pool));
    assert_int_equal(pool.index, f->pool.index);
}

static void a_foreign_arena_is_refused_with_the_reason(void **state)
{
    struct fixture *f = *state;
    struct kv *kv;
    char why[256];
    struct kv_config c = config;
    c.max_owners = 5;
    assert_int_equal(kv_open(&c, kv_fd(f->kv), &kv, why, sizeof why), ATTN_EINVAL);
    assert_string_equal(why, "arena: made with max_owners 4, configured is 5");

    int fd = memfd_create("other", MFD_ALLOW_SEALING);
    assert_int_equal(kv_open(&config, fd, &kv, why, sizeof why), ATTN_EINVAL);
    assert_non_null(strstr(why, "too few for a header"));
    close(fd);
    fd = memfd_create("other", MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(fd, 1 << 20), 0);
    assert_int_equal(kv_open(&config, fd, &kv, why, sizeof why), ATTN_EINVAL);
    assert_non_null(strstr(why, "not an arena"));
    /* The right header on a memfd of the wrong size. */
    char header[4096];
    assert_int_equal(pread(kv_fd(f->kv), header, sizeof header, 0), sizeof header);
    assert_int_equal(pwrite(fd, header, sizeof header, 0), sizeof header);
    assert_int_equal(kv_open(&config, fd, &kv, why, sizeof why), ATTN_EINVAL);
    assert_non_null(strstr(why, "arena: has 1048576 bytes, needs"));
    for (int byte = 0; byte < 160; byte += 7) {
        header[byte] ^= 0x10;
        assert_int_equal(pwrite(fd, header, sizeof header, 0), sizeof header);
        header[byte] ^= 0x10;
        assert_int_equal(kv_open(&config, fd, &kv, why, sizeof why), ATTN_EINVAL);
    }
    close(fd);
    assert_int_equal(kv_open(&config, fd, &kv, why, sizeof why), ATTN_EINVAL); /* closed */
    fd = open("/dev/null", O_RDWR);
    assert_int_equal(kv_open(&config, fd, &kv, why, sizeof why), ATTN_EINVAL);
    assert_non_null(strstr(why, "cannot be sealed"));
    close(fd);
    kv_close(NULL);
}

static void block_counts_go_far_beyond_65536(void **state)
{
    (void)state;
    struct kv_config c = {.max_pools = 2,
                          .max_blocks = 400000,
                          .max_sequences = 4,
                          .max_seq_blocks = 200000,
                          .max_layers = 1,
                          .max_owners = 1};
    struct kv *kv = test_kv_open(&c, -1);
    kv_pool_id small = test_pool(kv, "small", 1, 1, 100000);
    kv_pool_id big = test_pool(kv, "big", 1, 256, 300000);
    struct kv_effects fx = {.patches_capacity = 400000, .copies_capacity = 200000};
    fx.patches = calloc(fx.patches_capacity, sizeof *fx.patches);
    fx.copies = calloc(fx.copies_capacity, sizeof *fx.copies);
    kv_seq_id a, b, child;
    assert_status(kv, ATTN_OK, kv_seq_open(kv, 1, 1, small, 0, 1, &a));
    assert_status(kv, ATTN_OK, kv_seq_open(kv, 1, 2, big, 0, 1, &b));
    assert_status(kv, ATTN_OK, kv_append_reserve(kv, a, 0, 0, 90000, &fx));
    kv_append_commit(kv, a, 0, 0, 90000);
    uint32_t tokens = 70000u * 256u - 1; /* 17.9 million */
    assert_status(kv, ATTN_OK, kv_append_reserve(kv, b, 0, 0, tokens, &fx));
    kv_append_commit(kv, b, 0, 0, tokens);
    struct kv_seq_info i;
    kv_seq_info(kv, b, &i);
    assert_int_equal(i.n_blocks, 70000);
    assert_int_equal(i.layer_len[0], tokens);
    bool *seen = calloc(300000, sizeof *seen);
    uint32_t highest = 0;
    for (uint32_t k = 0; k < i.n_blocks; k++) {
        assert_true(i.block_table[k] < 300000);
        assert_false(seen[i.block_table[k]]);
        seen[i.block_table[k]] = true;
        highest = i.block_table[k] > highest ? i.block_table[k] : highest;
    }
    assert_true(highest >= 69999);
    fx.n_patches = 0;
    assert_status(kv, ATTN_OK, kv_seq_fork(kv, b, 3, tokens, 0, 1, &fx, &child));
    assert_status(kv, ATTN_OK, kv_append_reserve(kv, child, 0, tokens, 2, &fx));
    assert_int_equal(fx.n_copies, 1);
    assert_int_equal(fx.copies[0].src, i.block_table[69999]);
    kv_append_commit(kv, child, 0, tokens, 2);
    test_check(kv);
    struct kv *next = test_kv_open(&c, kv_fd(kv));
    kv_close(kv);
    test_check(next);
    kv_seq_info(next, child, &i);
    assert_int_equal(i.n_blocks, 70001);
    kv_close(next);
    free(seen);
    free(fx.patches);
    free(fx.copies);
}

static void the_name_index_holds_every_name_through_churn(void **state)
{
    (void)state;
    struct kv_config c = {.max_pools = 1,
                          .max_blocks = 1,
                          .max_sequences = 1000,
                          .max_seq_blocks = 1,
                          .max_layers = 1,
                          .max_owners = 1};
    struct kv *kv = test_kv_open(&c, -1);
    kv_pool_id pool = test_pool(kv, "p", 1, 4, 1);
    kv_seq_id seq, found;
    for (uint64_t round = 0; round < 5; round++) {
        for (uint64_t i = 0; i < 1000; i++)
            assert_status(kv, ATTN_OK, kv_seq_open(kv, i & 1, i << 32, pool, 0, round, &seq));
        test_check(kv);
        for (uint64_t i = round % 3; i < 1000; i += 3) {
            assert_status(kv, ATTN_OK, kv_seq_find(kv, i & 1, i << 32, &found));
            kv_seq_close(kv, found);
        }
        test_check(kv);
        for (uint64_t i = 0; i < 1000; i++) {
            attn_status expected = i % 3 == round % 3 ? ATTN_ENOTFOUND : ATTN_OK;
            assert_int_equal(kv_seq_find(kv, i & 1, i << 32, &found), expected);
            if (expected == ATTN_OK)
                kv_seq_close(kv, found);
        }
        test_check(kv);
    }
    kv_close(kv);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(siphash_gives_the_published_vectors),
        cmocka_unit_test(config_out_of_range_is_refused_by_name),
        T(a_pool_made_again_is_the_same_pool),
        T(a_pool_with_the_same_name_and_another_spec_is_refused_by_field),
        T(a_pool_that_does_not_fit_is_refused_by_field),
        T(pools_give_out_ids_of_their_own),
        T(a_new_sequence_is_empty_and_found_by_tenant_and_name),
        T(an_open_repeated_while_empty_gives_the_same_sequence),
        T(opening_needs_a_pool_an_owner_and_a_free_record),
        T(appends_take_blocks_at_the_first_layer_that_needs_them),
        T(a_gap_is_refused_with_both_numbers),
        T(a_retry_that_overlaps_the_end_is_counted_once),
        T(bad_ranges_are_refused_by_field),
        T(out_of_blocks_changes_nothing),
        T(full_effects_refuse_the_append_and_change_nothing),
        T(cancel_gives_new_blocks_back_unless_another_append_uses_them),
        T(a_commit_that_nobody_reserved_changes_nothing),
        T(fork_shares_blocks_until_first_append),
        T(a_cancelled_copy_brings_the_shared_block_back),
        T(a_copy_is_alone_on_its_sequence),
        T(closing_with_a_copy_pending_lets_go_of_both_blocks),
        T(a_full_journal_refuses_the_copy),
        T(a_fork_repeated_before_appends_gives_the_same_sequence),
        T(a_fork_past_a_layers_end_is_refused_with_both_numbers),
        T(truncate_cuts_every_layer_and_lets_go_of_blocks),
        T(adoption_raises_the_epoch_and_moves_the_owner),
        T(a_closed_sequence_answers_nothing),
        T(a_successor_finds_what_was_committed),
        T(a_foreign_arena_is_refused_with_the_reason),
        cmocka_unit_test(block_counts_go_far_beyond_65536),
        cmocka_unit_test(the_name_index_holds_every_name_through_churn),
    };
    return cmocka_run_group_tests_name("kv", tests, NULL, NULL);
}
