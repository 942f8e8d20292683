/* none.c: decode.h and prefill.h where no tuned kernel is built: every geometry is answered "no",
 * and the generic kernels do all the work.
 */
#include "kernels/gpu/sm90/decode.h"
#include "kernels/gpu/sm90/prefill.h"

bool decode_supported(const struct backend_pool_config *c, int major, int minor)
{
    (void)c, (void)major, (void)minor;
    return false;
}

int decode_pool_init(struct decode_pool *p, const struct backend_pool_config *c,
                     const struct gpu_kv *kv, const struct attn_layer_spec *specs,
                     uint32_t n_processors)
{
    (void)p, (void)c, (void)kv, (void)specs, (void)n_processors;
    return -1;
}

uint64_t decode_scratch_bytes(const struct decode_pool *p, uint32_t max_items, uint32_t max_tokens)
{
    (void)p, (void)max_items, (void)max_tokens;
    return 0;
}

uint64_t decode_upload_bytes(const struct decode_pool *p, uint32_t max_items, uint32_t max_tokens)
{
    (void)p, (void)max_items, (void)max_tokens;
    return 0;
}

void decode_planner_fini(struct decode_planner *w)
{
    (void)w;
}

attn_status decode_prepare(const struct decode_pool *p, const struct decode_item *items,
                           uint32_t n_items, struct decode_planner *w, void *upload,
                           uint64_t upload_capacity, struct decode_call *out_call)
{
    (void)p, (void)items, (void)n_items, (void)w, (void)upload, (void)upload_capacity;
    (void)out_call;
    return ATTN_ENOTSUP;
}

bool decode_can_be_direct(const struct decode_call *c)
{
    (void)c;
    return false;
}

bool decode_can_finish(const struct decode_call *c)
{
    (void)c;
    return false;
}

int decode_launch(const struct decode_call *c, const void *upload, void *scratch,
                  const struct gpu_finish *finish, void *stream, int chained, enum decode_way way)
{
    (void)c, (void)upload, (void)scratch, (void)finish, (void)stream, (void)chained;
    (void)way;
    return -1;
}

bool prefill_supported(const struct backend_pool_config *c, int major)
{
    (void)c, (void)major;
    return false;
}

int prefill_pool_init(struct prefill_pool *p, const struct backend_pool_config *c,
                      const struct gpu_kv *kv, const struct attn_layer_spec *specs,
                      uint32_t n_processors, char *decoded, uint64_t part_slots)
{
    (void)p, (void)c, (void)kv, (void)specs, (void)n_processors, (void)decoded, (void)part_slots;
    return -1;
}

bool prefill_takes(const struct prefill_pool *p, uint32_t layer, uint32_t n_tokens, uint32_t n_keys)
{
    (void)p, (void)layer, (void)n_tokens, (void)n_keys;
    return false;
}

bool prefill_takes_trees(const struct prefill_pool *p, uint32_t layer)
{
    (void)p, (void)layer;
    return false;
}

uint32_t prefill_blocks(const struct prefill_pool *p, uint32_t n_keys)
{
    (void)p, (void)n_keys;
    return 0;
}

uint64_t prefill_upload_bytes(const struct prefill_pool *p, uint32_t max_items, uint32_t max_tokens)
{
    (void)p, (void)max_items, (void)max_tokens;
    return 0;
}

void prefill_prepare(const struct prefill_pool *p, const struct gpu_item *items, uint32_t n,
                     const struct gpu_item *device_items, const struct prefill_shape *shape,
                     void *upload, struct prefill_call *out_call)
{
    (void)shape, (void)p, (void)items, (void)n, (void)device_items, (void)upload, (void)out_call;
}

int prefill_launch(const struct prefill_call *c, const void *upload, void *scratch, float *part_o,
                   float *part_ml, uint32_t n_processors, void *stream, int chained)
{
    (void)c, (void)upload, (void)scratch, (void)part_o, (void)part_ml, (void)n_processors;
    (void)stream, (void)chained;
    return -1;
}
