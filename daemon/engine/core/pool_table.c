/* pool_table.c: finds pools by handle, name or cache id, and keeps which sessions hold them. Engine
 * thread. */
#include "daemon/engine/core/pool_table.h"
#include "kernels/kv_layout.h"

#include <stdlib.h>
#include <string.h>

enum { MIN_BLOCK_TOKENS = 8 };

/* A handle is the index plus one; the bits above count earlier pools at that index. */
enum { HANDLE_INDEX_BITS = 11 };

/* For every block that a batch can touch, and a few forks of the longest sequence. */
static void effects_size(const struct config *c, uint32_t max_row_blocks, uint32_t *out_copies,
                         uint32_t *out_patches, uint32_t *out_margin)
{
    *out_copies = c->max_batch_tokens / MIN_BLOCK_TOKENS + 2 * c->max_batch_items;
    *out_patches = *out_copies + 4 * max_row_blocks;
    *out_margin = (BACKEND_MAX_IN_FLIGHT + 1) * *out_copies;
}

uint64_t pool_effects_bytes(const struct config *c)
{
    uint32_t n_copies, n_patches, n_margin;
    effects_size(c, c->max_seq_tokens / MIN_BLOCK_TOKENS + 1, &n_copies, &n_patches, &n_margin);
    return ((uint64_t)n_patches + n_margin) * sizeof(struct kv_patch) +
           n_copies * sizeof(struct kv_copy);
}

attn_status pools_init(struct engine *e)
{
    const struct config *c = e->env.cfg;
    uint32_t max_row_blocks = c->max_seq_tokens / MIN_BLOCK_TOKENS + 1;
    if (max_row_blocks > e->n_blocks)
        max_row_blocks = e->n_blocks;
    effects_size(c, max_row_blocks, &e->copies_capacity, &e->patches_capacity, &e->patches_margin);
    e->pools = calloc(c->max_pools, sizeof *e->pools);
    e->published = calloc(c->max_pools, sizeof *e->published);
    e->pool_keys = calloc(c->max_pools, sizeof *e->pool_keys);
    e->holds = calloc((size_t)session_slots(c->max_sessions) * c->max_pools, sizeof *e->holds);
    return e->pools == NULL || e->published == NULL || e->pool_keys == NULL || e->holds == NULL
               ? ATTN_ENOMEM
               : ATTN_OK;
}

/* --- finding ---------------------------------------------------------------------------------- */

bool pool_is_made(const struct pool *p)
{
    return p->spec.wire != NULL;
}

uint32_t pool_handle(const struct engine *e, const struct pool *p)
{
    return p->generation << HANDLE_INDEX_BITS | ((uint32_t)(p - e->pools) + 1);
}

uint32_t pool_index_of_handle(uint32_t handle)
{
    return (handle & ((1u << HANDLE_INDEX_BITS) - 1)) - 1;
}

static uint64_t pool_key(uint32_t tenant, uint32_t handle)
{
    return (uint64_t)tenant << 32 | handle;
}

/* All keys are compared, so that timing reveals nothing about other tenants' handles. */
struct pool *pool_of_handle(struct engine *e, const struct tenant *who, uint32_t handle)
{
    uint64_t key = pool_key(tenant_id(who), handle);
    uint32_t found = 0; /* index plus one; 0: none */
    for (uint32_t i = 0; i < e->n_pools; i++)
        found |= (uint32_t) - (e->pool_keys[i] == key) & (i + 1);
    return found == 0 || handle == 0 ? NULL : &e->pools[found - 1];
}

struct pool *pool_next(struct engine *e, struct pool *p)
{
    for (p = p == NULL ? e->pools : p + 1; p < e->pools + e->n_pools; p++)
        if (pool_is_made(p))
            return p;
    return NULL;
}

struct pool *pool_find(struct engine *e, const struct tenant *who, const char *name)
{
    struct pool *p = NULL;
    while ((p = pool_next(e, p)) != NULL &&
           (p->tenant != tenant_id(who) || strcmp(p->spec.wire->name, name) != 0))
        ;
    return p;
}

struct pool *pool_of_kv(const struct engine *e, kv_pool_id id)
{
    return id.index < e->n_pools && pool_is_made(&e->pools[id.index]) ? &e->pools[id.index] : NULL;
}

void pool_rename(struct engine *e, struct pool *p, uint32_t generation)
{
    p->generation = generation;
    e->pool_keys[p - e->pools] = pool_key(p->tenant, pool_handle(e, p));
}

/* --- holding ---------------------------------------------------------------------------------- */

/* The session's holds, by index of the pool. */
static struct hold *holds_of(const struct engine *e, uint32_t session)
{
    return &e->holds[(size_t)session * e->env.cfg->max_pools];
}

static struct hold *hold_of(const struct engine *e, const struct pool *p, uint32_t session)
{
    return &holds_of(e, session)[p - e->pools];
}

bool pool_hold(struct engine *e, struct pool *p, uint32_t session, uint64_t request)
{
    struct hold *h = hold_of(e, p, session);
    bool is_new = request > h->request && !h->is_held;
    if (request > h->request)
        *h = (struct hold){request, .is_held = true};
    p->n_holders += is_new;
    return is_new;
}

void pool_release(struct engine *e, struct pool *p, uint32_t session, uint64_t request)
{
    struct hold *h = hold_of(e, p, session);
    if (request < h->request)
        return;
    p->n_holders -= h->is_held;
    *h = (struct hold){request, .is_held = false};
}

void pools_unhold(struct engine *e, uint32_t session)
{
    struct hold *holds = holds_of(e, session);
    for (uint32_t i = 0; i < e->env.cfg->max_pools; i++) {
        e->pools[i].n_holders -= holds[i].is_held;
        holds[i] = (struct hold){0};
    }
}

/* The holds' requests stay: requests for the next pool at this index are higher. */
void pool_unhold_all(struct engine *e, struct pool *p)
{
    for (uint32_t session = 0; p->n_holders > 0; session++) {
        struct hold *h = hold_of(e, p, session);
        p->n_holders -= h->is_held;
        h->is_held = false;
    }
}

uint64_t pools_last_request(const struct engine *e, uint32_t session)
{
    const struct hold *holds = holds_of(e, session);
    uint64_t last = 0;
    for (uint32_t i = 0; i < e->env.cfg->max_pools; i++)
        last = holds[i].request > last ? holds[i].request : last;
    return last;
}

uint64_t pool_block_bytes(const struct pool *p)
{
    return kv_layout_of(&p->config).block_bytes;
}
