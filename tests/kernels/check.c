/* check.c: makes a run's batches of random values, remembers what was appended, and holds outputs
 * to the reference's bounds.
 */
#include "tests/kernels/check.h"

#include "kernels/load.h"
#include "kernels/reference.h"

#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

#define KV_BYTES (128u << 20)
#define ARENA_BYTES (128u << 20)
#define POLL_NS UINT64_C(600000000000) /* ends what hangs; a busy machine is slow */
#define FEW_VALUES 64 /* an output of fewer has a bound of its own */

struct check_poison check_poison;

uint32_t check_random(struct check *c, uint32_t below)
{
    c->rng ^= c->rng << 13;
    c->rng ^= c->rng >> 7;
    c->rng ^= c->rng << 17;
    return (uint32_t)((c->rng >> 32) * below >> 32);
}

float check_normal(struct check *c)
{
    float sum = 0;
    for (int i = 0; i < 4; i++)
        sum += (float)check_random(c, 1 << 20) / (1 << 20) - 0.5f;
    return sum * 1.7320508f + 1e-4f;
}

static bool open_backend(struct check *c, char *why, size_t why_bytes)
{
    struct backend_config config = {.kv_bytes = KV_BYTES,
                                    .max_batch_items = 64,
                                    .max_batch_tokens = 4096,
                                    .n_threads = 3,
                                    .import_fd = -1};
    void *arena = NULL;
    attn_status st = c->ops->open(&config, &c->b);
    if (st == ATTN_OK)
        st = c->ops->host_alloc(c->b, ARENA_BYTES, &arena);
    if (st != ATTN_OK) {
        snprintf(why, why_bytes, "%s: %s", attn_status_name(st), c->ops->last_error(c->b));
        c->ops->close(c->b);
        return false;
    }
    c->arena = arena;
    c->arena_bytes = ARENA_BYTES;
    return true;
}

static void close_backend(struct check *c)
{
    c->ops->host_free(c->b, c->arena, c->arena_bytes);
    c->ops->close(c->b);
}

static bool open_named(struct check *c, const char *name, uint64_t seed, char *why,
                       size_t why_bytes)
{
    *c = (struct check){.name = name, .seed = seed, .rng = seed * 0x9e3779b97f4a7c15u + 1};
    if (backend_load(name, &c->ops, why, why_bytes) != ATTN_OK ||
        backend_bench_load(name, &c->bench, why, why_bytes) != ATTN_OK)
        return false;
    return open_backend(c, why, why_bytes);
}

static struct check *started;

int check_start(struct check *c, int argc, char **argv, uint64_t seed, uint32_t *every,
                uint32_t *offset)
{
    const char *name = argc > 1 ? argv[1] : "cpu";
    char why[512];
    started = c;
    if (argc > 2)
        *every = (uint32_t)strtoul(argv[2], NULL, 10);
    if (argc > 3)
        *offset = (uint32_t)strtoul(argv[3], NULL, 10);
    if (argc > 4 && argv[4][0] == '!')
        cmocka_set_skip_filter(argv[4] + 1);
    else if (argc > 4)
        cmocka_set_test_filter(argv[4]);
    if (*every == 0) {
        fprintf(stderr, "EVERY must be 1 or more\n");
        return 2;
    }
    if (!open_named(c, name, seed + *offset, why, sizeof why)) {
        printf("%s: skipped: %s\n", name, why);
        return 77;
    }
    struct backend_info info;
    c->ops->info(c->b, &info);
    printf("%s: %s\n", info.name, info.device);
    return 0;
}

static void free_seqs(struct check *c)
{
    for (uint32_t i = 0; i < CHECK_MAX_SEQS; i++) {
        free(c->seqs[i].table);
        free(c->seqs[i].own);
        free(c->seqs[i].k);
        free(c->seqs[i].v);
        c->seqs[i] = (struct check_seq){0};
    }
    free(c->patches);
    c->patches = NULL;
}

int check_close(void **state)
{
    struct check *c = started;
    (void)state;
    free_seqs(c);
    if (c->ops != NULL && c->b != NULL)
        close_backend(c);
    c->b = NULL;
    return 0;
}

bool check_is_too_long(const struct case_shape *shape, uint32_t n_q_heads)
{
    const char *most = getenv("ATTND_TEST_PAIRS");
    uint64_t n = 0;
    for (uint32_t i = 0; i < CASE_MAX_ITEMS; i++) {
        const struct case_item *it = &shape->items[i];
        n += (uint64_t)it->n_tokens * (it->n_before + (it->n_tokens + 1) / 2) * n_q_heads;
    }
    return most != NULL && n > strtoull(most, NULL, 10);
}

uint32_t check_step(uint32_t n)
{
    return getenv("ATTND_TEST_PAIRS") != NULL ? n : 1;
}

