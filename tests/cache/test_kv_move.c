/* test_kv_move.c: moves sequences between two caches, as between two cards: their state must stay
 * the same, no cache may lose blocks, and no name may ever have the same epoch twice. */
#include <stdlib.h>
#include <unistd.h>

#include "kv_test.h"
#include "tests/random.h"

enum { N = 3, LAYERS = 3, BLOCK = 8, N_BLOCKS = 40, MAX_BLOCKS = 16, NAMES = 5, OWNER = 1 };

static struct kv *kv[N];
static kv_pool_id pool[N];
static struct kv_patch patches[256];
static struct kv_copy copies[64];
static struct kv_effects fx;
static uint64_t seed;

static uint32_t below(uint32_t n)
{
    return random_below(&seed, n);
}

static struct kv *cache_open(uint32_t i, int fd)
{
    struct kv_config c = {.max_pools = 2,
                          .max_blocks = N_BLOCKS,
                          .max_sequences = 8,
                          .max_seq_blocks = MAX_BLOCKS,
                          .max_layers = LAYERS,
                          .max_seq_tokens = MAX_BLOCKS * BLOCK,
                          .max_block_tokens = BLOCK,
                          .max_owners = 4,
                          .block_layout = 1};
    struct kv *x = test_kv_open(&c, fd);
    kv_set_epochs(x, 2, i);
    return x;
}

static void begin_with(uint32_t window, uint32_t kept)
{
    struct kv_pool_spec s = {.name = "p",
                             .n_layers = LAYERS,
                             .n_blocks = N_BLOCKS,
                             .block_tokens = BLOCK,
                             .window_tokens = window,
                             .kept_tokens = kept};
    for (uint32_t i = 0; i < N; i++) {
        kv[i] = cache_open(i, -1);
        assert_int_equal(kv_pool_create(kv[i], &s, &pool[i]), ATTN_OK);
        kv_owner_begin(kv[i], OWNER, 77, 0, "worker");
    }
}

static void begin(void)
{
    begin_with(0, 0);
}

static void end(void)
{
    for (uint32_t i = 0; i < N; i++)
        kv_close(kv[i]);
}

static struct kv_effects *effects(void)
{
    fx = (struct kv_effects){.patches = patches,
                             .copies = copies,
                             .patches_capacity = sizeof patches / sizeof patches[0],
                             .copies_capacity = sizeof copies / sizeof copies[0]};
    return &fx;
}

static void check_all(void)
{
    for (uint32_t i = 0; i < N; i++)
        if (kv_check(kv[i]) != ATTN_OK)
            fail_msg("cache %u: %s", i, kv_last_error(kv[i]));
}

static attn_status append(struct kv *x, kv_seq_id seq, uint32_t layer, uint32_t n)
{
    struct kv_seq_info info;
    kv_seq_info(x, seq, &info);
    uint32_t pos = info.layer_len[layer];
    attn_status st = kv_append_reserve(x, seq, layer, pos, n, effects());
    if (st == ATTN_OK)
        kv_append_commit(x, seq, layer, pos, n);
    return st;
}

/* Moves a sequence whole; its id there. */
static attn_status move(uint32_t from, uint32_t to, kv_seq_id seq, kv_seq_id *out)
{
    struct kv_seq_export d;
    assert_int_equal(kv_seq_export_read(kv[from], seq, &d), ATTN_OK);
    struct kv_seq_import *a = kv_seq_import_begin(kv[to], pool[to]);
    assert_non_null(a);
    attn_status st = kv_seq_import_reserve(kv[to], a, 0, d.n_blocks / 2);
    check_all();
    if (st == ATTN_OK)
        st = kv_seq_import_reserve(kv[to], a, 0, d.n_blocks + below(2));
    if (st == ATTN_OK)
        st = kv_seq_import_end(kv[to], a, &d, effects(), out);
    if (st != ATTN_OK) {
        kv_seq_import_cancel(kv[to], a);
        return st;
    }
    assert_int_equal(fx.n_patches, d.n_blocks);
    kv_seq_close(kv[from], seq);
    return ATTN_OK;
}

