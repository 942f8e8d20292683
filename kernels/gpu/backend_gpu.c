/* backend_gpu.c: the gpu backend's table, device and memory.
 *
 * KV memory is one range that a descriptor keeps alive beyond the process; pools are carved from it
 * in the order they are opened. Everything else on the device (block tables, layers, staging,
 * scratch) is made anew by every process.
 */
#include "kernels/gpu/gpu_host.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* ---- device */

static attn_status take_kv(struct backend *b)
{
    const struct backend_config *c = &b->config;
    if (c->kv_bytes == 0)
        return gpu_fail(b, ATTN_EINVAL, "kv_bytes is 0");
    if (c->import_fd < 0 && c->kv_bytes > b->device.free_bytes)
        return gpu_fail(b, ATTN_ENOMEM,
                        "kv_bytes %" PRIu64 " do not fit: %" PRIu64 " bytes are free on %s",
                        c->kv_bytes, b->device.free_bytes, b->device.name);
    if (runtime_range_open(c->device_index, c->kv_bytes, c->import_fd, &b->kv) != 0) {
        if (c->import_fd >= 0)
            return gpu_fail(b, ATTN_EINVAL, "import_fd %d as %" PRIu64 " bytes of KV memory: %s",
                            c->import_fd, c->kv_bytes, runtime_last_error());
        return gpu_fail(b, ATTN_ENOMEM,
                        "kv_bytes %" PRIu64 ": %s; %" PRIu64 " bytes are free on %s", c->kv_bytes,
                        runtime_last_error(), b->device.free_bytes, b->device.name);
    }
    b->kv_written = c->import_fd >= 0 ? b->kv.bytes : 0;
    if (c->import_fd < 0 && runtime_fill(b->kv.p, 0, b->kv.bytes, b->stream) != 0)
        return gpu_lost(b);
    return ATTN_OK;
}

static attn_status gpu_open(const struct backend_config *c, struct backend **out_b)
{
    struct backend *b = calloc(1, sizeof *b);
    *out_b = b;
    if (!b)
        return ATTN_ENOMEM;
    b->config = *c;
    if (c->max_batch_items == 0 || c->max_batch_tokens == 0)
        return gpu_fail(b, ATTN_EINVAL, "max_batch_items %u, max_batch_tokens %u: not 0",
                        c->max_batch_items, c->max_batch_tokens);
    if (runtime_device_open(c->device_index, &b->device) != 0)
        return gpu_fail(b, ATTN_ENOTSUP, "no " GPU_BACKEND_NAME " device: %s",
                        runtime_last_error());
    for (int i = 0; i < BACKEND_MAX_IN_FLIGHT; i++)
        if (runtime_stream_open(&b->slots[i].stream) != 0)
            return gpu_fail(b, ATTN_ENOTSUP, "%s", runtime_last_error());
    b->stream = b->slots[0].stream;
    if (runtime_stream_open_first(&b->prompts) != 0 || runtime_event_open(&b->met) != 0)
        return gpu_fail(b, ATTN_ENOTSUP, "%s", runtime_last_error());
    int code = runtime_check("loading the kernels around attention", gpu_prep_init());
    if (!code)
        code = runtime_check("loading the matrix kernels",
                             gpu_attend_matrix_init(b->device.shared_bytes));
    if (code)
        return gpu_fail(b, ATTN_ENOTSUP, "%s (capability %u.%u)", runtime_last_error(),
                        b->device.capability / 10, b->device.capability % 10);
    attn_status st = take_kv(b);
    if (st != ATTN_OK)
        return st;

    if (runtime_host_alloc((void **)&b->signals, BACKEND_MAX_IN_FLIGHT * sizeof *b->signals) != 0)
        return gpu_fail(b, ATTN_ENOMEM, "%s", runtime_last_error());
    memset(b->signals, 0, BACKEND_MAX_IN_FLIGHT * sizeof *b->signals);
    for (int i = 0; i < BACKEND_MAX_IN_FLIGHT; i++) {
        b->slots[i].signal = &b->signals[i];
        st = gpu_job_init(b, &b->slots[i].job);
        if (st != ATTN_OK)
            return st;
    }
    if (runtime_stream_wait(b->stream) != 0)
        return gpu_lost(b);
    gpu_peers_join(b);
    return ATTN_OK;
}

