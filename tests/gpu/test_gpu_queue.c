/* test_gpu_queue.c: batches in flight behind and beside each other: random histories with two of
 * them, whose table rows are apart or shared, with forks, block copies and transfers in
 * between, agree with the cpu backend, which computes them one by one.
 *
 * Usage: test_gpu_queue [NAME [TESTS]] as test_gpu. A caller's part of the bargain (backend.h) is
 * kept: what is in flight is neither forked nor dropped.
 */
#include "kernels/kv_layout.h"
#include "tests/gpu/rig.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { N_SEQS = 24, N_BATCHES = 12, NEVER = 0 };
enum { STEP_AGAIN = 1, STEP_ON = 9 }; /* kinds of random_step: 0 to 15 */

static const struct backend_ops *gpu;
static uint64_t seed;

/* A history of one rig; both draw from the same state. */
struct walk {
    struct rig r;
    uint64_t state;
    uint32_t depth; /* batches in flight */
    uint32_t n_items; /* of a batch, at most */
    uint32_t n_tokens; /* of most of their steps, at most */
    bool is_calm; /* sequences only grow, and batches are apart */
    struct backend_batch batches[N_BATCHES + 1];
    uint32_t named[RIG_MAX_SEQS]; /* the last batch that names the row; the first is 1 */
    uint32_t parent, child, forked; /* of the last fork, and before which batch it was */
    unsigned char *reads; /* what transfers gave */
    size_t n_reads;
};

static uint32_t draw(struct walk *w, uint32_t n)
{
    return rig_random(&w->state) % n;
}

/* Drops a sequence; the next blocks taken are among those that were its alone. */
static void drop(struct walk *w, uint32_t seq)
{
    struct rig *r = &w->r;
    const struct rig_seq *s = &r->seqs[seq];
    for (uint32_t i = s->n_blocks; i-- > 0;)
        if (r->refs[s->blocks[i]] == 1)
            r->next_block = s->blocks[i];
    rig_drop(r, seq);
}

static void random_step(struct walk *w, uint32_t seq, uint32_t kind)
{
    struct rig *r = &w->r;
    uint32_t layer = draw(w, r->config.num_layers), n = 1 + draw(w, w->n_tokens);
    uint32_t pos = r->seqs[seq].len[layer], flags = BACKEND_APPEND | BACKEND_ATTEND;
    if (kind == 0)
        n = 17 + draw(w, 30); /* not for the tuned kernels */
    else if (kind < 6 && pos > 4)
        pos -= n; /* written again */
    else if (kind < 8)
        n = 16 - pos % 16; /* to a block's end */
    else if (kind == 8 && pos > 4) {
        pos -= n;
        flags = BACKEND_ATTEND;
    }
    if (pos + n <= r->config.max_row_blocks * r->config.block_tokens)
        rig_step(r, seq, layer, pos, n, flags, &w->state);
}

static void random_batch(struct walk *w, uint32_t i)
{
    struct rig *r = &w->r;
    uint32_t items0 = r->n_items, patches0 = r->n_patches, copies0 = r->n_copies;
    /* The step of a child copies its parent's last block, and the parent writes there again
     * meanwhile. */
    bool is_child = w->forked != NEVER && w->forked + 2 == i;
    bool is_parent = w->forked != NEVER && w->forked + 3 == i;
    bool is_apart = is_parent || w->is_calm || draw(w, 4) != 0; /* from the batch in front */
    const uint32_t n = 1 + draw(w, w->n_items);
    for (uint32_t k = 0; k < n; k++) {
        uint32_t seq = draw(w, N_SEQS), to = draw(w, N_SEQS);
        uint32_t kind = w->is_calm ? 31 : draw(w, 32);
        const struct backend_batch *front = &w->batches[i - 1];
        bool is_family = k == 0 && (is_child || is_parent);
        if (is_family)
            seq = is_child ? w->child : w->parent;
        else if (!is_apart && i > 1 && front->n_items > 0)
            seq = front->items[draw(w, front->n_items)].table_row;
        bool is_busy = w->named[seq] != NEVER && w->named[seq] + 1 >= i;
        bool is_to_busy = w->named[to] != NEVER && w->named[to] + 1 >= i;
        if (w->named[seq] == i || (is_apart && is_busy))
            continue;
        uint32_t len = r->seqs[seq].len[0];
        for (uint32_t l = 1; l < r->config.num_layers; l++)
            len = r->seqs[seq].len[l] < len ? r->seqs[seq].len[l] : len;
        if (is_family) {
            random_step(w, seq, is_child ? STEP_ON : STEP_AGAIN);
        } else if (kind < 3 && !is_busy && !is_to_busy && to != seq && len > 2) {
            rig_fork(r, seq, to, kind > 0 ? len - draw(w, 2) : 1 + draw(w, len - 1));
            w->named[to] = w->forked = i;
            w->parent = seq;
            w->child = to;
        } else if (kind == 3 && !is_busy) {
            drop(w, seq);
        } else {
            random_step(w, seq, w->is_calm ? STEP_ON : draw(w, 16));
        }
        w->named[seq] = i;
    }
    w->batches[i] = (struct backend_batch){.pool = r->pool,
                                           .items = r->items + items0,
                                           .n_items = r->n_items - items0,
                                           .patches = r->patches + patches0,
                                           .n_patches = r->n_patches - patches0,
                                           .copies = r->copies + copies0,
                                           .n_copies = r->n_copies - copies0};
}

