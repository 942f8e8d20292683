/* step_plan.c: what the steps of some layers have in common, told to the daemon once: it goes out
 * in front of the first of them, and nobody waits for its answer. As long as the daemon has it, a
 * step is sent without its items (step.c); when it has not, reply.c sends the step again, whole.
 */
#include "clients/libattn/step_plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clients/libattn/client.h"

static void unref(attn_step_plan *p)
{
    if (atomic_fetch_sub(&p->n_refs, 1) != 1)
        return;
    free(p->message);
    free(p);
}

static void on_answer(void *user, attn_ticket ticket, const struct attn_result *r)
{
    attn_step_plan *p = user;
    (void)ticket;
    if (r->status != ATTN_OK)
        atomic_store(&p->is_told, false); /* what is wrong, the steps will say */
    unref(p);
}

static attn_status plan_check(attn_pool *p, const struct attn_plan *a)
{
    if (p == NULL || a == NULL || a->struct_size != sizeof *a)
        return error_set(ATTN_EINVAL, "pool or plan is NULL, or attn_plan.struct_size is another "
                                      "library's");
    attn_status st = client_check(p->client);
    if (st == ATTN_OK)
        st = pool_check(p);
    if (st != ATTN_OK)
        return st;
    if (a->is_restart)
        return error_set(ATTN_EINVAL, "is_restart is of lanes");
    if (a->n_layers == 0 || a->n_layers > WIRE_MAX_LAYERS)
        return error_set(ATTN_EINVAL, "n_layers %u: expected 1 to %u", a->n_layers,
                         WIRE_MAX_LAYERS);
    uint32_t most = client_info(p->client).max_step_items;
    if (a->n_items == 0 || a->items == NULL || a->n_items > most)
        return error_set(ATTN_EINVAL, "n_items %u: expected 1 to %u (engine.max_step_items)",
                         a->n_items, most);
    for (uint32_t i = 0; i < a->n_layers && a->layers != NULL; i++)
        if (a->layers[i] >= p->spec.num_layers)
            return error_set(ATTN_EINVAL, "layers[%u] is %u, the pool has %u layers", i,
                             a->layers[i], p->spec.num_layers);
    return ATTN_OK;
}

/* A copy of what the caller says. */
static attn_step_plan *plan_new(const attn_pool *p, const struct attn_plan *a)
{
    size_t items_bytes = a->n_items * sizeof(struct attn_item);
    attn_step_plan *x = calloc(1, sizeof *x + items_bytes);
    if (x == NULL || (x->message = plan_message_new(p, a)) == NULL) {
        free(x);
        return NULL;
    }
    memcpy(x->items, a->items, items_bytes);
    x->pool = p;
    x->n_items = a->n_items;
    atomic_init(&x->n_refs, 1);
    atomic_init(&x->is_told, false);
    return x;
}

/* Sends it; whether it is known is all that comes of it. */
static attn_status tell(attn_step_plan *x, uint64_t timeout_us)
{
    struct client_request *r;
    attn_status st = client_request_new(x->pool->client, timeout_us, &r);
    if (st != ATTN_OK)
        return st;
    r->header = &x->message->request;
    r->is_piece = true; /* nobody waits for it */
    r->cb = on_answer;
    r->user = x;
    x->id = r->id;
    atomic_store(&x->is_told, true);
    atomic_fetch_add(&x->n_refs, 1);
    st = client_request_start(r);
    if (st == ATTN_OK)
        return st;
    atomic_store(&x->is_told, false);
    atomic_fetch_sub(&x->n_refs, 1);
    client_request_free(r);
    return st;
}

attn_status attn_step_plan_open(attn_pool *p, const struct attn_plan *a, attn_step_plan **out_plan)
{
    if (out_plan == NULL)
        return error_set(ATTN_EINVAL, "out_plan is NULL");
    attn_status st = plan_check(p, a);
    if (st != ATTN_OK)
        return st;
    attn_step_plan *x = plan_new(p, a);
    if (x == NULL)
        return error_set(ATTN_ENOMEM, "no memory for a plan of %u items", a->n_items);
    if (client_takes_plans(p->client))
        st = tell(x, a->timeout_us);
    if (st != ATTN_OK) {
        unref(x);
        return st;
    }
    *out_plan = x;
    return ATTN_OK;
}

void attn_step_plan_close(attn_step_plan *p)
{
    if (p != NULL)
        unref(p);
}

bool step_plan_has_layer(const attn_step_plan *p, uint32_t layer)
{
    const Attnd__Plan *h = &p->message->plan;
    for (size_t i = 0; i < h->n_layers; i++)
        if (h->layers[i] == layer)
            return true;
    return false;
}
