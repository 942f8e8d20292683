/* device.c: a device that computes naively what attention depends on: which tokens are seen, in
 * which order, by which query. A token's K and V are one number in the KV memory, which outlives
 * the process; block tables are a mirror, as on a GPU, that only patches change. Launches fail,
 * take long, lose the device; tensors and tables are read at any moment of a launch. */
#define _GNU_SOURCE
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/backend.h"
#include "net.h"

enum { MAX_POOLS = 4, MAX_WORDS = 1 << 16 };
#define POISON UINT64_C(0xdeadbeefcafef00d)

struct backend {
    uint64_t kv_bytes;
    struct backend_batch *in_flight[BACKEND_MAX_IN_FLIGHT];
    uint64_t end_ns[BACKEND_MAX_IN_FLIGHT];
    bool is_run[BACKEND_MAX_IN_FLIGHT];
    attn_status status[BACKEND_MAX_IN_FLIGHT];
    bool is_unpatched[BACKEND_MAX_IN_FLIGHT]; /* it failed before it told the tables */
    uint32_t n_in_flight;
    uint64_t last_end_ns;
    bool is_lost;
    struct backend_pool *pool; /* one at a time, which is what the clients make */
};

struct backend_pool {
    struct backend *b;
    struct backend_pool_config c;
    uint64_t place; /* in words, plus one */
    uint32_t *mirror; /* [n_table_rows][max_row_blocks] */
};

/* The KV memory: whose it is is written into its descriptor. */
static struct {
    uint64_t id;
    uint64_t words[MAX_WORDS];
} memory;

/* --- what rows are worth ---------------------------------------------------------------------- */

static uint64_t hash_bytes(const void *p, size_t n)
{
    uint64_t h = n, word;
    for (size_t i = 0; i + 8 <= n; i += 8) {
        memcpy(&word, (const uint8_t *)p + i, 8);
        h = (h ^ word) * UINT64_C(0x9fb21c651e98df25);
        h ^= h >> 29;
    }
    return sim_mix(h);
}

uint64_t device_token(const void *k, size_t k_bytes, const void *v, size_t v_bytes)
{
    return sim_mix(hash_bytes(k, k_bytes) + 3 * hash_bytes(v, v_bytes));
}

uint64_t device_fold(uint64_t seen, uint64_t token)
{
    seen = (seen ^ token) * UINT64_C(0x9fb21c651e98df25);
    return seen ^ (seen >> 31);
}

uint64_t device_row(uint64_t seen, const void *q, size_t q_bytes)
{
    return sim_mix(seen ^ hash_bytes(q, q_bytes));
}

float device_out(uint64_t row, uint32_t i)
{
    return (float)(sim_mix(row + i) >> 40) * 0x1p-24f;
}

float device_lse(uint64_t row, uint32_t head)
{
    return -device_out(~row, head);
}

/* --- pools ------------------------------------------------------------------------------------ */

static const char *last_error(const struct backend *b)
{
    (void)b;
    return "the virtual device was told to fail";
}

static void info(const struct backend *b, struct backend_info *out)
{
    *out = (struct backend_info){.name = "cpu",
                                 .device = "virtual",
                                 .kv_bytes = b->kv_bytes,
                                 .max_in_flight = sim_plan.max_in_flight,
                                 .n_processors = 1};
}

static void pool_close(struct backend_pool *p)
{
    p->b->pool = NULL;
    free(p->mirror);
    free(p);
}

static attn_status dev_open(const struct backend_config *c, struct backend **out_b)
{
    uint64_t id = 0;
    struct backend *b = calloc(1, sizeof *b);
    *out_b = b;
    if (b == NULL)
        return ATTN_ENOMEM;
    b->kv_bytes = c->kv_bytes;
    if (c->import_fd >= 0 &&
        (pread(c->import_fd, &id, sizeof id, 0) != sizeof id || id != memory.id))
        return ATTN_EINVAL;
    if (c->import_fd < 0) {
        memory.id = sim_random();
        for (size_t i = 0; i < MAX_WORDS; i++)
            memory.words[i] = POISON + i;
    }
    return ATTN_OK;
}

static void dev_close(struct backend *b)
{
    if (b == NULL)
        return;
    if (b->n_in_flight > 0)
        sim_fail("the device is closed with %u batches in flight", b->n_in_flight);
    if (b->pool != NULL)
        pool_close(b->pool);
    free(b);
}

static attn_status pool_check(struct backend *b, const struct backend_pool_config *c)
{
    (void)b;
    return c->q_dtype == ATTN_F32 ? ATTN_OK : ATTN_ENOTSUP;
}

static uint64_t words_of(const struct backend_pool_config *c)
{
    return (uint64_t)c->n_blocks * c->num_layers * c->block_tokens;
}

static uint64_t pool_bytes(const struct backend *b, const struct backend_pool_config *c)
{
    (void)b;
    return words_of(c) * c->num_kv_heads * (c->head_dim_k + c->head_dim_v) * 4;
}