/* Reads a layer of a block that the newest batch filled to its end. */
static void read_back(struct walk *w, const struct backend_batch *batch)
{
    struct rig *r = &w->r;
    struct kv_layout l = kv_layout_of(&r->config);
    for (uint32_t i = 0; i < batch->n_items; i++) {
        const struct backend_item *it = &batch->items[i];
        uint32_t end = it->pos + it->n_tokens;
        if (!(it->flags & BACKEND_APPEND) || end % r->config.block_tokens != 0)
            continue;
        unsigned char *block = malloc(l.block_bytes);
        uint32_t id = it->block_table[end / r->config.block_tokens - 1];
        assert_int_equal(r->ops->block_read(r->pool, id, block), ATTN_OK);
        w->reads = realloc(w->reads, w->n_reads + l.layer_bytes);
        memcpy(w->reads + w->n_reads, block + it->layer * l.layer_bytes, l.layer_bytes);
        w->n_reads += l.layer_bytes;
        free(block);
        return;
    }
}

static void random_round(struct walk *w)
{
    struct rig *r = &w->r;
    uint32_t n_back = 0;
    rig_begin(r);
    memset(w->named, NEVER, sizeof w->named);
    w->forked = NEVER;
    for (uint32_t i = 1; i <= N_BATCHES + w->depth; i++) {
        if (i > w->depth) {
            struct backend_batch *back = r->ops->poll(r->b, RIG_POLL_NS);
            assert_ptr_equal(back, &w->batches[++n_back]);
            assert_int_equal(back->status, ATTN_OK);
        }
        if (i > N_BATCHES)
            continue;
        random_batch(w, i);
        if (r->ops->submit(r->b, &w->batches[i]) != ATTN_OK)
            fail_msg("submit: %s", r->ops->last_error(r->b));
        if (draw(w, 8) == 0)
            read_back(w, &w->batches[i]);
    }
}

static void walk_open(struct walk *w, const struct backend_ops *ops, uint32_t depth,
                      const struct backend_pool_config *c, uint32_t len, uint32_t n_items,
                      uint32_t n_tokens, bool is_calm)
{
    memset(w, 0, sizeof *w);
    rig_open(&w->r, ops, c, 0, -1);
    w->state = seed;
    w->depth = depth;
    w->n_items = n_items;
    w->n_tokens = n_tokens;
    w->is_calm = is_calm;
    for (uint32_t s = 0; s < N_SEQS; s++)
        for (uint32_t l = 0; l < c->num_layers; l++) {
            uint32_t n = len / 4 + draw(w, len);
            for (uint32_t pos = 0, k; pos < n; pos += k) {
                k = n - pos < 4000 ? n - pos : 4000;
                rig_begin(&w->r);
                rig_step(&w->r, s, l, pos, k, BACKEND_APPEND, &w->state);
                rig_run(&w->r);
            }
        }
}

static void walk_close(struct walk *w)
{
    rig_close(&w->r);
    free(w->reads);
}

