/* plan.c: the public calls on an open lane. A plan whose layers fit the lane's regions, and its
 * layers, go to layer.c as they are; others go through cut.c, in pieces.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clients/libattn/core/core.h"
#include "clients/libattn/lane/lane.h"
#include "clients/libattn/pool/pool.h"

attn_status attn_lane_info(const attn_lane *l, struct attn_lane_info *out)
{
    if (l == NULL || out == NULL || out->struct_size != sizeof *out)
        return error_set(ATTN_EINVAL, "lane is NULL, or attn_lane_info.struct_size is another");
    *out = (struct attn_lane_info){.struct_size = sizeof *out,
                                   .is_host = l->is_host,
                                   .in_bytes = l->in_bytes,
                                   .out_bytes = l->out_bytes - LANE_OUT_OFFSET,
                                   .in = l->in,
                                   .out = l->out + LANE_OUT_OFFSET};
    return ATTN_OK;
}

/* ---- plans ---- */

/* Bells begin anew behind the last one that was rung. */
static attn_status restart(attn_lane *l)
{
    char why[ATTN_MESSAGE_BYTES] = "";
    uint32_t count = atomic_load(&l->page->bell);
    attn_status st = l->ops->restart(l->memory, count, why, sizeof why);
    if (st != ATTN_OK)
        return error_set(st, "%s", why);
    atomic_store(&l->page->fault, ATTN_OK);
    l->next_bell = count + 1;
    return ATTN_OK;
}

attn_status attn_lane_plan(attn_lane *l, attn_pool *p, const struct attn_plan *a)
{
    if (l == NULL || p == NULL || a == NULL || a->struct_size != sizeof *a)
        return error_set(ATTN_EINVAL, "lane, pool or plan is NULL, or attn_plan.struct_size is "
                                      "another library's");
    attn_status st = p->client == l->client
                         ? client_check(l->client)
                         : error_set(ATTN_EINVAL, "the pool is of another client than the lane");
    if (st == ATTN_OK && p->is_coded)
        st = error_set(ATTN_ENOTSUP, "a lane with a pool whose wire dtype is fp8_e4m3");
    if (st == ATTN_OK && (a->n_items == 0 || a->items == NULL || a->n_layers == 0))
        st = error_set(ATTN_EINVAL, "n_items %u, n_layers %u: not 0", a->n_items, a->n_layers);
    if (st == ATTN_OK && a->n_layers > WIRE_MAX_LAYERS)
        st = error_set(ATTN_EINVAL, "n_layers %u: at most %u", a->n_layers, WIRE_MAX_LAYERS);
    if (st != ATTN_OK)
        return st;
    if (a->is_restart)
        lane_cut_end(l);
    if (a->is_restart && !atomic_load(&l->is_hung_up))
        st = restart(l);
    if (st == ATTN_OK)
        st = attn_lane_check(l);
    if (st == ATTN_OK && l->cut != NULL)
        st = error_set(ATTN_EINVAL, "layers of a plan in pieces are not enqueued (is_restart "
                                    "forgets them)");
    if (st == ATTN_OK)
        st = lane_cut_begin(l, p, a);
    return st != ATTN_OK || l->cut != NULL ? st : lane_plan_send(l, p, a, false);
}

/* ---- layers ---- */

attn_status attn_lane_enqueue(attn_lane *l, const attn_pool *p, void *stream,
                              const struct attn_lane_step *s)
{
    if (l == NULL || p == NULL || s == NULL || s->struct_size != sizeof *s)
        return error_set(ATTN_EINVAL, "lane, pool or step is NULL, or attn_lane_step.struct_size "
                                      "is another library's");
    if (p->spec.is_v_in_k && s->v != NULL)
        return error_set(ATTN_EINVAL, "v is given, the pool has it in k (is_v_in_k)");
    if (((s->k == NULL) != (s->v == NULL) && !p->spec.is_v_in_k) ||
        (s->lse != NULL && s->q == NULL))
        return error_set(ATTN_EINVAL, "k without v, or lse without q");
    const uint64_t strides[] = {s->q_stride, s->k_stride, s->v_stride};
    for (int i = 0; i < 3; i++)
        if (strides[i] % 16 != 0)
            return error_set(ATTN_EINVAL, "%c_stride is %llu bytes, not a multiple of 16", "qkv"[i],
                             (unsigned long long)strides[i]);
    return l->cut != NULL ? lane_cut_enqueue(l, p, stream, s) : lane_enqueue_whole(l, p, stream, s);
}
