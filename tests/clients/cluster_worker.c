/* cluster_worker.c: a worker over attn_cluster.h, led by lines on its standard input; it answers
 * each with a line, "ok ..." or "error STATUS: why". clients/cluster/tests/test_c_worker.py has the
 * daemons.
 *
 *     cluster_worker URL IDLE_MS PROBE_MS [no-rebuild]
 *
 *     place ADAPTER ID...    ok SEQUENCE MEMBER CACHED ID
 *     feed SEQUENCE          appends what is not cached: ok
 *     decode SEQUENCE N      N tokens more, found again where it went: ok MEMBER FOLLOWED REBUILT
 *     leave SEQUENCE         decodes until it is on another member: as decode
 *     follow SEQUENCE MS     ok MEMBER
 *     together N             as many threads place, feed, decode and close: ok
 *     pool NAME              the pool of sequences that are placed from now on
 *     heads                  the pool of sequences that are placed from now on has latents, which
 *                            the daemons project heads to
 *     nulls                  every argument that may not be NULL is: ok, if they are refused
 *     close SEQUENCE, members
 *
 * K and V follow from token and position; every output is compared with float64.
 */
#include <attn_cluster.h>
#include <err.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LAYERS 2u
#define HEADS 4u
#define KV_HEADS 2u
#define DIM 64u
#define LATENT 48u /* with `heads`: elements of a latent, and of a head before and after it */
#define NOPE 24u
#define OUT 32u
#define MAX_TOKENS 4096u
#define STEP_US 600000000u /* no step ends by its time-out */
#define MAX_SEQUENCES 512

static struct attn_pool_spec spec = {.struct_size = sizeof spec,
                                     .layer_struct_size = sizeof(struct attn_layer),
                                     .name = "p",
                                     .num_layers = LAYERS,
                                     .num_q_heads = HEADS,
                                     .num_kv_heads = KV_HEADS,
                                     .head_dim_k = DIM,
                                     .q_dtype = ATTN_F32,
                                     .n_blocks = 128};

struct text {
    struct attn_cluster_seq at;
    uint32_t ids[MAX_TOKENS], n;
    uint64_t adapter;
    int n_followed;
};

static bool has_heads;
static float weights[LAYERS][HEADS][NOPE + OUT][LATENT];
static attn_cluster *cluster;
static struct text *texts[MAX_SEQUENCES];
static int n_texts;
static _Atomic int n_rebuilt;

/* -1 to 1; kind: q 0, k 1, v 2 */
static float value(uint32_t layer, uint32_t kind, uint32_t id, uint32_t pos, uint32_t i)
{
    uint64_t x = ((((uint64_t)layer * 3 + kind) * 65536 + id) * MAX_TOKENS + pos) * 4096 + i;
    x = (x ^ x >> 31) * 0x9e3779b97f4a7c15;
    x = (x ^ x >> 29) * 0xbf58476d1ce4e5b9;
    return (float)((double)(x >> 11) / (double)(1ull << 52) - 1);
}

static void fill(float *to, uint32_t layer, uint32_t kind, uint32_t row, const uint32_t *ids,
                 uint32_t pos, uint32_t n)
{
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t i = 0; i < row; i++)
            *to++ = value(layer, kind, ids[pos + t], pos + t, i);
}

/* Of the query at pos: element d of what the head attends with, and gets. */
static double query(uint32_t layer, uint32_t id, uint32_t pos, uint32_t head, uint32_t d)
{
    const uint32_t row = head * (NOPE + DIM - LATENT);
    double sum = 0;
    if (!has_heads)
        return value(layer, 0, id, pos, head * DIM + d);
    if (d >= LATENT)
        return value(layer, 0, id, pos, row + NOPE + d - LATENT);
    for (uint32_t i = 0; i < NOPE; i++)
        sum += (double)value(layer, 0, id, pos, row + i) * weights[layer][head][i][d];
    return sum;
}

static uint32_t out_dim(void)
{
    return has_heads ? OUT : DIM;
}

