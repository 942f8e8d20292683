/* test_kv_damage.c: an arena from a predecessor may hold anything: opening it must never crash,
 * must drop and count what is damaged, and must leave the rest as it was. One argument: a seed to
 * run alone.
 */
#define _GNU_SOURCE
#include "tests/cache/model.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cache/arena.h"
#include "tests/random.h"

#define N_FUZZ 3000

static uint64_t only_seed;

/* An arena after some operations, its bytes, and the model of it. */
struct grown {
    struct model model;
    struct device device;
    uint8_t *bytes, *copy;
    size_t n_bytes;
    struct kv_header header;
    int fd;
};

static void grow(struct grown *g, uint64_t seed, uint32_t n_ops)
{
    static struct test_fx t;
    struct kv *kv = model_kv_open();
    uint64_t random = seed * UINT64_C(0x9e3779b97f4a7c15);
    memset(g, 0, sizeof *g);
    model_device = &g->device;
    for (uint32_t i = 0; i < n_ops; i++) {
        struct op op = model_op(&g->model, &random);
        attn_status expected = model_apply(&g->model, &op);
        test_fx_reset(&t);
        assert_int_equal(model_kv_apply(kv, &op, &t, NULL), expected);
        if (expected == ATTN_OK && (op.kind == OP_RESERVE || op.kind == OP_TREE))
            model_device_run(&g->device, kv, &g->model, &op, &t);
    }
    model_recover(&g->model);
    struct stat sb;
    assert_int_equal(fstat(kv_fd(kv), &sb), 0);
    g->n_bytes = (size_t)sb.st_size;
    g->bytes = malloc(g->n_bytes);
    g->copy = malloc(g->n_bytes);
    assert_int_equal(pread(kv_fd(kv), g->bytes, g->n_bytes, 0), g->n_bytes);
    memcpy(&g->header, g->bytes, sizeof g->header);
    memcpy(g->copy, g->bytes, g->n_bytes);
    g->fd = memfd_create("copy", MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(g->fd, sb.st_size), 0);
    kv_close(kv);
}

static void grown_fini(struct grown *g)
{
    free(g->bytes);
    free(g->copy);
    close(g->fd);
}

/* Opens g->copy; it must pass the check. */
static struct kv *open_copy(struct grown *g, uint64_t seed)
{
    assert_int_equal(pwrite(g->fd, g->copy, g->n_bytes, 0), g->n_bytes);
    struct kv *kv = test_kv_open(&model_config, g->fd);
    if (kv_check(kv) != ATTN_OK)
        fail_msg("seed %llu: kv_check: %s", (unsigned long long)seed, kv_last_error(kv));
    return kv;
}

static uint32_t n_damaged(struct kv *kv)
{
    struct kv_stats s;
    kv_stats_read(kv, &s);
    return (uint32_t)s.damaged;
}

static struct kv_seq_rec *seq_recs(struct grown *g)
{
    return (void *)(g->copy + g->header.offset[KV_SEQS]);
}

/* The sequence alone has the first block of its table, and nothing is published of that. */
static bool is_first_its_own(struct grown *g, uint32_t seq)
{
    const uint32_t *tables = (void *)(g->copy + g->header.offset[KV_TABLES]);
    const struct kv_block_rec *blocks = (void *)(g->copy + g->header.offset[KV_BLOCKS]);
    const struct kv_published_rec *published = (void *)(g->copy + g->header.offset[KV_PUBLISHED]);
    const uint32_t first = tables[seq * M_ROW];
    return !seq_recs(g)[seq].is_lazy && blocks[first].n_refs == 1 && published[first].state == 0;
}

/* A grown arena with at least three sequences of some blocks. */
static void grow_rich(struct grown *g, uint32_t out_seq[3])
{
    for (uint64_t seed = 1;; seed++) {
        grow(g, seed, 300);
        uint32_t n = 0;
        for (uint32_t i = 0; i < M_SEQUENCES && n < 3; i++)
            if (seq_recs(g)[i].state == KV_LIVE && seq_recs(g)[i].n_blocks >= 2 &&
                seq_recs(g)[i].longest > M_BLOCK_TOKENS && is_first_its_own(g, i))
                out_seq[n++] = i;
        if (n == 3 && seq_recs(g)[out_seq[0]].tenant != seq_recs(g)[out_seq[2]].tenant)
            return;
        grown_fini(g);
    }
}