uint32_t check_shape(const struct case_shape *shape, struct check_item history[CASE_MAX_ITEMS],
                     uint32_t *out_n_history, struct check_item step[CASE_MAX_ITEMS])
{
    uint32_t n = 0, n_history = 0;
    for (; n < CASE_MAX_ITEMS && shape->items[n].n_tokens > 0; n++) {
        const struct case_item *i = &shape->items[n];
        if (i->n_before > 0)
            history[n_history++] =
                (struct check_item){.seq = n, .n_tokens = i->n_before, .flags = BACKEND_APPEND};
        step[n] = (struct check_item){.seq = n,
                                      .pos = i->n_before,
                                      .n_tokens = i->n_tokens,
                                      .flags = BACKEND_APPEND | BACKEND_ATTEND,
                                      .wants_lse = n % 3 != 1};
    }
    *out_n_history = n_history;
    return n;
}

static void *take(struct check *c, size_t bytes)
{
    void *p = c->arena + c->arena_used;
    c->arena_used += (bytes + 63) / 64 * 64;
    if (c->arena_used > c->arena_bytes) {
        fprintf(stderr, "check: the arena is too small\n");
        abort();
    }
    return p;
}

/* Fills a block with 0xff, which is NaN in all float formats and scales. */
static attn_status poison_block(struct check *c, uint32_t block)
{
    return c->ops->block_write(c->pool, block, c->poison);
}

/* Block ids are handed out in an order that jumps about. */
static uint32_t new_block(struct check *c)
{
    uint32_t n = c->config.n_blocks, step = n % 7 == 0 ? n % 5 == 0 ? 11 : 5 : 7;
    return (uint32_t)((uint64_t)(c->next_block++) * step % n);
}

attn_status check_begin(struct check *c, const struct case_geometry *g, struct case_dtype d,
                        const struct case_options *o, uint32_t n_seqs)
{
    const struct backend_pool_config config = case_config(g, d, o);
    const struct attn_layer_spec spec = case_spec(g, o);
    return check_run_begin(c, &config, &spec, o->has_sink_logits, o->has_alibi, n_seqs);
}

void check_small_open(struct check *c, struct check_small *s, uint64_t kv_bytes, uint32_t n_blocks)
{
    *s = (struct check_small){
        .config = {.kv_bytes = kv_bytes,
                   .max_batch_items = 4,
                   .max_batch_tokens = 16,
                   .n_threads = 2,
                   .import_fd = -1},
        .pool = case_config(&case_geometries[0], case_dtypes[0], &case_options[CASE_PLAIN])};
    for (uint32_t i = 0; i < CHECK_LAYERS; i++)
        s->layers[i].scale = 1;
    s->pool.num_layers = CHECK_LAYERS;
    s->pool.n_table_rows = s->pool.max_row_blocks = 1;
    s->pool.n_blocks = n_blocks;
    s->pool.layers = s->layers;
    s->block_bytes = kv_layout_of(&s->pool).block_bytes;
    s->in = malloc(s->block_bytes);
    s->out = malloc(s->block_bytes);
    s->zeros = calloc(1, s->block_bytes);
    for (uint64_t i = 0; i < s->block_bytes; i++)
        s->in[i] = (uint8_t)(1 + check_random(c, 255));
    assert_int_equal(c->ops->open(&s->config, &s->b), ATTN_OK);
}

void check_small_close(struct check *c, struct check_small *s)
{
    c->ops->close(s->b);
    free(s->in);
    free(s->out);
    free(s->zeros);
}

void check_small_blocks(struct check *c, const struct check_small *s, struct backend_pool *p,
                        uint32_t first, uint32_t past, const uint8_t *like)
{
    for (uint32_t i = first; i < past; i++) {
        memset(s->out, 0xaa, s->block_bytes);
        assert_int_equal(c->ops->block_read(p, i, s->out), ATTN_OK);
        assert_memory_equal(s->out, like, s->block_bytes);
    }
}

