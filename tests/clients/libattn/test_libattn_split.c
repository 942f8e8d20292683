/* test_libattn_split.c: steps that are too large for one message, at a fake daemon that takes few
 * bytes and tokens. Its answers depend on positions and sequences, so a piece in the wrong place
 * shows. */
#include <unistd.h>

#include "clients/libattn/core/core.h"
#include "tests/clients/libattn/libattn_rig.h"
#include "tests/random.h"

enum { MAX_PIECES = 64, BIG = 1000 };

/* What the daemon saw of each step. */
struct seen {
    atomic_uint n;
    struct {
        uint32_t n_items, n_tokens, flags;
        uint64_t first_seq;
        uint32_t first_pos;
    } pieces[MAX_PIECES];
};

struct big {
    struct fixture f;
    struct seen seen;
    struct attn_item items[4];
    int32_t item_status[4];
    uint32_t n_tokens;
    float q[BIG * ROW], k[BIG * KV_ROW], v[BIG * KV_ROW], out[BIG * ROW], lse[BIG * HEADS];
    struct attn_step step;
    struct attn_in_place in_place;
    struct attn_result result;
    int n_calls, n_fills, n_takes;
};

static void see(void *user, const Attnd__Request *r)
{
    struct seen *s = user;
    if (r->body_case != ATTND__REQUEST__BODY_STEP)
        return;
    unsigned int i = atomic_load(&s->n);
    MUST(i < MAX_PIECES);
    s->pieces[i].n_items = (uint32_t)r->step->n_seq;
    for (size_t j = 0; j < r->step->n_seq; j++)
        s->pieces[i].n_tokens += r->step->n_tokens[j];
    s->pieces[i].flags = r->step->flags;
    s->pieces[i].first_seq = r->step->seq[0];
    s->pieces[i].first_pos = r->step->pos[0];
    atomic_store(&s->n, i + 1);
}

static void start(struct big *b, uint64_t max_message_bytes, uint32_t max_step_tokens)
{
    static unsigned int n;
    char url[96];
    memset(b, 0, sizeof *b);
    b->f.daemon.see = see;
    b->f.daemon.user = &b->seen;
    b->f.daemon.max_message_bytes = max_message_bytes;
    b->f.daemon.max_step_tokens = max_step_tokens;
    snprintf(url, sizeof url, "ipc:///tmp/attn_split_%d_%u.sock", (int)getpid(), n++);
    fake_daemon_start(&b->f.daemon, url);
    open_client(&b->f, NULL);
}

static void stop(struct big *b)
{
    close_client(&b->f);
    fake_daemon_stop(&b->f.daemon);
    unlink(b->f.daemon.url + strlen("ipc://"));
    free(b);
}

static void make_step(struct big *b, const uint32_t *n_tokens, uint32_t n_items)
{
    uint64_t seed = n_items;
    b->n_tokens = 0;
    for (uint32_t i = 0; i < n_items; i++) {
        b->items[i] =
            (struct attn_item){.seq = {100 + i, 1, 0}, .pos = 7 * i, .n_tokens = n_tokens[i]};
        b->n_tokens += n_tokens[i];
        b->item_status[i] = 12345;
    }
    assert_true(b->n_tokens < BIG);
    for (uint32_t i = 0; i < BIG * ROW; i++) {
        b->q[i] = (float)random_below(&seed, 1000);
        b->out[i] = 12345;
    }
    for (uint32_t i = 0; i < BIG * HEADS; i++)
        b->lse[i] = 12345;
    b->step = (struct attn_step){.struct_size = sizeof b->step,
                                 .n_items = n_items,
                                 .items = b->items,
                                 .q = b->q,
                                 .k = b->k,
                                 .v = b->v,
                                 .out = b->out,
                                 .lse = b->lse,
                                 .item_status = b->item_status,
                                 .timeout_us = LONG_US};
    b->result = (struct attn_result){.struct_size = sizeof b->result};
    atomic_store(&b->seen.n, 0);
    memset(b->seen.pieces, 0, sizeof b->seen.pieces);
}

