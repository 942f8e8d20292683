/* e2e_drain.c: SIGTERM under full load: every step that the daemon took is answered, rightly, and
 * every token that was begun is finished in all its layers.
 *
 * Three connections keep a step of each of their sequences on its way, layer after layer, token
 * after token. Half of the drains end because the workers end with the token they are in, half
 * because the drain timeout is over. Environment: DRAIN_ROUNDS (4).
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "tests/daemon/e2e/e2e.h"

enum { CLIENTS = 3, SEQS = 8, MOST_TOKENS = 400 };

struct worker {
    struct e2e_seq seq;
    struct e2e_client *c;
    uint32_t pos, layer; /* of the step on its way */
    uint64_t id; /* 0: none is */
};

static struct e2e d;
static struct e2e_client c[CLIENTS];
static struct worker workers[CLIENTS * SEQS];
static uint64_t last_answered[CLIENTS]; /* request id */
static uint64_t n_answered, n_refused;
static bool is_ending; /* nobody begins a token */

static void send_layer(struct worker *w)
{
    struct e2e_item it = {&w->seq, w->pos, 1};
    w->id = e2e_send_step(w->c, w->layer, E2E_BOTH, &it, 1, 0);
}

/* The step was answered: the next layer, or the next token. */
static void go_on(struct worker *w, const struct wire_reply *r)
{
    struct e2e_item it = {&w->seq, w->pos, 1};
    w->id = 0;
    if (r->header->status == ATTN_EDRAINING) {
        assert_int_equal(w->layer, 0); /* what is begun is finished */
        if (strstr(r->header->message, "no new tokens") == NULL &&
            strstr(r->header->message, "the daemon is stopping") == NULL)
            fail_msg("%s", r->header->message);
        is_ending = true;
        n_refused++;
        return;
    }
    if (r->header->status != ATTN_OK)
        fail_msg("%s", r->header->message);
    e2e_check_step(r, w->layer, E2E_BOTH, &it, 1);
    n_answered++;
    if (++w->layer == E2E_LAYERS) {
        w->layer = 0;
        w->pos++;
    }
    if (w->layer > 0 || (!is_ending && w->pos < MOST_TOKENS))
        send_layer(w);
}

static void take_answers(uint32_t which, int timeout_ms)
{
    e2e_await_ms(&c[which], 0, timeout_ms); /* nothing has this id: receives what there is */
    for (uint32_t i = 0; i < SEQS; i++) {
        struct worker *w = &workers[which * SEQS + i];
        for (const struct e2e_reply *r = c[which].replies; r != NULL; r = r->next)
            if (r->wire.request_id == w->id) {
                last_answered[which] = w->id > last_answered[which] ? w->id : last_answered[which];
                go_on(w, &r->wire);
                break;
            }
    }
    e2e_forget(&c[which]);
}

static void begin(const char *drain_timeout)
{
    const char *const flags[] = {"--engine.drain_timeout",
                                 drain_timeout,
                                 "--engine.token_timeout",
                                 "5m",
                                 "--device.kv_memory",
                                 "32M",
                                 NULL};
    is_ending = false;
    memset(last_answered, 0, sizeof last_answered);
    e2e_start(&d, flags);
    for (uint32_t i = 0; i < CLIENTS; i++) {
        if (i == 1)
            e2e_connect_shm(&c[i], &d);
        else
            e2e_connect(&c[i], &d);
        e2e_make_pool(&c[i], ATTN_F32, 1024);
        c[i].may_fail = true;
        for (uint32_t k = 0; k < SEQS; k++) {
            struct worker *w = &workers[i * SEQS + k];
            *w = (struct worker){.c = &c[i]};
            assert_int_equal(e2e_open_seq(&c[i], &w->seq, 100 * i + k, k), ATTN_OK);
            send_layer(w);
        }
    }
}

static bool has_ended(void)
{
    siginfo_t info = {0};
    assert_int_equal(waitid(P_PID, (id_t)d.pid, &info, WEXITED | WNOHANG | WNOWAIT), 0);
    return info.si_pid != 0;
}

/* Answers until all have finished what they had begun. Requests of a connection are read in order:
 * one that is not answered was never read if nothing that was sent after it was answered. */
static void end(void)
{
    for (uint32_t i = 0; !has_ended(); i++)
        take_answers(i % CLIENTS, 1);
    assert_int_equal(e2e_wait(&d), 0);
    for (uint32_t i = 0; i < CLIENTS; i++) {
        take_answers(i, 20);
        for (uint32_t k = 0; k < SEQS; k++) {
            const struct worker *w = &workers[i * SEQS + k];
            assert_int_equal(w->layer, 0);
            assert_true(w->id == 0 || w->id > last_answered[i]);
        }
        e2e_disconnect(&c[i]);
    }
    assert_false(e2e_log_has(&d, "still in flight"));
    e2e_stop(&d);
}

static void take_many(uint64_t n)
{
    for (uint64_t until = n_answered + n; n_answered < until;)
        for (uint32_t i = 0; i < CLIENTS; i++)
            take_answers(i, 0);
}

static uint32_t rounds(void)
{
    const char *text = getenv("DRAIN_ROUNDS");
    return text == NULL ? 2 : (uint32_t)atoi(text) / 2;
}

static void workers_finish_the_token_they_are_in(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < rounds(); i++) {
        begin("10m");
        take_many(100 + 7 * (i % 50));
        e2e_signal(&d, SIGTERM);
        is_ending = true;
        end();
    }
}

static void after_the_drain_timeout_no_token_begins_and_all_are_finished(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < rounds(); i++) {
        begin("1ms");
        take_many(100 + 7 * (i % 50));
        e2e_signal(&d, SIGTERM);
        for (uint32_t k = 0; !is_ending && !e2e_log_has(&d, "drained"); k++)
            take_answers(k % CLIENTS, 1);
        end();
    }
    printf("%u drains under load: %llu steps answered, %llu refused\n", 2 * rounds(),
           (unsigned long long)n_answered, (unsigned long long)n_refused);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(workers_finish_the_token_they_are_in),
        cmocka_unit_test(after_the_drain_timeout_no_token_begins_and_all_are_finished),
    };
    return cmocka_run_group_tests_name("drain", tests, NULL, NULL);
}
