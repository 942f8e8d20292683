/* sp_good.c: a peer's whole round trip, messages of steps and errors as they must be, and a clock
 * that only the test moves.
 */
#include "tests/daemon/transport/sp_good.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"

void sp_good_open(struct sp_good *g, const struct server *s)
{
    g->is_ipc = strncmp(s->url, "ipc", 3) == 0;
    g->n_done = 0;
    g->fd = raw_connect(s->url);
    raw_handshake(g->fd);
}

void sp_good_round_trip(struct sp_good *g)
{
    uint8_t payload[5000];
    size_t n;
    uint32_t id = 0;
    uint64_t request_id = 1000000 + g->n_done;
    memset(payload, (int)g->n_done & 0xff, sizeof(payload));
    uint8_t *msg = step_message(request_id, 0, payload, sizeof(payload), &n);
    raw_send_message(g->fd, g->is_ipc, 1, 5, msg, n);
    free(msg);
    uint8_t *reply = raw_receive_message(g->fd, g->is_ipc, 1, &id, &n);
    assert_non_null(reply);
    check_step_reply(reply, n, request_id, 0, payload, sizeof(payload));
    free(reply);
    g->n_done++;
}

void sp_send_step(int fd, bool is_ipc, uint64_t request_id, uint32_t reply_bytes)
{
    size_t n;
    uint8_t *msg = step_message(request_id, reply_bytes, NULL, 0, &n);
    raw_send_message(fd, is_ipc, 1, 9, msg, n);
    free(msg);
}

void sp_receive_error(int fd, bool is_ipc, uint64_t request_id, attn_status st, const char *part)
{
    uint32_t id;
    size_t n;
    uint8_t *reply = raw_receive_message(fd, is_ipc, 1, &id, &n);
    assert_non_null(reply);
    check_error_reply(reply, n, request_id, st, part);
    free(reply);
}

static _Atomic uint64_t virtual_ns;

static uint64_t virtual_now_ns(void)
{
    server_look();
    return atomic_load(&virtual_ns);
}

void sp_time_use(void)
{
    atomic_store(&virtual_ns, 1000000000000);
    clock_use(virtual_now_ns);
}

void sp_time_pass(uint64_t ns)
{
    atomic_fetch_add(&virtual_ns, ns);
}