/* The largest difference of out, of the query at pos, from float64. */
static double difference(uint32_t layer, const uint32_t *ids, uint32_t pos, const float *out)
{
    double worst = 0, *weight = calloc(pos + 1, sizeof *weight);
    for (uint32_t h = 0; h < HEADS; h++) {
        uint32_t kv = has_heads ? 0 : h * KV_HEADS / HEADS * DIM;
        double most = -INFINITY, sum = 0, q[DIM], got[DIM];
        for (uint32_t d = 0; d < DIM; d++)
            q[d] = query(layer, ids[pos], pos, h, d);
        for (uint32_t t = 0; t <= pos; t++) {
            weight[t] = 0;
            for (uint32_t d = 0; d < DIM; d++)
                weight[t] += q[d] * value(layer, 1, ids[t], t, kv + d) / sqrt(DIM);
            most = fmax(most, weight[t]);
        }
        for (uint32_t t = 0; t <= pos; t++)
            sum += weight[t] = exp(weight[t] - most);
        for (uint32_t d = 0; d < DIM; d++) { /* with heads V is in K */
            got[d] = 0;
            for (uint32_t t = 0; t <= pos; t++)
                got[d] += weight[t] / sum * value(layer, has_heads ? 1 : 2, ids[t], t, kv + d);
        }
        for (uint32_t d = 0; d < out_dim(); d++) {
            double want = has_heads ? 0 : got[d];
            for (uint32_t i = 0; has_heads && i < LATENT; i++)
                want += weights[layer][h][NOPE + d][i] * got[i];
            double off = fabs(out[h * out_dim() + d] - want);
            worst = off >= worst || isnan(off) ? off : worst;
        }
    }
    free(weight);
    return worst;
}

/* Tokens pos to pos + n in every layer; is_attend: and compares the last one's outputs. */
static attn_status append(const struct attn_cluster_seq *at, const uint32_t *ids, uint32_t pos,
                          uint32_t n, bool is_attend, uint64_t timeout_us)
{
    float *q = malloc(n * HEADS * DIM * sizeof *q), *out = malloc(n * HEADS * DIM * sizeof *out);
    float *k = malloc(n * KV_HEADS * DIM * sizeof *k), *v = malloc(n * KV_HEADS * DIM * sizeof *v);
    attn_status st = ATTN_OK;
    for (uint32_t layer = 0; n > 0 && layer < LAYERS && st == ATTN_OK; layer++) {
        struct attn_item item = {at->seq, pos, n};
        struct attn_step step = {.struct_size = sizeof step,
                                 .layer = layer,
                                 .n_items = 1,
                                 .items = &item,
                                 .q = is_attend ? q : NULL,
                                 .k = k,
                                 .v = has_heads ? NULL : v,
                                 .out = is_attend ? out : NULL,
                                 .timeout_us = timeout_us};
        fill(q, layer, 0, HEADS * (has_heads ? NOPE + DIM - LATENT : DIM), ids, pos, n);
        fill(k, layer, 1, has_heads ? DIM : KV_HEADS * DIM, ids, pos, n);
        fill(v, layer, 2, KV_HEADS * DIM, ids, pos, n);
        memset(out, 0xff, n * HEADS * DIM * sizeof *out);
        st = attn_step(at->pool, &step, NULL);
        double off = st == ATTN_OK && is_attend
                         ? difference(layer, ids, pos + n - 1, out + (n - 1) * HEADS * out_dim())
                         : 0;
        if (!(off < 2e-5))
            errx(1, "layer %u, token %u: %g off", layer, pos + n - 1, off);
    }
    free(q);
    free(k);
    free(v);
    free(out);
    return st;
}

static attn_status rebuild(void *user, const struct attn_cluster_seq *s,
                           const struct attn_tokens *t)
{
    (void)user;
    n_rebuilt++;
    return append(s, t->ids, s->n_cached, t->n - s->n_cached, false, 0);
}

static attn_status follow(struct text *t, uint64_t timeout_us)
{
    struct attn_tokens had = {.ids = t->ids, .n = t->n, .adapter = t->adapter};
    t->n_followed++;
    return attn_cluster_follow(cluster, &spec, &had, timeout_us, &t->at);
}

static attn_status place(struct text *t)
{
    struct attn_tokens all = {.ids = t->ids, .n = t->n, .adapter = t->adapter};
    t->at.struct_size = sizeof t->at;
    return attn_cluster_place(cluster, &spec, &all, 0, &t->at);
}

