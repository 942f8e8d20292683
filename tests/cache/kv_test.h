/* kv_test.h: short helpers for the cache's tests. */
#ifndef TESTS_KV_TEST_H
#define TESTS_KV_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "cache/kv_append.h"
#include "cache/kv_move.h"
#include "cache/kv_owner.h"
#include "cache/kv_pool.h"
#include "cache/kv_tier.h"
#include "tests/cache/open.h"

#define FX_CAPACITY 512

/* Effects with their arrays. */
struct test_fx {
    struct kv_effects fx;
    struct kv_patch patches[FX_CAPACITY];
    struct kv_copy copies[FX_CAPACITY];
};

static inline struct kv_effects *test_fx_reset(struct test_fx *t)
{
    memset(t, 0xa5, sizeof *t);
    t->fx = (struct kv_effects){.patches = t->patches,
                                .copies = t->copies,
                                .patches_capacity = FX_CAPACITY,
                                .copies_capacity = FX_CAPACITY};
    return &t->fx;
}

static inline struct kv *test_kv_open(const struct kv_config *c, int fd)
{
    struct kv *kv = NULL;
    char why[256] = "";
    attn_status st = kv_open(c, fd, &kv, why, sizeof why);
    if (st != ATTN_OK)
        fail_msg("kv_open: %s: %s", attn_status_name(st), why);
    return kv;
}

static inline kv_pool_id test_pool_with(struct kv *kv, const char *name, uint32_t n_layers,
                                        uint32_t block_tokens, uint32_t n_blocks, uint32_t window,
                                        uint32_t kept)
{
    struct kv_pool_spec s = {.n_layers = n_layers,
                             .block_tokens = block_tokens,
                             .n_blocks = n_blocks,
                             .window_tokens = window,
                             .kept_tokens = kept,
                             .spec = (const uint8_t *)name,
                             .spec_bytes = (uint32_t)strlen(name)};
    snprintf(s.name, sizeof s.name, "%s", name);
    kv_pool_id pool = {UINT32_MAX};
    attn_status st = kv_pool_create(kv, &s, &pool);
    if (st != ATTN_OK)
        fail_msg("kv_pool_create: %s", kv_last_error(kv));
    return pool;
}

static inline kv_pool_id test_pool(struct kv *kv, const char *name, uint32_t n_layers,
                                   uint32_t block_tokens, uint32_t n_blocks)
{
    return test_pool_with(kv, name, n_layers, block_tokens, n_blocks, 0, 0);
}

static inline void test_check(struct kv *kv)
{
    if (kv_check(kv) != ATTN_OK)
        fail_msg("kv_check: %s", kv_last_error(kv));
}

#define assert_status(kv, expected, call)                                                          \
    do {                                                                                           \
        attn_status st_ = (call);                                                                  \
        if (st_ != (expected))                                                                     \
            fail_msg("%s: %s, not %s (%s)", #call, attn_status_name(st_),                          \
                     attn_status_name(expected), kv_last_error(kv));                               \
    } while (0)

#define assert_says(kv, text)                                                                      \
    do {                                                                                           \
        if (strstr(kv_last_error(kv), (text)) == NULL)                                             \
            fail_msg("error \"%s\" does not say \"%s\"", kv_last_error(kv), (text));               \
    } while (0)

#endif
