/* test_kv_retention.c: tests which published block is evicted first (priorities, times to live and
 * pins) against a search over all that is published, what recovery keeps of retention, and what is
 * refused.
 */
#include <string.h>

#include "cache/kv_internal.h"
#include "tests/cache/kv_test.h"
#include "tests/random.h"

enum {
    N_PROMPTS = 9,
    BLOCK_TOKENS = 4,
    N_BLOCKS = 32,
    MAX_TOKENS = 32,
    N_ROUNDS = 3000,
    MOST_HELD = 6
};

static struct kv *kv;
static kv_pool_id pool;
static uint64_t seed, next_name;
static uint32_t now_s;

static uint32_t below(uint32_t n)
{
    return random_below(&seed, n);
}

static void begin(void)
{
    struct kv_config c = {
        .max_pools = 1,
        .max_blocks = N_BLOCKS,
        .max_sequences = 4,
        .max_seq_blocks = MAX_TOKENS / BLOCK_TOKENS,
        .max_layers = 1,
        .max_seq_tokens = MAX_TOKENS,
        .max_block_tokens = BLOCK_TOKENS,
        .max_owners = 2,
        .block_layout = 1,
    };
    struct kv_pool_spec s = {
        .name = "p", .n_layers = 1, .n_blocks = N_BLOCKS, .block_tokens = BLOCK_TOKENS};
    kv = test_kv_open(&c, -1);
    assert_int_equal(kv_pool_create(kv, &s, &pool), ATTN_OK);
    seed = next_name = 1;
    now_s = 1000;
    kv_set_time(kv, now_s);
}

/* Opens a sequence of the prompt, computes the rest of its n tokens; the status of that. */
static attn_status open_prompt(uint32_t prompt, uint32_t n, const struct kv_retention *r,
                               uint32_t n_retentions, kv_seq_id *out, uint32_t *out_cached)
{
    struct kv_patch patches[64];
    struct kv_copy copies[64];
    struct kv_effects fx = {patches, copies, 0, 0, 64, 64};
    struct kv_seq_info info;
    uint32_t ids[MAX_TOKENS];
    for (uint32_t i = 0; i < n; i++)
        ids[i] = prompt * 1000 + i;
    const struct kv_tokens t = {ids, n, 0, r, n_retentions};
    attn_status st =
        kv_seq_open_with(kv, 0, next_name++, pool, KV_NO_OWNER, KV_NO_REQUEST, &t, &fx, out);
    if (st != ATTN_OK)
        return st;
    kv_seq_info(kv, *out, &info);
    *out_cached = info.n_cached;
    st = kv_append_reserve(kv, *out, 0, info.n_cached, n - info.n_cached, &fx);
    if (st == ATTN_OK)
        kv_append_commit(kv, *out, 0, info.n_cached, n - info.n_cached);
    return st;
}

/* Tokens that were cached of a prompt that is opened, computed and closed. */
static uint32_t use(uint32_t prompt, uint32_t n, const struct kv_retention *r, uint32_t n_ranges)
{
    kv_seq_id seq;
    uint32_t n_cached;
    assert_int_equal(open_prompt(prompt, n, r, n_ranges, &seq, &n_cached), ATTN_OK);
    kv_seq_close(kv, seq);
    return n_cached;
}

static void check(void)
{
    if (kv_check(kv) != ATTN_OK)
        fail_msg("%s", kv_last_error(kv));
}

static bool is_over(const struct kv_retained_rec *t)
{
    return t->life > 0 && now_s - t->used_s >= 1u << (t->life - 1);
}

static uint64_t goes_at(const struct kv_pool_rec *p, uint32_t block)
{
    return kv_published(kv, p, block)->used +
           (kv_retained(kv, p, block)->was_found ? 2 * N_BLOCKS : 0);
}

