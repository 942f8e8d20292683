/* device.c: devices that compute naively what attention depends on: which tokens are seen, in
 * which order, by which query. A token's K and V are one number per KV head in the KV memory, which
 * outlives the process; block tables are a mirror, as on a GPU, that only patches change. Launches
 * fail, take long, lose the device; tensors and tables are read at any moment of a launch. Blocks
 * move beside them, in two halves, so that one that is written meanwhile is torn. */
#define _GNU_SOURCE
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/backend.h"
#include "kernels/kv_layout.h"
#include "kernels/moves.h"
#include "net.h"

enum { MAX_WORDS = 1 << 16, MAX_BLOCKS = 1 << 10, MAX_SEEN = 256 };
#define POISON UINT64_C(0xdeadbeefcafef00d)

struct backend {
    uint64_t kv_bytes;
    uint32_t card;
    struct moves *moves; /* NULL: none were asked for yet */
    bool is_coming[MAX_BLOCKS]; /* a move writes it */
    uint32_t n_leaving[MAX_BLOCKS]; /* moves that read it, of another card's, too */
    struct backend_batch *in_flight[BACKEND_MAX_IN_FLIGHT];
    uint64_t end_ns[BACKEND_MAX_IN_FLIGHT];
    bool is_run[BACKEND_MAX_IN_FLIGHT];
    attn_status status[BACKEND_MAX_IN_FLIGHT];
    bool is_unpatched[BACKEND_MAX_IN_FLIGHT]; /* it failed before it told the tables */
    uint64_t serial[BACKEND_MAX_IN_FLIGHT];
    uint32_t n_signalled[BACKEND_MAX_IN_FLIGHT]; /* signals that are written */
    uint32_t n_in_flight;
    uint64_t last_end_ns, last_serial;
    bool is_lost;
    struct backend_pool *pool; /* one at a time, which is what the clients make */
};

struct backend_pool {
    struct backend *b;
    struct backend_pool_config c;
    bool is_sum; /* see device_attend */
    uint64_t place; /* in words, plus one */
    uint32_t *mirror; /* [n_table_rows][max_row_blocks] */
};

/* The cards' KV memory: whose it is is written into its descriptor. */
static struct memory {
    uint64_t id;
    uint64_t words[MAX_WORDS];
} memories[SIM_MAX_CARDS];

static struct backend *opened[SIM_MAX_CARDS]; /* the process's */

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

static float fraction(uint64_t x)
{
    return (float)(sim_mix(x) >> 40) * 0x1p-24f;
}

/* In order: what is seen is folded into a number. */
static void attend_in_order(const uint64_t *tokens, uint32_t n, uint64_t query, uint32_t n_out,
                            uint32_t n_lse, float *out, float *lse)
{
    uint64_t seen = 0;
    for (uint32_t i = 0; i < n; i++) {
        seen = (seen ^ tokens[i]) * UINT64_C(0x9fb21c651e98df25);
        seen ^= seen >> 31;
    }
    uint64_t row = sim_mix(seen ^ query);
    for (uint32_t i = 0; i < n_out; i++)
        out[i] = fraction(row + i);
    for (uint32_t h = 0; lse != NULL && h < n_lse; h++)
        lse[h] = -fraction(~row + h);
}

/* As a sum with weights, so that parts of it can be merged: n_lse queries, each with its rows. */
static void attend_as_sum(const uint64_t *tokens, uint32_t n, uint64_t query, uint32_t n_out,
                          uint32_t n_lse, float *out, float *lse)
{
    uint32_t dim = n_out / n_lse;
    for (uint32_t h = 0; h < n_lse; h++) {
        double sum[64] = {0}, weights = 0;
        for (uint32_t i = 0; i < n; i++) {
            double w = exp(4 * (double)fraction(tokens[i] ^ (query + h)));
            weights += w;
            for (uint32_t k = 0; k < dim; k++)
                sum[k] += w * (double)fraction(tokens[i] + k);
        }
        for (uint32_t k = 0; k < dim; k++)
            out[h * dim + k] = n == 0 ? 0 : (float)(sum[k] / weights);
        if (lse != NULL)
            lse[h] = n == 0 ? -INFINITY : (float)log(weights);
    }
}

