/* closed.c: the closed loop: one message a layer with all of a worker's sequences, the next one when
 * it is answered; and the filling of contexts before any loop. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clients/attnload/worker.h"

/* The same step until it is done or cannot be: appends name their position, so this is harmless. */
static bool step_until_done(struct worker *w, struct attn_step *s, struct attn_result *out_result,
                            const char *what)
{
    uint64_t end_ns = worker_now_ns() + w->load->o->timeout_us * 1000u, wait_ns;
    for (;;) {
        *out_result = (struct attn_result){.struct_size = sizeof *out_result};
        attn_status st = attn_step(w->pool, s, out_result);
        if (st == ATTN_OK)
            return true;
        if (!tally_refusal(&w->tally, st, out_result->retry_after_us, &wait_ns) ||
            worker_now_ns() > end_ns)
            return worker_fail(w, st, what);
        worker_sleep(wait_ns);
    }
}

static bool is_stopping(struct worker *w)
{
    return atomic_load_explicit(&w->load->is_stopping, memory_order_relaxed);
}

static bool fill_chunk(struct worker *w, struct stream *s, struct buffers *b, uint32_t layer,
                       uint32_t pos, uint32_t n)
{
    const struct options *o = w->load->o;
    struct attn_item item = {.seq = s->seq, .pos = pos, .n_tokens = n};
    struct attn_step step = {.struct_size = sizeof step,
                             .layer = layer,
                             .n_items = 1,
                             .items = &item,
                             .k = b->k,
                             .v = b->v};
    struct attn_result r;
    buffers_fill(b, o, &s->data, layer, pos, n, 0);
    if (o->is_prompt_attended) {
        step.q = b->q;
        step.out = b->out;
        step.lse = b->lse;
    }
    if (!step_until_done(w, &step, &r, "a prompt chunk"))
        return false;
    w->tally.n_prompt_steps++;
    if (o->is_prompt_attended) {
        uint32_t t = (uint32_t)(data_mix(s->data.stream ^ pos) % n);
        verify_offer(&w->verify, &s->data, layer, pos + t, b->out + t * b->q_row,
                     buffers_lse(b, o, t));
    }
    return true;
}

bool closed_fill(struct worker *w, struct stream *s, uint32_t n)
{
    const struct options *o = w->load->o;
    struct buffers b;
    bool is_ok = buffers_init(&b, o, o->chunk) || worker_fail(w, ATTN_ENOMEM, "buffers");
    for (uint32_t pos = 0; is_ok && pos < o->context; pos += o->chunk) {
        uint32_t n_tokens = o->context - pos < o->chunk ? o->context - pos : o->chunk;
        for (uint32_t i = 0; is_ok && i < n && !is_stopping(w); i++) {
            for (uint32_t layer = 0; is_ok && layer < o->n_layers; layer++)
                is_ok = fill_chunk(w, &s[i], &b, layer, pos, n_tokens);
            w->tally.n_prompt_tokens += n_tokens;
            atomic_fetch_add(&w->load->n_prompt_tokens, n_tokens);
        }
    }
    buffers_fini(&b);
    return is_ok && !is_stopping(w);
}

/* One token of every sequence, through all layers. */
static bool run_token(struct worker *w, struct stream *s, uint32_t n, struct attn_item *items,
                      struct buffers *b, uint32_t pos)
{
    const struct options *o = w->load->o;
    for (uint32_t layer = 0; layer < o->n_layers; layer++) {
        for (uint32_t i = 0; i < n; i++) {
            items[i] = (struct attn_item){.seq = s[i].seq, .pos = pos, .n_tokens = 1};
            buffers_fill(b, o, &s[i].data, layer, pos, 1, i);
        }
        struct attn_step step = {.struct_size = sizeof step,
                                 .layer = layer,
                                 .n_items = n,
                                 .items = items,
                                 .q = b->q,
                                 .k = b->k,
                                 .v = b->v,
                                 .out = b->out,
                                 .lse = b->lse};
        struct attn_result r;
        if (!step_until_done(w, &step, &r, "a step"))
            return false;
        tally_step(&w->tally, &r, r.total_ns, n);
        w->tally.kv_bytes += n * worker_kv_bytes(o, layer, pos);
        for (uint32_t i = 0; i < n; i++)
            verify_offer(&w->verify, &s[i].data, layer, pos, b->out + i * b->q_row,
                         buffers_lse(b, o, i));
    }
    atomic_fetch_add(&w->load->n_steps, o->n_layers);
    return true;
}

bool closed_run(struct worker *w, struct stream *s, uint32_t n)
{
    const struct options *o = w->load->o;
    uint64_t end_ns = w->load->start_ns + (uint64_t)(o->duration_s * 1e9);
    struct attn_item *items = calloc(n, sizeof *items);
    struct buffers b;
    bool is_ok =
        (buffers_init(&b, o, n) && items != NULL) || worker_fail(w, ATTN_ENOMEM, "buffers");
    bool is_over = false;
    for (uint32_t round = 0; is_ok && !is_over; round++) {
        for (uint32_t i = 0; is_ok && i < n && round > 0; i++)
            is_ok = worker_seq(w, WORKER_TRUNCATE, o->context, &s[i].seq);
        for (uint32_t i = 0; is_ok && i < o->steps && !is_over; i++) {
            is_ok = run_token(w, s, n, items, &b, o->context + i);
            is_over = is_stopping(w) || (o->duration_s > 0 && worker_now_ns() >= end_ns);
        }
        is_over |= o->duration_s <= 0;
    }
    buffers_fini(&b);
    free(items);
    return is_ok;
}