/* The block that must go next, by looking at all; N_BLOCKS: none may. */
static uint32_t must_go(void)
{
    const struct kv_pool_rec *p = kv_pool_live(kv, pool.index);
    uint32_t best = N_BLOCKS;
    for (uint32_t i = 0; i < N_BLOCKS; i++) {
        if (!kv_is_published(kv, p, i) || kv_block(kv, p, i)->n_refs > 0)
            continue;
        const struct kv_retained_rec *t = kv_retained(kv, p, i), *b = kv_retained(kv, p, best);
        if (t->is_pinned)
            continue;
        bool is_less = best == N_BLOCKS || t->priority < b->priority ||
                       (t->priority == b->priority && is_over(t) && !is_over(b)) ||
                       (t->priority == b->priority && is_over(t) == is_over(b) &&
                        goes_at(p, i) < goes_at(p, best));
        best = is_less ? i : best;
    }
    return best;
}

/* One that was found and one that was not can have their turn at the same time. */
static bool is_tie(uint32_t a, uint32_t b)
{
    const struct kv_pool_rec *p = kv_pool_live(kv, pool.index);
    const struct kv_retained_rec *t = kv_retained(kv, p, a), *u = kv_retained(kv, p, b);
    return t->priority == u->priority && is_over(t) == is_over(u) && t->was_found != u->was_found &&
           goes_at(p, a) == goes_at(p, b);
}

static void check_order(void)
{
    struct kv_evictable next[N_BLOCKS];
    uint32_t n = kv_pool_next_evicted(kv, pool, N_BLOCKS, next), first = must_go();
    assert_int_equal(n, kv_pool_cached(kv, pool));
    assert_int_equal(n == 0, first == N_BLOCKS);
    if (n > 0)
        assert_true(next[0].block == first || is_tie(next[0].block, first));
    for (uint32_t i = 1; i < n; i++)
        assert_true(next[i].priority >= next[i - 1].priority);
}

/* What was last said of the blocks of each prompt that are published now. */
static struct said {
    uint64_t serial;
    struct kv_retention r; /* from: not used */
} said[N_PROMPTS][MAX_TOKENS / BLOCK_TOKENS];

/* The published blocks of a prompt that a walk finds; their number. */
static uint32_t find_published(uint32_t prompt, uint32_t out[MAX_TOKENS / BLOCK_TOKENS])
{
    const struct kv_pool_rec *p = kv_pool_live(kv, pool.index);
    uint64_t parent = 0;
    uint32_t n = 0;
    for (uint32_t i = 0; i < N_BLOCKS && n < MAX_TOKENS / BLOCK_TOKENS; i++) {
        const struct kv_published_rec *r = kv_published(kv, p, i);
        if (!kv_is_published(kv, p, i) || r->parent != parent || r->index != n ||
            kv_published_ids(kv, p, i)[0] != prompt * 1000 + n * BLOCK_TOKENS)
            continue;
        out[n++] = i;
        parent = r->serial;
        i = UINT32_MAX; /* from the first again */
    }
    return n;
}

/* A sequence of the prompt says so of its first n_blocks blocks, from token `from` on. */
static void say(uint32_t prompt, uint32_t n_blocks, uint32_t from, const struct kv_retention *r,
                uint32_t n_ranges)
{
    const struct kv_pool_rec *p = kv_pool_live(kv, pool.index);
    uint32_t blocks[MAX_TOKENS / BLOCK_TOKENS], n = find_published(prompt, blocks);
    for (uint32_t i = 0; i < n; i++) {
        struct said *s = &said[prompt][i];
        if (s->serial != kv_published(kv, p, blocks[i])->serial)
            *s = (struct said){.serial = kv_published(kv, p, blocks[i])->serial};
        for (uint32_t k = 0; k < n_ranges && i < n_blocks && i * BLOCK_TOKENS >= from; k++)
            if (r[k].from <= i * BLOCK_TOKENS)
                s->r = r[k];
    }
}

static void check_last_words(uint32_t prompt)
{
    const struct kv_pool_rec *p = kv_pool_live(kv, pool.index);
    uint32_t blocks[MAX_TOKENS / BLOCK_TOKENS], n = find_published(prompt, blocks);
    for (uint32_t i = 0; i < n; i++) {
        const struct kv_retained_rec *t = kv_retained(kv, p, blocks[i]);
        const struct kv_retention *r = &said[prompt][i].r;
        assert_int_equal(t->priority + KV_MIN_PRIORITY, r->priority);
        assert_int_equal(t->is_pinned, r->is_pinned);
        assert_int_equal(t->life > 0, r->life_s > 0);
        assert_true(t->life == 0 || 1u << (t->life - 1) >= r->life_s);
    }
}

