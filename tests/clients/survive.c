/* survive.c: the workers of survive.h and their model: what each has sent, what was acknowledged,
 * and whether the daemon still has it. */
#include "tests/clients/survive.h"
#include "kernels/reference.h"
#include "tests/random.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { Q = SURVIVE_Q_HEADS, DIM = SURVIVE_DIM, MAX_STEP = 12, BLOCK = 16 };
#define TOO_CLOSE 1e-3 /* two blocks' bounds: either may be chosen */
#define TIMEOUT_US 120000000u /* a busy machine is no failure */

/* Element i of a token's k (kind 0), v (1) or of its query of head kind - 2; -1 to 1. */
static float element(uint32_t stream, uint32_t layer, uint32_t pos, uint32_t kind, uint32_t i)
{
    uint64_t x = ((uint64_t)stream << 32 | pos) * UINT64_C(0x9e3779b97f4a7c15) ^
                 ((uint64_t)layer << 40 | (uint64_t)kind << 20 | i) * UINT64_C(0xc2b2ae3d27d4eb4f);
    x ^= x >> 29;
    x *= UINT64_C(0xbf58476d1ce4e5b9);
    x ^= x >> 32;
    return (float)((double)(x >> 11) / (double)(UINT64_C(1) << 52) - 1.0);
}

/* The element of a token's k that the head's query of layer 0 is the unit vector of. */
static uint32_t unit_of(uint32_t pos, uint32_t head)
{
    return (pos * Q + head) % DIM;
}

static bool sees_newest_only(const struct survive_worker *w, uint32_t layer)
{
    return layer == 0 && w->choose_blocks == 0;
}

static float query(const struct survive_worker *w, uint32_t stream, uint32_t layer, uint32_t pos,
                   uint32_t head, uint32_t i)
{
    return sees_newest_only(w, layer) ? (float)(unit_of(pos, head) == i)
                                      : element(stream, layer, pos, 2 + head, i);
}

/* A token's k (kind 0) or v (1) as the cache has it. */
static void cached(const struct survive_worker *w, uint32_t stream, uint32_t layer, uint32_t pos,
                   uint32_t kind, float out[DIM])
{
    float row[DIM];
    for (uint32_t i = 0; i < DIM; i++)
        row[i] = element(stream, layer, pos, kind, i);
    reference_cached_row(ATTN_F32, w->kv_dtype, row, 0, DIM, out);
}

__attribute__((format(printf, 2, 3))) static bool failed(struct survive_worker *w,
                                                         const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (!atomic_exchange(&w->has_failed, true))
        vsnprintf(w->failure, sizeof w->failure, format, args);
    va_end(args);
    return false;
}

/* Every call of a worker must succeed, whatever happens to the daemon. */
static bool is_ok(struct survive_worker *w, attn_status st, const char *what, uint64_t name)
{
    if (st != ATTN_OK)
        return failed(w, "worker %u: %s of sequence %llu: %s", w->number, what,
                      (unsigned long long)name, attn_last_error()->message);
    atomic_fetch_add(&w->n_acknowledged, 1);
    return true;
}

/* --- a step and its answer -------------------------------------------------------------------- */

struct answer {
    float out[SURVIVE_TOKENS][Q][DIM], lse[SURVIVE_TOKENS][Q];
};

/* Of a pool that is split by heads there are two, with the same tokens. */
static attn_split split_of_env(void)
{
    attn_split split = ATTN_SPLIT_AUTO;
    if (getenv("E2E_SPLIT") != NULL)
        attn_split_parse(getenv("E2E_SPLIT"), &split);
    return split;
}

static uint32_t kv_heads(void)
{
    return split_of_env() == ATTN_SPLIT_HEADS ? 2 : 1;
}

