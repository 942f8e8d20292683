/* bench_plans.c: what a plan saves of each layer's step: bytes before its tensors, and time.
 *
 *   bench_plans [--rounds N] URL...    at daemons that run; N tokens of each kind, 200 by itself
 *
 * One worker, all of whose sequences are in each step: a token is 32 layers, one after another,
 * once with items and once by a plan, by turns, whose first goes first every other time. Steps are
 * in place; nothing is drawn or looked at inside the timed window, which is the 32 steps and, by a
 * plan, opening and closing it. Bytes are those of a message before its tensors, with a layer's
 * share of the plan's. Before that the codec alone: what both sides do for one head. Times are
 * medians of tokens over 32; the ratio is of the medians.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clients/libattn/attn.h"
#include "proto/attn_time.h"
#include "proto/wire.h"

enum { LAYERS = 32, MAX_ITEMS = 256, CONTEXT = 16, MAX_ROUNDS = 10000, LONG_US = 60000000 };

static const struct {
    const char *name;
    uint32_t q_heads, kv_heads, dim;
} geometries[] = {{"1 head of 8", 1, 1, 8}, {"32/8 heads of 128", 32, 8, 128}};
static const uint32_t sizes[] = {1, 32, 256};

static void must(attn_status st, const char *what)
{
    if (st == ATTN_OK)
        return;
    fprintf(stderr, "bench_plans: %s: %s\n", what, attn_last_error()->message);
    exit(1);
}

static void nothing_to_fill(void *user, void *q, void *k, void *v)
{
    (void)user;
    (void)q;
    (void)k;
    (void)v;
}

static void nothing_to_take(void *user, const void *out, const float *lse, uint32_t n_failed)
{
    (void)user;
    (void)out;
    (void)lse;
    (void)n_failed;
}

static const struct attn_in_place in_place = {
    .is_append = true, .is_attend = true, .fill = nothing_to_fill, .take = nothing_to_take};

static uint64_t received_bytes(attn_client *c)
{
    char *json = NULL;
    must(attn_client_stats(c, LONG_US, &json), "stats");
    const char *at = strstr(json, "\"received_bytes_total\"");
    uint64_t n = at == NULL ? 0 : strtoull(strchr(at, ':') + 1, NULL, 10);
    attn_free(json);
    return n;
}

static uint64_t aligned(uint64_t n)
{
    return (n + WIRE_ALIGN - 1) / WIRE_ALIGN * WIRE_ALIGN;
}

/* What both sides do for the head of one message alone, encoding and decoding: ns. */
static uint64_t head_ns(uint32_t n_items, bool is_planned)
{
    enum { TIMES = 500 };
    static uint8_t message[1 << 16], memory[4096], items[MAX_ITEMS * 20];
    static uint64_t seq[MAX_ITEMS];
    static uint32_t epoch[MAX_ITEMS], pos[MAX_ITEMS], n_tokens[MAX_ITEMS];
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__Step step = ATTND__STEP__INIT;
    for (uint32_t i = 0; i < n_items; i++) {
        seq[i] = i;
        epoch[i] = 2000 + i;
        pos[i] = 3000;
        n_tokens[i] = 1;
    }
    step.layer = 7;
    if (is_planned) {
        step.plan = 12345;
    } else {
        step.pool = 1;
        step.flags = WIRE_STEP_APPEND | WIRE_STEP_ATTEND;
        step.dtype = ATTND__DTYPE__BF16;
        step.n_seq = step.n_epoch = step.n_pos = step.n_n_tokens = n_items;
        step.seq = seq;
        step.epoch = epoch;
        step.pos = pos;
        step.n_tokens = n_tokens;
    }
    h.session = 1;
    h.timeout_us = 1000000;
    h.body_case = ATTND__REQUEST__BODY_STEP;
    h.step = &step;
    uint64_t best_ns = UINT64_MAX, start_ns = attn_now_ns();
    for (int i = 1; i <= 20 * TIMES; i++) {
        struct wire_arena a;
        struct wire_request r;
        char why[128];
        size_t n = wire_request_head_bytes(&h);
        wire_request_head_encode(&h, 1, 0, message);
        wire_arena_init(&a, memory, sizeof memory, WIRE_ARENA_LIMIT_BYTES);
        must(wire_request_decode(message, n, &a, &r, why, sizeof why), "decoding");
        if (is_planned) /* the daemon fills the items in */
            memcpy(wire_arena_alloc(&a, sizeof items / MAX_ITEMS * n_items), items,
                   sizeof items / MAX_ITEMS * n_items);
        wire_arena_reset(&a);
        if (i % TIMES == 0) { /* the best of 20: what disturbs it only adds */
            uint64_t now_ns = attn_now_ns();
            best_ns = now_ns - start_ns < best_ns ? now_ns - start_ns : best_ns;
            start_ns = now_ns;
        }
    }
    return best_ns / TIMES;
}