static attn_status decode(struct text *t)
{
    t->ids[t->n] = (t->ids[t->n - 1] * 31 + t->n) % 997;
    for (;;) {
        attn_status st = attn_seq_tokens(t->at.pool, &t->at.seq, t->n, &t->ids[t->n], 1, STEP_US);
        if (st == ATTN_OK)
            st = append(&t->at, t->ids, t->n, 1, true, STEP_US);
        if (st == ATTN_OK) {
            t->n++;
            return st;
        }
        if (st == ATTN_EDEADLINE || st == ATTN_EOVERLOAD) /* it was busy */
            continue;
        if (!attn_cluster_may_follow(st))
            errx(1, "%s: %s", attn_status_name(st), attn_last_error()->message);
        st = follow(t, 0);
        if (st != ATTN_OK)
            return st;
    }
}

static void *one_of_many(void *number)
{
    struct text *t = calloc(1, sizeof *t);
    for (t->n = 0; t->n < 40; t->n++)
        t->ids[t->n] = (uint32_t)(t->n * 7 + (uintptr_t)number) % 997;
    attn_status st = place(t);
    if (st == ATTN_OK)
        st = append(&t->at, t->ids, t->at.n_cached, t->n - t->at.n_cached, true, 0);
    for (int i = 0; i < 5 && st == ATTN_OK; i++)
        st = decode(t);
    if (st == ATTN_OK)
        st = follow(t, 0);
    if (st == ATTN_OK)
        st = attn_seq_close(t->at.pool, &t->at.seq, 0);
    if (st != ATTN_OK)
        errx(1, "thread %zu: %s: %s", (size_t)number, attn_status_name(st),
             attn_cluster_last_error()->message);
    free(t);
    return NULL;
}

static void together(size_t n)
{
    pthread_t threads[64];
    for (size_t i = 0; i < n && i < 64; i++)
        pthread_create(&threads[i], NULL, one_of_many, (void *)i);
    for (size_t i = 0; i < n && i < 64; i++)
        pthread_join(threads[i], NULL);
    puts("ok");
}

static void answer(attn_status st, const struct text *t)
{
    if (st == ATTN_OK)
        printf("ok %s %d %d\n", t->at.member, t->n_followed, n_rebuilt);
    else
        printf("error %s: %s\n", attn_status_name(st), attn_cluster_last_error()->message);
}

static void place_line(char *words)
{
    struct text *t = calloc(1, sizeof *t);
    char *next;
    t->adapter = strtoull(words, &words, 10);
    for (uint64_t id; id = strtoull(words, &next, 10), next != words; words = next)
        t->ids[t->n++] = (uint32_t)id;
    attn_status st = place(t);
    if (st != ATTN_OK) {
        answer(st, t);
        free(t);
        return;
    }
    texts[n_texts] = t;
    printf("ok %d %s %u %llu\n", n_texts++, t->at.member, t->at.n_cached,
           (unsigned long long)t->at.seq.id);
}

static void of_sequence(const char *what, struct text *t, unsigned n)
{
    attn_status st = ATTN_OK;
    char was[128];
    strcpy(was, t->at.member);
    if (strcmp(what, "feed") == 0)
        st = append(&t->at, t->ids, t->at.n_cached, t->n - t->at.n_cached, true, 0);
    else if (strcmp(what, "close") == 0)
        st = attn_seq_close(t->at.pool, &t->at.seq, 0);
    else if (strcmp(what, "follow") == 0)
        st = follow(t, n * 1000ull);
    else if (strcmp(what, "decode") == 0)
        for (; n > 0 && st == ATTN_OK; n--)
            st = decode(t);
    else
        while (st == ATTN_OK && strcmp(was, t->at.member) == 0) {
            st = decode(t);
            t->n -= t->n > MAX_TOKENS / 4; /* written again, as often as it takes */
        }
    answer(st, t);
}

static void heads_line(void)
{
    attn_status st = ATTN_OK;
    has_heads = true;
    spec.name = "heads";
    spec.num_kv_heads = 1;
    spec.head_dim_v = LATENT;
    spec.is_v_in_k = 1;
    spec.q_nope_dim = NOPE;
    spec.out_dim = OUT;
    for (uint32_t l = 0; l < LAYERS && st == ATTN_OK; l++) {
        float *w = &weights[l][0][0][0];
        for (uint32_t i = 0; i < sizeof weights[l] / sizeof *w; i++)
            w[i] = value(l, 3, i / MAX_TOKENS, i % MAX_TOKENS, 0) / 4;
        st = attn_cluster_weights(cluster, spec.name, l, w, sizeof weights[l]);
    }
    if (st != ATTN_OK)
        printf("error %s: %s\n", attn_status_name(st), attn_cluster_last_error()->message);
    else
        puts("ok");
}

