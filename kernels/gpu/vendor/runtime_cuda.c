/* runtime_cuda.c: runtime.h and launch_cuda.h over the CUDA runtime. The driver's memory calls are
 * looked up through the runtime, so that the module loads, and fails in words, where there is no
 * driver.
 */
#include "kernels/gpu/vendor/launch_cuda.h"

#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/gpu/vendor/runtime_kept.h"

static _Thread_local char last_error[256] = "no error";

const char *runtime_last_error(void)
{
    return last_error;
}

int runtime_check(const char *call, int code)
{
    if (code != 0) {
        snprintf(last_error, sizeof last_error, "%s: %s", call,
                 cudaGetErrorString((cudaError_t)code));
        cudaGetLastError(); /* forgets an error that is not sticky */
    }
    return code;
}

#define CALL(name, args) runtime_check(#name, (int)name args)

/* ---- the driver's calls */

static struct {
    CUresult (*get_granularity)(size_t *, const CUmemAllocationProp *,
                                CUmemAllocationGranularity_flags);
    CUresult (*create)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *,
                       unsigned long long);
    CUresult (*release)(CUmemGenericAllocationHandle);
    CUresult (*address_reserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
    CUresult (*address_free)(CUdeviceptr, size_t);
    CUresult (*map)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
    CUresult (*unmap)(CUdeviceptr, size_t);
    CUresult (*set_access)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
    CUresult (*export_handle)(void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
                              unsigned long long);
    CUresult (*import_handle)(CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType);
    CUresult (*error_string)(CUresult, const char **);
    CUresult (*wait_value)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
    CUresult (*write_value)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
    CUresult (*device_attribute)(int *, CUdevice_attribute, CUdevice);
} driver;

static int driver_find(const char *name, void *out_function)
{
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    void *p = NULL;
    int code = (int)cudaGetDriverEntryPointByVersion(name, &p, 12000, cudaEnableDefault, &found);
    if (code == 0 && (found != cudaDriverEntryPointSuccess || !p))
        code = (int)cudaErrorSymbolNotFound;
    memcpy(out_function, &p, sizeof p);
    return runtime_check(name, code);
}

static int driver_load(void)
{
    const struct {
        const char *name;
        void *function;
    } wanted[] = {
        {"cuMemGetAllocationGranularity", &driver.get_granularity},
        {"cuMemCreate", &driver.create},
        {"cuMemRelease", &driver.release},
        {"cuMemAddressReserve", &driver.address_reserve},
        {"cuMemAddressFree", &driver.address_free},
        {"cuMemMap", &driver.map},
        {"cuMemUnmap", &driver.unmap},
        {"cuMemSetAccess", &driver.set_access},
        {"cuMemExportToShareableHandle", &driver.export_handle},
        {"cuMemImportFromShareableHandle", &driver.import_handle},
        {"cuGetErrorString", &driver.error_string},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        int code = driver_find(wanted[i].name, wanted[i].function);
        if (code)
            return code;
    }
    return 0;
}

static int driver_check(const char *call, CUresult code)
{
    if (code == CUDA_SUCCESS)
        return 0;
    const char *words = NULL;
    driver.error_string(code, &words);
    snprintf(last_error, sizeof last_error, "%s: %s", call, words ? words : "unknown error");
    return (int)code; /* the runtime's codes have the driver's values */
}

/* Calls that a driver may lack. */
static bool driver_has_words(void)
{
    return driver_find("cuStreamWaitValue32", &driver.wait_value) == 0 &&
           driver_find("cuStreamWriteValue32", &driver.write_value) == 0 &&
           driver_find("cuGetErrorString", &driver.error_string) == 0;
}

/* ---- device */

int runtime_device_use(int index)
{
    static _Thread_local int current = -1;
    if (current == index)
        return 0;
    int code = CALL(cudaSetDevice, (index));
    if (code == 0)
        current = index;
    return code;
}

/* Only newer drivers know the question; for the others it is not. */
static bool is_under_mps(int index)
{
    int is_shared = 0;
    return driver_find("cuDeviceGetAttribute", &driver.device_attribute) == 0 &&
           driver.device_attribute(&is_shared, CU_DEVICE_ATTRIBUTE_MPS_ENABLED, index) ==
               CUDA_SUCCESS &&
           is_shared;
}

