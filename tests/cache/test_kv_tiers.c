/* test_kv_tiers.c: evicted blocks go to a host tier and come back, checked against a model: random
 * opens, appends, forks, truncations and closes in a pool that is too small for them. Each block's
 * bytes are a hash of all tokens up to its end, so that whatever a sequence begins with can be
 * compared with what it would have computed. If a move fails, a bit flips or the tier is full, the
 * tokens must be computed anew.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <xxhash.h>

#include "cache/tier_store.h"
#include "tests/cache/kv_test.h"
#include "tests/cache/reader.h"
#include "tests/random.h"

enum {
    BLOCK_TOKENS = 4,
    N_BLOCKS = 40,
    N_LAYERS = 2,
    N_SEQS = 6,
    N_PROMPTS = 12,
    MAX_TOKENS = 40,
    N_ROUNDS = 4000,
    BLOCK_BYTES = 4096,
};

static struct kv *kv;
static struct tier_store *tier;
static kv_pool_id pool;
static uint8_t device[N_BLOCKS][BLOCK_BYTES];
static uint32_t fail_one_in, flip_one_in; /* 0: never */
static bool promote_waits; /* an open may go on without its blocks */
static uint64_t n_out, n_in, n_failed, n_flipped, seed;

static uint32_t below(uint32_t n)
{
    return random_below(&seed, n);
}

static bool chance(uint32_t one_in)
{
    return one_in != 0 && below(one_in) == 0;
}

static bool take(void *arg, uint64_t bytes, uint64_t *out_place)
{
    (void)arg;
    if (chance(fail_one_in))
        return false;
    *out_place = (uintptr_t)malloc(bytes);
    return true;
}

static void give(void *arg, uint64_t place, uint64_t bytes)
{
    (void)arg, (void)bytes;
    free((void *)(uintptr_t)place);
}

static void *host_bytes(const struct tier_block *b)
{
    return (void *)(uintptr_t)tier_block_place(b);
}

struct sum {
    uint64_t word[2];
};
static struct sum sum_of(const void *bytes)
{
    XXH128_hash_t h = XXH3_128bits(bytes, BLOCK_BYTES);
    return (struct sum){{h.low64, h.high64}};
}

static void evicted(void *arg, const struct kv_content *c, uint32_t block)
{
    (void)arg;
    struct tier_block *b = tier_store_place(tier, c, BLOCK_BYTES);
    if (b == NULL)
        return;
    if (chance(fail_one_in)) {
        n_failed++;
        tier_store_drop(tier, b);
        return;
    }
    memcpy(host_bytes(b), device[block], BLOCK_BYTES);
    tier_store_filled(tier, b, sum_of(device[block]).word);
    n_out++;
}

/* Promotions under way; their bytes come when they end. */
enum { MAX_PROMOTIONS = 3, MAX_FOUND = MAX_TOKENS / BLOCK_TOKENS };
static struct {
    struct kv_promote *f; /* NULL: none */
    uint32_t n; /* blocks that it takes */
    struct tier_block *from[MAX_FOUND];
} promotions[MAX_PROMOTIONS];
static struct tier_block *found[MAX_FOUND];
static uint32_t n_found, n_as_said;

static bool find(void *arg, struct kv_content *c)
{
    (void)arg;
    struct tier_block *b = tier_store_find(tier, c);
    if (b == NULL)
        return false;
    c->serial = tier_block_content(b)->serial;
    tier_store_hold(tier, b);
    found[n_found++] = b;
    return true;
}

static uint64_t serial(void *arg, const struct kv_content *c)
{
    (void)arg;
    return tier_store_serial(tier, c);
}

static const struct kv_tier_ops tier_ops = {NULL, evicted, find, serial};

