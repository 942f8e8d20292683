/* flow.c: the open loop and traces: many sequences a worker, each with at most one step in flight.
 *
 * A flow is one sequence on its way: prompt chunks, then tokens, each through all layers.
 * Completion callbacks only mark it; the worker's loop does the rest.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clients/attnload/worker.h"

#define LOOP_US 50000 /* longest sleep, to look at is_stopping */

struct flow {
    struct worker *w;
    struct stream stream;
    struct work work; /* of the step in flight */
    struct attn_item item;
    struct attn_result result;
    uint32_t n_prompt, n_total; /* tokens */
    uint32_t n_tokens, layer; /* what comes next or is in flight, from stream.pos on */
    uint64_t arrival_ns; /* of the request */
    uint64_t due_ns; /* of the token */
    uint64_t step_ns; /* when the step in flight began, or was due */
    uint64_t not_before_ns; /* after a refusal */
    uint64_t give_up_ns;
    bool is_active; /* holds a sequence */
    bool has_work; /* a token or prompt is due */
    bool is_planned; /* and has not been sent yet */
    bool is_in_flight, is_answered;
};

static void on_answer(void *user, attn_ticket ticket, const struct attn_result *r)
{
    struct flow *f = user;
    (void)ticket;
    f->result = *r;
    f->is_answered = true;
}

static bool flow_start(struct flow *f)
{
    struct worker *w = f->w;
    const struct options *o = w->load->o;
    bool is_prompt = f->stream.pos < f->n_prompt, is_attended = !is_prompt || o->is_prompt_attended;
    f->work = (struct work){
        .w = w, .streams = &f->stream, .n = 1, .layer = f->layer, .n_tokens = f->n_tokens};
    struct attn_step step = work_step(&f->work, &f->item, is_attended);
    f->is_answered = false;
    if (f->is_planned)
        histogram_add(&w->tally.times[TIME_LATE], attn_now_ns() - f->due_ns);
    f->is_planned = false;
    attn_status st = attn_step_start(w->pool, &step, on_answer, f, NULL);
    if (st != ATTN_OK)
        return worker_fail(w, st, "start a step");
    f->is_in_flight = true;
    return true;
}

static void set_next_chunk(struct flow *f)
{
    uint32_t pos = f->stream.pos, chunk = f->w->load->o->chunk;
    uint32_t left = f->n_prompt > pos ? f->n_prompt - pos : 0;
    f->layer = 0;
    f->n_tokens = left == 0 ? 1 : left < chunk ? left : chunk;
}

/* Counts the answer and moves on; has_work goes off when a token (or the prompt) is through. */
static bool flow_take_answer(struct flow *f)
{
    struct worker *w = f->w;
    const struct options *o = w->load->o;
    uint64_t now = attn_now_ns(), wait_ns;
    bool is_prompt = f->stream.pos < f->n_prompt;
    f->is_in_flight = f->is_answered = false;
    work_close(&f->work);
    if (f->result.status != ATTN_OK && worker_is_cut(w, f->result.status)) {
        f->has_work = false;
        return true;
    }
    if (f->result.status != ATTN_OK) {
        bool may_retry =
            tally_refusal(&w->tally, f->result.status, f->result.retry_after_us, &wait_ns) &&
            now < f->give_up_ns;
        f->not_before_ns = now + wait_ns;
        if (may_retry)
            return true;
        worker_fail(w, f->result.status, "a step");
        snprintf(w->why, sizeof w->why, "worker %u, a step: %s", w->index, f->result.message);
        return false;
    }
    f->give_up_ns = now + o->timeout_us * 1000u;
    if (is_prompt) {
        w->tally.n_prompt_steps++;
    } else {
        tally_step(&w->tally, &f->result, now - f->step_ns, 1);
        w->tally.kv_bytes += worker_kv_bytes(o, f->layer, f->stream.pos);
        atomic_fetch_add(&w->load->n_steps, 1);
    }
    f->step_ns = now;
    if (++f->layer < o->n_layers)
        return true;
    f->stream.pos += f->n_tokens;
    if (is_prompt) {
        w->tally.n_prompt_tokens += f->n_tokens;
        atomic_fetch_add(&w->load->n_prompt_tokens, f->n_tokens);
        if (f->stream.pos == f->n_prompt)
            histogram_add(&w->tally.times[TIME_TTFT], now - f->arrival_ns);
    } else {
        histogram_add(&w->tally.times[TIME_TOKEN], now - f->due_ns);
        f->has_work = false;
    }
    f->due_ns = now;
    set_next_chunk(f);
    return true;
}

