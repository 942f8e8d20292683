/* pool_spec.c: checks, compares and converts pool specs. A canonical spec has a list of equal
 * layers as one layer. */
#include "daemon/request/pool_spec.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cache/kv_pool.h"

/* Features that a client may require of a pool. */
static const char *const known_features[] = {
    "alibi",       "batch_invariant", "dilated",  "full",  "projections", "quantised_kv",
    "sink_logits", "sink_tokens",     "soft_cap", "split", "v_in_k",      "window"};

#define FAIL(status, ...) (snprintf(why, why_bytes, __VA_ARGS__), (status))

attn_dtype pool_dtype(Attnd__Dtype d)
{
    return attn_dtype_bits((attn_dtype)d) == 0 ? ATTN_DTYPE_NONE : (attn_dtype)d;
}

static attn_status check_features(const Attnd__PoolSpec *s, char *why, size_t why_bytes)
{
    for (size_t i = 0; i < s->n_required_features; i++) {
        bool is_known = false;
        for (size_t k = 0; k < sizeof known_features / sizeof known_features[0]; k++)
            is_known |= strcmp(s->required_features[i], known_features[k]) == 0;
        if (!is_known)
            return FAIL(ATTN_ENOTSUP, "required_features: pools have no feature \"%s\"",
                        s->required_features[i]);
    }
    return ATTN_OK;
}

static attn_status check_layer(const Attnd__PoolSpec *s, size_t i, char *why, size_t why_bytes)
{
    const Attnd__LayerSpec *l = s->layers[i];
    if (!(l->scale >= 0) || isinf(l->scale))
        return FAIL(ATTN_EINVAL, "layers[%zu].scale is %g, not a positive number", i, l->scale);
    if (!(l->soft_cap >= 0) || isinf(l->soft_cap))
        return FAIL(ATTN_EINVAL, "layers[%zu].soft_cap is %g, not a positive number", i,
                    l->soft_cap);
    if (l->sink_tokens != 0 && l->window_tokens == 0)
        return FAIL(ATTN_EINVAL, "layers[%zu].sink_tokens is %u without window_tokens", i,
                    l->sink_tokens);
    if (l->n_sink_logits != 0 && l->n_sink_logits != s->num_q_heads)
        return FAIL(ATTN_EINVAL, "layers[%zu].sink_logits has %zu entries, num_q_heads is %u", i,
                    l->n_sink_logits, s->num_q_heads);
    if (l->n_alibi_slopes != 0 && l->n_alibi_slopes != s->num_q_heads)
        return FAIL(ATTN_EINVAL, "layers[%zu].alibi_slopes has %zu entries, num_q_heads is %u", i,
                    l->n_alibi_slopes, s->num_q_heads);
    if (l->n_branch_segment_tokens > ATTN_MAX_BRANCHES)
        return FAIL(ATTN_EINVAL, "layers[%zu].branch_segment_tokens has %zu entries, at most %d", i,
                    l->n_branch_segment_tokens, ATTN_MAX_BRANCHES);
    if (l->n_branch_rates != l->n_branch_segment_tokens)
        return FAIL(ATTN_EINVAL,
                    "layers[%zu].branch_rates has %zu entries, branch_segment_tokens %zu", i,
                    l->n_branch_rates, l->n_branch_segment_tokens);
    return ATTN_OK;
}

static attn_status check_spec(const Attnd__PoolSpec *s, char *why, size_t why_bytes)
{
    size_t name_bytes = strlen(s->name);
    if (name_bytes == 0 || name_bytes >= KV_NAME_BYTES)
        return FAIL(ATTN_EINVAL, "name has %zu bytes, 1 to %d are allowed", name_bytes,
                    KV_NAME_BYTES - 1);
    if (s->num_layers == 0 || s->num_layers > WIRE_MAX_LAYERS)
        return FAIL(ATTN_EINVAL, "num_layers is %u, 1 to %u are allowed", s->num_layers,
                    WIRE_MAX_LAYERS);
    if (s->head_dim_k == 0)
        return FAIL(ATTN_EINVAL, "head_dim_k is 0");
    if (pool_dtype(s->q_dtype) == ATTN_DTYPE_NONE)
        return FAIL(ATTN_EINVAL, "q_dtype is %d, not a dtype", (int)s->q_dtype);
    if (s->kv_dtype != ATTND__DTYPE__DTYPE_NONE && pool_dtype(s->kv_dtype) == ATTN_DTYPE_NONE)
        return FAIL(ATTN_EINVAL, "kv_dtype is %d, not a dtype", (int)s->kv_dtype);
    if ((unsigned)s->split > ATTN_SPLIT_TOKENS)
        return FAIL(ATTN_EINVAL, "split is %d, not a way to lie on cards", (int)s->split);
    if (s->n_layers > 1 && s->n_layers != s->num_layers)
        return FAIL(ATTN_EINVAL, "layers has %zu entries: 0, 1 or num_layers (%u) are allowed",
                    s->n_layers, s->num_layers);
    for (size_t i = 0; i < s->n_layers; i++) {
        attn_status st = check_layer(s, i, why, why_bytes);
        if (st != ATTN_OK)
            return st;
    }
    return check_features(s, why, why_bytes);
}

