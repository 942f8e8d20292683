/* test_canary.c: the canary's arithmetic: right outputs of every kind of layer are within their
 * bound whatever the size of the values, wrong ones are beyond it; and what changes before the
 * engine is idle is not looked at. */
#include <math.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/health.h"
#include "daemon/engine/step/canary_watch.h"
#include "kernels/reference.h"
#include "tests/daemon/engine/engine_rig.h"
#include "tests/random.h"

enum { Q_HEADS = 4, KV_HEADS = 2, DIM = 32, TOKENS = 8, LAYERS = 2, N_KV = 37, N_Q = 5 };

static uint64_t random_state = 88172645463325252u;

static double random_value(void)
{
    return (double)(random_mixed(&random_state) >> 11) * 0x1p-53 * 2 - 1;
}

/* A layer's whole history and what a right backend makes of it. */
struct world {
    struct backend_pool_config config;
    struct attn_layer_spec layers[LAYERS];
    struct kv_layout layout;
    uint8_t *blocks; /* as the backend has them */
    uint32_t n_blocks, n_chosen;
    const float *k, *v; /* [N_KV][KV_HEADS][DIM] as they read back */
    uint8_t q[N_Q * Q_HEADS * DIM * 4], out[N_Q * Q_HEADS * DIM * 4];
    float lse[N_Q * Q_HEADS];
};

/* Writes one head's row of K or V where a pool has it; what it reads as goes to `read`. */
static void put_row(struct world *w, uint32_t layer, bool is_v, uint32_t head, uint32_t token,
                    const double *row, float *read)
{
    const struct kv_layout *l = &w->layout;
    uint8_t *at = w->blocks + token / TOKENS * l->block_bytes + layer * l->layer_bytes;
    uint32_t t = token % TOKENS;
    uint8_t *part = at + (is_v ? l->v_offset : 0) + head * l->k_head_bytes;
    if (!l->is_quantised) {
        for (uint32_t d = 0; d < DIM; d++) {
            reference_put(w->config.kv_dtype, part, (size_t)t * DIM + d, row[d]);
            read[d] = (float)reference_get(w->config.kv_dtype, part, (size_t)t * DIM + d);
        }
        return;
    }
    double back[DIM];
    uint8_t *codes = part + (size_t)t * l->k_row_bytes; /* V's rows are as long */
    uint8_t *scales =
        at + (is_v ? l->v_scales : l->k_scales) + (head * TOKENS + t) * l->k_scale_bytes;
    reference_quantise(w->config.kv_dtype, row, DIM, codes, scales);
    reference_dequantise(w->config.kv_dtype, codes, scales, DIM, back);
    for (uint32_t d = 0; d < DIM; d++)
        read[d] = (float)back[d];
}

/* The outputs of a layer whose queries visit n_chosen blocks, all but the plant-th of which are the
 * reference's; in that one's place is a block that it leaves out. */
static void choose_blocks(struct world *w, uint32_t n_chosen, uint32_t plant)
{
    enum { GROUP = Q_HEADS / KV_HEADS };
    static float k[N_KV * DIM], v[N_KV * DIM], q[GROUP * DIM];
    w->n_chosen = n_chosen;
    for (uint32_t t = 0; t < N_Q; t++)
        for (uint32_t h = 0; h < KV_HEADS; h++) {
            const uint32_t end = N_KV - N_Q + t + 1, head = t * Q_HEADS + h * GROUP;
            uint32_t list[N_KV + TOKENS], n = 0;
            double margin, out[GROUP * DIM], lse[GROUP];
            struct attn_layer_spec spec = w->layers[1];
            if (spec.sink_logits != NULL)
                spec.sink_logits += h * GROUP;
            for (uint32_t j = 0; j < N_KV; j++)
                for (uint32_t d = 0; d < DIM; d++) {
                    k[j * DIM + d] = w->k[(j * KV_HEADS + h) * DIM + d];
                    v[j * DIM + d] = w->v[(j * KV_HEADS + h) * DIM + d];
                }
            for (uint32_t i = 0; i < GROUP * DIM; i++)
                q[i] = (float)reference_get(w->config.q_dtype, w->q, head * DIM + i);
            n = reference_choose(n_chosen, TOKENS, GROUP, DIM, q, k, end, list, &margin, NULL);
            bool is_taken[N_KV] = {false};
            for (uint32_t i = 0; i < n; i++)
                is_taken[list[i] / TOKENS] = true;
            uint32_t other = 1;
            while (is_taken[other])
                other++;
            for (uint32_t i = 0; i < TOKENS && plant > 0; i++)
                list[plant * TOKENS + i] = other * TOKENS + i;
            const uint32_t starts[] = {0, n};
            const struct reference_seen seen = {.starts = starts, .tokens = list};
            assert_int_equal(reference_attend_seen(&spec, GROUP, 1, DIM, DIM, ATTN_F32, q, 1,
                                                   end - 1, k, v, end, &seen, out, lse),
                             ATTN_OK);
            for (uint32_t i = 0; i < GROUP * DIM; i++)
                reference_put(w->config.q_dtype, w->out, head * DIM + i, out[i]);
            for (uint32_t i = 0; i < GROUP; i++)
                w->lse[head + i] = (float)lse[i];
        }
}