static void compare_walks(const struct backend_pool_config *c, uint32_t len, uint32_t n_items,
                          uint32_t n_tokens, bool is_calm, uint32_t n_rounds)
{
    static struct walk a, b;
    walk_open(&a, gpu, 2, c, len, n_items, n_tokens, is_calm);
    walk_open(&b, backend_cpu(), 1, c, len, n_items, n_tokens, is_calm);
    for (uint32_t i = 0; i < n_rounds; i++) {
        char what[64];
        snprintf(what, sizeof what, "round %u, %u/%u heads of %u", i, c->num_q_heads,
                 c->num_kv_heads, c->head_dim_k);
        random_round(&a);
        random_round(&b);
        rig_compare_items(&a.r, &b.r, what, seed);
        assert_int_equal(a.n_reads, b.n_reads);
        if (a.n_reads > 0)
            assert_memory_equal(a.reads, b.reads, a.n_reads);
        rig_compare_blocks(&a.r, &b.r, what, seed);
    }
    assert_true(is_calm || a.n_reads > 0);
    walk_close(&a);
    walk_close(&b);
}

static const struct attn_layer_spec plain[2] = {{.scale = 0.125f}, {.scale = 0.1f}};

static struct backend_pool_config config_of_heads(const struct attn_layer_spec *layers,
                                                  uint32_t n_layers, uint32_t q_heads,
                                                  uint32_t kv_heads, uint32_t dim)
{
    struct backend_pool_config c = rig_config(layers, n_layers);
    c.num_q_heads = q_heads;
    c.num_kv_heads = kv_heads;
    c.head_dim_k = c.head_dim_v = dim;
    c.n_blocks = 1200;
    return c;
}

/* Whatever fails on the way (ATTND_SIMT_FAIL): what was submitted comes back. */
static void two_batches_apart_come_back_in_order(void **state)
{
    (void)state;
    struct backend_pool_config c = rig_config(plain, 1);
    static struct rig r;
    struct backend_batch batches[4];
    uint64_t s = seed;
    uint32_t n = 0;
    rig_open(&r, gpu, &c, 0, -1);
    rig_begin(&r);
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t from = r.n_patches;
        rig_step(&r, i, 0, 0, 9, BACKEND_APPEND | BACKEND_ATTEND, &s);
        batches[i] = (struct backend_batch){.pool = r.pool,
                                            .items = &r.items[i],
                                            .n_items = 1,
                                            .patches = r.patches + from,
                                            .n_patches = r.n_patches - from};
    }
    for (uint32_t i = 0; i < 4; i++) {
        while (n < 4 && n - i < 2 && gpu->submit(r.b, &batches[n]) == ATTN_OK)
            n++;
        if (i == n)
            fail_msg("submit: %s", gpu->last_error(r.b));
        if (gpu->poll(r.b, RIG_POLL_NS) != &batches[i])
            abort();
        assert_true(batches[i].status == ATTN_OK || batches[i].status == ATTN_EDEVICE);
    }
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(batches[i].status, ATTN_OK);
        for (uint32_t k = 0; k < 9 * 8; k++)
            assert_true(isfinite(r.items[i].lse[k]));
    }
    rig_close(&r);
}

static void short_batches_in_flight_agree_with_the_cpu_backend(void **state)
{
    (void)state;
    static const struct {
        uint32_t q_heads, kv_heads, dim;
    } cases[] = {{8, 2, 64}, {24, 1, 128}};
    for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct backend_pool_config c =
            config_of_heads(plain, 2, cases[i].q_heads, cases[i].kv_heads, cases[i].dim);
        compare_walks(&c, 300, 6, 3, false, 6);
    }
}

/* Most of them run at the same time, and their splits meet in scratch. */
static void short_batches_apart_agree_with_the_cpu_backend(void **state)
{
    (void)state;
    struct backend_pool_config c = rig_config(plain, 1);
    c.n_blocks = 1200;
    compare_walks(&c, 600, 4, 3, true, 24);
}

