/* sp_proxy.h: a bad network between one client and a daemon, both on Unix sockets: a thread that
 * passes SP messages on, but drops some, sends some twice, holds some back until others have
 * passed, sends copies of old ones, and cuts the connection. */
#ifndef TESTS_DAEMON_SP_PROXY_H
#define TESTS_DAEMON_SP_PROXY_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum sp_harm { SP_PASS, SP_DROP, SP_TWICE, SP_HOLD, SP_OLD, SP_CUT, SP_N_HARMS };

struct sp_proxy {
    char path[96], daemon_path[96]; /* of the sockets */
    uint32_t per_mille[SP_N_HARMS]; /* of messages, each way; what is left passes */
    uint64_t random;
    _Atomic uint64_t n[SP_N_HARMS];
    /* the thread's */
    pthread_t thread;
    _Atomic bool is_over;
    int listener;
};

/* Listens at p->path from now on; paths, rates and random are set. */
void sp_proxy_start(struct sp_proxy *p);
void sp_proxy_stop(struct sp_proxy *p);

#endif
