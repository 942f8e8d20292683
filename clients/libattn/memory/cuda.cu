/* cuda.cu: libattn-cuda.so: a lane's regions in memory of the caller's GPU, and a layer as one
 * kernel (two where the output is copied).
 *
 * The kernel's blocks put q, k and v into the daemon's region; the last one to be done counts the
 * layer, rings, and its first thread waits for the answer. Order: all threads' stores, a barrier,
 * one thread's system-wide fence and, where there are several blocks, an atomic add; whoever comes
 * last fences again and stores the bell. The waiting side loads with acquire, and what follows on
 * the stream sees the output. The count lies in the GPU's memory, so a captured launch replays for
 * ever.
 */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/attn_types.h"

/* memory.h's, with the page as bytes: C's atomics are not C++'s. */
struct lane_memory;
struct lane_device {
    uint8_t uuid[16];
    uint32_t driver_version, is_shared;
};
struct lane_part {
    const void *from;
    void *to;
    uint64_t bytes, row_bytes, stride;
};
struct lane_layer {
    lane_part in[3], out[2];
    void *poison;
    uint64_t poison_bytes;
    void *page;
    uint32_t *done;
    uint64_t wait_ns;
};
struct lane_memory_ops {
    uint32_t abi;
    attn_status (*open)(lane_memory **, lane_device *, char *, size_t);
    void (*close)(lane_memory *);
    attn_status (*region_make)(lane_memory *, uint64_t, int *, void **, char *, size_t);
    attn_status (*region_map)(lane_memory *, int, uint64_t, void **, char *, size_t);
    attn_status (*page_map)(lane_memory *, void *, void **, char *, size_t);
    attn_status (*restart)(lane_memory *, uint32_t, char *, size_t);
    attn_status (*enqueue)(lane_memory *, void *, const lane_layer *, char *, size_t);
    bool (*is_capturing)(lane_memory *, void *);
    attn_status (*pin)(void *, uint64_t, int *, char *, size_t);
    void (*unpin)(void *);
};

namespace
{

/* Offsets in the page (lane_words.h). */
enum { BELL = 0, VERDICT = 64, STOP = 128, FAULT = 132, PAGE_BYTES = 4096 };
enum { THREADS = 256, MAX_BLOCKS = 132, LOOKS_A_HOST = 64, ABI = 4 };
/* So many bytes one block copies as fast as several, which must wait for each other at the end. */
enum { ALONE_THREADS = 1024, ALONE_BYTES = 2 * 16 * ALONE_THREADS };

/* Between the layers of a stream. */
struct state {
    uint32_t count; /* layers rung for */
    uint32_t arrived; /* blocks of this layer */
    uint32_t is_broken; /* a layer failed: those behind it do nothing */
    uint32_t is_hosts; /* the host answered the last layer, so it may answer the next */
};

struct layer_params {
    lane_part in[3];
    uint4 *poison;
    uint64_t poison_bytes;
    char *page;
    const uint32_t *done;
    state *s;
    uint64_t wait_ns;
};

__device__ uint64_t time_ns()
{
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

__device__ uint32_t load_acquire(const void *word)
{
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(word) : "memory");
    return v;
}

__device__ uint64_t load_acquire_64(const void *word)
{
    uint64_t v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(word) : "memory");
    return v;
}

/* Orders what this thread has stored, and has seen of others, before what it stores from now on. */
__device__ void fence()
{
    asm volatile("fence.acq_rel.sys;" : : : "memory");
}

__device__ void store(void *word, uint32_t v)
{
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" : : "l"(word), "r"(v) : "memory");
}

__device__ void store_release(void *word, uint32_t v)
{
    asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(word), "r"(v) : "memory");
}

