/* bench_behind.c: not a test: what a small step of one thread takes while another thread makes
 * large ones with the same client, and with another. scripts/bench-transports --behind runs it.
 *
 *     bench_behind URL SECONDS [PAUSE_US]
 *
 * Llama-3-8B's heads in bf16: a small step is of one token, 20 KB; a large one of 50, 1 MB, of
 * another sequence and layer, PAUSE_US (500) after the last. Both write the tokens that are there
 * already. Prints three lines: none, same client, another client. Each has, in microseconds, p50,
 * p90 and p99 of all of a small step and of what is beside queue and device, and how many large
 * steps were made a second.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "clients/libattn/attn.h"
#include "proto/attn_time.h"
#include "tests/random.h"

enum {
    Q_HEADS = 32,
    KV_HEADS = 8,
    DIM = 128,
    LARGE = 50, /* tokens */
    MAX_TIMES = 1 << 20,
};

static void must(attn_status st, const char *what)
{
    if (st == ATTN_OK)
        return;
    fprintf(stderr, "bench_behind: %s: %s\n", what, attn_last_error()->message);
    exit(1);
}

/* A thread's own: its pool, its sequence, and a step of n tokens that it makes again and again. */
struct worker {
    attn_pool *pool;
    struct attn_item item;
    struct attn_step step;
    uint64_t n_done, pause_us;
    _Atomic bool *has_ended;
};

static uint16_t *tensor(size_t n, uint64_t *rng)
{
    uint16_t *x = malloc(n * sizeof *x);
    for (size_t i = 0; x != NULL && i < n; i++) /* bf16 between 1/4 and 1, either sign */
        x[i] = (uint16_t)(0x3e80 + (random_mixed(rng) & 0xff) + ((random_mixed(rng) & 1) << 15));
    return x;
}

static void make_worker(struct worker *w, attn_client *c, uint64_t seq, uint32_t layer, uint32_t n)
{
    uint64_t rng = seq;
    const struct attn_pool_spec spec = {.struct_size = sizeof spec,
                                        .layer_struct_size = sizeof(struct attn_layer),
                                        .name = "behind",
                                        .num_layers = 2,
                                        .num_q_heads = Q_HEADS,
                                        .num_kv_heads = KV_HEADS,
                                        .head_dim_k = DIM,
                                        .n_blocks = 64,
                                        .q_dtype = ATTN_BF16};
    must(attn_pool_create(c, &spec, 0, &w->pool), "pool");
    w->item = (struct attn_item){.n_tokens = n};
    must(attn_seq_open(w->pool, seq, 0, &w->item.seq), "sequence");
    w->step = (struct attn_step){.struct_size = sizeof w->step,
                                 .layer = layer,
                                 .n_items = 1,
                                 .items = &w->item,
                                 .q = tensor((size_t)n * Q_HEADS * DIM, &rng),
                                 .k = tensor((size_t)n * KV_HEADS * DIM, &rng),
                                 .v = tensor((size_t)n * KV_HEADS * DIM, &rng),
                                 .out = tensor((size_t)n * Q_HEADS * DIM, &rng)};
    for (uint32_t l = 0; l <= layer; l++) { /* the first layer has a token first */
        struct attn_step s = w->step;
        s.layer = l;
        must(attn_step(w->pool, &s, NULL), "first step");
    }
}

static void *make_large(void *arg)
{
    struct worker *w = arg;
    while (!atomic_load(w->has_ended)) {
        must(attn_step(w->pool, &w->step, NULL), "large step");
        w->n_done++;
        usleep((useconds_t)w->pause_us);
    }
    return NULL;
}

static void end_worker(struct worker *w)
{
    must(attn_seq_close(w->pool, &w->item.seq, 0), "close");
    attn_pool_close(w->pool);
}

static int by_time(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(const char *name, struct worker *small, struct worker *large, double seconds)
{
    static double us[MAX_TIMES], way[MAX_TIMES];
    size_t n = 0;
    pthread_t thread;
    _Atomic bool has_ended = false;
    if (large != NULL) {
        large->has_ended = &has_ended;
        large->n_done = 0;
        if (pthread_create(&thread, NULL, make_large, large) != 0)
            exit(1);
    }
    const uint64_t from_ns = attn_now_ns(), until_ns = from_ns + (uint64_t)(seconds * 1e9);
    for (uint64_t then_ns; (then_ns = attn_now_ns()) < until_ns && n < MAX_TIMES; n++) {
        struct attn_result r = {.struct_size = sizeof r};
        must(attn_step(small->pool, &small->step, &r), "small step");
        us[n] = (double)(attn_now_ns() - then_ns) / 1e3;
        way[n] = us[n] - (double)(r.queue_ns + r.device_ns) / 1e3;
    }
    atomic_store(&has_ended, true);
    if (large != NULL)
        pthread_join(thread, NULL);
    qsort(us, n, sizeof *us, by_time);
    qsort(way, n, sizeof *way, by_time);
    printf("%s | %.0f | %.0f | %.0f | %.0f | %.0f | %.0f | %.0f |\n", name, us[n / 2],
           us[n * 9 / 10], us[n * 99 / 100], way[n / 2], way[n * 9 / 10], way[n * 99 / 100],
           large != NULL ? (double)large->n_done / seconds : 0);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    attn_client *own, *other;
    struct worker small, large, elsewhere;
    if (argc < 3)
        return fputs("usage: bench_behind URL SECONDS [PAUSE_US]\n", stderr), 2;
    const double seconds = atof(argv[2]);
    must(attn_client_open(argv[1], NULL, 10000000, &own), "client");
    must(attn_client_open(argv[1], NULL, 10000000, &other), "client");
    make_worker(&small, own, 1, 0, 1);
    make_worker(&large, own, 2, 1, LARGE);
    make_worker(&elsewhere, other, 3, 1, LARGE);
    large.pause_us = elsewhere.pause_us = argc > 3 ? strtoull(argv[3], NULL, 10) : 500;
    measure("none", &small, NULL, seconds);
    measure("same client", &small, &large, seconds);
    measure("another client", &small, &elsewhere, seconds);
    end_worker(&small);
    end_worker(&large);
    end_worker(&elsewhere);
    attn_client_close(own);
    attn_client_close(other);
    return 0;
}