/* Blocks that somebody reads: of those that go next. */
static struct kv_seq_import *held;
static uint32_t held_blocks[MOST_HELD], n_held;
static uint64_t held_serials[MOST_HELD];

static void hold(void)
{
    struct kv_evictable next[MOST_HELD];
    const struct kv_pool_rec *p = kv_pool_live(kv, pool.index);
    n_held = kv_pool_next_evicted(kv, pool, 1 + below(MOST_HELD), next);
    for (uint32_t i = 0; i < n_held; i++) {
        held_blocks[i] = next[i].block;
        held_serials[i] = kv_published(kv, p, next[i].block)->serial;
    }
    held = kv_cached_hold(kv, pool, held_blocks, n_held);
    assert_non_null(held);
}

/* They are what they were. */
static void release(void)
{
    const struct kv_pool_rec *p = kv_pool_live(kv, pool.index);
    for (uint32_t i = 0; i < n_held; i++) {
        assert_true(kv_is_published(kv, p, held_blocks[i]));
        assert_int_equal(kv_published(kv, p, held_blocks[i])->serial, held_serials[i]);
    }
    kv_cached_release(kv, held);
    held = NULL;
}

static uint32_t some_ranges(struct kv_retention *r)
{
    uint32_t n = below(4), from = 0;
    for (uint32_t i = 0; i < n; i++) {
        r[i] = (struct kv_retention){from, (int32_t)below(7) - 3, below(3) == 0 ? below(40) : 0,
                                     below(16) == 0};
        from += 1 + below(12);
    }
    return n;
}

/* The sequence of the prompt, which has n_ranges in r, may say something else. */
static void maybe_retain(kv_seq_id seq, uint32_t prompt, uint32_t n_blocks, struct kv_retention *r,
                         uint32_t n_ranges)
{
    struct kv_retention more[KV_MAX_RETENTIONS];
    uint32_t n_more = below(4) == 0 ? some_ranges(more) : 0, n_before = 0;
    if (n_more == 0)
        return;
    more[0].from = below(12);
    for (uint32_t i = 1; i < n_more; i++)
        more[i].from += more[0].from;
    while (n_before < n_ranges && r[n_before].from < more[0].from)
        n_before++;
    assert_int_equal(kv_seq_retain(kv, seq, more, n_more), ATTN_OK);
    memcpy(r + n_before, more, n_more * sizeof more[0]);
    say(prompt, n_blocks, more[0].from, r, n_before + n_more);
}

static void some_round(uint32_t round)
{
    struct kv_retention r[KV_MAX_RETENTIONS], none = {0};
    uint32_t n_cached, n_dropped, n_ranges = some_ranges(r);
    uint32_t prompt = below(N_PROMPTS), n = 1 + below(MAX_TOKENS);
    kv_seq_id seq;
    now_s += below(6);
    kv_set_time(kv, now_s);
    attn_status st = open_prompt(prompt, n, r, n_ranges, &seq, &n_cached);
    assert_true(st == ATTN_OK || st == ATTN_ENOBLOCKS);
    if (st == ATTN_ENOBLOCKS)
        assert_non_null(strstr(kv_last_error(kv), "are pinned"));
    say(prompt, (st == ATTN_OK ? n : n_cached) / BLOCK_TOKENS, 0, r, n_ranges);
    maybe_retain(seq, prompt, n / BLOCK_TOKENS, r, n_ranges);
    if (st == ATTN_ENOBLOCKS || below(20) == 0) {
        assert_int_equal(kv_seq_retain(kv, seq, &none, 1), ATTN_OK); /* unpins */
        say(prompt, n / BLOCK_TOKENS, 0, &none, 1);
    }
    check_last_words(prompt);
    check();
    check_order();
    kv_seq_close(kv, seq);
    check_order();
    if (held != NULL && (round % 50 == 0 || below(2) == 0))
        release();
    else if (held == NULL && round % 50 != 0)
        hold();
    check();
    check_order();
    if (round % 50 == 0) {
        uint32_t before = must_go();
        assert_int_equal(kv_recover(kv, &n_dropped), ATTN_OK);
        assert_int_equal(n_dropped, 0);
        check();
        assert_int_equal(must_go(), before);
        check_order();
        for (prompt = 0; prompt < N_PROMPTS; prompt++) {
            say(prompt, 0, 0, NULL, 0);
            check_last_words(prompt);
        }
    }
}