/* A world whose layers are all of spec, without blocks' bytes; k and v are the caller's. */
static void world_open(struct world *w, const struct attn_layer_spec *spec,
                       struct backend_pool_config config, float *k, float *v)
{
    *w = (struct world){.n_blocks = (N_KV - 1) / TOKENS + 1, .k = k, .v = v, .config = config};
    w->layers[0] = w->layers[1] = *spec;
    w->config.num_layers = LAYERS;
    w->config.num_q_heads = Q_HEADS;
    w->config.head_dim_k = DIM;
    w->config.block_tokens = TOKENS;
    w->config.n_blocks = 8;
    w->config.layers = w->layers;
    w->layout = kv_layout_of(&w->config);
    w->blocks = malloc(w->n_blocks * w->layout.block_bytes);
    memset(w->blocks, 0xff, w->n_blocks * w->layout.block_bytes); /* NaN where nothing is */
}

/* V in K: then V is K. */
static void world_make_of(struct world *w, struct attn_layer_spec spec, attn_dtype q, attn_dtype kv,
                          double size, bool is_v_in_k)
{
    static float k[N_KV * KV_HEADS * DIM], v[N_KV * KV_HEADS * DIM], qf[N_Q * Q_HEADS * DIM];
    static double out[N_Q * Q_HEADS * DIM], lse[N_Q * Q_HEADS];
    const struct backend_pool_config config = {.num_kv_heads = KV_HEADS,
                                               .head_dim_v = DIM,
                                               .is_v_in_k = is_v_in_k,
                                               .q_dtype = q,
                                               .kv_dtype = kv};
    world_open(w, &spec, config, k, v);
    for (uint32_t t = 0; t < N_KV; t++)
        for (uint32_t h = 0; h < KV_HEADS; h++)
            for (int is_v = 0; is_v < 2; is_v++) {
                double row[DIM];
                if (is_v && is_v_in_k) {
                    memcpy(v + (t * KV_HEADS + h) * DIM, k + (t * KV_HEADS + h) * DIM,
                           DIM * sizeof *v);
                    continue;
                }
                for (uint32_t d = 0; d < DIM; d++)
                    row[d] = size * random_value();
                put_row(w, 1, is_v, h, t, row, (is_v ? v : k) + (t * KV_HEADS + h) * DIM);
            }
    for (uint32_t i = 0; i < N_Q * Q_HEADS * DIM; i++) {
        reference_put(q, w->q, i, random_value());
        qf[i] = (float)reference_get(q, w->q, i);
    }
    assert_int_equal(reference_attend(&spec, Q_HEADS, KV_HEADS, DIM, DIM, ATTN_F32, qf, N_Q,
                                      N_KV - N_Q, k, v, N_KV, out, lse),
                     ATTN_OK);
    for (uint32_t i = 0; i < N_Q * Q_HEADS * DIM; i++)
        reference_put(q, w->out, i, out[i]);
    for (uint32_t i = 0; i < N_Q * Q_HEADS; i++)
        w->lse[i] = (float)lse[i];
}

static void world_make(struct world *w, struct attn_layer_spec spec, attn_dtype q, attn_dtype kv,
                       double size)
{
    world_make_of(w, spec, q, kv, size, false);
}

enum { NOPE = 16, ROPE = 8, LATENT = DIM - ROPE, OUT = 24, HEAD_ROWS = NOPE + OUT };
static uint8_t head_weights[Q_HEADS * HEAD_ROWS * LATENT * 4]; /* of a world with projections */