static void assert_rows(const struct big *b)
{
    uint32_t t = 0;
    for (uint32_t i = 0; i < b->step.n_items; i++) {
        for (uint32_t j = 0; j < b->items[i].n_tokens; j++, t++) {
            bool is_ok = b->item_status[i] == ATTN_OK;
            for (uint32_t e = 0; e < ROW; e++) {
                float x = b->out[t * ROW + e], y = 2 * b->q[t * ROW + e] + (float)(100 + i);
                if (is_ok ? x != y : !isnan(x))
                    fail_msg("item %u token %u: %g, expected %g", i, j, (double)x, (double)y);
            }
            for (uint32_t e = 0; e < HEADS; e++) {
                float x = b->lse[t * HEADS + e];
                assert_true(is_ok ? x == (float)(7 * i + j) : isnan(x));
            }
        }
    }
    assert_true(b->out[t * ROW] == 12345); /* nothing behind the last row */
}

static void assert_all_good(const struct big *b)
{
    assert_int_equal(b->result.status, ATTN_OK);
    assert_int_equal(b->result.n_failed, 0);
    for (uint32_t i = 0; i < b->step.n_items; i++)
        assert_int_equal(b->item_status[i], ATTN_OK);
    assert_rows(b);
}

/* Every token once, in order of items and positions; returns the number of pieces. */
static uint32_t assert_pieces(const struct big *b, uint32_t max_tokens)
{
    uint32_t n = atomic_load(&b->seen.n), item = 0, done = 0;
    for (uint32_t i = 0; i < n; i++) {
        assert_int_equal(b->seen.pieces[i].first_seq, 100 + item);
        assert_int_equal(b->seen.pieces[i].first_pos, 7 * item + done);
        assert_true(b->seen.pieces[i].n_tokens <= max_tokens);
        for (done += b->seen.pieces[i].n_tokens;
             item < b->step.n_items && done >= b->items[item].n_tokens; item++)
            done -= b->items[item].n_tokens;
    }
    assert_int_equal(item, b->step.n_items);
    assert_int_equal(done, 0);
    return n;
}

static const uint32_t ragged[] = {1, 250, 3, 90};

static void tokens_beyond_a_step_go_into_the_next(void **state)
{
    (void)state;
    struct big *b = malloc(sizeof *b);
    start(b, 0, 64);
    make_step(b, ragged, 4);
    assert_int_equal(attn_step(b->f.pool, &b->step, &b->result), ATTN_OK);
    assert_all_good(b);
    assert_int_equal(assert_pieces(b, 64), (344 + 63) / 64);
    assert_int_equal(b->result.queue_ns, 6 * 1000);
    assert_int_equal(b->result.device_ns, 6 * 2000);
    assert_int_equal(b->result.n_sends, 1);
    const uint32_t exact[] = {64};
    make_step(b, exact, 1);
    assert_int_equal(attn_step(b->f.pool, &b->step, &b->result), ATTN_OK);
    assert_all_good(b);
    assert_int_equal(atomic_load(&b->seen.n), 1);
    stop(b);
}

/* A token has 256 bytes of k, v and q each way: 8 KB hold some twenty. */
static void bytes_beyond_a_message_go_into_the_next(void **state)
{
    (void)state;
    struct big *b = malloc(sizeof *b);
    start(b, 8192, 0);
    for (int way = 0; way < 3; way++) {
        make_step(b, ragged, 4);
        if (way == 1) { /* append alone */
            b->step.q = b->step.out = NULL;
            b->step.lse = NULL;
        } else if (way == 2) { /* attend alone */
            b->step.k = b->step.v = NULL;
        }
        assert_int_equal(attn_step(b->f.pool, &b->step, &b->result), ATTN_OK);
        assert_true(assert_pieces(b, 4096) >= 344 * KV_ROW * 8 / 8192);
        if (way != 1)
            assert_all_good(b);
        else
            assert_true(b->out[0] == 12345);
    }
    stop(b);
}

static void on_big(void *user, attn_ticket ticket, const struct attn_result *r)
{
    struct big *b = user;
    (void)ticket;
    b->n_calls++;
    b->result = *r;
}

