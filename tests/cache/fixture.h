/* fixture.h: a cache with one small pool, for tests of a single operation. */
#ifndef TESTS_KV_FIXTURE_H
#define TESTS_KV_FIXTURE_H

#include "tests/cache/kv_test.h"

#include <stdlib.h>

#include "cache/kv_internal.h"

#define NAME 77u
#define TENANT 3u
#define OWNER 2u

static const struct kv_config config = {.max_pools = 3,
                                        .max_blocks = 64,
                                        .max_sequences = 8,
                                        .max_seq_blocks = 16,
                                        .max_seq_tokens = 64,
                                        .max_block_tokens = 64,
                                        .max_layers = 3,
                                        .max_owners = 4,
                                        .block_layout = 1};

struct fixture {
    struct kv *kv;
    kv_pool_id pool; /* 2 layers, blocks of 4, 12 blocks */
    uint64_t request; /* the last one used */
    struct test_fx t;
};

static inline int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    f->kv = test_kv_open(&config, -1);
    f->pool = test_pool(f->kv, "pool", 2, 4, 12);
    *state = f;
    return 0;
}

static inline int teardown(void **state)
{
    struct fixture *f = *state;
    test_check(f->kv);
    kv_close(f->kv);
    free(f);
    return 0;
}

static inline kv_seq_id open_seq(struct fixture *f, uint64_t name)
{
    kv_seq_id seq = {UINT32_MAX};
    assert_status(f->kv, ATTN_OK,
                  kv_seq_open(f->kv, TENANT, name, f->pool, OWNER, ++f->request, &seq));
    return seq;
}

static inline void append(struct fixture *f, kv_seq_id seq, uint32_t layer, uint32_t pos,
                          uint32_t n)
{
    assert_status(f->kv, ATTN_OK,
                  kv_append_reserve(f->kv, seq, layer, pos, n, test_fx_reset(&f->t)));
    kv_append_commit(f->kv, seq, layer, pos, n);
}

static inline void append_all(struct fixture *f, kv_seq_id seq, uint32_t pos, uint32_t n)
{
    append(f, seq, 0, pos, n);
    append(f, seq, 1, pos, n);
}

static inline struct kv_seq_info info_of(struct fixture *f, kv_seq_id seq)
{
    struct kv_seq_info i;
    kv_seq_info(f->kv, seq, &i);
    return i;
}

static inline struct kv_stats stats_of(struct fixture *f)
{
    struct kv_stats s;
    kv_stats_read(f->kv, &s);
    return s;
}

static inline struct kv_effects *fx_of(struct fixture *f)
{
    return test_fx_reset(&f->t);
}

/* A sequence of 10 tokens (blocks of 4) and a fork at len. */
static inline kv_seq_id fork_at(struct fixture *f, kv_seq_id *src, uint32_t len)
{
    kv_seq_id child = {99};
    *src = open_seq(f, NAME);
    append_all(f, *src, 0, 10);
    assert_status(f->kv, ATTN_OK, kv_seq_fork(f->kv, *src, NAME + 1, len, OWNER + 1, 5, &child));
    return child;
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

static inline attn_status truncate_to(struct fixture *f, kv_seq_id seq, uint32_t len)
{
    uint32_t epoch;
    return kv_seq_truncate(f->kv, seq, len, KV_NO_REQUEST, &epoch);
}

/* A block of the sequence is being replaced by a copy. */
static inline bool has_pending_copy(const struct kv *kv, kv_seq_id seq)
{
    const struct kv_seq_rec *s = kv_seq_live(kv, seq.index);
    return s != NULL && s->journal_head != 0;
}

#endif