static struct canary_verdict look(struct world *w, uint64_t chance)
{
    struct canary c;
    struct canary_verdict v;
    struct canary_item item = {.config = &w->config,
                               .layer = 1,
                               .pos = N_KV - N_Q,
                               .n_tokens = N_Q,
                               .n_chosen = w->n_chosen,
                               .q = w->q,
                               .out = w->out,
                               .lse = w->lse};
    assert_int_equal(canary_init(&c, &item, chance), ATTN_OK);
    while (canary_wants_weights(&c))
        canary_take_weights(&c, head_weights + canary_weights_at(&c));
    for (uint32_t i = 0; i < c.n_blocks; i++)
        if (canary_sees_block(&c, i))
            canary_take_block(&c, i, w->blocks + i * w->layout.block_bytes);
    assert_int_equal(canary_judge(&c, &v), ATTN_OK);
    canary_fini(&c);
    return v;
}

static const float slopes[Q_HEADS] = {0.5f, 0.25f, 0.125f, 0.0625f};
static const float sinks[Q_HEADS] = {1, -1, 3, 0.5f};
static const struct attn_layer_spec kinds[] = {
    {.scale = 0.25f},
    {.scale = 0.25f, .window_tokens = 9},
    {.scale = 0.25f, .window_tokens = 9, .sink_tokens = 3},
    {.scale = 0.25f, .soft_cap = 2},
    {.scale = 0.25f, .is_full = true},
    {.scale = 0.25f, .is_full = true, .alibi_slopes = slopes},
    {.scale = 0.25f, .alibi_slopes = slopes},
    {.scale = 0.25f, .sink_logits = sinks},
    {.scale = 0.25f, .n_branches = 2, .branches = {{8, 1}, {32, 2}}},
};
static const attn_dtype types[][2] = {{ATTN_F32, ATTN_F32},      {ATTN_BF16, ATTN_BF16},
                                      {ATTN_F16, ATTN_F16},      {ATTN_BF16, ATTN_INT8},
                                      {ATTN_F32, ATTN_FP8_E4M3}, {ATTN_F16, ATTN_NVFP4},
                                      {ATTN_F32, ATTN_MXFP4}};
enum {
    N_KINDS = sizeof kinds / sizeof kinds[0],
    N_TYPES = sizeof types / sizeof types[0],
    LOOKS = 24,
};

/* Of some looks, the largest ratio; 0: each was NaN. */
static double worst_of(struct world *w)
{
    double worst = 0;
    for (int i = 0; i < LOOKS; i++)
        worst = fmax(worst, look(w, random_mixed(&random_state)).ratio);
    return worst;
}

static void right_outputs_of_every_kind_of_layer_pass(void **state)
{
    (void)state;
    struct world w;
    for (size_t k = 0; k < N_KINDS; k++)
        for (size_t t = 0; t < N_TYPES; t++)
            for (double size = 0.01; size < 1000; size *= 100) {
                world_make_of(&w, kinds[k], types[t][0], types[t][1], size, (k + t) % 2);
                for (int i = 0; i < LOOKS; i++) {
                    struct canary_verdict v = look(&w, random_mixed(&random_state));
                    if (!(v.ratio <= 1))
                        fail_msg("kind %zu, types %zu, size %g: %g instead of %g, %g of the bound",
                                 k, t, size, v.got, v.expected, v.ratio);
                }
                free(w.blocks);
            }
}

static void wrong_ones_do_not(void **state)
{
    (void)state;
    struct world w;
    for (size_t k = 0; k < N_KINDS; k++) {
        struct attn_layer_spec other = kinds[k];
        world_make(&w, kinds[k], ATTN_BF16, ATTN_BF16, 1);
        other.scale *= 1.5f; /* what a backend with a bug would compute by */
        w.layers[1] = other;
        assert_true(worst_of(&w) > 1);
        free(w.blocks);
    }
    world_make(&w, kinds[0], ATTN_F32, ATTN_F32, 1);
    for (uint32_t i = 0; i < N_Q * Q_HEADS; i++)
        w.lse[i] += 0.01f;
    struct canary_verdict v = look(&w, random_mixed(&random_state));
    assert_true(v.ratio > 1 && v.element == DIM);
    for (uint32_t i = 0; i < N_Q * Q_HEADS * DIM; i++)
        reference_put(ATTN_F32, w.out, i, NAN);
    assert_true(isinf(look(&w, random_mixed(&random_state)).ratio));
    free(w.blocks);
}

