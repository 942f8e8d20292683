/* pool_config.c: checks what all backends need of a geometry, and of a batch's words. A loadable
 * backend carries it, and not the built-in one.
 */
#include "kernels/kv_layout.h"
#include "kernels/layer_visible.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#define MAX_HEADS 1024
#define MAX_LAYERS 1024

static bool in_range(const char *field, uint64_t value, uint64_t min, uint64_t max, char *why,
                     size_t why_bytes)
{
    if (value >= min && value <= max)
        return true;
    snprintf(why, why_bytes, "%s is %" PRIu64 ", must be %" PRIu64 " to %" PRIu64, field, value,
             min, max);
    return false;
}

static bool dims_are_valid(const struct backend_pool_config *c, char *why, size_t why_bytes)
{
    const uint32_t max_k = c->is_v_in_k ? BACKEND_MAX_LATENT_K : BACKEND_MAX_HEAD_DIM;
    if (!in_range("head_dim_k", c->head_dim_k, 8, max_k, why, why_bytes) ||
        !in_range("head_dim_v", c->head_dim_v, 8, BACKEND_MAX_HEAD_DIM, why, why_bytes))
        return false;
    if (c->head_dim_k % 8 != 0 || c->head_dim_v % 8 != 0) {
        snprintf(why, why_bytes, "%s is %" PRIu32 ", not a multiple of 8",
                 c->head_dim_k % 8 ? "head_dim_k" : "head_dim_v",
                 c->head_dim_k % 8 ? c->head_dim_k : c->head_dim_v);
        return false;
    }
    const uint32_t group = kv_group(c->kv_dtype);
    if (group > 0 && (c->head_dim_k % group != 0 || c->head_dim_v % group != 0)) {
        snprintf(why, why_bytes,
                 "%s is %" PRIu32 ", not a multiple of %" PRIu32 " with kv_dtype %s",
                 c->head_dim_k % group ? "head_dim_k" : "head_dim_v",
                 c->head_dim_k % group ? c->head_dim_k : c->head_dim_v, group,
                 attn_dtype_name(c->kv_dtype));
        return false;
    }
    if (c->is_v_in_k && c->head_dim_v > c->head_dim_k) {
        snprintf(why, why_bytes,
                 "head_dim_v is %" PRIu32 ", more than head_dim_k %" PRIu32 " with V in K",
                 c->head_dim_v, c->head_dim_k);
        return false;
    }
    return true;
}

/* The projections between heads and latents. */
static bool projections_are_valid(const struct backend_pool_config *c, char *why, size_t why_bytes)
{
    if (c->q_nope_dim == 0 && c->out_dim == 0)
        return true;
    if (!c->is_v_in_k) {
        snprintf(why, why_bytes, "q_nope_dim is %" PRIu32 " in a pool without is_v_in_k",
                 c->q_nope_dim);
        return false;
    }
    if (!in_range("q_nope_dim", c->q_nope_dim, 8, BACKEND_MAX_HEAD_DIM, why, why_bytes) ||
        !in_range("out_dim", c->out_dim, 8, BACKEND_MAX_HEAD_DIM, why, why_bytes))
        return false;
    if (c->q_nope_dim % 8 != 0 || c->out_dim % 8 != 0) {
        snprintf(why, why_bytes, "%s is %" PRIu32 ", not a multiple of 8",
                 c->q_nope_dim % 8 ? "q_nope_dim" : "out_dim",
                 c->q_nope_dim % 8 ? c->q_nope_dim : c->out_dim);
        return false;
    }
    return true;
}

static bool dtypes_are_valid(const struct backend_pool_config *c, char *why, size_t why_bytes)
{
    if (c->q_dtype != ATTN_F32 && c->q_dtype != ATTN_F16 && c->q_dtype != ATTN_BF16) {
        snprintf(why, why_bytes, "q_dtype is %s, must be f32, f16 or bf16",
                 attn_dtype_name(c->q_dtype));
        return false;
    }
    if (c->kv_dtype != c->q_dtype && c->kv_dtype != ATTN_FP8_E4M3 && c->kv_dtype != ATTN_INT8 &&
        c->kv_dtype != ATTN_NVFP4 && c->kv_dtype != ATTN_MXFP4) {
        snprintf(why, why_bytes,
                 "kv_dtype is %s, must be %s (as q_dtype), fp8_e4m3, int8, nvfp4 or mxfp4",
                 attn_dtype_name(c->kv_dtype), attn_dtype_name(c->q_dtype));
        return false;
    }
    return true;
}