static void refused(attn_status st, const char *what)
{
    if (st != ATTN_EINVAL || strncmp(attn_cluster_last_error()->message, what, strlen(what)) != 0)
        errx(1, "%s: %s: %s", what, attn_status_name(st), attn_cluster_last_error()->message);
}

static void nulls(void)
{
    struct attn_cluster_seq seq = {.struct_size = sizeof seq};
    struct attn_pool_spec nameless = spec;
    const struct attn_tokens none = {.n = 0}, missing = {.n = 1};
    char *json;
    nameless.name = NULL;
    refused(attn_cluster_connect(NULL, NULL, &cluster), "url is NULL");
    refused(attn_cluster_connect("cluster+file:///x", NULL, NULL), "out_cluster is NULL");
    refused(attn_cluster_members(cluster, NULL), "out_json is NULL");
    refused(attn_cluster_members(NULL, &json), "c is NULL");
    refused(attn_cluster_weights(NULL, "p", 0, weights, 1), "c is NULL");
    refused(attn_cluster_weights(cluster, NULL, 0, weights, 1), "pool is NULL");
    refused(attn_cluster_weights(cluster, "p", 0, NULL, 1), "weights is NULL");
    attn_status (*const calls[])(
        attn_cluster *, const struct attn_pool_spec *, const struct attn_tokens *, uint64_t,
        struct attn_cluster_seq *) = {attn_cluster_place, attn_cluster_follow};
    for (int i = 0; i < 2; i++) {
        refused(calls[i](NULL, &spec, &none, 0, &seq), "c is NULL");
        refused(calls[i](cluster, NULL, &none, 0, &seq), "spec is NULL");
        refused(calls[i](cluster, &nameless, &none, 0, &seq), "spec.name is NULL");
        refused(calls[i](cluster, &spec, NULL, 0, &seq), "t is NULL");
        refused(calls[i](cluster, &spec, &missing, 0, &seq), "t.ids is NULL");
        refused(calls[i](cluster, &spec, &none, 0, NULL), "seq is NULL");
    }
    refused(attn_cluster_follow(cluster, &spec, &none, 0, &seq), "seq.client is none of");
    puts("ok");
}

int main(int argc, char **argv)
{
    static char line[1 << 16];
    struct attn_cluster_options o = {.struct_size = sizeof o, .timeout_us = 600000000};
    if (argc < 4)
        errx(2, "URL IDLE_MS PROBE_MS");
    setvbuf(stdout, NULL, _IOLBF, 0);
    o.idle_us = strtoull(argv[2], NULL, 10) * 1000;
    o.probe_us = strtoull(argv[3], NULL, 10) * 1000;
    o.rebuild = argc > 4 ? NULL : rebuild;
    attn_status st = attn_cluster_connect(argv[1], &o, &cluster);
    if (st != ATTN_OK)
        printf("error %s: %s\n", attn_status_name(st), attn_cluster_last_error()->message);
    else
        puts("ok");
    while (st == ATTN_OK && fgets(line, sizeof line, stdin) != NULL) {
        char what[16] = "", *json;
        unsigned s = 0, n = 0;
        sscanf(line, "%15s %u %u", what, &s, &n);
        if (strcmp(what, "place") == 0 && n_texts < MAX_SEQUENCES) {
            place_line(line + strlen("place"));
        } else if (strcmp(what, "together") == 0) {
            together(s);
        } else if (strcmp(what, "nulls") == 0) {
            nulls();
        } else if (strcmp(what, "heads") == 0) {
            heads_line();
        } else if (strcmp(what, "pool") == 0) {
            static char name[32];
            sscanf(line, "%*s %31s", name);
            spec.name = name;
            puts("ok");
        } else if (strcmp(what, "members") == 0 && attn_cluster_members(cluster, &json) == 0) {
            printf("ok %s\n", json);
            attn_free(json);
        } else if (s < (unsigned)n_texts) {
            of_sequence(what, texts[s], n);
        } else {
            errx(2, "no such line: %s", line);
        }
    }
    attn_cluster_close(cluster);
    for (int i = 0; i < n_texts; i++)
        free(texts[i]);
    return 0;
}