static bool promote_begin(uint32_t i, const struct kv_tokens *t)
{
    n_found = 0;
    struct kv_pool_spec spec;
    uint32_t n_free, most = 1 + below(MAX_FOUND);
    uint32_t size = kv_prefix_find(kv, pool, 0, t, most).n_in_tier;
    kv_pool_info(kv, pool, &spec, &n_free);
    n_free -= kv_pool_cached(kv, pool);
    promotions[i].f = kv_promote_begin(kv, pool, 0, KV_NO_OWNER, t, most);
    if (size <= n_free) { /* nothing made way */
        assert_int_equal(n_found, size);
        n_as_said += size > 0;
    }
    if (promotions[i].f == NULL) {
        assert_int_equal(n_found, 0);
        return false;
    }
    promotions[i].n = n_found;
    memcpy(promotions[i].from, found, sizeof found);
    for (uint32_t k = 0; k < n_found; k++)
        memset(device[kv_promote_block(promotions[i].f, k)], 0xee, BLOCK_BYTES);
    return true;
}

/* Some of the bytes come, some fail, some are not what they were. */
static void promote_end(uint32_t i)
{
    uint32_t n = promotions[i].n, n_there = 0;
    for (uint32_t k = 0; k < n; k++) {
        struct tier_block *b = promotions[i].from[k];
        uint8_t *to = device[kv_promote_block(promotions[i].f, k)];
        memcpy(to, host_bytes(b), BLOCK_BYTES);
        bool is_flipped = chance(flip_one_in);
        if (is_flipped)
            to[below(BLOCK_BYTES)] ^= (uint8_t)(1u << below(8));
        bool is_good = tier_store_verify(tier, b, sum_of(to).word);
        assert_int_equal(is_good, !is_flipped);
        n_flipped += is_flipped;
        is_good = is_good && !chance(fail_one_in);
        n_there += is_good && n_there == k;
        tier_store_release(tier, b);
    }
    n_in += n_there;
    kv_promote_end(kv, promotions[i].f, n_there);
    promotions[i].f = NULL;
}

/* The model of a sequence. */
static struct {
    bool is_open;
    kv_seq_id id;
    uint32_t n, ids[MAX_TOKENS];
} seqs[N_SEQS];
static uint64_t next_name;
static struct reader reader;

static struct kv_config config(void)
{
    return (struct kv_config){
        .max_pools = 2,
        .max_blocks = N_BLOCKS,
        .max_sequences = N_SEQS,
        .max_seq_blocks = MAX_TOKENS / BLOCK_TOKENS,
        .max_layers = N_LAYERS,
        .max_seq_tokens = MAX_TOKENS,
        .max_block_tokens = BLOCK_TOKENS,
        .max_owners = 2,
        .block_layout = 1,
        .events_kept = 64,
    };
}

static void begin(uint64_t limit_bytes)
{
    struct kv_config c = config();
    struct kv_pool_spec s = {
        .name = "p", .n_layers = N_LAYERS, .n_blocks = N_BLOCKS, .block_tokens = BLOCK_TOKENS};
    kv = test_kv_open(&c, -1);
    assert_int_equal(kv_pool_create(kv, &s, &pool), ATTN_OK);
    fail_one_in = flip_one_in = 0;
    promote_waits = false;
    const struct tier_memory m = {.take = take, .give = give};
    assert_int_equal(tier_store_open(limit_bytes, &m, &tier), ATTN_OK);
    kv_set_tier_ops(kv, &tier_ops);
    memset(seqs, 0, sizeof seqs);
    memset(&reader, 0, sizeof reader);
    memset(device, 0xee, sizeof device);
    n_out = n_in = n_failed = n_flipped = n_as_said = 0;
    next_name = 1;
    seed = 7;
}

static void end(void)
{
    for (uint32_t i = 0; i < MAX_PROMOTIONS; i++)
        if (promotions[i].f != NULL)
            promote_end(i);
    tier_store_close(tier);
    kv_close(kv);
}

/* What block i of these tokens holds. */
static uint64_t bytes_of(const uint32_t *ids, uint32_t i)
{
    uint64_t h = 0;
    for (uint32_t t = 0; t < (i + 1) * BLOCK_TOKENS; t++)
        h = (h ^ ids[t]) * UINT64_C(0x9e3779b97f4a7c15) + t;
    return h;
}

