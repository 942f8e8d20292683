/* gpu_pool.c: pools of a gpu backend: their part of the KV memory, their tables and layers on the
 * device, and the workspace of a batch, which grows to the widest pool.
 *
 * Pools are opened and closed while nothing is in flight.
 */
#include "kernels/gpu/gpu_host.h"
#include "kernels/layer_visible.h"
#include "kernels/weights.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define POOL_ALIGN 4096

/* Its entries are counted in 32 bits. */
static attn_status check_table(struct backend *b, uint32_t n_rows, uint32_t row_blocks)
{
    if ((uint64_t)n_rows * row_blocks <= UINT32_MAX)
        return ATTN_OK;
    return gpu_fail(b, ATTN_ENOTSUP,
                    "n_table_rows %u of max_row_blocks %u: up to 2^32 - 1 entries are built",
                    n_rows, row_blocks);
}

attn_status gpu_pool_check(struct backend *b, const struct backend_pool_config *c)
{
    attn_status st = backend_pool_config_check(c, b->error, sizeof b->error);
    if (st != ATTN_OK)
        return st;
    uint32_t group = c->num_q_heads / c->num_kv_heads;
    st = check_table(b, c->n_table_rows, c->max_row_blocks);
    if (st != ATTN_OK)
        return st;
    if (c->num_q_heads > 4096 || group > 1024)
        return gpu_fail(b, ATTN_ENOTSUP, "num_q_heads %u: up to 4096 are built", c->num_q_heads);
    return ATTN_OK;
}

uint64_t gpu_pool_bytes(const struct backend *b, const struct backend_pool_config *c)
{
    (void)b;
    uint64_t bytes = weights_room(c) + kv_layout_of(c).block_bytes * c->n_blocks;
    return (bytes + POOL_ALIGN - 1) / POOL_ALIGN * POOL_ALIGN;
}

static void describe(struct backend_pool *p)
{
    const struct backend_pool_config *c = &p->config;
    const struct kv_layout *l = &p->layout;
    p->kv = (struct gpu_kv){
        .base = (char *)p->b->kv.p + p->range.offset + weights_room(c),
        .block_bytes = l->block_bytes,
        .layer_bytes = l->layer_bytes,
        .v_offset = l->v_offset,
        .k_head_bytes = l->k_head_bytes,
        .v_head_bytes = l->v_head_bytes,
        .k_scales = l->k_scales,
        .v_scales = l->v_scales,
        .table = p->table_memory,
        .layers = p->layers_memory,
        .row_blocks = c->max_row_blocks,
        .num_q_heads = c->num_q_heads,
        .num_kv_heads = c->num_kv_heads,
        .group = c->num_q_heads / c->num_kv_heads,
        .dk = c->head_dim_k,
        .dv = c->head_dim_v,
        .block_tokens = c->block_tokens,
        .block_shift = (uint32_t)__builtin_ctz(c->block_tokens),
        .q_dtype = (uint32_t)c->q_dtype,
        .kv_dtype = (uint32_t)c->kv_dtype,
        .is_quantised = l->is_quantised,
        .stripes = stripes_of(c),
        .first_kv_head = c->first_kv_head,
    };
}

/* Layers and their per-head arrays in one device allocation: [num_layers] structs, then the
 * arrays. */