static void derived_state_in_ruins_is_rebuilt(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 50; seed++) {
        struct grown g;
        grow(&g, seed, 400);
        uint64_t random = seed;
        for (size_t i = g.header.offset[KV_BLOCKS]; i < g.header.offset[KV_HEADS]; i++)
            g.copy[i] = (uint8_t)random_mixed(&random);
        memset(g.copy + g.header.offset[KV_HEADS], 0xff, offsetof(struct kv_heads, stats));
        for (uint32_t i = 0; i < M_SEQUENCES; i++) {
            struct kv_seq_rec *s = &seq_recs(&g)[i];
            s->n_outstanding = KV_MAX_OUTSTANDING;
            s->has_ids = !s->has_ids;
            s->n_blocks = s->longest = s->journal_head = s->n_maybe_shared = UINT32_MAX;
        }
        struct kv *kv = open_copy(&g, seed);
        const char *diff = model_difference(kv, &g.model, &g.device);
        if (diff[0] != '\0')
            fail_msg("seed %llu: %s", (unsigned long long)seed, diff);
        assert_int_equal(n_damaged(kv), 0);
        kv_close(kv);
        grown_fini(&g);
    }
}

static void a_flipped_bit_in_a_sealed_record_drops_that_sequence_alone(void **state)
{
    (void)state;
    struct grown g;
    uint32_t seq[3];
    grow_rich(&g, seq);
    const size_t sealed[] = {offsetof(struct kv_seq_rec, tenant), offsetof(struct kv_seq_rec, name),
                             offsetof(struct kv_seq_rec, seal), offsetof(struct kv_seq_rec, pool),
                             offsetof(struct kv_seq_rec, state)};
    for (size_t f = 0; f < sizeof sealed / sizeof sealed[0]; f++) {
        for (uint32_t bit = 0; bit < 16; bit++) {
            memcpy(g.copy, g.bytes, g.n_bytes);
            uint64_t n_open = 0;
            for (uint32_t i = 0; i < M_SEQUENCES; i++)
                n_open += seq_recs(&g)[i].state == KV_LIVE;
            ((uint8_t *)&seq_recs(&g)[seq[1]])[sealed[f] + bit / 8] ^= 1u << bit % 8;
            struct kv *kv = open_copy(&g, f);
            struct kv_stats s;
            kv_stats_read(kv, &s);
            assert_int_equal(s.damaged, 1);
            assert_int_equal(s.sequences, n_open - 1);
            kv_close(kv);
        }
    }
    grown_fini(&g);
}

static void a_damaged_pool_is_dropped_with_its_sequences(void **state)
{
    (void)state;
    struct grown g;
    uint32_t seq[3];
    grow_rich(&g, seq);
    g.copy[g.header.offset[KV_SPECS]] ^= 1;
    struct kv *kv = open_copy(&g, 0);
    struct kv_stats s;
    kv_stats_read(kv, &s);
    assert_int_equal(s.pools, 0);
    assert_int_equal(s.blocks_total, 0);
    assert_int_equal(s.sequences, 0);
    assert_true(s.damaged >= 4);
    test_pool(kv, "again", M_LAYERS, M_BLOCK_TOKENS, M_BLOCKS);
    test_check(kv);
    kv_close(kv);
    grown_fini(&g);
}

static void a_table_entry_that_names_a_strangers_block_drops_both(void **state)
{
    (void)state;
    struct grown g;
    uint32_t seq[3];
    grow_rich(&g, seq);
    uint32_t *tables = (void *)(g.copy + g.header.offset[KV_TABLES]);
    /* Its own block at two places: it alone. */
    tables[seq[1] * M_ROW] = tables[seq[1] * M_ROW + 1];
    struct kv *kv = open_copy(&g, 0);
    assert_true(n_damaged(kv) >= 1);
    kv_seq_id id;
    const struct kv_seq_rec *s = &seq_recs(&g)[seq[1]];
    assert_int_equal(kv_seq_find(kv, s->tenant, s->name, &id), ATTN_ENOTFOUND);
    kv_close(kv);
    /* Another tenant's block. */
    memcpy(g.copy, g.bytes, g.n_bytes);
    tables[seq[0] * M_ROW] = tables[seq[2] * M_ROW];
    kv = open_copy(&g, 0);
    assert_true(n_damaged(kv) >= 2);
    for (int i = 0; i < 3; i += 2) {
        s = &seq_recs(&g)[seq[i]];
        assert_int_equal(kv_seq_find(kv, s->tenant, s->name, &id), ATTN_ENOTFOUND);
    }
    kv_close(kv);
    /* No block of the pool at all. */
    memcpy(g.copy, g.bytes, g.n_bytes);
    tables[seq[0] * M_ROW] = M_BLOCKS;
    kv = open_copy(&g, 0);
    assert_int_equal(n_damaged(kv), 1);
    kv_close(kv);
    grown_fini(&g);
}