static double head_weight(const struct world *w, uint32_t head, uint32_t row, uint32_t d)
{
    return reference_get(w->config.q_dtype, head_weights,
                         ((size_t)head * HEAD_ROWS + row) * LATENT + d);
}

static double rounded(attn_dtype d, double x)
{
    uint8_t bytes[4];
    reference_put(d, bytes, 0, x);
    return reference_get(d, bytes, 0);
}

/* A pool with projections, and what a right backend makes of its heads. size: of the latents. */
static void world_project(struct world *w, attn_dtype q, attn_dtype kv, double size)
{
    static float k[N_KV * DIM], v[N_KV * LATENT], wide[N_Q * Q_HEADS * DIM];
    static double out[N_Q * Q_HEADS * LATENT], lse[N_Q * Q_HEADS];
    const struct attn_layer_spec spec = {.scale = 0.25f};
    const struct backend_pool_config config = {.num_kv_heads = 1,
                                               .head_dim_v = LATENT,
                                               .is_v_in_k = true,
                                               .q_nope_dim = NOPE,
                                               .out_dim = OUT,
                                               .q_dtype = q,
                                               .kv_dtype = kv};
    world_open(w, &spec, config, k, v);
    for (uint32_t t = 0; t < N_KV; t++) {
        double row[DIM];
        for (uint32_t d = 0; d < DIM; d++)
            row[d] = size * random_value();
        put_row(w, 1, false, 0, t, row, k + (size_t)t * DIM);
        memcpy(v + (size_t)t * LATENT, k + (size_t)t * DIM, LATENT * sizeof *v);
    }
    for (uint32_t i = 0; i < Q_HEADS * HEAD_ROWS * LATENT; i++)
        reference_put(q, head_weights, i, random_value());
    for (uint32_t i = 0; i < N_Q * Q_HEADS * (NOPE + ROPE); i++)
        reference_put(q, w->q, i, random_value());
    for (uint32_t row = 0; row < N_Q * Q_HEADS; row++)
        for (uint32_t d = 0; d < DIM; d++) {
            const size_t at = (size_t)row * (NOPE + ROPE);
            double x = d < LATENT ? 0 : reference_get(q, w->q, at + NOPE + d - LATENT);
            for (uint32_t i = 0; i < NOPE && d < LATENT; i++)
                x += reference_get(q, w->q, at + i) * head_weight(w, row % Q_HEADS, i, d);
            wide[row * DIM + d] = (float)rounded(q, x);
        }
    assert_int_equal(reference_attend(&spec, Q_HEADS, 1, DIM, LATENT, ATTN_F32, wide, N_Q,
                                      N_KV - N_Q, k, v, N_KV, out, lse),
                     ATTN_OK);
    for (uint32_t row = 0; row < N_Q * Q_HEADS; row++) {
        w->lse[row] = (float)lse[row];
        for (uint32_t i = 0; i < OUT; i++) {
            double x = 0;
            for (uint32_t d = 0; d < LATENT; d++)
                x += head_weight(w, row % Q_HEADS, NOPE + i, d) * rounded(q, out[row * LATENT + d]);
            reference_put(q, w->out, row * OUT + i, x);
        }
    }
}

/* What a right backend computes passes; that of one that leaves the last of q's elements out, takes
 * another head's weights, or multiplies by a row's neighbour, does not. */
