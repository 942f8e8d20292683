/* prefill_codes.cu: K and V of prompts' items out of their codes, to where the prefill kernels'
 * copies find them: of K the codes as they are (of FP4 times their group's scale), which the type
 * of the queries holds exactly, and beside them the rows' scales, which meet the scores; of V code
 * times scale, rounded once. A launch of a few kv heads follows one of this, so each key is decoded
 * once, not by every unit that reads it.
 */
#include "kernels/gpu/device.cuh"
#include "kernels/gpu/sm90/prefill_params.h"

using namespace gpu;

namespace
{

constexpr uint32_t threads = 256, keys = 32; /* of a thread block */
static_assert(PREFILL_DECODED_TOKENS % keys == 0, "a thread block's keys are of one decoded block");

/* Does no query of the item see any of the keys [key, key + keys)? */
GPU_DEVICE bool is_hidden(const gpu_kv &kv, const gpu_item &it, uint32_t key)
{
    const gpu_layer &l = kv.layers[it.layer];
    const uint32_t n = it.pos + it.n_tokens, is_full = l.is_full | it.is_full;
    const visible some =
        visible_to_some(visible_to(l.window_tokens, l.sink_tokens, is_full, it.pos, n),
                        visible_to(l.window_tokens, l.sink_tokens, is_full, n - 1, n));
    return key >= some.sinks && key + keys <= some.first;
}

/* Thread blocks (32 keys, head, K or V). */
__global__ void __launch_bounds__(threads) decode(GPU_PARAM(prefill_decode, a))
{
    constexpr uint32_t parts = PREFILL_DECODED_TOKENS / keys;
    chain_release();
    chain_wait();
    const gpu_kv &kv = a.kv;
    const bool is_v = blockIdx.z == 1;
    const uint32_t block = blockIdx.x / parts, head = a.head0 + blockIdx.y;
    const gpu_item &it = a.items[find_item<&gpu_item::node0>(a.items, a.n_items, block)];
    const uint32_t slot0 = blockIdx.x % parts * keys, end = it.pos + it.n_tokens;
    const uint32_t key0 = (block - it.node0) * PREFILL_DECODED_TOKENS + slot0;
    if (key0 >= end || is_hidden(kv, it, key0))
        return;
    const part from = part_of(kv, it.layer, is_v);
    const uint32_t *table = table_of(kv, it);
    const uint32_t d = is_v ? kv.dv : kv.dk, pieces = d / 8;
    const uint64_t to = blockIdx.y * (uint64_t)a.head_blocks + block;
    char *values = a.values + to * a.block_bytes + (is_v ? kv.dk * PREFILL_DECODED_TOKENS * 2 : 0);
    for (uint32_t i = threadIdx.x; i < keys * pieces; i += threads) {
        const uint32_t r = i / pieces, e = i % pieces * 8, key = key0 + r;
        if (key >= end)
            break;
        const uint32_t id = table[key >> kv.block_shift], slot = key & (kv.block_tokens - 1);
        const char *scales = scale_address(kv, from, id, head, slot);
        const float scale = row_scale(scales, kv.kv_dtype);
        float x[8];
        load_stored8(x, row_address(kv, from, id, head, slot), scales, e, kv.kv_dtype);
#pragma unroll
        for (int k = 0; k < 8; ++k)
            x[k] *= is_v ? scale : 1.0f;
        store8(values + ((slot0 + r) * d + e) * 2, x, kv.q_dtype);
        if (!is_v && e == 0)
            a.scales[to * PREFILL_DECODED_TOKENS + slot0 + r] = scale;
    }
}

} // namespace

int prefill_decode_launch(const struct prefill_decode *a, uint32_t n_heads, void *stream,
                          int chained)
{
    const dim3 grid(a->head_blocks * (PREFILL_DECODED_TOKENS / keys), n_heads, 2);
    return launch(decode, grid, dim3(threads), 0, stream, chained != 0, *a);
}
