/* canary.c: chooses what of an item is compared, and copies it: queries, outputs, K and V, and the
 * weights of projected heads.
 */
#include "daemon/engine/step/canary.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/layer_visible.h"
#include "kernels/reference.h"

uint64_t canary_weights_bytes(const struct canary *c)
{
    return (uint64_t)(c->q_nope_dim + c->out_dim) * c->dv * attn_dtype_bytes(c->q_dtype);
}

/* What the device gave for the heads in this row. */
static void take_output(struct canary *c, uint32_t row, const void *out, const float *lse)
{
    const size_t at = (size_t)row * c->num_q_heads + c->head, n = (size_t)c->n_heads * c->out_dim;
    for (size_t i = 0; i < n; i++)
        c->got[i] = (float)reference_get(c->q_dtype, out, at * c->out_dim + i);
    for (uint32_t h = 0; h < c->n_heads; h++)
        c->got[n + h] = c->has_lse ? lse[at + h] : 0;
}

/* Heads that share K and V, so many that their work is bounded. */
static void choose_heads(struct canary *c, const struct backend_pool_config *p, uint64_t chance)
{
    uint64_t most = CANARY_MAX_HEAD_KEYS / c->n_keys;
    if (c->q_nope_dim > 0 && most > CANARY_MAX_WEIGHT_BYTES / canary_weights_bytes(c))
        most = CANARY_MAX_WEIGHT_BYTES / canary_weights_bytes(c);
    c->group = p->num_q_heads / p->num_kv_heads;
    c->n_heads = most < c->group ? (uint32_t)most : c->group;
    const uint32_t n_parts = (c->group - 1) / c->n_heads + 1;
    const uint32_t first = (uint32_t)(chance >> 20) % n_parts * c->n_heads;
    /* which keys a head sees depends on its kv head: take the first */
    c->kv_head = c->spec.n_branches > 0 ? 0 : (uint32_t)(chance >> 32) % p->num_kv_heads;
    c->head =
        c->kv_head * c->group + (first + c->n_heads > c->group ? c->group - c->n_heads : first);
}

/* The heads' own, in place of the layer's. */
static void take_biases(struct canary *c)
{
    float *sinks = c->biases, *slopes = c->biases + c->n_heads;
    if (c->spec.sink_logits != NULL)
        c->spec.sink_logits =
            memcpy(sinks, c->spec.sink_logits + c->head, c->n_heads * sizeof *sinks);
    if (c->spec.alibi_slopes != NULL)
        c->spec.alibi_slopes =
            memcpy(slopes, c->spec.alibi_slopes + c->head, c->n_heads * sizeof *slopes);
}

attn_status canary_init(struct canary *c, const struct canary_item *item, uint64_t chance)
{
    const struct backend_pool_config *p = item->config;
    *c = (struct canary){.layer = item->layer,
                         .dk = p->head_dim_k,
                         .dv = p->head_dim_v,
                         .q_dim = backend_q_dim(p),
                         .out_dim = backend_out_dim(p),
                         .q_nope_dim = p->q_nope_dim,
                         .block_tokens = p->block_tokens,
                         .q_dtype = p->q_dtype,
                         .kv_dtype = p->kv_dtype,
                         .layout = kv_layout_of(p),
                         .spec = p->layers[item->layer]};
    uint32_t row = (uint32_t)(chance % item->n_tokens);
    c->n_chosen = item->n_chosen;
    if (c->spec.is_full ||
        item->is_full) /* not causal: each row sees all keys, as the last one does */
        row = item->n_tokens - 1;
    c->pos = item->pos + row;
    c->n_keys = c->pos + 1;
    if (c->n_keys > CANARY_MAX_KEYS)
        return ATTN_ENOTSUP;
    c->n_blocks = (c->n_keys - 1) / c->block_tokens + 1;
    choose_heads(c, p, chance);

    size_t row_bytes = (size_t)p->num_q_heads * c->q_dim * attn_dtype_bytes(c->q_dtype);
    size_t n = (size_t)c->n_blocks * c->block_tokens;
    c->num_q_heads = p->num_q_heads;
    c->n_queries = row < CANARY_MAX_QUERIES ? row + 1 : CANARY_MAX_QUERIES;
    c->has_lse = item->lse != NULL;
    c->k = malloc(n * c->dk * sizeof *c->k);
    c->v = malloc(n * c->dv * sizeof *c->v);
    c->queries = malloc(c->n_queries * row_bytes);
    c->got = malloc((size_t)c->n_heads * (c->out_dim + 1) * sizeof *c->got);
    c->biases = malloc(2 * (size_t)c->n_heads * sizeof *c->biases);
    if (c->q_nope_dim > 0)
        c->weights = malloc(c->n_heads * canary_weights_bytes(c));
    if (c->k == NULL || c->v == NULL || c->queries == NULL || c->got == NULL || c->biases == NULL ||
        (c->q_nope_dim > 0 && c->weights == NULL)) {
        canary_fini(c);
        return ATTN_ENOMEM;
    }
    take_output(c, row, item->out, item->lse);
    take_biases(c);
    memcpy(c->queries, (const uint8_t *)item->q + (row + 1 - c->n_queries) * row_bytes,
           c->n_queries * row_bytes);
    return ATTN_OK;
}

