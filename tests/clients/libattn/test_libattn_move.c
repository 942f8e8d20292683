/* test_libattn_move.c: sequences go from one daemon to another while a worker decodes or
 * speculates: each token is there once, and every output is that of a sequence that stays. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "clients/libattn/core/core.h"
#include "tests/clients/libattn/seq_rig.h"

enum { PROMPT = 400, MOVES = 6, MAX_DECODED = MAX_TOKENS - PROMPT };

/* A worker that decodes token after token, wherever its sequence is. */
struct worker {
    attn_client *clients[2];
    attn_pool *pools[2];
    pthread_mutex_t lock;
    pthread_cond_t arrived;
    int at; /* the daemon where its sequence is */
    uint32_t n_moves;
    struct attn_seq seq;
    atomic_uint n; /* tokens */
    atomic_bool is_ending;
    uint32_t n_stops;
    float (*out)[LAYERS][Q_HEADS * DIM]; /* [MAX_DECODED] */
};

/* One layer of the next token; where it is refused, again where the sequence has gone. */
static void decode(struct worker *w, uint32_t layer, uint32_t pos)
{
    while (true) {
        pthread_mutex_lock(&w->lock);
        attn_pool *p = w->pools[w->at];
        struct attn_seq seq = w->seq;
        uint32_t n_moves = w->n_moves;
        pthread_mutex_unlock(&w->lock);
        attn_status st = step(p, &seq, layer, pos, 1, true, w->out[pos - PROMPT][layer]);
        if (st == ATTN_OK)
            return;
        if (st != ATTN_ESTALE && st != ATTN_EMOVED)
            fail_msg("token %u of layer %u: %s", pos, layer, attn_last_error()->message);
        w->n_stops++;
        pthread_mutex_lock(&w->lock);
        while (w->n_moves == n_moves)
            pthread_cond_wait(&w->arrived, &w->lock);
        pthread_mutex_unlock(&w->lock);
    }
}

static void *work(void *arg)
{
    struct worker *w = arg;
    for (uint32_t n = PROMPT; n < MAX_TOKENS && !atomic_load(&w->is_ending); n++) {
        for (uint32_t l = 0; l < LAYERS; l++)
            decode(w, l, n);
        atomic_store(&w->n, n + 1);
    }
    return NULL;
}

static void a_sequence_decodes_while_it_moves(void **state)
{
    (void)state;
    struct worker w = {.lock = PTHREAD_MUTEX_INITIALIZER, .arrived = PTHREAD_COND_INITIALIZER};
    pthread_t thread;
    w.out = calloc(MAX_DECODED, sizeof *w.out);
    assert_non_null(w.out);
    for (int i = 0; i < 2; i++) {
        w.clients[i] = client_of(i, false);
        w.pools[i] = pool_of(w.clients[i], ATTN_NVFP4, "m", 0.25f, 160);
    }
    w.seq = make_seq(w.pools[0], 7, PROMPT, PROMPT, PROMPT);
    atomic_store(&w.n, PROMPT);
    assert_int_equal(pthread_create(&thread, NULL, work, &w), 0);
    for (uint32_t i = 0; i < MOVES; i++) {
        struct attn_moved moved = {.struct_size = sizeof moved};
        struct attn_seq seq;
        uint32_t before = atomic_load(&w.n);
        while (atomic_load(&w.n) < before + 2 && before + 2 < MAX_TOKENS)
            sched_yield(); /* it decodes */
        int to = 1 - w.at; /* only this thread writes it */
        ok(attn_seq_move(w.clients[w.at], 7, w.pools[to], LONG_US, &seq, &moved));
        assert_int_equal(moved.is_left, 0);
        assert_true(moved.n_tokens >= before);
        assert_int_equal(moved.n_blocks, (moved.n_tokens + BLOCK - 1) / BLOCK);
        assert_true(moved.n_blocks_stopped < moved.n_blocks);
        assert_int_equal(attn_seq_adopt(w.pools[w.at], 7, LONG_US, &seq, NULL), ATTN_EMOVED);
        pthread_mutex_lock(&w.lock);
        w.at = to;
        w.seq = seq;
        w.n_moves++;
        pthread_cond_broadcast(&w.arrived);
        pthread_mutex_unlock(&w.lock);
    }
    atomic_store(&w.is_ending, true);
    pthread_join(thread, NULL);

    uint32_t n = atomic_load(&w.n), lens[LAYERS];
    ok(attn_seq_adopt(w.pools[w.at], 7, LONG_US, &w.seq, lens));
    for (uint32_t l = 0; l < LAYERS; l++)
        assert_int_equal(lens[l], n); /* each token once */
    struct attn_seq twin = make_seq(w.pools[0], 8, PROMPT, PROMPT, 0);
    for (uint32_t pos = PROMPT; pos < n; pos++)
        for (uint32_t l = 0; l < LAYERS; l++) {
            float out[Q_HEADS * DIM];
            ok(step(w.pools[0], &twin, l, pos, 1, true, out));
            assert_memory_equal(out, w.out[pos - PROMPT][l], sizeof out);
        }
    ok(attn_seq_close(w.pools[w.at], &w.seq, LONG_US));
    ok(attn_seq_close(w.pools[0], &twin, LONG_US));
    for (int i = 0; i < 2; i++) {
        attn_pool_close(w.pools[i]);
        attn_client_close(w.clients[i]);
    }
    free(w.out);
}