void device_attend(const uint64_t *tokens, uint32_t n, const void *q, size_t q_bytes, bool is_sum,
                   uint32_t n_out, uint32_t n_lse, float *out, float *lse)
{
    uint64_t query = hash_bytes(q, q_bytes);
    if (is_sum)
        attend_as_sum(tokens, n, query, n_out, n_lse, out, lse);
    else
        attend_in_order(tokens, n, query, n_out, n_lse, out, lse);
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
                                 .n_processors = 1,
                                 .features = BACKEND_HAS_WORDS | BACKEND_HAS_REGIONS |
                                             BACKEND_HAS_DEVICE_ADDRESSES};
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
    b->card = (uint32_t)c->device_index;
    struct memory *memory = &memories[b->card];
    if (c->import_fd >= 0 &&
        (pread(c->import_fd, &id, sizeof id, 0) != sizeof id || id != memory->id))
        return ATTN_EINVAL;
    if (c->import_fd < 0) {
        memory->id = sim_random();
        for (size_t i = 0; i < MAX_WORDS; i++)
            memory->words[i] = POISON + i;
    }
    opened[b->card] = b;
    return ATTN_OK;
}

static void dev_close(struct backend *b)
{
    if (b == NULL)
        return;
    if (b->n_in_flight > 0)
        sim_fail("the device is closed with %u batches in flight", b->n_in_flight);
    moves_close(b->moves);
    opened[b->card] = NULL;
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
    return (uint64_t)c->n_blocks * c->num_layers * c->block_tokens * c->num_kv_heads;
}

static uint64_t pool_bytes(const struct backend *b, const struct backend_pool_config *c)
{
    (void)b;
    return words_of(c) * (c->head_dim_k + c->head_dim_v) * 4;
}

static attn_status pool_open(struct backend *b, const struct backend_pool_config *c,
                             struct backend_pool **out_pool)
{
    process_point();
    if (words_of(c) > MAX_WORDS || c->n_blocks > MAX_BLOCKS || b->pool != NULL)
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
    p->is_sum = c->layers[0].scale == SIM_SCALE_SUM;
    b->pool = *out_pool = p;
    return ATTN_OK;
}

static uint64_t pool_place(const struct backend_pool *p)
{
    return p->place;
}

static uint32_t pool_room(const struct backend_pool *p)
{
    uint64_t n = MAX_WORDS / (words_of(&p->c) / p->c.n_blocks);
    return n < MAX_BLOCKS ? (uint32_t)n : MAX_BLOCKS;
}

/* What comes is zeroed, and rows get longer, as a device would. */
static attn_status pool_resize(struct backend_pool *p, uint32_t n_blocks, uint32_t max_row_blocks)
{
    struct backend_pool_config c = p->c;
    process_point();
    if (n_blocks > pool_room(p))
        return ATTN_ENOMEM;
    c.n_blocks = n_blocks;
    c.max_row_blocks = max_row_blocks;
    size_t n = (size_t)c.n_table_rows * max_row_blocks;
    uint32_t *mirror = malloc(n * sizeof *mirror);
    if (mirror == NULL)
        return ATTN_ENOMEM;
    memset(mirror, 0xff, n * sizeof *mirror);
    for (uint32_t row = 0; row < c.n_table_rows; row++)
        for (uint32_t i = 0; i < max_row_blocks && i < p->c.max_row_blocks; i++)
            mirror[row * max_row_blocks + i] = p->mirror[row * p->c.max_row_blocks + i];
    for (uint64_t i = words_of(&p->c); i < words_of(&c); i++)
        memories[p->b->card].words[i] = 0;
    free(p->mirror);
    p->mirror = mirror;
    p->c = c;
    return ATTN_OK;
}

/* --- a batch ---------------------------------------------------------------------------------- */

/* [block][layer][slot][kv head] */
static uint64_t *words_at(struct backend_pool *p, uint32_t block, uint32_t layer, uint32_t slot)
{
    const struct backend_pool_config *c = &p->c;
    if (block >= c->n_blocks)
        sim_fail("a batch names block %u of %u", block, c->n_blocks);
    size_t slots = (block * c->num_layers + layer) * c->block_tokens + slot;
    return &memories[p->b->card].words[slots * c->num_kv_heads];
}