static attn_status upload_layers(struct backend_pool *p, const struct attn_layer_spec *from)
{
    struct backend *b = p->b;
    uint32_t n = p->config.num_layers, heads = p->config.num_q_heads;
    size_t arrays = n * sizeof(struct gpu_layer);
    size_t bytes = arrays + 2 * (size_t)n * heads * sizeof(float);
    char *host = calloc(1, bytes);
    if (!host)
        return gpu_fail(b, ATTN_ENOMEM, "out of host memory");
    attn_status st = gpu_fail(b, ATTN_ENOMEM, "%zu bytes for layers", bytes);
    if (runtime_alloc(&p->layers_memory, bytes) != 0)
        goto out;
    for (uint32_t i = 0; i < n; i++) {
        struct gpu_layer *l = (struct gpu_layer *)host + i;
        l->scale = from[i].scale;
        l->soft_cap = from[i].soft_cap;
        l->window_tokens = from[i].window_tokens;
        l->sink_tokens = from[i].sink_tokens;
        l->is_full = from[i].is_full;
        l->n_branches = from[i].n_branches;
        memcpy(l->branches, from[i].branches, sizeof l->branches);
        const float *given[2] = {from[i].sink_logits, from[i].alibi_slopes};
        const float **to[2] = {&l->sink_logits, &l->alibi_slopes};
        for (int k = 0; k < 2; k++) {
            size_t at = arrays + (2 * i + (size_t)k) * heads * sizeof(float);
            if (!given[k])
                continue;
            memcpy(host + at, given[k], heads * sizeof(float));
            *to[k] = (const float *)((char *)p->layers_memory + at);
        }
    }
    if (runtime_copy(p->layers_memory, host, bytes, b->stream) != 0 ||
        runtime_stream_wait(b->stream) != 0)
        st = gpu_lost(b);
    else
        st = ATTN_OK;
out:
    free(host);
    return st;
}

/* What is there stays if there is no more: open pools use it. what_for: said in the error. */
static attn_status grow_device(struct backend *b, const char *what_for, void **p, uint64_t *bytes,
                               uint64_t want)
{
    void *more = NULL;
    if (want <= *bytes)
        return ATTN_OK;
    if (runtime_alloc(&more, want) != 0)
        return gpu_fail(b, ATTN_ENOMEM,
                        "no memory beside the pools' for %" PRIu64 " bytes for %s: %s", want,
                        what_for, runtime_last_error());
    runtime_free(*p);
    *p = more;
    *bytes = want;
    return ATTN_OK;
}

/* Both sides of what a batch's plan is copied through. */
static attn_status grow_staging(struct backend *b, const char *what_for, struct gpu_staging *s,
                                uint64_t want)
{
    void *host = NULL;
    if (want <= s->bytes)
        return ATTN_OK;
    if (runtime_host_alloc(&host, want) != 0)
        return gpu_fail(b, ATTN_ENOMEM, "no memory for %" PRIu64 " bytes of staging for %s: %s",
                        want, what_for, runtime_last_error());
    attn_status st = grow_device(b, what_for, (void **)&s->device, &s->bytes, want);
    if (st != ATTN_OK) {
        runtime_host_free(host);
        return st;
    }
    runtime_host_free(s->host);
    s->host = host;
    return ATTN_OK;
}

/* Room for parts of rows as wide as the pool's, and what counts those that are there. */
static attn_status grow_parts(struct backend *b, uint32_t dv)
{
    const char *what_for = "parts of rows";
    uint64_t had = 0;
    if (dv > b->part_dv) {
        attn_status st =
            grow_device(b, what_for, (void **)&b->part_o, &had,
                        ((uint64_t)GPU_PART_SLOTS + GPU_SHARED_SLOTS) * dv * sizeof(float));
        had = b->part_ml ? (uint64_t)GPU_PART_SLOTS * 2 * sizeof(float) : 0;
        if (st == ATTN_OK)
            st = grow_device(b, what_for, (void **)&b->part_ml, &had,
                             (uint64_t)GPU_PART_SLOTS * 2 * sizeof(float));
        if (st != ATTN_OK)
            return st;
        b->part_dv = dv;
        b->part_slots = GPU_PART_SLOTS;
    }
    if (b->arrivals)
        return ATTN_OK;
    const uint64_t bytes = GPU_MAX_JOINED * sizeof(uint32_t);
    had = 0;
    attn_status st = grow_device(b, what_for, (void **)&b->arrivals, &had, bytes);
    if (st == ATTN_OK && runtime_fill(b->arrivals, 0, bytes, b->stream) != 0)
        st = gpu_lost(b);
    return st;
}