/* One item; with has_kv it appends. */
static bool run_step(struct survive_worker *w, const struct survive_seq *s, uint32_t layer,
                     uint32_t pos, uint32_t n, bool has_kv, struct answer *a)
{
    float q[SURVIVE_TOKENS][Q][DIM], k[2 * SURVIVE_TOKENS][DIM], v[2 * SURVIVE_TOKENS][DIM];
    uint32_t n_heads = kv_heads();
    for (uint32_t t = 0; t < n; t++) {
        uint32_t stream = s->stream[layer][pos + t];
        for (uint32_t i = 0; i < DIM; i++) {
            for (uint32_t h = 0; h < n_heads; h++) {
                k[t * n_heads + h][i] = element(stream, layer, pos + t, 0, i);
                v[t * n_heads + h][i] = element(stream, layer, pos + t, 1, i);
            }
            for (uint32_t h = 0; h < Q; h++)
                q[t][h][i] = query(w, stream, layer, pos + t, h, i);
        }
    }
    struct attn_item item = {.seq = s->seq, .pos = pos, .n_tokens = n};
    struct attn_step step = {.struct_size = sizeof step,
                             .layer = layer,
                             .n_items = 1,
                             .items = &item,
                             .q = q,
                             .k = has_kv ? k : NULL,
                             .v = has_kv ? v : NULL,
                             .out = a->out,
                             .lse = &a->lse[0][0],
                             .choose_blocks = w->choose_blocks,
                             .timeout_us = TIMEOUT_US};
    memset(a, 0xa5, sizeof *a);
    return is_ok(w, attn_step(w->p, &step, NULL), has_kv ? "append" : "read", s->seq.id);
}

/* The newest key alone is seen: out is v and lse is q.k, which is an element of k. */
static bool check_bits(struct survive_worker *w, struct survive_seq *s, uint32_t pos, uint32_t n,
                       bool is_new, const struct answer *a)
{
    for (uint32_t t = 0; t < n; t++) {
        uint32_t stream = s->stream[0][pos + t];
        float keys[DIM], values[DIM];
        cached(w, stream, 0, pos + t, 0, keys);
        cached(w, stream, 0, pos + t, 1, values);
        for (uint32_t h = 0; h < Q; h++) {
            uint32_t bits;
            float k = keys[unit_of(pos + t, h)];
            memcpy(&bits, &a->lse[t][h], sizeof bits);
            if (is_new)
                s->lse_bits[pos + t][h] = bits;
            bool is_same = !w->is_exact || bits == s->lse_bits[pos + t][h];
            if (!(fabsf(a->lse[t][h] - k) <= 1e-5f) || !is_same)
                return failed(w, "worker %u: sequence %llu: k of token %u is %.9g, not %.9g",
                              w->number, (unsigned long long)s->seq.id, pos + t, a->lse[t][h], k);
            for (uint32_t i = 0; i < DIM; i++) {
                float v = values[i];
                /* a backend's product of a code and its scales may be rounded twice */
                bool is_v = w->is_exact && w->kv_dtype == ATTN_F32
                                ? memcmp(&a->out[t][h][i], &v, sizeof v) == 0
                                : fabsf(a->out[t][h][i] - v) <= 5e-7f * fabsf(v);
                if (!is_v)
                    return failed(w, "worker %u: sequence %llu: v of token %u is %.9g, not %.9g",
                                  w->number, (unsigned long long)s->seq.id, pos + t,
                                  a->out[t][h][i], v);
            }
        }
    }
    return true;
}

/* The tokens that the head's query at `at` visits; 0: its choice is too close to say. */
static uint32_t visited_by(const struct survive_worker *w, const struct survive_seq *s,
                           uint32_t layer, uint32_t at, uint32_t head, const float *k,
                           uint32_t *list)
{
    const uint32_t group = Q / kv_heads(), n = w->choose_blocks;
    float q[Q][DIM];
    double margin;
    for (uint32_t h = 0; h < group; h++)
        for (uint32_t i = 0; i < DIM; i++)
            q[h][i] = query(w, s->stream[layer][at], layer, at, head / group * group + h, i);
    const uint32_t n_visited = reference_choose(n > 0 ? n : UINT32_MAX, BLOCK, group, DIM, q[0], k,
                                                at + 1, list, &margin, NULL);
    return margin < TOO_CLOSE ? 0 : n_visited;
}