/* Starts what can start, takes what is answered. *wake_ns comes down to the next retry. */
static bool drive(struct flow *flows, uint32_t n, uint64_t *wake_ns)
{
    for (uint32_t i = 0; i < n; i++) {
        struct flow *f = &flows[i];
        if (f->is_in_flight && f->is_answered && !flow_take_answer(f))
            return false;
        if (!f->is_active || !f->has_work || f->is_in_flight)
            continue;
        if (f->not_before_ns > attn_now_ns())
            *wake_ns = f->not_before_ns < *wake_ns ? f->not_before_ns : *wake_ns;
        else if (!flow_start(f))
            return false;
    }
    return true;
}

static bool loop_wait(struct worker *w, uint64_t wake_ns)
{
    uint64_t now = attn_now_ns(), us = wake_ns > now ? (wake_ns - now) / 1000u : 0;
    attn_status st = attn_client_poll(w->client, us < LOOP_US ? us : LOOP_US, NULL);
    return st == ATTN_OK || worker_fail(w, st, "poll");
}

static bool any_answered(const struct flow *flows, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        if (flows[i].is_in_flight && flows[i].is_answered)
            return true;
    }
    return false;
}

static struct flow *flows_open(struct worker *w, uint32_t n)
{
    struct flow *flows = calloc(n, sizeof *flows);
    for (uint32_t i = 0; flows != NULL && i < n; i++) {
        flows[i].w = w;
        flows[i].give_up_ns = UINT64_MAX;
    }
    if (flows == NULL)
        worker_fail(w, ATTN_ENOMEM, "flows");
    return flows;
}

/* Waits for steps in flight: they borrow the flows. */
static void flows_close(struct worker *w, struct flow *flows, uint32_t n)
{
    for (uint32_t i = 0; flows != NULL && i < n; i++) {
        while (flows[i].is_in_flight && !flows[i].is_answered &&
               attn_client_poll(w->client, LOOP_US, NULL) == ATTN_OK)
            ;
        work_close(&flows[i].work);
    }
    free(flows);
}

/* ---- open loop ---- */

/* An idle flow for a token that is due; at its end it writes the same tokens again, from its
 * context on. */
static struct flow *next_idle(struct flow *flows, uint32_t n, uint32_t *cursor)
{
    for (uint32_t i = 0; i < n; i++) {
        struct flow *f = &flows[(*cursor + i) % n];
        if (f->has_work)
            continue;
        *cursor = (*cursor + i + 1) % n;
        if (f->stream.pos == f->n_total)
            f->stream.pos = f->n_prompt;
        return f;
    }
    return NULL;
}

bool open_run(struct worker *w, struct stream *s, uint32_t n)
{
    const struct options *o = w->load->o;
    uint64_t start_ns = w->load->start_ns, end_ns = worker_end_ns(w);
    uint64_t n_left = (uint64_t)n * o->steps;
    struct arrivals arrivals;
    arrivals_init(&arrivals, &o->arrivals, o->rate, o->seed, w->index, o->n_workers);
    uint32_t cursor = 0, n_busy = 0;
    struct flow *flows = flows_open(w, n), *f;
    bool is_ok = w->failure == ATTN_OK;
    for (uint32_t i = 0; is_ok && i < n; i++) {
        f = &flows[i];
        f->stream = s[i];
        f->n_prompt = o->context;
        f->n_total = o->context + o->steps;
        f->n_tokens = 1;
        f->is_active = true;
    }
    uint64_t due_ns = start_ns + arrivals_next(&arrivals);
    while (is_ok && !worker_is_stopping(w) && (n_left > 0 || n_busy > 0)) {
        uint64_t now = attn_now_ns(), wake_ns = UINT64_MAX;
        if (now >= end_ns &&
            due_ns < end_ns) { /* what could not be sent in time; as many as planned */
            double left_s = (double)(end_ns - due_ns) * 1e-9;
            w->tally.n_unsent += (uint64_t)(left_s * o->rate / o->n_workers) + 1;
            due_ns = end_ns;
        }
        if (o->duration_s > 0)
            n_left = due_ns < end_ns ? 1 : 0; /* time alone ends it */
        while (n_left > 0 && due_ns <= now && (f = next_idle(flows, n, &cursor)) != NULL) {
            f->has_work = f->is_planned = true;
            f->due_ns = f->step_ns = due_ns; /* what waited for a free sequence counts as late */
            due_ns = start_ns + arrivals_next(&arrivals);
            n_left = o->duration_s > 0 ? due_ns < end_ns : n_left - 1;
        }
        is_ok = drive(flows, n, &wake_ns);
        n_busy = 0;
        for (uint32_t i = 0; i < n; i++)
            n_busy += flows[i].has_work;
        if (n_left > 0 && n_busy < n && due_ns < wake_ns)
            wake_ns = due_ns;
        if (is_ok && (n_left > 0 || n_busy > 0) && !any_answered(flows, n))
            is_ok = loop_wait(w, wake_ns);
    }
    flows_close(w, flows, n);
    return is_ok;
}