static void random_mix(void **state)
{
    struct kv_stats s;
    (void)state;
    begin();
    for (uint32_t i = 0; i < N_ROUNDS; i++)
        some_round(i);
    kv_stats_read(kv, &s);
    assert_true(s.evictions > 1000 && s.evictions_expired > 10 && s.prefix_hits > 100);
    assert_true(s.evictions_expired < s.evictions && s.eviction_age_seconds > s.evictions_expired);
    kv_close(kv);
}

/* Prompts without end, of MAX_TOKENS each: more than the pool holds. */
static void flood(void)
{
    for (uint32_t i = 0; i < 10; i++)
        use(100 + (uint32_t)next_name, MAX_TOKENS, NULL, 0);
    check();
}

static void what_was_found_outlives_what_never_was_but_not_for_ever(void **state)
{
    (void)state;
    begin();
    const uint32_t n_blocks = (MAX_TOKENS - 1) / BLOCK_TOKENS;
    use(1, MAX_TOKENS, NULL, 0);
    use(2, MAX_TOKENS, NULL, 0);
    assert_int_equal(use(1, MAX_TOKENS, NULL, 0), n_blocks * BLOCK_TOKENS);
    for (uint32_t i = 0; i * n_blocks < N_BLOCKS; i++)
        use(100 + i, MAX_TOKENS, NULL, 0);
    assert_int_equal(use(2, MAX_TOKENS, NULL, 0), 0);
    assert_int_equal(use(1, MAX_TOKENS, NULL, 0), n_blocks * BLOCK_TOKENS);
    for (uint32_t i = 0; i * n_blocks < 4 * N_BLOCKS; i++)
        use(1000 + i, MAX_TOKENS, NULL, 0);
    assert_int_equal(use(1, MAX_TOKENS, NULL, 0), 0);
    check();
    kv_close(kv);
}

static void the_lowest_priority_goes_first(void **state)
{
    (void)state;
    begin();
    const struct kv_retention high = {.priority = 2}, low = {.priority = -1};
    use(1, MAX_TOKENS, &high, 1);
    flood();
    assert_int_equal(use(1, MAX_TOKENS, NULL, 0), MAX_TOKENS - BLOCK_TOKENS);
    use(2, MAX_TOKENS, NULL, 0);
    use(3, MAX_TOKENS, &low, 1); /* the newest, and yet the first */
    use(4, MAX_TOKENS, NULL, 0);
    use(5, BLOCK_TOKENS, NULL, 0);
    assert_int_equal(use(2, MAX_TOKENS, NULL, 0), MAX_TOKENS - BLOCK_TOKENS);
    assert_true(use(3, MAX_TOKENS, NULL, 0) < MAX_TOKENS - BLOCK_TOKENS);
    kv_close(kv);
}