/* Every request on the old handle says so, and locate where. */
static void assert_moved(attn_client *a, attn_pool *p, const struct attn_seq *old, const char *url,
                         const struct attn_seq *now)
{
    struct attn_seq seq = *old;
    struct attn_place at = {.id = 99};
    struct attn_seq_call call = {
        .struct_size = sizeof call, .kind = ATTN_CALL_TRUNCATE, .seq = *old, .len = 1};
    const struct attn_retention r = {0};
    uint32_t id = 7;
    assert_int_equal(step(p, &seq, 0, 600, 1, true, NULL), ATTN_EMOVED);
    assert_non_null(strstr(attn_last_error()->message, url));
    assert_int_equal(attn_seq_truncate(p, &seq, 1, LONG_US), ATTN_EMOVED);
    assert_int_equal(attn_seq_tokens(p, &seq, 0, &id, 1, LONG_US), ATTN_EMOVED);
    assert_int_equal(attn_seq_retain(p, &seq, &r, 1, LONG_US), ATTN_EMOVED);
    assert_int_equal(attn_seq_fork(p, &seq, 12, 1, LONG_US, &seq, NULL), ATTN_EMOVED);
    assert_int_equal(attn_seq_close(p, &seq, LONG_US), ATTN_EMOVED);
    assert_int_equal(attn_seq_adopt(p, old->id, LONG_US, &seq, NULL), ATTN_EMOVED);
    assert_false(attn_status_is_retryable(ATTN_EMOVED));
    ok(attn_seq_calls(p, &call, 1, LONG_US, NULL));
    assert_int_equal(call.error.status, ATTN_EMOVED);
    ok(attn_seq_locate(a, old->id, old->epoch, LONG_US, &at));
    assert_string_equal(at.url, url);
    assert_int_equal(at.id, now->id);
    assert_int_equal(at.epoch, now->epoch);
    /* opened anew here it is another one */
    ok(attn_seq_open(p, old->id, LONG_US, &seq));
    ok(attn_seq_locate(a, old->id, 0, LONG_US, &at));
    assert_string_equal(at.url, "");
    assert_int_equal(at.epoch, seq.epoch);
    ok(attn_seq_close(p, &seq, LONG_US));
    assert_int_equal(attn_seq_truncate(p, &seq, 1, LONG_US), ATTN_ENOTFOUND);
    assert_int_equal(attn_seq_locate(a, 4321, 0, LONG_US, &at), ATTN_ENOTFOUND);
    assert_int_equal(attn_seq_locate(a, 4321, 0, LONG_US, NULL), ATTN_EINVAL);
}

