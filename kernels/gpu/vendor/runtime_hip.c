/* runtime_hip.c: runtime.h over the HIP runtime.
 *
 * The range for KV memory is virtual memory with a shareable handle where runtime and device can do
 * that, else plain device memory, which cannot be exported. Host memory is asked for as coherent:
 * the device's flags and results must be seen while its work goes on.
 */
#include "kernels/gpu/vendor/runtime.h"

#include <hip/hip_runtime_api.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char last_error[256] = "no error";

const char *runtime_last_error(void)
{
    return last_error;
}

int runtime_check(const char *call, int code)
{
    if (code != 0) {
        snprintf(last_error, sizeof last_error, "%s: %s", call,
                 hipGetErrorString((hipError_t)code));
        (void)hipGetLastError(); /* forgets an error that is not sticky */
    }
    return code;
}

#define CALL(name, args) runtime_check(#name, (int)name args)

/* ---- device */

int runtime_device_use(int index)
{
    static _Thread_local int current = -1;
    if (current == index)
        return 0;
    int code = CALL(hipSetDevice, (index));
    if (code == 0)
        current = index;
    return code;
}

/* Devices whose 16 x 16 x 16 products of f16 and bf16 gpu_hip.h uses. */
static bool has_matrix_units(const char *arch)
{
    static const char *const with[] = {"gfx90a", "gfx940", "gfx941", "gfx942"};
    for (size_t i = 0; i < sizeof with / sizeof *with; i++)
        if (strncmp(arch, with[i], 6) == 0)
            return true;
    return false;
}

/* "HIP 6.3.42131, driver 6.3.42131, amdgpu 6.10.5; built with 5.2.21153 for gfx90a, gfx940" */
static void describe_driver(char *out, size_t bytes)
{
    int driver = 0, runtime = 0;
    char module[32] = "of the kernel";
    (void)hipDriverGetVersion(&driver);
    (void)hipRuntimeGetVersion(&runtime);
    FILE *f = fopen("/sys/module/amdgpu/version", "re");
    if (f != NULL) {
        if (fscanf(f, "%31s", module) != 1)
            snprintf(module, sizeof module, "?");
        fclose(f);
    }
    snprintf(out, bytes, "HIP %d.%d.%d, driver %d.%d.%d, amdgpu %s; built with %d.%d.%d for %s",
             runtime / 10000000, runtime / 100000 % 100, runtime % 100000, driver / 10000000,
             driver / 100000 % 100, driver % 100000, module, HIP_VERSION_MAJOR, HIP_VERSION_MINOR,
             HIP_VERSION_PATCH, ATTND_HIP_ARCHS);
}

uint32_t runtime_n_devices(void)
{
    int n = 0;
    return CALL(hipGetDeviceCount, (&n)) ? 0 : (uint32_t)n;
}

int runtime_device_open(int index, struct runtime_device *out)
{
    int n = 0;
    int code = CALL(hipGetDeviceCount, (&n));
    if (code)
        return code;
    if (index < 0 || index >= n) {
        snprintf(last_error, sizeof last_error, "device_index %d: there are %d devices", index, n);
        return (int)hipErrorInvalidDevice;
    }
    hipDeviceProp_t prop;
    memset(&prop, 0, sizeof prop);
    code = CALL(hipGetDeviceProperties, (&prop, index));
    if (code)
        return code;
    if (prop.warpSize != 64) {
        snprintf(last_error, sizeof last_error, "%.95s has waves of %d lanes; 64 are needed",
                 prop.name, prop.warpSize);
        return (int)hipErrorInvalidDevice;
    }
    code = runtime_device_use(index);
    if (code)
        return code;
    size_t free_bytes, total_bytes;
    code = CALL(hipMemGetInfo, (&free_bytes, &total_bytes));
    if (code)
        return code;
    snprintf(out->name, sizeof out->name, "%.60s %.30s", prop.name, prop.gcnArchName);
    describe_driver(out->driver, sizeof out->driver);
    out->n_processors = (uint32_t)prop.multiProcessorCount;
    out->capability = (uint32_t)(10 * prop.major + prop.minor);
    out->has_words = false; /* hipStreamWaitValue32 has not been tried */
    out->has_matrix_units = has_matrix_units(prop.gcnArchName);
    out->shared_bytes = (uint32_t)prop.sharedMemPerBlock;
    out->l2_bytes = (uint64_t)prop.l2CacheSize;
    out->free_bytes = free_bytes;
    out->total_bytes = total_bytes;
    out->memory_bytes_per_s = /* two transfers in a period of the clock */
        2ull * (uint64_t)prop.memoryClockRate * 1000 * (uint64_t)prop.memoryBusWidth / 8;
    return 0;
}

/* ---- memory */

int runtime_alloc(void **out_p, size_t bytes)
{
    return CALL(hipMalloc, (out_p, bytes));
}

void runtime_free(void *p)
{
    if (p)
        (void)hipFree(p);
}

