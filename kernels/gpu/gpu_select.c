/* gpu_select.c: which kernel computes an item, and that in words.
 *
 * It follows from the item's pool, layer, own token count and length, never from the rest of the
 * batch.
 */
#include "kernels/gpu/gpu_host.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

uint32_t gpu_rows_blocks(const struct backend_pool *p, uint32_t rows)
{
    return gpu_attend_matrix_blocks(&p->kv, rows, p->b->device.shared_bytes);
}

bool gpu_is_matrix(enum gpu_kernel kernel)
{
    return kernel == GPU_MATRIX_16 || kernel == GPU_MATRIX_64 || kernel == GPU_MATRIX_128;
}

bool gpu_is_choosing(enum gpu_kernel kernel)
{
    return kernel == GPU_CHOSEN || kernel == GPU_CHOSEN_16;
}

bool gpu_is_sparse(enum gpu_kernel kernel)
{
    return kernel == GPU_LISTED || kernel == GPU_LISTED_16 || gpu_is_choosing(kernel);
}

/* Why no matrix kernel takes this pool; NULL: one does. */
static const char *why_no_matrix(const struct backend_pool *p)
{
    if (!p->b->device.has_matrix_units)
        return "the device has no matrix units";
    if (p->config.is_v_in_k)
        return "V is in K";
    if (p->kv.dk > GPU_MATRIX_MAX_DIM || p->kv.dv > GPU_MATRIX_MAX_DIM)
        return "a head dim is above 256";
    return NULL;
}

/* Of a dilated layer of a pool of stripes: do the forms of attend_rows.cuh for many rows know
 * them? */
static bool has_known_stripes(const struct backend_pool *p, const struct backend_item *it)
{
    const struct attn_layer_spec *s = &p->specs[it->layer];
    bool is_known = (uint64_t)it->n_tokens * p->kv.group > 64 && gpu_rows_blocks(p, 64) > 0;
    for (uint32_t i = 0; i < s->n_branches; i++)
        is_known &= stripes_are_even(p->kv.stripes, branch_of(0, s->branches[i].rate, 0));
    return is_known && !p->has_alibi;
}

/* The same of an item that sees all it may. */
static const char *why_vector(const struct backend_pool *p, const struct backend_item *it)
{
    const char *why = why_no_matrix(p);
    if (!why && p->kv.stripes.every > 0 && p->specs[it->layer].n_branches > 0 &&
        !has_known_stripes(p, it))
        why = "stripes of a dilated layer";
    if (!why && !gpu_attend_matrix_takes(&p->kv, (uint64_t)it->n_tokens * p->kv.group))
        why = "f32";
    return why;
}

/* Of those for every geometry. */
static enum gpu_kernel general_kernel(const struct backend_pool *p, const struct backend_item *it)
{
    const uint64_t rows = (uint64_t)it->n_tokens * p->kv.group;
    if (why_vector(p, it))
        return GPU_VECTOR;
    const bool has_few = gpu_rows_blocks(p, 16) == 0 || p->specs[it->layer].n_branches == 0;
    if (rows <= 16 && has_few)
        return GPU_MATRIX_16;
    return rows > 64 && gpu_rows_blocks(p, 128) > 0 ? GPU_MATRIX_128 : GPU_MATRIX_64;
}

/* Of items that choose: a thread block has the rows of one query. */
static enum gpu_kernel choosing_kernel(const struct backend_pool *p)
{
    return why_no_matrix(p) || p->config.q_dtype == ATTN_F32 ? GPU_CHOSEN : GPU_CHOSEN_16;
}

/* Of items with lists: those of latents are the tuned kernels', of 16-bit pools a thread block has
 * the rows of one query. Both know no distances. */
static enum gpu_kernel listed_kernel(const struct backend_pool *p, const struct backend_item *it)
{
    if (p->has_alibi || p->specs[it->layer].n_branches > 0)
        return GPU_LISTED;
    if (p->prefill && p->config.is_v_in_k &&
        prefill_takes(p->prefill, it->layer, it->n_tokens, it->pos + it->n_tokens))
        return GPU_LISTED_LATENT;
    return why_no_matrix(p) || gpu_rows_blocks(p, 16) == 0 ? GPU_LISTED : GPU_LISTED_16;
}

/* And trees, whose nodes' depths they do not know? */
static bool takes_trees(const struct backend_pool *p, const struct backend_item *it)
{
    return p->prefill && !p->has_alibi && prefill_takes_trees(p->prefill, it->layer);
}

enum gpu_kernel gpu_kernel_of(const struct backend_pool *p, const struct gpu_choice *choice,
                              const struct backend_item *it)
{
    if (!(it->flags & BACKEND_ATTEND))
        return GPU_NONE;
    if (it->nodes != NULL)
        return takes_trees(p, it) ? GPU_TREE_PREFILL : GPU_TREE;
    if (it->lists.starts != NULL)
        return listed_kernel(p, it);
    if (gpu_item_chooses(p, it))
        return choosing_kernel(p);
    if (choice->is_forced)
        return choice->forced == GPU_MATRIX_16 ? general_kernel(p, it) : choice->forced;
    bool is_dilated = p->specs[it->layer].n_branches > 0;
    if (p->tuned && it->n_tokens <= DECODE_MAX_TOKENS && !is_dilated)
        return GPU_TUNED;
    if (p->prefill && prefill_takes(p->prefill, it->layer, it->n_tokens, it->pos + it->n_tokens))
        return is_dilated ? GPU_DILATED : GPU_PREFILL;
    return general_kernel(p, it);
}