static void check_block(uint32_t s, const struct kv_seq_info *info, uint32_t i)
{
    uint64_t expected = bytes_of(seqs[s].ids, i);
    for (uint32_t at = 0; at < BLOCK_BYTES; at += 512)
        assert_memory_equal(device[info->block_table[i]] + at, &expected, sizeof expected);
}

/* Every full block of every sequence holds what its tokens make. */
static void check_all(void)
{
    if (kv_check(kv) != ATTN_OK)
        fail_msg("%s", kv_last_error(kv));
    assert_null(tier_store_check(tier));
    reader_catch_up(&reader, kv);
    assert_string_equal(reader_difference(&reader, kv), "");
    for (uint32_t s = 0; s < N_SEQS; s++) {
        struct kv_seq_info info;
        if (!seqs[s].is_open)
            continue;
        kv_seq_info(kv, seqs[s].id, &info);
        assert_int_equal(info.layer_len[0], seqs[s].n);
        for (uint32_t i = 0; i < seqs[s].n / BLOCK_TOKENS; i++)
            check_block(s, &info, i);
    }
    struct kv_stats k;
    kv_stats_read(kv, &k);
    assert_int_equal(k.blocks_free + k.blocks_used + k.blocks_cached, N_BLOCKS);
}

/* The next n tokens in every layer; what the blocks then hold is written as a device would. */
static bool append(uint32_t s, const uint32_t *ids, uint32_t n)
{
    struct kv_patch patches[64];
    struct kv_copy copies[64];
    struct kv_seq_info info;
    uint32_t pos = seqs[s].n;
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        struct kv_effects fx = {patches, copies, 0, 0, 64, 64};
        attn_status st = kv_append_reserve(kv, seqs[s].id, l, pos, n, &fx);
        if (st == ATTN_ENOBLOCKS && l == 0)
            return false;
        assert_int_equal(st, ATTN_OK);
        for (uint32_t i = 0; i < fx.n_copies; i++)
            memcpy(device[copies[i].dst], device[copies[i].src], BLOCK_BYTES);
        kv_seq_info(kv, seqs[s].id, &info);
        memcpy(seqs[s].ids + pos, ids, n * sizeof ids[0]);
        for (uint32_t i = pos / BLOCK_TOKENS; i < (pos + n) / BLOCK_TOKENS; i++)
            for (uint32_t at = 0; at < BLOCK_BYTES; at += 8)
                memcpy(device[info.block_table[i]] + at, &(uint64_t){bytes_of(seqs[s].ids, i)}, 8);
        kv_append_commit(kv, seqs[s].id, l, pos, n);
    }
    seqs[s].n += n;
    return true;
}

static void prompt_ids(uint32_t ids[MAX_TOKENS], uint32_t prompt)
{
    for (uint32_t i = 0; i < MAX_TOKENS; i++)
        ids[i] = i < 2 * BLOCK_TOKENS ? prompt % 3 : prompt * 100 + i; /* some share a beginning */
}

/* Opens slot s with a prompt, begins with what is there, computes the rest. */
static uint32_t open_prompt(uint32_t s, uint32_t prompt, uint32_t n)
{
    struct kv_patch patches[64];
    struct kv_effects fx = {.patches = patches, .patches_capacity = 64};
    struct kv_seq_info info;
    uint32_t ids[MAX_TOKENS];
    prompt_ids(ids, prompt);
    const struct kv_tokens t = {.ids = ids, .n = n};
    for (uint32_t i = 0; i < MAX_PROMOTIONS; i++)
        if (promotions[i].f != NULL && below(2) == 0)
            promote_end(i);
    if (promotions[0].f == NULL)
        while (promote_begin(0, &t)) { /* until nothing comes any more */
            uint64_t n_before = n_in;
            if (promote_waits && below(3) == 0)
                break;
            check_all();
            promote_end(0);
            if (n_in == n_before)
                break;
        }
    check_all();
    assert_int_equal(kv_seq_open_with(kv, 0, next_name++, pool, KV_NO_OWNER, KV_NO_REQUEST, &t, &fx,
                                      &seqs[s].id),
                     ATTN_OK);
    kv_seq_info(kv, seqs[s].id, &info);
    seqs[s].is_open = true;
    seqs[s].n = info.n_cached;
    memcpy(seqs[s].ids, ids, sizeof ids);
    check_all();
    append(s, ids + seqs[s].n, n - seqs[s].n);
    return info.n_cached;
}