/* "CUDA 13.0, driver for 12.8" */
static void describe_driver(char *out, size_t bytes)
{
    int driver_version = 0, runtime_version = 0;
    (void)cudaDriverGetVersion(&driver_version);
    (void)cudaRuntimeGetVersion(&runtime_version);
    snprintf(out, bytes, "CUDA %d.%d, driver for %d.%d", runtime_version / 1000,
             runtime_version % 1000 / 10, driver_version / 1000, driver_version % 1000 / 10);
}

uint32_t runtime_n_devices(void)
{
    int n = 0;
    return CALL(cudaGetDeviceCount, (&n)) ? 0 : (uint32_t)n;
}

int runtime_device_open(int index, struct runtime_device *out)
{
    int n = 0;
    int code = CALL(cudaGetDeviceCount, (&n));
    if (code)
        return code;
    if (index < 0 || index >= n) {
        snprintf(last_error, sizeof last_error, "device_index %d: there are %d devices", index, n);
        return (int)cudaErrorInvalidDevice;
    }
    struct cudaDeviceProp prop;
    code = CALL(cudaGetDeviceProperties, (&prop, index));
    if (code)
        return code;
    if (prop.major < 8) {
        snprintf(last_error, sizeof last_error, "%.95s has compute capability %d.%d; 8.0 is needed",
                 prop.name, prop.major, prop.minor);
        return (int)cudaErrorInvalidDevice;
    }
    code = runtime_device_use(index);
    if (code)
        return code;
    size_t free_bytes, total_bytes;
    code = CALL(cudaMemGetInfo, (&free_bytes, &total_bytes));
    if (code)
        return code;
    snprintf(out->name, sizeof out->name, "%.95s", prop.name);
    describe_driver(out->driver, sizeof out->driver);
    out->n_processors = (uint32_t)prop.multiProcessorCount;
    out->capability = (uint32_t)(10 * prop.major + prop.minor);
    out->has_words = driver_has_words();
    memcpy(out->uuid, prop.uuid.bytes, sizeof out->uuid);
    int driver_version = 0;
    (void)cudaDriverGetVersion(&driver_version);
    out->driver_version = (uint32_t)driver_version;
    out->is_shared = is_under_mps(index);
    out->has_matrix_units = true;
    out->shared_bytes = (uint32_t)prop.sharedMemPerBlockOptin;
#ifdef ATTND_CUDA_AS /* the forms of that card's kernels */
    out->shared_bytes = ATTND_CUDA_AS == 80 ? 163 << 10 : ATTND_CUDA_AS < 90 ? 99 << 10 : 227 << 10;
#endif
    out->l2_bytes = (uint64_t)prop.l2CacheSize;
    out->free_bytes = free_bytes;
    out->total_bytes = total_bytes;
    int khz = 0, bits = 0; /* two transfers in a period of the clock */
    if (cudaDeviceGetAttribute(&khz, cudaDevAttrMemoryClockRate, index) == cudaSuccess &&
        cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, index) == cudaSuccess)
        out->memory_bytes_per_s = 2ull * (uint64_t)khz * 1000 * (uint64_t)bits / 8;
    return 0;
}

/* ---- memory */

int runtime_alloc(void **out_p, size_t bytes)
{
    return CALL(cudaMalloc, (out_p, bytes));
}

void runtime_free(void *p)
{
    cudaFree(p);
}

int runtime_host_alloc(void **out_p, size_t bytes)
{
    return CALL(cudaHostAlloc, (out_p, bytes, cudaHostAllocPortable | cudaHostAllocMapped));
}

void runtime_host_free(void *p)
{
    cudaFreeHost(p);
}

int runtime_host_register(void *p, size_t bytes)
{
    return CALL(cudaHostRegister, (p, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped));
}

int runtime_host_unregister(void *p)
{
    return CALL(cudaHostUnregister, (p));
}

/* ---- streams, events, graphs */

#define KEPT_GRAPHS 32

/* A kernel and the size of its clusters: what a graph's node cannot change. */
struct kept_graph {
    const void *kernel;
    unsigned cluster;
    cudaGraph_t graph; /* its node names that of exec */
    cudaGraphNode_t node;
    cudaGraphExec_t exec;
    struct kept_params given; /* to the node of exec */
};

