/* test_kv_room.c: what tables take as they fill is counted before it is taken, refused by name at
 * the bound, and given back to the system: the arena's pages are looked at after every operation of
 * a random walk.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/stat.h>

#include "tests/cache/kv_test.h"
#include "tests/random.h"

enum {
    PAGE = 4096,
    SEQS = 24,
    MAX_IDS = 6000, /* six pages */
    BLOCK_TOKENS = 2,
    BLOCKS = 5000,
    MOST_PAGES = 110,
    TENANTS = 3,
    NAMES = 27, /* of each tenant as many */
    FX = 8192,
};

static const struct kv_config config = {.max_pools = 3,
                                        .max_blocks = 8192,
                                        .max_sequences = SEQS,
                                        .max_seq_blocks = MAX_IDS / BLOCK_TOKENS,
                                        .max_seq_tokens = MAX_IDS,
                                        .max_block_tokens = 64,
                                        .max_layers = 1,
                                        .max_owners = 4,
                                        .block_layout = 1,
                                        .table_pages = MOST_PAGES};

static struct world {
    struct kv *kv;
    kv_pool_id pool;
    kv_pool_id other; /* made and dropped, if has_other */
    bool has_other;
    struct kv_effects fx;
    uint64_t rng, request;
    uint64_t had[TENANTS]; /* bytes that each tenant has */
    uint64_t most; /* of the last tenant */
    uint32_t n_refused, n_quota;
} w;

static uint32_t up_to(uint32_t n)
{
    return random_below(&w.rng, n);
}

static attn_status take(void *user, uint32_t tenant, uint64_t bytes, char *why, size_t why_bytes)
{
    (void)user;
    if (tenant == TENANTS - 1 && w.had[tenant] + bytes > w.most) {
        snprintf(why, why_bytes, "the last tenant has all");
        return ATTN_EQUOTA;
    }
    w.had[tenant] += bytes;
    return ATTN_OK;
}

static void count(void *user, uint32_t tenant, uint64_t bytes)
{
    (void)user;
    w.had[tenant] += bytes;
}

static void give(void *user, uint32_t tenant, uint64_t bytes)
{
    (void)user;
    assert_true(w.had[tenant] >= bytes);
    w.had[tenant] -= bytes;
}

static const struct kv_room_ops ops = {.take = take, .give = give, .count = count};

static uint64_t bytes_of_pools(void)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < config.max_pools; i++) {
        struct kv_pool_spec s;
        uint32_t n_free;
        if (kv_pool_info(w.kv, (kv_pool_id){i}, &s, &n_free) == ATTN_OK)
            n += s.n_blocks * (64u + 8 + 16 + 4 * s.block_tokens);
    }
    return n;
}

/* The arena takes no more than it said, and what it counts is what tenants and pools have. */
static void look(void)
{
    struct stat sb;
    struct kv_stats s;
    kv_stats_read(w.kv, &s);
    assert_int_equal(fstat(kv_fd(w.kv), &sb), 0);
    assert_true(s.table_bytes <= (uint64_t)MOST_PAGES * PAGE);
    uint64_t said = kv_fixed_bytes(&config) + s.table_bytes + 12 * PAGE; /* a range's two ends */
    if ((uint64_t)sb.st_blocks * 512 > said)
        fail_msg("the arena has %llu bytes, counted are %llu",
                 (unsigned long long)sb.st_blocks * 512, (unsigned long long)said);
    uint64_t sum = bytes_of_pools();
    for (uint32_t i = 0; i < TENANTS; i++)
        sum += w.had[i];
    assert_int_equal(sum, s.table_bytes);
}

/* An operation that may be refused for want of this memory. */
static void may_refuse(attn_status st)
{
    if (st != ATTN_EQUOTA)
        return;
    w.n_refused++;
    bool is_quota = strstr(kv_last_error(w.kv), "the last tenant has all") != NULL;
    w.n_quota += is_quota;
    if (!is_quota)
        assert_non_null(strstr(kv_last_error(w.kv), "(cache.table_memory)"));
}

static void open_some(uint64_t name, uint32_t tenant)
{
    static uint32_t ids[MAX_IDS];
    uint32_t n = up_to(2) ? up_to(MAX_IDS) : up_to(200), same = up_to(n + 1);
    for (uint32_t i = 0; i < n; i++)
        ids[i] = i < same ? i : up_to(1000);
    struct kv_tokens t = {.ids = ids, .n = n};
    kv_seq_id seq;
    w.fx.n_patches = w.fx.n_copies = 0;
    if (up_to(10) == 0)
        w.fx.n_patches = w.fx.patches_capacity; /* there is no room for what is found */
    may_refuse(kv_seq_open_with(w.kv, tenant, name, w.pool, 0, ++w.request, &t, &w.fx, &seq));
}

static void act_on(kv_seq_id seq, uint64_t other, uint32_t what)
{
    struct kv_seq_info i;
    uint32_t epoch, n = 1 + up_to(2500);
    static uint32_t ids[MAX_IDS];
    kv_seq_id child;
    kv_seq_info(w.kv, seq, &i);
    w.fx.n_patches = w.fx.n_copies = 0;
    switch (what) {
    case 0:
    case 1: {
        attn_status st = kv_append_reserve(w.kv, seq, 0, i.layer_len[0], n, &w.fx);
        may_refuse(st);
        if (st == ATTN_OK && up_to(5) > 0)
            kv_append_commit(w.kv, seq, 0, i.layer_len[0], n);
        else if (st == ATTN_OK)
            kv_append_cancel(w.kv, seq, 0, i.layer_len[0], n, &w.fx);
        break;
    }
    case 2:
        for (uint32_t k = 0; k < n; k++)
            ids[k] = i.n_ids + k;
        may_refuse(kv_seq_tokens(w.kv, seq, i.n_ids, ids, n));
        break;
    case 3:
    case 4:
        may_refuse(
            kv_seq_fork(w.kv, seq, other, up_to(i.layer_len[0] + 1), 0, ++w.request, &child));
        break;
    case 6:
        may_refuse(kv_seq_note(w.kv, seq, ++w.request, (const uint8_t *)ids,
                               up_to(2) ? up_to(KV_MAX_NOTE_BYTES + 1) : up_to(200)));
        break;
    case 5:
        kv_seq_truncate(w.kv, seq, up_to(i.layer_len[0] + 1), ++w.request, &epoch);
        break;
    default:
        kv_seq_close(w.kv, seq);
    }
}

