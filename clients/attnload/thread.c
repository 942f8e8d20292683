/* thread.c: a worker thread from start to end: connects, opens and fills its sequences, runs the
 * loop that was asked for, closes, verifies. Barriers keep the phases of all workers together.
 */
#include <stdio.h>
#include <stdlib.h>

#include "clients/attnload/worker.h"

/* Creates (or finds) the run's pool. */
static attn_status pool_create(attn_client *c, const struct load *load, attn_pool **out_pool)
{
    const struct options *o = load->o;
    struct attn_layer layers[PRESET_MAX_LAYERS];
    char name[128];
    /* the name says all that differs, so that runs alike share a pool */
    int n = snprintf(name, sizeof name, "attnload-%s-%u-%s-%s-%s-%ux%u", o->preset->name,
                     o->n_layers, attn_dtype_name(o->dtype), attn_dtype_name(o->kv_dtype),
                     attn_split_name(o->split), load->n_blocks, o->block_tokens);
    if (o->has_heads) /* weights are of the seed */
        snprintf(name + n, sizeof name - (size_t)n, "-heads%u", o->seed);
    for (uint32_t i = 0; i < o->n_layers; i++)
        layers[i] = preset_layer(o->preset, i);
    struct attn_pool_spec spec = {.struct_size = sizeof spec,
                                  .layer_struct_size = sizeof layers[0],
                                  .name = name,
                                  .num_layers = o->n_layers,
                                  .num_q_heads = o->preset->num_q_heads,
                                  .num_kv_heads = o->preset->num_kv_heads,
                                  .head_dim_k = o->preset->head_dim,
                                  .head_dim_v = preset_dim_v(o->preset),
                                  .is_v_in_k = o->preset->kv_lora_rank > 0,
                                  .q_nope_dim = o->has_heads ? o->preset->qk_nope_head_dim : 0,
                                  .out_dim = o->has_heads ? o->preset->v_head_dim : 0,
                                  .block_tokens = o->block_tokens,
                                  .n_blocks = load->n_blocks,
                                  .q_dtype = o->dtype,
                                  .kv_dtype = o->kv_dtype,
                                  .split = o->split,
                                  .n_layers = o->n_layers,
                                  .layers = layers,
                                  .model = o->preset->name};
    attn_status st = attn_pool_create(c, &spec, o->timeout_us, out_pool);
    const uint64_t bytes = (uint64_t)spec.num_q_heads * (spec.q_nope_dim + spec.out_dim) *
                           spec.head_dim_v * attn_dtype_bytes(o->dtype);
    for (uint32_t i = 0; o->has_heads && i < o->n_layers && st == ATTN_OK; i++)
        st = attn_pool_weights(*out_pool, i, load->weights, bytes);
    return st;
}

static bool connect_worker(struct worker *w)
{
    const struct options *o = w->load->o;
    struct attn_client_options co = {
        .struct_size = sizeof co, .timeout_us = o->timeout_us, .client_name = "attnload"};
    uint32_t n_verify = (o->n_verify + o->n_workers - 1) / o->n_workers;
    if (verify_init(&w->verify, o, w->load->weights, n_verify, data_mix(o->seed ^ w->index)) !=
        ATTN_OK)
        return worker_fail(w, ATTN_ENOMEM, "verification");
    attn_status st = attn_client_open(o->endpoint, &co, o->timeout_us, &w->client);
    if (st != ATTN_OK)
        return worker_fail(w, st, "connect");
    struct attn_client_info info = {.struct_size = sizeof info};
    attn_client_info(w->client, &info);
    if (o->trace == NULL && o->n_sequences > info.max_step_items) {
        w->failure = ATTN_EINVAL;
        snprintf(w->why, sizeof w->why, "--sequences %u: the daemon takes %u items a step",
                 o->n_sequences, info.max_step_items);
        atomic_store(&w->load->is_stopping, true);
        return false;
    }
    st = pool_create(w->client, w->load, &w->pool);
    return st == ATTN_OK || worker_fail(w, st, "create the pool");
}

static bool open_streams(struct worker *w, struct stream *s, uint32_t n)
{
    const struct options *o = w->load->o;
    uint32_t n_cached;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t stream = (uint64_t)w->index * o->n_sequences + i;
        s[i].data = (struct data_stream){.seed = o->seed, .stream = stream};
        s[i].seq.id = w->load->id_base + stream;
        if (!worker_open(w, NULL, &s[i].seq, &n_cached))
            return false;
    }
    return true;
}

void *worker_main(void *arg)
{
    struct worker *w = arg;
    const struct options *o = w->load->o;
    bool is_trace = o->trace != NULL;
    struct stream *s = calloc(o->n_sequences, sizeof *s);
    bool is_ok = s != NULL ? connect_worker(w) : worker_fail(w, ATTN_ENOMEM, "sequences");
    if (is_ok && !is_trace)
        is_ok = open_streams(w, s, o->n_sequences) &&
                closed_fill(w, s, o->n_sequences, o->rate > 0 ? 0 : o->steps);
    w->tally.filled_ns = attn_now_ns();
    atomic_fetch_add(&w->load->n_ready, 1);
    pthread_barrier_wait(&w->load->barrier); /* start_ns is set from here on */
    if (is_ok && is_trace)
        is_ok = replay_run(w);
    else if (is_ok && o->rate > 0)
        is_ok = open_run(w, s, o->n_sequences);
    else if (is_ok)
        is_ok = closed_run(w, s, o->n_sequences);
    w->tally.end_ns = attn_now_ns();
    atomic_fetch_add(&w->load->n_finished, 1);
    pthread_barrier_wait(&w->load->barrier);

    /* What is not closed ends with its lease: no waiting for a daemon that is gone. */
    bool is_lost =
        w->failure == ATTN_ECONN || w->failure == ATTN_ETIMEDOUT || w->tally.n_unfinished > 0;
    for (uint32_t i = 0; s != NULL && i < o->n_sequences && !is_lost; i++) {
        if (s[i].seq.epoch != 0)
            is_lost = attn_seq_close(w->pool, &s[i].seq, 0) == ATTN_ECONN;
    }
    if (w->pool != NULL && !is_lost)
        attn_pool_release(w->pool, 0);
    free(s);
    if (is_ok && verify_run(&w->verify, &w->verified) != ATTN_OK)
        worker_fail(w, ATTN_ENOMEM, "verification");
    return NULL;
}

void worker_fini(struct worker *w)
{
    attn_pool_close(w->pool);
    attn_client_close(w->client);
    verify_fini(&w->verify);
    tally_fini(&w->tally);
}
