/* prefill_none.c: prefill.h where the kernels are not built: every geometry is answered "no". */
#include "kernels/gpu/sm90/prefill.h"

bool prefill_supported(const struct backend_pool_config *c, int major)
{
    (void)c, (void)major;
    return false;
}

int prefill_pool_init(struct prefill_pool *p, const struct backend_pool_config *c,
                      const struct gpu_kv *kv, const struct attn_layer_spec *specs,
                      uint32_t n_processors, uint64_t part_slots)
{
    (void)p, (void)c, (void)kv, (void)specs, (void)n_processors, (void)part_slots;
    return -1;
}

bool prefill_takes(const struct prefill_pool *p, uint32_t layer, uint32_t n_tokens)
{
    (void)p, (void)layer, (void)n_tokens;
    return false;
}

uint64_t prefill_upload_bytes(const struct prefill_pool *p, uint32_t max_items, uint32_t max_tokens)
{
    (void)p, (void)max_items, (void)max_tokens;
    return 0;
}

void prefill_prepare(const struct prefill_pool *p, const struct gpu_item *items, uint32_t n,
                     const struct gpu_item *device_items, void *upload,
                     struct prefill_call *out_call)
{
    (void)p, (void)items, (void)n, (void)device_items, (void)upload, (void)out_call;
}

int prefill_launch(const struct prefill_call *c, const void *upload, void *scratch, float *part_o,
                   float *part_ml, uint32_t n_processors, void *stream, int chained)
{
    (void)c, (void)upload, (void)scratch, (void)part_o, (void)part_ml, (void)n_processors;
    (void)stream, (void)chained;
    return -1;
}