struct runtime_stream {
    cudaStream_t stream;
    struct kept_graph kept[KEPT_GRAPHS];
    uint32_t n_kept;
    bool has_no_more; /* there was no memory for another graph */
};

static int stream_open(runtime_stream **out_s, int priority)
{
    runtime_stream *s = calloc(1, sizeof *s);
    int code = s ? CALL(cudaStreamCreateWithPriority, (&s->stream, cudaStreamNonBlocking, priority))
                 : runtime_check("calloc", (int)cudaErrorMemoryAllocation);
    if (code) {
        free(s);
        return code;
    }
    *out_s = s;
    return 0;
}

int runtime_stream_open(runtime_stream **out_s)
{
    return stream_open(out_s, 0);
}

int runtime_stream_open_first(runtime_stream **out_s)
{
    int least, greatest;
    int code = CALL(cudaDeviceGetStreamPriorityRange, (&least, &greatest));
    return code ? code : stream_open(out_s, greatest);
}

static void kept_close(struct kept_graph *g)
{
    if (g->exec)
        cudaGraphExecDestroy(g->exec);
    if (g->graph)
        cudaGraphDestroy(g->graph);
    *g = (struct kept_graph){0};
}

void runtime_stream_close(runtime_stream *s)
{
    if (!s)
        return;
    for (uint32_t i = 0; i < s->n_kept; i++)
        kept_close(&s->kept[i]);
    cudaStreamDestroy(s->stream);
    free(s);
}

void *runtime_stream_native(runtime_stream *s)
{
    return s->stream;
}

int runtime_stream_wait(runtime_stream *s)
{
    return CALL(cudaStreamSynchronize, (s->stream));
}

int runtime_stream_check(runtime_stream *s)
{
    cudaError_t code = cudaStreamQuery(s->stream);
    return code == cudaErrorNotReady ? 0 : runtime_check("cudaStreamQuery", (int)code);
}

int runtime_copy(void *dst, const void *src, size_t bytes, runtime_stream *s)
{
    return CALL(cudaMemcpyAsync, (dst, src, bytes, cudaMemcpyDefault, s->stream));
}

int runtime_copy_rows(void *dst, size_t dst_step, const void *src, size_t src_step,
                      size_t row_bytes, size_t n, runtime_stream *s)
{
    return CALL(cudaMemcpy2DAsync,
                (dst, dst_step, src, src_step, row_bytes, n, cudaMemcpyDefault, s->stream));
}

int runtime_copies(void *const *dst, const void *const *src, const size_t *bytes, uint32_t n,
                   runtime_stream *s)
{
#if CUDART_VERSION >= 13000
    struct cudaMemcpyAttributes how = {.srcAccessOrder = cudaMemcpySrcAccessOrderStream,
                                       .flags = cudaMemcpyFlagPreferOverlapWithCompute};
    size_t first = 0; /* it is how all of them are */
    if (n > 1)
        return CALL(cudaMemcpyBatchAsync, (dst, src, bytes, n, &how, &first, 1, s->stream));
#endif
    int code = 0;
    for (uint32_t i = 0; i < n && code == 0; i++)
        code = runtime_copy(dst[i], src[i], bytes[i], s);
    return code;
}

int runtime_copy_peer(void *dst, int dst_device, const void *src, int src_device, size_t bytes,
                      runtime_stream *s)
{
    return CALL(cudaMemcpyPeerAsync, (dst, dst_device, src, src_device, bytes, s->stream));
}

int runtime_fill(void *dst, int byte, size_t bytes, runtime_stream *s)
{
    return CALL(cudaMemsetAsync, (dst, byte, bytes, s->stream));
}

int runtime_event_open(runtime_event **out_e)
{
    return CALL(cudaEventCreate, ((cudaEvent_t *)out_e));
}

void runtime_event_close(runtime_event *e)
{
    if (e)
        cudaEventDestroy((cudaEvent_t)e);
}

int runtime_event_record(runtime_event *e, runtime_stream *s)
{
    return CALL(cudaEventRecord, ((cudaEvent_t)e, s->stream));
}

int runtime_stream_follow(runtime_stream *s, runtime_event *e)
{
    return CALL(cudaStreamWaitEvent, (s->stream, (cudaEvent_t)e, 0));
}