attn_status check_run_begin(struct check *c, const struct backend_pool_config *config,
                            const struct attn_layer_spec *spec, bool has_sink_logits,
                            bool has_alibi, uint32_t n_seqs)
{
    static float arrays[2 * CHECK_LAYERS][1024];
    char why[256];
    const struct case_geometry g = {.head_dim_k = config->head_dim_k,
                                    .head_dim_v = config->head_dim_v};
    if (!case_fits(&g, (struct case_dtype){config->q_dtype, config->kv_dtype}))
        return ATTN_ENOTSUP;
    free_seqs(c);
    c->config = *config;
    c->config.num_layers = CHECK_LAYERS;
    c->config.layers = c->specs;
    c->config.max_row_blocks = CHECK_MAX_TOKENS / config->block_tokens;
    c->config.n_table_rows = CHECK_MAX_SEQS;
    c->config.n_blocks = 3 * CHECK_MAX_TOKENS / 2 / config->block_tokens + 2 * CHECK_MAX_SEQS + 1;
    c->n_seqs = n_seqs;
    c->next_block = c->n_patches = c->n_copies = 0;
    c->arena_used = 0;
    c->n_front = c->n_batches = 0;
    for (uint32_t l = 0; l < CHECK_LAYERS; l++) {
        c->specs[l] = *spec;
        if (c->has_plain_layer && l + 1 == CHECK_LAYERS)
            c->specs[l].n_branches = 0;
        for (uint32_t h = 0; h < config->num_q_heads; h++) {
            arrays[2 * l][h] = check_normal(c) * 2;
            arrays[2 * l + 1][h] = -0.02f * (float)(1 + check_random(c, 10));
        }
        c->specs[l].sink_logits = has_sink_logits ? arrays[2 * l] : NULL;
        c->specs[l].alibi_slopes = has_alibi ? arrays[2 * l + 1] : NULL;
    }
    attn_status st = c->ops->pool_check(c->b, &c->config);
    if (st != ATTN_OK)
        return st;
    st = c->ops->pool_open(c->b, &c->config, &c->pool);
    if (st == ATTN_OK && c->needs_room && c->ops->pool_room(c->pool) / 2 < c->config.n_blocks)
        st = ATTN_ENOMEM;
    if (st == ATTN_ENOMEM) { /* earlier pools have used it up */
        close_backend(c);
        if (!open_backend(c, why, sizeof why)) {
            fprintf(stderr, "opening again: %s\n", why);
            c->b = NULL;
            return ATTN_EINTERNAL;
        }
        st = c->ops->pool_open(c->b, &c->config, &c->pool);
    }
    uint64_t block_bytes = kv_layout_of(&c->config).block_bytes;
    c->poison = take(c, block_bytes);
    memset(c->poison, 0xff, block_bytes);
    for (uint32_t i = 0; st == ATTN_OK && i < c->config.n_blocks; i++)
        st = poison_block(c, i);
    c->patches = calloc(2 * (size_t)c->config.n_blocks + n_seqs * (size_t)c->config.max_row_blocks,
                        sizeof *c->patches);
    c->foreign_block = new_block(c);
    for (uint32_t i = 0; i < n_seqs; i++) {
        size_t rows = (size_t)CHECK_MAX_TOKENS * config->num_kv_heads;
        c->seqs[i].layer = i % CHECK_LAYERS;
        c->seqs[i].table = calloc(c->config.max_row_blocks, sizeof(uint32_t));
        c->seqs[i].own = calloc(c->config.max_row_blocks, sizeof(uint32_t));
        c->seqs[i].k = calloc(rows * config->head_dim_k, sizeof(float));
        c->seqs[i].v = calloc(rows * config->head_dim_v, sizeof(float));
    }
    return st;
}

/* What the device has there from the next batch on. */
static void show_entry(struct check *c, uint32_t seq, uint32_t index, uint32_t block)
{
    uint32_t i = 0; /* of the entry's patch, which may be there already */
    while (i < c->n_patches && (c->patches[i].row != seq || c->patches[i].index != index))
        i++;
    c->seqs[seq].table[index] = block;
    c->patches[i] = (struct backend_patch){.row = seq, .index = index, .block = block};
    c->n_patches += i == c->n_patches;
}

static void set_entry(struct check *c, uint32_t seq, uint32_t index, uint32_t block)
{
    c->seqs[seq].own[index] = block;
    show_entry(c, seq, index, block);
}

/* Fills `to` with random values of the travelling dtype. */
static void fill_random(struct check *c, void *to, size_t n)
{
    for (size_t i = 0; i < n; i++)
        reference_put(c->config.q_dtype, to, i, check_normal(c));
}

/* What the cache must read back after this row was appended. */
static void remember(const struct check *c, const void *from, size_t at, uint32_t n, float *to)
{
    reference_cached_row(c->config.q_dtype, c->config.kv_dtype, from, at, n, to);
}

