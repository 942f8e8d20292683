/* attnbench_check.c: a cell's outputs against the float64 reference: rows that lie evenly over all
 * of them, as many as all cores together compute in a moment.
 *
 * A part is what one kv head of a sequence gives in a layer. All parts are looked at, in as many
 * tokens each as there is time for, one in each of as many equal stretches of its tokens: a run of
 * wrong tokens that is twice as long as a stretch is found always, one wrong row with the share of
 * rows that are checked. With 16 cores and a prompt of 16,384 tokens and 32 heads that is one in
 * 500: 128 wrong tokens of a head are found with 0.25, of all heads as good as always. Where there
 * is not even time for a token of each part, some parts are not looked at.
 */
#include "kernels/bench/bench.h"

#include "kernels/kv_layout.h"
#include "kernels/reference.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CORE_WORK 3e8 /* multiplications in float64 of a core, about a quarter of a second */
#define READ_WORK 4 /* of these, to read an element of K or V */
#define MAX_CORES 64

struct check {
    const struct bench *x;
    const struct bench_setup *s;
    struct backend_batch *ends[2]; /* of the first layer and the last */
    uint32_t n_parts, n_tokens; /* that are looked at; of each part, at most */
    _Atomic uint32_t next;
    pthread_mutex_t lock; /* of what follows */
    struct bench_error error;
    double diff, norm;
    bool is_without_memory;
};

struct part {
    uint32_t end, item, kv_head;
    uint32_t n_kv, group;
    float *k, *v, *q; /* [n_kv][dim], [group][dim] */
    double *want;
};

/* n elements of a head's K or V in a layer of a block: rows from the first token on. */
static void read_rows(const struct bench_setup *s, const uint8_t *layer, uint32_t head, bool is_v,
                      uint32_t n_rows, float *out)
{
    const struct kv_layout *l = &s->layout;
    const attn_dtype kv = bench_kv_dtype(s->cell);
    const uint32_t d = is_v ? s->cell->g->head_dim_v : s->cell->g->head_dim_k;
    const uint32_t row_bytes = is_v ? l->v_row_bytes : l->k_row_bytes;
    const uint32_t scale_bytes = is_v ? l->v_scale_bytes : l->k_scale_bytes;
    const uint8_t *codes =
        layer + (is_v ? l->v_offset : 0) + head * (is_v ? l->v_head_bytes : l->k_head_bytes);
    for (uint32_t r = 0; r < n_rows; r++) {
        double row[BACKEND_MAX_LATENT_K];
        const uint8_t *scales = layer + (is_v ? l->v_scales : l->k_scales) +
                                ((size_t)head * BENCH_BLOCK_TOKENS + r) * scale_bytes;
        if (l->is_quantised)
            reference_dequantise(kv, codes + r * row_bytes, scales, d, row);
        for (uint32_t i = 0; i < d; i++)
            out[(size_t)r * d + i] = l->is_quantised
                                         ? (float)row[i]
                                         : (float)reference_get(kv, codes + r * row_bytes, i);
    }
}

static uint32_t parts_of(const struct bench_cell *c)
{
    return 2 * c->batch * c->g->num_kv_heads;
}

/* The i-th that is looked at: those of a few lie anywhere. */
static struct part part_at(const struct bench_cell *c, uint32_t i)
{
    const uint32_t n = parts_of(c), at = (uint32_t)((uint64_t)i * 2654435761u % n);
    const uint32_t item = at / 2 / c->g->num_kv_heads;
    return (struct part){.end = at % 2,
                         .item = item,
                         .kv_head = at / 2 % c->g->num_kv_heads,
                         .n_kv = bench_context(c, item),
                         .group = c->g->num_q_heads / c->g->num_kv_heads};
}

static double read_work(const struct bench_cell *c, const struct part *p)
{
    return READ_WORK * (double)p->n_kv * (c->g->head_dim_k + c->g->head_dim_v);
}

/* Of a token, on the average. */
static double token_work(const struct bench_cell *c, const struct part *p)
{
    const double n_seen = p->n_kv - bench_item_tokens(c, p->item) / 2.0;
    return p->group * n_seen * (c->g->head_dim_k + c->g->head_dim_v);
}