/* The query at position 0 of kv head 1 is on no stride but 1. */
static bool branches_are_valid(const struct attn_layer_spec *s, uint32_t layer, char *why,
                               size_t why_bytes)
{
    bool has_rate_1 = s->n_branches == 0;
    if (s->n_branches > ATTN_MAX_BRANCHES) {
        snprintf(why, why_bytes, "layers[%" PRIu32 "].branches has %" PRIu32 " entries, at most %d",
                 layer, s->n_branches, ATTN_MAX_BRANCHES);
        return false;
    }
    if (s->n_branches > 0 && s->window_tokens > 0) {
        snprintf(why, why_bytes,
                 "layers[%" PRIu32 "].window_tokens is %" PRIu32 ", a dilated layer has no window",
                 layer, s->window_tokens);
        return false;
    }
    for (uint32_t i = 0; i < s->n_branches; i++) {
        const struct attn_branch *b = &s->branches[i];
        if (b->rate == 0 || b->segment_tokens == 0 || b->segment_tokens > INT32_MAX ||
            b->segment_tokens % b->rate != 0) {
            snprintf(why, why_bytes,
                     "layers[%" PRIu32 "].branches[%" PRIu32 "] has segments of %" PRIu32
                     " tokens and rate %" PRIu32 ": must be a multiple of the rate, 1 to %d",
                     layer, i, b->segment_tokens, b->rate, INT32_MAX);
            return false;
        }
        has_rate_1 = has_rate_1 || b->rate == 1;
    }
    if (!has_rate_1)
        snprintf(why, why_bytes,
                 "layers[%" PRIu32 "].branches: none has rate 1, so some queries would see nothing",
                 layer);
    return has_rate_1;
}

static bool is_setting(const char *name, float x, uint32_t layer, uint32_t head, char *why,
                       size_t why_bytes)
{
    if (fabsf(x) <= BACKEND_MAX_SETTING)
        return true;
    snprintf(why, why_bytes, "layers[%" PRIu32 "].%s[%" PRIu32 "] is %g, must be %g to %g", layer,
             name, head, (double)x, (double)-BACKEND_MAX_SETTING, (double)BACKEND_MAX_SETTING);
    return false;
}

static bool layer_is_valid(const struct backend_pool_config *c, uint32_t layer, char *why,
                           size_t why_bytes)
{
    const struct attn_layer_spec *s = &c->layers[layer];
    if (!(s->scale > 0 && s->scale <= BACKEND_MAX_SCALE)) {
        snprintf(why, why_bytes, "layers[%" PRIu32 "].scale is %g, must be above 0, %g at most",
                 layer, (double)s->scale, (double)BACKEND_MAX_SCALE);
        return false;
    }
    if (s->soft_cap != 0 &&
        !(s->soft_cap >= BACKEND_MIN_SOFT_CAP && s->soft_cap <= BACKEND_MAX_SOFT_CAP)) {
        snprintf(why, why_bytes, "layers[%" PRIu32 "].soft_cap is %g, must be 0 (none) or %g to %g",
                 layer, (double)s->soft_cap, (double)BACKEND_MIN_SOFT_CAP,
                 (double)BACKEND_MAX_SOFT_CAP);
        return false;
    }
    if (s->sink_tokens > 0 && s->window_tokens == 0) {
        snprintf(why, why_bytes, "layers[%" PRIu32 "].sink_tokens is %" PRIu32 " without a window",
                 layer, s->sink_tokens);
        return false;
    }
    if (!branches_are_valid(s, layer, why, why_bytes))
        return false;
    for (uint32_t h = 0; h < c->num_q_heads; h++) {
        if (s->sink_logits && s->sink_logits[h] != -INFINITY &&
            !is_setting("sink_logits", s->sink_logits[h], layer, h, why, why_bytes))
            return false;
        if (s->alibi_slopes &&
            !is_setting("alibi_slopes", s->alibi_slopes[h], layer, h, why, why_bytes))
            return false;
    }
    return true;
}