/* 16 bytes a time, and what is left in words of 4; by all threads of the grid. */
__device__ void copy(const lane_part &p)
{
    const uint64_t n = p.bytes / 16, step = (uint64_t)gridDim.x * blockDim.x;
    const uint64_t first = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (p.stride) {
        const uint32_t row = (uint32_t)(p.row_bytes / 16);
#pragma unroll 4
        for (uint64_t i = first; i < n; i += step) {
            const uint32_t r = (uint32_t)i / row;
            const char *from = (const char *)p.from + r * p.stride;
            ((uint4 *)p.to)[i] = ((const uint4 *)from)[(uint32_t)i - r * row];
        }
        return;
    }
#pragma unroll 4
    for (uint64_t i = first; i < n; i += step)
        ((uint4 *)p.to)[i] = ((const uint4 *)p.from)[i];
    if (first < p.bytes % 16 / 4)
        ((uint32_t *)p.to)[4 * n + first] = ((const uint32_t *)p.from)[4 * n + first];
}

/* The status with which the bell is answered, or why nobody waits any longer. Host memory is looked
 * at as often as our own where answers come by it, else seldom. */
__device__ int32_t wait_for(const layer_params &p, uint32_t bell)
{
    const uint64_t begin = time_ns();
    const bool is_hosts = p.s->is_hosts;
    for (uint32_t look = 1;; look++) {
        if (load_acquire(p.done) - bell < 65536) {
            if (is_hosts)
                p.s->is_hosts = false;
            return ATTN_OK;
        }
        if (!is_hosts && look % LOOKS_A_HOST)
            continue;
        const uint64_t verdict = load_acquire_64(p.page + VERDICT);
        if ((uint32_t)verdict - bell < 65536) {
            p.s->is_hosts = true;
            return (int32_t)(verdict >> 32);
        }
        if (look % LOOKS_A_HOST)
            continue;
        if (load_acquire(p.page + STOP))
            return ATTN_ECONN;
        if (time_ns() - begin > p.wait_ns)
            return ATTN_ETIMEDOUT;
    }
}

/* Are all blocks done with what they store? By all threads; true in the last one alone. */
__device__ bool is_last_block(state *s)
{
    __shared__ bool is_last;
    __syncthreads();
    if (gridDim.x == 1)
        return true;
    if (threadIdx.x == 0) {
        fence();
        is_last = atomicAdd(&s->arrived, 1) == gridDim.x - 1;
        if (is_last)
            s->arrived = 0;
    }
    __syncthreads();
    return is_last;
}

__global__ void __launch_bounds__(ALONE_THREADS) ring(const __grid_constant__ layer_params p)
{
    __shared__ bool is_broken;
    for (int i = 0; i < 3; i++)
        if (p.in[i].from != p.in[i].to)
            copy(p.in[i]);
    if (!is_last_block(p.s))
        return;
    if (threadIdx.x == 0) {
        is_broken = p.s->is_broken;
        if (!is_broken) {
            const uint32_t bell = p.s->count + 1;
            p.s->count = bell;
            fence();
            store(p.page + BELL, bell);
            const int32_t status = wait_for(p, bell);
            if (status != ATTN_OK) {
                p.s->is_broken = is_broken = true;
                store_release(p.page + FAULT, (uint32_t)status);
            }
        }
    }
    __syncthreads();
    if (is_broken)
        for (uint64_t i = threadIdx.x; i < (p.poison_bytes + 15) / 16; i += blockDim.x)
            p.poison[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
}

__global__ void __launch_bounds__(THREADS) take(lane_part a, lane_part b)
{
    if (a.to)
        copy(a);
    if (b.to)
        copy(b);
}

/* ---- the driver's calls, looked up so that the library loads without one */

struct driver_calls {
    CUresult (*create)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *,
                       unsigned long long);
    CUresult (*release)(CUmemGenericAllocationHandle);
    CUresult (*reserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
    CUresult (*unreserve)(CUdeviceptr, size_t);
    CUresult (*map)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
    CUresult (*unmap)(CUdeviceptr, size_t);
    CUresult (*set_access)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
    CUresult (*export_handle)(void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
                              unsigned long long);
    CUresult (*import_handle)(CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType);
    CUresult (*attribute)(int *, CUdevice_attribute, CUdevice);
};

int find(const char *name, void *out_function)
{
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    void *p = NULL;
    int code = (int)cudaGetDriverEntryPointByVersion(name, &p, 12000, cudaEnableDefault, &found);
    if (code == 0 && (found != cudaDriverEntryPointSuccess || !p))
        code = (int)cudaErrorSymbolNotFound;
    memcpy(out_function, &p, sizeof p);
    return code;
}

int find_all(driver_calls *d)
{
    const struct {
        const char *name;
        void *function;
    } wanted[] = {
        {"cuMemCreate", &d->create},
        {"cuMemRelease", &d->release},
        {"cuMemAddressReserve", &d->reserve},
        {"cuMemAddressFree", &d->unreserve},
        {"cuMemMap", &d->map},
        {"cuMemUnmap", &d->unmap},
        {"cuMemSetAccess", &d->set_access},
        {"cuMemExportToShareableHandle", &d->export_handle},
        {"cuMemImportFromShareableHandle", &d->import_handle},
        {"cuDeviceGetAttribute", &d->attribute},
    };
    for (const auto &w : wanted) {
        int code = find(w.name, w.function);
        if (code)
            return code;
    }
    return 0;
}

} // namespace