/* One token; ns. */
static uint64_t token(attn_pool *p, const struct attn_item *items, uint32_t n_items,
                      bool is_planned)
{
    struct attn_step s = {.struct_size = sizeof s, .timeout_us = LONG_US, .in_place = &in_place};
    const struct attn_plan a = {.struct_size = sizeof a,
                                .n_items = n_items,
                                .items = items,
                                .n_layers = LAYERS,
                                .is_append = 1,
                                .is_attend = 1,
                                .timeout_us = LONG_US};
    uint64_t start_ns = attn_now_ns();
    if (is_planned) {
        must(attn_step_plan_open(p, &a, &s.plan), "plan");
    } else {
        s.items = items;
        s.n_items = n_items;
    }
    for (s.layer = 0; s.layer < LAYERS; s.layer++)
        must(attn_step(p, &s, NULL), "step");
    attn_step_plan_close(s.plan);
    return attn_now_ns() - start_ns;
}

static int by_size(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void measure(const char *url, uint32_t g, uint32_t n_items, uint32_t n_rounds)
{
    static uint64_t ns[2][MAX_ROUNDS];
    struct attn_item items[MAX_ITEMS];
    attn_client *c;
    attn_pool *p;
    uint64_t bytes[2] = {0};
    const uint64_t row = 2ull * n_items * geometries[g].dim; /* bytes of a head */
    const uint64_t tensors = aligned(row * geometries[g].q_heads) +
                             aligned(row * geometries[g].kv_heads) + row * geometries[g].kv_heads;
    must(attn_client_open(url, NULL, LONG_US, &c), url);
    const struct attn_pool_spec spec = {.struct_size = sizeof spec,
                                        .layer_struct_size = sizeof(struct attn_layer),
                                        .name = geometries[g].name,
                                        .num_layers = LAYERS,
                                        .num_q_heads = geometries[g].q_heads,
                                        .num_kv_heads = geometries[g].kv_heads,
                                        .head_dim_k = geometries[g].dim,
                                        .n_blocks = 2 * MAX_ITEMS,
                                        .q_dtype = ATTN_BF16};
    must(attn_pool_create(c, &spec, LONG_US, &p), "pool");
    for (uint32_t i = 0; i < n_items; i++) {
        must(attn_seq_open(p, attn_now_ns() * 1024 + i, LONG_US, &items[i].seq), "sequence");
        items[i].pos = 0;
        items[i].n_tokens = 1;
    }
    for (uint32_t pos = 0; pos < CONTEXT; pos++) {
        for (uint32_t i = 0; i < n_items; i++)
            items[i].pos = pos;
        token(p, items, n_items, pos % 2);
    }
    for (uint32_t round = 0; round < n_rounds; round++)
        for (uint32_t k = 0; k < 2; k++) {
            uint32_t is_planned = (round + k) % 2;
            ns[is_planned][round] = token(p, items, n_items, is_planned);
        }
    for (uint32_t k = 0; k < 2; k++) {
        uint64_t before = received_bytes(c);
        token(p, items, n_items, k);
        bytes[k] = (received_bytes(c) - before) / LAYERS - tensors;
        qsort(ns[k], n_rounds, sizeof ns[k][0], by_size);
    }
    double us[2];
    for (uint32_t k = 0; k < 2; k++)
        us[k] = (double)ns[k][n_rounds / 2] / LAYERS / 1000;
    printf("| %.5s | %s | %" PRIu32 " | %" PRIu64 " | %" PRIu64 " | %.1f | %.1f | %.2f |\n", url,
           geometries[g].name, n_items, bytes[0], bytes[1], us[0], us[1], us[0] / us[1]);
    fflush(stdout);
    for (uint32_t i = 0; i < n_items; i++)
        must(attn_seq_close(p, &items[i].seq, LONG_US), "close");
    attn_pool_close(p);
    attn_client_close(c);
}

int main(int argc, char **argv)
{
    uint32_t n_rounds = 200;
    int i = 1;
    if (argc > 2 && strcmp(argv[1], "--rounds") == 0) {
        n_rounds = (uint32_t)strtoul(argv[2], NULL, 10);
        i = 3;
    }
    if (i >= argc || n_rounds == 0 || n_rounds > MAX_ROUNDS) {
        fprintf(stderr, "usage: bench_plans [--rounds 1..%d] URL...\n", MAX_ROUNDS);
        return 2;
    }
    printf("| items | head encoded and decoded, us | of a plan |\n|---|---|---|\n");
    for (uint32_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
        printf("| %" PRIu32 " | %.2f | %.2f |\n", sizes[k], (double)head_ns(sizes[k], false) / 1000,
               (double)head_ns(sizes[k], true) / 1000);
    putchar('\n');
    fflush(stdout);
    printf(
        "| transport | layer | items | head, bytes | by a plan | step, us | by a plan | ratio |\n");
    printf("|---|---|---|---|---|---|---|---|\n");
    for (; i < argc; i++)
        for (uint32_t g = 0; g < sizeof geometries / sizeof *geometries; g++)
            for (uint32_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
                measure(argv[i], g, sizes[k], n_rounds);
    return 0;
}
