/* sp_good.h: what tests of the transport have beside hostile peers: one that does everything right,
 * and a time of their own.
 */
#ifndef TESTS_DAEMON_SP_GOOD_H
#define TESTS_DAEMON_SP_GOOD_H

#include "tests/daemon/transport/sp_server.h"

struct sp_good {
    int fd;
    bool is_ipc;
    uint64_t n_done;
};

void sp_good_open(struct sp_good *g, const struct server *s);
void sp_good_round_trip(struct sp_good *g); /* asserts the reply */

/* Over a connection that raw_handshake() has opened. */
void sp_send_step(int fd, bool is_ipc, uint64_t request_id, uint32_t reply_bytes);
void sp_receive_error(int fd, bool is_ipc, uint64_t request_id, attn_status st, const char *part);

/* The daemon's clock stands still and moves as it is told, until clock_use(NULL). */
void sp_time_use(void);
void sp_time_pass(uint64_t ns);

#endif