static void prepare_append(struct check *c, struct check_item *it)
{
    const struct backend_pool_config *g = &c->config;
    struct check_seq *s = &c->seqs[it->seq];
    size_t e = attn_dtype_bytes(g->q_dtype);
    size_t rows = (size_t)it->n_tokens * g->num_kv_heads, row0 = (size_t)it->pos * g->num_kv_heads;
    it->k = take(c, rows * g->head_dim_k * e);
    it->v = g->is_v_in_k ? NULL : take(c, rows * g->head_dim_v * e);
    fill_random(c, it->k, rows * g->head_dim_k);
    if (it->v != NULL)
        fill_random(c, it->v, rows * g->head_dim_v);
    if (check_poison.is_set) {
        bool is_own_v = check_poison.is_v && it->v != NULL;
        size_t row = (size_t)check_poison.token * g->num_kv_heads + check_poison.kv_head;
        size_t dim = is_own_v ? g->head_dim_v : g->head_dim_k;
        reference_put(g->q_dtype, is_own_v ? it->v : it->k, row * dim + check_poison.element,
                      check_poison.value);
    }
    for (size_t r = 0; r < rows; r++) {
        float *k = s->k + (row0 + r) * g->head_dim_k, *v = s->v + (row0 + r) * g->head_dim_v;
        remember(c, it->k, r * g->head_dim_k, g->head_dim_k, k);
        if (g->is_v_in_k)
            memcpy(v, k, g->head_dim_v * sizeof *v);
        else
            remember(c, it->v, r * g->head_dim_v, g->head_dim_v, v);
    }
    uint32_t end = it->pos + it->n_tokens;
    for (; s->n_blocks * g->block_tokens < end; s->n_blocks++)
        set_entry(c, it->seq, s->n_blocks, new_block(c));
    s->len = end > s->len ? end : s->len;
}

static void prepare_outputs(struct check *c, struct check_item *it)
{
    size_t rows = (size_t)it->n_tokens * c->config.num_q_heads;
    size_t bytes = rows * c->config.head_dim_v * attn_dtype_bytes(c->config.q_dtype);
    it->out = take(c, bytes);
    memset(it->out, 0xff, bytes);
    it->lse = it->wants_lse ? take(c, rows * sizeof(float)) : NULL;
    if (it->lse != NULL)
        memset(it->lse, 0xff, rows * sizeof(float));
    const size_t n_chosen = (size_t)it->n_tokens * c->config.num_kv_heads * it->n_chosen;
    it->chosen = it->wants_chosen ? take(c, n_chosen * sizeof *it->chosen) : NULL;
    if (it->chosen != NULL)
        memset(it->chosen, 0xaa, n_chosen * sizeof *it->chosen);
}

static struct backend_item *make_items(struct check *c, const struct check_item *items,
                                       uint32_t n_items)
{
    struct backend_item *list = take(c, n_items * sizeof *list);
    for (uint32_t i = 0; i < n_items; i++) {
        const struct check_item *it = &items[i];
        uint32_t n_blocks = c->seqs[it->seq].n_blocks;
        uint32_t *table = take(c, n_blocks * sizeof *table);
        memcpy(table, c->seqs[it->seq].table, n_blocks * sizeof *table);
        struct tree_node *nodes = it->parents ? take(c, it->n_tokens * sizeof *nodes) : NULL;
        if (nodes != NULL && tree_nodes_of(it->parents, it->n_tokens, nodes) < it->n_tokens)
            fprintf(stderr, "check: no tree\n");
        list[i] = (struct backend_item){.flags = it->flags,
                                        .layer = c->seqs[it->seq].layer,
                                        .table_row = it->seq,
                                        .pos = it->pos,
                                        .n_tokens = it->n_tokens,
                                        .block_table = table,
                                        .q = it->q,
                                        .k = it->k,
                                        .v = it->v,
                                        .out = it->out,
                                        .lse = it->lse,
                                        .nodes = nodes,
                                        .lists = it->lists,
                                        .n_chosen = it->n_chosen,
                                        .chosen = it->chosen,
                                        .key_base = it->key_base,
                                        .ahead = it->ahead};
    }
    return list;
}

static bool submit(struct check *c, struct backend_batch *batch)
{
    attn_status st = c->ops->submit(c->b, batch);
    if (st != ATTN_OK)
        fprintf(stderr, "submit: %s: %s\n", attn_status_name(st), c->ops->last_error(c->b));
    return st == ATTN_OK;
}

static bool poll(struct check *c, const struct backend_batch *batch)
{
    struct backend_batch *back = c->ops->poll(c->b, POLL_NS);
    if (back == batch && back->status == ATTN_OK && back->user == c)
        return true;
    fprintf(stderr, "poll: %s: %s\n", back ? attn_status_name(back->status) : "nothing came",
            c->ops->last_error(c->b));
    return false;
}

static size_t out_bytes(const struct check *c, const struct backend_item *it)
{
    return (size_t)it->n_tokens * c->config.num_q_heads * c->config.head_dim_v *
           attn_dtype_bytes(c->config.q_dtype);
}

