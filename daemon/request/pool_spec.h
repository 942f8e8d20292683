/* pool_spec.h: a pool's description in its three forms: as clients send it (PoolSpec); as the
 * backend and the cache take it; and the canonical PoolSpec in between, with every default filled
 * in, which is stored, compared and sent to clients. Needs no device and no cache.
 */
#ifndef ATTND_DAEMON_REQUEST_POOL_SPEC_H
#define ATTND_DAEMON_REQUEST_POOL_SPEC_H

#include "kernels/backend.h"
#include "proto/seq_file.h"
#include "proto/wire.h"

enum { POOL_BLOCK_TOKENS = 16 }; /* default */

struct pool_spec {
    Attnd__PoolSpec *wire; /* canonical; owned. n_blocks 0: not decided yet */
    struct attn_layer_spec *layers; /* [num_layers]; owned; point into wire */
    uint64_t attention; /* digest of how the layers attend, on which later layers' K, V depend */
};

/* Checks what the wire form alone shows (names, counts, enums, required features) and fills in the
 * defaults. The backend checks the geometry.
 * Errors   ATTN_EINVAL, ATTN_ENOTSUP an unknown required feature, ATTN_ENOMEM; why names the
 *          field */
attn_status pool_spec_init(struct pool_spec *s, const Attnd__PoolSpec *asked, char *why,
                           size_t why_bytes);
void pool_spec_fini(struct pool_spec *s); /* a zeroed one is fine */

/* Compares two specs. ATTN_EEXIST: they differ; why names the first field and both values.
 * asked->n_blocks 0 agrees with any count. */
attn_status pool_spec_compare(const struct pool_spec *have, const struct pool_spec *asked,
                              char *why, size_t why_bytes);

/* Describes the content of the pool's blocks, in the two forms that leave the daemon; both borrow
 * from s. */
struct seq_geometry pool_spec_geometry(const struct pool_spec *s, uint32_t layout,
                                       uint64_t block_bytes);
void pool_spec_content(const struct pool_spec *s, Attnd__Content *out);

/* Makes the backend's form; borrows s->layers. */
void pool_spec_config(const struct pool_spec *s, uint32_t n_table_rows, uint32_t max_row_blocks,
                      struct backend_pool_config *out);
/* The stored form: its size, and packing it into dst, which must have that many bytes. */
size_t pool_spec_packed_bytes(const struct pool_spec *s);
void pool_spec_pack(const struct pool_spec *s, uint8_t *dst);

/* The attn_dtype of a wire enum; ATTN_DTYPE_NONE for none and for anything unknown. */
attn_dtype pool_dtype(Attnd__Dtype d);

#endif
