/* seq_rig.c: sequences that tests export, import and move: their tensors, steps at a real daemon,
 * and comparison of what came out. */
#include "tests/clients/libattn/seq_rig.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/daemon/transport/certs.h"
#include "tests/random.h"

struct e2e seq_daemons[2];
_Thread_local uint32_t seq_salt;
uint32_t seq_window, seq_sinks;

int seq_daemons_start(void **state)
{
    static const char *const supervise[] = {"--supervise", NULL};
    (void)state;
    e2e_start(&seq_daemons[0], supervise);
    e2e_start(&seq_daemons[1], NULL);
    return 0;
}

int seq_daemons_stop(void **state)
{
    (void)state;
    e2e_stop(&seq_daemons[0]);
    e2e_stop(&seq_daemons[1]);
    return 0;
}

attn_client *client_of(int daemon, bool is_shm)
{
    attn_client *c = NULL;
    char url[128], *ca = certs_file(CERTS_GOOD, "ca.crt");
    const struct e2e *d = &seq_daemons[daemon];
    struct attn_client_options o = {.struct_size = sizeof o, .ca_file = ca};
    if (is_shm)
        snprintf(url, sizeof url, "shm://%s", d->shm_path);
    else /* E2E_TRANSPORT=tls: through TLS */
        snprintf(url, sizeof url, "%s", d->tls_url[0] != '\0' ? d->tls_url : d->url);
    if (attn_client_open(url, &o, LONG_US, &c) != ATTN_OK)
        fail_msg("%s", attn_last_error()->message);
    free(ca);
    return c;
}

attn_pool *pool_of(attn_client *c, attn_dtype kv_dtype, const char *model, float scale,
                   uint32_t n_blocks)
{
    attn_pool *p = NULL;
    char name[64];
    attn_split split = ATTN_SPLIT_AUTO;
    if (getenv("E2E_SPLIT") != NULL && !attn_split_parse(getenv("E2E_SPLIT"), &split))
        fail_msg("E2E_SPLIT is %s", getenv("E2E_SPLIT"));
    struct attn_layer layer = {
        .scale = scale, .window_tokens = seq_window, .sink_tokens = seq_sinks};
    struct attn_pool_spec spec = {.struct_size = sizeof spec,
                                  .layer_struct_size = sizeof(struct attn_layer),
                                  .name = name,
                                  .num_layers = LAYERS,
                                  .num_q_heads = Q_HEADS,
                                  .num_kv_heads = KV_HEADS,
                                  .head_dim_k = DIM,
                                  .block_tokens = BLOCK,
                                  .n_blocks = n_blocks,
                                  .q_dtype = ATTN_F32,
                                  .kv_dtype = kv_dtype,
                                  .is_batch_invariant = 1,
                                  .split = split,
                                  .n_layers = 1,
                                  .layers = &layer,
                                  .model = model};
    snprintf(name, sizeof name, "%s-%s-%g-%u-%u", attn_dtype_name(kv_dtype), model, (double)scale,
             n_blocks, seq_window);
    if (attn_pool_create(c, &spec, LONG_US, &p) != ATTN_OK)
        fail_msg("%s", attn_last_error()->message);
    return p;
}

/* Numbers that depend on layer, position and what they are for. */
static void fill(float *x, uint32_t layer, uint32_t pos, uint32_t n, uint32_t row, uint32_t what)
{
    for (uint32_t i = 0; i < n; i++) {
        uint64_t seed = layer * 1000003u + (pos + i) * 10007u + what;
        for (uint32_t k = 0; k < row; k++)
            x[i * row + k] = (float)random_below(&seed, 2001) / 1000 - 1.0005f;
    }
}

/* Tokens [pos, pos + n) of one layer; with out [n][Q_HEADS][DIM] they attend, too. */
attn_status step(attn_pool *p, const struct attn_seq *seq, uint32_t layer, uint32_t pos, uint32_t n,
                 bool is_append, float *out)
{
    static _Thread_local float q[LAST * Q_HEADS * DIM];
    static _Thread_local float k[MAX_TOKENS * KV_HEADS * DIM], v[MAX_TOKENS * KV_HEADS * DIM];
    struct attn_item item = {.seq = *seq, .pos = pos, .n_tokens = n};
    fill(k, layer, pos, n, KV_HEADS * DIM, 1 + 10 * seq_salt);
    fill(v, layer, pos, n, KV_HEADS * DIM, 2 + 10 * seq_salt);
    for (uint32_t i = 0; out != NULL && i < n * Q_HEADS * DIM; i++)
        out[i] = 12345;
    if (out != NULL)
        fill(q, layer, pos, n, Q_HEADS * DIM, 3);
    struct attn_step s = {.struct_size = sizeof s,
                          .layer = layer,
                          .n_items = 1,
                          .items = &item,
                          .q = out != NULL ? q : NULL,
                          .k = is_append ? k : NULL,
                          .v = is_append ? v : NULL,
                          .out = out,
                          .timeout_us = LONG_US};
    return attn_step(p, &s, NULL);
}

/* A sequence of n tokens, of which the last layer has n_last, with ids as far as n_ids. */
struct attn_seq make_seq(attn_pool *p, uint64_t id, uint32_t n, uint32_t n_last, uint32_t n_ids)
{
    static uint32_t ids[MAX_TOKENS];
    struct attn_seq seq;
    for (uint32_t i = 0; i < MAX_TOKENS; i++)
        ids[i] = i * 7 + 1;
    ok(attn_seq_open(p, id, LONG_US, &seq));
    for (uint32_t l = 0; l < LAYERS; l++)
        ok(step(p, &seq, l, 0, l == LAYERS - 1 ? n_last : n, true, NULL));
    if (n_ids > 0)
        ok(attn_seq_tokens(p, &seq, 0, ids, n_ids, LONG_US));
    return seq;
}

void assert_same(attn_pool *p, const struct attn_seq *a, attn_pool *q, const struct attn_seq *b,
                 const uint32_t *lens)
{
    float x[OUT], y[OUT];
    for (uint32_t l = 0; l < LAYERS; l++) {
        ok(step(p, a, l, lens[l] - LAST, LAST, false, x));
        ok(step(q, b, l, lens[l] - LAST, LAST, false, y));
        assert_memory_equal(x, y, sizeof x);
    }
}

void assert_gone(attn_pool *p, uint64_t id)
{
    struct attn_seq seq;
    attn_status st = attn_seq_adopt(p, id, LONG_US, &seq, NULL);
    assert_true(st == ATTN_ENOTFOUND || st == ATTN_EMOVED);
}

void assert_like_twin(attn_pool *q, const struct attn_seq *got, uint32_t n)
{
    const uint32_t lens[LAYERS] = {n, n};
    struct attn_seq twin = make_seq(q, 8, n, n, 0);
    assert_same(q, got, q, &twin, lens);
    ok(attn_seq_close(q, &twin, LONG_US));
}

void assert_cached(uint32_t n_cached, uint32_t n)
{
    if (getenv("E2E_CARDS") == NULL || n_cached != 0)
        assert_int_equal(n_cached, n / BLOCK * BLOCK);
}

uint32_t n_free(attn_client *c, const attn_pool *p)
{
    attn_pool *again;
    ok(attn_pool_describe(c, attn_pool_spec_of(p)->name, LONG_US, &again));
    uint32_t n = attn_pool_free_blocks(again);
    attn_pool_close(again);
    return n;
}

void await_free(attn_client *c, const attn_pool *p, uint32_t n)
{
    for (int i = 0; i < 10000 && n_free(c, p) != n; i++)
        ;
    assert_int_equal(n_free(c, p), n);
}
