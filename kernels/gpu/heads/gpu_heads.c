/* gpu_heads.c: pools whose items carry heads: where their weights are, and a batch's projections as
 * launches.
 *
 * A batch's heads are brought to the device, multiplied to its q there, and what attention leaves
 * (latents, in the place of the heads) is multiplied to the items' outs. How many bytes of weights
 * each layer has is kept on the host, too: every step asks.
 */
#include "kernels/gpu/gpu_host.h"
#include "kernels/weights.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* ---- weights */

static char *range_of(const struct backend_pool *p)
{
    return (char *)p->b->kv.p + p->range.offset;
}

attn_status gpu_weights_open(struct backend_pool *p)
{
    struct backend *b = p->b;
    const size_t bytes = p->config.num_layers * sizeof *p->weights_have;
    if (p->config.q_nope_dim == 0)
        return ATTN_OK;
    p->weights_have = malloc(bytes);
    if (!p->weights_have)
        return gpu_fail(b, ATTN_ENOMEM, "out of host memory");
    if (runtime_copy(p->weights_have, range_of(p), bytes, b->stream) != 0 ||
        runtime_stream_wait(b->stream) != 0)
        return gpu_lost(b);
    for (uint32_t i = 0; i < p->config.num_layers; i++)
        p->weights_have[i] = weights_counted(&p->config, p->weights_have[i]);
    return ATTN_OK;
}

uint64_t gpu_weights_have(const struct backend_pool *p, uint32_t layer)
{
    return p->weights_have ? p->weights_have[layer] : 0;
}

/* Beside the batches, none of which reads what is written. */
static int copy_now(struct backend *b, void *to, const void *from, uint64_t n)
{
    int code = b->rows ? 0 : runtime_stream_open(&b->rows);
    if (!code && n > 0)
        code = runtime_copy(to, from, n, b->rows);
    return code ? code : runtime_stream_wait(b->rows);
}

/* Are these the bytes that are there? */
static attn_status compare(struct backend_pool *p, uint32_t layer, uint64_t offset,
                           const void *bytes, uint64_t n)
{
    struct backend *b = p->b;
    if (n == 0)
        return ATTN_OK;
    void *there = malloc(n);
    if (!there)
        return gpu_fail(b, ATTN_ENOMEM, "no memory to compare %" PRIu64 " bytes of weights", n);
    attn_status st = ATTN_OK;
    if (copy_now(b, there, range_of(p) + weights_at(&p->config, layer) + offset, n) != 0)
        st = gpu_lost(b);
    else if (memcmp(there, bytes, n) != 0)
        st = gpu_fail(b, ATTN_EEXIST,
                      "layer %" PRIu32 " has other weights in bytes %" PRIu64 " to %" PRIu64, layer,
                      offset, offset + n);
    free(there);
    return st;
}

attn_status gpu_weights_write(struct backend_pool *p, uint32_t layer, uint64_t offset,
                              const void *bytes, uint64_t n)
{
    struct backend *b = p->b;
    attn_status st = gpu_enter(b);
    if (st != ATTN_OK)
        return st;
    const bool is_layer = layer < p->config.num_layers;
    const uint64_t all = backend_weights_bytes(&p->config);
    const uint64_t have = is_layer ? gpu_weights_have(p, layer) : 0;
    if (!p->weights_have || !is_layer || offset > have || n > all - offset)
        return gpu_fail(b, ATTN_EINVAL,
                        "weights of layer %" PRIu32 ": bytes %" PRIu64 " to %" PRIu64 ", %" PRIu64
                        " of %" PRIu64 " are there",
                        layer, offset, offset + n, have, all);
    const uint64_t known = have - offset < n ? have - offset : n;
    st = compare(p, layer, offset, bytes, known);
    if (st != ATTN_OK || known == n)
        return st;
    const uint64_t now = offset + n;
    char *to = range_of(p) + weights_at(&p->config, layer) + offset + known;
    if (copy_now(b, to, (const char *)bytes + known, n - known) != 0 ||
        /* last: a process that is killed before has them not */
        copy_now(b, range_of(p) + layer * sizeof now, &now, sizeof now) != 0)
        return gpu_lost(b);
    p->weights_have[layer] = now;
    return ATTN_OK;
}

attn_status gpu_weights_read(struct backend_pool *p, uint32_t layer, uint64_t offset, uint64_t n,
                             void *out_bytes)
{
    struct backend *b = p->b;
    attn_status st = gpu_enter(b);
    if (st != ATTN_OK)
        return st;
    const uint64_t have = layer < p->config.num_layers ? gpu_weights_have(p, layer) : 0;
    if (offset > have || n > have - offset)
        return gpu_fail(b, ATTN_EINVAL,
                        "weights of layer %" PRIu32 ": bytes %" PRIu64 " to %" PRIu64 ", %" PRIu64
                        " are there",
                        layer, offset, offset + n, have);
    if (copy_now(b, out_bytes, range_of(p) + weights_at(&p->config, layer) + offset, n) != 0)
        return gpu_lost(b);
    return ATTN_OK;
}

/* ---- a batch */

uint64_t gpu_heads_row_bytes(const struct backend_pool *p)
{
    const struct backend_pool_config *c = &p->config;
    const uint32_t q = backend_q_dim(c), widest = q > c->head_dim_v ? q : c->head_dim_v;
    return c->q_nope_dim == 0 ? 0
                              : (uint64_t)c->num_q_heads * widest * attn_dtype_bytes(c->q_dtype);
}

void gpu_heads_begin(struct gpu_job *j, uint64_t host_at)
{
    const struct backend_pool *p = j->pool;
    const struct backend_pool_config *c = &p->config;
    const uint64_t tiles_at = host_at + j->n_head_rows * sizeof(struct gpu_head_row);
    j->heads = (struct gpu_heads){
        .weights = range_of(p) + weights_at(c, 0),
        .layer_bytes = backend_weights_bytes(c),
        .rows = (struct gpu_head_row *)(j->staging.device + host_at),
        .tiles = (struct gpu_head_tile *)(j->staging.device + tiles_at),
        .heads = j->staging.heads,
        .q = j->staging.q,
        .latents = j->staging.heads,
        .num_q_heads = c->num_q_heads,
        .dk = c->head_dim_k,
        .dv = c->head_dim_v,
        .nope = c->q_nope_dim,
        .out_dim = c->out_dim,
        .q_dtype = (uint32_t)c->q_dtype,
    };
    j->head_rows = (struct gpu_head_row *)(j->staging.host + host_at);
    j->head_tiles = (struct gpu_head_tile *)(j->staging.host + tiles_at);
    j->n_head_rows = 0;
    j->prep.heads = j->staging.heads;
}

void gpu_heads_add(struct gpu_job *j, const struct gpu_item *it, char *out)
{
    const struct gpu_heads *h = &j->heads;
    const uint64_t out_row =
        (uint64_t)h->num_q_heads * h->out_dim * attn_dtype_bytes((attn_dtype)h->q_dtype);
    for (uint32_t t = 0; t < it->n_tokens; t++) {
        const uint32_t at = j->n_head_rows++;
        struct gpu_head_tile *tile = &j->head_tiles[j->heads.n_tiles];
        j->head_rows[at] = (struct gpu_head_row){
            .out = out + t * out_row, .token = it->token0 + t, .layer = it->layer};
        if (j->heads.n_tiles > 0 && tile[-1].n < GPU_HEAD_ROWS &&
            j->head_rows[at - 1].layer == it->layer) {
            tile[-1].n++;
            continue;
        }
        *tile = (struct gpu_head_tile){.first = at, .n = 1};
        j->heads.n_tiles++;
    }
}
