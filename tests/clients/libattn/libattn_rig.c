/* libattn_rig.c: opens and closes the client at its fake daemon, and makes steps and the answers
 * that they must have. */
#include "tests/clients/libattn/libattn_rig.h"
#include "tests/random.h"

#include <unistd.h>

void work_init(struct work *w, uint32_t salt, uint32_t n_items)
{
    memset(w, 0, sizeof *w);
    uint64_t seed = salt;
    for (int i = 0; i < MAX_TOKENS * ROW; i++) {
        w->q[i] = (float)random_below(&seed, 1 << 24) / (1 << 24) - 0.5f;
        w->out[i] = NAN;
    }
    for (int i = 0; i < MAX_TOKENS * KV_ROW; i++)
        w->k[i] = w->v[i] = 1.0f;
    for (int i = 0; i < MAX_TOKENS * HEADS; i++)
        w->lse[i] = NAN;
    for (uint32_t i = 0; i < n_items; i++) {
        w->items[i] = (struct attn_item){
            .seq = {salt % 1000 + i, 1, 0}, .pos = 10 * i + salt % 7, .n_tokens = i + 1};
        w->n_tokens += i + 1;
        w->item_status[i] = 12345;
    }
    w->step = (struct attn_step){.struct_size = sizeof w->step,
                                 .layer = 1,
                                 .n_items = n_items,
                                 .items = w->items,
                                 .q = w->q,
                                 .k = w->k,
                                 .v = w->v,
                                 .out = w->out,
                                 .lse = w->lse,
                                 .item_status = w->item_status,
                                 .timeout_us = LONG_US};
    w->result.struct_size = sizeof w->result;
}

static void fill(void *user, void *q, void *k, void *v)
{
    struct work *w = user;
    w->n_fills++;
    assert_int_equal(q != NULL, w->in_place.is_attend);
    if (q != NULL)
        memcpy(q, w->q, w->n_tokens * sizeof(float) * ROW);
    memcpy(k, w->k, w->n_tokens * sizeof(float) * KV_ROW);
    memcpy(v, w->v, w->n_tokens * sizeof(float) * KV_ROW);
}

static void take(void *user, const void *out, const float *lse, uint32_t n_failed)
{
    struct work *w = user;
    w->n_takes++;
    w->n_failed_seen = n_failed;
    memcpy(w->out, out, w->n_tokens * sizeof(float) * ROW);
    if (w->in_place.has_lse)
        memcpy(w->lse, lse, w->n_tokens * sizeof(float) * HEADS);
    else
        assert_null(lse);
}

void work_in_place(struct work *w)
{
    w->in_place = (struct attn_in_place){.is_append = true,
                                         .is_attend = w->step.q != NULL,
                                         .has_lse = w->step.lse != NULL,
                                         .fill = fill,
                                         .take = take,
                                         .user = w};
    w->step.q = w->step.k = w->step.v = NULL;
    w->step.out = NULL;
    w->step.lse = NULL;
    w->step.in_place = &w->in_place;
}

void assert_good(const struct work *w)
{
    uint32_t t = 0;
    assert_int_equal(w->result.status, ATTN_OK);
    assert_int_equal(w->result.n_failed, 0);
    for (uint32_t i = 0; i < w->step.n_items; i++) {
        assert_int_equal(w->item_status[i], ATTN_OK);
        for (uint32_t j = 0; j < w->items[i].n_tokens; j++, t++) {
            for (uint32_t e = 0; e < ROW; e++)
                assert_true(w->out[t * ROW + e] ==
                            2 * w->q[t * ROW + e] + (float)w->items[i].seq.id);
            for (uint32_t e = 0; e < HEADS; e++)
                assert_true(w->lse[t * HEADS + e] == (float)(w->items[i].pos + j));
        }
    }
    assert_true(isnan(w->out[t * ROW])); /* nothing behind the last row */
}

void assert_untouched(const struct work *w)
{
    for (int i = 0; i < MAX_TOKENS * ROW; i++)
        assert_true(isnan(w->out[i]));
    for (int i = 0; i < MAX_TOKENS * HEADS; i++)
        assert_true(isnan(w->lse[i]));
}

struct attn_pool_spec spec_of_test(void)
{
    return (struct attn_pool_spec){.struct_size = sizeof(struct attn_pool_spec),
                                   .layer_struct_size = sizeof(struct attn_layer),
                                   .name = "test",
                                   .num_layers = LAYERS,
                                   .num_q_heads = HEADS,
                                   .num_kv_heads = KV_HEADS,
                                   .head_dim_k = DIM,
                                   .q_dtype = ATTN_F32};
}

void open_client(struct fixture *f, const struct attn_client_options *o)
{
    struct attn_pool_spec spec = spec_of_test();
    attn_status st = attn_client_open(f->daemon.url, o, LONG_US, &f->client);
    if (st != ATTN_OK)
        print_message("open: %s\n", attn_last_error()->message);
    assert_int_equal(st, ATTN_OK);
    assert_int_equal(attn_pool_create(f->client, &spec, LONG_US, &f->pool), ATTN_OK);
}

void close_client(struct fixture *f)
{
    attn_pool_close(f->pool);
    attn_client_close(f->client);
    f->pool = NULL;
    f->client = NULL;
}

int set_up(void **state)
{
    static unsigned int n;
    struct fixture *f = calloc(1, sizeof *f);
    char url[96];
    snprintf(url, sizeof url, "ipc:///tmp/attn_test_%d_%u.sock", (int)getpid(), n++);
    fake_daemon_start(&f->daemon, url);
    open_client(f, NULL);
    *state = f;
    return 0;
}

int tear_down(void **state)
{
    struct fixture *f = *state;
    close_client(f);
    fake_daemon_stop(&f->daemon);
    unlink(f->daemon.url + strlen("ipc://"));
    free(f);
    return 0;
}

struct attn_client_counters counters_of(struct fixture *f)
{
    struct attn_client_counters n = {.struct_size = sizeof n};
    assert_int_equal(attn_client_counters(f->client, &n), ATTN_OK);
    return n;
}

void on_done(void *user, attn_ticket ticket, const struct attn_result *r)
{
    struct work *w = user;
    w->n_calls++;
    w->ticket = ticket;
    w->result = *r;
}