static void what_has_expired_goes_before_what_is_older(void **state)
{
    struct kv_evictable next;
    struct kv_stats s;
    (void)state;
    begin();
    const struct kv_retention minute = {.life_s = 60}; /* 64 s */
    use(1, MAX_TOKENS, NULL, 0);
    use(2, MAX_TOKENS, &minute, 1);
    kv_set_time(kv, now_s + 63);
    assert_int_equal(kv_pool_next_evicted(kv, pool, 1, &next), 1);
    assert_false(next.is_expired);
    assert_int_equal(next.life_s, 0);
    assert_int_equal(next.age_s, 63);
    kv_set_time(kv, now_s + 64);
    assert_int_equal(kv_pool_next_evicted(kv, pool, 1, &next), 1);
    assert_true(next.is_expired);
    assert_int_equal(next.life_s, 64);
    use(3, MAX_TOKENS, NULL, 0);
    use(4, MAX_TOKENS, NULL, 0);
    use(5, 2 * BLOCK_TOKENS, NULL, 0);
    kv_stats_read(kv, &s);
    assert_int_equal(s.evictions_expired, 2);
    assert_int_equal(s.eviction_age_seconds, 128);
    kv_close(kv);
}

static void what_is_pinned_stays(void **state)
{
    kv_seq_id seq;
    uint32_t n_cached, half = MAX_TOKENS / 2;
    struct kv_stats s;
    (void)state;
    begin();
    const struct kv_retention pin[] = {{.is_pinned = 1}, {.from = half}}, all = {.is_pinned = 1};
    const struct kv_retention none = {0};
    use(1, MAX_TOKENS, pin, 2);
    flood();
    assert_int_equal(use(1, MAX_TOKENS, NULL, 0), half);
    for (uint32_t prompt = 2; prompt < 5; prompt++)
        use(prompt, MAX_TOKENS, &all, 1);
    /* 28 blocks are pinned: a sequence of 8 is refused, and told why */
    assert_int_equal(open_prompt(9, MAX_TOKENS, NULL, 0, &seq, &n_cached), ATTN_ENOBLOCKS);
    assert_non_null(strstr(kv_last_error(kv), "4 free, 28 are pinned"));
    kv_seq_close(kv, seq);
    check();
    use(1, MAX_TOKENS, &none, 1); /* the last word counts */
    assert_int_equal(open_prompt(9, MAX_TOKENS, NULL, 0, &seq, &n_cached), ATTN_OK);
    kv_seq_close(kv, seq);
    check();
    assert_int_equal(kv_pool_drop(kv, pool), ATTN_OK);
    kv_stats_read(kv, &s);
    assert_int_equal(s.blocks_pinned + s.blocks_cached + s.blocks_published, 0);
    kv_close(kv);
}

/* A second sequence of a prompt computes its last block itself, also where that is full. */
static void what_a_second_sequence_says_holds_for_the_last_block_too(void **state)
{
    const struct kv_retention pin = {.is_pinned = 1}, none = {0};
    struct kv_stats s;
    kv_seq_id seq;
    uint32_t n_cached;
    (void)state;
    begin();
    for (uint32_t n = 1; n <= 4 * BLOCK_TOKENS; n++)
        for (uint32_t when = 0; when < 3; when++) { /* opened; closed before its step; after it */
            uint32_t prompt = 10 * n + when, ids[MAX_TOKENS];
            use(prompt, n, &pin, 1);
            kv_stats_read(kv, &s);
            assert_int_equal(s.blocks_pinned, n / BLOCK_TOKENS);
            if (when == 1) {
                for (uint32_t i = 0; i < n; i++)
                    ids[i] = prompt * 1000 + i;
                const struct kv_tokens t = {ids, n, 0, NULL, 0};
                struct kv_patch patches[16];
                struct kv_effects fx = {patches, NULL, 0, 0, 16, 0};
                assert_int_equal(kv_seq_open_with(kv, 0, next_name++, pool, KV_NO_OWNER,
                                                  KV_NO_REQUEST, &t, &fx, &seq),
                                 ATTN_OK);
            } else {
                assert_int_equal(
                    open_prompt(prompt, n, when == 0 ? &none : NULL, when == 0, &seq, &n_cached),
                    ATTN_OK);
            }
            if (when > 0)
                assert_int_equal(kv_seq_retain(kv, seq, &none, 1), ATTN_OK);
            kv_seq_close(kv, seq);
            kv_stats_read(kv, &s);
            assert_int_equal(s.blocks_pinned, 0);
            check();
        }
    kv_close(kv);
}

