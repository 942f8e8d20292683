/* test_libattn_move_faults.c: what is lost, killed or changed in the middle of a move or an export:
 * before each of its requests in turn. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "clients/libattn/core/core.h"
#include "tests/clients/libattn/seq_rig.h"

/* --- requests that get lost ------------------------------------------------------------------- */

static _Thread_local int n_requests, lost; /* the lost-th request from now on; 0: none */
static _Thread_local bool is_answer_lost; /* it is carried out, and its answer is lost */
/* Runs before the lost-th request instead; NULL: it is lost. */
static _Thread_local void (*meanwhile)(void);

static bool is_next(void)
{
    if (lost == 0 || ++n_requests != lost)
        return false;
    if (meanwhile == NULL)
        return true;
    lost = 0;
    meanwhile();
    return false;
}

#define LOSE(call)                                                                                 \
    do {                                                                                           \
        bool is_lost = is_next();                                                                  \
        attn_status st = is_lost && !is_answer_lost ? ATTN_OK : call;                              \
        return is_lost ? error_set(ATTN_ECONN, "the test has lost it") : st;                       \
    } while (0)

typedef attn_status take_fn(struct client_request *, const struct wire_reply *);
attn_status __real_client_call(struct attn_client *, Attnd__Request *, uint64_t, take_fn *, void *);
attn_status __wrap_client_call(struct attn_client *, Attnd__Request *, uint64_t, take_fn *, void *);
attn_status __wrap_client_call(struct attn_client *c, Attnd__Request *h, uint64_t us, take_fn *take,
                               void *arg)
{
    LOSE(__real_client_call(c, h, us, take, arg));
}
attn_status __real_client_call_bulk(struct attn_client *, Attnd__Request *,
                                    const struct client_bulk *, uint64_t, take_fn *, void *);
attn_status __wrap_client_call_bulk(struct attn_client *, Attnd__Request *,
                                    const struct client_bulk *, uint64_t, take_fn *, void *);
attn_status __wrap_client_call_bulk(struct attn_client *c, Attnd__Request *h,
                                    const struct client_bulk *bulk, uint64_t us, take_fn *take,
                                    void *arg)
{
    LOSE(__real_client_call_bulk(c, h, bulk, us, take, arg));
}

/* --- moves ------------------------------------------------------------------------------------ */

static void die(void)
{
    raise(SIGKILL);
}

/* Whoever moves it is killed at one request after the other: the next who does moves all of it. */
static void a_move_is_repeated_when_its_process_was_killed(void **state)
{
    (void)state;
    const uint32_t lens[LAYERS] = {200, 190};
    bool is_whole = false;
    for (int i = 1; !is_whole; i++) {
        attn_client *a = client_of(0, false), *b = client_of(1, false);
        attn_pool *p = pool_of(a, ATTN_F32, "m", 0.25f, 64),
                  *q = pool_of(b, ATTN_F32, "m", 0.25f, 64);
        const uint64_t id = 3000 + 2 * (uint64_t)i;
        struct attn_seq twin = make_seq(p, id + 1, 200, 190, 150), got;
        make_seq(p, id, 200, 190, 150);
        pid_t pid = fork();
        if (pid == 0) {
            attn_client *from = client_of(0, false), *to = client_of(1, false);
            attn_pool *at = pool_of(to, ATTN_F32, "m", 0.25f, 64);
            meanwhile = die;
            n_requests = 0;
            lost = i;
            _exit(attn_seq_move(from, id, at, LONG_US, &got, NULL) == ATTN_OK ? 0 : 1);
        }
        int how;
        assert_int_equal(waitpid(pid, &how, 0), pid);
        is_whole = WIFEXITED(how);
        if (is_whole) {
            assert_int_equal(WEXITSTATUS(how), 0);
            ok(attn_seq_adopt(q, id, LONG_US, &got, NULL));
        } else {
            ok(attn_seq_move(a, id, q, LONG_US, &got, NULL));
        }
        assert_same(p, &twin, q, &got, lens);
        assert_gone(p, id);
        ok(attn_seq_close(q, &got, LONG_US));
        ok(attn_seq_close(p, &twin, LONG_US));
        attn_pool_close(p);
        attn_pool_close(q);
        attn_client_close(a);
        attn_client_close(b);
        assert_true(i < 100);
    }
}