int runtime_stream_wait_word(runtime_stream *s, const uint32_t *word, uint32_t value)
{
    return driver_check("cuStreamWaitValue32",
                        driver.wait_value(s->stream, (CUdeviceptr)(uintptr_t)word, value,
                                          CU_STREAM_WAIT_VALUE_GEQ));
}

int runtime_stream_write_word(runtime_stream *s, uint32_t *word, uint32_t value)
{
    return driver_check("cuStreamWriteValue32",
                        driver.write_value(s->stream, (CUdeviceptr)(uintptr_t)word, value,
                                           CU_STREAM_WRITE_VALUE_DEFAULT));
}

int runtime_event_ns(runtime_event *from, runtime_event *to, uint64_t *out_ns)
{
    float ms;
    int code = CALL(cudaEventElapsedTime, (&ms, (cudaEvent_t)from, (cudaEvent_t)to));
    if (code == 0)
        *out_ns = (uint64_t)((double)ms * 1e6 + 0.5);
    return code;
}

int runtime_graph_begin(runtime_stream *s)
{
    return CALL(cudaStreamBeginCapture, (s->stream, cudaStreamCaptureModeThreadLocal));
}

int runtime_graph_end(runtime_stream *s, runtime_graph **out_g)
{
    cudaGraph_t graph = NULL;
    int code = CALL(cudaStreamEndCapture, (s->stream, &graph));
    if (code)
        return code;
    code = CALL(cudaGraphInstantiate, ((cudaGraphExec_t *)out_g, graph, 0));
    cudaGraphDestroy(graph);
    return code;
}

int runtime_graph_launch(runtime_graph *g, runtime_stream *s)
{
    return CALL(cudaGraphLaunch, ((cudaGraphExec_t)g, s->stream));
}

void runtime_graph_close(runtime_graph *g)
{
    if (g)
        cudaGraphExecDestroy((cudaGraphExec_t)g);
}

/* ---- launches */

static unsigned cluster_of(const cudaLaunchConfig_t *c)
{
    for (unsigned i = 0; i < c->numAttrs; i++)
        if (c->attrs[i].id == cudaLaunchAttributeClusterDimension)
            return c->attrs[i].val.clusterDim.x;
    return 1;
}

static int kept_make(runtime_stream *s, const void *kernel, const cudaLaunchConfig_t *c,
                     void **args, struct kept_graph *g)
{
    size_t n = 1;
    *g = (struct kept_graph){.kernel = kernel, .cluster = cluster_of(c)};
    int code = CALL(cudaStreamBeginCapture, (s->stream, cudaStreamCaptureModeThreadLocal));
    if (code)
        return code;
    code = CALL(cudaLaunchKernelExC, (c, kernel, args));
    int end = CALL(cudaStreamEndCapture, (s->stream, &g->graph));
    if (!code)
        code = end;
    if (!code)
        code = CALL(cudaGraphGetNodes, (g->graph, &g->node, &n));
    if (!code)
        code = CALL(cudaGraphInstantiate, (&g->exec, g->graph, 0));
    if (code)
        kept_close(g);
    return code;
}

/* NULL: the kernel must go without. */
static struct kept_graph *kept_of(runtime_stream *s, const void *kernel,
                                  const cudaLaunchConfig_t *c, void **args)
{
    for (uint32_t i = 0; i < s->n_kept; i++)
        if (s->kept[i].kernel == kernel && s->kept[i].cluster == cluster_of(c))
            return &s->kept[i];
    if (s->has_no_more)
        return NULL;
    struct kept_graph *g = &s->kept[s->n_kept];
    s->has_no_more = kept_make(s, kernel, c, args, g) != 0 || ++s->n_kept == KEPT_GRAPHS;
    return g->exec ? g : NULL;
}

int runtime_launch(runtime_stream *s, const void *kernel, cudaLaunchConfig_t *c, void **args)
{
    c->stream = s->stream;
    return (int)cudaLaunchKernelExC(c, kernel, args);
}