/* Staging and scratch for the widest pool so far. Nothing is in flight. */
static attn_status grow_workspace(struct backend *b, const struct backend_pool *p)
{
    uint64_t staging = gpu_staging_bytes(b, p), q = gpu_q_bytes(b, p);
    uint64_t kv = gpu_brought_bytes(b, p), scratch = 0;
    uint64_t heads = b->config.max_batch_tokens * gpu_heads_row_bytes(p);
    if (p->tuned)
        scratch =
            decode_scratch_bytes(p->tuned, b->config.max_batch_items, b->config.max_batch_tokens);
    if (p->tuned || p->prefill)
        scratch += PREFILL_SCRATCH_BYTES;
    char what_for[80];
    snprintf(what_for, sizeof what_for, "batches of %" PRIu32 " tokens (engine.max_batch_tokens)",
             b->config.max_batch_tokens);
    attn_status st = ATTN_OK;
    for (int i = 0; i < BACKEND_MAX_IN_FLIGHT && st == ATTN_OK; i++) {
        struct gpu_staging *s = &b->slots[i].job.staging;
        st = grow_staging(b, what_for, s, staging);
        if (st == ATTN_OK)
            st = grow_device(b, what_for, (void **)&s->q, &s->q_bytes, q);
        if (st == ATTN_OK)
            st = grow_device(b, what_for, (void **)&s->kv, &s->kv_bytes, kv);
        if (st == ATTN_OK)
            st = grow_device(b, what_for, (void **)&s->heads, &s->heads_bytes, heads);
        if (st == ATTN_OK)
            st = grow_device(b, what_for, &s->scratch, &s->scratch_bytes, scratch);
        if (st == ATTN_OK && s->scratch &&
            runtime_fill(s->scratch, 0, s->scratch_bytes, b->stream) != 0)
            st = gpu_lost(b);
    }
    return st == ATTN_OK ? grow_parts(b, p->config.head_dim_v) : st;
}

/* Tells the tuned kernels what the pool is, now or again: their maps end where it does. */
static attn_status init_tuned(struct backend_pool *p)
{
    struct backend *b = p->b;
    int code = 0;
    if (p->tuned)
        code = decode_pool_init(p->tuned, &p->config, &p->kv, p->specs, b->device.n_processors);
    if (runtime_check("decode_pool_init", code) != 0)
        return gpu_lost(b);
    if (p->prefill)
        code = prefill_pool_init(p->prefill, &p->config, &p->kv, p->specs, b->device.n_processors,
                                 b->decoded, GPU_PART_SLOTS);
    return runtime_check("prefill_pool_init", code) == 0 ? ATTN_OK : gpu_lost(b);
}

static attn_status open_tuned(struct backend_pool *p)
{
    struct backend *b = p->b;
    int major = (int)(b->device.capability / 10), minor = (int)(b->device.capability % 10);
    bool has_decode = decode_supported(&p->config, major, minor);
    bool has_prefill = prefill_supported(&p->config, major);
    if (has_decode)
        p->tuned = aligned_alloc(_Alignof(struct decode_pool), sizeof *p->tuned);
    if (has_prefill)
        p->prefill = aligned_alloc(_Alignof(struct prefill_pool), sizeof *p->prefill);
    if ((has_decode && !p->tuned) || (has_prefill && !p->prefill))
        return gpu_fail(b, ATTN_ENOMEM, "out of host memory");
    if (has_prefill && p->kv.is_quantised && !b->decoded) {
        uint64_t had = 0;
        attn_status st = grow_device(b, "decoded keys and values", (void **)&b->decoded, &had,
                                     PREFILL_DECODED_BYTES);
        if (st != ATTN_OK)
            return st;
    }
    return init_tuned(p);
}

/* Zeroes what pools have left in these bytes. */
static attn_status clear_range(struct backend *b, uint64_t offset, uint64_t bytes)
{
    uint64_t end = offset + bytes, old = end < b->kv_written ? end : b->kv_written;
    if (offset < old && runtime_fill((char *)b->kv.p + offset, 0, old - offset, b->stream) != 0)
        return gpu_lost(b);
    return ATTN_OK;
}

static void note_written(struct backend *b, const struct kv_range *r)
{
    if (r->offset + r->bytes > b->kv_written)
        b->kv_written = r->offset + r->bytes;
}