/* ---- in words */

enum { FAMILY_BYTES = 96, MAX_KINDS = 8 };

/* The source file of the kernel that takes the item, and why that one if it is not plain. */
static void write_family(const struct backend_pool *p, const struct backend_item *it,
                         char out[FAMILY_BYTES])
{
    const struct gpu_choice any = {0};
    const enum gpu_kernel kernel = gpu_kernel_of(p, &any, it);
    const char *name = "attend_vector", *why = NULL;
    switch (kernel) {
    case GPU_TUNED:
        name = "sm90/decode";
        break;
    case GPU_LISTED_LATENT:
    case GPU_TREE_PREFILL:
    case GPU_PREFILL:
    case GPU_DILATED:
        name = p->config.is_v_in_k          ? "sm90/latent"
               : p->kv.is_quantised         ? "sm90/prefill_codes"
               : kernel == GPU_DILATED      ? "sm90/prefill_dilated"
               : kernel == GPU_TREE_PREFILL ? "sm90/trees"
                                            : "sm90/prefill";
        break;
    case GPU_MATRIX_16:
    case GPU_MATRIX_64:
    case GPU_MATRIX_128:
    case GPU_CHOSEN_16:
    case GPU_LISTED_16:
        name = gpu_attend_matrix_name(&p->kv, kernel == GPU_MATRIX_64 ? 64 : 16,
                                      gpu_is_sparse(kernel));
        break;
    case GPU_VECTOR:
        why = why_vector(p, it);
        break;
    default: /* trees, lists and choices that no matrix kernel has */
        break;
    }
    if (strcmp(name, "attend_rows") == 0)
        snprintf(out, FAMILY_BYTES, "%s (forms of %" PRIu32 " KiB of shared memory)", name,
                 p->b->device.shared_bytes >> 10);
    else
        snprintf(out, FAMILY_BYTES, "%s%s%s%s", name, why ? " (" : "", why ? why : "",
                 why ? ")" : "");
}

/* A kind of work, and what does it. */
struct kind {
    const char *name;
    char family[FAMILY_BYTES];
    bool is_said;
};

static void add_kind(struct kind *kinds, uint32_t *n, const char *name,
                     const struct backend_pool *p, struct backend_item it)
{
    it.flags = BACKEND_ATTEND;
    kinds[*n] = (struct kind){.name = name};
    write_family(p, &it, kinds[(*n)++].family);
}

__attribute__((format(printf, 4, 5))) static void append(char *out, size_t bytes, size_t *at,
                                                         const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(out + *at, bytes - *at, format, args);
    va_end(args);
    *at = n > 0 && (size_t)n < bytes - *at ? *at + (size_t)n : bytes - 1;
}

void gpu_pool_kernels(const struct backend_pool *p, char *out, size_t bytes)
{
    enum { PROMPT = 4096 };
    static const struct tree_node nodes[1];
    static const uint32_t starts[2];
    struct kind kinds[MAX_KINDS];
    uint32_t n = 0, plain = UINT32_MAX, dilated = UINT32_MAX;
    for (uint32_t i = p->config.num_layers; i-- > 0;)
        *(p->specs[i].n_branches > 0 ? &dilated : &plain) = i;
    if (plain != UINT32_MAX) {
        struct backend_item it = {.layer = plain, .n_tokens = 1, .pos = PROMPT};
        add_kind(kinds, &n, "steps", p, it);
        it.n_tokens = PROMPT;
        add_kind(kinds, &n, "prompts", p, it);
        it.n_tokens = 1;
        it.nodes = nodes;
        add_kind(kinds, &n, "trees", p, it);
        it.nodes = NULL;
        it.lists.starts = starts;
        add_kind(kinds, &n, "lists", p, it);
        it.lists.starts = NULL;
        it.n_chosen = 1;
        add_kind(kinds, &n, "chosen blocks", p, it);
    }
    if (dilated != UINT32_MAX) {
        struct backend_item it = {.layer = dilated, .n_tokens = 1, .pos = PROMPT};
        add_kind(kinds, &n, "dilated steps", p, it);
        it.n_tokens = PROMPT;
        add_kind(kinds, &n, "dilated prompts", p, it);
    }
    size_t at = 0;
    out[0] = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (kinds[i].is_said)
            continue;
        append(out, bytes, &at, "%s%s", i > 0 ? "; " : "", kinds[i].name);
        for (uint32_t k = i + 1; k < n; k++)
            if (strcmp(kinds[k].family, kinds[i].family) == 0) {
                append(out, bytes, &at, ", %s", kinds[k].name);
                kinds[k].is_said = true;
            }
        append(out, bytes, &at, ": %s", kinds[i].family);
    }
    if (p->config.q_nope_dim > 0)
        append(out, bytes, &at, "; heads to latents and back: heads");
    if (p->tuned || p->prefill)
        return;
    if (decode_supported(&p->config, 9, 0) || prefill_supported(&p->config, 9))
        append(out, bytes, &at, "; none tuned: those are for sm_90, the device is sm_%" PRIu32,
               p->b->device.capability);
    else
        append(out, bytes, &at, "; none tuned: this module has none for such a pool");
}
