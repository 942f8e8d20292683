/* cpu.c: the cpu backend's table: open and close, blocks and moves, memory and regions. Batches are
 * batch.c's, pools pool.c's; everything else is done when its call returns. The device is the host:
 * its addresses, too.
 */
#define _GNU_SOURCE
#include "kernels/cpu/cpu.h"

#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/vfs.h>

/* The fastest variant, or the one ATTND_CPU_ISA names; NULL: it cannot run here. */
static const struct cpu_isa *choose_isa(void)
{
    const struct cpu_isa *isas[4];
    uint32_t n = cpu_isa_supported(isas);
    const char *name = getenv("ATTND_CPU_ISA");
    if (name == NULL || name[0] == 0)
        return isas[n - 1];
    for (uint32_t i = 0; i < n; i++)
        if (strcmp(isas[i]->name, name) == 0)
            return isas[i];
    return NULL;
}

static void cpu_close(struct backend *b)
{
    if (b == NULL)
        return;
    moves_close(b->moves);
    cpu_compute_all(b);
    cpu_threads_close(b->threads);
    while (b->pools != NULL) {
        struct backend_pool *p = b->pools;
        b->pools = p->next;
        cpu_pool_free(p);
    }
    for (uint32_t i = 0; b->scratch != NULL && b->scratch[i] != NULL; i++)
        free(b->scratch[i]);
    free(b->scratch);
    plan_fini(&b->plan);
    free(b->segments);
    cpu_shared_fini(&b->shared);
    cpu_choice_fini(&b->choice);
    cpu_projected_fini(&b->projected);
    free(b->segment_tiles);
    free(b->slots);
    free(b->evict);
    cpu_memory_close(&b->memory);
    free(b);
}

static attn_status cpu_open(const struct backend_config *c, struct backend **out_b)
{
    struct backend *b = calloc(1, sizeof *b);
    *out_b = b;
    if (b == NULL)
        return ATTN_ENOMEM;
    b->config = *c;
    b->memory.fd = -1;
    b->isa = choose_isa();
    if (b->isa == NULL) {
        cpu_fail(b, "ATTND_CPU_ISA is '%s', which this CPU or build does not have",
                 getenv("ATTND_CPU_ISA"));
        return ATTN_ENOTSUP;
    }
    attn_status st = cpu_threads_open(c->n_threads, &b->threads);
    if (st != ATTN_OK) {
        cpu_fail(b, "n_threads %" PRIu32 ": cannot start the threads", c->n_threads);
        return st;
    }
    uint32_t n = cpu_threads_count(b->threads);
    st = cpu_memory_open(&b->memory, c->kv_bytes, c->import_fd, n, b->error, sizeof b->error);
    if (st != ATTN_OK)
        return st;
    b->scratch = calloc(n + 1, sizeof(struct attend_scratch *));
    for (uint32_t i = 0; b->scratch != NULL && i < n; i++) {
        b->scratch[i] = aligned_alloc(64, sizeof *b->scratch[i]);
        if (b->scratch[i] == NULL)
            break;
    }
    if (b->scratch == NULL || b->scratch[n - 1] == NULL) {
        cpu_fail(b, "no memory for %" PRIu32 " threads", n);
        return ATTN_ENOMEM;
    }
    return ATTN_OK;
}

static const char *cpu_last_error(const struct backend *b)
{
    return b == NULL ? "out of memory" : b->error;
}

static void cpu_info(const struct backend *b, struct backend_info *out)
{
    char model[96] = "CPU", line[256];
    *out = (struct backend_info){.name = "cpu",
                                 .kv_bytes = b->memory.bytes,
                                 .max_in_flight = 1,
                                 .n_processors = b->threads ? cpu_threads_count(b->threads) : 0,
                                 .features = CPU_FEATURES,
                                 .reached = UINT64_MAX};
    FILE *f = fopen("/proc/cpuinfo", "re");
    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        if (sscanf(line, "model name : %95[^\n]", model) == 1)
            break;
    if (f != NULL)
        fclose(f);
    snprintf(out->device, sizeof out->device, "%s, %s", model, b->isa ? b->isa->name : "?");
}

/* What touches blocks follows the batch that was submitted. */
static attn_status check_block(struct backend_pool *p, uint32_t block)
{
    cpu_compute_all(p->b);
    if (block < p->config.n_blocks)
        return ATTN_OK;
    cpu_fail(p->b, "block is %" PRIu32 " of %" PRIu32, block, p->config.n_blocks);
    return ATTN_EINVAL;
}

static attn_status cpu_block_read(struct backend_pool *p, uint32_t block, void *out_bytes)
{
    uint64_t bytes = p->geometry.layout.block_bytes;
    attn_status st = check_block(p, block);
    if (st == ATTN_OK)
        memcpy(out_bytes, p->base + block * bytes, bytes);
    return st;
}