attn_status backend_pool_config_check(const struct backend_pool_config *c, char *why,
                                      size_t why_bytes)
{
    if (!in_range("num_layers", c->num_layers, 1, MAX_LAYERS, why, why_bytes) ||
        !in_range("num_q_heads", c->num_q_heads, 1, MAX_HEADS, why, why_bytes) ||
        !in_range("num_kv_heads", c->num_kv_heads, 1, MAX_HEADS, why, why_bytes) ||
        !in_range("block_tokens", c->block_tokens, 8, 256, why, why_bytes) ||
        !in_range("n_blocks", c->n_blocks, 1, INT32_MAX, why, why_bytes) ||
        !in_range("n_table_rows", c->n_table_rows, 1, INT32_MAX, why, why_bytes) ||
        !in_range("n_stripes", c->n_stripes, 0, BACKEND_MAX_PARTS, why, why_bytes) ||
        !in_range("max_row_blocks", c->max_row_blocks, 1,
                  INT32_MAX / c->block_tokens / (c->n_stripes > 0 ? c->n_stripes : 1), why,
                  why_bytes))
        return ATTN_EINVAL;
    if ((c->n_stripes & (c->n_stripes - 1)) != 0 || c->n_stripes == 1 ||
        (c->n_stripes > 0 && c->stripe >= c->n_stripes)) {
        snprintf(why, why_bytes, "stripe is %" PRIu32 " of %" PRIu32 ", must be of 2, 4 or 8",
                 c->stripe, c->n_stripes);
        return ATTN_EINVAL;
    }
    if (c->n_summaries > INT32_MAX - c->n_blocks || (c->n_summaries > 0 && c->n_stripes > 0)) {
        snprintf(why, why_bytes,
                 "n_summaries is %" PRIu32 ", must be at most %" PRIu32
                 ", and 0 in pools of stripes",
                 c->n_summaries, INT32_MAX - c->n_blocks);
        return ATTN_EINVAL;
    }
    if (c->num_q_heads % c->num_kv_heads != 0) {
        snprintf(why, why_bytes,
                 "num_q_heads is %" PRIu32 ", not a multiple of num_kv_heads %" PRIu32,
                 c->num_q_heads, c->num_kv_heads);
        return ATTN_EINVAL;
    }
    if ((c->block_tokens & (c->block_tokens - 1)) != 0) {
        snprintf(why, why_bytes, "block_tokens is %" PRIu32 ", not a power of two",
                 c->block_tokens);
        return ATTN_EINVAL;
    }
    if (!dtypes_are_valid(c, why, why_bytes) || !dims_are_valid(c, why, why_bytes) ||
        !projections_are_valid(c, why, why_bytes))
        return ATTN_EINVAL;
    if (c->layers == NULL) {
        snprintf(why, why_bytes, "layers is missing");
        return ATTN_EINVAL;
    }
    for (uint32_t i = 0; i < c->num_layers; i++)
        if (!layer_is_valid(c, i, why, why_bytes))
            return ATTN_EINVAL;
    uint64_t block_bytes = kv_layout_of(c).block_bytes;
    if (c->n_blocks > (uint64_t)INT64_MAX / block_bytes) {
        snprintf(why, why_bytes, "n_blocks %" PRIu32 " of %" PRIu64 " bytes is too large",
                 c->n_blocks, block_bytes);
        return ATTN_EINVAL;
    }
    return ATTN_OK;
}