/* The numbers of the token at pos, as the mirror of the tables says. */
static uint64_t *token_at(struct backend_pool *p, const struct backend_item *it, uint32_t pos)
{
    uint32_t i = pos / p->c.block_tokens;
    uint32_t block = p->mirror[it->table_row * p->c.max_row_blocks + i];
    if (block != it->block_table[i])
        sim_fail("the device was told of block %u at %u of row %u, the table has %u", block, i,
                 it->table_row, it->block_table[i]);
    if (block < MAX_BLOCKS && p->b->is_coming[block])
        sim_fail("a batch uses block %u, which a move writes", block);
    return words_at(p, block, it->layer, pos % p->c.block_tokens);
}

static void must_not_leave(const struct backend_pool *p, uint32_t block)
{
    if (block < MAX_BLOCKS && p->b->n_leaving[block] > 0)
        sim_fail("block %u is written while a move reads it", block);
}

static void append(struct backend_pool *p, const struct backend_item *it)
{
    size_t k_bytes = p->c.head_dim_k * sizeof(float), v_bytes = p->c.head_dim_v * sizeof(float);
    uint32_t n_heads = p->c.num_kv_heads;
    const uint8_t *k = it->k, *v = it->v;
    for (uint32_t t = 0; t < it->n_tokens; t++) {
        must_not_leave(p, it->block_table[(it->pos + t) / p->c.block_tokens]);
        for (uint32_t h = 0; h < n_heads; h++)
            token_at(p, it, it->pos + t)[h] = device_token(
                k + (t * n_heads + h) * k_bytes, k_bytes, v + (t * n_heads + h) * v_bytes, v_bytes);
    }
}

static void attend(struct backend_pool *p, const struct backend_item *it)
{
    uint32_t n_heads = p->c.num_kv_heads, n_lse = p->c.num_q_heads / n_heads;
    size_t q_bytes = n_lse * p->c.head_dim_k * sizeof(float);
    uint32_t n_out = n_lse * p->c.head_dim_v;
    const uint8_t *q = it->q;
    float *out = it->out;
    if (it->pos + it->n_tokens > MAX_SEEN)
        sim_fail("an item ends at token %u", it->pos + it->n_tokens);
    for (uint32_t h = 0; h < n_heads; h++) {
        uint64_t tokens[MAX_SEEN];
        for (uint32_t i = 0; i < it->pos + it->n_tokens; i++)
            tokens[i] = token_at(p, it, i)[h];
        for (uint32_t t = 0; t < it->n_tokens; t++) {
            uint32_t row = t * n_heads + h;
            uint32_t seen = it->pos + (it->flags & BACKEND_FULL ? it->n_tokens : t + 1);
            device_attend(tokens, seen, q + row * q_bytes, q_bytes, p->is_sum, n_out, n_lse,
                          out + row * n_out, it->lse == NULL ? NULL : it->lse + row * n_lse);
        }
    }
}

static size_t block_words(const struct backend_pool *p)
{
    return (size_t)p->c.num_layers * p->c.block_tokens * p->c.num_kv_heads;
}

