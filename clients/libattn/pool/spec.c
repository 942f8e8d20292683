/* spec.c: a pool's spec to and from the wire: struct attn_pool_spec, whose arrays and texts are
 * pointers, and the protobuf message that says the same.
 */
#include <stdlib.h>
#include <string.h>

#include "clients/libattn/core/core.h"
#include "clients/libattn/pool/spec.h"

void wire_spec_fini(struct wire_spec *w)
{
    free(w->layers);
    free(w->layer_ptrs);
    free(w->branches);
}

static attn_status put_branches(const struct attn_layer *a, uint32_t layer,
                                struct wire_branches *to, Attnd__LayerSpec *l)
{
    if (a->n_branches > ATTN_MAX_BRANCHES || (a->n_branches > 0 && a->branches == NULL))
        return error_set(ATTN_EINVAL, "layers[%u].branches: %u of them at %p, at most %d are taken",
                         layer, a->n_branches, (const void *)a->branches, ATTN_MAX_BRANCHES);
    for (uint32_t i = 0; i < a->n_branches; i++) {
        to->segment_tokens[i] = a->branches[i].segment_tokens;
        to->rates[i] = a->branches[i].rate;
    }
    l->n_branch_segment_tokens = l->n_branch_rates = a->n_branches;
    l->branch_segment_tokens = to->segment_tokens;
    l->branch_rates = to->rates;
    return ATTN_OK;
}

/* Casts away const: protobuf-c takes char * and float *, and does not write to them. */
attn_status wire_spec_init(struct wire_spec *w, const struct attn_pool_spec *s)
{
    *w = (struct wire_spec){.spec = ATTND__POOL_SPEC__INIT,
                            .identity = ATTND__IDENTITY__INIT,
                            .features = {(char *)"v_in_k", (char *)"projections"}};
    Attnd__PoolSpec *p = &w->spec;
    p->name = (char *)s->name;
    p->num_layers = s->num_layers;
    p->num_q_heads = s->num_q_heads;
    p->num_kv_heads = s->num_kv_heads;
    p->head_dim_k = s->head_dim_k;
    p->head_dim_v = s->head_dim_v;
    p->block_tokens = s->block_tokens;
    p->n_blocks = s->n_blocks;
    p->q_dtype = (Attnd__Dtype)s->q_dtype;
    p->kv_dtype = (Attnd__Dtype)s->kv_dtype;
    p->is_batch_invariant = s->is_batch_invariant != 0;
    p->split = (Attnd__Split)s->split;
    p->is_v_in_k = s->is_v_in_k != 0;
    if (p->is_v_in_k) { /* a daemon that ignored it would take other tensors */
        p->required_features = w->features;
        p->n_required_features = s->q_nope_dim > 0 ? 2 : 1;
    }
    p->q_nope_dim = s->q_nope_dim;
    p->out_dim = s->out_dim;
    w->identity.model = (char *)(s->model != NULL ? s->model : "");
    w->identity.rope = (char *)(s->rope != NULL ? s->rope : "");
    p->identity = &w->identity;
    if (s->n_layers == 0)
        return ATTN_OK;
    w->layers = calloc(s->n_layers, sizeof *w->layers);
    w->layer_ptrs = calloc(s->n_layers, sizeof(Attnd__LayerSpec *));
    w->branches = calloc(s->n_layers, sizeof *w->branches);
    if (w->layers == NULL || w->layer_ptrs == NULL || w->branches == NULL)
        return error_set(ATTN_ENOMEM, "no memory for a pool's layers");
    for (uint32_t i = 0; i < s->n_layers; i++) {
        const struct attn_layer *a = &s->layers[i];
        Attnd__LayerSpec *l = w->layer_ptrs[i] = &w->layers[i];
        attnd__layer_spec__init(l);
        l->scale = a->scale;
        l->window_tokens = a->window_tokens;
        l->sink_tokens = a->sink_tokens;
        l->soft_cap = a->soft_cap;
        l->is_full = a->is_full != 0;
        l->sink_logits = (float *)a->sink_logits;
        l->n_sink_logits = a->sink_logits != NULL ? s->num_q_heads : 0;
        l->alibi_slopes = (float *)a->alibi_slopes;
        l->n_alibi_slopes = a->alibi_slopes != NULL ? s->num_q_heads : 0;
        attn_status st = put_branches(a, i, &w->branches[i], l);
        if (st != ATTN_OK)
            return st;
    }
    p->n_layers = s->n_layers;
    p->layers = w->layer_ptrs;
    return ATTN_OK;
}