static void a_sequence_that_moved_is_the_same_there(void **state)
{
    (void)state;
    uint32_t ids[5 * BLOCK], epoch, epoch_now;
    struct kv_retention keep = {.from = BLOCK, .priority = 2, .life_s = 64};
    struct kv_tokens t = {ids, 5 * BLOCK, 9, &keep, 1};
    struct kv_seq_info before, after;
    kv_seq_id seq, there;
    begin();
    seed = 5;
    for (uint32_t i = 0; i < 5 * BLOCK; i++)
        ids[i] = below(1000);
    assert_int_equal(kv_seq_open_with(kv[0], 0, 4711, pool[0], OWNER, 10, &t, effects(), &seq),
                     ATTN_OK);
    for (uint32_t l = 0; l < LAYERS; l++) /* in the middle of a token, too */
        assert_int_equal(append(kv[0], seq, l, 3 * BLOCK + (l == 0 ? 2 : 1)), ATTN_OK);
    assert_int_equal(kv_seq_truncate(kv[0], seq, 3 * BLOCK + 2, 11, &epoch), ATTN_OK);
    assert_int_equal(kv_seq_note(kv[0], seq, 12, (const uint8_t *)"request", 7), ATTN_OK);
    kv_seq_info(kv[0], seq, &before);
    uint32_t lens[LAYERS];
    memcpy(lens, before.layer_len, sizeof lens);

    assert_int_equal(move(0, 2, seq, &there), ATTN_OK);
    assert_int_equal(kv_seq_find(kv[0], 0, 4711, &seq), ATTN_ENOTFOUND);
    assert_int_equal(kv_seq_find(kv[2], 0, 4711, &seq), ATTN_OK);
    assert_int_equal(seq.index, there.index);
    kv_seq_info(kv[2], there, &after);
    assert_int_equal(after.epoch, epoch);
    assert_int_equal(after.owner, OWNER);
    assert_int_equal(after.n_blocks, 4);
    assert_memory_equal(after.layer_len, lens, sizeof lens);
    assert_int_equal(after.n_ids, 3 * BLOCK + 2);
    assert_int_equal(after.adapter, 9);
    assert_int_equal(kv_seq_note_get(kv[2], there).n_bytes, 7);
    assert_memory_equal(kv_seq_note_get(kv[2], there).bytes, "request", 7);
    assert_int_equal(kv_seq_note(kv[2], there, 11, NULL, 0), ATTN_ESTALE); /* a late one */
    assert_memory_equal(kv_seq_ids(kv[2], there), ids, (3 * BLOCK + 2) * sizeof ids[0]);
    check_all();

    /* the request that made its epoch is known, an older one is fenced */
    assert_true(kv_seq_is_repeat(kv[2], there, OWNER, 11));
    assert_false(kv_seq_is_repeat(kv[2], there, OWNER, 10));
    /* what it has is published there, and found with what was said of it */
    struct kv_content c;
    assert_true(kv_block_content(kv[2], pool[2], after.block_table[1], &c));
    assert_memory_equal(c.ids, ids + BLOCK, BLOCK * sizeof ids[0]);

    /* one of nothing moves, too */
    kv_seq_id none;
    assert_int_equal(kv_seq_open(kv[0], 0, 8, pool[0], OWNER, 20, &none), ATTN_OK);
    assert_int_equal(move(0, 1, none, &none), ATTN_OK);

    /* its next epoch is that cache's own */
    assert_int_equal(kv_seq_truncate(kv[2], there, 3 * BLOCK, 12, &epoch_now), ATTN_OK);
    assert_true(epoch_now > epoch);
    assert_int_equal(epoch & 3, 0);
    assert_int_equal(epoch_now & 3, 2);
    check_all();
    end();
}

static bool has_any(kv_seq_id seq, const uint32_t *blocks, uint32_t n)
{
    struct kv_seq_info info;
    kv_seq_info(kv[0], seq, &info);
    for (uint32_t i = 0; i < info.n_blocks; i++)
        for (uint32_t j = 0; j < n; j++)
            if (info.block_table[i] == blocks[j])
                return true;
    return false;
}

static void blocks_that_are_read_as_they_leave_have_no_other_owner(void **state)
{
    (void)state;
    kv_seq_id seq, other;
    uint32_t blocks[4], epoch;
    struct kv_seq_info info;
    begin();
    assert_int_equal(kv_seq_open(kv[0], 0, 1, pool[0], OWNER, 1, &seq), ATTN_OK);
    for (uint32_t l = 0; l < LAYERS; l++)
        assert_int_equal(append(kv[0], seq, l, 5 * BLOCK), ATTN_OK);
    kv_seq_info(kv[0], seq, &info);
    memcpy(blocks, info.block_table, sizeof blocks);
    struct kv_seq_import *held = kv_seq_export_hold(kv[0], seq, 0, 4);
    assert_non_null(held);
    check_all();

    /* what is written to them anew is written to copies */
    assert_int_equal(kv_seq_truncate(kv[0], seq, 3 * BLOCK + 1, 2, &epoch), ATTN_OK);
    assert_int_equal(append(kv[0], seq, 0, 2), ATTN_OK);
    assert_int_equal(fx.n_copies, 1);
    assert_int_equal(fx.copies[0].src, blocks[3]);
    check_all();
    kv_seq_info(kv[0], seq, &info);
    assert_int_not_equal(info.block_table[3], blocks[3]);

    /* who has all the others does not have them */
    kv_seq_close(kv[0], seq);
    check_all();
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(kv_seq_open(kv[0], 0, 2 + i, pool[0], OWNER, 3 + i, &other), ATTN_OK);
        while (append(kv[0], other, 0, BLOCK) == ATTN_OK)
            assert_false(has_any(other, blocks, 4));
    }
    kv_seq_import_cancel(kv[0], held);
    check_all();
    assert_int_equal(append(kv[0], other, 0, 4 * BLOCK), ATTN_OK);
    assert_true(has_any(other, blocks, 4));
    check_all();
    end();
}