static void run_batch(struct backend_batch *batch)
{
    struct backend_pool *p = batch->pool;
    for (uint32_t i = 0; i < batch->n_copies; i++) {
        must_not_leave(p, batch->copies[i].dst);
        memcpy(words_at(p, batch->copies[i].dst, 0, 0), words_at(p, batch->copies[i].src, 0, 0),
               block_words(p) * sizeof(uint64_t));
    }
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

/* A batch that does well has ended: the device tells those who wait for a word, one by one, whether
 * anybody polls or not. */
static void on_end(void *arg, uint64_t serial)
{
    struct backend *b = opened[(uintptr_t)arg];
    uint32_t i = 0;
    while (b != NULL && i < b->n_in_flight && b->serial[i] != serial)
        i++;
    if (b == NULL || i == b->n_in_flight || b->is_lost)
        return;
    const struct backend_batch *batch = b->in_flight[i];
    run_at(b, i);
    if (b->n_signalled[i] == batch->n_signals)
        return;
    const struct backend_word *w = &batch->signals[b->n_signalled[i]++];
    __atomic_store_n(w->word, w->value, __ATOMIC_RELEASE);
    sim_at(sim_below(2000), SIM_PROCESS, on_end, arg, serial);
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
    if (batch->n_copies > 0 || batch->n_signals > 0)
        process_may_be_killed(batch->n_signals > 0 ? 200 : 20);
    b->serial[at] = ++b->last_serial;
    b->n_signalled[at] = 0;
    if (b->status[at] == ATTN_OK && batch->n_signals > 0)
        sim_at(b->end_ns[at] - sim_now_ns, SIM_PROCESS, on_end, (void *)(uintptr_t)b->card,
               b->serial[at]);
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
    bool is_signalled = b->n_signalled[0] > 0; /* and lost behind it */
    batch->status = b->is_lost && !is_signalled ? ATTN_EDEVICE : b->status[0];
    /* one that fails may have done its work */
    if (batch->status == ATTN_OK || (!b->is_unpatched[0] && sim_chance(500)))
        run_at(b, 0);
    batch->device_ns = 10 * SIM_US;
    for (uint32_t i = b->n_signalled[0]; i < batch->n_signals && batch->status == ATTN_OK; i++)
        __atomic_store_n(batch->signals[i].word, batch->signals[i].value, __ATOMIC_RELEASE);
    b->n_in_flight--;
    for (uint32_t i = 0; i < b->n_in_flight; i++) {
        b->in_flight[i] = b->in_flight[i + 1];
        b->end_ns[i] = b->end_ns[i + 1];
        b->is_run[i] = b->is_run[i + 1];
        b->status[i] = b->status[i + 1];
        b->is_unpatched[i] = b->is_unpatched[i + 1];
        b->serial[i] = b->serial[i + 1];
        b->n_signalled[i] = b->n_signalled[i + 1];
    }
    return batch;
}

/* --- memory ----------------------------------------------------------------------------------- */

static attn_status export_memory(struct backend *b, int *out_fd)
{
    int fd = memfd_create("sim-kv", MFD_CLOEXEC);
    process_point();
    const struct memory *memory = &memories[b->card];
    if (fd < 0 || pwrite(fd, &memory->id, sizeof memory->id, 0) != sizeof memory->id)
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

static attn_status host_register(struct backend *b, void *p, size_t bytes)
{
    (void)b;
    if ((uintptr_t)p % 4096 != 0 || bytes % 4096 != 0)
        sim_fail("the device is told of memory that is no whole pages");
    return memory_fails() ? ATTN_ENOMEM : ATTN_OK;
}

static void host_unregister(struct backend *b, void *p, size_t bytes)
{
    (void)b, (void)p, (void)bytes;
}

/* --- whole blocks ----------------------------------------------------------------------------- */

/* After all batches submitted before; those that are done anyway are. */
static attn_status wait_for_all(struct backend *b)
{
    process_point();
    if (b->is_lost)
        return ATTN_EDEVICE;
    for (uint32_t i = 0; i < b->n_in_flight; i++)
        if (!b->is_unpatched[i])
            run_at(b, i);
    return ATTN_OK;
}

/* A block elsewhere has each number where its token's K begins; what else it has is nothing. */
static void words_copy(struct backend_pool *p, uint32_t block, uint8_t *bytes, bool is_in,
                       uint32_t first_layer, uint32_t n_layers)
{
    struct kv_layout l = kv_layout_of(&p->c);
    size_t row = p->c.head_dim_k * sizeof(float);
    for (uint32_t i = first_layer; i < first_layer + n_layers; i++)
        for (uint32_t s = 0; s < p->c.block_tokens; s++)
            for (uint32_t h = 0; h < p->c.num_kv_heads; h++) {
                uint64_t *word = words_at(p, block, i, s) + h;
                uint8_t *there = bytes + i * l.layer_bytes + h * l.k_head_bytes + s * row;
                memcpy(is_in ? (void *)word : there, is_in ? there : (void *)word, sizeof *word);
            }
}

static void peer_copy(const struct backend_move *m, uint32_t first_layer, uint32_t n_layers)
{
    struct backend_pool *p = m->pool, *peer = (struct backend_pool *)(uintptr_t)m->peer;
    for (uint32_t i = first_layer; i < first_layer + n_layers; i++)
        for (uint32_t s = 0; s < p->c.block_tokens; s++)
            for (uint32_t h = 0; h < p->c.num_kv_heads; h++)
                words_at(p, m->block, i, s)[h] = words_at(peer, m->peer_block, i, s)[h];
}

/* A part of the layers, from or to wherever it is. */
static void move_layers(const struct backend_move *m, uint32_t first_layer, uint32_t n_layers)
{
    if (m->peer != NULL)
        peer_copy(m, first_layer, n_layers);
    else
        words_copy(m->pool, m->block, m->bytes, m->is_in, first_layer, n_layers);
}

static attn_status block_read(struct backend_pool *p, uint32_t block, void *out_bytes)
{
    attn_status st = wait_for_all(p->b);
    if (st == ATTN_OK && sim_has_faults && sim_chance(sim_plan.fail_move))
        st = ATTN_EINTERNAL;
    if (st != ATTN_OK)
        return st;
    sim_counts.block_reads++;
    memset(out_bytes, 0, kv_layout_of(&p->c).block_bytes);
    words_copy(p, block, out_bytes, false, 0, p->c.num_layers);
    return ATTN_OK;
}

static attn_status block_write(struct backend_pool *p, uint32_t block, const void *bytes)
{
    must_not_leave(p, block);
    attn_status st = wait_for_all(p->b);
    if (st == ATTN_OK && sim_has_faults && sim_chance(sim_plan.fail_move))
        st = ATTN_EINTERNAL;
    if (st == ATTN_OK)
        words_copy(p, block, (uint8_t *)(uintptr_t)bytes, true, 0, p->c.num_layers);
    return st;
}

/* The device that a move reads from, and the block there; NULL: host memory. */
static struct backend *read_by(struct backend *b, const struct backend_move *m, uint32_t *out_block)
{
    *out_block = m->peer != NULL ? m->peer_block : m->block;
    if (m->peer != NULL)
        return ((const struct backend_pool *)m->peer)->b;
    return m->is_in ? NULL : b;
}

static void note_move(struct backend *b, const struct backend_move *m, bool begins)
{
    uint32_t block;
    struct backend *from = read_by(b, m, &block);
    if (from != NULL)
        from->n_leaving[block] += begins ? 1 : -1u;
    if (!m->is_in)
        return;
    if (begins)
        must_not_leave(m->pool, m->block);
    b->is_coming[m->block] = begins;
}

static attn_status move_one(void *arg, struct backend_move *m)
{
    struct backend *b = arg;
    struct backend_pool *p = m->pool;
    uint32_t half = p->c.num_layers / 2;
    process_point();
    thread_sleep(sim_between(SIM_US, sim_chance(200) ? 10 * SIM_MS : 100 * SIM_US));
    bool fails = b->is_lost || (sim_has_faults && sim_chance(sim_plan.fail_move));
    if (!m->is_in)
        memset(m->bytes, 0, m->n_bytes);
    move_layers(m, 0, half);
    thread_sleep(sim_between(SIM_US, sim_chance(200) ? 5 * SIM_MS : 50 * SIM_US));
    process_point();
    if (!fails)
        move_layers(m, half, p->c.num_layers - half);
    note_move(b, m, false);
    sim_counts.blocks_back += m->is_in && !fails;
    if (m->peer == NULL)
        moves_sum(m->bytes, m->n_bytes, m->sum);
    sim_counts.moves += !fails;
    sim_counts.failed_moves += fails;
    return b->is_lost ? ATTN_EDEVICE : fails ? ATTN_EINTERNAL : ATTN_OK;
}

/* On a thread of kernels/moves.c. */
static attn_status move(void *arg, uint32_t thread, struct backend_move *m, uint32_t n)
{
    attn_status st = ATTN_OK;
    (void)thread;
    for (uint32_t i = 0; i < n; i++) {
        attn_status one = move_one(arg, &m[i]);
        st = one == ATTN_OK ? st : one;
    }
    return st;
}

static attn_status dev_moves_submit(struct backend *b, struct backend_moves *m)
{
    const struct moves_device device = {.move = move, .arg = b};
    process_point();
    if (b->is_lost)
        return ATTN_EDEVICE;
    attn_status st = b->moves == NULL ? moves_open(&device, 2, &b->moves) : ATTN_OK;
    for (uint32_t i = 0; i < m->n; i++)
        note_move(b, &m->list[i], true);
    if (st == ATTN_OK)
        st = moves_submit(b->moves, m);
    for (uint32_t i = 0; i < m->n && st != ATTN_OK; i++)
        note_move(b, &m->list[i], false);
    return st;
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
    .pool_room = pool_room,
    .pool_resize = pool_resize,
    .pool_close = pool_close,
    .submit = submit,
    .poll = dev_poll,
    .block_read = block_read,
    .block_write = block_write,
    .moves_submit = dev_moves_submit,
    .export_memory = export_memory,
    .host_alloc = host_alloc,
    .host_free = host_free,
    .host_register = host_register,
    .host_unregister = host_unregister,
};