static void projected_heads_are_judged(void **state)
{
    (void)state;
    struct world w;
    for (size_t t = 0; t < N_TYPES; t++)
        for (double size = 0.01; size < 1000; size *= 100) {
            world_project(&w, types[t][0], types[t][1], size);
            for (int i = 0; i < LOOKS; i++) {
                struct canary_verdict v = look(&w, random_mixed(&random_state));
                if (!(v.ratio <= 1))
                    fail_msg("types %zu, size %g: %g instead of %g, %g of the bound", t, size,
                             v.got, v.expected, v.ratio);
            }
            free(w.blocks);
        }
    for (int bug = 0; bug < 3; bug++) {
        world_project(&w, ATTN_BF16, ATTN_BF16, 1);
        const size_t el = 2, head = HEAD_ROWS * LATENT * el, row = LATENT * el;
        if (bug == 0) /* what it computed by, seen from the canary */
            memset(head_weights + (NOPE - 4) * row, 0, 4 * row);
        else if (bug == 1)
            memmove(head_weights, head_weights + head, (Q_HEADS - 1) * head);
        else
            memmove(head_weights + NOPE * row, head_weights + (NOPE + 1) * row, (OUT - 1) * row);
        double worst = 0;
        for (int i = 0; i < 4 * LOOKS; i++)
            worst = fmax(worst, look(&w, random_mixed(&random_state)).ratio);
        if (!(worst > 1))
            fail_msg("bug %d: %g of the bound", bug, worst);
        free(w.blocks);
    }
}

/* One wrong element of any head that shares the row's K and V is found by each look, by its
 * name. */
static void no_head_of_a_row_is_left_out(void **state)
{
    (void)state;
    struct world w;
    for (int is_projected = 0; is_projected < 2; is_projected++)
        for (uint32_t head = 0; head < Q_HEADS; head++) {
            const uint32_t dim = is_projected ? OUT : DIM, n_groups = is_projected ? 1 : KV_HEADS;
            const uint32_t element = (7 * head + 3) % dim;
            uint32_t n_found = 0;
            if (is_projected)
                world_project(&w, ATTN_BF16, ATTN_BF16, 1);
            else
                world_make(&w, kinds[0], ATTN_BF16, ATTN_BF16, 1);
            for (uint32_t t = 0; t < N_Q; t++) {
                const size_t at = ((size_t)t * Q_HEADS + head) * dim + element;
                reference_put(ATTN_BF16, w.out, at, 10 + reference_get(ATTN_BF16, w.out, at));
            }
            for (int i = 0; i < LOOKS; i++) {
                struct canary_verdict v = look(&w, random_mixed(&random_state));
                if (!(v.ratio > 1))
                    continue;
                assert_int_equal(v.head, head);
                assert_int_equal(v.element, element);
                n_found++;
            }
            assert_true(n_groups == 1 ? n_found == LOOKS : n_found > 0);
            free(w.blocks);
        }
}

/* Of many heads over many keys some, each as often as another: what a look takes is bounded. */
static void many_heads_of_long_items_take_turns(void **state)
{
    (void)state;
    enum { HEADS = 128, KEYS = 15001, CHANCES = 400 };
    static const struct attn_layer_spec layer = {.scale = 0.25f};
    const struct backend_pool_config config = {.num_layers = 1,
                                               .num_q_heads = HEADS,
                                               .num_kv_heads = 1,
                                               .head_dim_k = 16,
                                               .head_dim_v = 8,
                                               .is_v_in_k = true,
                                               .q_nope_dim = 8,
                                               .out_dim = 8,
                                               .block_tokens = 64,
                                               .q_dtype = ATTN_F32,
                                               .kv_dtype = ATTN_F32,
                                               .layers = &layer};
    float *tensor = calloc(HEADS * 16, sizeof *tensor);
    struct canary_item item = {.config = &config, .n_tokens = 1, .q = tensor, .out = tensor};
    uint32_t n_looks[HEADS] = {0};
    struct canary c;
    item.pos = 900;
    assert_int_equal(canary_init(&c, &item, 1), ATTN_OK);
    assert_int_equal(c.n_heads, HEADS);
    canary_fini(&c);
    item.pos = KEYS - 1;
    for (uint32_t i = 0; i < CHANCES; i++) {
        assert_int_equal(canary_init(&c, &item, random_mixed(&random_state)), ATTN_OK);
        assert_int_equal(c.n_heads, CANARY_MAX_HEAD_KEYS / KEYS);
        assert_true(c.head + c.n_heads <= HEADS);
        for (uint32_t h = 0; h < c.n_heads; h++)
            n_looks[c.head + h]++;
        canary_fini(&c);
    }
    for (uint32_t h = 0; h < HEADS; h++)
        assert_true(n_looks[h] > CHANCES * (CANARY_MAX_HEAD_KEYS / KEYS) / HEADS / 4);
    free(tensor);
}