/* How many parts there is time for, and tokens of each. */
static void share_out(struct check *k, uint32_t n_cores)
{
    const struct bench_cell *c = k->s->cell;
    const double all = CORE_WORK * n_cores;
    double reads = 0, tokens = 0, work = 0;
    for (uint32_t i = 0; i < parts_of(c); i++) {
        const struct part p = part_at(c, i);
        reads += read_work(c, &p);
        tokens += token_work(c, &p);
    }
    const double fit = (all - reads) / tokens;
    k->n_tokens = fit < 1 ? 1 : fit < bench_new_tokens(c) ? (uint32_t)fit : bench_new_tokens(c);
    for (k->n_parts = 0; k->n_parts < parts_of(c) && (fit >= 1 || work < all); k->n_parts++) {
        const struct part p = part_at(c, k->n_parts);
        work += read_work(c, &p) + token_work(c, &p);
    }
}

static bool read_part(const struct check *k, struct part *p)
{
    const struct bench_setup *s = k->s;
    const uint32_t d = s->cell->g->head_dim_k, dv = s->cell->g->head_dim_v;
    const uint64_t layer = k->ends[p->end]->items[p->item].layer;
    uint8_t *made = malloc(s->layout.block_bytes);
    p->k = malloc((size_t)p->n_kv * d * sizeof *p->k);
    p->v = malloc((size_t)p->n_kv * dv * sizeof *p->v);
    p->q = malloc((size_t)p->group * d * sizeof *p->q);
    p->want = malloc((size_t)p->group * dv * sizeof *p->want);
    const bool ok = made != NULL && p->k != NULL && p->v != NULL && p->q && p->want != NULL;
    for (uint32_t t = 0; ok && t < p->n_kv; t += BENCH_BLOCK_TOKENS) {
        const uint32_t rows = p->n_kv - t < BENCH_BLOCK_TOKENS ? p->n_kv - t : BENCH_BLOCK_TOKENS;
        const uint32_t id = s->tables[s->first_block[p->item] + t / BENCH_BLOCK_TOKENS];
        const uint8_t *from = bench_block(k->x, s, id, made) + layer * s->layout.layer_bytes;
        read_rows(s, from, p->kv_head, false, rows, p->k + (size_t)t * d);
        read_rows(s, from, p->kv_head, true, rows, p->v + (size_t)t * dv);
    }
    free(made);
    return ok;
}

static void free_part(struct part *p)
{
    free(p->k);
    free(p->v);
    free(p->q);
    free(p->want);
}

/* The part's heads of one token. */
static bool check_token(struct check *k, const struct part *p, uint32_t token)
{
    const struct bench_cell *c = k->s->cell;
    const uint32_t d = c->g->head_dim_k, dv = c->g->head_dim_v;
    const struct backend_item *it = &k->ends[p->end]->items[p->item];
    const size_t head = (size_t)token * c->g->num_q_heads + p->kv_head * p->group;
    const struct attn_layer_spec spec = {.scale = 1.0f / sqrtf((float)d)};
    const uint32_t pos = it->pos + token;
    for (size_t i = 0; i < (size_t)p->group * d; i++)
        p->q[i] = (float)reference_get(ATTN_BF16, it->q, head * d + i);
    if (reference_attend(&spec, p->group, 1, d, dv, ATTN_F32, p->q, 1, pos, p->k, p->v, pos + 1,
                         p->want, NULL) != ATTN_OK)
        return false;
    double most = 0, diff = 0, norm = 0;
    bool is_close = true;
    for (size_t i = 0; i < (size_t)p->group * dv; i++) {
        const double want = p->want[i], got = reference_get(ATTN_BF16, it->out, head * dv + i);
        const double error = fabs(got - want);
        most = error > most ? error : most;
        is_close = is_close && error <= 0.01 + 0.01 * fabs(want);
        diff += error * error;
        norm += want * want;
    }
    pthread_mutex_lock(&k->lock);
    k->error.n_rows_checked += p->group;
    k->error.max_abs = most > k->error.max_abs ? most : k->error.max_abs;
    k->error.is_allclose = k->error.is_allclose && is_close;
    k->diff += diff;
    k->norm += norm;
    pthread_mutex_unlock(&k->lock);
    return true;
}

