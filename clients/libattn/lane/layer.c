/* layer.c: one plan sent, one layer enqueued, and how layers ended: what a lane is made of, for
 * plans and layers that fit its regions.
 */
#include <stdlib.h>
#include <string.h>

#include "clients/libattn/core/core.h"
#include "clients/libattn/lane/lane.h"
#include "clients/libattn/pool/pool.h"

attn_status attn_lane_check(attn_lane *l)
{
    if (l == NULL)
        return error_set(ATTN_EINVAL, "lane is NULL");
    int32_t fault = atomic_load(&l->page->fault);
    if (atomic_load(&l->is_hung_up) || fault == ATTN_ECONN)
        return error_set(ATTN_ECONN, "the daemon hung up: the lane is over, open another");
    if (fault == ATTN_ETIMEDOUT)
        return error_set(ATTN_ETIMEDOUT, "the daemon did not answer a layer within %llu us",
                         (unsigned long long)l->wait_us);
    if (fault == ATTN_OK)
        return ATTN_OK;
    char why[sizeof l->page->why];
    memcpy(why, l->page->why, sizeof why);
    why[sizeof why - 1] = '\0';
    return error_set((attn_status)fault, "a layer of the lane failed: %s", why);
}

struct plan_message {
    Attnd__Request request;
    Attnd__Plan plan;
    Attnd__Step step;
    uint32_t numbers[]; /* layers, then items, that the three above point to */
};

/* What a says of p, which was checked, with no lane yet; free() it. NULL: no memory. */
static struct plan_message *plan_message_new(const attn_pool *p, const struct attn_plan *a)
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

/* Sends the weights of the plan's layers, where they were given. */
static attn_status send_weights(attn_pool *p, const struct attn_plan *a)
{
    attn_status st = ATTN_OK;
    for (uint32_t i = 0; i < a->n_layers && st == ATTN_OK; i++) {
        const uint32_t layer = a->layers != NULL ? a->layers[i] : i;
        if (pool_has_weights(p, layer))
            st = attn_pool_send_weights(p, layer, a->timeout_us);
    }
    return st;
}

attn_status lane_plan_send(attn_lane *l, attn_pool *p, const struct attn_plan *a, bool is_patient)
{
    const struct client_bulk nothing = {0};
    struct plan_message *m = plan_message_new(p, a);
    if (m == NULL)
        return error_set(ATTN_ENOMEM, "no memory for a plan of %u items", a->n_items);
    m->plan.lane = l->id;
    m->plan.first_bell = l->next_bell;
    m->plan.out_offset = LANE_OUT_OFFSET;
    attn_status st = client_call_bulk(l->client, &m->request, is_patient ? &nothing : NULL,
                                      a->timeout_us, NULL, NULL);
    if (st == ATTN_ENOWEIGHTS) {
        st = send_weights(p, a);
        if (st == ATTN_OK)
            st = client_call_bulk(l->client, &m->request, is_patient ? &nothing : NULL,
                                  a->timeout_us, NULL, NULL);
    }
    if (st == ATTN_OK)
        l->next_bell += a->n_layers;
    free(m);
    return st;
}

/* Where the tensors of T tokens lie. */
static attn_status layout_of(const attn_pool *p, const struct attn_lane_step *s,
                             struct wire_step_layout *out)
{
    uint32_t one = s->n_tokens, zero = 0;
    char why[ATTN_MESSAGE_BYTES] = "";
    Attnd__Step h = ATTND__STEP__INIT;
    h.flags = (s->k != NULL ? WIRE_STEP_APPEND : 0) | (s->q != NULL ? WIRE_STEP_ATTEND : 0) |
              (s->lse != NULL ? WIRE_STEP_LSE : 0);
    h.dtype = (Attnd__Dtype)p->spec.q_dtype;
    h.n_seq = h.n_epoch = h.n_pos = h.n_n_tokens = 1;
    h.n_tokens = &one;
    h.pos = &zero;
    const struct wire_shape shape = pool_shape(p);
    attn_status st = wire_step_layout_of(&h, &shape, out, why, sizeof why);
    return st == ATTN_OK ? ATTN_OK : error_set(st, "%s", why);
}

/* q, k or v of t tokens. */
static struct lane_part part_of(const void *from, void *to, uint64_t t, uint64_t token_bytes,
                                uint64_t stride)
{
    return (struct lane_part){.from = from,
                              .to = to,
                              .bytes = t * token_bytes,
                              .row_bytes = token_bytes,
                              .stride = stride != token_bytes ? stride : 0};
}

attn_status lane_enqueue_whole(attn_lane *l, const attn_pool *p, void *stream,
                               const struct attn_lane_step *s)
{
    struct wire_step_layout at;
    attn_status st = layout_of(p, s, &at);
    if (st != ATTN_OK)
        return st;
    if (at.request_bytes > l->in_bytes || at.reply_bytes > l->out_bytes - LANE_OUT_OFFSET)
        return error_set(
            ATTN_EINVAL, "%u tokens are %llu bytes in and %llu out: the lane has %llu and %llu",
            s->n_tokens, (unsigned long long)at.request_bytes, (unsigned long long)at.reply_bytes,
            (unsigned long long)l->in_bytes, (unsigned long long)l->out_bytes - LANE_OUT_OFFSET);
    const struct attn_pool_spec *spec = &p->spec;
    const struct wire_shape shape = pool_shape(p);
    const uint64_t e = attn_dtype_bytes(spec->q_dtype), t = s->n_tokens;
    uint8_t *out = l->out + LANE_OUT_OFFSET;
    const uint64_t q_bytes = spec->num_q_heads * wire_q_dim(&shape) * e;
    const uint64_t out_bytes = spec->num_q_heads * wire_out_dim(&shape) * e;
    const uint64_t k_bytes = spec->num_kv_heads * spec->head_dim_k * e;
    const uint64_t v_bytes = spec->num_kv_heads * spec->head_dim_v * e;
    struct lane_layer x = {
        .in = {part_of(s->q, l->in + at.q_offset, t, q_bytes, s->q_stride),
               part_of(s->k, l->in + at.k_offset, t, k_bytes, s->k_stride),
               part_of(s->v, l->in + at.v_offset, t, v_bytes, s->v_stride)},
        .out = {{out + at.out_offset, s->out, t * out_bytes, 0, 0},
                {out + at.lse_offset, s->lse, t * spec->num_q_heads * sizeof(float), 0, 0}},
        .poison = out,
        .poison_bytes = at.reply_bytes,
        .page = l->memory_page,
        .done = (uint32_t *)(void *)l->out,
        .wait_ns = l->wait_us * 1000,
    };
    char why[ATTN_MESSAGE_BYTES] = "";
    st = l->ops->enqueue(l->memory, stream, &x, why, sizeof why);
    if (st != ATTN_OK)
        return error_set(st, "%s", why);
    return l->is_host ? attn_lane_check(l) : ATTN_OK;
}