/* Without appends: all but the block that is not full goes before the stop. */
static void a_quiet_sequence_stops_for_its_last_block(void **state)
{
    (void)state;
    attn_client *a = client_of(0, true), *b = client_of(1, false);
    attn_pool *p = pool_of(a, ATTN_F32, "m", 0.25f, 96), *q = pool_of(b, ATTN_F32, "m", 0.25f, 96);
    const uint32_t lens[LAYERS] = {600, 600};
    struct attn_seq seq = make_seq(p, 7, 600, 600, 550), twin = make_seq(p, 8, 600, 600, 0), got;
    struct attn_moved moved = {.struct_size = sizeof moved};
    struct attn_tokens known = {.n = 500};
    uint32_t n_cached, *ids = calloc(known.n, sizeof *ids);
    ok(attn_seq_move(a, 7, q, LONG_US, &got, &moved));
    assert_int_equal(moved.n_blocks, 38);
    assert_int_equal(moved.n_blocks_stopped, 1);
    assert_moved(a, p, &seq, b->url, &got);
    assert_same(p, &twin, q, &got, lens);
    for (uint32_t i = 0; i < known.n; i++)
        ids[i] = i * 7 + 1;
    known.ids = ids;
    ok(attn_seq_open_with(q, 9, &known, LONG_US, &seq, &n_cached)); /* the target knows its ids */
    assert_cached(n_cached, 499);
    ok(attn_seq_close(q, &seq, LONG_US));
    ok(attn_seq_close(q, &got, LONG_US));
    ok(attn_seq_close(p, &twin, LONG_US));
    free(ids);
    attn_pool_close(p);
    attn_pool_close(q);
    attn_client_close(a);
    attn_client_close(b);
}

/* What it was told of moves is in the arena: the process that follows a killed one says it, too, of
 * the latest of several moves. */
static void a_successor_says_where_a_sequence_went(void **state)
{
    (void)state;
    attn_client *a = client_of(0, false), *b = client_of(1, false);
    attn_pool *p = pool_of(a, ATTN_F32, "m", 0.25f, 96), *q = pool_of(b, ATTN_F32, "m", 0.25f, 96);
    const uint32_t lens[LAYERS] = {600, 600};
    struct attn_seq first = make_seq(p, 7, 600, 600, 550), twin = make_seq(p, 8, 600, 600, 0), got,
                    second;
    struct attn_place at;
    pid_t pid = e2e_child(&seq_daemons[0]);
    ok(attn_seq_move(a, 7, q, LONG_US, &got, NULL));
    ok(attn_seq_move(b, 7, p, LONG_US, &second, NULL));
    ok(attn_seq_move(a, 7, q, LONG_US, &got, NULL));
    e2e_kill_child(&seq_daemons[0]);
    assert_same(p, &twin, q, &got, lens); /* asks the successor */
    assert_int_not_equal(e2e_child(&seq_daemons[0]), pid);
    ok(attn_seq_locate(a, 7, first.epoch, LONG_US, &at));
    assert_string_equal(at.url, b->url);
    assert_int_equal(at.epoch, got.epoch);
    assert_moved(a, p, &second, b->url, &got);
    ok(attn_seq_close(p, &twin, LONG_US));
    ok(attn_seq_close(q, &got, LONG_US));
    attn_pool_close(p);
    attn_pool_close(q);
    attn_client_close(a);
    attn_client_close(b);
}

static void assert_note(attn_client *c, uint64_t id, const void *note, uint32_t n)
{
    uint8_t got[ATTN_NOTE_BYTES];
    uint32_t n_got = 99;
    memset(got, 0xa5, sizeof got);
    ok(attn_seq_note_get(c, id, LONG_US, got, &n_got));
    assert_int_equal(n_got, n);
    assert_memory_equal(got, note, n);
}