/* Most of them are attention alone, which reads q and appends k and v by itself. */
static void short_steps_of_a_token_agree_with_the_cpu_backend(void **state)
{
    (void)state;
    static const struct {
        uint32_t q_heads, kv_heads, dim, window;
    } cases[] = {{4, 1, 128, 0}, {32, 2, 128, 50}, {12, 1, 256, 0}};
    for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct attn_layer_spec layers[2] = {plain[0], plain[1]};
        layers[1].window_tokens = cases[i].window;
        struct backend_pool_config c =
            config_of_heads(layers, 2, cases[i].q_heads, cases[i].kv_heads, cases[i].dim);
        compare_walks(&c, 170, 3, 1, false, 8);
        compare_walks(&c, 170, 2, 1, true, 3);
    }
}

/* One layer's batch, at the addresses of the one before; is_polled_early: polled before it is
 * done. */
static void run_layer(struct rig *r, uint32_t n_items, uint32_t layer, uint32_t pos,
                      bool is_polled_early, uint64_t *state)
{
    rig_begin(r);
    const uint32_t n_before = r->n_items;
    for (uint32_t i = 0; i < n_items; i++)
        rig_step(r, i, layer, pos, 1, BACKEND_APPEND | BACKEND_ATTEND, state);
    assert_int_equal(n_before, 0);
    struct backend_batch batch = {.pool = r->pool,
                                  .items = r->items,
                                  .n_items = r->n_items,
                                  .patches = r->patches,
                                  .n_patches = r->n_patches};
    if (r->ops->submit(r->b, &batch) != ATTN_OK)
        fail_msg("submit: %s", r->ops->last_error(r->b));
    struct backend_batch *back = is_polled_early ? r->ops->poll(r->b, 0) : NULL;
    if (back == NULL)
        back = r->ops->poll(r->b, RIG_POLL_NS);
    assert_ptr_equal(back, &batch);
    assert_int_equal(back->status, ATTN_OK);
}

/* A model's steps: layer after layer of the same items, at the same addresses, which a GPU may make
 * ready before they come; and what comes instead: a layer again, one left out, other items. */
static void layers_that_follow_each_other_agree_with_the_cpu_backend(void **state)
{
    (void)state;
    struct attn_layer_spec layers[4] = {plain[0], plain[1], plain[0], plain[1]};
    layers[2].window_tokens = 20;
    const struct backend_pool_config c = config_of_heads(layers, 4, 4, 1, 128);
    static struct rig a, b;
    rig_open(&a, gpu, &c, 0, -1);
    rig_open(&b, backend_cpu(), &c, 0, -1);
    uint64_t at = seed, of_a = seed + 1, of_b = seed + 1;
    for (uint32_t pos = 0; pos < 60; pos++) {
        const bool is_straight = rig_random(&at) % 3 > 0;
        for (uint32_t layer = 0, n_tried = 0; layer < 4; n_tried++) {
            const uint32_t n = pos < 30 ? 3 : 2, turn = is_straight ? 2 : rig_random(&at) % 6;
            /* again, twice at most: so that every layer has its token in the end */
            const uint32_t n_items = turn == 0 && n_tried < 6 ? 1 : n;
            run_layer(&a, n_items, layer, pos, turn != 1, &of_a);
            run_layer(&b, n_items, layer, pos, false, &of_b);
            rig_compare_items(&a, &b, "a layer", seed);
            layer += n_items == n && (turn != 3 || n_tried >= 6);
        }
    }
    rig_compare_blocks(&a, &b, "after all layers", seed);
    rig_close(&a);
    rig_close(&b);
}

static void long_batches_in_flight_agree_with_the_cpu_backend(void **state)
{
    (void)state;
    struct backend_pool_config c = config_of_heads(plain, 1, 16, 8, 128);
    c.max_row_blocks = 700;
    c.n_blocks = N_SEQS * 700;
    compare_walks(&c, 7000, 16, 3, false, 20);
}

int main(int argc, char **argv)
{
    int code = rig_start(argc, argv, &gpu, &seed);
    if (code != 0)
        return code;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_batches_apart_come_back_in_order),
        cmocka_unit_test(short_batches_in_flight_agree_with_the_cpu_backend),
        cmocka_unit_test(short_batches_apart_agree_with_the_cpu_backend),
        cmocka_unit_test(short_steps_of_a_token_agree_with_the_cpu_backend),
        cmocka_unit_test(layers_that_follow_each_other_agree_with_the_cpu_backend),
        cmocka_unit_test(long_batches_in_flight_agree_with_the_cpu_backend),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