/* A sequence of the same name that is another one, or has gone on, is nobody's leftover. */
static void what_is_no_copy_is_left_alone(void **state)
{
    (void)state;
    attn_client *a = client_of(0, false), *b = client_of(1, false);
    attn_pool *p = pool_of(a, ATTN_F32, "m", 0.25f, 64), *q = pool_of(b, ATTN_F32, "m", 0.25f, 64);
    struct attn_seq seq = make_seq(p, 4000, 100, 100, 90), longer, other, got;
    longer = make_seq(q, 4000, 101, 100, 0);
    assert_int_equal(attn_seq_move(a, 4000, q, LONG_US, &got, NULL), ATTN_EEXIST);
    ok(attn_seq_truncate(q, &longer, 100, LONG_US)); /* at its epoch */
    ok(attn_seq_close(q, &longer, LONG_US));
    seq_salt = 1;
    other = make_seq(q, 4000, 50, 40, 0);
    seq_salt = 0;
    assert_int_equal(attn_seq_move(a, 4000, q, LONG_US, &got, NULL), ATTN_EEXIST);
    ok(attn_seq_truncate(q, &other, 40, LONG_US));
    ok(attn_seq_close(q, &other, LONG_US));
    ok(attn_seq_close(p, &seq, LONG_US));
    attn_pool_close(p);
    attn_pool_close(q);
    attn_client_close(a);
    attn_client_close(b);
}

/* One request of a move is lost, or its answer: there is one place where the sequence goes on, with
 * all of its tokens, and its owner is either not disturbed or refused. */
static void a_lost_request_leaves_one_sequence(void **state)
{
    (void)state;
    const uint32_t lens[LAYERS] = {200, 200};
    uint32_t n_failed = 0, n_left = 0;
    for (int round = 0; round < 2; round++) {
        bool is_whole = false;
        for (int i = 1; !is_whole; i++) {
            attn_client *a = client_of(0, false), *b = client_of(1, false);
            attn_client *mover = client_of(0, false), *target = client_of(1, false);
            attn_pool *p = pool_of(a, ATTN_F32, "m", 0.25f, 64);
            attn_pool *q = pool_of(target, ATTN_F32, "m", 0.25f, 64), *r;
            struct attn_moved moved = {.struct_size = sizeof moved};
            uint64_t id = 1000 + (uint64_t)(round * 100 + i);
            struct attn_seq seq = make_seq(p, id, 200, 200, 190), got, twin;
            uint32_t got_lens[LAYERS];
            is_answer_lost = round == 1;
            n_requests = 0;
            lost = i;
            attn_status st = attn_seq_move(mover, id, q, LONG_US, &got, &moved);
            is_whole = n_requests < lost;
            lost = 0;
            bool is_notified = strstr(attn_last_error()->message, "adopt it there") != NULL;
            attn_status old = step(p, &seq, 0, 200 - LAST, LAST, false, (float[OUT]){0});
            if (st == ATTN_OK) {
                n_left += moved.is_left;
                assert_true(old == ATTN_ESTALE || old == ATTN_EMOVED);
                assert_int_equal(old == ATTN_EMOVED, !moved.is_left || is_answer_lost);
            } else {
                n_failed++;
                assert_int_equal(st, ATTN_ECONN);
                assert_true(is_notified || old == ATTN_OK);
                assert_true(old == ATTN_OK || old == ATTN_ESTALE);
                ok(attn_seq_adopt(p, id, LONG_US, &got, got_lens));
                assert_memory_equal(got_lens, lens, sizeof lens);
                if (attn_seq_adopt(q, id, LONG_US, &seq, got_lens) == ATTN_OK)
                    assert_int_equal(got_lens[0], 0); /* an open whose answer is lost */
            }
            r = st == ATTN_OK ? q : p;
            twin = make_seq(p, id + 50, 200, 200, 0);
            assert_same(r, &got, p, &twin, lens);
            ok(attn_seq_close(r, &got, LONG_US));
            ok(attn_seq_close(p, &twin, LONG_US));
            attn_pool_close(p);
            attn_pool_close(q);
            attn_client_close(a);
            attn_client_close(b);
            attn_client_close(mover);
            attn_client_close(target);
        }
    }
    assert_in_range(n_failed, 10, 100);
    assert_int_equal(n_left, 2); /* the close */
}

/* Who has the sequence, while another moves it. */
static attn_pool *owners;
static struct attn_seq owned;
static attn_status did;

static void rewrite(void)
{
    did = attn_seq_truncate(owners, &owned, 50, LONG_US);
    seq_salt = 1;
    for (uint32_t l = 0; l < LAYERS && did == ATTN_OK; l++)
        ok(step(owners, &owned, l, 50, 150, true, NULL));
    seq_salt = 0;
}

static void take_back(void)
{
    did = attn_seq_adopt(owners, owned.id, LONG_US, &owned, NULL);
}

/* Before each request of a move in turn: other tokens are written, in blocks that have been copied;
 * or it is adopted at its source. */