static void flip(struct grown *g, uint64_t *random)
{
    const uint32_t odd[] = {0, 1, UINT32_MAX, 0x80000000u, KV_LIVE, M_BLOCKS, M_ROW};
    /* Sections alike often, whatever their size; the header is another test's. */
    uint32_t section = 1 + (uint32_t)(random_mixed(random) % (KV_N_SECTIONS - 1));
    size_t from = g->header.offset[section];
    size_t to = section + 1 < KV_N_SECTIONS ? g->header.offset[section + 1] : g->n_bytes;
    if (section != KV_SPECS && to - from > 700)
        to = from + 700; /* where the records are */
    size_t at = from + random_mixed(random) % (to - from);
    if (random_mixed(random) % 2 == 0) {
        g->copy[at] ^= 1u << random_mixed(random) % 8;
    } else {
        at &= ~(size_t)3;
        memcpy(g->copy + at, &odd[random_mixed(random) % 7], 4);
    }
}

/* Uses everything that recovery left. */
static void use(struct kv *kv, uint64_t *random)
{
    static struct test_fx t;
    struct model as_seen = {0}; /* so that operations are drawn; its prediction is not used */
    for (uint32_t slot = 0; slot < M_SLOTS; slot++) {
        kv_seq_id id;
        struct kv_seq_info info;
        as_seen.seq[slot].is_open = kv_seq_find(kv, slot / M_NAMES, slot % M_NAMES, &id) == ATTN_OK;
        if (!as_seen.seq[slot].is_open)
            continue;
        kv_seq_info(kv, id, &info);
        memcpy(as_seen.seq[slot].len, info.layer_len, sizeof as_seen.seq[slot].len);
        assert_true(info.n_blocks <= M_ROW);
        for (uint32_t i = 0; i < info.n_blocks; i++)
            assert_true(info.block_table[i] < M_BLOCKS);
    }
    for (uint32_t i = 0; i < 20; i++) {
        struct op op = model_op(&as_seen, random);
        test_fx_reset(&t);
        model_kv_apply(kv, &op, &t, NULL);
    }
    test_check(kv);
}

static void fuzz_one(uint64_t seed, uint32_t *n_dropped)
{
    struct grown g;
    uint64_t random = seed; /* not the draws of grow() */
    grow(&g, seed, 60 + seed % 200);
    uint32_t n_flips = 1u << random_mixed(&random) % 8;
    for (uint32_t i = 0; i < n_flips; i++)
        flip(&g, &random);
    struct kv *kv = open_copy(&g, seed);
    *n_dropped += n_damaged(kv) < 1000 ? n_damaged(kv) : 0; /* the counter may be hit, too */
    use(kv, &random);
    kv_close(kv);
    grown_fini(&g);
}

static void an_arena_with_random_damage_is_recovered_and_usable(void **state)
{
    (void)state;
    uint32_t n_dropped = 0;
    if (only_seed != 0) {
        fuzz_one(only_seed, &n_dropped);
        return;
    }
    for (uint64_t seed = 1; seed <= N_FUZZ; seed++)
        fuzz_one(seed, &n_dropped);
    assert_true(n_dropped > N_FUZZ / 10);
}

int main(int argc, char **argv)
{
    if (argc > 1)
        only_seed = strtoull(argv[1], NULL, 10);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(derived_state_in_ruins_is_rebuilt),
        cmocka_unit_test(a_flipped_bit_in_a_sealed_record_drops_that_sequence_alone),
        cmocka_unit_test(a_damaged_pool_is_dropped_with_its_sequences),
        cmocka_unit_test(a_table_entry_that_names_a_strangers_block_drops_both),
        cmocka_unit_test(an_arena_with_random_damage_is_recovered_and_usable),
    };
    return cmocka_run_group_tests_name("kv_damage", tests, NULL, NULL);
}