/* Compares arrays of 4-byte values by their bytes. */
static bool arrays_equal(size_t n_a, const void *a, size_t n_b, const void *b)
{
    return n_a == n_b && (n_a == 0 || memcmp(a, b, n_a * 4) == 0);
}

/* The field in which two layers differ, NULL if they are alike. */
static const char *layer_difference(const Attnd__LayerSpec *a, const Attnd__LayerSpec *b,
                                    double *out_a, double *out_b)
{
#define FIELD(f)                                                                                   \
    if (a->f != b->f) {                                                                            \
        *out_a = (double)a->f;                                                                     \
        *out_b = (double)b->f;                                                                     \
        return #f;                                                                                 \
    }
    FIELD(scale)
    FIELD(window_tokens)
    FIELD(sink_tokens)
    FIELD(soft_cap)
    FIELD(is_full)
#undef FIELD
#define ARRAY(f)                                                                                   \
    if (!arrays_equal(a->n_##f, a->f, b->n_##f, b->f)) {                                           \
        size_t i = 0;                                                                              \
        while (i < a->n_##f && i < b->n_##f && memcmp(&a->f[i], &b->f[i], 4) == 0)                 \
            i++;                                                                                   \
        *out_a = i < a->n_##f ? a->f[i] : NAN;                                                     \
        *out_b = i < b->n_##f ? b->f[i] : NAN;                                                     \
        return #f;                                                                                 \
    }
    ARRAY(sink_logits)
    ARRAY(alibi_slopes)
    ARRAY(branch_segment_tokens)
    ARRAY(branch_rates)
#undef ARRAY
    return NULL;
}

static bool layers_are_alike(const Attnd__PoolSpec *w)
{
    double a, b;
    for (size_t i = 1; i < w->n_layers; i++)
        if (layer_difference(w->layers[0], w->layers[i], &a, &b) != NULL)
            return false;
    return true;
}

/* An independent copy of asked. */
static attn_status copy_spec(const Attnd__PoolSpec *asked, Attnd__PoolSpec **out)
{
    size_t n = attnd__pool_spec__get_packed_size(asked);
    uint8_t *packed = malloc(n + 1);
    if (packed == NULL)
        return ATTN_ENOMEM;
    attnd__pool_spec__pack(asked, packed);
    *out = attnd__pool_spec__unpack(NULL, n, packed);
    free(packed);
    return *out == NULL ? ATTN_ENOMEM : ATTN_OK;
}

/* Makes the layer list canonical: exactly one layer, or num_layers that are not all alike. */
static attn_status canonical_layers(Attnd__PoolSpec *w)
{
    if (w->n_layers == 0) {
        Attnd__LayerSpec *layer = malloc(sizeof *layer);
        Attnd__LayerSpec **list = malloc(sizeof *list);
        if (layer == NULL || list == NULL) {
            free(layer);
            free(list);
            return ATTN_ENOMEM;
        }
        attnd__layer_spec__init(layer);
        list[0] = layer;
        w->layers = list;
        w->n_layers = 1;
    }
    for (size_t i = 0; i < w->n_layers; i++)
        if (w->layers[i]->scale == 0)
            w->layers[i]->scale = 1 / sqrtf((float)w->head_dim_k);
    if (layers_are_alike(w)) {
        for (size_t i = 1; i < w->n_layers; i++)
            attnd__layer_spec__free_unpacked(w->layers[i], NULL);
        w->n_layers = 1;
    }
    return ATTN_OK;
}

/* Digest of the layers' packed canonical form, so that it is the same on every machine. */
static attn_status digest_layers(struct pool_spec *s)
{
    const Attnd__PoolSpec *w = s->wire;
    size_t n = 0, at = 0;
    for (size_t i = 0; i < w->n_layers; i++)
        n += attnd__layer_spec__get_packed_size(w->layers[i]) + sizeof(uint64_t);
    uint8_t *packed = malloc(n + 1);
    if (packed == NULL)
        return ATTN_ENOMEM;
    for (size_t i = 0; i < w->n_layers; i++) {
        uint64_t bytes = attnd__layer_spec__pack(w->layers[i], packed + at + sizeof bytes);
        memcpy(packed + at, &bytes, sizeof bytes);
        at += sizeof bytes + bytes;
    }
    s->attention = checksum_of(packed, at).low;
    free(packed);
    return ATTN_OK;
}

attn_status pool_spec_init(struct pool_spec *s, const Attnd__PoolSpec *asked, char *why,
                           size_t why_bytes)
{
    *s = (struct pool_spec){0};
    attn_status st = check_spec(asked, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    st = copy_spec(asked, &s->wire);
    if (st != ATTN_OK)
        goto fail;

    Attnd__PoolSpec *w = s->wire;
    for (size_t i = 0; i < w->n_required_features; i++)
        free(w->required_features[i]);
    free(w->required_features);
    w->required_features = NULL;
    w->n_required_features = 0;
    if (w->head_dim_v == 0)
        w->head_dim_v = w->head_dim_k;
    if (w->block_tokens == 0)
        w->block_tokens = POOL_BLOCK_TOKENS;
    if (w->kv_dtype == ATTND__DTYPE__DTYPE_NONE)
        w->kv_dtype = w->q_dtype;
    if (w->identity == NULL) {
        w->identity = malloc(sizeof *w->identity);
        if (w->identity == NULL) {
            st = ATTN_ENOMEM;
            goto fail;
        }
        attnd__identity__init(w->identity);
    }
    st = canonical_layers(w);
    if (st == ATTN_OK)
        st = digest_layers(s);
    if (st != ATTN_OK)
        goto fail;

    s->layers = calloc(w->num_layers, sizeof *s->layers);
    if (s->layers == NULL) {
        st = ATTN_ENOMEM;
        goto fail;
    }
    for (uint32_t i = 0; i < w->num_layers; i++) {
        const Attnd__LayerSpec *l = w->layers[w->n_layers == 1 ? 0 : i];
        s->layers[i] = (struct attn_layer_spec){
            .scale = l->scale,
            .window_tokens = l->window_tokens,
            .sink_tokens = l->sink_tokens,
            .soft_cap = l->soft_cap,
            .is_full = l->is_full,
            .sink_logits = l->n_sink_logits == 0 ? NULL : l->sink_logits,
            .alibi_slopes = l->n_alibi_slopes == 0 ? NULL : l->alibi_slopes,
            .n_branches = (uint32_t)l->n_branch_rates,
        };
        for (uint32_t k = 0; k < s->layers[i].n_branches; k++)
            s->layers[i].branches[k] = (struct attn_branch){
                .segment_tokens = l->branch_segment_tokens[k], .rate = l->branch_rates[k]};
    }
    if (pool_spec_packed_bytes(s) > KV_SPEC_BYTES) {
        st = FAIL(ATTN_ENOTSUP, "layers: the pool's description has %zu bytes, %d are allowed",
                  pool_spec_packed_bytes(s), KV_SPEC_BYTES);
        pool_spec_fini(s);
        return st;
    }
    return ATTN_OK;
fail:
    snprintf(why, why_bytes, "no memory for the pool's description");
    pool_spec_fini(s);
    return st;
}

void pool_spec_fini(struct pool_spec *s)
{
    attnd__pool_spec__free_unpacked(s->wire, NULL);
    free(s->layers);
    *s = (struct pool_spec){0};
}

attn_status pool_spec_compare(const struct pool_spec *have, const struct pool_spec *asked,
                              char *why, size_t why_bytes)
{
    const Attnd__PoolSpec *a = have->wire, *b = asked->wire;
#define NUMBER(f)                                                                                  \
    if (a->f != b->f)                                                                              \
        return FAIL(ATTN_EEXIST, "pool \"%s\" exists with " #f " %u, asked for %u", a->name,       \
                    (unsigned)a->f, (unsigned)b->f);
    NUMBER(num_layers)
    NUMBER(num_q_heads)
    NUMBER(num_kv_heads)
    NUMBER(head_dim_k)
    NUMBER(head_dim_v)
    NUMBER(is_v_in_k)
    NUMBER(q_nope_dim)
    NUMBER(out_dim)
    NUMBER(block_tokens)
    if (b->n_blocks != 0)
        NUMBER(n_blocks)
    NUMBER(is_batch_invariant)
#undef NUMBER
#define DTYPE(f)                                                                                   \
    if (a->f != b->f)                                                                              \
        return FAIL(ATTN_EEXIST, "pool \"%s\" exists with " #f " %s, asked for %s", a->name,       \
                    attn_dtype_name(pool_dtype(a->f)), attn_dtype_name(pool_dtype(b->f)));
    DTYPE(q_dtype)
    DTYPE(kv_dtype)
#undef DTYPE
    if (b->split != ATTND__SPLIT__SPLIT_AUTO && a->split != b->split)
        return FAIL(ATTN_EEXIST, "pool \"%s\" exists with split %s, asked for %s", a->name,
                    attn_split_name((attn_split)a->split), attn_split_name((attn_split)b->split));
#define TEXT(f)                                                                                    \
    if (strcmp(a->identity->f, b->identity->f) != 0)                                               \
        return FAIL(ATTN_EEXIST,                                                                   \
                    "pool \"%s\" exists with identity." #f " \"%.80s\", asked for \"%.80s\"",      \
                    a->name, a->identity->f, b->identity->f);
    TEXT(model)
    TEXT(rope)
#undef TEXT
    for (uint32_t i = 0; i < a->num_layers; i++) {
        double x, y;
        const char *field = layer_difference(a->layers[a->n_layers == 1 ? 0 : i],
                                             b->layers[b->n_layers == 1 ? 0 : i], &x, &y);
        if (field != NULL)
            return FAIL(ATTN_EEXIST, "pool \"%s\" exists with layers[%u].%s %g, asked for %g",
                        a->name, i, field, x, y);
    }
    return ATTN_OK;
}

struct seq_geometry pool_spec_geometry(const struct pool_spec *s, uint32_t layout,
                                       uint64_t block_bytes)
{
    const Attnd__PoolSpec *w = s->wire;
    return (struct seq_geometry){
        .layout = layout,
        .num_layers = w->num_layers,
        .num_kv_heads = w->num_kv_heads,
        .head_dim_k = w->head_dim_k,
        .head_dim_v = w->head_dim_v,
        .block_tokens = w->block_tokens,
        .kv_dtype = pool_dtype(w->kv_dtype),
        .block_bytes = block_bytes,
        .attention = s->attention,
        .model = w->identity->model,
        .rope = w->identity->rope,
    };
}

void pool_spec_content(const struct pool_spec *s, Attnd__Content *out)
{
    const Attnd__PoolSpec *w = s->wire;
    attnd__content__init(out);
    out->num_kv_heads = w->num_kv_heads;
    out->head_dim_k = w->head_dim_k;
    out->head_dim_v = w->head_dim_v;
    out->block_tokens = w->block_tokens;
    out->kv_dtype = w->kv_dtype;
    out->identity = w->identity;
    out->attention = s->attention;
}

void pool_spec_config(const struct pool_spec *s, uint32_t n_table_rows, uint32_t max_row_blocks,
                      struct backend_pool_config *out)
{
    const Attnd__PoolSpec *w = s->wire;
    *out = (struct backend_pool_config){
        .num_layers = w->num_layers,
        .num_q_heads = w->num_q_heads,
        .num_kv_heads = w->num_kv_heads,
        .head_dim_k = w->head_dim_k,
        .head_dim_v = w->head_dim_v,
        .is_v_in_k = w->is_v_in_k,
        .q_nope_dim = w->q_nope_dim,
        .out_dim = w->out_dim,
        .block_tokens = w->block_tokens,
        .n_blocks = w->n_blocks,
        .n_table_rows = n_table_rows,
        .max_row_blocks = max_row_blocks,
        .q_dtype = pool_dtype(w->q_dtype),
        .kv_dtype = pool_dtype(w->kv_dtype),
        .is_batch_invariant = w->is_batch_invariant,
        .layers = s->layers,
    };
}

size_t pool_spec_packed_bytes(const struct pool_spec *s)
{
    return attnd__pool_spec__get_packed_size(s->wire);
}

void pool_spec_pack(const struct pool_spec *s, uint8_t *dst)
{
    attnd__pool_spec__pack(s->wire, dst);
}