static void callbacks_and_tickets_know_one_step(void **state)
{
    (void)state;
    struct big *b = malloc(sizeof *b);
    start(b, 0, 50);
    make_step(b, ragged, 4);
    assert_int_equal(attn_step_start(b->f.pool, &b->step, on_big, b, NULL), ATTN_OK);
    uint32_t n = 0;
    assert_int_equal(attn_client_poll(b->f.client, LONG_US, &n), ATTN_OK);
    assert_int_equal(n, 1);
    assert_int_equal(b->n_calls, 1);
    assert_all_good(b);
    assert_pieces(b, 50);

    attn_ticket ticket;
    make_step(b, ragged, 3);
    assert_int_equal(attn_step_start(b->f.pool, &b->step, NULL, NULL, &ticket), ATTN_OK);
    assert_int_equal(attn_step_wait(b->f.client, ticket, &b->result), ATTN_OK);
    assert_all_good(b);
    assert_int_equal(attn_step_wait(b->f.client, ticket, NULL), ATTN_ENOTFOUND);
    stop(b);
}

static void fill(void *user, void *q, void *k, void *v)
{
    struct big *b = user;
    b->n_fills++;
    assert_true(k != NULL && v != NULL);
    memcpy(q, b->q, b->n_tokens * sizeof(float) * ROW);
}

static void take(void *user, const void *out, const float *lse, uint32_t n_failed)
{
    struct big *b = user;
    b->n_takes++;
    assert_int_equal(n_failed, 0);
    memcpy(b->out, out, b->n_tokens * sizeof(float) * ROW);
    memcpy(b->lse, lse, b->n_tokens * sizeof(float) * HEADS);
}

static void a_step_in_place_is_filled_and_taken_once(void **state)
{
    (void)state;
    struct big *b = malloc(sizeof *b);
    start(b, 0, 50);
    make_step(b, ragged, 4);
    b->in_place = (struct attn_in_place){.is_append = true,
                                         .is_attend = true,
                                         .has_lse = true,
                                         .fill = fill,
                                         .take = take,
                                         .user = b};
    b->step.in_place = &b->in_place;
    b->step.q = b->step.k = b->step.v = NULL;
    b->step.out = NULL;
    b->step.lse = NULL;
    assert_int_equal(attn_step(b->f.pool, &b->step, &b->result), ATTN_OK);
    assert_int_equal(b->n_fills, 1);
    assert_int_equal(b->n_takes, 1);
    assert_all_good(b);
    stop(b);
}

static void an_item_that_fails_is_left_out_and_the_others_go_on(void **state)
{
    (void)state;
    struct big *b = malloc(sizeof *b);
    start(b, 0, 50);
    make_step(b, ragged, 4);
    atomic_store(&b->f.daemon.plan.failed_item, 2); /* of a piece with as many: the first one's */
    assert_int_equal(attn_step(b->f.pool, &b->step, &b->result), ATTN_ENOBLOCKS);
    assert_int_equal(b->item_status[0], ATTN_OK);
    assert_int_equal(b->item_status[1], ATTN_ENOBLOCKS);
    assert_int_equal(b->item_status[2], ATTN_OK);
    assert_int_equal(b->item_status[3], ATTN_ENOBLOCKS); /* second, behind item 2 */
    assert_int_equal(b->result.n_failed, 2);
    assert_string_equal(attn_last_error()->message, "item is out of blocks");
    assert_rows(b);
    assert_int_equal(atomic_load(&b->seen.n), 2);
    assert_int_equal(b->seen.pieces[1].first_seq, 102);
    atomic_store(&b->f.daemon.plan.failed_item, 0);

    make_step(b, ragged, 4); /* a piece as a whole: its items fail */
    atomic_store(&b->f.daemon.plan.status, ATTN_EOVERLOAD);
    atomic_store(&b->f.daemon.plan.retry_after_us, 55);
    atomic_store(&b->f.daemon.plan.n_fail, 1);
    assert_int_equal(attn_step(b->f.pool, &b->step, &b->result), ATTN_EOVERLOAD);
    assert_int_equal(b->result.retry_after_us, 55);
    assert_int_equal(b->result.n_failed, 2);
    assert_int_equal(b->item_status[1], ATTN_EOVERLOAD);
    assert_int_equal(b->item_status[2], ATTN_OK);
    assert_rows(b);
    stop(b);
}