/* ---- memory */

struct lane_memory {
    driver_calls driver;
    int device;
    cudaStream_t stream; /* its own, for what must be done at once */
    state *s;
    void *page; /* registered; NULL: none */
    struct {
        CUdeviceptr p;
        uint64_t bytes;
    } maps[2];
    uint32_t n_maps;
};

static attn_status fail(attn_status st, const char *what, int code, char *why, size_t why_bytes)
{
    /* the runtime's codes have the driver's values */
    snprintf(why, why_bytes, "%s: %s", what, cudaGetErrorString((cudaError_t)code));
    cudaGetLastError();
    return st;
}

/* The lane's device, whatever the calling thread's is, as long as this is in scope. */
struct on_device {
    int before;
    explicit on_device(int device)
    {
        cudaGetDevice(&before);
        if (before != device)
            cudaSetDevice(device);
        else
            before = -1;
    }
    ~on_device()
    {
        if (before >= 0)
            cudaSetDevice(before);
    }
};

static void gpu_close(lane_memory *m)
{
    on_device here(m->device);
    if (m->page)
        cudaHostUnregister(m->page);
    for (uint32_t i = 0; i < m->n_maps; i++) {
        m->driver.unmap(m->maps[i].p, m->maps[i].bytes);
        m->driver.unreserve(m->maps[i].p, m->maps[i].bytes);
    }
    if (m->s)
        cudaFree(m->s);
    if (m->stream)
        cudaStreamDestroy(m->stream);
    free(m);
}

static attn_status gpu_open(lane_memory **out_m, lane_device *out_device, char *why,
                            size_t why_bytes)
{
    int n = 0, version = 0, is_shared = 0, code = (int)cudaGetDeviceCount(&n);
    lane_memory *m = (lane_memory *)calloc(1, sizeof *m);
    cudaDeviceProp prop;
    if (!m)
        return fail(ATTN_ENOMEM, "a lane", (int)cudaErrorMemoryAllocation, why, why_bytes);
    if (code == 0)
        code = (int)cudaGetDevice(&m->device);
    if (code == 0)
        code = find_all(&m->driver);
    if (code == 0)
        code = (int)cudaGetDeviceProperties(&prop, m->device);
    if (code == 0)
        code = (int)cudaDriverGetVersion(&version);
    if (code) {
        free(m);
        return fail(ATTN_ENOTSUP, "no CUDA device", code, why, why_bytes);
    }
    /* kernels are loaded now: the first launch of one waits for every stream that waits */
    code = (int)cudaStreamCreateWithFlags(&m->stream, cudaStreamNonBlocking);
    if (code == 0)
        code = (int)cudaMalloc((void **)&m->s, sizeof *m->s);
    const cudaFuncAttribute carveout = cudaFuncAttributePreferredSharedMemoryCarveout;
    if (code == 0)
        code =
            (int)cudaFuncSetAttribute((const void *)ring, carveout, cudaSharedmemCarveoutMaxShared);
    if (code == 0)
        code =
            (int)cudaFuncSetAttribute((const void *)take, carveout, cudaSharedmemCarveoutMaxShared);
    if (code) {
        gpu_close(m);
        return fail(ATTN_ENOTSUP, "a lane's kernels", code, why, why_bytes);
    }
    memcpy(out_device->uuid, prop.uuid.bytes, sizeof out_device->uuid);
    out_device->driver_version = (uint32_t)version;
    out_device->is_shared = m->driver.attribute(&is_shared, CU_DEVICE_ATTRIBUTE_MPS_ENABLED,
                                                m->device) == CUDA_SUCCESS &&
                            is_shared;
    *out_m = m;
    return ATTN_OK;
}