/* The pool's part of the KV memory. What another pool left there is zeroed, but where the place is
 * named: that is the pool's own. */
static attn_status take_range(struct backend_pool *p)
{
    struct backend *b = p->b;
    uint64_t largest, place = p->config.kv_place;
    p->range =
        (struct kv_range){.offset = place - (place != 0), .bytes = gpu_pool_bytes(b, &p->config)};
    if (!kv_range_take(&b->kv_ranges, b->kv.bytes, place != 0, &p->range, &largest)) {
        if (gpu_extremes_make_way(b))
            return take_range(p);
        return gpu_fail(b, ATTN_ENOMEM,
                        "the pool needs %" PRIu64 " bytes of KV memory, %" PRIu64
                        " are free in one piece",
                        p->range.bytes, largest);
    }
    attn_status st = place == 0 ? clear_range(b, p->range.offset, p->range.bytes) : ATTN_OK;
    if (st != ATTN_OK)
        kv_range_give(&b->kv_ranges, &p->range);
    else
        note_written(b, &p->range);
    return st;
}

void gpu_pool_free(struct backend_pool *p)
{
    if (!p)
        return;
    runtime_free(p->layers_memory);
    runtime_free(p->table_memory);
    free(p->tuned);
    free(p->prefill);
    free(p->touched);
    free(p->has_extremes);
    free(p->known);
    free(p->weights_have);
    free(p->specs);
    free(p);
}

attn_status gpu_pool_open(struct backend *b, const struct backend_pool_config *c,
                          struct backend_pool **out_pool)
{
    attn_status st = gpu_enter(b);
    if (st == ATTN_OK)
        st = gpu_pool_check(b, c);
    if (st != ATTN_OK)
        return st;
    if (gpu_follow_all(b) != 0 || runtime_stream_wait(b->stream) != 0)
        return gpu_lost(b);

    struct backend_pool *p = calloc(1, sizeof *p);
    if (!p)
        return gpu_fail(b, ATTN_ENOMEM, "out of host memory");
    p->b = b;
    p->config = *c;
    p->layout = kv_layout_of(c);
    st = take_range(p);
    if (st != ATTN_OK) {
        free(p);
        return st;
    }
    p->specs = malloc(c->num_layers * sizeof *p->specs);
    p->touched = calloc(c->n_table_rows, sizeof *p->touched);
    if (!p->specs || !p->touched) {
        st = gpu_fail(b, ATTN_ENOMEM, "out of host memory");
        goto fail;
    }
    memcpy(p->specs, c->layers, c->num_layers * sizeof *p->specs);
    p->config.layers = p->specs;
    st = upload_layers(p, c->layers);
    if (st != ATTN_OK)
        goto fail;
    uint64_t had = 0, table = (uint64_t)c->n_table_rows * c->max_row_blocks * sizeof(uint32_t);
    st = grow_device(b, "block tables", &p->table_memory, &had, table);
    if (st != ATTN_OK)
        goto fail;
    if (runtime_fill(p->table_memory, 0, table, b->stream) != 0) {
        st = gpu_lost(b);
        goto fail;
    }
    describe(p);
    st = open_tuned(p);
    if (st == ATTN_OK)
        st = grow_workspace(b, p);
    if (st == ATTN_OK)
        st = gpu_weights_open(p);
    if (st != ATTN_OK)
        goto fail;
    for (uint32_t i = 0; i < c->num_layers; i++)
        p->has_alibi |= p->specs[i].alibi_slopes != NULL;
    for (uint32_t i = 0; i < c->num_layers; i++) /* the arrays were borrowed; the device has them */
        p->specs[i].sink_logits = p->specs[i].alibi_slopes = NULL;
    if (runtime_stream_wait(b->stream) != 0) {
        st = gpu_lost(b);
        goto fail;
    }
    p->next = b->pools;
    b->pools = p;
    *out_pool = p;
    return ATTN_OK;
fail:
    runtime_stream_wait(b->stream); /* which may still fill the table */
    kv_range_give(&b->kv_ranges, &p->range);
    gpu_pool_free(p);
    return st;
}