static attn_status pool_open(struct backend *b, const struct backend_pool_config *c,
                             struct backend_pool **out_pool)
{
    process_point();
    if (words_of(c) > MAX_WORDS || b->pool != NULL)
        return ATTN_ENOMEM;
    struct backend_pool *p = calloc(1, sizeof *p);
    uint32_t *mirror = calloc((size_t)c->n_table_rows * c->max_row_blocks, sizeof *mirror);
    if (p == NULL || mirror == NULL) {
        free(p);
        free(mirror);
        return ATTN_ENOMEM;
    }
    memset(mirror, 0xff, (size_t)c->n_table_rows * c->max_row_blocks * sizeof *mirror);
    *p = (struct backend_pool){.b = b, .c = *c, .place = 1, .mirror = mirror};
    b->pool = *out_pool = p;
    return ATTN_OK;
}

static uint64_t pool_place(const struct backend_pool *p)
{
    return p->place;
}

/* --- a batch ---------------------------------------------------------------------------------- */

static uint64_t *word_of(struct backend_pool *p, uint32_t block, uint32_t layer, uint32_t slot)
{
    const struct backend_pool_config *c = &p->c;
    if (block >= c->n_blocks)
        sim_fail("a batch names block %u of %u", block, c->n_blocks);
    return &memory.words[(block * c->num_layers + layer) * c->block_tokens + slot];
}

/* The number of the token at pos, as the mirror of the tables says. */
static uint64_t *token_at(struct backend_pool *p, const struct backend_item *it, uint32_t pos)
{
    uint32_t i = pos / p->c.block_tokens;
    uint32_t block = p->mirror[it->table_row * p->c.max_row_blocks + i];
    if (block != it->block_table[i])
        sim_fail("the device was told of block %u at %u of row %u, the table has %u", block, i,
                 it->table_row, it->block_table[i]);
    return word_of(p, block, it->layer, pos % p->c.block_tokens);
}

static void append(struct backend_pool *p, const struct backend_item *it)
{
    size_t k_bytes = p->c.num_kv_heads * p->c.head_dim_k * sizeof(float);
    size_t v_bytes = p->c.num_kv_heads * p->c.head_dim_v * sizeof(float);
    const uint8_t *k = it->k, *v = it->v;
    for (uint32_t t = 0; t < it->n_tokens; t++)
        *token_at(p, it, it->pos + t) =
            device_token(k + t * k_bytes, k_bytes, v + t * v_bytes, v_bytes);
}

static void attend(struct backend_pool *p, const struct backend_item *it)
{
    size_t q_bytes = p->c.num_q_heads * p->c.head_dim_k * sizeof(float);
    uint32_t n_out = p->c.num_q_heads * p->c.head_dim_v;
    const uint8_t *q = it->q;
    float *out = it->out;
    uint64_t seen = 0;
    for (uint32_t pos = 0; pos < it->pos; pos++)
        seen = device_fold(seen, *token_at(p, it, pos));
    for (uint32_t t = 0; t < it->n_tokens; t++) {
        seen = device_fold(seen, *token_at(p, it, it->pos + t));
        uint64_t row = device_row(seen, q + t * q_bytes, q_bytes);
        for (uint32_t i = 0; i < n_out; i++)
            out[t * n_out + i] = device_out(row, i);
        for (uint32_t h = 0; it->lse != NULL && h < p->c.num_q_heads; h++)
            it->lse[t * p->c.num_q_heads + h] = device_lse(row, h);
    }
}

static void run_batch(struct backend_batch *batch)
{
    struct backend_pool *p = batch->pool;
    for (uint32_t i = 0; i < batch->n_copies; i++)
        for (uint32_t l = 0; l < p->c.num_layers; l++)
            for (uint32_t s = 0; s < p->c.block_tokens; s++)
                *word_of(p, batch->copies[i].dst, l, s) = *word_of(p, batch->copies[i].src, l, s);
    for (uint32_t i = 0; i < batch->n_items; i++)
        if (batch->items[i].flags & BACKEND_APPEND)
            append(p, &batch->items[i]);
    for (uint32_t i = 0; i < batch->n_items; i++)
        if (batch->items[i].flags & BACKEND_ATTEND)
            attend(p, &batch->items[i]);
}

static bool have_rows_in_common(const struct backend_batch *a, const struct backend_batch *b)
{
    for (uint32_t i = 0; i < a->n_items; i++)
        for (uint32_t k = 0; k < b->n_items; k++)
            if (a->items[i].table_row == b->items[k].table_row)
                return true;
    return a->n_copies > 0 || b->n_copies > 0;
}

/* Runs one of those in flight, after those that must come before it. */
static void run_at(struct backend *b, uint32_t i)
{
    if (b->is_run[i])
        return;
    for (uint32_t k = 0; k < i; k++)
        if (!b->is_run[k] && have_rows_in_common(b->in_flight[k], b->in_flight[i]))
            run_at(b, k);
    run_batch(b->in_flight[i]);
    b->is_run[i] = true;
}