static void choices_are_judged(void **state)
{
    (void)state;
    struct world w;
    for (size_t t = 0; t < N_TYPES; t++)
        for (double size = 0.01; size < 1000; size *= 100)
            for (uint32_t n_chosen = 1; n_chosen < 6; n_chosen++) {
                uint32_t n_judged = 0;
                world_make_of(&w, kinds[t % 2 ? 0 : 7], types[t][0], types[t][1], size, t % 2);
                choose_blocks(&w, n_chosen, 0);
                for (int i = 0; i < LOOKS; i++) {
                    struct canary_verdict v = look(&w, random_mixed(&random_state));
                    n_judged += v.ratio <= 1;
                    if (v.ratio > 1)
                        fail_msg("types %zu, size %g, %u blocks: %g instead of %g, %g of the bound",
                                 t, size, n_chosen, v.got, v.expected, v.ratio);
                }
                assert_true(n_judged > LOOKS / 2);
                free(w.blocks);
            }
}

static void a_wrong_choice_is_found(void **state)
{
    (void)state;
    struct world w;
    for (size_t t = 0; t < N_TYPES; t++)
        for (uint32_t n_chosen = 3; n_chosen < 5; n_chosen++) {
            world_make_of(&w, kinds[0], types[t][0], types[t][1], 1, t % 2);
            choose_blocks(&w, n_chosen, n_chosen - 2);
            assert_true(worst_of(&w) > 1);
            free(w.blocks);
        }
}

/* Keys of two blocks in another order have equal bounds, whose sums in f32 may differ; a block with
 * a NaN may come anywhere. */
static void a_choice_that_rounding_decides_is_not_judged(void **state)
{
    (void)state;
    for (int has_nan = 0; has_nan < 2; has_nan++) {
        struct world w;
        float read[DIM];
        double row[DIM];
        world_make(&w, kinds[0], ATTN_F32, ATTN_F32, 1);
        for (uint32_t block = 1; block < N_KV / TOKENS; block++)
            for (uint32_t i = 0; i < TOKENS; i++)
                for (uint32_t h = 0; h < KV_HEADS; h++) {
                    const uint32_t from = TOKENS + (i + block) % TOKENS;
                    for (uint32_t d = 0; d < DIM; d++)
                        row[d] = (double)w.k[(from * KV_HEADS + h) * DIM + d];
                    if (!has_nan)
                        put_row(&w, 1, false, h, block * TOKENS + i, row, read);
                }
        row[0] = NAN;
        for (uint32_t h = 0; h < KV_HEADS && has_nan; h++)
            put_row(&w, 1, false, h, TOKENS, row, read);
        w.n_chosen = 3;
        for (int i = 0; i < LOOKS; i++)
            assert_true(isnan(look(&w, random_mixed(&random_state)).ratio));
        free(w.blocks);
    }
}

/* Blocks that a window has let go, and keys of others that no row sees, whatever is there. */
static void what_no_row_sees_changes_no_verdict(void **state)
{
    (void)state;
    for (size_t k = 1; k <= 2; k++) {
        struct world w;
        uint32_t n_lost = (N_KV - N_Q - 9 + 1) / TOKENS;
        world_make(&w, kinds[k], ATTN_F32, ATTN_F32, 1);
        memset(w.blocks + w.layout.block_bytes, 0x7f, (n_lost - 1) * w.layout.block_bytes);
        assert_true(worst_of(&w) <= 1);
        w.layers[1].scale *= 1.5f;
        assert_true(worst_of(&w) > 1);
        free(w.blocks);
    }
}

static void of_a_workers_own_nan_nothing_is_said(void **state)
{
    (void)state;
    struct world w;
    float read[DIM];
    double row[DIM];
    world_make(&w, kinds[0], ATTN_F32, ATTN_F32, 1);
    for (uint32_t d = 0; d < DIM; d++)
        row[d] = NAN;
    for (uint32_t h = 0; h < KV_HEADS; h++)
        put_row(&w, 1, true, h, 3, row, read);
    assert_true(isnan(look(&w, random_mixed(&random_state)).ratio));
    free(w.blocks);
}

