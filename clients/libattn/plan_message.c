/* plan_message.c: see plan_message.h. */
#include "clients/libattn/plan_message.h"

#include <stdlib.h>

struct plan_message *plan_message_new(const attn_pool *p, const struct attn_plan *a)
{
    size_t n = a->n_items;
    struct plan_message *m = malloc(sizeof *m + (a->n_layers + 6 * n) * sizeof(uint32_t) + 8);
    if (m == NULL)
        return NULL;
    uint32_t *layers = m->numbers, *epoch = layers + a->n_layers, *pos = epoch + n;
    uint32_t *n_tokens = pos + n;
    uint64_t *seq = (uint64_t *)(((uintptr_t)(n_tokens + n) + 7) & ~(uintptr_t)7);
    for (uint32_t i = 0; i < a->n_layers; i++)
        layers[i] = a->layers != NULL ? a->layers[i] : i;
    for (size_t i = 0; i < n; i++) {
        seq[i] = a->items[i].seq.id;
        epoch[i] = a->items[i].seq.epoch;
        pos[i] = a->items[i].pos;
        n_tokens[i] = a->items[i].n_tokens;
    }
    attnd__request__init(&m->request);
    attnd__plan__init(&m->plan);
    attnd__step__init(&m->step);
    m->request.body_case = ATTND__REQUEST__BODY_PLAN;
    m->request.plan = &m->plan;
    m->plan.n_layers = a->n_layers;
    m->plan.layers = layers;
    m->plan.step = &m->step;
    m->step.pool = p->id;
    m->step.flags = (a->is_append ? WIRE_STEP_APPEND : 0) | (a->is_attend ? WIRE_STEP_ATTEND : 0) |
                    (a->has_lse ? WIRE_STEP_LSE : 0);
    m->step.dtype = (Attnd__Dtype)p->spec.q_dtype;
    m->step.n_seq = m->step.n_epoch = m->step.n_pos = m->step.n_n_tokens = n;
    m->step.seq = seq;
    m->step.epoch = epoch;
    m->step.pos = pos;
    m->step.n_tokens = n_tokens;
    return m;
}
