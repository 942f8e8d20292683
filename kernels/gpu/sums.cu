/* sums.cu: checksums of whole blocks, equal to moves_sum's (XXH3 of 128 bits), so that what is
 * moved over the bus need not be read again by the host.
 *
 * XXH3 adds up what it makes of each KiB in eight lanes and mixes the lanes after every one. What
 * is added does not depend on what was before, so all KiB are worked off side by side; what remains
 * to be done one after the other is a few instructions for each. The host ends it (moves_sum_end).
 */
#include "kernels/gpu/device.cuh"
#include "kernels/gpu/sums.h"

using namespace gpu;

namespace
{

constexpr uint32_t threads = 256, ahead = 16; /* ahead: KiB whose sums are on their way */
constexpr uint32_t last_secret = 121; /* byte where the last stripe's begins */

GPU_DEVICE uint64_t product(uint64_t x)
{
    return (uint64_t)(uint32_t)x * (uint32_t)(x >> 32);
}

GPU_DEVICE uint64_t word(uint32_t low, uint32_t high)
{
    return (uint64_t)high << 32 | low;
}

/* What a stripe's 16 bytes add to their two lanes. */
GPU_DEVICE void add(uint64_t (&sum)[2], uint4 v, uint64_t secret0, uint64_t secret1)
{
    const uint64_t x0 = word(v.x, v.y), x1 = word(v.z, v.w);
    sum[0] += product(x0 ^ secret0) + x1;
    sum[1] += product(x1 ^ secret1) + x0;
}

/* Four threads a KiB, each for two lanes. */
__global__ void __launch_bounds__(threads) add_up(GPU_PARAM(gpu_sums, by_value))
{
    const gpu_sums &a = params(by_value);
    __shared__ uint64_t secret[sizeof by_value.secret / sizeof(uint64_t)];
    for (uint32_t i = threadIdx.x; i < sizeof secret / sizeof *secret; i += threads)
        secret[i] = a.secret[i];
    __syncthreads();
    const uint32_t unit = (blockIdx.x * threads + threadIdx.x) / 4, pair = threadIdx.x % 4;
    if (unit >= a.n * a.n_kib)
        return;
    const uint64_t kib = a.from_kib + unit % a.n_kib, n_whole = (a.block_bytes - 1) / 1024;
    const char *block = a.base + a.list[unit / a.n_kib] * a.block_bytes;
    const uint4 *src = (const uint4 *)(block + kib * 1024) + pair;
    const uint32_t n = kib < n_whole ? 16 : (uint32_t)((a.block_bytes - 1) % 1024 / 64);
    uint4 v[16] = {};
    uint64_t sum[2] = {};
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i)
        if (i < n)
            v[i] = src[4 * i];
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i)
        if (i < n)
            add(sum, v[i], secret[i + 2 * pair], secret[i + 2 * pair + 1]);
    if (kib == n_whole) {
        const uint64_t *s = secret + last_secret / 8 + 2 * pair;
        constexpr uint32_t bits = last_secret % 8 * 8;
        add(sum, ((const uint4 *)(block + a.block_bytes - 64))[pair],
            s[0] >> bits | s[1] << (64 - bits), s[1] >> bits | s[2] << (64 - bits));
    }
    uint64_t *out = a.deltas + (uint64_t)unit * 8 + 2 * pair;
    out[0] = sum[0];
    out[1] = sum[1];
}

GPU_DEVICE uint64_t mix(uint64_t lane, uint64_t secret)
{
    return ((lane ^ lane >> 47) ^ secret) * 0x9e3779b1u;
}

/* Eight threads a block, one for each lane. */
__global__ void __launch_bounds__(8 * GPU_SUM_BLOCKS) mix_up(GPU_PARAM(gpu_sums, by_value))
{
    const gpu_sums &a = params(by_value);
    const uint32_t block = threadIdx.x / 8, lane = threadIdx.x % 8;
    if (block >= a.n)
        return;
    const uint64_t *d = a.deltas + (uint64_t)block * a.n_kib * 8 + lane;
    const uint64_t secret = a.secret[16 + lane];
    const uint32_t n_whole = (uint32_t)((a.block_bytes - 1) / 1024) - a.from_kib;
    uint64_t x = a.from_kib > 0 ? a.lanes[block * 8 + lane] : a.begin[lane], now[ahead],
             next[ahead];
#pragma unroll
    for (uint32_t i = 0; i < ahead; ++i)
        next[i] = i < a.n_kib ? d[i * 8] : 0;
    for (uint32_t k = 0; k < a.n_kib; k += ahead) {
#pragma unroll
        for (uint32_t i = 0; i < ahead; ++i) {
            now[i] = next[i];
            next[i] = k + ahead + i < a.n_kib ? d[(uint64_t)(k + ahead + i) * 8] : 0;
        }
        if (k + ahead <= a.n_kib && k + ahead <= n_whole) {
#pragma unroll
            for (uint32_t i = 0; i < ahead; ++i)
                x = mix(x + now[i], secret);
            continue;
        }
#pragma unroll
        for (uint32_t i = 0; i < ahead; ++i) {
            x += now[i];
            if (k + i < a.n_kib && k + i < n_whole)
                x = mix(x, secret);
        }
    }
    a.lanes[block * 8 + lane] = x;
}

} // namespace

int gpu_sums_launch(const struct gpu_sums *a, void *stream)
{
    const uint32_t n = (a->n * a->n_kib * 4 + threads - 1) / threads;
    int code = launch(add_up, dim3(n), dim3(threads), 0, stream, false, *a);
    return code ? code : launch(mix_up, dim3(1), dim3(a->n * 8), 0, stream, false, *a);
}
