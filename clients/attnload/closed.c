/* closed.c: the closed loop: one message a layer with all of a worker's sequences, the next one
 * when it is answered; and the filling of contexts before any loop.
 *
 * A worker's sequences are at different tokens of their --steps, evenly spread, from the first step
 * on, as a decode worker's are. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clients/attnload/worker.h"

/* The same step until it is done or cannot be: appends name their position, so this is harmless.
 * False without worker_fail: the time is over. */
static bool step_until_done(struct worker *w, struct attn_step *s, struct attn_result *out_result,
                            const char *what)
{
    uint64_t end_ns = attn_now_ns() + w->load->o->timeout_us * 1000u, wait_ns;
    for (;;) {
        *out_result = (struct attn_result){.struct_size = sizeof *out_result};
        attn_status st = attn_step(w->pool, s, out_result);
        if (st == ATTN_OK)
            return true;
        if (worker_is_cut(w, st))
            return false;
        if (!tally_refusal(&w->tally, st, out_result->retry_after_us, &wait_ns) ||
            attn_now_ns() > end_ns)
            return worker_fail(w, st, what);
        worker_sleep(wait_ns);
    }
}

static bool fill_chunk(struct worker *w, struct stream *s, uint32_t n_tokens)
{
    const struct options *o = w->load->o;
    for (uint32_t layer = 0; layer < o->n_layers; layer++) {
        struct work x = {.w = w, .streams = s, .n = 1, .layer = layer, .n_tokens = n_tokens};
        struct attn_item item;
        struct attn_step step = work_step(&x, &item, o->is_prompt_attended);
        struct attn_result r;
        w->tally.n_prompt_steps++;
        const bool is_done = step_until_done(w, &step, &r, "a prompt chunk");
        work_close(&x);
        if (!is_done)
            return false;
    }
    s->pos += n_tokens;
    w->tally.n_prompt_tokens += n_tokens;
    atomic_fetch_add(&w->load->n_prompt_tokens, n_tokens);
    return true;
}

bool closed_fill(struct worker *w, struct stream *s, uint32_t n, uint32_t spread)
{
    const struct options *o = w->load->o;
    bool is_ok = true;
    for (uint32_t end = 0; is_ok && end < o->context + spread;) {
        end += o->chunk;
        for (uint32_t i = 0; is_ok && i < n && !worker_is_stopping(w); i++) {
            uint32_t full = o->context + (uint32_t)((uint64_t)i * spread / n);
            uint32_t stop = full < end ? full : end;
            if (s[i].pos < stop)
                is_ok = fill_chunk(w, &s[i], stop - s[i].pos);
        }
    }
    return is_ok && !worker_is_stopping(w);
}

/* One token of every sequence, through all layers. A sequence that has made its --steps tokens
 * begins again at its context and writes the same ones in their places: decode workers don't
 * truncate. */
static bool run_token(struct worker *w, struct stream *s, uint32_t n, struct attn_item *items)
{
    const struct options *o = w->load->o;
    for (uint32_t layer = 0; layer < o->n_layers; layer++) {
        struct work x = {.w = w, .streams = s, .n = n, .layer = layer, .n_tokens = 1};
        struct attn_step step = work_step(&x, items, true);
        struct attn_result r;
        const bool is_done = step_until_done(w, &step, &r, "a step");
        work_close(&x);
        if (!is_done)
            return false;
        tally_step(&w->tally, &r, r.total_ns, n);
        for (uint32_t i = 0; i < n; i++)
            w->tally.kv_bytes += worker_kv_bytes(o, layer, s[i].pos);
    }
    for (uint32_t i = 0; i < n; i++)
        if (++s[i].pos == o->context + o->steps)
            s[i].pos = o->context;
    atomic_fetch_add(&w->load->n_steps, o->n_layers);
    return true;
}

bool closed_run(struct worker *w, struct stream *s, uint32_t n)
{
    const struct options *o = w->load->o;
    uint64_t end_ns = worker_end_ns(w);
    struct attn_item *items = calloc(n, sizeof *items);
    bool is_ok = items != NULL || worker_fail(w, ATTN_ENOMEM, "items");
    bool is_over = false;
    for (uint32_t n_left = o->steps; is_ok && !is_over;) {
        is_ok = run_token(w, s, n, items);
        is_over =
            worker_is_stopping(w) || (o->duration_s > 0 ? attn_now_ns() >= end_ns : --n_left == 0);
    }
    free(items);
    return w->failure == ATTN_OK;
}
