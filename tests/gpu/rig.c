/* rig.c: opens a backend, lays out batches and their table changes as the engine would, and
 * compares what two rigs computed and what their blocks hold.
 */
#include "tests/gpu/rig.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/kv_layout.h"
#include "kernels/load.h"
#include "kernels/reference.h"
#include "tests/random.h"

uint32_t rig_random(uint64_t *state)
{
    return (uint32_t)random_mixed(state);
}

float rig_normal(uint64_t *state)
{
    uint32_t a = rig_random(state), b = rig_random(state);
    uint32_t sum = (a & 0xffff) + (a >> 16) + (b & 0xffff) + (b >> 16); /* near enough to it */
    return ((float)sum - 131070.0f) * (1.7320508f / 65536.0f);
}

struct backend_pool_config rig_config(const struct attn_layer_spec *layers, uint32_t n_layers)
{
    return (struct backend_pool_config){
        .num_layers = n_layers,
        .num_q_heads = 8,
        .num_kv_heads = 2,
        .head_dim_k = 64,
        .head_dim_v = 64,
        .block_tokens = 16,
        .n_blocks = 512,
        .n_table_rows = RIG_MAX_SEQS,
        .max_row_blocks = 64,
        .q_dtype = ATTN_BF16,
        .kv_dtype = ATTN_BF16,
        .layers = layers,
    };
}

static int find_device(const struct backend_ops *ops)
{
    struct backend_config c = {
        .kv_bytes = 1 << 21, .max_batch_items = 1, .max_batch_tokens = 1, .import_fd = -1};
    struct backend *b = NULL;
    attn_status st = ops->open(&c, &b);
    if (st != ATTN_OK)
        printf("%s: %s\n", st == ATTN_ENOTSUP ? "skipped" : "failed", ops->last_error(b));
    ops->close(b);
    return st == ATTN_OK ? 0 : st == ATTN_ENOTSUP ? 77 : 1;
}

int rig_start(int argc, char **argv, const struct backend_ops **out_ops, uint64_t *out_seed)
{
    char why[512];
    const char *given = getenv("ATTND_TEST_SEED");
    *out_seed = given ? strtoull(given, NULL, 0) : 1;
    if (backend_load(argc > 1 ? argv[1] : "cuda", out_ops, why, sizeof why) != ATTN_OK) {
        printf("failed: %s\n", why);
        return 1;
    }
    if (argc > 2)
        cmocka_set_test_filter(argv[2]);
    return find_device(*out_ops);
}

void rig_open(struct rig *r, const struct backend_ops *ops, const struct backend_pool_config *c,
              uint64_t kv_bytes, int import_fd)
{
    memset(r, 0, sizeof *r);
    r->ops = ops;
    r->config = *c;
    struct backend_config bc = {
        .kv_bytes = kv_bytes,
        .max_batch_items = RIG_MAX_ITEMS,
        .max_batch_tokens = 4096,
        .n_threads = 2,
        .import_fd = import_fd,
    };
    if (kv_bytes == 0)
        bc.kv_bytes = ops->pool_bytes(NULL, c);
    if (ops->open(&bc, &r->b) != ATTN_OK)
        fail_msg("open %s: %s", ops->name, ops->last_error(r->b));
    if (ops->pool_open(r->b, c, &r->pool) != ATTN_OK)
        fail_msg("pool_open %s: %s", ops->name, ops->last_error(r->b));
    size_t token = (size_t)(c->num_q_heads + c->num_kv_heads) * (c->head_dim_k + c->head_dim_v) * 4;
    r->memory_bytes = (size_t)160 << 20;
    if (r->memory_bytes > bc.max_batch_tokens * token)
        r->memory_bytes = bc.max_batch_tokens * token;
    assert_int_equal(ops->host_alloc(r->b, r->memory_bytes, (void **)&r->memory), ATTN_OK);
    r->refs = calloc(c->n_blocks, sizeof *r->refs);
    r->patches_capacity = 200000;
    r->patches = malloc(r->patches_capacity * sizeof *r->patches);
    r->copies = malloc(RIG_MAX_ITEMS * sizeof *r->copies);
    for (uint32_t i = 0; i < RIG_MAX_SEQS; i++)
        r->seqs[i].blocks = calloc(c->max_row_blocks, sizeof *r->seqs[i].blocks);
}

void rig_close(struct rig *r)
{
    r->ops->host_free(r->b, r->memory, r->memory_bytes);
    r->ops->close(r->b);
    for (uint32_t i = 0; i < RIG_MAX_SEQS; i++)
        free(r->seqs[i].blocks);
    free(r->refs);
    free(r->patches);
    free(r->copies);
}