static void close_seq(uint32_t s)
{
    kv_seq_close(kv, seqs[s].id);
    seqs[s].is_open = false;
}

static void fork_into(uint32_t src, uint32_t s)
{
    uint32_t len = below(seqs[src].n + 1);
    assert_int_equal(
        kv_seq_fork(kv, seqs[src].id, next_name++, len, KV_NO_OWNER, KV_NO_REQUEST, &seqs[s].id),
        ATTN_OK);
    seqs[s].is_open = true;
    seqs[s].n = len;
    memcpy(seqs[s].ids, seqs[src].ids, sizeof seqs[s].ids);
}

static void some_round(void)
{
    uint32_t s = below(N_SEQS), epoch, from = below(N_SEQS);
    if (!seqs[s].is_open) {
        if (from != s && seqs[from].is_open && below(4) == 0)
            fork_into(from, s);
        else
            open_prompt(s, below(N_PROMPTS), MAX_TOKENS - below(16));
    } else if (below(3) == 0) {
        uint32_t len = below(seqs[s].n + 1);
        assert_int_equal(kv_seq_truncate(kv, seqs[s].id, len, KV_NO_REQUEST, &epoch), ATTN_OK);
        seqs[s].n = len;
        uint32_t more[BLOCK_TOKENS] = {below(1000), below(1000), below(1000), below(1000)};
        if (len + BLOCK_TOKENS <= MAX_TOKENS)
            append(s, more, BLOCK_TOKENS);
    } else {
        close_seq(s);
    }
    check_all();
}

/* Blocks of some prompt begin to come, or have come. */
static void some_promotion(void)
{
    uint32_t i = below(MAX_PROMOTIONS), ids[MAX_TOKENS];
    if (promotions[i].f != NULL) {
        promote_end(i);
        return;
    }
    prompt_ids(ids, below(N_PROMPTS));
    promote_begin(i, &(struct kv_tokens){.ids = ids, .n = MAX_TOKENS - below(16)});
}

static void random_mix(uint64_t limit_bytes, uint32_t fails, uint32_t flips)
{
    struct tier_store_stats h;
    begin(limit_bytes);
    promote_waits = true;
    fail_one_in = fails;
    flip_one_in = flips;
    for (uint32_t i = 0; i < N_ROUNDS; i++) {
        if (below(3) == 0)
            some_promotion();
        some_round();
    }
    tier_store_stats_read(tier, &h);
    assert_true(n_out > 100 && n_in > 100);
    assert_true(n_as_said > 10);
    assert_int_equal(h.damaged, n_flipped);
    assert_true((fails == 0 || n_failed > 10) && (flips == 0 || n_flipped > 10));
    end();
}

static void what_comes_back_is_what_went(void **state)
{
    (void)state;
    random_mix(200 * BLOCK_BYTES, 0, 0);
}

static void a_tier_that_is_too_small(void **state)
{
    (void)state;
    random_mix(20 * BLOCK_BYTES, 0, 0);
}

static void moves_and_memory_that_fail(void **state)
{
    (void)state;
    random_mix(100 * BLOCK_BYTES, 5, 0);
}

static void bits_that_flip(void **state)
{
    (void)state;
    random_mix(100 * BLOCK_BYTES, 0, 5);
}