/* Maps a physical allocation, which lives as long as the mapping. */
static int map_handle(lane_memory *m, CUmemGenericAllocationHandle handle, uint64_t bytes,
                      void **out_p)
{
    CUdeviceptr p = 0;
    int code = (int)m->driver.reserve(&p, bytes, 0, 0, 0);
    if (code)
        return code;
    code = (int)m->driver.map(p, bytes, 0, handle, 0);
    if (code) {
        m->driver.unreserve(p, bytes);
        return code;
    }
    m->maps[m->n_maps].p = p;
    m->maps[m->n_maps++].bytes = bytes;
    CUmemAccessDesc access;
    memset(&access, 0, sizeof access);
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = m->device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    *out_p = (void *)p;
    return (int)m->driver.set_access(p, bytes, &access, 1);
}

static attn_status gpu_region_make(lane_memory *m, uint64_t bytes, int *out_fd, void **out_p,
                                   char *why, size_t why_bytes)
{
    on_device here(m->device);
    CUmemAllocationProp prop;
    CUmemGenericAllocationHandle handle;
    memset(&prop, 0, sizeof prop);
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = m->device;
    int code = (int)m->driver.create(&handle, bytes, &prop, 0), fd = -1;
    if (code)
        return fail(ATTN_ENOMEM, "cuMemCreate of a region", code, why, why_bytes);
    code = map_handle(m, handle, bytes, out_p);
    if (code == 0)
        code = (int)cudaMemsetAsync(*out_p, 0, bytes, m->stream);
    if (code == 0)
        code = (int)cudaStreamSynchronize(m->stream);
    if (code == 0)
        code =
            (int)m->driver.export_handle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    m->driver.release(handle);
    if (code)
        return fail(ATTN_ENOMEM, "a region of GPU memory", code, why, why_bytes);
    *out_fd = fd;
    return ATTN_OK;
}