static void patch(struct backend_pool *p, const struct backend_batch *batch)
{
    for (uint32_t i = 0; i < batch->n_patches; i++) {
        const struct backend_patch *x = &batch->patches[i];
        if (x->row >= p->c.n_table_rows || x->index >= p->c.max_row_blocks)
            sim_fail("a patch is of row %u, index %u", x->row, x->index);
        p->mirror[x->row * p->c.max_row_blocks + x->index] = x->block;
    }
}

static attn_status submit(struct backend *b, struct backend_batch *batch)
{
    struct backend_pool *p = batch->pool;
    process_point();
    if (b->n_in_flight == sim_plan.max_in_flight)
        sim_fail("a batch too many is in flight");
    if (b->is_lost)
        return ATTN_EDEVICE;
    if (sim_has_faults && sim_chance(sim_plan.fail_batch)) {
        sim_counts.failed_batches++;
        return ATTN_EINTERNAL;
    }
    uint32_t at = b->n_in_flight++;
    uint64_t takes_ns = sim_between(5 * SIM_US, 100 * SIM_US) + batch->n_items * SIM_US;
    if (sim_has_faults && sim_chance(sim_plan.slow_batch))
        takes_ns += sim_between(SIM_MS, 300 * SIM_MS);
    b->in_flight[at] = batch;
    b->is_run[at] = false;
    b->status[at] = ATTN_OK;
    uint64_t from_ns = b->last_end_ns > sim_now_ns ? b->last_end_ns : sim_now_ns;
    b->last_end_ns = b->end_ns[at] = from_ns + takes_ns;
    b->is_unpatched[at] = at > 0 && b->is_unpatched[at - 1]; /* what is behind fails, too */
    if (b->is_unpatched[at] || (sim_has_faults && sim_chance(sim_plan.fail_batch))) {
        sim_counts.failed_batches++;
        b->status[at] = ATTN_EINTERNAL;
        b->is_unpatched[at] |= sim_chance(500);
    } else if (sim_has_faults && sim_chance(sim_plan.lose_device)) {
        sim_say("the device is lost");
        sim_counts.lost_devices++;
        b->is_lost = true;
    }
    sim_counts.batches++;
    if (!b->is_unpatched[at])
        patch(p, batch);
    if (!b->is_unpatched[at] && sim_chance(500))
        run_at(b, at);
    return ATTN_OK;
}

static struct backend_batch *dev_poll(struct backend *b, uint64_t wait_ns)
{
    process_point();
    if (b->n_in_flight == 0)
        return NULL;
    uint64_t until_ns = sim_now_ns + wait_ns;
    if (b->end_ns[0] < until_ns)
        until_ns = b->end_ns[0] > sim_now_ns ? b->end_ns[0] : sim_now_ns;
    thread_wait(NULL, NULL, until_ns);
    if (b->end_ns[0] > sim_now_ns)
        return NULL;
    struct backend_batch *batch = b->in_flight[0];
    batch->status = b->is_lost ? ATTN_EDEVICE : b->status[0];
    /* one that fails may have done its work */
    if (batch->status == ATTN_OK || (!b->is_unpatched[0] && sim_chance(500)))
        run_at(b, 0);
    batch->device_ns = 10 * SIM_US;
    b->n_in_flight--;
    for (uint32_t i = 0; i < b->n_in_flight; i++) {
        b->in_flight[i] = b->in_flight[i + 1];
        b->end_ns[i] = b->end_ns[i + 1];
        b->is_run[i] = b->is_run[i + 1];
        b->status[i] = b->status[i + 1];
        b->is_unpatched[i] = b->is_unpatched[i + 1];
    }
    return batch;
}

/* --- memory ----------------------------------------------------------------------------------- */

static attn_status export_memory(struct backend *b, int *out_fd)
{
    (void)b;
    int fd = memfd_create("sim-kv", MFD_CLOEXEC);
    process_point();
    if (fd < 0 || pwrite(fd, &memory.id, sizeof memory.id, 0) != sizeof memory.id)
        return ATTN_ENOMEM;
    *out_fd = fd;
    return ATTN_OK;
}

static attn_status host_alloc(struct backend *b, size_t bytes, void **out_p)
{
    (void)b;
    void *p = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    *out_p = p;
    return p == NULL ? ATTN_ENOMEM : ATTN_OK;
}

static void host_free(struct backend *b, void *p, size_t bytes)
{
    (void)b, (void)bytes;
    free(p);
}

static attn_status blocks_scrub(struct backend_pool *p, const uint32_t *blocks, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t l = 0; l < p->c.num_layers; l++)
            for (uint32_t s = 0; s < p->c.block_tokens; s++)
                *word_of(p, blocks[i], l, s) = 0;
    return ATTN_OK;
}

const struct backend_ops device_ops = {
    .abi = BACKEND_ABI,
    .name = "cpu",
    .open = dev_open,
    .close = dev_close,
    .last_error = last_error,
    .info = info,
    .pool_check = pool_check,
    .pool_bytes = pool_bytes,
    .pool_open = pool_open,
    .pool_place = pool_place,
    .pool_close = pool_close,
    .submit = submit,
    .poll = dev_poll,
    .blocks_scrub = blocks_scrub,
    .export_memory = export_memory,
    .host_alloc = host_alloc,
    .host_free = host_free,
};