static bool check_attention(struct survive_worker *w, const struct survive_seq *s, uint32_t layer,
                            uint32_t pos, uint32_t n, const struct answer *a)
{
    float k[SURVIVE_TOKENS][DIM], v[SURVIVE_TOKENS][DIM];
    for (uint32_t j = 0; j < pos + n; j++) {
        cached(w, s->stream[layer][j], layer, j, 0, k[j]);
        cached(w, s->stream[layer][j], layer, j, 1, v[j]);
    }
    for (uint32_t t = 0; t < n; t++) {
        uint32_t at = pos + t;
        for (uint32_t h = 0; h < Q; h++) {
            double sum = 0, out[DIM] = {0}, q[DIM];
            uint32_t list[SURVIVE_TOKENS];
            const uint32_t n_visited = visited_by(w, s, layer, at, h, k[0], list);
            for (uint32_t i = 0; i < DIM; i++)
                q[i] = (double)query(w, s->stream[layer][at], layer, at, h, i);
            for (uint32_t x = 0; x < n_visited; x++) {
                const uint32_t j = list[x];
                double score = 0;
                for (uint32_t i = 0; i < DIM; i++)
                    score += q[i] * (double)k[j][i];
                double e = exp(score / sqrt(DIM));
                sum += e;
                for (uint32_t i = 0; i < DIM; i++)
                    out[i] += e * (double)v[j][i];
            }
            for (uint32_t i = 0; n_visited > 0 && i < DIM; i++)
                if (!(fabs(out[i] / sum - (double)a->out[t][h][i]) < 2e-5))
                    return failed(w,
                                  "worker %u: sequence %llu: output of token %u is %.9g, not %.9g",
                                  w->number, (unsigned long long)s->seq.id, at,
                                  (double)a->out[t][h][i], out[i] / sum);
        }
    }
    return true;
}

static bool check(struct survive_worker *w, struct survive_seq *s, uint32_t layer, uint32_t pos,
                  uint32_t n, bool is_new, const struct answer *a)
{
    return sees_newest_only(w, layer) ? check_bits(w, s, pos, n, is_new, a)
                                      : check_attention(w, s, layer, pos, n, a);
}

/* --- operations ------------------------------------------------------------------------------- */

static bool append(struct survive_worker *w, struct survive_seq *s, uint32_t layer, uint32_t n)
{
    struct answer a;
    uint32_t pos = s->len[layer];
    if (pos + n > SURVIVE_TOKENS)
        return true;
    for (uint32_t t = 0; t < n; t++)
        s->stream[layer][pos + t] = w->next_stream;
    if (!run_step(w, s, layer, pos, n, true, &a))
        return false;
    s->len[layer] = pos + n;
    atomic_fetch_add(&w->n_tokens, n);
    return check(w, s, layer, pos, n, true, &a);
}

static bool read_back(struct survive_worker *w, struct survive_seq *s)
{
    struct answer a;
    for (uint32_t layer = 0; layer < SURVIVE_LAYERS; layer++) {
        uint32_t n = s->len[layer];
        if (n > 0 &&
            !(run_step(w, s, layer, 0, n, false, &a) && check(w, s, layer, 0, n, false, &a)))
            return false;
    }
    return true;
}

static uint32_t least_len(const struct survive_seq *s)
{
    return s->len[0] < s->len[1] ? s->len[0] : s->len[1];
}

static bool cut(struct survive_worker *w, struct survive_seq *s)
{
    uint32_t most = s->len[0] > s->len[1] ? s->len[0] : s->len[1];
    uint32_t len = (uint32_t)(random_next(&w->random) % (most + 1));
    if (!is_ok(w, attn_seq_truncate(w->p, &s->seq, len, TIMEOUT_US), "truncate", s->seq.id))
        return false;
    for (uint32_t layer = 0; layer < SURVIVE_LAYERS; layer++)
        s->len[layer] = len < s->len[layer] ? len : s->len[layer];
    w->next_stream++; /* what is written there next differs */
    return true;
}

static bool open_seq(struct survive_worker *w, struct survive_seq *s)
{
    memset(s, 0, sizeof *s);
    uint64_t name = ++w->next_name;
    s->is_open = true;
    return is_ok(w, attn_seq_open(w->p, name, TIMEOUT_US, &s->seq), "open", name);
}

static bool fork_seq(struct survive_worker *w, const struct survive_seq *from,
                     struct survive_seq *s)
{
    uint32_t len = (uint32_t)(random_next(&w->random) % (least_len(from) + 1));
    *s = *from;
    s->len[0] = s->len[1] = len;
    return is_ok(w, attn_seq_fork(w->p, &from->seq, ++w->next_name, len, TIMEOUT_US, &s->seq, NULL),
                 "fork", from->seq.id);
}

static bool close_seq(struct survive_worker *w, struct survive_seq *s)
{
    s->is_open = false;
    return is_ok(w, attn_seq_close(w->p, &s->seq, TIMEOUT_US), "close", s->seq.id);
}