/* The backend hands host pointers to kernels as they are. */
static int check_address(void *p)
{
    void *device = NULL;
    int code = CALL(hipHostGetDevicePointer, (&device, p, 0));
    if (code == 0 && device != p) {
        snprintf(last_error, sizeof last_error, "the device sees host memory at another address");
        code = (int)hipErrorNotSupported;
    }
    return code;
}

int runtime_host_alloc(void **out_p, size_t bytes)
{
    void *p = NULL;
    int code =
        CALL(hipHostMalloc,
             (&p, bytes, hipHostMallocPortable | hipHostMallocMapped | hipHostMallocCoherent));
    if (code)
        return code;
    code = check_address(p);
    if (code)
        (void)hipHostFree(p);
    else
        *out_p = p;
    return code;
}

void runtime_host_free(void *p)
{
    if (p)
        (void)hipHostFree(p);
}

int runtime_host_register(void *p, size_t bytes)
{
    int code = CALL(hipHostRegister, (p, bytes, hipHostRegisterPortable | hipHostRegisterMapped));
    if (code)
        return code;
    code = check_address(p);
    if (code)
        (void)hipHostUnregister(p);
    return code;
}

int runtime_host_unregister(void *p)
{
    return CALL(hipHostUnregister, (p));
}

/* ---- streams, events, graphs */

int runtime_stream_open(runtime_stream **out_s)
{
    return CALL(hipStreamCreateWithFlags, ((hipStream_t *)out_s, hipStreamNonBlocking));
}

int runtime_stream_open_first(runtime_stream **out_s)
{
    int least, greatest;
    int code = CALL(hipDeviceGetStreamPriorityRange, (&least, &greatest));
    return code ? code
                : CALL(hipStreamCreateWithPriority,
                       ((hipStream_t *)out_s, hipStreamNonBlocking, greatest));
}

void runtime_stream_close(runtime_stream *s)
{
    if (s)
        (void)hipStreamDestroy((hipStream_t)s);
}

void *runtime_stream_native(runtime_stream *s)
{
    return s;
}

int runtime_stream_wait(runtime_stream *s)
{
    return CALL(hipStreamSynchronize, ((hipStream_t)s));
}

int runtime_stream_check(runtime_stream *s)
{
    hipError_t code = hipStreamQuery((hipStream_t)s);
    return code == hipErrorNotReady ? 0 : runtime_check("hipStreamQuery", (int)code);
}

int runtime_copy(void *dst, const void *src, size_t bytes, runtime_stream *s)
{
    return CALL(hipMemcpyAsync, (dst, src, bytes, hipMemcpyDefault, (hipStream_t)s));
}

int runtime_copy_rows(void *dst, size_t dst_step, const void *src, size_t src_step,
                      size_t row_bytes, size_t n, runtime_stream *s)
{
    return CALL(hipMemcpy2DAsync,
                (dst, dst_step, src, src_step, row_bytes, n, hipMemcpyDefault, (hipStream_t)s));
}

int runtime_copies(void *const *dst, const void *const *src, const size_t *bytes, uint32_t n,
                   runtime_stream *s)
{
    int code = 0;
    for (uint32_t i = 0; i < n && code == 0; i++)
        code = runtime_copy(dst[i], src[i], bytes[i], s);
    return code;
}

int runtime_copy_peer(void *dst, int dst_device, const void *src, int src_device, size_t bytes,
                      runtime_stream *s)
{
    return CALL(hipMemcpyPeerAsync, (dst, dst_device, src, src_device, bytes, (hipStream_t)s));
}

int runtime_fill(void *dst, int byte, size_t bytes, runtime_stream *s)
{
    return CALL(hipMemsetAsync, (dst, byte, bytes, (hipStream_t)s));
}

int runtime_event_open(runtime_event **out_e)
{
    return CALL(hipEventCreate, ((hipEvent_t *)out_e));
}

void runtime_event_close(runtime_event *e)
{
    if (e)
        (void)hipEventDestroy((hipEvent_t)e);
}

int runtime_event_record(runtime_event *e, runtime_stream *s)
{
    return CALL(hipEventRecord, ((hipEvent_t)e, (hipStream_t)s));
}

int runtime_stream_follow(runtime_stream *s, runtime_event *e)
{
    return CALL(hipStreamWaitEvent, ((hipStream_t)s, (hipEvent_t)e, 0));
}

int runtime_stream_wait_word(runtime_stream *s, const uint32_t *word, uint32_t value)
{
    (void)s, (void)word, (void)value;
    return runtime_check("hipStreamWaitValue32", (int)hipErrorNotSupported);
}

int runtime_stream_write_word(runtime_stream *s, uint32_t *word, uint32_t value)
{
    (void)s, (void)word, (void)value;
    return runtime_check("hipStreamWriteValue32", (int)hipErrorNotSupported);
}

int runtime_event_ns(runtime_event *from, runtime_event *to, uint64_t *out_ns)
{
    float ms;
    int code = CALL(hipEventElapsedTime, (&ms, (hipEvent_t)from, (hipEvent_t)to));
    if (code == 0)
        *out_ns = (uint64_t)((double)ms * 1e6 + 0.5);
    return code;
}