/* All layers one token longer, n times, and what they do not see any more goes. */
static void decode(struct kv *x, kv_seq_id seq, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t l = 0; l < LAYERS; l++)
            assert_int_equal(append(x, seq, l, 1), ATTN_OK);
        kv_seq_free_unseen(x, seq);
    }
}

static void what_windows_have_released_does_not_move(void **state)
{
    (void)state;
    enum { WINDOW = 2 * BLOCK, KEPT = 3 };
    struct kv_seq_info before, after;
    struct kv_seq_export d;
    kv_seq_id seq, there;
    uint32_t epoch;
    begin_with(WINDOW, KEPT);
    assert_int_equal(kv_seq_open(kv[0], 0, 1, pool[0], OWNER, 1, &seq), ATTN_OK);
    decode(kv[0], seq, 6 * BLOCK + 3);
    kv_seq_info(kv[0], seq, &before);
    assert_int_equal(before.hole_first, 1);
    assert_int_equal(before.hole_past, 4);

    /* it comes in two parts, between which more is released */
    struct kv_seq_import *a = kv_seq_import_begin(kv[1], pool[1]);
    assert_int_equal(kv_seq_import_reserve(kv[1], a, 0, 1), ATTN_OK);
    assert_int_equal(kv_seq_import_reserve(kv[1], a, 4, 2), ATTN_OK);
    check_all();
    decode(kv[0], seq, 2 * BLOCK);
    kv_seq_info(kv[0], seq, &before);
    assert_int_equal(before.hole_past, 6);
    assert_int_equal(kv_seq_export_read(kv[0], seq, &d), ATTN_OK);
    assert_int_equal(kv_seq_import_reserve(kv[1], a, 7, 2), ATTN_OK);
    assert_int_equal(kv_seq_import_end(kv[1], a, &d, effects(), &there), ATTN_EINVAL);
    assert_non_null(strstr(kv_last_error(kv[1]), "of 9 blocks 1 did not come"));
    assert_int_equal(kv_seq_import_reserve(kv[1], a, 6, 1), ATTN_OK);
    uint32_t blocks[9];
    for (uint32_t i = 6; i < 9; i++)
        blocks[i] = kv_seq_import_block(a, i);
    blocks[0] = kv_seq_import_block(a, 0);
    assert_int_equal(kv_seq_import_end(kv[1], a, &d, effects(), &there), ATTN_OK);
    check_all();

    kv_seq_info(kv[1], there, &after);
    assert_int_equal(after.hole_first, 1);
    assert_int_equal(after.hole_past, 6);
    assert_int_equal(after.n_blocks, 9);
    assert_memory_equal(after.layer_len, before.layer_len, LAYERS * sizeof *after.layer_len);
    for (uint32_t i = 0; i < 9; i++)
        if (i < 1 || i >= 6)
            assert_int_equal(after.block_table[i], blocks[i]);
    struct kv_stats s;
    kv_stats_read(kv[1], &s);
    assert_int_equal(s.blocks_used, 4);

    /* what is refused there is refused here, and a successor finds the same */
    assert_int_equal(kv_seq_truncate(kv[1], there, 5 * BLOCK, 2, &epoch), ATTN_EINVAL);
    assert_int_equal(kv_seq_truncate(kv[0], seq, 5 * BLOCK, 2, &epoch), ATTN_EINVAL);
    kv_seq_close(kv[0], seq);
    int fd = dup(kv_fd(kv[1]));
    kv_close(kv[1]);
    kv[1] = cache_open(1, fd);
    close(fd);
    check_all();
    assert_int_equal(kv_seq_find(kv[1], 0, 1, &there), ATTN_OK);
    kv_seq_info(kv[1], there, &after);
    assert_int_equal(after.hole_past, 6);
    decode(kv[1], there, 2 * BLOCK);
    kv_seq_info(kv[1], there, &after);
    assert_int_equal(after.hole_past, 8);
    check_all();
    end();
}