/* The items of the batch before, with outputs of their own. NULL: nothing to put in front. */
static struct backend_item *make_front(struct check *c)
{
    struct backend_info info;
    c->ops->info(c->b, &info);
    if (c->n_batches % 2 == 0 || c->n_front == 0 || info.max_in_flight < 2)
        return NULL;
    struct backend_item *list = take(c, c->n_front * sizeof *list);
    for (uint32_t i = 0; i < c->n_front; i++) {
        list[i] = c->front[i];
        list[i].lse = NULL;
        if (list[i].chosen != NULL)
            list[i].chosen = take(c, (size_t)list[i].n_tokens * c->config.num_kv_heads *
                                         list[i].n_chosen * sizeof *list[i].chosen);
        if (list[i].flags & BACKEND_ATTEND) {
            list[i].out = take(c, out_bytes(c, &list[i]));
            memset(list[i].out, 0xff, out_bytes(c, &list[i]));
        }
    }
    return list;
}

bool check_is_missed(const struct check *c, const uint32_t *table, const uint32_t *said, uint32_t n)
{
    for (uint32_t i = 0; said != NULL && i < n && said[i] != UINT32_MAX; i++)
        if (table[said[i]] >= c->config.n_blocks)
            return true;
    return false;
}

/* What an item has for each query and kv head, of that many bytes in out and in lse. */
struct outputs {
    const uint8_t *out;
    const uint8_t *lse; /* or NULL */
    const uint32_t *said; /* [n_chosen] of a row; or NULL */
    const uint32_t *table;
    size_t n_rows;
    uint32_t n_chosen;
};

/* Are b's a's, and has it said the same? But for what may be anything. */
static bool are_same(const struct check *c, const struct outputs *a, const struct outputs *b)
{
    const struct backend_pool_config *g = &c->config;
    const size_t group = g->num_q_heads / g->num_kv_heads, lse = group * sizeof(float);
    const size_t out = group * g->head_dim_v * attn_dtype_bytes(g->q_dtype);
    bool ok = true;
    for (size_t row = 0; row < a->n_rows && ok; row++) {
        const uint32_t *said = a->said != NULL ? a->said + row * a->n_chosen : NULL;
        if (said != NULL)
            ok = memcmp(said, b->said + row * a->n_chosen, a->n_chosen * sizeof *said) == 0;
        if (check_is_missed(c, a->table, said, a->n_chosen))
            continue;
        ok = ok && memcmp(a->out + row * out, b->out + row * out, out) == 0;
        if (a->lse != NULL)
            ok = ok && memcmp(a->lse + row * lse, b->lse + row * lse, lse) == 0;
    }
    return ok;
}

static struct outputs outputs_of(const struct check *c, const struct backend_item *it)
{
    return (struct outputs){.out = it->out,
                            .said = it->chosen,
                            .table = it->block_table,
                            .n_rows = (size_t)it->n_tokens * c->config.num_kv_heads,
                            .n_chosen = it->n_chosen};
}

static bool check_front(const struct check *c, const struct backend_item *list)
{
    for (uint32_t i = 0; i < c->n_front; i++) {
        const struct outputs was = outputs_of(c, &c->front[i]), is = outputs_of(c, &list[i]);
        if ((list[i].flags & BACKEND_ATTEND) && !are_same(c, &was, &is)) {
            fprintf(stderr,
                    "item %" PRIu32 " has other bytes with a batch behind it (seed %" PRIu64 ")\n",
                    i, c->seed);
            return false;
        }
    }
    return true;
}

static bool run_batch(struct check *c, const struct check_item *items, uint32_t n_items)
{
    struct backend_item *list = make_items(c, items, n_items), *front_list = make_front(c);
    struct backend_batch batch = {.pool = c->pool,
                                  .items = list,
                                  .n_items = n_items,
                                  .patches = c->patches,
                                  .n_patches = c->n_patches,
                                  .copies = c->copies,
                                  .n_copies = c->n_copies,
                                  .user = c};
    struct backend_batch front = {
        .pool = c->pool, .items = front_list, .n_items = c->n_front, .user = c};
    struct backend_patch same; /* changes nothing: see check_again */
    if (front_list != NULL && c->had_patches) {
        same = (struct backend_patch){.row = front_list[0].table_row,
                                      .block = front_list[0].block_table[0]};
        front.patches = &same;
        front.n_patches = 1;
    }
    bool ok = front_list == NULL || submit(c, &front);
    ok = ok && submit(c, &batch);
    ok = ok && (front_list == NULL || poll(c, &front)) && poll(c, &batch);
    while (!ok && c->ops->poll(c->b, 0) != NULL) /* the batches are of this function */
        ;
    c->had_patches = c->n_patches > 0;
    c->n_patches = 0;
    if (!ok || (front_list != NULL && !check_front(c, front_list)))
        return false;
    for (uint32_t i = 0; i < c->n_copies; i++)
        if (poison_block(c, c->copies[i].src) != ATTN_OK)
            return false;
    c->n_copies = 0;
    c->kv_bytes = batch.kv_bytes;
    c->kv_shared_bytes = batch.kv_shared_bytes;
    c->front = list;
    c->n_front = n_items;
    c->n_batches++;
    return true;
}

