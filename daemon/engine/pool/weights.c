/* weights.c: pieces of the weights of a pool's layers, which every card gets, the primary last,
 * so that what it has all have. Engine thread of the primary. */
#include <inttypes.h>
#include <stdio.h>

#include "daemon/engine/core/message.h"
#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/session_run.h"
#include "daemon/engine/pool/handlers.h"
#include "daemon/engine/step/step.h"

struct weights_ask {
    struct peer_ask all; /* first */
    uint32_t index, layer;
    uint64_t offset, n;
    const void *bytes;
};

static void write_here(struct engine *e, void *arg)
{
    struct weights_ask *ask = arg;
    const struct pool *p = pool_of_kv(e, (kv_pool_id){ask->index});
    ask->all.status = p->ops->weights_write(p->device, ask->layer, ask->offset, ask->bytes, ask->n);
    if (ask->all.status != ATTN_OK)
        snprintf(ask->all.why, ask->all.why_bytes, "%s", p->ops->last_error(p->backend));
}

attn_status weights_run(struct engine *e, struct request *req, uint32_t session, struct answer *a)
{
    const Attnd__Weights *w = req->wire.header->weights;
    const uint64_t n = req->wire.payload_bytes;
    const struct pool *p = pool_of_handle(e, session_tenant(e, session), w->pool);
    if (p == NULL)
        return answer_no(a, ATTN_ENOTFOUND, "weights.pool is %" PRIu32 ", no such pool", w->pool);
    if (p->config.q_nope_dim == 0)
        return answer_no(a, ATTN_EINVAL, "weights.pool: pool %s has no projections (q_nope_dim)",
                         p->spec.wire->name);
    if (w->layer >= p->config.num_layers)
        return answer_no(a, ATTN_EINVAL,
                         "weights.layer is %" PRIu32 ", the pool has %" PRIu32 " layers", w->layer,
                         p->config.num_layers);
    if (n == 0 || n > WIRE_MAX_WEIGHTS_BYTES)
        return answer_no(a, ATTN_EINVAL,
                         "weights: the payload has %" PRIu64 " bytes, a piece has 1 to %u", n,
                         WIRE_MAX_WEIGHTS_BYTES);
    attn_status st = ATTN_OK;
    if (req->charge.tenant == NULL) /* else it is served anew */
        st = bytes_charge(e, req, session, req->msg->n_bytes, a->why, sizeof a->why);
    if (st != ATTN_OK)
        return st;
    struct weights_ask ask = {.all = {ATTN_OK, a->why, sizeof a->why},
                              .index = p->id.index,
                              .layer = w->layer,
                              .offset = w->offset,
                              .n = n,
                              .bytes = req->wire.payload};
    uint32_t n_done;
    st = engine_call_others(e, peers_n(e), write_here, &ask.all, &n_done);
    if (st == ATTN_OK) {
        write_here(e, &ask);
        st = ask.all.status;
    }
    return st;
}
