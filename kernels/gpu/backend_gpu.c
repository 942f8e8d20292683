/* backend_gpu.c: the gpu backend's table, device, pools and memory.
 *
 * KV memory is one range that a descriptor keeps alive beyond the process; pools are carved from it
 * in the order they are opened. Everything else on the device (block tables, layers, staging,
 * scratch) is made anew by every process.
 */
#include "kernels/gpu/gpu_host.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define POOL_ALIGN 4096

attn_status gpu_fail(struct backend *b, attn_status st, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(b->error, sizeof b->error, format, args);
    va_end(args);
    return st;
}

attn_status gpu_lost(struct backend *b)
{
    b->is_lost = true;
    return gpu_fail(b, ATTN_EDEVICE, "%s", runtime_last_error());
}

attn_status gpu_enter(struct backend *b)
{
    if (b->is_lost)
        return ATTN_EDEVICE;
    return runtime_device_use(b->config.device_index) == 0 ? ATTN_OK : gpu_lost(b);
}

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
    if (runtime_event_open(&b->met) != 0)
        return gpu_fail(b, ATTN_ENOTSUP, "%s", runtime_last_error());
    int code = runtime_check("loading the kernels around attention", gpu_prep_init());
    if (!code)
        code = runtime_check("loading the matrix kernels", gpu_attend_matrix_init());
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

static void pool_free(struct backend_pool *p)
{
    if (!p)
        return;
    runtime_free(p->layers_memory);
    runtime_free(p->table_memory);
    free(p->tuned);
    free(p->prefill);
    free(p->touched);
    free(p->specs);
    free(p);
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
        pool_free(p);
    }
    for (int i = 0; i < BACKEND_MAX_IN_FLIGHT; i++) {
        struct gpu_job *j = &b->slots[i].job;
        runtime_host_free(j->staging.host);
        runtime_free(j->staging.device);
        runtime_free(j->staging.q);
        runtime_free(j->staging.kv);
        runtime_free(j->staging.scratch);
        gpu_job_fini(j);
    }
    runtime_host_free(b->signals);
    runtime_free(b->part_o);
    runtime_free(b->part_ml);
    decode_planner_fini(&b->planner);
    runtime_range_close(&b->kv);
    for (int i = 0; i < BACKEND_MAX_IN_FLIGHT; i++)
        runtime_stream_close(b->slots[i].stream);
    runtime_event_close(b->met);
    free(b);
}

static const char *gpu_last_error(const struct backend *b)
{
    return b ? b->error : "out of memory";
}

