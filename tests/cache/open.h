/* open.h: opens sequences without any known tokens. */
#ifndef TESTS_CACHE_OPEN_H
#define TESTS_CACHE_OPEN_H

#include "cache/kv.h"
#include "cache/kv_seq.h"

static inline attn_status kv_seq_open(struct kv *kv, uint32_t tenant, uint64_t name,
                                      kv_pool_id pool, uint32_t owner, uint64_t request,
                                      kv_seq_id *out_seq)
{
    struct kv_tokens none = {0};
    struct kv_effects no_effects = {0};
    return kv_seq_open_with(kv, tenant, name, pool, owner, request, &none, &no_effects, out_seq);
}

#endif