/* What no query of the item sees belongs to others, who have NaN there: so it must not be read, or
 * not matter. What it does see is there again. */
static void lose_unseen(struct check *c, const struct check_item *it)
{
    const struct attn_layer_spec *l = &c->specs[c->seqs[it->seq].layer];
    const struct check_seq *s = &c->seqs[it->seq];
    uint32_t per_block = c->config.block_tokens, past = 0;
    if (l->window_tokens != 0 && l->n_branches == 0 && it->pos + 1 >= l->window_tokens)
        past = (it->pos + 1 - l->window_tokens) / per_block;
    for (uint32_t i = 0; i < s->n_blocks; i++) {
        bool is_lost = i < past && i >= (l->sink_tokens + per_block - 1) / per_block;
        uint32_t block = is_lost ? c->foreign_block : s->own[i];
        if (s->table[i] != block)
            show_entry(c, it->seq, i, block);
    }
}

bool check_submit(struct check *c, struct check_item *items, uint32_t n_items)
{
    const struct backend_pool_config *g = &c->config;
    for (uint32_t i = 0; i < n_items; i++) {
        struct check_item *it = &items[i];
        if (it->flags & BACKEND_APPEND)
            prepare_append(c, it);
        if ((it->flags & BACKEND_ATTEND) == 0)
            continue;
        lose_unseen(c, it);
        size_t n = (size_t)it->n_tokens * g->num_q_heads * g->head_dim_k;
        it->q = take(c, n * attn_dtype_bytes(g->q_dtype));
        fill_random(c, it->q, n);
        prepare_outputs(c, it);
    }
    return run_batch(c, items, n_items);
}

void check_fork(struct check *c, uint32_t from, uint32_t to, uint32_t n_blocks)
{
    const struct check_seq *a = &c->seqs[from];
    struct check_seq *b = &c->seqs[to];
    const size_t rows = (size_t)n_blocks * c->config.block_tokens * c->config.num_kv_heads;
    for (; b->n_blocks < n_blocks; b->n_blocks++)
        set_entry(c, to, b->n_blocks, a->own[b->n_blocks]);
    b->len = n_blocks * c->config.block_tokens;
    b->layer = a->layer;
    memcpy(b->k, a->k, rows * c->config.head_dim_k * sizeof *b->k);
    memcpy(b->v, a->v, rows * c->config.head_dim_v * sizeof *b->v);
}

void check_move_block(struct check *c, uint32_t seq, uint32_t index)
{
    uint32_t to = new_block(c);
    c->copies[c->n_copies++] = (struct backend_copy){.src = c->seqs[seq].own[index], .dst = to};
    set_entry(c, seq, index, to);
}

void check_send_away(struct check *c, uint32_t seq, uint32_t index, uint32_t summary)
{
    c->copies[c->n_copies++] =
        (struct backend_copy){.src = c->seqs[seq].own[index], .dst = summary};
    set_entry(c, seq, index, summary);
}

bool check_bring_back(struct check *c, uint32_t seq, uint32_t index, uint32_t block,
                      const void *bytes)
{
    set_entry(c, seq, index, block);
    return c->ops->block_write(c->pool, block, bytes) == ATTN_OK;
}

/* One value: NaN and inf must be where the reference has them. */
static bool is_close(double got, double want, double atol, double rtol)
{
    if (isnan(want) || isnan(got))
        return isnan(want) && isnan(got);
    if (isinf(want) || isinf(got))
        return want == got;
    return fabs(got - want) <= atol + rtol * fabs(want);
}

/* Rows of `width` floats as they would be in the longer sequence: behind key_base zeros, of n. */
static float *rows_of_whole(const float *rows, size_t width, uint32_t key_base, uint32_t n_rows,
                            uint32_t n)
{
    float *whole = calloc((size_t)n * width + 1, sizeof *whole);
    memcpy(whole + key_base * width, rows, n_rows * width * sizeof *rows);
    return whole;
}

/* The reference of an item of a part: that of the longer sequence, whose queries visit only the
 * part's tokens. */