static void gpu_close(struct backend *b)
{
    if (!b)
        return;
    gpu_moves_end(b);
    gpu_peers_leave(b);
    bool is_there = b->stream && runtime_device_use(b->config.device_index) == 0;
    for (int i = 0; i < BACKEND_MAX_IN_FLIGHT; i++)
        if (is_there && b->slots[i].stream)
            runtime_stream_wait(b->slots[i].stream);
    while (b->pools) {
        struct backend_pool *p = b->pools;
        b->pools = p->next;
        gpu_pool_free(p);
    }
    for (int i = 0; i < BACKEND_MAX_IN_FLIGHT; i++) {
        struct gpu_job *j = &b->slots[i].job;
        runtime_host_free(j->staging.host);
        runtime_free(j->staging.device);
        runtime_free(j->staging.q);
        runtime_free(j->staging.kv);
        runtime_free(j->staging.heads);
        runtime_free(j->staging.scratch);
        gpu_job_fini(j);
    }
    runtime_host_free(b->signals);
    runtime_free(b->part_o);
    runtime_free(b->part_ml);
    runtime_free(b->arrivals);
    runtime_free(b->decoded);
    decode_planner_fini(&b->planner);
    gpu_shared_fini(&b->shared);
    runtime_range_close(&b->kv);
    for (int i = 0; i < BACKEND_MAX_IN_FLIGHT; i++)
        runtime_stream_close(b->slots[i].stream);
    if (b->prompts)
        runtime_stream_close(b->prompts);
    if (b->rows)
        runtime_stream_close(b->rows);
    runtime_event_close(b->met);
    free(b);
}

static const char *gpu_last_error(const struct backend *b)
{
    return b ? b->error : "out of memory";
}

static void gpu_info(const struct backend *b, struct backend_info *out)
{
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "%s", GPU_BACKEND_NAME);
    snprintf(out->device, sizeof out->device, "%s", b->device.name);
    snprintf(out->driver, sizeof out->driver, "%s", b->device.driver);
    out->kv_bytes = b->kv.bytes;
    out->max_in_flight = BACKEND_MAX_IN_FLIGHT;
    out->n_processors = b->device.n_processors;
    out->memory_bytes_per_s = b->device.memory_bytes_per_s;
    out->features = gpu_features(b);
    out->reached = gpu_reached(b);
    memcpy(out->id.uuid, b->device.uuid, sizeof out->id.uuid);
    out->id.driver_version = b->device.driver_version;
    out->id.is_shared = b->device.is_shared;
}

/* ---- regions */

static attn_status gpu_region_open(struct backend *b, uint64_t bytes, int import_fd,
                                   struct backend_region *out_r, char *why, size_t why_bytes)
{
    struct runtime_range *range = calloc(1, sizeof *range);
    if (range && runtime_device_use(b->config.device_index) == 0 &&
        runtime_range_open(b->config.device_index, bytes, import_fd, range) == 0) {
        *out_r = (struct backend_region){.p = range->p, .bytes = range->bytes, .handle = range};
        return ATTN_OK;
    }
    snprintf(why, why_bytes, "a region of %" PRIu64 " bytes%s: %s", bytes,
             import_fd >= 0 ? " of another process" : "",
             range ? runtime_last_error() : "no memory for its books");
    if (range)
        runtime_range_close(range);
    free(range);
    return import_fd >= 0 ? ATTN_EINVAL : ATTN_ENOMEM;
}

static attn_status gpu_region_export(struct backend *b, const struct backend_region *r, int *out_fd)
{
    (void)b;
    return runtime_range_export(r->handle, out_fd) == 0 ? ATTN_OK : ATTN_ENOMEM;
}

static void gpu_region_close(struct backend *b, struct backend_region *r)
{
    if (r->handle && runtime_device_use(b->config.device_index) == 0)
        runtime_range_close(r->handle);
    free(r->handle);
    *r = (struct backend_region){0};
}