static void act_on_pools(void)
{
    uint32_t n = 1 + up_to(config.max_blocks - BLOCKS);
    struct kv_pool_spec s = {
        .name = "other", .n_layers = 1, .n_blocks = n, .block_tokens = 1u << up_to(7)};
    if (w.has_other) {
        assert_int_equal(kv_pool_drop(w.kv, w.other), ATTN_OK);
        w.has_other = false;
        return;
    }
    attn_status st = kv_pool_create(w.kv, &s, &w.other);
    w.has_other = st == ATTN_OK;
    if (st != ATTN_OK) {
        assert_int_equal(st, ATTN_ENOMEM);
        assert_non_null(strstr(kv_last_error(w.kv), "(cache.table_memory)"));
        return;
    }
    if (n > 1 && up_to(2)) {
        struct kv_shrink shrink;
        assert_int_equal(kv_pool_shrink_begin(w.kv, w.other, 1 + up_to(n - 1), &shrink), ATTN_OK);
        kv_pool_shrink_end(w.kv, &shrink);
        kv_shrink_fini(&shrink);
    }
    st = kv_pool_grow(w.kv, w.other, n);
    assert_true(st == ATTN_OK || st == ATTN_EINVAL);
}

/* A successor takes the arena, whose owners count what is there. */
static void hand_over(void)
{
    struct kv *next = test_kv_open(&config, kv_fd(w.kv));
    kv_close(w.kv);
    w.kv = next;
    memset(w.had, 0, sizeof w.had);
    kv_set_room_ops(w.kv, &ops);
}

static void start(void)
{
    w = (struct world){.rng = 7, .most = 8 * PAGE};
    w.fx.patches_capacity = w.fx.copies_capacity = FX;
    w.fx.patches = calloc(FX, sizeof *w.fx.patches);
    w.fx.copies = calloc(FX, sizeof *w.fx.copies);
    w.kv = test_kv_open(&config, -1);
    kv_set_room_ops(w.kv, &ops);
}

static void stop(void)
{
    kv_close(w.kv);
    free(w.fx.patches);
    free(w.fx.copies);
}

static void an_arena_takes_no_more_than_it_counts(void **state)
{
    (void)state;
    start();
    w.pool = test_pool(w.kv, "pool", 1, BLOCK_TOKENS, 2000);
    for (uint32_t round = 0; round < 6000; round++) {
        uint64_t name = 1 + up_to(NAMES);
        uint32_t tenant = (uint32_t)(name % TENANTS), what = up_to(9);
        kv_seq_id seq;
        if (up_to(50) == 0)
            act_on_pools();
        else if (up_to(200) == 0)
            hand_over();
        else if (kv_seq_find(w.kv, tenant, name, &seq) == ATTN_OK)
            act_on(seq, 1 + (name - 1 + TENANTS * up_to(NAMES / TENANTS)) % NAMES, what);
        else
            open_some(name, tenant);
        look();
        if (round % 100 == 0)
            test_check(w.kv);
    }
    assert_true(w.n_refused > 20 && w.n_quota > 5 && w.n_refused > w.n_quota);
    kv_pool_clear(w.kv, w.pool);
    look();
    for (uint32_t i = 0; i < TENANTS; i++)
        assert_int_equal(w.had[i], 0);
    stop();
}

static void what_is_refused_changes_nothing(void **state)
{
    (void)state;
    start();
    w.pool = test_pool(w.kv, "pool", 1, BLOCK_TOKENS, 100);
    uint32_t *ids = calloc(MAX_IDS, sizeof *ids), n = 0;
    struct kv_tokens t = {.ids = ids, .n = MAX_IDS};
    struct kv_stats before, after;
    kv_seq_id seq, last = {0};
    attn_status st;
    for (uint64_t name = 1;; name++, n++) {
        kv_stats_read(w.kv, &before);
        st = kv_seq_open_with(w.kv, 0, name, w.pool, 0, ++w.request, &t, &w.fx, &seq);
        if (st != ATTN_OK)
            break;
        last = seq;
    }
    assert_in_range(n, 1, MOST_PAGES / 5);
    assert_int_equal(st, ATTN_EQUOTA);
    kv_stats_read(w.kv, &after);
    assert_memory_equal(&before, &after, sizeof after);
    test_check(w.kv);
    t.n = 1024; /* the first page is counted at the start */
    assert_status(w.kv, ATTN_OK,
                  kv_seq_open_with(w.kv, 0, 99, w.pool, 0, ++w.request, &t, &w.fx, &seq));
    kv_seq_close(w.kv, last);
    t.n = MAX_IDS;
    assert_status(w.kv, ATTN_OK,
                  kv_seq_open_with(w.kv, 0, 100, w.pool, 0, ++w.request, &t, &w.fx, &seq));
    look();
    free(ids);
    stop();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_refused_changes_nothing),
        cmocka_unit_test(an_arena_takes_no_more_than_it_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