void rig_begin(struct rig *r)
{
    r->n_items = r->n_patches = r->n_copies = 0;
    r->memory_used = 0;
}

void *rig_take(struct rig *r, size_t bytes)
{
    void *p = r->memory + r->memory_used;
    r->memory_used += (bytes + 63) / 64 * 64;
    assert_true(r->memory_used <= r->memory_bytes);
    memset(p, 0xff, bytes);
    return p;
}

static uint32_t block_take(struct rig *r)
{
    uint32_t n = r->config.n_blocks - r->first_block;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t b = r->first_block + (r->next_block + i * 7) % n; /* not in order */
        if (r->refs[b] == 0) {
            r->refs[b] = 1;
            r->next_block = (b - r->first_block + 7) % n;
            return b;
        }
    }
    for (uint32_t b = r->first_block; b < r->config.n_blocks; b++)
        if (r->refs[b] == 0) {
            r->refs[b] = 1;
            return b;
        }
    fail_msg("the rig is out of blocks");
    return 0;
}

static void patch(struct rig *r, uint32_t seq, uint32_t index)
{
    assert_true(r->n_patches < r->patches_capacity);
    r->patches[r->n_patches++] = (struct backend_patch){seq, index, r->seqs[seq].blocks[index]};
}

static void fill(struct rig *r, void *p, size_t n, uint64_t *state)
{
    for (size_t i = 0; i < n; i++)
        reference_put(r->config.q_dtype, p, i, (double)rig_normal(state));
}

struct backend_item *rig_step(struct rig *r, uint32_t seq, uint32_t layer, uint32_t pos, uint32_t n,
                              uint32_t flags, uint64_t *state)
{
    const struct backend_pool_config *c = &r->config;
    struct rig_seq *s = &r->seqs[seq];
    size_t size = attn_dtype_bytes(c->q_dtype);
    s->is_open = true;
    if (flags & BACKEND_APPEND) {
        uint32_t last = (pos + n - 1) / c->block_tokens;
        for (uint32_t i = pos / c->block_tokens; i <= last; i++) {
            if (i < s->n_blocks && r->refs[s->blocks[i]] == 1)
                continue;
            uint32_t old = s->blocks[i], b = block_take(r);
            if (i < s->n_blocks) {
                r->copies[r->n_copies++] = (struct backend_copy){old, b};
                r->refs[old]--;
            } else {
                s->n_blocks = i + 1;
            }
            s->blocks[i] = b;
            patch(r, seq, i);
        }
        if (s->len[layer] < pos + n)
            s->len[layer] = pos + n;
    }
    assert_true(r->n_items < RIG_MAX_ITEMS);
    struct backend_item *it = &r->items[r->n_items++];
    *it = (struct backend_item){
        .flags = flags,
        .layer = layer,
        .table_row = seq,
        .pos = pos,
        .n_tokens = n,
        .block_table = s->blocks,
    };
    size_t nq = (size_t)n * c->num_q_heads, nk = (size_t)n * c->num_kv_heads;
    void *q = rig_take(r, nq * c->head_dim_k * size), *k = rig_take(r, nk * c->head_dim_k * size);
    void *v = rig_take(r, nk * c->head_dim_v * size);
    if (flags & BACKEND_ATTEND)
        fill(r, q, nq * c->head_dim_k, state);
    fill(r, k, nk * c->head_dim_k, state);
    fill(r, v, nk * c->head_dim_v, state);
    it->q = q;
    it->k = k;
    it->v = v;
    it->out = rig_take(r, nq * c->head_dim_v * size);
    it->lse = rig_take(r, nq * sizeof(float));
    return it;
}

void rig_drop(struct rig *r, uint32_t seq)
{
    struct rig_seq *s = &r->seqs[seq];
    for (uint32_t i = 0; i < s->n_blocks; i++)
        r->refs[s->blocks[i]]--;
    s->n_blocks = 0;
    s->is_open = false;
    memset(s->len, 0, sizeof s->len);
}

void rig_truncate(struct rig *r, uint32_t seq, uint32_t len)
{
    struct rig_seq *s = &r->seqs[seq];
    uint32_t keep = 0;
    for (uint32_t l = 0; l < r->config.num_layers; l++) {
        if (s->len[l] > len)
            s->len[l] = len;
        uint32_t n = (s->len[l] + r->config.block_tokens - 1) / r->config.block_tokens;
        keep = n > keep ? n : keep;
    }
    while (s->n_blocks > keep)
        r->refs[s->blocks[--s->n_blocks]]--;
}

