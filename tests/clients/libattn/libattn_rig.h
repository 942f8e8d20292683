/* libattn_rig.h: what the tests of libattn share: a client at a fake daemon, and steps whose
 * answers can be checked. */
#ifndef LIBATTN_RIG_H
#define LIBATTN_RIG_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "clients/libattn/attn.h"
#include "proto/attn_time.h"
#include "tests/clients/fake_daemon.h"

#define HEADS 4
#define KV_HEADS 2
#define DIM 8
#define LAYERS 3
#define ROW (HEADS * DIM)
#define KV_ROW (KV_HEADS * DIM)
#define MAX_TOKENS 64
#define SOON_US 50000 /* timeouts that are meant to pass */
#define LONG_US 300000000 /* timeouts that are not */

struct fixture {
    struct fake_daemon daemon;
    attn_client *client;
    attn_pool *pool;
};

/* One step's arrays, filled with numbers that depend on `salt`. */
struct work {
    float q[MAX_TOKENS * ROW], k[MAX_TOKENS * KV_ROW], v[MAX_TOKENS * KV_ROW];
    float out[MAX_TOKENS * ROW], lse[MAX_TOKENS * HEADS];
    int32_t item_status[4];
    struct attn_item items[4];
    struct attn_step step;
    struct attn_in_place in_place;
    uint32_t n_fills, n_takes, n_failed_seen;
    uint32_t n_tokens;
    struct attn_result result;
    int n_calls;
    attn_ticket ticket;
};

void work_init(struct work *w, uint32_t salt, uint32_t n_items);
/* Makes the step one in place: the same numbers come from and go to the same arrays. */
void work_in_place(struct work *w);
void assert_good(const struct work *w);
void assert_untouched(const struct work *w);
struct attn_pool_spec spec_of_test(void);
void open_client(struct fixture *f, const struct attn_client_options *o);
void close_client(struct fixture *f);
int set_up(void **state);
int tear_down(void **state);
struct attn_client_counters counters_of(struct fixture *f);
/* A completion callback; user is the work. */
void on_done(void *user, attn_ticket ticket, const struct attn_result *r);

#define T(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

#endif
