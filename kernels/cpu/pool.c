/* pool.c: pools of the cpu backend: their part of the KV memory, which may end further on or
 * earlier while they are open, and what is kept of their layers.
 */
#include "kernels/cpu/cpu.h"
#include "kernels/weights.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

attn_status cpu_pool_check(struct backend *b, const struct backend_pool_config *c)
{
    return backend_pool_config_check(c, b->error, sizeof b->error);
}

uint64_t cpu_pool_bytes(const struct backend *b, const struct backend_pool_config *c)
{
    (void)b;
    return (weights_room(c) + kv_layout_of(c).block_bytes * c->n_blocks + 4095) & ~(uint64_t)4095;
}

/* Copies the layers' specs and the arrays they point to. */
static bool copy_layers(struct backend_pool *p, const struct backend_pool_config *c)
{
    size_t heads = c->num_q_heads;
    p->layers = malloc(c->num_layers * sizeof *p->layers);
    p->layer_arrays = malloc(2 * c->num_layers * heads * sizeof(float));
    if (p->layers == NULL || p->layer_arrays == NULL)
        return false;
    memcpy(p->layers, c->layers, c->num_layers * sizeof *p->layers);
    for (uint32_t i = 0; i < c->num_layers; i++) {
        const float **arrays[] = {&p->layers[i].sink_logits, &p->layers[i].alibi_slopes};
        for (uint32_t j = 0; j < 2; j++) {
            float *copy = p->layer_arrays + (2 * i + j) * heads;
            if (*arrays[j] == NULL)
                continue;
            memcpy(copy, *arrays[j], heads * sizeof *copy);
            *arrays[j] = copy;
        }
    }
    p->config.layers = p->layers;
    return true;
}

/* Extremes that can be made again leave their room to pools. false: there is none. */
static bool extremes_make_way(struct backend *b)
{
    bool had_any = false;
    for (struct backend_pool *p = b->pools; p != NULL; p = p->next) {
        if (!cpu_extremes_can_go(p))
            continue;
        had_any = true;
        cpu_extremes_free(p);
    }
    return had_any;
}

/* The pool's part of the memory, its pages taken. What another pool left there is zeroed, but where
 * the place is named: that is the pool's own. */
static attn_status take_range(struct backend_pool *p)
{
    struct backend *b = p->b;
    struct cpu_memory *m = &b->memory;
    uint64_t largest, place = p->config.kv_place;
    p->range =
        (struct kv_range){.offset = place - (place != 0), .bytes = cpu_pool_bytes(b, &p->config)};
    if (!kv_range_take(&m->ranges, m->bytes, place != 0, &p->range, &largest)) {
        if (extremes_make_way(b))
            return take_range(p);
        cpu_fail(b,
                 "the pool's %" PRIu32 " blocks take %" PRIu64 " bytes, %" PRIu64
                 " are free in one piece",
                 p->config.n_blocks, p->range.bytes, largest);
        return ATTN_ENOMEM;
    }
    attn_status st = (place == 0 ? cpu_memory_give : cpu_memory_keep)(
        m, p->range.offset, p->range.bytes, b->error, sizeof b->error);
    if (st != ATTN_OK)
        kv_range_give(&m->ranges, &p->range);
    return st;
}

bool cpu_pool_memory_ready(struct backend *b, struct backend_pool *p,
                           const struct backend_pool_config *c)
{
    struct cpu_memory *m = &b->memory;
    uint64_t bytes = cpu_pool_bytes(b, c);
    if (p != NULL && (bytes <= p->range.bytes || bytes > kv_range_room(&p->range, m->bytes)))
        return true;
    if (p != NULL)
        return cpu_memory_ready(m, p->range.offset + p->range.bytes, bytes - p->range.bytes);
    uint64_t offset = kv_range_gap(m->ranges, m->bytes, bytes);
    return offset == UINT64_MAX || cpu_memory_ready(m, offset, bytes);
}