/* Pins behind blocks that were evicted: nothing finds these blocks. */
static void what_is_pinned_and_lost_makes_way(void **state)
{
    const uint32_t half = MAX_TOKENS / 2, n_half = half / BLOCK_TOKENS;
    const struct kv_retention end[] = {{0}, {.from = half, .is_pinned = 1}};
    const struct kv_retention all = {.is_pinned = 1};
    struct kv_stats s;
    kv_seq_id seq;
    uint32_t n_cached;
    (void)state;
    begin();
    for (uint32_t prompt = 1; prompt < 200; prompt++) {
        use(prompt, MAX_TOKENS, end, 2);
        check();
    }
    kv_stats_read(kv, &s);
    assert_true(s.blocks_pinned >= n_half && s.blocks_pinned <= N_BLOCKS);
    /* what can be found stays: pinned from the start, and of one that is in use */
    use(300, MAX_TOKENS, &all, 1);
    assert_int_equal(open_prompt(301, MAX_TOKENS, end, 2, &seq, &n_cached), ATTN_OK);
    for (uint32_t prompt = 310; prompt < 330; prompt++)
        use(prompt, MAX_TOKENS, end, 2);
    kv_seq_close(kv, seq);
    assert_int_equal(use(300, MAX_TOKENS, NULL, 0), MAX_TOKENS - BLOCK_TOKENS);
    assert_int_equal(use(301, MAX_TOKENS, NULL, 0), MAX_TOKENS - BLOCK_TOKENS);
    /* a pool that a sequence comes into makes room so, too */
    kv_close(kv);
    begin();
    for (uint32_t prompt = 1; prompt < 5; prompt++)
        use(prompt, MAX_TOKENS, end, 2);
    use(5, MAX_TOKENS, end, 2); /* evicts beginnings */
    struct kv_seq_import *in = kv_seq_import_begin(kv, pool);
    assert_int_equal(kv_seq_import_reserve(kv, in, 0, MAX_TOKENS / BLOCK_TOKENS), ATTN_OK);
    kv_seq_import_cancel(kv, in);
    check();
    kv_close(kv);
}

static void what_is_read_stays_and_then_goes_when_it_would_have(void **state)
{
    struct kv_evictable before[N_BLOCKS], after[N_BLOCKS];
    kv_seq_id seq;
    uint32_t n_cached, blocks[MOST_HELD];
    (void)state;
    begin();
    for (uint32_t prompt = 1; prompt <= 4; prompt++)
        use(prompt, MAX_TOKENS, NULL, 0);
    assert_int_equal(kv_pool_next_evicted(kv, pool, N_BLOCKS, before), N_BLOCKS);
    for (uint32_t i = 0; i < MOST_HELD; i++)
        blocks[i] = before[i].block;
    held = kv_cached_hold(kv, pool, blocks, MOST_HELD);
    check();
    assert_int_equal(kv_pool_cached(kv, pool), N_BLOCKS - MOST_HELD);
    assert_int_equal(open_prompt(9, 4 * BLOCK_TOKENS, NULL, 0, &seq, &n_cached), ATTN_OK);
    kv_cached_release(kv, held);
    held = NULL;
    check();
    uint32_t n = kv_pool_next_evicted(kv, pool, N_BLOCKS, after);
    assert_int_equal(n, N_BLOCKS - 4); /* those behind what was held have gone */
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(after[i].block, before[i < MOST_HELD ? i : i + 4].block);
    kv_close(kv);
}