static attn_status cpu_block_write(struct backend_pool *p, uint32_t block, const void *from)
{
    uint64_t bytes = p->geometry.layout.block_bytes;
    attn_status st = check_block(p, block);
    if (st != ATTN_OK)
        return st;
    cpu_extremes_forget(p, block);
    memcpy(p->base + block * bytes, from, bytes);
    return st;
}

/* The token's row of each kv head: [n_heads][per_block] of row_bytes. */
static void copy_rows(uint8_t *to, const uint8_t *from, uint64_t row_bytes, uint32_t per_block,
                      uint32_t n_heads, const struct backend_token_copy *t)
{
    for (uint32_t h = 0; h < n_heads; h++)
        memcpy(to + ((uint64_t)h * per_block + t->to_slot) * row_bytes,
               from + ((uint64_t)h * per_block + t->from_slot) * row_bytes, row_bytes);
}

/* One layer of a token; from and to are the layer's parts of the blocks. */
static void copy_token(const struct backend_pool *p, uint8_t *to, const uint8_t *from,
                       const struct backend_token_copy *t)
{
    const struct kv_layout *l = &p->geometry.layout;
    const uint32_t n = p->config.num_kv_heads, per_block = p->config.block_tokens;
    copy_rows(to, from, l->k_row_bytes, per_block, n, t);
    if (l->is_quantised)
        copy_rows(to + l->k_scales, from + l->k_scales, l->k_scale_bytes, per_block, n, t);
    if (l->v_offset == 0)
        return;
    copy_rows(to + l->v_offset, from + l->v_offset, l->v_row_bytes, per_block, n, t);
    if (l->is_quantised)
        copy_rows(to + l->v_scales, from + l->v_scales, l->v_scale_bytes, per_block, n, t);
}

static attn_status cpu_tokens_copy(struct backend_pool *p, const struct backend_token_copy *list,
                                   uint32_t n)
{
    const struct kv_layout *l = &p->geometry.layout;
    for (uint32_t i = 0; i < n; i++) {
        attn_status st = check_block(p, list[i].from_block);
        if (st == ATTN_OK)
            st = check_block(p, list[i].to_block);
        if (st != ATTN_OK)
            return st;
        if (list[i].from_slot >= p->config.block_tokens ||
            list[i].to_slot >= p->config.block_tokens) {
            cpu_fail(p->b, "slot is %" PRIu32 " or %" PRIu32 " of %" PRIu32, list[i].from_slot,
                     list[i].to_slot, p->config.block_tokens);
            return ATTN_EINVAL;
        }
    }
    for (uint32_t i = 0; i < n; i++)
        cpu_extremes_forget(p, list[i].to_block);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t layer = 0; layer < p->config.num_layers; layer++)
            copy_token(p, p->base + list[i].to_block * l->block_bytes + layer * l->layer_bytes,
                       p->base + list[i].from_block * l->block_bytes + layer * l->layer_bytes,
                       &list[i]);
    return ATTN_OK;
}

/* On a thread of the mover's: touches nothing that the engine's does but the bytes. */
static attn_status cpu_move(void *arg, uint32_t thread, struct backend_move *m, uint32_t n)
{
    (void)arg, (void)thread;
    uint8_t *block = m->pool->base + m->block * m->n_bytes;
    if (m->peer != NULL)
        for (uint32_t i = 0; i < n; i++)
            memcpy(m[i].pool->base + m[i].block * m[i].n_bytes,
                   m[i].peer->base + m[i].peer_block * m[i].n_bytes, m[i].n_bytes);
    else if (m->is_in)
        moves_copy(block, m->bytes, m->n_bytes, m->sum);
    else
        moves_copy(m->bytes, block, m->n_bytes, m->sum);
    return ATTN_OK;
}

static uint64_t block_bytes_of(const struct backend_pool *p)
{
    return p->geometry.layout.block_bytes;
}

static attn_status cpu_moves_submit(struct backend *b, struct backend_moves *m)
{
    static const struct moves_device device = {.move = cpu_move};
    for (uint32_t i = 0; i < m->n; i++) {
        const struct backend_move *x = &m->list[i];
        bool is_good = x->block < x->pool->config.n_blocks && x->n_bytes == block_bytes_of(x->pool);
        if (x->peer != NULL)
            is_good &= x->is_in && x->peer_block < x->peer->config.n_blocks &&
                       x->n_bytes == block_bytes_of(x->peer);
        if (is_good)
            continue;
        cpu_fail(b, "block is %" PRIu32 " of %" PRIu32 ", of %zu bytes", x->block,
                 x->pool->config.n_blocks, x->n_bytes);
        return ATTN_EINVAL;
    }
    for (uint32_t i = 0; i < m->n; i++)
        if (m->list[i].is_in)
            cpu_extremes_forget(m->list[i].pool, m->list[i].block);
    attn_status st = b->moves == NULL ? moves_open(&device, 1, &b->moves) : ATTN_OK;
    if (st == ATTN_OK)
        st = moves_submit(b->moves, m);
    if (st != ATTN_OK)
        cpu_fail(b, "no thread to move %" PRIu32 " blocks", m->n);
    return st;
}