/* Whoever adopts it reads what its owner has written, also after a kill, a move, a truncation. */
static void a_note_stays_with_its_sequence(void **state)
{
    (void)state;
    static const uint8_t bytes[ATTN_NOTE_BYTES] = "request 7\0\xff, temperature 0.7";
    attn_client *a = client_of(0, false), *b = client_of(1, false), *other = client_of(0, false);
    attn_pool *p = pool_of(a, ATTN_F32, "m", 0.25f, 96), *q = pool_of(b, ATTN_F32, "m", 0.25f, 96),
              *o = pool_of(other, ATTN_F32, "m", 0.25f, 96);
    struct attn_seq seq = make_seq(p, 7, 100, 100, 0), fork, got, old;
    uint8_t none[ATTN_NOTE_BYTES];
    uint32_t n = 99;
    assert_note(a, 7, "", 0);
    ok(attn_seq_note(p, &seq, "draft", 5, LONG_US));
    ok(attn_seq_note(p, &seq, bytes, sizeof bytes, LONG_US));
    assert_note(other, 7, bytes, sizeof bytes);
    ok(attn_seq_fork(p, &seq, 8, 50, LONG_US, &fork, NULL));
    assert_note(a, 8, "", 0); /* another request */
    /* what is refused leaves it */
    assert_int_equal(attn_seq_note(p, &seq, bytes, sizeof bytes + 1, LONG_US), ATTN_EINVAL);
    assert_non_null(strstr(attn_last_error()->message, "note has 4097 bytes, at most 4096"));
    assert_int_equal(attn_seq_note(p, NULL, bytes, 1, LONG_US), ATTN_EINVAL);
    assert_int_equal(attn_seq_note(o, &seq, "mine", 4, LONG_US), ATTN_ESTALE);
    assert_int_equal(attn_seq_note_get(a, 1234, LONG_US, none, &n), ATTN_ENOTFOUND);
    assert_int_equal(attn_seq_note_get(a, 7, LONG_US, NULL, &n), ATTN_EINVAL);
    old = seq;
    ok(attn_seq_truncate(p, &seq, 60, LONG_US));
    assert_int_equal(attn_seq_note(p, &old, "late", 4, LONG_US), ATTN_ESTALE);
    e2e_kill_child(&seq_daemons[0]);
    ok(attn_seq_adopt(o, 7, LONG_US, &got, NULL)); /* asks the successor */
    assert_note(other, 7, bytes, sizeof bytes);
    ok(attn_seq_note(o, &got, "second", 6, LONG_US));
    ok(attn_seq_move(a, 7, q, LONG_US, &got, NULL));
    assert_note(b, 7, "second", 6);
    ok(attn_seq_note(q, &got, NULL, 0, LONG_US));
    assert_note(b, 7, "", 0);
    ok(attn_seq_close(q, &got, LONG_US));
    ok(attn_seq_close(p, &fork, LONG_US));
    attn_pool_close(p);
    attn_pool_close(q);
    attn_pool_close(o);
    attn_client_close(a);
    attn_client_close(b);
    attn_client_close(other);
}