uint32_t gpu_features(const struct backend *b)
{
    const uint32_t all =
        BACKEND_HAS_WORDS | BACKEND_HAS_DEVICE_ADDRESSES | BACKEND_HAS_REGIONS | BACKEND_HAS_MERGES;
    return b->device.has_words ? all : 0;
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

/* ---- pools */

static attn_status gpu_pool_check(struct backend *b, const struct backend_pool_config *c)
{
    attn_status st = backend_pool_config_check(c, b->error, sizeof b->error);
    if (st != ATTN_OK)
        return st;
    if (c->head_dim_k % 8 || c->head_dim_v % 8 || c->head_dim_k > 256 || c->head_dim_v > 256)
        return gpu_fail(b, ATTN_ENOTSUP, "head_dim %u/%u: multiples of 8 up to 256 are built",
                        c->head_dim_k, c->head_dim_v);
    uint32_t group = c->num_q_heads / c->num_kv_heads;
    if (c->num_q_heads > 4096 || group > 1024)
        return gpu_fail(b, ATTN_ENOTSUP, "num_q_heads %u: up to 4096 are built", c->num_q_heads);
    return ATTN_OK;
}

static uint64_t gpu_pool_bytes(const struct backend *b, const struct backend_pool_config *c)
{
    (void)b;
    uint64_t bytes = kv_layout_of(c).block_bytes * c->n_blocks;
    return (bytes + POOL_ALIGN - 1) / POOL_ALIGN * POOL_ALIGN;
}

static void describe(struct backend_pool *p)
{
    const struct backend_pool_config *c = &p->config;
    const struct kv_layout *l = &p->layout;
    p->kv = (struct gpu_kv){
        .base = (char *)p->b->kv.p + p->range.offset,
        .block_bytes = l->block_bytes,
        .layer_bytes = l->layer_bytes,
        .v_offset = l->v_offset,
        .k_head_bytes = l->k_head_bytes,
        .v_head_bytes = l->v_head_bytes,
        .k_scales = l->k_scales,
        .v_scales = l->v_scales,
        .table = p->table_memory,
        .layers = p->layers_memory,
        .row_blocks = c->max_row_blocks,
        .num_q_heads = c->num_q_heads,
        .num_kv_heads = c->num_kv_heads,
        .group = c->num_q_heads / c->num_kv_heads,
        .dk = c->head_dim_k,
        .dv = c->head_dim_v,
        .block_tokens = c->block_tokens,
        .block_shift = (uint32_t)__builtin_ctz(c->block_tokens),
        .q_dtype = (uint32_t)c->q_dtype,
        .kv_dtype = (uint32_t)c->kv_dtype,
        .is_quantised = l->is_quantised,
    };
}

/* Layers and their per-head arrays in one device allocation: [num_layers] structs, then the
 * arrays. */
static attn_status upload_layers(struct backend_pool *p, const struct attn_layer_spec *from)
{
    struct backend *b = p->b;
    uint32_t n = p->config.num_layers, heads = p->config.num_q_heads;
    size_t arrays = n * sizeof(struct gpu_layer);
    size_t bytes = arrays + 2 * (size_t)n * heads * sizeof(float);
    char *host = calloc(1, bytes);
    if (!host)
        return gpu_fail(b, ATTN_ENOMEM, "out of host memory");
    attn_status st = gpu_fail(b, ATTN_ENOMEM, "%zu bytes for layers", bytes);
    if (runtime_alloc(&p->layers_memory, bytes) != 0)
        goto out;
    for (uint32_t i = 0; i < n; i++) {
        struct gpu_layer *l = (struct gpu_layer *)host + i;
        l->scale = from[i].scale;
        l->soft_cap = from[i].soft_cap;
        l->window_tokens = from[i].window_tokens;
        l->sink_tokens = from[i].sink_tokens;
        l->is_full = from[i].is_full;
        l->n_branches = from[i].n_branches;
        memcpy(l->branches, from[i].branches, sizeof l->branches);
        const float *given[2] = {from[i].sink_logits, from[i].alibi_slopes};
        const float **to[2] = {&l->sink_logits, &l->alibi_slopes};
        for (int k = 0; k < 2; k++) {
            size_t at = arrays + (2 * i + (size_t)k) * heads * sizeof(float);
            if (!given[k])
                continue;
            memcpy(host + at, given[k], heads * sizeof(float));
            *to[k] = (const float *)((char *)p->layers_memory + at);
        }
    }
    if (runtime_copy(p->layers_memory, host, bytes, b->stream) != 0 ||
        runtime_stream_wait(b->stream) != 0)
        st = gpu_lost(b);
    else
        st = ATTN_OK;
out:
    free(host);
    return st;
}

static attn_status grow_device(struct backend *b, void **p, uint64_t *bytes, uint64_t want)
{
    if (want <= *bytes)
        return ATTN_OK;
    runtime_free(*p);
    *p = NULL;
    *bytes = 0;
    if (runtime_alloc(p, want) != 0)
        return gpu_fail(b, ATTN_ENOMEM, "%" PRIu64 " bytes of workspace: %s", want,
                        runtime_last_error());
    *bytes = want;
    return ATTN_OK;
}

/* Staging and scratch for the widest pool so far. Nothing is in flight. */
static attn_status grow_workspace(struct backend *b, const struct backend_pool *p)
{
    uint64_t staging = gpu_staging_bytes(b, p), q = gpu_q_bytes(b, p);
    uint64_t kv = gpu_brought_bytes(b, p), scratch = 0;
    if (p->tuned)
        scratch =
            decode_scratch_bytes(p->tuned, b->config.max_batch_items, b->config.max_batch_tokens);
    if (p->tuned || p->prefill)
        scratch += PREFILL_SCRATCH_BYTES;
    attn_status st = ATTN_OK;
    for (int i = 0; i < BACKEND_MAX_IN_FLIGHT && st == ATTN_OK; i++) {
        struct gpu_staging *s = &b->slots[i].job.staging;
        if (staging > s->bytes) {
            runtime_host_free(s->host);
            s->host = NULL;
            if (runtime_host_alloc((void **)&s->host, staging) != 0)
                return gpu_fail(b, ATTN_ENOMEM, "%" PRIu64 " bytes of staging: %s", staging,
                                runtime_last_error());
            st = grow_device(b, (void **)&s->device, &s->bytes, staging);
        }
        if (st == ATTN_OK)
            st = grow_device(b, (void **)&s->q, &s->q_bytes, q);
        if (st == ATTN_OK)
            st = grow_device(b, (void **)&s->kv, &s->kv_bytes, kv);
        if (st == ATTN_OK)
            st = grow_device(b, &s->scratch, &s->scratch_bytes, scratch);
        if (st == ATTN_OK && s->scratch &&
            runtime_fill(s->scratch, 0, s->scratch_bytes, b->stream) != 0)
            st = gpu_lost(b);
    }
    if (st == ATTN_OK && p->config.head_dim_v > b->part_dv) {
        uint64_t had = 0;
        b->part_dv = p->config.head_dim_v;
        b->part_slots = GPU_PART_SLOTS;
        st = grow_device(b, (void **)&b->part_o, &had,
                         (uint64_t)GPU_PART_SLOTS * b->part_dv * sizeof(float));
        had = 0;
        if (st == ATTN_OK)
            st = grow_device(b, (void **)&b->part_ml, &had,
                             (uint64_t)GPU_PART_SLOTS * 2 * sizeof(float));
    }
    return st;
}

static attn_status open_prefill(struct backend_pool *p)
{
    struct backend *b = p->b;
    if (!prefill_supported(&p->config, (int)(b->device.capability / 10)))
        return ATTN_OK;
    p->prefill = aligned_alloc(_Alignof(struct prefill_pool), sizeof *p->prefill);
    if (!p->prefill)
        return gpu_fail(b, ATTN_ENOMEM, "out of host memory");
    int code = prefill_pool_init(p->prefill, &p->config, &p->kv, p->specs, b->device.n_processors,
                                 GPU_PART_SLOTS);
    return runtime_check("prefill_pool_init", code) == 0 ? ATTN_OK : gpu_lost(b);
}

static attn_status open_tuned(struct backend_pool *p)
{
    struct backend *b = p->b;
    if (!decode_supported(&p->config, (int)(b->device.capability / 10),
                          (int)(b->device.capability % 10)))
        return ATTN_OK;
    p->tuned = aligned_alloc(_Alignof(struct decode_pool), sizeof *p->tuned);
    if (!p->tuned)
        return gpu_fail(b, ATTN_ENOMEM, "out of host memory");
    int code = decode_pool_init(p->tuned, &p->config, &p->kv, p->specs, b->device.n_processors);
    return runtime_check("decode_pool_init", code) == 0 ? ATTN_OK : gpu_lost(b);
}

/* The pool's part of the KV memory. What another pool left there is zeroed, but where the place is
 * named: that is the pool's own. */
static attn_status take_range(struct backend_pool *p)
{
    struct backend *b = p->b;
    uint64_t largest, place = p->config.kv_place;
    p->range =
        (struct kv_range){.offset = place - (place != 0), .bytes = gpu_pool_bytes(b, &p->config)};
    if (!kv_range_take(&b->kv_ranges, b->kv.bytes, place != 0, &p->range, &largest))
        return gpu_fail(b, ATTN_ENOMEM,
                        "the pool needs %" PRIu64 " bytes of KV memory, %" PRIu64
                        " are free in one piece",
                        p->range.bytes, largest);
    uint64_t end = p->range.offset + p->range.bytes;
    uint64_t old = end < b->kv_written ? end : b->kv_written;
    if (end > b->kv_written)
        b->kv_written = end;
    if (place == 0 && p->range.offset < old &&
        runtime_fill((char *)b->kv.p + p->range.offset, 0, old - p->range.offset, b->stream) != 0) {
        kv_range_give(&b->kv_ranges, &p->range);
        return gpu_lost(b);
    }
    return ATTN_OK;
}

static attn_status gpu_pool_open(struct backend *b, const struct backend_pool_config *c,
                                 struct backend_pool **out_pool)
{
    attn_status st = gpu_enter(b);
    if (st == ATTN_OK)
        st = gpu_pool_check(b, c);
    if (st != ATTN_OK)
        return st;
    if (gpu_follow_all(b) != 0 || runtime_stream_wait(b->stream) != 0)
        return gpu_lost(b);

    struct backend_pool *p = calloc(1, sizeof *p);
    if (!p)
        return gpu_fail(b, ATTN_ENOMEM, "out of host memory");
    p->b = b;
    p->config = *c;
    p->layout = kv_layout_of(c);
    st = take_range(p);
    if (st != ATTN_OK) {
        free(p);
        return st;
    }
    p->specs = malloc(c->num_layers * sizeof *p->specs);
    p->touched = calloc(c->n_table_rows, sizeof *p->touched);
    if (!p->specs || !p->touched) {
        st = gpu_fail(b, ATTN_ENOMEM, "out of host memory");
        goto fail;
    }
    memcpy(p->specs, c->layers, c->num_layers * sizeof *p->specs);
    p->config.layers = p->specs;
    st = upload_layers(p, c->layers);
    if (st != ATTN_OK)
        goto fail;
    uint64_t had = 0, table = (uint64_t)c->n_table_rows * c->max_row_blocks * sizeof(uint32_t);
    st = grow_device(b, &p->table_memory, &had, table);
    if (st != ATTN_OK)
        goto fail;
    if (runtime_fill(p->table_memory, 0, table, b->stream) != 0) {
        st = gpu_lost(b);
        goto fail;
    }
    describe(p);
    st = open_tuned(p);
    if (st == ATTN_OK)
        st = open_prefill(p);
    if (st == ATTN_OK)
        st = grow_workspace(b, p);
    if (st != ATTN_OK)
        goto fail;
    for (uint32_t i = 0; i < c->num_layers; i++) /* the arrays were borrowed; the device has them */
        p->specs[i].sink_logits = p->specs[i].alibi_slopes = NULL;
    if (runtime_stream_wait(b->stream) != 0) {
        st = gpu_lost(b);
        goto fail;
    }
    p->next = b->pools;
    b->pools = p;
    *out_pool = p;
    return ATTN_OK;
fail:
    kv_range_give(&b->kv_ranges, &p->range);
    pool_free(p);
    return st;
}

static uint64_t gpu_pool_place(const struct backend_pool *p)
{
    return p->range.offset + 1;
}

static void gpu_pool_close(struct backend_pool *p)
{
    struct backend *b = p->b;
    struct backend_pool **at = &b->pools;
    if (gpu_enter(b) == ATTN_OK && gpu_follow_all(b) == 0)
        (void)runtime_stream_wait(b->stream);
    kv_range_give(&b->kv_ranges, &p->range);
    while (*at != p)
        at = &(*at)->next;
    *at = p->next;
    pool_free(p);
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
    .pool_close = gpu_pool_close,
    .submit = gpu_submit,
    .poll = gpu_poll,
    .block_read = gpu_block_read,
    .block_write = gpu_block_write,
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
};

const struct backend_ops *attnd_backend_module(void);

__attribute__((visibility("default"))) const struct backend_ops *attnd_backend_module(void)
{
    return &ops;
}