int runtime_can_chain(const void *kernel)
{
    static _Atomic signed char
        known[64]; /* by device, whose kernels are all of one kind; 0: not yet */
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess || device >= 64)
        return 0;
    if (known[device] == 0) {
        struct cudaFuncAttributes a;
        if (cudaFuncGetAttributes(&a, kernel) != cudaSuccess)
            return 0; /* the launch says what is wrong */
        known[device] = a.ptxVersion >= 90 ? 1 : -1;
    }
    return known[device] > 0;
}

int runtime_launch_kept(runtime_stream *s, const void *kernel, cudaLaunchConfig_t *c,
                        struct runtime_args *args, int is_early)
{
    c->stream = s->stream;
    struct kept_graph *g = kept_of(s, kernel, c, args->p);
    if (!g)
        return is_early ? 0 : (int)cudaLaunchKernelExC(c, kernel, args->p);
    cudaError_t code = cudaSuccess;
    if (kept_note(&g->given, c, args)) {
        const struct cudaKernelNodeParams node = {.func = (void *)kernel,
                                                  .gridDim = c->gridDim,
                                                  .blockDim = c->blockDim,
                                                  .sharedMemBytes = (unsigned)c->dynamicSmemBytes,
                                                  .kernelParams = args->p};
        code = cudaGraphExecKernelNodeSetParams(g->exec, g->node, &node);
        if (code)
            memset(&g->given, 0, sizeof g->given);
    }
    return (int)(code || is_early ? code : cudaGraphLaunch(g->exec, s->stream));
}

/* ---- the range that outlives the process */

static CUmemAllocationProp range_prop(int index)
{
    CUmemAllocationProp prop;
    memset(&prop, 0, sizeof prop);
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = index;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return prop;
}

int runtime_range_open(int index, uint64_t bytes, int import_fd, struct runtime_range *out)
{
    memset(out, 0, sizeof *out);
    int code = driver_load();
    if (code)
        return code;
    CUmemAllocationProp prop = range_prop(index);
    size_t unit = 0;
    code = driver_check("cuMemGetAllocationGranularity",
                        driver.get_granularity(&unit, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
    if (code)
        return code;
    out->bytes = (bytes + unit - 1) / unit * unit;

    CUmemGenericAllocationHandle handle;
    if (import_fd < 0)
        code = driver_check("cuMemCreate", driver.create(&handle, out->bytes, &prop, 0));
    else
        code = driver_check("cuMemImportFromShareableHandle",
                            driver.import_handle(&handle, (void *)(intptr_t)import_fd,
                                                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    if (code)
        return code;
    out->handle = handle;
    out->has_handle = true;

    CUdeviceptr p = 0;
    code = driver_check("cuMemAddressReserve", driver.address_reserve(&p, out->bytes, unit, 0, 0));
    if (code)
        return code;
    out->p = (void *)(uintptr_t)p;
    out->is_reserved = true;
    code = driver_check("cuMemMap", driver.map(p, out->bytes, 0, handle, 0));
    if (code)
        return code;
    out->is_mapped = true;
    CUmemAccessDesc access;
    memset(&access, 0, sizeof access);
    access.location = prop.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return driver_check("cuMemSetAccess", driver.set_access(p, out->bytes, &access, 1));
}

int runtime_range_export(const struct runtime_range *r, int *out_fd)
{
    int fd = -1;
    int code = driver_check(
        "cuMemExportToShareableHandle",
        driver.export_handle(&fd, r->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    if (code == 0)
        *out_fd = fd;
    return code;
}

int runtime_range_reach(const struct runtime_range *r, int owner, int device)
{
    int can = 0;
    int code = CALL(cudaDeviceCanAccessPeer, (&can, device, owner));
    if (code)
        return code;
    if (!can)
        return runtime_check("cudaDeviceCanAccessPeer", (int)cudaErrorPeerAccessUnsupported);
    CUmemAccessDesc access;
    memset(&access, 0, sizeof access);
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return driver_check("cuMemSetAccess",
                        driver.set_access((CUdeviceptr)(uintptr_t)r->p, r->bytes, &access, 1));
}

void runtime_range_close(struct runtime_range *r)
{
    CUdeviceptr p = (CUdeviceptr)(uintptr_t)r->p;
    if (r->is_mapped)
        driver.unmap(p, r->bytes);
    if (r->is_reserved)
        driver.address_free(p, r->bytes);
    if (r->has_handle)
        driver.release(r->handle);
    memset(r, 0, sizeof *r);
}
