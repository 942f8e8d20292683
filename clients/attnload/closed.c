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

static bool fill_chunk(struct worker *w, const struct stream *s, uint32_t layer, uint32_t pos,
                       uint32_t n_tokens)
{
    struct work x = {
        .w = w, .streams = s, .n = 1, .layer = layer, .pos = pos, .n_tokens = n_tokens};
    struct attn_item item;
    struct attn_step step = work_step(&x, &item, w->load->o->is_prompt_attended);
    struct attn_result r;
    w->tally.n_prompt_steps++;
    return step_until_done(w, &step, &r, "a prompt chunk");
}

bool closed_fill(struct worker *w, struct stream *s, uint32_t n)
{
    const struct options *o = w->load->o;
    bool is_ok = true;
    for (uint32_t pos = 0; is_ok && pos < o->context; pos += o->chunk) {
        uint32_t n_tokens = o->context - pos < o->chunk ? o->context - pos : o->chunk;
        for (uint32_t i = 0; is_ok && i < n && !is_stopping(w); i++) {
            for (uint32_t layer = 0; is_ok && layer < o->n_layers; layer++)
                is_ok = fill_chunk(w, &s[i], layer, pos, n_tokens);
            w->tally.n_prompt_tokens += n_tokens;
            atomic_fetch_add(&w->load->n_prompt_tokens, n_tokens);
        }
    }
    return is_ok && !is_stopping(w);
}

/* One token of every sequence, through all layers. */
static bool run_token(struct worker *w, const struct stream *s, uint32_t n, struct attn_item *items,
                      uint32_t pos)
{
    const struct options *o = w->load->o;
    for (uint32_t layer = 0; layer < o->n_layers; layer++) {
        struct work x = {.w = w, .streams = s, .n = n, .layer = layer, .pos = pos, .n_tokens = 1};
        struct attn_step step = work_step(&x, items, true);
        struct attn_result r;
        if (!step_until_done(w, &step, &r, "a step"))
            return false;
        tally_step(&w->tally, &r, r.total_ns, n);
        w->tally.kv_bytes += n * worker_kv_bytes(o, layer, pos);
    }
    atomic_fetch_add(&w->load->n_steps, o->n_layers);
    return true;
}

bool closed_run(struct worker *w, struct stream *s, uint32_t n)
{
    const struct options *o = w->load->o;
    uint64_t end_ns = w->load->start_ns + (uint64_t)(o->duration_s * 1e9);
    struct attn_item *items = calloc(n, sizeof *items);
    bool is_ok = items != NULL || worker_fail(w, ATTN_ENOMEM, "items");
    bool is_over = false;
    for (uint32_t round = 0; is_ok && !is_over; round++) {
        for (uint32_t i = 0; is_ok && i < n && round > 0; i++)
            is_ok = worker_seq(w, WORKER_TRUNCATE, o->context, &s[i].seq);
        for (uint32_t i = 0; is_ok && i < o->steps && !is_over; i++) {
            is_ok = run_token(w, s, n, items, o->context + i);
            is_over = is_stopping(w) || (o->duration_s > 0 && worker_now_ns() >= end_ns);
        }
        is_over |= o->duration_s <= 0;
    }
    free(items);
    return is_ok;
}