static void what_has_no_place_stays_where_it_is(void **state)
{
    (void)state;
    kv_seq_id seq, there, big;
    begin();
    assert_int_equal(kv_seq_open(kv[0], 0, 1, pool[0], OWNER, 1, &seq), ATTN_OK);
    assert_int_equal(append(kv[0], seq, 0, 6 * BLOCK), ATTN_OK);
    /* blocks */
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(kv_seq_open(kv[1], 0, 10 + i, pool[1], OWNER, 10 + i, &big), ATTN_OK);
        assert_int_equal(append(kv[1], big, 0, 12 * BLOCK), ATTN_OK);
    }
    assert_int_equal(move(0, 1, seq, &there), ATTN_ENOBLOCKS);
    check_all();
    /* the session */
    kv_owner_end(kv[2], OWNER);
    assert_int_equal(move(0, 2, seq, &there), ATTN_ENOTFOUND);
    kv_owner_begin(kv[2], OWNER, 78, 0, "another");
    assert_int_equal(move(0, 2, seq, &there), ATTN_ENOTFOUND);
    check_all();
    /* the name */
    kv_owner_begin(kv[2], OWNER, 77, 0, "worker");
    assert_int_equal(kv_seq_open(kv[2], 0, 1, pool[2], OWNER, 1, &big), ATTN_OK);
    assert_int_equal(move(0, 2, seq, &there), ATTN_EEXIST);
    /* a successor knows nothing of blocks that were set aside */
    struct kv_seq_import *a = kv_seq_import_begin(kv[2], pool[2]);
    assert_int_equal(kv_seq_import_reserve(kv[2], a, 0, 7), ATTN_OK);
    check_all();
    int fd = dup(kv_fd(kv[2]));
    kv_close(kv[2]);
    kv[2] = cache_open(2, fd);
    close(fd);
    struct kv_stats s;
    kv_stats_read(kv[2], &s);
    assert_int_equal(s.blocks_used, 0);
    check_all();
    end();
}

/* Where each name is, and the epochs that it has had. */
struct life {
    bool is_open;
    uint32_t at, n_epochs;
    uint32_t epochs[4096];
};

static void note_epoch(struct life *x, uint32_t epoch)
{
    if (x->n_epochs > 0 && x->epochs[x->n_epochs - 1] == epoch)
        return;
    for (uint32_t i = 0; i < x->n_epochs; i++)
        assert_int_not_equal(x->epochs[i], epoch);
    assert_true(x->n_epochs < 4096);
    x->epochs[x->n_epochs++] = epoch;
}

static void names_never_have_an_epoch_twice_wherever_they_are(void **state)
{
    (void)state;
    static struct life names[NAMES];
    uint64_t request = 100;
    memset(names, 0, sizeof names);
    begin();
    seed = 99;
    for (uint32_t round = 0; round < 3000; round++) {
        uint32_t n = below(NAMES), epoch;
        struct life *x = &names[n];
        struct kv_seq_info info;
        kv_seq_id seq, there;
        if (!x->is_open) {
            x->at = below(N);
            assert_int_equal(kv_seq_open(kv[x->at], 0, n, pool[x->at], OWNER, ++request, &seq),
                             ATTN_OK);
            x->is_open = true;
        }
        assert_int_equal(kv_seq_find(kv[x->at], 0, n, &seq), ATTN_OK);
        switch (below(6)) {
        case 0:
            kv_seq_close(kv[x->at], seq);
            x->is_open = false;
            break;
        case 1:
            kv_seq_info(kv[x->at], seq, &info);
            assert_int_equal(
                kv_seq_truncate(kv[x->at], seq, info.layer_len[0] / 2, ++request, &epoch), ATTN_OK);
            break;
        case 2:
            assert_int_equal(kv_seq_adopt(kv[x->at], seq, OWNER, ++request, &epoch), ATTN_OK);
            break;
        case 3: {
            uint32_t to = (x->at + 1 + below(N - 1)) % N;
            if (move(x->at, to, seq, &there) == ATTN_OK) {
                x->at = to;
                seq = there;
            }
            break;
        }
        default:
            for (uint32_t l = 0; l < LAYERS; l++)
                if (append(kv[x->at], seq, l, 1 + below(6)) != ATTN_OK)
                    break;
        }
        if (x->is_open) {
            kv_seq_info(kv[x->at], seq, &info);
            note_epoch(x, info.epoch);
        }
        check_all();
        if (below(50) == 0) { /* a successor */
            uint32_t i = below(N), n_dropped;
            int fd = dup(kv_fd(kv[i]));
            kv_close(kv[i]);
            kv[i] = cache_open(i, fd);
            close(fd);
            assert_int_equal(kv_recover(kv[i], &n_dropped), ATTN_OK);
            assert_int_equal(n_dropped, 0);
        }
    }
    end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_sequence_that_moved_is_the_same_there),
        cmocka_unit_test(blocks_that_are_read_as_they_leave_have_no_other_owner),
        cmocka_unit_test(what_windows_have_released_does_not_move),
        cmocka_unit_test(what_has_no_place_stays_where_it_is),
        cmocka_unit_test(names_never_have_an_epoch_twice_wherever_they_are),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