/* Whether the lists name only what their queries may see, in order. */
static bool lists_are_good(const struct backend_item *item, bool is_full)
{
    const struct backend_lists *l = &item->lists;
    for (uint32_t t = 0; t < item->n_tokens; t++) {
        const uint64_t end = (uint64_t)item->pos + (is_full ? item->n_tokens : t + 1);
        uint64_t least = 0;
        if (l->starts[t + 1] < l->starts[t])
            return false;
        for (uint32_t i = l->starts[t]; i < l->starts[t + 1]; i++) {
            if (l->tokens[i] < least || l->tokens[i] >= end)
                return false;
            least = (uint64_t)l->tokens[i] + 1;
        }
    }
    return true;
}

/* Blocks of the sequence that the item's last query sees. */
static uint64_t blocks_seen(const struct backend_pool_config *c, const struct backend_item *item)
{
    const uint64_t tokens = (uint64_t)c->block_tokens * (c->n_stripes > 0 ? c->n_stripes : 1);
    return ((uint64_t)item->pos + item->n_tokens + tokens - 1) / tokens;
}

const char *backend_item_fault(const struct backend_pool_config *c, const struct backend_item *item)
{
    const struct attn_layer_spec *l = &c->layers[item->layer];
    const uint32_t both = BACKEND_APPEND | BACKEND_ATTEND;
    if ((item->flags & BACKEND_FULL) && item->ahead == 0 &&
        (l->window_tokens != 0 || l->n_branches != 0))
        return "full, in a layer with a window or branches";
    if (item->ahead > 0 && (!(item->flags & BACKEND_FULL) || item->ahead < item->n_tokens ||
                            item->ahead > INT32_MAX - backend_item_end(c, item)))
        return "ahead, of an item that is not full, or among its keys";
    if ((item->ahead > 0 || item->key_base > 0) && (c->n_stripes > 0 || item->n_chosen > 0))
        return "key_base or ahead, in a pool of stripes or with n_chosen";
    for (uint32_t i = 0; i < l->n_branches; i++)
        if (item->key_base % l->branches[i].segment_tokens != 0)
            return "key_base, inside a segment of a branch";
    if (item->nodes != NULL && item->n_tokens > TREE_MAX_NODES)
        return "a tree of more than 64 nodes";
    if (item->nodes != NULL && (layer_is_full(l, item->flags) || l->n_branches != 0))
        return "a tree, in a layer that is full or has branches";
    if (item->nodes != NULL && c->n_stripes > 0)
        return "a tree, in a pool of stripes";
    if (item->lists.starts != NULL && (item->nodes != NULL || l->n_branches != 0))
        return "lists, of a tree or in a layer that has branches";
    if (item->lists.starts != NULL && !lists_are_good(item, layer_is_full(l, item->flags)))
        return "a list that does not ascend, or names a token that its query does not see";
    if (item->n_chosen > 0 &&
        (item->nodes != NULL || item->lists.starts != NULL || !(item->flags & BACKEND_ATTEND)))
        return "n_chosen, of a tree, with lists or without attention";
    if (item->n_chosen > 0 &&
        (l->window_tokens != 0 || l->n_branches != 0 || l->alibi_slopes != NULL))
        return "n_chosen, with a window, branches or ALiBi";
    if (item->chosen != NULL && (item->n_chosen == 0 || c->n_summaries == 0))
        return "chosen, without n_chosen or in a pool without n_summaries";
    if (item->n_chosen > 0 && c->n_stripes > 0 &&
        ((item->flags & both) == both || item->n_chosen >= blocks_seen(c, item)))
        return "n_chosen, in a pool of stripes, of an item that appends or sees no more blocks";
    if (c->n_stripes > 0 && l->n_branches > 0 && (item->flags & both) == both)
        return "appends and attends, in a dilated layer of a pool of stripes";
    return NULL;
}

uint64_t backend_item_listed(const struct backend_pool_config *c, const struct backend_item *item)
{
    if (item->n_chosen == 0 || (item->chosen == NULL && item->n_chosen >= blocks_seen(c, item)))
        return backend_listed(&item->lists, item->n_tokens);
    return (uint64_t)item->n_chosen * item->n_tokens * c->num_kv_heads;
}