/* A device computes in f32: of finite values it makes inf and NaN, and is right. */
static void what_f32_has_no_room_for_is_not_judged(void **state)
{
    static const double sizes[2][2] = {{1e30, 1e5}, {3e38, 1e8}}; /* of v, k: enough, too much */
    (void)state;
    for (size_t i = 0; i < 2; i++)
        for (int is_k = 0; is_k < 2; is_k++) {
            struct world w;
            float read[DIM];
            double row[DIM];
            world_make(&w, kinds[0], ATTN_F32, is_k ? ATTN_F32 : ATTN_FP8_E4M3, 1);
            for (uint32_t d = 0; d < DIM; d++)
                row[d] = sizes[i][is_k];
            for (uint32_t h = 0; h < KV_HEADS; h++)
                put_row(&w, 1, !is_k, h, 3, row, read);
            for (uint32_t k = 0; k < N_Q * Q_HEADS * DIM; k++)
                reference_put(ATTN_F32, w.out, k, INFINITY);
            double ratio = look(&w, random_mixed(&random_state)).ratio;
            assert_true(i == 0 ? isinf(ratio) : isnan(ratio));
            free(w.blocks);
        }
}

/* --- in the engine: the rig's backend computes nonsense, which must be found, or not looked at
 * - */

static struct rig r;

static void every_item(struct rig *rig)
{
    rig->cfg.canary = 1;
}

/* Until the judge has said something of n items and would take another one. */
static void wait_for(uint64_t n)
{
    while (stats_get(canary_items) + stats_get(canary_skipped) < n ||
           atomic_load(&r.engine->canary->state) != CANARY_FREE) {
        sched_yield();
        rig_run(&r); /* what is wrong is computed again */
    }
    assert_int_equal(stats_get(canary_items) + stats_get(canary_skipped), n);
}

static void what_stays_is_looked_at(void **state)
{
    (void)state;
    rig_open(&r, every_item);
    rig_open_many(&r, 1, 1);
    for (uint32_t pos = 0; pos < 20; pos += 10) {
        assert_int_equal(rig_item(&r, 1, 0, pos, 10), ATTN_OK);
        wait_for(1 + pos / 10);
    }
    assert_int_equal(stats_get(canary_wrong), 2);
    assert_int_equal(stats_get(canary_unrepeated), 0);
    rig_close(&r);
}

/* An item of n tokens at 0 that is doubted, and not yet computed again. */
static void make_doubt(uint64_t seq, uint32_t n)
{
    int state;
    do { /* the judge can be so quick that rig_item computes it again */
        assert_int_equal(rig_item(&r, seq, 0, 0, n), ATTN_OK);
        while ((state = atomic_load(&r.engine->canary->state)) == CANARY_JUDGING)
            sched_yield();
    } while (state != CANARY_DOUBTED);
}

static void what_is_wrong_once_changes_no_health(void **state)
{
    (void)state;
    uint64_t before;
    rig_open(&r, every_item);
    rig_open_many(&r, 1, 1);
    make_doubt(1, 100);
    before = health_n_wrong();
    r.backend.is_right = true;
    while (atomic_load(&r.engine->canary->state) != CANARY_FREE)
        rig_run(&r);
    assert_int_equal(stats_get(canary_unrepeated), 1);
    uint64_t n = stats_get(canary_items);
    assert_int_equal(rig_item(&r, 1, 0, 100, 1), ATTN_OK);
    while (stats_get(canary_items) == n)
        rig_run(&r);
    assert_int_equal(stats_get(canary_unrepeated), 1);
    assert_int_equal(health_n_wrong(), before);
    rig_close(&r);
}

static void nor_does_what_can_not_be_computed_again(void **state)
{
    enum { TRUNCATED, CLOSED, WRITTEN, FAILED, REFUSED, N };
    (void)state;
    rig_open(&r, every_item);
    rig_open_many(&r, 1, N);
    for (uint32_t how = 0; how < N; how++) {
        uint64_t seq = 1 + how, then = 0;
        make_doubt(seq, 3);
        uint64_t n_wrong = stats_get(canary_wrong);
        if (how == TRUNCATED)
            then = rig_send_truncate(&r, seq, 0);
        else if (how == CLOSED)
            then = rig_send_close(&r, seq);
        else if (how == WRITTEN) /* it may be other bytes */
            then = rig_send_item(&r, seq, 0, 0, 3);
        else if (how == FAILED)
            r.backend.fail_batch = ATTN_EINTERNAL;
        else
            r.backend.fail_submit = ATTN_EINTERNAL;
        rig_run(&r);
        if (then != 0)
            assert_int_equal(rig_answer(&r, then)->status, ATTN_OK);
        while (atomic_load(&r.engine->canary->state) != CANARY_FREE)
            rig_run(&r);
        assert_int_equal(stats_get(canary_unrepeated), 1 + how);
        assert_int_equal(stats_get(canary_wrong), n_wrong);
    }
    rig_close(&r);
}

