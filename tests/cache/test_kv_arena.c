/* test_kv_arena.c: tests the arena: its limits, its sizes, and opening it in a successor. */
#define _GNU_SOURCE
#include "tests/cache/fixture.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cache/siphash.h"

static void siphash_gives_the_published_vectors(void **state)
{
    (void)state;
    uint64_t key[2] = {UINT64_C(0x0706050403020100), UINT64_C(0x0f0e0d0c0b0a0908)};
    uint8_t in[63];
    for (uint8_t i = 0; i < sizeof in; i++)
        in[i] = i;
    assert_true(siphash(key, in, 0) == UINT64_C(0x726fdb47dd0e0e31));
    assert_true(siphash(key, in, 15) == UINT64_C(0xa129ca6149be45e5));
    uint64_t before[2], out[2];
    memcpy(before, in, sizeof before);
    siphash128(key, before, in + 16, 47, out);
    assert_true(out[0] == UINT64_C(0x4a83502f77d15051) && out[1] == UINT64_C(0x7cbd3f979a063e50));
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

static void a_successor_finds_what_was_committed(void **state)
{
    struct fixture *f = *state;
    kv_seq_id src, child = fork_at(f, &src, 6), found;
    uint32_t epoch, table[3];
    assert_status(f->kv, ATTN_OK, kv_seq_adopt(f->kv, src, 0, KV_NO_REQUEST, &epoch));
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
    assert_false(has_pending_copy(f->kv, child));
    assert_int_equal(stats_of(f).blocks_used, 3);
    assert_int_equal(stats_of(f).damaged, 0);
    kv_pool_id pool;
    assert_status(f->kv, ATTN_OK, kv_pool_find(f->kv, 0, "pool", &pool));
    assert_int_equal(pool.index, f->pool.index);
}

static void a_successor_finds_owners_by_id_and_label(void **state)
{
    struct fixture *f = *state;
    char label[2 * KV_LABEL_BYTES];
    memset(label, 'x', sizeof label);
    label[sizeof label - 1] = '\0';
    kv_owner_begin(f->kv, 0, 7, 5, "worker");
    kv_owner_begin(f->kv, 1, 8, 0, "gone");
    kv_owner_end(f->kv, 1);
    kv_owner_begin(f->kv, 3, 9, 0, label);
    struct kv *next = test_kv_open(&config, kv_fd(f->kv));
    assert_int_equal(kv_arena_id(next), kv_arena_id(f->kv));
    kv_close(f->kv);
    f->kv = next;
    assert_int_equal(kv_owner_id(next, 0), 7);
    assert_string_equal(kv_owner_label(next, 0), "worker");
    assert_int_equal(kv_owner_tenant(next, 0), 5);
    assert_int_equal(kv_owner_id(next, 1), 0);
    assert_int_equal(kv_owner_id(next, 2), 0);
    assert_int_equal(kv_owner_id(next, 3), 9);
    assert_int_equal(strlen(kv_owner_label(next, 3)), KV_LABEL_BYTES - 1);
}

static void pools_that_are_dropped_take_their_sequences_along(void **state)
{
    struct fixture *f = *state;
    kv_pool_id other = test_pool(f->kv, "other", 1, 4, 8), pool;
    kv_seq_id kept = open_seq(f, NAME), lost;
    append_all(f, kept, 0, 9);
    assert_status(f->kv, ATTN_OK,
                  kv_seq_open(f->kv, TENANT, NAME + 1, other, OWNER, ++f->request, &lost));
    append(f, lost, 0, 0, 5);
    uint32_t n_dropped;
    assert_status(f->kv, ATTN_OK, kv_pools_drop(f->kv, other, &n_dropped));
    test_check(f->kv);
    assert_int_equal(n_dropped, 2);
    assert_int_equal(stats_of(f).damaged, 2);
    assert_int_equal(stats_of(f).blocks_used, 3);
    assert_int_equal(info_of(f, kept).layer_len[1], 9);
    assert_status(f->kv, ATTN_ENOTFOUND, kv_seq_find(f->kv, TENANT, NAME + 1, &lost));
    assert_status(f->kv, ATTN_ENOTFOUND, kv_pool_find(f->kv, 0, "other", &pool));
    assert_int_equal(test_pool(f->kv, "third", 1, 4, 8).index, other.index);
}

static void a_dropped_pool_makes_room_and_its_index_is_another_pools(void **state)
{
    struct fixture *f = *state;
    struct kv_pool_spec before, after;
    uint32_t n_free, n_dropped;
    kv_seq_id kept = open_seq(f, NAME), other_seq;
    append_all(f, kept, 0, 9);
    kv_pool_id a = test_pool(f->kv, "a", 1, 4, 8), b = test_pool(f->kv, "b", 1, 4, 3);
    assert_status(f->kv, ATTN_OK, kv_pool_info(f->kv, a, &before, &n_free));
    assert_status(f->kv, ATTN_OK,
                  kv_seq_open(f->kv, TENANT, NAME + 1, a, OWNER, ++f->request, &other_seq));
    append(f, other_seq, 0, 0, 5);
    assert_int_equal(kv_pool_sequences(f->kv, a), 1);
    assert_status(f->kv, ATTN_EINVAL, kv_pool_drop(f->kv, a));
    kv_seq_close(f->kv, other_seq);
    assert_status(f->kv, ATTN_OK, kv_pool_drop(f->kv, a));
    test_check(f->kv);
    assert_status(f->kv, ATTN_ENOTFOUND, kv_pool_drop(f->kv, a));
    assert_status(f->kv, ATTN_OK, kv_recover(f->kv, &n_dropped));
    assert_int_equal(n_dropped, 0);
    kv_pool_id c = test_pool(f->kv, "c", 1, 8, 8); /* all of the gap, the same index */
    test_check(f->kv);
    assert_int_equal(c.index, a.index);
    assert_status(f->kv, ATTN_OK, kv_pool_info(f->kv, c, &after, &n_free));
    assert_int_equal(after.generation, before.generation + 1);
    assert_int_equal(n_free, 8);
    assert_status(f->kv, ATTN_OK,
                  kv_seq_open(f->kv, TENANT, NAME + 1, c, OWNER, ++f->request, &other_seq));
    append(f, other_seq, 0, 0, 64);
    test_check(f->kv);
    assert_int_equal(info_of(f, kept).layer_len[1], 9);
    assert_status(f->kv, ATTN_OK, kv_pool_info(f->kv, b, &after, &n_free));
    assert_int_equal(n_free, 3);
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

    c = config;
    c.block_layout = 2;
    assert_int_equal(kv_open(&c, kv_fd(f->kv), &kv, why, sizeof why), ATTN_EINVAL);
    assert_string_equal(why, "arena: made with block_layout 1, configured is 2");

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
                          .max_seq_tokens = 1,
                          .max_block_tokens = 256,
                          .max_layers = 1,
                          .max_owners = 1,
                          .block_layout = 1};
    struct kv *kv = test_kv_open(&c, -1);
    kv_pool_id small = test_pool(kv, "small", 1, 1, 100000);
    kv_pool_id big = test_pool(kv, "big", 1, 256, 300000);
    struct kv_effects fx = {.patches_capacity = 400000, .copies_capacity = 200000};
    fx.patches = calloc(fx.patches_capacity, sizeof *fx.patches);
    fx.copies = calloc(fx.copies_capacity, sizeof *fx.copies);
    kv_seq_id a, b, child;
    assert_status(kv, ATTN_OK, kv_seq_open(kv, 1, 1, small, 0, KV_NO_REQUEST, &a));
    assert_status(kv, ATTN_OK, kv_seq_open(kv, 1, 2, big, 0, KV_NO_REQUEST, &b));
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
    assert_status(kv, ATTN_OK, kv_seq_fork(kv, b, 3, tokens, 0, 1, &child));
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
                          .max_seq_tokens = 4,
                          .max_block_tokens = 4,
                          .max_layers = 1,
                          .max_owners = 1,
                          .block_layout = 1};
    struct kv *kv = test_kv_open(&c, -1);
    kv_pool_id pool = test_pool(kv, "p", 1, 4, 1);
    kv_seq_id seq, found;
    for (uint64_t round = 0; round < 5; round++) {
        for (uint64_t i = 0; i < 1000; i++)
            assert_status(kv, ATTN_OK,
                          kv_seq_open(kv, i & 1, i << 32, pool, 0, KV_NO_REQUEST, &seq));
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(siphash_gives_the_published_vectors),
        cmocka_unit_test(config_out_of_range_is_refused_by_name),
        T(a_successor_finds_what_was_committed),
        T(a_successor_finds_owners_by_id_and_label),
        T(pools_that_are_dropped_take_their_sequences_along),
        T(a_dropped_pool_makes_room_and_its_index_is_another_pools),
        T(a_foreign_arena_is_refused_with_the_reason),
        cmocka_unit_test(block_counts_go_far_beyond_65536),
        cmocka_unit_test(the_name_index_holds_every_name_through_churn),
    };
    return cmocka_run_group_tests_name("kv_arena", tests, NULL, NULL);
}