/* --- projections ------------------------------------------------------------------------------ */

bool canary_wants_weights(const struct canary *c)
{
    return c->weights != NULL && c->n_weighed < c->n_heads;
}

uint64_t canary_weights_at(const struct canary *c)
{
    return (c->head + c->n_weighed) * canary_weights_bytes(c);
}

void canary_take_weights(struct canary *c, const void *bytes)
{
    const uint64_t n = canary_weights_bytes(c);
    memcpy(c->weights + c->n_weighed++ * n, bytes, n);
}

void canary_keep_row(struct canary *c)
{
    size_t row_bytes = (size_t)c->num_q_heads * c->q_dim * attn_dtype_bytes(c->q_dtype);
    memmove(c->queries, c->queries + (c->n_queries - 1) * row_bytes, row_bytes);
    c->n_queries = 1;
}

void canary_take_output(struct canary *c, const void *out, const float *lse)
{
    take_output(c, c->n_queries - 1, out, lse);
}

void canary_fini(struct canary *c)
{
    free(c->k);
    free(c->v);
    free(c->queries);
    free(c->weights);
    free(c->got);
    free(c->biases);
    c->k = c->v = c->got = c->biases = NULL;
    c->queries = c->weights = NULL;
}

struct visible canary_visible(const struct canary *c)
{
    if (c->spec.n_branches > 0)
        return (struct visible){.end = c->n_keys};
    const struct backend_item last = {.pos = c->pos, .n_tokens = 1};
    return layer_visible(&c->spec, (struct stripes){0}, &last, (struct branch){0}, 0);
}

bool canary_sees_block(const struct canary *c, uint32_t i)
{
    struct visible seen = canary_visible(c);
    uint32_t first = i * c->block_tokens;
    return first < seen.sinks || first + c->block_tokens > seen.first;
}

/* Widens one token's row of the head to floats: the first dim elements. */
static void take_row(const struct canary *c, const uint8_t *codes, const uint8_t *scales,
                     uint32_t dim, float *out)
{
    double wide[CANARY_MAX_DIM];
    if (!c->layout.is_quantised) {
        for (uint32_t d = 0; d < dim; d++)
            out[d] = (float)reference_get(c->kv_dtype, codes, d);
        return;
    }
    reference_dequantise(c->kv_dtype, codes, scales, dim, wide);
    for (uint32_t d = 0; d < dim; d++)
        out[d] = (float)wide[d];
}

void canary_take_block(struct canary *c, uint32_t i, const uint8_t *block)
{
    const struct kv_layout *l = &c->layout;
    const uint8_t *layer = block + c->layer * l->layer_bytes;
    const uint8_t *k = layer + c->kv_head * l->k_head_bytes;
    const uint8_t *v = layer + l->v_offset + c->kv_head * l->v_head_bytes;
    const uint8_t *k_scales =
        layer + l->k_scales + (size_t)c->kv_head * c->block_tokens * l->k_scale_bytes;
    const uint8_t *v_scales =
        layer + l->v_scales + (size_t)c->kv_head * c->block_tokens * l->v_scale_bytes;
    uint32_t first = i * c->block_tokens, n = c->n_keys - first;
    for (uint32_t t = 0; t < (n < c->block_tokens ? n : c->block_tokens); t++) {
        take_row(c, k + (size_t)t * l->k_row_bytes, k_scales + (size_t)t * l->k_scale_bytes, c->dk,
                 c->k + (size_t)(first + t) * c->dk);
        take_row(c, v + (size_t)t * l->v_row_bytes, v_scales + (size_t)t * l->v_scale_bytes, c->dv,
                 c->v + (size_t)(first + t) * c->dv);
    }
}