/* Its sequence is in work meanwhile: closing and writing wait. */
static void what_is_computed_again_keeps_its_sequence(void **state)
{
    (void)state;
    rig_open(&r, every_item);
    rig_open_many(&r, 1, 1);
    make_doubt(1, 70);
    uint64_t n_wrong = stats_get(canary_wrong);
    r.backend.is_held = true;
    rig_run(&r);
    assert_int_equal(atomic_load(&r.engine->canary->state), CANARY_REPEATING);
    uint64_t written = rig_send_item(&r, 1, 0, 0, 1), closed = rig_send_close(&r, 1);
    rig_run(&r);
    assert_null(rig_reply(&r, written));
    assert_null(rig_reply(&r, closed));
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(rig_answer(&r, written)->status, ATTN_OK);
    assert_int_equal(rig_answer(&r, closed)->status, ATTN_OK);
    while (atomic_load(&r.engine->canary->state) != CANARY_FREE)
        rig_run(&r);
    assert_int_equal(stats_get(canary_wrong), n_wrong + 1);
    rig_close(&r);
}

static void what_changes_before_the_engine_is_idle_is_not(void **state)
{
    (void)state;
    rig_open(&r, every_item);
    rig_open_many(&r, 1, 3);
    for (uint64_t seq = 1; seq <= 3; seq++) {
        uint64_t id = rig_send_item(&r, seq, 0, 0, 1), then;
        if (seq == 1)
            then = rig_send_truncate(&r, seq, 0);
        else if (seq == 2)
            then = rig_send_close(&r, seq);
        else
            then = rig_send_item(&r, seq, 0, 0, 1); /* the same again: it may be other bytes */
        rig_run(&r);
        assert_int_equal(rig_answer(&r, id)->status, ATTN_OK);
        assert_int_equal(rig_answer(&r, then)->status, ATTN_OK);
        wait_for(seq + (seq == 3)); /* the last is chosen twice, and looked at as it is then */
        assert_int_equal(stats_get(canary_skipped), seq);
    }
    rig_close(&r);
}

static void one_in_so_many_is_chosen(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    rig_open_many(&r, 1, 1);
    assert_int_equal(rig_item(&r, 1, 0, 0, 1), ATTN_OK);
    r.cfg.canary = 4;
    engine_reload(r.engine, &r.cfg);
    for (uint32_t i = 0; i < 12; i++) {
        assert_int_equal(rig_item(&r, 1, 0, i + 1, 1), ATTN_OK);
        wait_for((i + 1) / 4);
    }
    r.cfg.canary = 0;
    engine_reload(r.engine, &r.cfg);
    for (uint32_t i = 12; i < 24; i++)
        assert_int_equal(rig_item(&r, 1, 0, i + 1, 1), ATTN_OK);
    wait_for(3);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(right_outputs_of_every_kind_of_layer_pass),
        cmocka_unit_test(wrong_ones_do_not),
        cmocka_unit_test(choices_are_judged),
        cmocka_unit_test(projected_heads_are_judged),
        cmocka_unit_test(no_head_of_a_row_is_left_out),
        cmocka_unit_test(many_heads_of_long_items_take_turns),
        cmocka_unit_test(a_wrong_choice_is_found),
        cmocka_unit_test(a_choice_that_rounding_decides_is_not_judged),
        cmocka_unit_test(what_no_row_sees_changes_no_verdict),
        cmocka_unit_test(of_a_workers_own_nan_nothing_is_said),
        cmocka_unit_test(what_f32_has_no_room_for_is_not_judged),
        cmocka_unit_test(what_stays_is_looked_at),
        cmocka_unit_test(what_is_wrong_once_changes_no_health),
        cmocka_unit_test(nor_does_what_can_not_be_computed_again),
        cmocka_unit_test(what_is_computed_again_keeps_its_sequence),
        cmocka_unit_test(what_changes_before_the_engine_is_idle_is_not),
        cmocka_unit_test(one_in_so_many_is_chosen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