int runtime_graph_begin(runtime_stream *s)
{
    return CALL(hipStreamBeginCapture, ((hipStream_t)s, hipStreamCaptureModeThreadLocal));
}

int runtime_graph_end(runtime_stream *s, runtime_graph **out_g)
{
    hipGraph_t graph = NULL;
    int code = CALL(hipStreamEndCapture, ((hipStream_t)s, &graph));
    if (code)
        return code;
    code = CALL(hipGraphInstantiate, ((hipGraphExec_t *)out_g, graph, NULL, NULL, 0));
    (void)hipGraphDestroy(graph);
    return code;
}

int runtime_graph_launch(runtime_graph *g, runtime_stream *s)
{
    return CALL(hipGraphLaunch, ((hipGraphExec_t)g, (hipStream_t)s));
}

void runtime_graph_close(runtime_graph *g)
{
    if (g)
        (void)hipGraphExecDestroy((hipGraphExec_t)g);
}

/* ---- the range that outlives the process */

static void range_undo(struct runtime_range *r)
{
    if (r->is_mapped)
        (void)hipMemUnmap(r->p, r->bytes);
    if (r->is_reserved)
        (void)hipMemAddressFree(r->p, r->bytes);
    if (r->has_handle)
        (void)hipMemRelease((hipMemGenericAllocationHandle_t)(uintptr_t)r->handle);
    memset(r, 0, sizeof *r);
}

static int range_map(int index, uint64_t bytes, int import_fd, struct runtime_range *out)
{
    hipMemAllocationProp prop;
    memset(&prop, 0, sizeof prop);
    prop.type = hipMemAllocationTypePinned;
    prop.location.type = hipMemLocationTypeDevice;
    prop.location.id = index;
    prop.requestedHandleType = hipMemHandleTypePosixFileDescriptor;
    size_t unit = 0;
    int code = CALL(hipMemGetAllocationGranularity,
                    (&unit, &prop, hipMemAllocationGranularityRecommended));
    if (code)
        return code;
    if (unit == 0)
        return runtime_check("hipMemGetAllocationGranularity", (int)hipErrorNotSupported);
    out->bytes = (bytes + unit - 1) / unit * unit;

    hipMemGenericAllocationHandle_t handle = NULL;
#if HIP_VERSION >= 70100000 /* takes the descriptor, as CUDA does; before, where it is */
    void *os_handle = (void *)(intptr_t)import_fd;
#else
    void *os_handle = &import_fd;
#endif
    if (import_fd < 0)
        code = CALL(hipMemCreate, (&handle, out->bytes, &prop, 0));
    else
        code = CALL(hipMemImportFromShareableHandle,
                    (&handle, os_handle, hipMemHandleTypePosixFileDescriptor));
    if (code)
        return code;
    out->handle = (uint64_t)(uintptr_t)handle;
    out->has_handle = true;
    code = CALL(hipMemAddressReserve, (&out->p, out->bytes, unit, NULL, 0));
    if (code)
        return code;
    out->is_reserved = true;
    code = CALL(hipMemMap, (out->p, out->bytes, 0, handle, 0));
    if (code)
        return code;
    out->is_mapped = true;
    hipMemAccessDesc access;
    memset(&access, 0, sizeof access);
    access.location = prop.location;
    access.flags = hipMemAccessFlagsProtReadWrite;
    return CALL(hipMemSetAccess, (out->p, out->bytes, &access, 1));
}

int runtime_range_open(int index, uint64_t bytes, int import_fd, struct runtime_range *out)
{
    memset(out, 0, sizeof *out);
    int code = range_map(index, bytes, import_fd, out);
    if (code == 0 || import_fd >= 0)
        return code;
    range_undo(out);
    out->bytes = bytes;
    code = CALL(hipMalloc, (&out->p, bytes));
    if (code)
        memset(out, 0, sizeof *out);
    return code;
}

int runtime_range_export(const struct runtime_range *r, int *out_fd)
{
    int fd = -1;
    if (!r->has_handle)
        return runtime_check("export of device memory", (int)hipErrorNotSupported);
    int code = CALL(hipMemExportToShareableHandle,
                    (&fd, (hipMemGenericAllocationHandle_t)(uintptr_t)r->handle,
                     hipMemHandleTypePosixFileDescriptor, 0));
    if (code == 0)
        *out_fd = fd;
    return code;
}

int runtime_range_reach(const struct runtime_range *r, int owner, int device)
{
    int can = 0;
    int code = CALL(hipDeviceCanAccessPeer, (&can, device, owner));
    if (code)
        return code;
    if (!can || !r->is_reserved)
        return runtime_check("hipDeviceCanAccessPeer", (int)hipErrorPeerAccessUnsupported);
    hipMemAccessDesc access;
    memset(&access, 0, sizeof access);
    access.location.type = hipMemLocationTypeDevice;
    access.location.id = device;
    access.flags = hipMemAccessFlagsProtReadWrite;
    return CALL(hipMemSetAccess, (r->p, r->bytes, &access, 1));
}

void runtime_range_close(struct runtime_range *r)
{
    if (r->p && !r->is_reserved)
        (void)hipFree(r->p);
    range_undo(r);
}