/* A target that cannot take it: the owner of the sequence does not notice the move. */
static void a_move_that_fails_leaves_the_sequence_where_it_is(void **state)
{
    (void)state;
    attn_client *a = client_of(0, false), *b = client_of(1, false), *mover = client_of(0, false);
    attn_pool *p = pool_of(a, ATTN_F32, "m", 0.25f, 64);
    attn_pool *small = pool_of(b, ATTN_F32, "m", 0.25f, 9);
    attn_pool *other = pool_of(b, ATTN_F32, "other", 0.25f, 64);
    struct attn_seq seq = make_seq(p, 7, 200, 180, 150), got = {.id = 99}, in_the_way;
    struct attn_moved moved = {.struct_size = sizeof moved};
    assert_int_equal(attn_seq_move(mover, 7, small, LONG_US, &got, &moved), ATTN_ENOBLOCKS);
    assert_gone(small, 7);
    assert_int_equal(attn_seq_move(mover, 7, other, LONG_US, &got, &moved), ATTN_EINVAL);
    assert_non_null(strstr(attn_last_error()->message, "model is "));
    assert_gone(other, 7);
    assert_int_equal(attn_seq_move(mover, 1234, small, LONG_US, &got, &moved), ATTN_ENOTFOUND);
    ok(attn_seq_open(other, 7, LONG_US, &in_the_way));
    assert_int_equal(attn_seq_move(mover, 7, other, LONG_US, &got, &moved), ATTN_EEXIST);
    ok(attn_seq_close(other, &in_the_way, LONG_US));
    assert_int_equal(attn_seq_move(mover, 7, p, LONG_US, &got, &moved), ATTN_EEXIST); /* itself */
    assert_int_equal(got.id, 99);
    ok(step(p, &seq, 0, 200, 1, true, NULL)); /* at its epoch */
    ok(attn_seq_close(p, &seq, LONG_US));
    attn_pool_close(p);
    attn_pool_close(small);
    attn_pool_close(other);
    attn_client_close(a);
    attn_client_close(b);
    attn_client_close(mover);
}

struct speculation {
    attn_pool *pool;
    struct attn_seq seq;
    uint32_t n; /* tokens that stay */
    uint32_t n_drafts;
    bool is_notified; /* ids, too */
};

/* Tokens [n, n + n_good) that stay, and behind them others that are taken back. */
static attn_status draft(struct speculation *s, uint32_t n_good, uint32_t n_bad)
{
    uint32_t ids[LAST];
    attn_status st = ATTN_OK;
    for (uint32_t i = 0; i < n_good + n_bad; i++)
        ids[i] = (s->n + i) * 7 + (i < n_good ? 1 : 2);
    for (uint32_t l = 0; l < LAYERS && st == ATTN_OK; l++) {
        if (n_good > 0)
            st = step(s->pool, &s->seq, l, s->n, n_good, true, NULL);
        seq_salt = s->n_drafts + 1;
        if (st == ATTN_OK)
            st = step(s->pool, &s->seq, l, s->n + n_good, n_bad, true, NULL);
        seq_salt = 0;
    }
    if (st == ATTN_OK && s->is_notified)
        st = attn_seq_tokens(s->pool, &s->seq, s->n, ids, n_good + n_bad, LONG_US);
    return st;
}

/* Speculates until another client has taken the sequence. */
static void *speculate(void *arg)
{
    struct speculation *s = arg;
    attn_status st = ATTN_OK;
    while (st == ATTN_OK) {
        uint32_t n_good = s->n + LAST < MAX_TOKENS ? s->n_drafts % 3 : 0;
        st = draft(s, n_good, 4);
        if (st == ATTN_OK)
            st = attn_seq_truncate(s->pool, &s->seq, s->n + n_good, LONG_US);
        if (st == ATTN_OK)
            s->n += n_good;
        s->n_drafts++;
    }
    assert_true(st == ATTN_ESTALE || st == ATTN_EMOVED);
    return NULL;
}

