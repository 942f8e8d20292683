/* flood.h: one tenant's flood of one kind of request: what is sent, and the process that sends it.
 * bench_flood.c measures another tenant beside it. */
#ifndef ATTND_TESTS_DAEMON_FLOOD_H
#define ATTND_TESTS_DAEMON_FLOOD_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/types.h>

#include <cmocka.h>

#include "tests/daemon/e2e/e2e.h"

enum {
    FLOOD_NAMES = 4096,
    FLOOD_IDS = 65536, /* token ids of a long sequence */
};
#define FLOOD_TOKEN "bench-flood-bad"

/* What a flooding process has been answered; in memory shared with it. */
struct flood_answered {
    _Atomic uint64_t n_ok, n_other, bytes;
    _Atomic int last_other; /* status */
    _Atomic bool is_ready;
};

/* One connection of the flood. */
struct flooder {
    struct e2e_client c;
    uint32_t of; /* its kind and number */
    uint64_t seq, n_sent;
    uint32_t epoch, made; /* made: names used for new sequences */
    uint32_t thin_pool; /* in which all ids are published */
    /* sequences to close: what was opened or forked */
    uint64_t close_name[FLOOD_NAMES], name_of[FLOOD_NAMES]; /* by request */
    uint32_t close_epoch[FLOOD_NAMES], n_close;
    uint64_t pool_request; /* to release */
    uint32_t pool_made;
    struct wire_reply exported;
    uint8_t *payload; /* its blocks; NULL: nothing was exported */
};

struct flood_kind {
    const char *name;
    void (*send)(struct flooder *f);
    int most_in_flight; /* 0: as many as asked for */
    void (*connect)(struct flood_answered *a); /* instead of send; over TLS */
    enum { FLOOD_NOTHING, FLOOD_CLOSE, FLOOD_GOODBYE } then; /* for what it has opened */
};

/* requests.c */
extern const struct flood_kind flood_kinds[];
extern const uint32_t flood_n_kinds;
extern uint32_t flood_ids[FLOOD_IDS];
void flood_prepare(struct flooder *f, const struct flood_kind *k); /* makes what requests name */

/* process.c */
extern struct e2e flood_daemon;
extern int flood_in_flight; /* requests of a connection */
bool flood_is_possible(const struct flood_kind *k); /* does the daemon listen where it comes? */
void flood_connections(struct flood_answered *a); /* connections that end at once */
void flood_handshakes(struct flood_answered *a);
void flood_enter(struct e2e_client *c, const char *token); /* connects, and says hello */
pid_t flood_start(const struct flood_kind *k, uint32_t of, struct flood_answered *a);

#endif