/* ---- traces ---- */

/* Opens a request's sequence with the tokens of its blocks, and sets where it begins. */
static bool open_of_trace(struct worker *w, const struct trace_request *r, struct stream *s)
{
    uint64_t n = (uint64_t)s->data.n_blocks * s->data.block_tokens;
    struct attn_tokens t = {.n = n < r->n_input ? (uint32_t)n : r->n_input};
    uint32_t *ids = malloc((t.n > 0 ? t.n : 1) * sizeof *ids);
    if (ids == NULL)
        return worker_fail(w, ATTN_ENOMEM, "token ids");
    for (uint32_t i = 0; i < t.n; i++)
        ids[i] = (uint32_t)data_mix(data_mix(s->data.blocks[i / s->data.block_tokens]) ^
                                    i % s->data.block_tokens);
    t.ids = ids;
    bool is_ok = worker_open(w, &t, &s->seq, &s->pos);
    free(ids);
    if (is_ok)
        w->tally.n_cached_tokens += s->pos;
    return is_ok;
}

/* Gives request `index` to a free flow. */
static bool admit(struct worker *w, struct flow *f, uint32_t index)
{
    const struct trace_request *r = &w->load->trace.requests[index];
    uint64_t now = attn_now_ns();
    f->arrival_ns = w->load->start_ns + r->arrival_us * 1000u;
    f->stream.seq = (struct attn_seq){.id = w->load->id_base + index};
    f->stream.data = (struct data_stream){.seed = w->load->o->seed,
                                          .stream = index,
                                          .blocks = w->load->trace.blocks + r->first_block,
                                          .n_blocks = r->n_blocks,
                                          .block_tokens = w->load->trace.block_tokens};
    if (!open_of_trace(w, r, &f->stream))
        return false;
    f->is_planned = true;
    f->n_prompt = r->n_input;
    f->n_total = r->n_input + r->n_output;
    f->is_active = true;
    f->due_ns = f->arrival_ns; /* the first step counts from when it was planned */
    f->step_ns = now;
    f->not_before_ns = 0;
    f->give_up_ns = now + w->load->o->timeout_us * 1000u;
    set_next_chunk(f);
    return true;
}

/* Closes what is through, sets the others to work. */
static bool retire(struct worker *w, struct flow *flows, uint32_t n, uint32_t *out_n_active)
{
    *out_n_active = 0;
    for (uint32_t i = 0; i < n; i++) {
        struct flow *f = &flows[i];
        if (!f->is_active)
            continue;
        f->has_work = true;
        if (f->stream.pos < f->n_total) {
            *out_n_active += 1;
            continue;
        }
        f->is_active = f->has_work = false;
        w->tally.n_requests++;
        atomic_fetch_add(&w->load->n_requests, 1);
        if (!worker_close(w, &f->stream.seq))
            return false;
    }
    return true;
}

/* Worker i takes requests i, i + n_workers, ... in order of arrival. */
bool replay_run(struct worker *w)
{
    const struct options *o = w->load->o;
    const struct trace *t = &w->load->trace;
    uint32_t n = o->n_sequences, next = w->index, n_active = 0;
    struct flow *flows = flows_open(w, n);
    bool is_ok = w->failure == ATTN_OK;
    while (is_ok && !worker_is_stopping(w) && (next < t->n || n_active > 0)) {
        uint64_t now = attn_now_ns(), wake_ns = UINT64_MAX;
        for (uint32_t i = 0; is_ok && i < n && next < t->n; i++) {
            uint64_t arrival_ns = w->load->start_ns + t->requests[next].arrival_us * 1000u;
            if (arrival_ns > now) {
                wake_ns = arrival_ns;
                break;
            }
            if (flows[i].is_active)
                continue;
            is_ok = admit(w, &flows[i], next);
            next += o->n_workers;
        }
        is_ok = is_ok && drive(flows, n, &wake_ns) && retire(w, flows, n, &n_active) &&
                drive(flows, n, &wake_ns);
        if (is_ok && (next < t->n || n_active > 0) && !any_answered(flows, n) &&
            (n_active > 0 || wake_ns != UINT64_MAX))
            is_ok = loop_wait(w, wake_ns);
    }
    flows_close(w, flows, n);
    return is_ok;
}
