/* chosen.c: see chosen.h. */
#include "tests/kernels/chosen.h"

#include "kernels/reference.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TOO_CLOSE 1e-3 /* what f32 sums may be off, and more */

/* One query and kv head at work; q and k are [group][dk] and [end][dk] of them. */
struct query {
    struct check *check;
    const struct check_item *it;
    uint32_t token, kv_head, end; /* end: one past the last token that it sees */
    float *q, *k, *v;
};

static uint32_t group_of(const struct query *x)
{
    return x->check->config.num_q_heads / x->check->config.num_kv_heads;
}

static bool fails(const struct query *x, const char *what)
{
    fprintf(stderr,
            "token %" PRIu32 ", kv head %" PRIu32 " of sequence %" PRIu32 " at %" PRIu32
            ", %" PRIu32 " blocks: %s (seed %" PRIu64 ")\n",
            x->token, x->kv_head, x->it->seq, x->it->pos, x->it->n_chosen, what, x->check->seed);
    return false;
}

/* Puts the tokens that it visits into list. Returns how many they are, or 0: too close to say. */
static uint32_t visited_by(const struct query *x, uint32_t *list)
{
    const struct backend_pool_config *g = &x->check->config;
    double margin;
    const uint32_t n =
        reference_choose(x->it->n_chosen > 0 ? x->it->n_chosen : x->end, g->block_tokens,
                         group_of(x), g->head_dim_k, x->q, x->k, x->end, list, &margin, NULL);
    return margin < TOO_CLOSE ? 0 : n;
}

/* What the item says that the query visits: as many blocks as it may, ascending, its newest and the
 * sequence's first among them. */
static bool is_a_choice(const struct query *x, const uint32_t *said)
{
    const uint32_t n_blocks = (x->end - 1) / x->check->config.block_tokens + 1;
    const uint32_t n = x->it->n_chosen < n_blocks ? x->it->n_chosen : n_blocks;
    bool ok = said[n - 1] == n_blocks - 1 && (n == 1 || said[0] == 0);
    for (uint32_t i = 1; i < n; i++)
        ok &= said[i - 1] < said[i];
    for (uint32_t i = n; i < x->it->n_chosen; i++)
        ok &= said[i] == UINT32_MAX;
    return ok;
}

/* It is what the reference visits: n tokens of list. */
static bool is_that_choice(const struct query *x, const uint32_t *said, const uint32_t *list,
                           uint32_t n)
{
    const uint32_t per_block = x->check->config.block_tokens;
    for (uint32_t i = 0, at = 0; i < n; i++) {
        at += i > 0 && list[i] / per_block != list[i - 1] / per_block;
        if (said[at] != list[i] / per_block)
            return false;
    }
    return true;
}

static bool is_close(double got, double want, double atol, double rtol)
{
    return got == want || fabs(got - want) <= atol + rtol * fabs(want);
}

/* Its outputs, where it visits n tokens of list. */
static bool check_outputs_of(const struct query *x, const uint32_t *list, uint32_t n)
{
    const struct backend_pool_config *g = &x->check->config;
    const struct check_item *it = x->it;
    const uint32_t group = group_of(x), dv = g->head_dim_v, starts[] = {0, n};
    const size_t head = (size_t)x->token * g->num_q_heads + (size_t)x->kv_head * group;
    const struct reference_seen seen = {.starts = starts, .tokens = list};
    const struct reference_bound bound = reference_bound_of(g->q_dtype, g->q_dtype);
    struct attn_layer_spec spec = x->check->specs[x->check->seqs[it->seq].layer];
    double *out = malloc(((size_t)group * dv + group) * sizeof *out), *lse = out + group * dv;
    char what[128];
    if (spec.sink_logits != NULL)
        spec.sink_logits += x->kv_head * group;
    bool ok = reference_attend_seen(&spec, group, 1, g->head_dim_k, dv, ATTN_F32, x->q, 1,
                                    x->end - 1, x->k, x->v, x->end, &seen, out, lse) == ATTN_OK;
    for (size_t i = 0; ok && i < (size_t)group * dv; i++) {
        const double got = reference_get(g->q_dtype, it->out, head * dv + i);
        snprintf(what, sizeof what, "out[%zu] is %.9g, reference %.9g", i, got, out[i]);
        ok = is_close(got, out[i], bound.atol, bound.rtol) || fails(x, what);
    }
    for (uint32_t i = 0; ok && it->lse != NULL && i < group; i++) {
        const double got = (double)it->lse[head + i];
        snprintf(what, sizeof what, "lse[%" PRIu32 "] is %.9g, reference %.9g", i, got, lse[i]);
        ok = is_close(got, lse[i], bound.lse_atol, bound.lse_rtol) || fails(x, what);
    }
    free(out);
    return ok;
}

static bool check_query(const struct query *x, struct chosen_count *count)
{
    const struct backend_pool_config *g = &x->check->config;
    const uint32_t group = group_of(x), dk = g->head_dim_k;
    const size_t row = (size_t)x->token * g->num_kv_heads + x->kv_head;
    const uint32_t *said = x->it->chosen != NULL ? x->it->chosen + row * x->it->n_chosen : NULL;
    uint32_t list[CHECK_MAX_TOKENS];
    for (size_t i = 0; i < (size_t)group * dk; i++)
        x->q[i] = (float)reference_get(g->q_dtype, x->it->q, row * group * dk + i);
    const uint32_t n = visited_by(x, list);
    count->n_queries++;
    count->n_left_out += n == 0;
    if (said != NULL && !is_a_choice(x, said))
        return fails(x, "what it says is no choice");
    if (said != NULL && n > 0 && !is_that_choice(x, said, list, n))
        return fails(x, "what it says is another choice");
    if (check_is_missed(x->check, x->check->seqs[x->it->seq].own, said, x->it->n_chosen)) {
        count->n_missed++;
        return true;
    }
    return n == 0 || check_outputs_of(x, list, n);
}

bool chosen_check(struct check *c, const struct check_item *it, struct chosen_count *count)
{
    const struct backend_pool_config *g = &c->config;
    const struct check_seq *s = &c->seqs[it->seq];
    const uint32_t end = it->pos + it->n_tokens, dk = g->head_dim_k, dv = g->head_dim_v;
    struct query x = {.check = c, .it = it};
    bool ok = true;
    x.q = malloc((size_t)g->num_q_heads * dk * sizeof *x.q);
    x.k = malloc((size_t)end * dk * sizeof *x.k);
    x.v = malloc((size_t)end * dv * sizeof *x.v);
    for (x.kv_head = 0; x.kv_head < g->num_kv_heads && ok; x.kv_head++) {
        for (size_t j = 0; j < end; j++) {
            const size_t row = j * g->num_kv_heads + x.kv_head;
            memcpy(x.k + j * dk, s->k + row * dk, dk * sizeof *x.k);
            memcpy(x.v + j * dv, s->v + row * dv, dv * sizeof *x.v);
        }
        for (x.token = 0; x.token < it->n_tokens && ok; x.token++) {
            x.end = c->specs[s->layer].is_full ? end : it->pos + x.token + 1;
            if (it->n_tokens < 16 || check_random(c, 8) == 0)
                ok = check_query(&x, count);
        }
    }
    free(x.q);
    free(x.k);
    free(x.v);
    return ok;
}
