/* product.h: the walk through a product of geometries, dtypes, options and shapes that the tests of
 * backends share. What a case does is theirs.
 */
#ifndef ATTND_TESTS_KERNELS_PRODUCT_H
#define ATTND_TESTS_KERNELS_PRODUCT_H

#include "tests/kernels/check.h"

struct product_case {
    const struct case_geometry *geometry;
    struct case_dtype dtype;
    const struct case_options *options;
    const struct case_shape *shape;
    uint32_t option; /* its place in the product's options */
    uint32_t n_run; /* cases that ran before */
};

struct product {
    const struct case_options *options; /* [n_options] */
    const struct case_shape *shapes; /* [n_shapes] */
    uint32_t n_options, n_shapes;
    bool (*is_left_out)(const struct product_case *x); /* NULL: none is */
    /* NULL: product_begin. ATTN_ENOTSUP: the backend refuses it */
    attn_status (*begin)(const struct product_case *x);
    bool (*run)(const struct product_case *x); /* false, after it said why: it failed */
};

/* check_run_begin for the case's geometry, dtypes and options. */
attn_status product_begin(struct check *c, const struct product_case *x);

/* From the offset-th case on every every-th of those that are neither left out nor too long
 * (check_is_too_long). Fails the test where one fails, ten of them at most told of (one with
 * ATTND_TEST_FAIL_FAST), and where none ran. */
void product_walk(struct check *c, const struct product *p, uint32_t every, uint32_t offset);

#endif