static bool adopt(struct survive_worker *w, struct survive_seq *s)
{
    uint32_t len[SURVIVE_LAYERS];
    if (!is_ok(w, attn_seq_adopt(w->p, s->seq.id, TIMEOUT_US, &s->seq, len), "adopt", s->seq.id))
        return false;
    if (len[0] == s->len[0] && len[1] == s->len[1])
        return true;
    return failed(w, "worker %u: sequence %llu has %u and %u tokens, acknowledged were %u and %u",
                  w->number, (unsigned long long)s->seq.id, len[0], len[1], s->len[0], s->len[1]);
}

static bool work(struct survive_worker *w)
{
    uint32_t at = (uint32_t)(random_next(&w->random) % SURVIVE_SEQS);
    uint32_t what = (uint32_t)(random_next(&w->random) % 100);
    struct survive_seq *s = &w->seqs[at];
    if (!s->is_open)
        return open_seq(w, s);
    if (what < 60) {
        uint32_t n = 1 + (uint32_t)(random_next(&w->random) % MAX_STEP);
        return append(w, s, 0, n) && (what % 8 == 0 || append(w, s, 1, n));
    }
    if (what < 80)
        return read_back(w, s);
    if (what < 87)
        return cut(w, s);
    if (what < 94) {
        struct survive_seq *other = &w->seqs[(at + 1) % SURVIVE_SEQS];
        return other->is_open ? close_seq(w, other) : fork_seq(w, s, other);
    }
    return adopt(w, s);
}

static void *run(void *arg)
{
    struct survive_worker *w = arg;
    while (!atomic_load(&w->is_stopping) && work(w))
        ;
    return NULL;
}

/* --- life ------------------------------------------------------------------------------------- */

bool survive_start(struct survive_worker *w, const char *url, uint32_t number, uint64_t seed)
{
    struct attn_layer layers[SURVIVE_LAYERS] = {{.scale = 1, .window_tokens = 1}};
    const char *kv_dtype = getenv("SURVIVE_KV_DTYPE"), *choose = getenv("SURVIVE_CHOOSE");
    memset(w, 0, sizeof *w);
    w->choose_blocks = choose == NULL ? 0 : (uint32_t)strtoul(choose, NULL, 10);
    if (w->choose_blocks > 0)
        layers[0] = layers[1];
    w->kv_dtype = kv_dtype == NULL ? ATTN_F32 : attn_dtype_parse(kv_dtype);
    if (w->kv_dtype == ATTN_DTYPE_NONE)
        return failed(w, "SURVIVE_KV_DTYPE is %s", kv_dtype);
    struct attn_pool_spec spec = {.struct_size = sizeof spec,
                                  .layer_struct_size = sizeof layers[0],
                                  .name = "survive",
                                  .num_layers = SURVIVE_LAYERS,
                                  .num_q_heads = Q,
                                  .num_kv_heads = kv_heads(),
                                  .block_tokens = BLOCK,
                                  .head_dim_k = DIM,
                                  .n_blocks = 2048,
                                  .q_dtype = ATTN_F32,
                                  .kv_dtype = w->kv_dtype,
                                  .split = split_of_env(),
                                  .n_layers = SURVIVE_LAYERS,
                                  .layers = layers};
    struct attn_client_info info = {.struct_size = sizeof info};
    w->number = number;
    w->random = seed * UINT64_C(0x9e3779b97f4a7c15) + number;
    w->next_stream = number << 24;
    w->next_name = (uint64_t)(number + 1) << 32;
    if (attn_client_open(url, NULL, TIMEOUT_US, &w->c) != ATTN_OK ||
        attn_pool_create(w->c, &spec, TIMEOUT_US, &w->p) != ATTN_OK)
        return failed(w, "worker %u: %s", number, attn_last_error()->message);
    w->is_exact = attn_client_info(w->c, &info) == ATTN_OK && strcmp(info.backend, "cpu") == 0;
    if (pthread_create(&w->thread, NULL, run, w) != 0)
        return failed(w, "worker %u has no thread", number);
    return true;
}

bool survive_stop(struct survive_worker *w)
{
    atomic_store(&w->is_stopping, true);
    pthread_join(w->thread, NULL);
    bool is_good = !atomic_load(&w->has_failed);
    for (uint32_t i = 0; i < SURVIVE_SEQS && is_good; i++)
        if (w->seqs[i].is_open)
            is_good = read_back(w, &w->seqs[i]) && close_seq(w, &w->seqs[i]);
    attn_pool_close(w->p);
    attn_client_close(w->c);
    return is_good;
}