static void reference_of_part(const struct check *c, const struct check_item *it, const float *q,
                              const float *v, double *out, double *lse)
{
    const struct backend_pool_config *g = &c->config;
    const struct check_seq *s = &c->seqs[it->seq];
    const uint32_t n_keys = it->pos + it->n_tokens, n = it->key_base + n_keys + it->ahead;
    struct attn_layer_spec spec = c->specs[s->layer];
    float *k = rows_of_whole(s->k, g->num_kv_heads * g->head_dim_k, it->key_base, n_keys, n);
    float *all_v = rows_of_whole(v, g->num_kv_heads * g->head_dim_v, it->key_base, n_keys, n);
    uint32_t *starts = malloc((it->n_tokens + 1) * sizeof *starts), n_listed = 0;
    uint32_t *tokens = malloc(((size_t)it->n_tokens * n_keys + 1) * sizeof *tokens);
    for (uint32_t t = 0; t < it->n_tokens; t++) {
        const uint32_t *of = it->lists.starts;
        const uint32_t n_of = of == NULL ? n_keys : of[t + 1] - of[t];
        starts[t] = n_listed;
        for (uint32_t i = 0; i < n_of; i++)
            tokens[n_listed++] = it->key_base + (of == NULL ? i : it->lists.tokens[of[t] + i]);
    }
    starts[it->n_tokens] = n_listed;
    const struct reference_seen seen = {it->parents, starts, tokens};
    spec.is_full |= (it->flags & BACKEND_FULL) != 0;
    if (it->key_base > 0)
        spec.sink_logits = NULL;
    reference_attend_seen(&spec, g->num_q_heads, g->num_kv_heads, g->head_dim_k, g->head_dim_v,
                          ATTN_F32, q, it->n_tokens, it->key_base + it->pos + it->ahead, k, all_v,
                          n, &seen, out, lse);
    free(k);
    free(all_v);
    free(starts);
    free(tokens);
}

static void reference_of(const struct check *c, const struct check_item *it, const float *q,
                         const float *v, double *out, double *lse)
{
    const struct backend_pool_config *g = &c->config;
    const struct check_seq *s = &c->seqs[it->seq];
    const struct reference_seen seen = {it->parents, it->lists.starts, it->lists.tokens};
    if (it->key_base > 0 || it->ahead > 0)
        reference_of_part(c, it, q, v, out, lse);
    else
        reference_attend_seen(&c->specs[s->layer], g->num_q_heads, g->num_kv_heads, g->head_dim_k,
                              g->head_dim_v, ATTN_F32, q, it->n_tokens, it->pos, s->k, v,
                              it->pos + it->n_tokens, &seen, out, lse);
}

/* The proven bound of |got - want| in L2 for 16-bit queries, relative to |want|.
 *
 * A kernel rounds each weight (with quantised K and V the weight times V's scale) and each output
 * once to the 16-bit type, by at most u of its size (bf16: 2^-8): got = (1 + e) sum w(1 + d) v,
 * |e|, |d| <= u, so |got - want| <= u (|want| + sum w |v|), fp32 arithmetic aside.
 * reference_bound_of is what the L2 norm of many such roundings comes to: each has an rms of
 * 0.0016, the two 0.0023, and 5e-3 is twice that. It takes an output of many values, for one
 * weight's rounding moves a whole row alike and a few rows may cancel: of 16 values 3 in 10,000 are
 * beyond 5e-3 (up to 8e-3), of 64 none of 30,000 was beyond 4e-3. */
static double proven_l2(const struct check *c, const struct check_item *it, const float *q,
                        const double *want)
{
    const struct backend_pool_config *g = &c->config;
    const struct check_seq *s = &c->seqs[it->seq];
    uint32_t n_kv = it->pos + it->n_tokens;
    size_t n = (size_t)it->n_tokens * g->num_q_heads * g->head_dim_v;
    size_t n_v = (size_t)n_kv * g->num_kv_heads * g->head_dim_v;
    double u = g->q_dtype == ATTN_BF16 ? 0x1p-8 : 0x1p-11, norm = 0, sum = 0;
    double *terms = malloc(n * sizeof *terms);
    float *v = malloc(n_v * sizeof *v);
    for (size_t i = 0; i < n_v; i++)
        v[i] = fabsf(s->v[i]);
    reference_of(c, it, q, v, terms, NULL);
    for (size_t i = 0; i < n; i++) {
        norm += want[i] * want[i];
        sum += (fabs(want[i]) + terms[i]) * (fabs(want[i]) + terms[i]);
    }
    free(terms);
    free(v);
    return u * sqrt(sum / norm);
}