uint32_t cpu_pool_room(const struct backend_pool *p)
{
    extremes_make_way(p->b);
    const struct kv_range *own = &p->extremes_range;
    uint64_t room = kv_range_room(&p->range, p->b->memory.bytes);
    if (p->extremes != NULL && p->range.next == own) /* its own go as it is resized */
        room = own->offset - p->range.offset + kv_range_room(own, p->b->memory.bytes);
    uint64_t n = (room - weights_room(&p->config)) / p->geometry.layout.block_bytes;
    return n < INT32_MAX ? (uint32_t)n : INT32_MAX;
}

attn_status cpu_pool_resize(struct backend_pool *p, uint32_t n_blocks, uint32_t max_row_blocks)
{
    struct backend_pool_config c = p->config;
    c.n_blocks = n_blocks;
    c.max_row_blocks = max_row_blocks;
    uint64_t bytes = cpu_pool_bytes(p->b, &c), had = p->range.bytes;
    if (n_blocks > cpu_pool_room(p)) {
        cpu_fail(p->b, "n_blocks is %" PRIu32 ", there is room for %" PRIu32, n_blocks,
                 cpu_pool_room(p));
        return ATTN_ENOMEM;
    }
    cpu_compute_all(p->b);
    cpu_extremes_free(p);
    if (bytes > had) {
        attn_status st = cpu_memory_give(&p->b->memory, p->range.offset + had, bytes - had,
                                         p->b->error, sizeof p->b->error);
        if (st != ATTN_OK)
            return st;
    }
    p->range.bytes = bytes;
    p->config = c;
    return ATTN_OK;
}

uint64_t cpu_pool_place(const struct backend_pool *p)
{
    return p->range.offset + 1;
}

void cpu_pool_free(struct backend_pool *p)
{
    free(p->layer_arrays);
    free(p->layers);
    free(p);
}

void cpu_pool_close(struct backend_pool *p)
{
    struct backend_pool **at = &p->b->pools;
    cpu_compute_all(p->b);
    cpu_extremes_free(p);
    kv_range_give(&p->b->memory.ranges, &p->range);
    while (*at != NULL && *at != p)
        at = &(*at)->next;
    if (*at == p)
        *at = p->next;
    cpu_pool_free(p);
}

attn_status cpu_pool_open(struct backend *b, const struct backend_pool_config *c,
                          struct backend_pool **out_pool)
{
    attn_status st = cpu_pool_check(b, c);
    if (st != ATTN_OK)
        return st;
    struct backend_pool *p = calloc(1, sizeof *p);
    if (p == NULL) {
        cpu_fail(b, "no memory for a pool's description");
        return ATTN_ENOMEM;
    }
    p->b = b;
    p->config = *c;
    st = take_range(p);
    if (st != ATTN_OK) {
        free(p);
        return st;
    }
    if (!copy_layers(p, c)) {
        cpu_fail(b, "no memory for a pool's description");
        cpu_pool_close(p);
        return ATTN_ENOMEM;
    }
    p->geometry = (struct attend_geometry){
        .layout = kv_layout_of(c),
        .num_q_heads = c->num_q_heads,
        .group = c->num_q_heads / c->num_kv_heads,
        .dk = c->head_dim_k,
        .dv = c->head_dim_v,
        .block_tokens = c->block_tokens,
        .block_shift = (uint32_t)__builtin_ctz(c->block_tokens),
        .stripes = stripes_of(c),
        .first_kv_head = c->first_kv_head,
        .q_dtype = c->q_dtype,
        .kv_dtype = c->kv_dtype,
    };
    p->base = b->memory.base + p->range.offset + weights_room(c);
    if (c->q_nope_dim > 0)
        p->weights = b->memory.base + p->range.offset;
    p->next = b->pools;
    b->pools = p;
    *out_pool = p;
    return ATTN_OK;
}

void cpu_pool_kernels(const struct backend_pool *p, char *out, size_t bytes)
{
    const struct cpu_isa *isas[4], *own = p->b->isa;
    const bool is_best = own == isas[cpu_isa_supported(isas) - 1];
    const bool is_paired =
        own->has_pairs && p->config.q_dtype == ATTN_BF16 && p->config.kv_dtype == ATTN_BF16;
    snprintf(out, bytes, "all work: tiles in %s (%s)%s", own->name,
             is_best ? "the best that this CPU has" : "ATTND_CPU_ISA names it",
             is_paired ? ", many rows as products of bf16 pairs" : "");
}
