/* fake_daemon.h: a daemon for libattn's tests: one thread, sockets of fake_sp, no attention.
 *
 * Answers every request like a healthy daemon would, but for what the test planned: requests that
 * are swallowed, answered in reverse order, twice, with a failure, or garbled. A step's out is 2 q
 * + the item's sequence id, its lse the token's position. Only f32 pools with equal dims.
 */
#ifndef FAKE_DAEMON_H
#define FAKE_DAEMON_H

#include <pthread.h>
#include <stdatomic.h>

#include "proto/wire.h"
#include "tests/clients/fake_sp.h"

enum fake_garbling {
    FAKE_INTACT,
    FAKE_EMPTY, /* no bytes at all */
    FAKE_CUT, /* the last byte is missing */
    FAKE_BAD_MAGIC,
    FAKE_BAD_HEADER, /* protobuf that does not parse */
    FAKE_OTHER_ID, /* another request id in the preamble */
    FAKE_NO_BODY, /* ok, without the body asked for */
    FAKE_SHORT_PAYLOAD, /* a step's out with one row missing */
    FAKE_N_GARBLINGS,
};

/* What to do with the steps that come; the test changes it while the daemon runs. */
struct fake_plan {
    atomic_uint n_swallow; /* so many requests (hello aside) are not answered */
    atomic_uint n_hold; /* so many step answers are gathered, then sent in reverse order */
    atomic_uint n_fail; /* so many steps fail as a whole with the status below */
    _Atomic int32_t status;
    _Atomic uint64_t retry_after_us;
    _Atomic uint32_t failed_item; /* 1 + index of the item that alone fails, 0: none */
    atomic_bool is_repeating; /* every answer twice */
    _Atomic enum fake_garbling garbling; /* of every answer but hello's and pool's */
};

struct fake_daemon {
    char url[96];
    struct fake_plan plan;
    /* Looks at every request before it is answered, on the daemon's thread; NULL: no look. Set,
     * as user, before the start. */
    void (*see)(void *user, const Attnd__Request *r);
    void *user;
    /* Limits in the answer to hello, set before the start. 0: ten minutes, 64 MiB, 4096 */
    uint64_t lease_us, max_message_bytes;
    uint32_t max_step_tokens;
    atomic_uint n_requests, n_steps; /* received */
    _Atomic uint64_t last_step_id; /* request id of the newest step */
    atomic_bool is_stopping;
    pthread_t thread;
};

/* Listens on url. Aborts on failure. */
void fake_daemon_start(struct fake_daemon *f, const char *url);
/* Closes its sockets: every connection breaks, what was held is forgotten. */
void fake_daemon_stop(struct fake_daemon *f);

#endif