static attn_status gpu_region_reach(struct backend *b, const struct backend_region *r,
                                    struct backend *other)
{
    int owner = b->config.device_index, device = other->config.device_index;
    bool can = device == owner ||
               (gpu_reaches(other, owner) && runtime_range_reach(r->handle, owner, device) == 0);
    return can ? ATTN_OK : ATTN_ENOTSUP;
}

static attn_status gpu_rows_copy(struct backend *b, const struct backend_rows *r)
{
    attn_status st = gpu_enter(b);
    if (st != ATTN_OK)
        return st;
    if (!b->rows && runtime_stream_open(&b->rows) != 0)
        return gpu_lost(b);
    if (runtime_copy_rows(r->to, r->to_step, r->from, r->from_step, r->row_bytes, r->n, b->rows) !=
            0 ||
        runtime_stream_wait(b->rows) != 0)
        return gpu_lost(b);
    return ATTN_OK;
}

/* ---- memory */

static attn_status gpu_export_memory(struct backend *b, int *out_fd)
{
    if (runtime_range_export(&b->kv, out_fd) != 0)
        return gpu_fail(b, ATTN_ENOTSUP, "%s", runtime_last_error());
    return ATTN_OK;
}

/* The slots of host memory run on any thread and leave no sentence. */
static attn_status gpu_host_register(struct backend *b, void *p, size_t bytes)
{
    if (runtime_device_use(b->config.device_index) != 0)
        return ATTN_EDEVICE;
    return runtime_host_register(p, bytes) == 0 ? ATTN_OK : ATTN_ENOMEM;
}

static void gpu_host_unregister(struct backend *b, void *p, size_t bytes)
{
    (void)bytes;
    if (p && runtime_device_use(b->config.device_index) == 0)
        runtime_host_unregister(p);
}

static attn_status gpu_host_alloc(struct backend *b, size_t bytes, void **out_p)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return ATTN_ENOMEM;
    attn_status st = gpu_host_register(b, p, bytes);
    if (st != ATTN_OK) {
        munmap(p, bytes);
        return st;
    }
    *out_p = p;
    return ATTN_OK;
}

static void gpu_host_free(struct backend *b, void *p, size_t bytes)
{
    if (!p)
        return;
    gpu_host_unregister(b, p, bytes);
    munmap(p, bytes);
}

static const struct backend_ops ops = {
    .abi = BACKEND_ABI,
    .name = GPU_BACKEND_NAME,
    .n_devices = runtime_n_devices,
    .open = gpu_open,
    .close = gpu_close,
    .last_error = gpu_last_error,
    .info = gpu_info,
    .pool_check = gpu_pool_check,
    .pool_bytes = gpu_pool_bytes,
    .pool_open = gpu_pool_open,
    .pool_place = gpu_pool_place,
    .pool_room = gpu_pool_room,
    .pool_resize = gpu_pool_resize,
    .summaries_open = gpu_summaries_open,
    .pool_close = gpu_pool_close,
    .pool_kernels = gpu_pool_kernels,
    .weights_write = gpu_weights_write,
    .weights_have = gpu_weights_have,
    .weights_read = gpu_weights_read,
    .submit = gpu_submit,
    .poll = gpu_poll,
    .block_read = gpu_block_read,
    .block_write = gpu_block_write,
    .tokens_copy = gpu_tokens_copy,
    .moves_submit = gpu_moves_submit,
    .export_memory = gpu_export_memory,
    .host_alloc = gpu_host_alloc,
    .host_free = gpu_host_free,
    .host_register = gpu_host_register,
    .host_unregister = gpu_host_unregister,
    .region_open = gpu_region_open,
    .region_export = gpu_region_export,
    .region_close = gpu_region_close,
    .region_reach = gpu_region_reach,
    .rows_copy = gpu_rows_copy,
};

const struct backend_ops *attnd_backend_module(void);

__attribute__((visibility("default"))) const struct backend_ops *attnd_backend_module(void)
{
    return &ops;
}