static bool check_item_output(struct check *c, const struct check_item *it)
{
    const struct backend_pool_config *g = &c->config;
    size_t rows = (size_t)it->n_tokens * g->num_q_heads, n = rows * g->head_dim_v;
    size_t n_q = rows * g->head_dim_k;
    float *q = malloc(n_q * sizeof *q);
    double *want = malloc(n * sizeof *want), *lse = malloc(rows * sizeof *lse);
    struct reference_bound bound = reference_bound_of(g->q_dtype, g->q_dtype);
    bool ok = true;

    for (size_t i = 0; i < n_q; i++)
        q[i] = (float)reference_get(g->q_dtype, it->q, i);
    reference_of(c, it, q, c->seqs[it->seq].v, want, lse);
    double diff = 0, norm = 0;
    for (size_t i = 0; ok && i < n; i++) {
        double got = reference_get(g->q_dtype, it->out, i);
        ok = is_close(got, want[i], bound.atol, bound.rtol);
        if (!ok)
            fprintf(stderr,
                    "out[token %zu][head %zu][%zu] of sequence %" PRIu32 " at %" PRIu32 "+%" PRIu32
                    " is %.9g, reference %.9g (seed %" PRIu64 ")\n",
                    i / g->head_dim_v / g->num_q_heads, i / g->head_dim_v % g->num_q_heads,
                    i % g->head_dim_v, it->seq, it->pos, it->n_tokens, got, want[i], c->seed);
        if (isfinite(want[i])) {
            diff += (got - want[i]) * (got - want[i]);
            norm += want[i] * want[i];
        }
    }
    double l2 = bound.l2;
    if (ok && diff > l2 * l2 * norm && n < FEW_VALUES && g->q_dtype != ATTN_F32)
        l2 = proven_l2(c, it, q, want);
    if (ok && !(diff <= l2 * l2 * norm)) {
        fprintf(stderr, "relative L2 error %.3g, bound %.3g (seed %" PRIu64 ")\n",
                sqrt(diff / norm), l2, c->seed);
        ok = false;
    }
    for (size_t i = 0; ok && it->lse != NULL && i < rows; i++) {
        ok = is_close(it->lse[i], lse[i], bound.lse_atol, bound.lse_rtol);
        if (!ok)
            fprintf(stderr,
                    "lse[%zu] of sequence %" PRIu32 " is %.9g, reference %.9g (seed %" PRIu64 ")\n",
                    i, it->seq, (double)it->lse[i], lse[i], c->seed);
    }
    free(q);
    free(want);
    free(lse);
    return ok;
}

bool check_outputs(struct check *c, const struct check_item *items, uint32_t n_items)
{
    for (uint32_t i = 0; i < n_items; i++)
        if ((items[i].flags & BACKEND_ATTEND) && !check_item_output(c, &items[i]))
            return false;
    return true;
}

static bool is_same(const struct check *c, const struct check_item *a, const struct check_item *b)
{
    const struct outputs was = {.out = a->out,
                                .lse = (const uint8_t *)a->lse,
                                .said = a->chosen,
                                .table = c->seqs[a->seq].own,
                                .n_rows = (size_t)a->n_tokens * c->config.num_kv_heads,
                                .n_chosen = a->n_chosen};
    const struct outputs is = {.out = b->out, .lse = (const uint8_t *)b->lse, .said = b->chosen};
    if (are_same(c, &was, &is))
        return true;
    fprintf(stderr,
            "other bytes for sequence %" PRIu32 " at %" PRIu32 "+%" PRIu32 " (seed %" PRIu64 ")\n",
            a->seq, a->pos, a->n_tokens, c->seed);
    return false;
}

bool check_repeat(struct check *c, const struct check_item *items, uint32_t n_items, uint32_t flags,
                  struct check_item *out_again)
{
    for (uint32_t i = 0; i < n_items; i++) {
        out_again[i] = items[i];
        out_again[i].flags &= flags;
        prepare_outputs(c, &out_again[i]);
    }
    return run_batch(c, out_again, n_items);
}

static bool compare_with(struct check *c, const struct check_item *items, uint32_t n_items,
                         uint32_t flags)
{
    struct check_item again[64] = {{0}};
    if (!check_repeat(c, items, n_items, flags, again))
        return false;
    for (uint32_t i = 0; i < n_items; i++)
        if (!is_same(c, &items[i], &again[i]))
            return false;
    return true;
}

bool check_again(struct check *c, const struct check_item *items, uint32_t n_items)
{
    const struct check_seq *s = &c->seqs[items[0].seq];
    if (c->had_patches && s->n_blocks > 0)
        show_entry(c, items[0].seq, 0, s->table[0]);
    return compare_with(c, items, n_items, BACKEND_APPEND | BACKEND_ATTEND | BACKEND_FULL);
}

bool check_alone(struct check *c, const struct check_item *items, uint32_t n_items)
{
    for (uint32_t i = 0; i < n_items; i++)
        if (!compare_with(c, &items[i], 1, BACKEND_ATTEND | BACKEND_FULL))
            return false;
    return true;
}

attn_status check_time(struct check *c, const char *variant, struct check_item *items,
                       uint32_t n_items)
{
    uint64_t ns[2];
    for (uint32_t i = 0; i < n_items; i++) {
        items[i].flags = BACKEND_ATTEND;
        prepare_outputs(c, &items[i]);
    }
    struct backend_batch batch = {
        .pool = c->pool, .items = make_items(c, items, n_items), .n_items = n_items};
    struct backend_batch *batches[1] = {&batch};
    return c->bench->time_batch(c->b, variant, batches, 1, 2, false, ns);
}