uint64_t gpu_pool_place(const struct backend_pool *p)
{
    return p->range.offset + 1;
}

uint32_t gpu_pool_room(const struct backend_pool *p)
{
    gpu_extremes_make_way(p->b);
    const struct kv_range *own = &p->extremes_range;
    uint64_t room = kv_range_room(&p->range, p->b->kv.bytes);
    if (p->has_extremes != NULL && p->range.next == own) /* its own go as it is resized */
        room = own->offset - p->range.offset + kv_range_room(own, p->b->kv.bytes);
    uint64_t n = (room - weights_room(&p->config)) / p->layout.block_bytes;
    return n < INT32_MAX ? (uint32_t)n : INT32_MAX;
}

/* A table with longer rows, which begin as they are. */
static attn_status widen_table(struct backend_pool *p, uint32_t row_blocks, void **out_table)
{
    struct backend *b = p->b;
    uint64_t had = 0, row = (uint64_t)p->config.max_row_blocks * sizeof(uint32_t);
    uint64_t wide = (uint64_t)row_blocks * sizeof(uint32_t);
    void *table = NULL;
    attn_status st = grow_device(b, "block tables", &table, &had, p->config.n_table_rows * wide);
    if (st != ATTN_OK)
        return st;
    int code = runtime_fill(table, 0, p->config.n_table_rows * wide, b->stream);
    for (uint32_t i = 0; i < p->config.n_table_rows && code == 0; i++)
        code = runtime_copy((char *)table + i * wide, (char *)p->table_memory + i * row, row,
                            b->stream);
    if (code != 0 || runtime_stream_wait(b->stream) != 0) {
        runtime_free(table);
        return gpu_lost(b);
    }
    *out_table = table;
    return ATTN_OK;
}

attn_status gpu_pool_resize(struct backend_pool *p, uint32_t n_blocks, uint32_t max_row_blocks)
{
    struct backend *b = p->b;
    struct kv_range range = p->range;
    struct backend_pool_config c = p->config;
    void *table = NULL;
    attn_status st = gpu_enter(b);
    if (st != ATTN_OK)
        return st;
    if (n_blocks > gpu_pool_room(p))
        return gpu_fail(b, ATTN_ENOMEM, "n_blocks is %u, there is room for %u", n_blocks,
                        gpu_pool_room(p));
    st = check_table(b, c.n_table_rows, max_row_blocks);
    if (st != ATTN_OK)
        return st;
    if (gpu_follow_all(b) != 0 || runtime_stream_wait(b->stream) != 0)
        return gpu_lost(b);
    gpu_extremes_free(p);
    c.n_blocks = n_blocks;
    range.bytes = gpu_pool_bytes(b, &c);
    if (max_row_blocks > c.max_row_blocks)
        st = widen_table(p, max_row_blocks, &table);
    if (st == ATTN_OK && range.bytes > p->range.bytes)
        st = clear_range(b, range.offset + p->range.bytes, range.bytes - p->range.bytes);
    if (st == ATTN_OK && runtime_stream_wait(b->stream) != 0)
        st = gpu_lost(b);
    if (st != ATTN_OK) {
        runtime_free(table);
        return st;
    }
    if (table) {
        runtime_free(p->table_memory);
        p->table_memory = table;
        c.max_row_blocks = max_row_blocks;
    }
    p->config = c;
    p->range.bytes = range.bytes;
    note_written(b, &p->range);
    describe(p);
    return init_tuned(p);
}

void gpu_pool_close(struct backend_pool *p)
{
    struct backend *b = p->b;
    struct backend_pool **at = &b->pools;
    if (gpu_enter(b) == ATTN_OK && gpu_follow_all(b) == 0)
        (void)runtime_stream_wait(b->stream);
    gpu_extremes_free(p);
    kv_range_give(&b->kv_ranges, &p->range);
    while (*at != p)
        at = &(*at)->next;
    *at = p->next;
    gpu_pool_free(p);
}