static size_t text_bytes(const char *s)
{
    return s != NULL ? strlen(s) + 1 : 1;
}

static const char *put_text(char **cursor, const char *s)
{
    char *dst = *cursor;
    size_t n = text_bytes(s);
    memcpy(dst, s != NULL ? s : "", n);
    *cursor += n;
    return dst;
}

static const float *put_floats(float **cursor, const float *src, size_t n)
{
    if (n == 0)
        return NULL;
    float *dst = *cursor;
    memcpy(dst, src, n * sizeof *dst);
    *cursor += n;
    return dst;
}

static const struct attn_branch *take_branches(struct attn_branch **cursor,
                                               const Attnd__LayerSpec *l)
{
    struct attn_branch *to = *cursor;
    for (size_t i = 0; i < l->n_branch_rates; i++)
        to[i] = (struct attn_branch){.segment_tokens = l->branch_segment_tokens[i],
                                     .rate = l->branch_rates[i]};
    *cursor += l->n_branch_rates;
    return l->n_branch_rates > 0 ? to : NULL;
}

attn_status wire_spec_read(const Attnd__PoolSpec *w, struct attn_pool_spec *out, void **out_memory)
{
    const char *model = w->identity != NULL ? w->identity->model : NULL;
    const char *rope = w->identity != NULL ? w->identity->rope : NULL;
    size_t n_floats = 0, n_branches = 0;
    for (size_t i = 0; i < w->n_layers; i++) {
        const Attnd__LayerSpec *l = w->layers[i];
        if (l->n_branch_segment_tokens != l->n_branch_rates)
            return ATTN_EPROTO;
        n_floats += l->n_sink_logits + l->n_alibi_slopes;
        n_branches += l->n_branch_rates;
    }
    size_t bytes = w->n_layers * sizeof(struct attn_layer) + n_floats * sizeof(float) +
                   n_branches * sizeof(struct attn_branch) + text_bytes(w->name) +
                   text_bytes(model) + text_bytes(rope);
    void *memory = calloc(1, bytes);
    if (memory == NULL)
        return ATTN_ENOMEM;
    struct attn_layer *layers = memory;
    float *floats = (float *)(layers + w->n_layers);
    struct attn_branch *branches = (struct attn_branch *)(floats + n_floats);
    char *text = (char *)(branches + n_branches);
    for (size_t i = 0; i < w->n_layers; i++) {
        const Attnd__LayerSpec *l = w->layers[i];
        layers[i] = (struct attn_layer){
            .scale = l->scale,
            .window_tokens = l->window_tokens,
            .sink_tokens = l->sink_tokens,
            .soft_cap = l->soft_cap,
            .is_full = l->is_full,
            .sink_logits = put_floats(&floats, l->sink_logits, l->n_sink_logits),
            .alibi_slopes = put_floats(&floats, l->alibi_slopes, l->n_alibi_slopes),
            .n_branches = (uint32_t)l->n_branch_rates,
            .branches = take_branches(&branches, l),
        };
    }
    *out = (struct attn_pool_spec){
        .struct_size = sizeof *out,
        .layer_struct_size = sizeof(struct attn_layer),
        .name = put_text(&text, w->name),
        .num_layers = w->num_layers,
        .num_q_heads = w->num_q_heads,
        .num_kv_heads = w->num_kv_heads,
        .head_dim_k = w->head_dim_k,
        .head_dim_v = w->head_dim_v != 0 ? w->head_dim_v : w->head_dim_k,
        .block_tokens = w->block_tokens,
        .n_blocks = w->n_blocks,
        .q_dtype = (attn_dtype)w->q_dtype,
        .kv_dtype =
            (attn_dtype)(w->kv_dtype != ATTND__DTYPE__DTYPE_NONE ? w->kv_dtype : w->q_dtype),
        .is_batch_invariant = w->is_batch_invariant,
        .split = (attn_split)w->split,
        .is_v_in_k = w->is_v_in_k,
        .q_nope_dim = w->q_nope_dim,
        .out_dim = w->out_dim,
        .n_layers = (uint32_t)w->n_layers,
        .layers = w->n_layers > 0 ? layers : NULL,
        .model = put_text(&text, model),
        .rope = put_text(&text, rope),
    };
    *out_memory = memory;
    return ATTN_OK;
}