static void what_happens_meanwhile_is_not_lost(void **state)
{
    (void)state;
    const uint32_t lens[LAYERS] = {200, 200};
    uint32_t n_done[2] = {0}, n_kept = 0;
    attn_client *a = client_of(0, false), *b = client_of(1, false), *mover = client_of(0, false);
    attn_pool *q = pool_of(b, ATTN_F32, "m", 0.25f, 64);
    owners = pool_of(a, ATTN_F32, "m", 0.25f, 64);
    for (int round = 0; round < 2; round++) {
        for (int i = 1;; i++) {
            struct attn_seq got, twin;
            owned = make_seq(owners, 2000, 200, 200, 0);
            did = ATTN_EINVAL;
            meanwhile = round == 0 ? rewrite : take_back;
            n_requests = 0;
            lost = i;
            attn_status st = attn_seq_move(mover, 2000, q, LONG_US, &got, NULL);
            bool is_past = lost != 0; /* there are not so many requests */
            meanwhile = NULL;
            lost = 0;
            n_done[round] += did == ATTN_OK;
            bool is_rewritten = round == 0 && did == ATTN_OK;
            if (st != ATTN_OK) { /* it was taken back behind the fence */
                assert_int_equal(st, ATTN_ESTALE);
                assert_true(round == 1 && did == ATTN_OK);
                assert_gone(q, 2000);
                ok(step(owners, &owned, 0, 200 - LAST, LAST, false, (float[OUT]){0}));
                got = owned;
                n_kept++;
            } else {
                assert_int_not_equal(step(owners, &owned, 0, 200, 1, true, NULL), ATTN_OK);
            }
            twin = make_seq(owners, 2001, is_rewritten ? 50 : 200, is_rewritten ? 50 : 200, 0);
            seq_salt = 1;
            for (uint32_t l = 0; l < LAYERS && is_rewritten; l++)
                ok(step(owners, &twin, l, 50, 150, true, NULL));
            seq_salt = 0;
            assert_same(st == ATTN_OK ? q : owners, &got, owners, &twin, lens);
            ok(attn_seq_close(st == ATTN_OK ? q : owners, &got, LONG_US));
            ok(attn_seq_close(owners, &twin, LONG_US));
            if (is_past)
                break;
        }
    }
    assert_in_range(n_done[0], 5, 100);
    assert_in_range(n_done[1], 8, 100);
    assert_in_range(n_kept, 2, 5); /* at the look, the last blocks, the close */
    attn_pool_close(owners);
    attn_pool_close(q);
    attn_client_close(a);
    attn_client_close(b);
    attn_client_close(mover);
}

static void redraft(void)
{
    did = attn_seq_truncate(owners, &owned, 187, LONG_US);
    seq_salt = 1;
    for (uint32_t l = 0; l < LAYERS && did == ATTN_OK; l++)
        ok(step(owners, &owned, l, 187, 3, true, NULL));
    seq_salt = 0;
}

/* Before each request of an export in turn: its last tokens, and the last block, are taken back. */
static void drafts_that_are_taken_back_meanwhile_are_in_no_file(void **state)
{
    (void)state;
    char path[] = "/tmp/attnd_move_XXXXXX";
    int fd = mkstemp(path), n_left_out = 0;
    assert_true(fd >= 0);
    close(fd);
    attn_client *a = client_of(0, false), *reader = client_of(0, false);
    owners = pool_of(a, ATTN_F32, "m", 0.25f, 64);
    bool is_past = false;
    for (int i = 1; !is_past; i++) {
        struct attn_seq_file file = {.struct_size = sizeof file};
        struct attn_seq got;
        owned = make_seq(owners, 2000, 200, 200, 200);
        did = ATTN_EINVAL;
        meanwhile = redraft;
        n_requests = 0;
        lost = i;
        ok(attn_seq_export(reader, 2000, path, LONG_US, &file));
        is_past = lost != 0; /* there are not so many requests */
        meanwhile = NULL;
        lost = 0;
        assert_int_equal(did == ATTN_OK, !is_past);
        /* before the first look it has three new ones */
        assert_int_equal(file.n_tokens, is_past ? 200 : i == 1 ? 190 : 187);
        assert_int_equal(file.n_ids, is_past ? 200 : 187);
        n_left_out += file.n_tokens == 187;
        ok(attn_seq_import(owners, path, 2001, LONG_US, &got, NULL));
        ok(attn_seq_truncate(owners, &got, 187, LONG_US));
        assert_like_twin(owners, &got, 187);
        ok(attn_seq_close(owners, &got, LONG_US));
        ok(attn_seq_close(owners, &owned, LONG_US));
    }
    assert_in_range(n_left_out, 3, 100); /* blocks, ids, looks */
    unlink(path);
    attn_pool_close(owners);
    attn_client_close(a);
    attn_client_close(reader);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_happens_meanwhile_is_not_lost),
        cmocka_unit_test(a_lost_request_leaves_one_sequence),
        cmocka_unit_test(a_move_is_repeated_when_its_process_was_killed),
        cmocka_unit_test(what_is_no_copy_is_left_alone),
        cmocka_unit_test(drafts_that_are_taken_back_meanwhile_are_in_no_file),
    };
    return cmocka_run_group_tests(tests, seq_daemons_start, seq_daemons_stop);
}