static void a_prompt_comes_back_whole(void **state)
{
    (void)state;
    begin(1 << 20);
    for (uint32_t prompt = 0; prompt < N_PROMPTS; prompt++) { /* far more than the pool has */
        open_prompt(0, prompt, MAX_TOKENS);
        close_seq(0);
    }
    uint32_t all = MAX_TOKENS - BLOCK_TOKENS; /* never the last token */
    for (uint32_t prompt = 0; prompt < N_PROMPTS; prompt++) {
        assert_int_equal(open_prompt(0, prompt, MAX_TOKENS), all);
        close_seq(0);
    }
    /* with one bit flipped in all that is there: nothing of it is served */
    flip_one_in = 1;
    uint64_t n_before = n_in;
    assert_true(open_prompt(0, 0, MAX_TOKENS) < all);
    assert_int_equal(n_in, n_before);
    assert_true(n_flipped > 0);
    close_seq(0);
    end();
}

/* A prompt of full blocks alone never begins with its last one, which is computed anew; what is
 * chained to the equal one in the tier is found all the same. */
static void what_is_computed_anew_has_the_same_serial(void **state)
{
    (void)state;
    begin(1 << 20);
    open_prompt(0, 0, MAX_TOKENS);
    close_seq(0);
    for (uint32_t prompt = 1; prompt < N_PROMPTS; prompt++) {
        open_prompt(0, prompt, MAX_TOKENS);
        close_seq(0);
    }
    uint32_t half = MAX_TOKENS / 2 / BLOCK_TOKENS * BLOCK_TOKENS;
    assert_int_equal(open_prompt(0, 0, half), half - BLOCK_TOKENS);
    close_seq(0);
    assert_int_equal(open_prompt(0, 0, MAX_TOKENS), MAX_TOKENS - BLOCK_TOKENS);
    close_seq(0);
    end();
}

/* The process dies with blocks on their way: they had no owner, so all there is stays, and they
 * are free again. */
static void a_successor_knows_nothing_of_a_promotion(void **state)
{
    (void)state;
    for (uint32_t round = 0; round < 50; round++) {
        struct kv_stats before, after;
        uint32_t n_coming = 0;
        begin(200 * BLOCK_BYTES);
        seed = 100 + round;
        promote_waits = true;
        for (uint32_t i = 0; i < 100 || n_coming == 0; i++) {
            some_promotion();
            some_round();
            n_coming = 0;
            for (uint32_t k = 0; k < MAX_PROMOTIONS; k++)
                n_coming += promotions[k].f != NULL ? promotions[k].n : 0;
        }
        kv_stats_read(kv, &before);
        int fd = dup(kv_fd(kv));
        for (uint32_t k = 0; k < MAX_PROMOTIONS; k++)
            if (promotions[k].f != NULL) {
                uint32_t n = promotions[k].n;
                for (uint32_t i = 0; i < n; i++) /* half written */
                    memset(device[kv_promote_block(promotions[k].f, i)], 0x5a, BLOCK_BYTES);
            }
        struct kv_config c = config();
        struct kv *successor = test_kv_open(&c, fd);
        assert_int_equal(kv_check(successor), ATTN_OK);
        kv_stats_read(successor, &after);
        assert_int_equal(after.damaged, 0);
        assert_int_equal(after.sequences, before.sequences);
        assert_int_equal(after.blocks_published, before.blocks_published);
        assert_int_equal(after.blocks_free, before.blocks_free + n_coming);
        struct kv *dead = kv;
        kv = successor;
        check_all(); /* every sequence holds what its tokens make */
        kv_close(successor);
        kv = dead;
        for (uint32_t k = 0; k < MAX_PROMOTIONS; k++) {
            for (uint32_t i = 0; promotions[k].f != NULL && i < promotions[k].n; i++)
                tier_store_release(tier, promotions[k].from[i]);
            promotions[k].f = NULL; /* kv_close forgets it */
        }
        end();
        close(fd);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_comes_back_is_what_went),
        cmocka_unit_test(a_tier_that_is_too_small),
        cmocka_unit_test(moves_and_memory_that_fail),
        cmocka_unit_test(bits_that_flip),
        cmocka_unit_test(a_prompt_comes_back_whole),
        cmocka_unit_test(a_successor_knows_nothing_of_a_promotion),
        cmocka_unit_test(what_is_computed_anew_has_the_same_serial),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
