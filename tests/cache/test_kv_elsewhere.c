/* test_kv_elsewhere.c: evicted blocks go to a host tier and come back, against a model: random
 * opens, appends, forks, truncations and closes in a pool that is too small for them. Each block's
 * bytes are a hash of all tokens up to its end, so that whatever a sequence begins with can be
 * compared with what it would have computed. Moves fail, bits flip, the tier is full: then the
 * tokens are computed anew.
 */
#include <stdlib.h>
#include <string.h>

#include "cache/host_tier.h"
#include "tests/cache/kv_test.h"

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
static struct host_tier *tier;
static kv_pool_id pool;
static uint8_t device[N_BLOCKS][BLOCK_BYTES];
static uint32_t fail_one_in, flip_one_in; /* 0: never */
static uint64_t n_out, n_in, n_failed, n_flipped, seed;

static uint32_t below(uint32_t n)
{
    seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % n;
}

static bool chance(uint32_t one_in)
{
    return one_in != 0 && below(one_in) == 0;
}

static void *take(void *arg, size_t bytes)
{
    (void)arg;
    return chance(fail_one_in) ? NULL : malloc(bytes);
}

static void give(void *arg, void *p, size_t bytes)
{
    (void)arg, (void)bytes;
    free(p);
}

static void evicted(void *arg, const struct kv_content *c, uint32_t block)
{
    (void)arg;
    struct host_block *b = host_tier_place(tier, c, BLOCK_BYTES);
    if (b == NULL)
        return;
    if (chance(fail_one_in)) {
        n_failed++;
        host_tier_drop(tier, b);
        return;
    }
    memcpy(host_block_bytes(b), device[block], BLOCK_BYTES);
    host_tier_filled(tier, b);
    n_out++;
}

static void *find(void *arg, struct kv_content *c)
{
    (void)arg;
    struct host_block *b = host_tier_find(tier, c);
    if (b == NULL)
        return NULL;
    if (chance(flip_one_in)) {
        ((uint8_t *)host_block_bytes(b))[below(BLOCK_BYTES)] ^= (uint8_t)(1u << below(8));
        n_flipped++;
    }
    if (!host_tier_verify(tier, b))
        return NULL;
    c->serial = host_block_serial(b);
    host_tier_hold(tier, b);
    return b;
}

static uint64_t serial(void *arg, const struct kv_content *c)
{
    (void)arg;
    return host_tier_serial(tier, c);
}

static bool bring(void *arg, void *found, uint32_t of_pool, const uint32_t *block)
{
    (void)arg;
    assert_int_equal(of_pool, pool.index);
    bool is_there = block != NULL && !chance(fail_one_in);
    if (is_there)
        memcpy(device[*block], host_block_bytes(found), BLOCK_BYTES);
    n_in += is_there;
    host_tier_let_go(tier, found);
    return is_there;
}

static const struct kv_elsewhere elsewhere = {NULL, evicted, find, serial, bring};

/* The model of a sequence. */
static struct {
    bool is_open;
    kv_seq_id id;
    uint32_t n, ids[MAX_TOKENS];
} seqs[N_SEQS];
static uint64_t next_name;

static void begin(uint64_t limit_bytes)
{
    struct kv_config c = {
        .max_pools = 2,
        .max_blocks = N_BLOCKS,
        .max_sequences = N_SEQS,
        .max_seq_blocks = MAX_TOKENS / BLOCK_TOKENS,
        .max_layers = N_LAYERS,
        .max_seq_tokens = MAX_TOKENS,
        .max_block_tokens = BLOCK_TOKENS,
        .max_owners = 2,
        .block_layout = 1,
    };
    struct kv_pool_spec s = {
        .name = "p", .n_layers = N_LAYERS, .n_blocks = N_BLOCKS, .block_tokens = BLOCK_TOKENS};
    kv = test_kv_open(&c, -1);
    assert_int_equal(kv_pool_create(kv, &s, &pool), ATTN_OK);
    fail_one_in = flip_one_in = 0;
    const struct host_tier_memory m = {take, give, NULL};
    assert_int_equal(host_tier_open(limit_bytes, &m, &tier), ATTN_OK);
    kv_set_elsewhere(kv, &elsewhere);
    memset(seqs, 0, sizeof seqs);
    memset(device, 0xee, sizeof device);
    n_out = n_in = n_failed = n_flipped = 0;
    next_name = 1;
    seed = 7;
}

static void end(void)
{
    host_tier_close(tier);
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
    assert_null(host_tier_check(tier));
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

/* Opens slot s with a prompt, begins with what is there, computes the rest. */
static uint32_t open_prompt(uint32_t s, uint32_t prompt, uint32_t n)
{
    struct kv_patch patches[64];
    struct kv_effects fx = {.patches = patches, .patches_capacity = 64};
    struct kv_seq_info info;
    uint32_t ids[MAX_TOKENS];
    for (uint32_t i = 0; i < n; i++)
        ids[i] = i < 2 * BLOCK_TOKENS ? prompt % 3 : prompt * 100 + i; /* some share a beginning */
    const struct kv_tokens t = {.ids = ids, .n = n};
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
    struct kv_patch patches[64];
    struct kv_effects fx = {.patches = patches, .patches_capacity = 64};
    uint32_t len = below(seqs[src].n + 1);
    assert_int_equal(kv_seq_fork(kv, seqs[src].id, next_name++, len, KV_NO_OWNER, KV_NO_REQUEST,
                                 &fx, &seqs[s].id),
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

static void random_mix(uint64_t limit_bytes, uint32_t fails, uint32_t flips)
{
    struct host_tier_stats h;
    begin(limit_bytes);
    fail_one_in = fails;
    flip_one_in = flips;
    for (uint32_t i = 0; i < N_ROUNDS; i++)
        some_round();
    host_tier_stats_read(tier, &h);
    assert_true(n_out > 100 && n_in > 100);
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
    assert_int_equal(n_flipped, 1);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_comes_back_is_what_went),
        cmocka_unit_test(a_tier_that_is_too_small),
        cmocka_unit_test(moves_and_memory_that_fail),
        cmocka_unit_test(bits_that_flip),
        cmocka_unit_test(a_prompt_comes_back_whole),
        cmocka_unit_test(what_is_computed_anew_has_the_same_serial),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
