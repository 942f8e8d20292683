/* weights.c: what the daemon projects a pool's heads with: given once, sent when it has none. */
#include <stdlib.h>

#include "clients/libattn/pool/pool.h"

/* Of a layer, as the pool's steps are multiplied with. */
static uint64_t layer_bytes(const struct attn_pool_spec *s)
{
    return (uint64_t)s->num_q_heads * (s->q_nope_dim + s->out_dim) * s->head_dim_v *
           attn_dtype_bytes(s->q_dtype);
}

/* NULL: not given. */
static const void *weights_of(const struct attn_pool *p, uint32_t layer)
{
    const void **all = __atomic_load_n(&p->weights, __ATOMIC_ACQUIRE);
    return all != NULL && layer < p->spec.num_layers
               ? __atomic_load_n(&all[layer], __ATOMIC_ACQUIRE)
               : NULL;
}

bool pool_has_weights(const struct attn_pool *p, uint32_t layer)
{
    return weights_of(p, layer) != NULL;
}

attn_status attn_pool_weights(attn_pool *p, uint32_t layer, const void *weights, uint64_t n_bytes)
{
    if (p == NULL || weights == NULL)
        return error_set(ATTN_EINVAL, "pool or weights is NULL");
    if (p->spec.q_nope_dim == 0)
        return error_set(ATTN_EINVAL, "pool \"%.100s\" has no projections (q_nope_dim)",
                         p->spec.name);
    if (layer >= p->spec.num_layers)
        return error_set(ATTN_EINVAL, "layer is %u, the pool has %u layers", layer,
                         p->spec.num_layers);
    if (n_bytes != layer_bytes(&p->spec))
        return error_set(ATTN_EINVAL,
                         "n_bytes is %llu, weights of %u heads of (%u + %u) x %u elements of %s "
                         "have %llu",
                         (unsigned long long)n_bytes, p->spec.num_q_heads, p->spec.q_nope_dim,
                         p->spec.out_dim, p->spec.head_dim_v, attn_dtype_name(p->spec.q_dtype),
                         (unsigned long long)layer_bytes(&p->spec));
    const void **all = __atomic_load_n(&p->weights, __ATOMIC_ACQUIRE), **none = NULL;
    if (all == NULL) {
        all = calloc(p->spec.num_layers, sizeof *all);
        if (all == NULL)
            return error_set(ATTN_ENOMEM, "no memory for the places of %u layers' weights",
                             p->spec.num_layers);
        if (!__atomic_compare_exchange_n(&p->weights, &none, all, false, __ATOMIC_ACQ_REL,
                                         __ATOMIC_ACQUIRE)) {
            free(all); /* another thread gives those of another layer */
            all = none;
        }
    }
    __atomic_store_n(&all[layer], weights, __ATOMIC_RELEASE);
    return ATTN_OK;
}

attn_status attn_pool_send_weights(attn_pool *p, uint32_t layer, uint64_t timeout_us)
{
    if (p == NULL)
        return error_set(ATTN_EINVAL, "pool is NULL");
    attn_status st = client_check(p->client);
    if (st == ATTN_OK)
        st = pool_check(p);
    if (st != ATTN_OK)
        return st;
    const uint8_t *weights = weights_of(p, layer);
    if (weights == NULL)
        return error_set(ATTN_EINVAL, "layer %u was given no weights (attn_pool_weights)", layer);
    const uint64_t all = layer_bytes(&p->spec), most = client_max_message(p->client);
    const uint64_t piece = most / 2 < WIRE_MAX_WEIGHTS_BYTES ? most / 2 : WIRE_MAX_WEIGHTS_BYTES;
    for (uint64_t at = 0; at < all && st == ATTN_OK; at += piece) {
        const struct client_bulk bulk = {.payload = weights + at,
                                         .payload_bytes = all - at < piece ? all - at : piece};
        Attnd__Request req = ATTND__REQUEST__INIT;
        Attnd__Weights w = ATTND__WEIGHTS__INIT;
        w.pool = p->id;
        w.layer = layer;
        w.offset = at;
        req.body_case = ATTND__REQUEST__BODY_WEIGHTS;
        req.weights = &w;
        st = client_call_bulk(p->client, &req, &bulk, timeout_us, NULL, NULL);
    }
    return st;
}