static attn_status gpu_region_map(lane_memory *m, int fd, uint64_t bytes, void **out_p, char *why,
                                  size_t why_bytes)
{
    on_device here(m->device);
    CUmemGenericAllocationHandle handle;
    int code = (int)m->driver.import_handle(&handle, (void *)(uintptr_t)fd,
                                            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (code)
        return fail(ATTN_ENOTSUP, "importing the daemon's region", code, why, why_bytes);
    code = map_handle(m, handle, bytes, out_p);
    m->driver.release(handle);
    return code ? fail(ATTN_ENOTSUP, "mapping the daemon's region", code, why, why_bytes) : ATTN_OK;
}

static attn_status gpu_page_map(lane_memory *m, void *page, void **out_p, char *why,
                                size_t why_bytes)
{
    on_device here(m->device);
    int code =
        (int)cudaHostRegister(page, PAGE_BYTES, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (code == 0) {
        m->page = page;
        code = (int)cudaHostGetDevicePointer(out_p, page, 0);
    }
    return code ? fail(ATTN_ENOTSUP, "registering the page", code, why, why_bytes) : ATTN_OK;
}

static attn_status gpu_restart(lane_memory *m, uint32_t count, char *why, size_t why_bytes)
{
    on_device here(m->device);
    const state s = {count, 0, 0};
    int code = (int)cudaMemcpyAsync(m->s, &s, sizeof s, cudaMemcpyHostToDevice, m->stream);
    if (code == 0)
        code = (int)cudaStreamSynchronize(m->stream);
    return code ? fail(ATTN_EDEVICE, "restarting a lane", code, why, why_bytes) : ATTN_OK;
}

static attn_status gpu_enqueue(lane_memory *m, void *stream, const lane_layer *l, char *why,
                               size_t why_bytes)
{
    on_device here(m->device);
    layer_params p = {};
    uint64_t bytes = 0;
    for (int i = 0; i < 3; i++) {
        if (!l->in[i].from || l->in[i].from == l->in[i].to)
            continue;
        if ((uintptr_t)l->in[i].from % 16)
            return fail(ATTN_EINVAL, "q, k and v begin at multiples of 16",
                        (int)cudaErrorMisalignedAddress, why, why_bytes);
        p.in[i] = l->in[i];
        bytes += l->in[i].bytes;
    }
    if ((uintptr_t)l->out[0].to % 16 || (uintptr_t)l->out[1].to % 16)
        return fail(ATTN_EINVAL, "out and lse begin at multiples of 16",
                    (int)cudaErrorMisalignedAddress, why, why_bytes);
    p.poison = (uint4 *)l->poison;
    p.poison_bytes = l->poison_bytes;
    p.page = (char *)l->page;
    p.done = l->done;
    p.s = m->s;
    p.wait_ns = l->wait_ns;
    uint64_t blocks = (bytes / 16 + THREADS - 1) / THREADS;
    blocks = blocks < 1 ? 1 : blocks > MAX_BLOCKS ? MAX_BLOCKS : blocks;
    if (bytes <= ALONE_BYTES)
        ring<<<1, bytes / 16 <= THREADS ? (int)THREADS : (int)ALONE_THREADS, 0,
               (cudaStream_t)stream>>>(p);
    else
        ring<<<(unsigned)blocks, THREADS, 0, (cudaStream_t)stream>>>(p);
    int code = (int)cudaGetLastError();
    if (code == 0 && (l->out[0].to || l->out[1].to)) {
        blocks = (l->out[0].bytes / 16 + THREADS - 1) / THREADS;
        blocks = blocks < 1 ? 1 : blocks > MAX_BLOCKS ? MAX_BLOCKS : blocks;
        take<<<(unsigned)blocks, THREADS, 0, (cudaStream_t)stream>>>(l->out[0], l->out[1]);
        code = (int)cudaGetLastError();
    }
    return code ? fail(ATTN_EDEVICE, "launching a layer", code, why, why_bytes) : ATTN_OK;
}

static bool gpu_is_capturing(lane_memory *m, void *stream)
{
    on_device here(m->device);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    return cudaStreamIsCapturing((cudaStream_t)stream, &status) == cudaSuccess &&
           status != cudaStreamCaptureStatusNone;
}

static attn_status gpu_pin(void *p, uint64_t bytes, int *device, char *why, size_t why_bytes)
{
    int n = 0, code = (int)cudaGetDeviceCount(&n);
    if (code == 0 && *device < 0)
        code = (int)cudaGetDevice(device);
    if (code)
        return fail(ATTN_ENOTSUP, "no CUDA device", code, why, why_bytes);
    on_device here(*device);
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed; /* whatever others capture */
    cudaThreadExchangeStreamCaptureMode(&mode);
    code = (int)cudaHostRegister(p, bytes, cudaHostRegisterPortable);
    cudaThreadExchangeStreamCaptureMode(&mode);
    return code ? fail(ATTN_ENOTSUP, "page-locking memory", code, why, why_bytes) : ATTN_OK;
}

static void gpu_unpin(void *p)
{
    if (cudaHostUnregister(p) != cudaSuccess)
        cudaGetLastError(); /* the device is lost, and its driver has freed it */
}

extern "C" __attribute__((visibility("default"))) const lane_memory_ops attn_lane_cuda;
const lane_memory_ops attn_lane_cuda = {
    ABI,         gpu_open,    gpu_close,        gpu_region_make, gpu_region_map, gpu_page_map,
    gpu_restart, gpu_enqueue, gpu_is_capturing, gpu_pin,         gpu_unpin,
};