uint64_t backend_item_end(const struct backend_pool_config *c, const struct backend_item *item)
{
    const uint64_t end = (uint64_t)item->pos + item->n_tokens;
    const bool is_whole = (item->flags & BACKEND_ATTEND) &&
                          (item->n_chosen > 0 || c->layers[item->layer].n_branches > 0);
    return is_whole && end <= INT32_MAX ? stripes_before(stripes_of(c), (uint32_t)end) : end;
}

static attn_status check_words(const struct backend_word *words, uint32_t n, const char *field,
                               const char *name, uint32_t features, char *why, size_t why_bytes)
{
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t *word = words[i].word;
        if (!(features & BACKEND_HAS_WORDS)) {
            snprintf(why, why_bytes, "%s: backend %s has no words that batches wait for or write",
                     field, name);
            return ATTN_ENOTSUP;
        }
        if (word == NULL || (uintptr_t)word % sizeof(uint32_t) != 0) {
            snprintf(why, why_bytes, "%s: the word is at %p, not a multiple of 4", field,
                     (const void *)word);
            return ATTN_EINVAL;
        }
    }
    return ATTN_OK;
}

static attn_status check_merges(const struct backend_merges *m, const char *name, uint32_t features,
                                char *why, size_t why_bytes)
{
    attn_status st = ATTN_EINVAL;
    if (m == NULL)
        return ATTN_OK;
    if (!(features & BACKEND_HAS_MERGES)) {
        snprintf(why, why_bytes, "merges: backend %s has none", name);
        return ATTN_ENOTSUP;
    }
    if (m->n_parts == 0 || m->n_parts > BACKEND_MAX_PARTS || m->stripe == 0) {
        snprintf(why, why_bytes, "merges: n_parts is %u of %d at most, stripe %u", m->n_parts,
                 BACKEND_MAX_PARTS, m->stripe);
        return st;
    }
    for (uint32_t k = 0; k < m->n_parts; k++)
        if (m->parts[k] == NULL || (uintptr_t)m->parts[k] % 16 != 0) {
            snprintf(why, why_bytes, "merges: parts[%u] is at %p, not a multiple of 16", k,
                     m->parts[k]);
            return st;
        }
    for (uint32_t i = 0; i < m->n; i++)
        if (m->list[i].out == NULL || m->list[i].n_tokens == 0) {
            snprintf(why, why_bytes, "merges: list[%u] has out %p, %u tokens", i, m->list[i].out,
                     m->list[i].n_tokens);
            return st;
        }
    return ATTN_OK;
}

attn_status backend_extremes_check(const struct backend_pool_config *c,
                                   const struct backend_extremes *x, char *why, size_t why_bytes)
{
    if (x == NULL)
        return ATTN_OK;
    if (c->n_stripes == 0 || x->bytes == NULL || x->list == NULL) {
        snprintf(why, why_bytes, "extremes: list or bytes are missing, or n_stripes is 0");
        return ATTN_EINVAL;
    }
    for (uint32_t i = 0; i < x->n; i++) {
        if (x->list[i].block < c->n_blocks && x->list[i].layer < c->num_layers)
            continue;
        snprintf(why, why_bytes,
                 "extremes: list[%" PRIu32 "] is block %" PRIu32 " of %" PRIu32 ", layer %" PRIu32
                 " of %" PRIu32,
                 i, x->list[i].block, c->n_blocks, x->list[i].layer, c->num_layers);
        return ATTN_EINVAL;
    }
    return ATTN_OK;
}

attn_status backend_words_check(const struct backend_batch *batch, const char *name,
                                uint32_t features, char *why, size_t why_bytes)
{
    attn_status st =
        check_words(batch->wait, batch->wait != NULL, "wait", name, features, why, why_bytes);
    if (st == ATTN_OK)
        st = check_words(batch->signals, batch->n_signals, "signals", name, features, why,
                         why_bytes);
    if (st == ATTN_OK)
        st = check_words(batch->merge_waits, batch->n_merge_waits, "merge_waits", name, features,
                         why, why_bytes);
    return st == ATTN_OK ? check_merges(batch->merges, name, features, why, why_bytes) : st;
}