static void a_lost_piece_ends_the_step_in_its_time(void **state)
{
    (void)state;
    struct big *b = malloc(sizeof *b);
    start(b, 0, 50);
    make_step(b, ragged, 4);
    b->step.timeout_us = SOON_US;
    atomic_store(&b->f.daemon.plan.n_swallow, 1);
    assert_int_equal(attn_step(b->f.pool, &b->step, &b->result), ATTN_ETIMEDOUT);
    assert_int_equal(b->result.n_failed, 4);
    for (int i = 0; i < 4; i++)
        assert_int_equal(b->item_status[i], ATTN_ETIMEDOUT);
    assert_int_equal(atomic_load(&b->seen.n), 1);

    make_step(b, ragged, 4); /* closed meanwhile */
    atomic_store(&b->f.daemon.plan.n_swallow, 1);
    assert_int_equal(attn_step_start(b->f.pool, &b->step, on_big, b, NULL), ATTN_OK);
    attn_pool_close(b->f.pool);
    b->f.pool = NULL;
    attn_client_close(b->f.client);
    b->f.client = NULL;
    assert_int_equal(b->n_calls, 1);
    assert_int_equal(b->result.status, ATTN_ECONN);
    assert_int_equal(b->result.n_failed, 4);
    stop(b);
}

static void what_fits_in_no_piece_is_refused_with_the_settings(void **state)
{
    (void)state;
    struct big *b = malloc(sizeof *b);
    start(b, 65536, 50);
    struct attn_pool_spec spec = spec_of_test();
    attn_pool *p, *full;
    spec.num_q_heads = 1024;
    spec.head_dim_k = 64; /* 256 KiB of q for a token */
    assert_int_equal(attn_pool_create(b->f.client, &spec, LONG_US, &p), ATTN_OK);
    make_step(b, ragged, 1);
    assert_int_equal(attn_step(p, &b->step, NULL), ATTN_EINVAL);
    assert_non_null(strstr(attn_last_error()->message, "listen.max_message"));
    assert_non_null(strstr(attn_last_error()->message, "65536"));

    const struct attn_layer layer = {.is_full = 1}; /* tokens that see each other stay together */
    spec = spec_of_test();
    spec.layers = &layer;
    spec.n_layers = 1;
    assert_int_equal(attn_pool_create(b->f.client, &spec, LONG_US, &full), ATTN_OK);
    make_step(b, ragged, 4);
    assert_int_equal(attn_step(full, &b->step, NULL), ATTN_EINVAL);
    assert_non_null(strstr(attn_last_error()->message, "see each other"));
    assert_int_equal(atomic_load(&b->seen.n), 0);
    const uint32_t whole[] = {20, 40, 30, 20};
    make_step(b, whole, 4);
    assert_int_equal(attn_step(full, &b->step, &b->result), ATTN_OK);
    assert_all_good(b);
    assert_int_equal(assert_pieces(b, 50), 3); /* 20, 40, 30 + 20 */
    attn_pool_close(p);
    attn_pool_close(full);
    stop(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tokens_beyond_a_step_go_into_the_next),
        cmocka_unit_test(bytes_beyond_a_message_go_into_the_next),
        cmocka_unit_test(callbacks_and_tickets_know_one_step),
        cmocka_unit_test(a_step_in_place_is_filled_and_taken_once),
        cmocka_unit_test(an_item_that_fails_is_left_out_and_the_others_go_on),
        cmocka_unit_test(a_lost_piece_ends_the_step_in_its_time),
        cmocka_unit_test(what_fits_in_no_piece_is_refused_with_the_settings),
    };
    return cmocka_run_group_tests_name("libattn split", tests, NULL, NULL);
}
