/* seq_rig.h: what tests share that take sequences from one daemon to another: two daemons, pools,
 * and sequences whose K and V are a function of layer and position. */
#ifndef SEQ_RIG_H
#define SEQ_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "clients/libattn/attn.h"
#include "tests/daemon/e2e/e2e.h"

enum {
    LAYERS = 2,
    Q_HEADS = 4,
    KV_HEADS = 2,
    DIM = 32,
    BLOCK = 16,
    MAX_TOKENS = 1024,
    LAST = 8, /* tokens that attend */
    OUT = LAST * Q_HEADS * DIM,
    LONG_US = 300000000,
};

extern struct e2e seq_daemons[2];
extern _Thread_local uint32_t seq_salt; /* of the K and V that are appended */
extern uint32_t seq_window, seq_sinks; /* of all layers of pool_of's */

#define ok(call)                                                                                   \
    do {                                                                                           \
        if ((call) != ATTN_OK)                                                                     \
            fail_msg("%s: %s", #call, attn_last_error()->message);                                 \
    } while (0)

/* Both daemons, the first with a keeper; for a group of tests. */
int seq_daemons_start(void **state);
int seq_daemons_stop(void **state);

attn_client *client_of(int daemon, bool is_shm);
/* Of that name for what it is made of; batch-invariant, f32, split as E2E_SPLIT says. */
attn_pool *pool_of(attn_client *c, attn_dtype kv_dtype, const char *model, float scale,
                   uint32_t n_blocks);
/* Tokens [pos, pos + n) of one layer; with out [n][Q_HEADS][DIM] they attend, too. */
attn_status step(attn_pool *p, const struct attn_seq *seq, uint32_t layer, uint32_t pos, uint32_t n,
                 bool is_append, float *out);
/* A sequence of n tokens, of which the last layer has n_last, with ids as far as n_ids. */
struct attn_seq make_seq(attn_pool *p, uint64_t id, uint32_t n, uint32_t n_last, uint32_t n_ids);
/* The last tokens attend alike. */
void assert_same(attn_pool *p, const struct attn_seq *a, attn_pool *q, const struct attn_seq *b,
                 const uint32_t *lens);
/* As those of a sequence 8 of n tokens that is made in the same pool. */
void assert_like_twin(attn_pool *q, const struct attn_seq *got, uint32_t n);
/* So many of n known tokens are shared; of several cards none where another has them. */
void assert_cached(uint32_t n_cached, uint32_t n);
void assert_gone(attn_pool *p, uint64_t id);
/* The pool's free blocks, cached ones among them. */
uint32_t n_free(attn_client *c, const attn_pool *p);
/* Cards notify each other a moment later. */
void await_free(attn_client *c, const attn_pool *p, uint32_t n);

#endif
