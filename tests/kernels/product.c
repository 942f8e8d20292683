/* product.c: see product.h. */
#include "tests/kernels/product.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
// clang-format off
#include <cmocka.h>
// clang-format on

attn_status product_begin(struct check *c, const struct product_case *x)
{
    return check_begin(c, x->geometry, x->dtype, x->options, CASE_MAX_ITEMS);
}

/* planted.sh reads where it was. */
static void tell_of_failure(const struct check *c, const struct product_case *x, uint32_t at)
{
    const struct case_geometry *g = x->geometry;
    fprintf(stderr,
            "case %" PRIu32 ", at %" PRIu32 ": (%" PRIu32 ", %" PRIu32 ", %" PRIu32 ", %" PRIu32
            ") blocks of %" PRIu32 ", %s/%s, %s, %s: failed: %s\n",
            x->n_run, at, g->num_q_heads, g->num_kv_heads, g->head_dim_k, g->head_dim_v,
            g->block_tokens, attn_dtype_name(x->dtype.q), attn_dtype_name(x->dtype.kv),
            x->options->name, x->shape->name, c->b ? c->ops->last_error(c->b) : "closed");
}

void product_walk(struct check *c, const struct product *p, uint32_t every, uint32_t offset)
{
    const uint32_t n_g = CASE_N_PRODUCT, n_d = CASE_COUNT(case_dtypes);
    const uint32_t n_most = getenv("ATTND_TEST_FAIL_FAST") ? 1 : 10;
    struct product_case x = {0};
    uint32_t n_refused = 0, n_failed = 0;
    for (uint32_t i = 0, n_met = 0; i < n_g * n_d * p->n_options * p->n_shapes; i++) {
        x.geometry = &case_geometries[i % n_g];
        x.dtype = case_dtypes[i / n_g % n_d];
        x.option = i / n_g / n_d % p->n_options;
        x.options = &p->options[x.option];
        x.shape = &p->shapes[i / n_g / n_d / p->n_options];
        if ((p->is_left_out != NULL && p->is_left_out(&x)) ||
            check_is_too_long(x.shape, x.geometry->num_q_heads))
            continue;
        const uint32_t at = n_met++;
        if (at < offset || (at - offset) % every != 0)
            continue;
        const attn_status st = p->begin != NULL ? p->begin(&x) : product_begin(c, &x);
        if (st == ATTN_ENOTSUP) {
            n_refused++;
            continue;
        }
        x.n_run++;
        if (st == ATTN_OK && p->run(&x))
            continue;
        tell_of_failure(c, &x, at);
        assert_non_null(c->b);
        if (++n_failed == n_most)
            break;
    }
    printf("%" PRIu32 " cases run, %" PRIu32 " refused by %s\n", x.n_run, n_refused, c->name);
    assert_true(x.n_run > 0);
    assert_int_equal(n_failed, 0);
}