void rig_fork(struct rig *r, uint32_t from, uint32_t to, uint32_t len)
{
    struct rig_seq *a = &r->seqs[from], *b = &r->seqs[to];
    rig_drop(r, to);
    b->is_open = true;
    b->n_blocks = (len + r->config.block_tokens - 1) / r->config.block_tokens;
    for (uint32_t l = 0; l < r->config.num_layers; l++)
        b->len[l] = len;
    for (uint32_t i = 0; i < b->n_blocks; i++) {
        b->blocks[i] = a->blocks[i];
        r->refs[b->blocks[i]]++;
        patch(r, to, i);
    }
}

void rig_run(struct rig *r)
{
    struct backend_batch batch = {
        .pool = r->pool,
        .items = r->items,
        .patches = r->patches,
        .copies = r->copies,
        .n_items = r->n_items,
        .n_patches = r->n_patches,
        .n_copies = r->n_copies,
    };
    if (r->ops->submit(r->b, &batch) != ATTN_OK)
        fail_msg("submit %s: %s", r->ops->name, r->ops->last_error(r->b));
    struct backend_batch *back = r->ops->poll(r->b, RIG_POLL_NS);
    if (!back)
        fail_msg("%s: the batch did not come back within a minute", r->ops->name);
    assert_ptr_equal(back, &batch);
    if (back->status != ATTN_OK)
        fail_msg("%s: %s", r->ops->name, r->ops->last_error(r->b));
}

void rig_compare_items(const struct rig *a, const struct rig *b, const char *what, uint64_t seed)
{
    const struct backend_pool_config *c = &a->config;
    double bound = c->q_dtype == ATTN_F32 ? 2e-5 : c->q_dtype == ATTN_F16 ? 2e-3 : 1.2e-2;
    if (c->kv_dtype != c->q_dtype)
        bound += 1e-2; /* a code on the border of two may fall on either side */
    for (uint32_t i = 0; i < a->n_items; i++) {
        const struct backend_item *x = &a->items[i], *y = &b->items[i];
        if (!(x->flags & BACKEND_ATTEND))
            continue;
        size_t n = (size_t)x->n_tokens * c->num_q_heads * c->head_dim_v;
        double diff = 0, norm = 0;
        for (size_t k = 0; k < n; k++) {
            double u = reference_get(c->q_dtype, x->out, k),
                   v = reference_get(c->q_dtype, y->out, k);
            diff += (u - v) * (u - v);
            norm += v * v;
        }
        if (!(sqrt(diff) <= bound * sqrt(norm) + 1e-6))
            fail_msg("%s (seed %llu): item %u (pos %u, n_tokens %u, layer %u): L2 %g of %g", what,
                     (unsigned long long)seed, i, x->pos, x->n_tokens, x->layer, sqrt(diff),
                     sqrt(norm));
        for (uint32_t k = 0; k < x->n_tokens * c->num_q_heads; k++)
            if (!(fabsf(x->lse[k] - y->lse[k]) <= 2e-2f + 2e-3f * fabsf(y->lse[k])))
                fail_msg("%s (seed %llu): item %u: lse[%u] %g, not %g", what,
                         (unsigned long long)seed, i, k, (double)x->lse[k], (double)y->lse[k]);
    }
}

void rig_compare_blocks(struct rig *a, struct rig *b, const char *what, uint64_t seed)
{
    struct kv_layout l = kv_layout_of(&a->config);
    unsigned char *x = malloc(l.block_bytes), *y = malloc(l.block_bytes);
    uint64_t n_bytes = 0, n_other = 0;
    for (uint32_t s = 0; s < RIG_MAX_SEQS; s++) {
        uint32_t full = a->seqs[s].len[0];
        for (uint32_t k = 1; k < a->config.num_layers; k++)
            full = a->seqs[s].len[k] < full ? a->seqs[s].len[k] : full;
        for (uint32_t i = 0; i < full / a->config.block_tokens; i++) {
            assert_int_equal(a->ops->block_read(a->pool, a->seqs[s].blocks[i], x), ATTN_OK);
            assert_int_equal(b->ops->block_read(b->pool, b->seqs[s].blocks[i], y), ATTN_OK);
            for (uint64_t k = 0; k < l.block_bytes; k++)
                n_other += x[k] != y[k];
            n_bytes += l.block_bytes;
        }
    }
    uint64_t most = l.is_quantised ? n_bytes / 500 : 0; /* ties in the last bit of a scale */
    if (n_other > most)
        fail_msg("%s (seed %llu): %llu of %llu bytes differ", what, (unsigned long long)seed,
                 (unsigned long long)n_other, (unsigned long long)n_bytes);
    free(x);
    free(y);
}