/* One of [0, n), another one for each i and part. */
static uint32_t drawn(const struct part *p, uint32_t i, uint32_t n)
{
    uint64_t x =
        ((uint64_t)p->item << 40) + ((uint64_t)p->kv_head << 33) + ((uint64_t)p->end << 32) + i + 1;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)((x ^ x >> 31) % n);
}

static void *check_parts(void *arg)
{
    struct check *k = arg;
    uint32_t at;
    while ((at = atomic_fetch_add(&k->next, 1)) < k->n_parts) {
        struct part p = part_at(k->s->cell, at);
        const uint32_t n_all = bench_item_tokens(k->s->cell, p.item);
        const uint32_t n = k->n_tokens < n_all ? k->n_tokens : n_all;
        bool ok = read_part(k, &p);
        for (uint32_t i = 0; ok && i < n; i++) {
            const uint32_t first = (uint32_t)((uint64_t)i * n_all / n);
            const uint32_t past = (uint32_t)((uint64_t)(i + 1) * n_all / n);
            ok = check_token(k, &p, first + drawn(&p, i, past - first));
        }
        free_part(&p);
        pthread_mutex_lock(&k->lock);
        k->is_without_memory |= !ok;
        pthread_mutex_unlock(&k->lock);
    }
    return NULL;
}

/* Looks at all of it, for what is no number. */
static bool is_finite(const struct bench_cell *c, struct backend_batch *const ends[2])
{
    bool is_so = true;
    for (uint32_t i = 0; i < 2 * c->batch; i++) {
        const uint16_t *o = ends[i / c->batch]->items[i % c->batch].out;
        const size_t n =
            (size_t)c->g->num_q_heads * c->g->head_dim_v * bench_item_tokens(c, i % c->batch);
        for (size_t j = 0; j < n; j++)
            is_so &= (o[j] & 0x7f80) != 0x7f80;
    }
    return is_so;
}

static uint32_t cores(void)
{
    const long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n < MAX_CORES ? (uint32_t)n : MAX_CORES;
}

bool bench_check(struct bench *x, struct bench_setup *s, const char *variant,
                 struct bench_error *out)
{
    const struct bench_cell *c = s->cell;
    const size_t q_bytes =
        (size_t)c->g->num_q_heads * c->g->head_dim_k * 2 * bench_new_tokens(c) * c->batch;
    struct check k = {.x = x, .s = s, .ends = {s->list[0], s->list[s->n_layers - 1]}};
    pthread_t threads[MAX_CORES];
    uint32_t n_threads = 0;
    uint64_t ns[2];
    memset(s->host + q_bytes, 0xff, s->host_bytes - q_bytes);
    if (x->own->time_batch(x->b, variant, k.ends, 2, 2, false, ns) != ATTN_OK) {
        snprintf(x->error, sizeof x->error, "computing a batch to check: %s",
                 x->ops->last_error(x->b));
        return false;
    }
    k.error.is_allclose = is_finite(c, k.ends);
    for (uint32_t i = 0; i < c->batch; i++)
        k.error.n_rows += 2ull * bench_item_tokens(c, i) * c->g->num_q_heads;
    share_out(&k, cores());
    pthread_mutex_init(&k.lock, NULL);
    while (n_threads + 1 < cores() &&
           pthread_create(&threads[n_threads], NULL, check_parts, &k) == 0)
        n_threads++;
    check_parts(&k);
    while (n_threads > 0)
        pthread_join(threads[--n_threads], NULL);
    pthread_mutex_destroy(&k.lock);
    if (k.is_without_memory) {
        snprintf(x->error, sizeof x->error, "no memory for the reference");
        return false;
    }
    *out = k.error;
    out->l2 = k.norm > 0 ? sqrt(k.diff / k.norm) : 0;
    return true;
}