static void what_is_read_and_used_meanwhile_counts_as_used(void **state)
{
    struct kv_evictable next[N_BLOCKS];
    uint32_t n_blocks = (MAX_TOKENS - 1) / BLOCK_TOKENS, blocks[MOST_HELD];
    (void)state;
    begin();
    use(1, MAX_TOKENS, NULL, 0);
    use(2, MAX_TOKENS, NULL, 0);
    use(1, MAX_TOKENS, NULL, 0); /* all but their last blocks are found, and go after those */
    use(2, MAX_TOKENS, NULL, 0);
    uint32_t n = 0, n_next = kv_pool_next_evicted(kv, pool, 2 + MOST_HELD, next);
    for (uint32_t i = 0; i < n_next; i++)
        if (next[i].index < n_blocks)
            blocks[n++] = next[i].block;
    assert_int_equal(n, MOST_HELD);
    held = kv_cached_hold(kv, pool, blocks, n);
    assert_int_equal(use(1, MAX_TOKENS, NULL, 0), n_blocks * BLOCK_TOKENS);
    kv_cached_release(kv, held);
    held = NULL;
    check();
    n_next = kv_pool_next_evicted(kv, pool, 2 + n_blocks, next);
    assert_int_equal(n_next, 2 + n_blocks);
    for (uint32_t i = 0; i < n_next; i++) /* prompt 2's go first now */
        for (uint32_t k = 0; k < n; k++)
            assert_int_not_equal(next[i].block, blocks[k]);
    kv_close(kv);
}

static void a_pool_of_which_blocks_are_read_stays(void **state)
{
    struct kv_evictable next;
    (void)state;
    begin();
    use(1, MAX_TOKENS, NULL, 0);
    assert_int_equal(kv_pool_next_evicted(kv, pool, 1, &next), 1);
    held = kv_cached_hold(kv, pool, &next.block, 1);
    assert_int_equal(kv_pool_drop(kv, pool), ATTN_EOVERLOAD);
    check();
    kv_cached_release(kv, held);
    held = NULL;
    assert_int_equal(kv_pool_drop(kv, pool), ATTN_OK);
    kv_close(kv);
}

static void what_cannot_be_is_refused(void **state)
{
    kv_seq_id seq;
    uint32_t n_cached;
    (void)state;
    begin();
    static const struct {
        struct kv_retention r[2];
        const char *says;
    } bad[] = {
        {{{.priority = 4}, {.from = 1}}, "retention[0].priority is 4, not in -3..3"},
        {{{.from = 0}, {.from = 1, .priority = -4}}, "retention[1].priority is -4"},
        {{{.from = 5}, {.from = 5}}, "retention[1] is from token 5, the one before from 5"},
        {{{.life_s = KV_MAX_LIFE_S + 1}, {.from = 1}}, "time_to_live is 1048577 s, at most"},
    };
    struct kv_retention many[KV_MAX_RETENTIONS + 1] = {{0}};
    assert_int_equal(open_prompt(1, MAX_TOKENS, NULL, 0, &seq, &n_cached), ATTN_OK);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(kv_seq_retain(kv, seq, bad[i].r, 2), ATTN_EINVAL);
        if (strstr(kv_last_error(kv), bad[i].says) == NULL)
            fail_msg("%s", kv_last_error(kv));
    }
    for (uint32_t i = 0; i <= KV_MAX_RETENTIONS; i++)
        many[i].from = i;
    assert_int_equal(kv_seq_retain(kv, seq, many, KV_MAX_RETENTIONS + 1), ATTN_EINVAL);
    assert_int_equal(kv_seq_retain(kv, seq, many, KV_MAX_RETENTIONS), ATTN_OK);
    assert_int_equal(kv_seq_retain(kv, seq, &(struct kv_retention){.from = 99}, 1), ATTN_EINVAL);
    assert_int_equal(kv_seq_retain(kv, seq, &(struct kv_retention){.from = 0}, 1), ATTN_OK);
    check();
    kv_close(kv);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_mix),
        cmocka_unit_test(what_was_found_outlives_what_never_was_but_not_for_ever),
        cmocka_unit_test(the_lowest_priority_goes_first),
        cmocka_unit_test(what_has_expired_goes_before_what_is_older),
        cmocka_unit_test(what_is_pinned_stays),
        cmocka_unit_test(what_a_second_sequence_says_holds_for_the_last_block_too),
        cmocka_unit_test(what_is_pinned_and_lost_makes_way),
        cmocka_unit_test(what_is_read_stays_and_then_goes_when_it_would_have),
        cmocka_unit_test(what_is_read_and_used_meanwhile_counts_as_used),
        cmocka_unit_test(a_pool_of_which_blocks_are_read_stays),
        cmocka_unit_test(what_cannot_be_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
