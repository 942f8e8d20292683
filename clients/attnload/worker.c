/* worker.c: what a worker's loops are made of: the step of a work, with its q, k and v made in
 * place and its outputs offered for verification; opening and closing sequences; counting.
 */
#include "clients/attnload/worker.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define GRACE_NS 1000000000u
#define MIN_WAIT_NS 1000000u /* before a refused step is tried again */

void worker_sleep(uint64_t ns)
{
    struct timespec ts = {.tv_sec = (time_t)(ns / 1000000000u),
                          .tv_nsec = (long)(ns % 1000000000u)};
    nanosleep(&ts, NULL);
}

bool worker_fail(struct worker *w, attn_status st, const char *what)
{
    w->failure = st != ATTN_OK ? st : ATTN_EINTERNAL;
    snprintf(w->why, sizeof w->why, "worker %u, %s: %s: %s", w->index, what,
             attn_status_message(w->failure), attn_last_error()->message);
    atomic_store(&w->load->is_stopping, true);
    return false;
}

static void work_fill(void *user, void *q, void *k, void *v)
{
    const struct work *x = user;
    const struct options *o = x->w->load->o;
    const struct preset *p = o->preset;
    void *const dst[] = {q, k, v};
    for (int which = DATA_Q; which <= DATA_V; which++) {
        uint32_t n_heads = which == DATA_Q ? p->num_q_heads : p->num_kv_heads;
        uint32_t dim = which == DATA_Q ? preset_dim_q(p, o->has_heads) : p->head_dim;
        size_t bytes = (size_t)x->n_tokens * n_heads * dim * attn_dtype_bytes(o->dtype);
        for (uint32_t i = 0; i < x->n && dst[which] != NULL; i++) {
            const struct stream *s = &x->streams[i];
            data_fill(&s->data, x->layer, (enum data_which)which, s->pos, x->n_tokens, 0, n_heads,
                      dim, o->dtype, (uint8_t *)dst[which] + i * bytes, x->w->client);
        }
    }
}

/* Offers one token of each stream. */
static void work_take(void *user, const void *out, const float *lse, uint32_t n_failed)
{
    const struct work *x = user;
    const struct options *o = x->w->load->o;
    const uint32_t n_heads = o->preset->num_q_heads;
    const size_t row_bytes =
        (size_t)n_heads * preset_dim_out(o->preset, o->has_heads) * attn_dtype_bytes(o->dtype);
    for (uint32_t i = 0; i < x->n && n_failed == 0; i++) {
        const struct stream *s = &x->streams[i];
        uint32_t t = (uint32_t)(data_mix(s->data.stream ^ s->pos) % x->n_tokens);
        size_t row = (size_t)i * x->n_tokens + t;
        verify_offer(&x->w->verify, &s->data, x->layer, s->pos + t,
                     (const uint8_t *)out + row * row_bytes,
                     lse != NULL ? lse + row * n_heads : NULL);
    }
}

uint64_t worker_end_ns(const struct worker *w)
{
    const struct load *l = w->load;
    if (l->o->duration_s == 0 || l->start_ns == 0)
        return UINT64_MAX;
    return l->start_ns + (uint64_t)(l->o->duration_s * 1e9);
}

bool worker_is_cut(struct worker *w, attn_status st)
{
    bool is_cut =
        attn_now_ns() >= worker_end_ns(w) && attn_status_is_retryable(st) && st != ATTN_ECONN;
    w->tally.n_unfinished += is_cut;
    return is_cut;
}

/* No step outlives the run by more than a second, not even one to a daemon that is gone. */
static uint64_t timeout_us(const struct worker *w)
{
    uint64_t end_ns = worker_end_ns(w), most_us = w->load->o->timeout_us;
    if (end_ns == UINT64_MAX)
        return most_us;
    uint64_t now = attn_now_ns(), until_ns = end_ns + GRACE_NS;
    uint64_t left_us = until_ns > now ? (until_ns - now) / 1000u : 0;
    return left_us == 0 ? 1 : left_us < most_us ? left_us : most_us;
}

/* What the queries of a sparse step visit. Without memory the library refuses the step. */
static void make_indices(struct work *x)
{
    const struct options *o = x->w->load->o;
    x->indices = calloc((size_t)x->n * x->n_tokens, o->top_k * sizeof *x->indices);
    for (uint32_t i = 0; i < x->n && x->indices != NULL; i++)
        for (uint32_t t = 0; t < x->n_tokens; t++) {
            const uint32_t pos = x->streams[i].pos + t;
            data_indices(&x->streams[i].data, x->layer, pos,
                         pos + 1 - preset_visible(o->preset, x->layer, pos), pos + 1, o->top_k,
                         x->indices + ((size_t)i * x->n_tokens + t) * o->top_k);
        }
}