/* A worker with a draft model: blocks move all the same while it decodes. */
static void a_sequence_that_is_truncated_all_the_while_moves_live(void **state)
{
    (void)state;
    static uint32_t ids[MAX_TOKENS];
    for (uint32_t i = 0; i < MAX_TOKENS; i++)
        ids[i] = i * 7 + 1;
    for (int round = 0; round < 6; round++) {
        attn_client *a = client_of(0, false), *b = client_of(1, false);
        attn_client *mover = client_of(0, round % 2 == 1);
        attn_pool *p = pool_of(a, ATTN_F32, "m", 0.25f, 160);
        attn_pool *q = pool_of(b, ATTN_F32, "m", 0.25f, 160);
        struct speculation s = {.pool = p, .n = 300, .is_notified = round % 3 > 0};
        struct attn_moved moved = {.struct_size = sizeof moved};
        struct attn_tokens known = {.ids = ids};
        struct attn_seq got, found;
        pthread_t thread;
        s.seq = make_seq(p, 7, s.n, s.n, s.is_notified ? s.n : 0);
        assert_int_equal(pthread_create(&thread, NULL, speculate, &s), 0);
        ok(attn_seq_move(mover, 7, q, LONG_US, &got, &moved));
        pthread_join(thread, NULL);
        assert_true(moved.n_blocks >= 300 / BLOCK);
        assert_true(moved.n_blocks_stopped < moved.n_blocks / 2);
        assert_gone(p, 7);
        ok(attn_seq_truncate(q, &got, s.n, LONG_US)); /* what is left of its last draft */
        assert_like_twin(q, &got, s.n);
        ok(attn_seq_close(q, &got, LONG_US));
        if (s.is_notified) { /* what others find there is what its ids say */
            uint32_t n_cached;
            known.n = s.n;
            ok(attn_seq_open_with(q, 9, &known, LONG_US, &found, &n_cached));
            assert_cached(n_cached, s.n - 1);
            if (n_cached > LAST)
                assert_like_twin(q, &found, n_cached);
            ok(attn_seq_close(q, &found, LONG_US));
        }
        attn_pool_close(p);
        attn_pool_close(q);
        attn_client_close(a);
        attn_client_close(b);
        attn_client_close(mover);
    }
}

/* A file of such a sequence holds what has stayed of it while it was written. */
static void a_sequence_that_is_truncated_all_the_while_is_exported(void **state)
{
    (void)state;
    char path[] = "/tmp/attnd_move_XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    for (int round = 0; round < 4; round++) {
        attn_client *a = client_of(0, false), *b = client_of(1, false);
        attn_client *reader = client_of(0, round % 2 == 1);
        attn_pool *p = pool_of(a, ATTN_F32, "m", 0.25f, 160);
        attn_pool *q = pool_of(b, ATTN_F32, "m", 0.25f, 160);
        struct speculation s = {.pool = p, .n = 300, .is_notified = round >= 2};
        struct attn_seq got, mine;
        pthread_t thread;
        mine = s.seq = make_seq(p, 7, s.n, s.n, s.is_notified ? s.n : 0);
        assert_int_equal(pthread_create(&thread, NULL, speculate, &s), 0);
        for (int i = 0; i < 5; i++) {
            struct attn_seq_file file = {.struct_size = sizeof file};
            ok(attn_seq_export(reader, 7, path, LONG_US, &file));
            assert_in_range(file.n_tokens, 300, MAX_TOKENS);
            assert_true(file.n_ids <= file.n_tokens + LAST);
            assert_true(!s.is_notified || file.n_ids >= 300);
            ok(attn_seq_import(q, path, 7, LONG_US, &got, NULL));
            uint32_t n = file.n_tokens - LAST; /* without drafts, in all layers */
            ok(attn_seq_truncate(q, &got, n, LONG_US));
            assert_like_twin(q, &got, n);
            ok(attn_seq_close(q, &got, LONG_US));
        }
        ok(attn_seq_adopt(p, 7, LONG_US, &mine, NULL));
        pthread_join(thread, NULL);
        ok(attn_seq_close(p, &mine, LONG_US));
        attn_pool_close(p);
        attn_pool_close(q);
        attn_client_close(a);
        attn_client_close(b);
        attn_client_close(reader);
    }
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_sequence_decodes_while_it_moves),
        cmocka_unit_test(a_quiet_sequence_stops_for_its_last_block),
        cmocka_unit_test(a_successor_says_where_a_sequence_went),
        cmocka_unit_test(a_note_stays_with_its_sequence),
        cmocka_unit_test(a_move_that_fails_leaves_the_sequence_where_it_is),
        cmocka_unit_test(a_sequence_that_is_truncated_all_the_while_moves_live),
        cmocka_unit_test(a_sequence_that_is_truncated_all_the_while_is_exported),
    };
    return cmocka_run_group_tests(tests, seq_daemons_start, seq_daemons_stop);
}
