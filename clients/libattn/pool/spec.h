/* spec.h: a pool's spec to and from the wire. pool.c sends what wire_spec_init made and keeps what
 * wire_spec_read copied. */
#ifndef ATTN_SPEC_H
#define ATTN_SPEC_H

#include "clients/libattn/attn.h"
#include "proto/wire.h"

struct wire_branches {
    uint32_t segment_tokens[ATTN_MAX_BRANCHES], rates[ATTN_MAX_BRANCHES];
};

struct wire_spec {
    Attnd__PoolSpec spec;
    Attnd__Identity identity;
    Attnd__LayerSpec *layers;
    Attnd__LayerSpec **layer_ptrs;
    struct wire_branches *branches; /* of each layer */
    char *features[2];
};

/* Points w at what s has; s must outlive it. Call wire_spec_fini also after a failure. ATTN_EINVAL
 * and ATTN_ENOMEM leave their sentence in attn_last_error. */
attn_status wire_spec_init(struct wire_spec *w, const struct attn_pool_spec *s);
void wire_spec_fini(struct wire_spec *w);
/* Copies a spec from the wire to *out, with everything it points to in *out_memory, to be freed.
 * ATTN_EPROTO, ATTN_ENOMEM. */
attn_status wire_spec_read(const Attnd__PoolSpec *w, struct attn_pool_spec *out, void **out_memory);

#endif