static attn_status cpu_export_memory(struct backend *b, int *out_fd)
{
    int fd = fcntl(b->memory.fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) {
        cpu_fail(b, "duplicating the KV memory's descriptor: %m");
        return ATTN_ENOMEM;
    }
    *out_fd = fd;
    return ATTN_OK;
}

/* Any thread: no error text. */
static attn_status cpu_host_alloc(struct backend *b, size_t bytes, void **out_p)
{
    (void)b;
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return ATTN_ENOMEM;
    *out_p = p;
    return ATTN_OK;
}

static void cpu_host_free(struct backend *b, void *p, size_t bytes)
{
    (void)b;
    if (p != NULL)
        munmap(p, bytes);
}

static attn_status cpu_host_register(struct backend *b, void *p, size_t bytes)
{
    (void)b, (void)p, (void)bytes;
    return ATTN_OK;
}

static void cpu_host_unregister(struct backend *b, void *p, size_t bytes)
{
    (void)b, (void)p, (void)bytes;
}

/* ---- regions: memfds, like the KV memory */

static attn_status cpu_region_open(struct backend *b, uint64_t bytes, int import_fd,
                                   struct backend_region *out_r, char *why, size_t why_bytes)
{
    (void)b;
    struct statfs fs;
    /* a hole that its maker punches into one of huge pages can be impossible to fill again */
    if (import_fd >= 0 && (fstatfs(import_fd, &fs) != 0 || fs.f_type == HUGETLBFS_MAGIC)) {
        snprintf(why, why_bytes, "import_fd %d is of huge pages, or of no file system", import_fd);
        return ATTN_EINVAL;
    }
    struct cpu_memory *m = calloc(1, sizeof *m);
    if (m == NULL) {
        snprintf(why, why_bytes, "no memory for a region's books");
        return ATTN_ENOMEM;
    }
    attn_status st = cpu_memory_open(m, bytes, import_fd, 0, why, why_bytes);
    if (st == ATTN_OK)
        st = cpu_memory_take(m, 0, m->bytes, why, why_bytes);
    if (st != ATTN_OK) {
        cpu_memory_close(m);
        free(m);
        return st;
    }
    *out_r = (struct backend_region){.p = m->base, .bytes = m->bytes, .handle = m};
    return ATTN_OK;
}

static attn_status cpu_region_export(struct backend *b, const struct backend_region *r, int *out_fd)
{
    (void)b;
    int fd = fcntl(((const struct cpu_memory *)r->handle)->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return ATTN_ENOMEM;
    *out_fd = fd;
    return ATTN_OK;
}

static void cpu_region_close(struct backend *b, struct backend_region *r)
{
    (void)b;
    if (r->handle != NULL)
        cpu_memory_close(r->handle);
    free(r->handle);
    *r = (struct backend_region){0};
}

static attn_status cpu_region_reach(struct backend *b, const struct backend_region *r,
                                    struct backend *other)
{
    (void)b, (void)r, (void)other;
    return ATTN_OK;
}

static attn_status cpu_rows_copy(struct backend *b, const struct backend_rows *r)
{
    (void)b;
    for (uint32_t i = 0; i < r->n; i++)
        memcpy((uint8_t *)r->to + i * r->to_step, (const uint8_t *)r->from + i * r->from_step,
               r->row_bytes);
    return ATTN_OK;
}

static const struct backend_ops cpu_ops = {
    .abi = BACKEND_ABI,
    .name = "cpu",
    .open = cpu_open,
    .close = cpu_close,
    .last_error = cpu_last_error,
    .info = cpu_info,
    .pool_check = cpu_pool_check,
    .pool_bytes = cpu_pool_bytes,
    .memory_ready = cpu_pool_memory_ready,
    .pool_open = cpu_pool_open,
    .pool_place = cpu_pool_place,
    .pool_room = cpu_pool_room,
    .pool_resize = cpu_pool_resize,
    .summaries_open = cpu_summaries_open,
    .pool_close = cpu_pool_close,
    .pool_kernels = cpu_pool_kernels,
    .weights_write = cpu_weights_write,
    .weights_have = cpu_weights_have,
    .weights_read = cpu_weights_read,
    .submit = cpu_submit,
    .poll = cpu_poll,
    .block_read = cpu_block_read,
    .block_write = cpu_block_write,
    .tokens_copy = cpu_tokens_copy,
    .moves_submit = cpu_moves_submit,
    .export_memory = cpu_export_memory,
    .host_alloc = cpu_host_alloc,
    .host_free = cpu_host_free,
    .host_register = cpu_host_register,
    .host_unregister = cpu_host_unregister,
    .region_open = cpu_region_open,
    .region_export = cpu_region_export,
    .region_close = cpu_region_close,
    .region_reach = cpu_region_reach,
    .rows_copy = cpu_rows_copy,
};

const struct backend_ops *backend_cpu(void)
{
    return &cpu_ops;
}