void work_close(struct work *x)
{
    free(x->indices);
    x->indices = NULL;
}

struct attn_step work_step(struct work *x, struct attn_item *items, bool is_attended)
{
    for (uint32_t i = 0; i < x->n; i++)
        items[i] = (struct attn_item){
            .seq = x->streams[i].seq, .pos = x->streams[i].pos, .n_tokens = x->n_tokens};
    x->in_place = (struct attn_in_place){.is_append = true,
                                         .is_attend = is_attended,
                                         .has_lse = is_attended && x->w->load->o->n_verify > 0,
                                         .fill = work_fill,
                                         .take = work_take,
                                         .user = x};
    const uint32_t top_k = is_attended ? x->w->load->o->top_k : 0;
    if (top_k > 0)
        make_indices(x);
    return (struct attn_step){.struct_size = sizeof(struct attn_step),
                              .layer = x->layer,
                              .n_items = x->n,
                              .items = items,
                              .timeout_us = timeout_us(x->w),
                              .in_place = &x->in_place,
                              .indices = x->indices,
                              .n_indices = top_k,
                              .choose_blocks = is_attended ? x->w->load->o->choose_blocks : 0};
}

uint64_t worker_kv_bytes(const struct options *o, uint32_t layer, uint32_t pos)
{
    const struct preset *p = o->preset;
    const uint64_t elements = p->kv_lora_rank > 0 ? p->head_dim : 2ull * p->head_dim;
    uint64_t n = preset_visible(p, layer, pos);
    n = o->top_k > 0 && o->top_k < n ? o->top_k : n;
    if (o->choose_blocks > 0 && (o->choose_blocks - 1) * o->block_tokens < pos)
        n = (o->choose_blocks - 1) * o->block_tokens + pos % o->block_tokens + 1;
    return elements * n * p->num_kv_heads * attn_dtype_bits(o->kv_dtype) / 8;
}

void tally_fini(struct tally *t)
{
    for (size_t i = 0; i < TALLY_N_TIMES; i++)
        histogram_fini(&t->times[i]);
}

void tally_step(struct tally *t, const struct attn_result *r, uint64_t total_ns, uint32_t n_items)
{
    histogram_add(&t->times[TIME_TOTAL], total_ns);
    histogram_add(&t->times[TIME_QUEUE], r->queue_ns);
    histogram_add(&t->times[TIME_DEVICE], r->device_ns);
    histogram_add(&t->times[TIME_ADDED], total_ns > r->device_ns ? total_ns - r->device_ns : 0);
    t->n_steps++;
    t->n_items += n_items;
}

bool tally_refusal(struct tally *t, attn_status st, uint64_t retry_after_us, uint64_t *out_wait_ns)
{
    int i = -(int)st;
    if (i > 0 && i < TALLY_N_STATUS)
        t->refused[i]++;
    uint64_t ns = retry_after_us * 1000u;
    *out_wait_ns = ns > MIN_WAIT_NS ? ns : MIN_WAIT_NS;
    return attn_status_is_retryable(st) && st != ATTN_ETIMEDOUT && st != ATTN_ECONN;
}

/* Whether a call is to be made again, which it is after a pause. False: what it gave stands. */
static bool may_try_again(struct worker *w, attn_status st, uint64_t end_ns)
{
    uint64_t wait_ns;
    if (st == ATTN_OK ||
        !tally_refusal(&w->tally, st, attn_last_error()->retry_after_us, &wait_ns) ||
        attn_now_ns() > end_ns)
        return false;
    worker_sleep(wait_ns);
    return true;
}

bool worker_open(struct worker *w, const struct attn_tokens *t, struct attn_seq *seq,
                 uint32_t *out_cached)
{
    uint64_t end_ns = attn_now_ns() + w->load->o->timeout_us * 1000u;
    const struct attn_tokens nothing = {0};
    attn_status st;
    do
        st = attn_seq_open_with(w->pool, seq->id, t != NULL ? t : &nothing, 0, seq, out_cached);
    while (may_try_again(w, st, end_ns));
    return st == ATTN_OK || worker_fail(w, st, "open a sequence");
}

bool worker_close(struct worker *w, const struct attn_seq *seq)
{
    uint64_t end_ns = attn_now_ns() + w->load->o->timeout_us * 1000u;
    attn_status st;
    do
        st = attn_seq_close(w->pool, seq, 0);
    while (may_try_again(w, st, end_ns));
    return st == ATTN_OK || worker_fail(w, st, "close a sequence");
}
