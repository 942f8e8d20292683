/* fake_sp.h: the REP end of the SP wire protocol on blocking sockets, for the fake daemon.
 *
 * Not libnanomsg's: that one drops answers to a peer it is still writing to, and a fake that loses
 * messages by accident is of no use. One thread.
 */
#ifndef FAKE_SP_H
#define FAKE_SP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FAKE_SP_MAX_PEERS 32

/* Also in release builds: a fake that went wrong must not look like a library that did. */
#define MUST(x) ((x) ? (void)0 : fake_sp_die(__FILE__, __LINE__, #x))
void fake_sp_die(const char *file, int line, const char *what) __attribute__((noreturn));

struct fake_sp {
    int listen_fd;
    bool is_ipc; /* a type byte before each length */
    int peers[FAKE_SP_MAX_PEERS]; /* -1: none */
    uint32_t serials[FAKE_SP_MAX_PEERS]; /* so that an answer does not reach a later peer */
    uint32_t n_accepted;
};

struct fake_message {
    uint32_t serial;
    uint8_t id[4]; /* of the SP header */
    uint8_t *body; /* malloc'ed, 64-byte aligned */
    size_t bytes;
};

/* ipc://PATH or tcp://127.0.0.1:PORT */
void fake_sp_open(struct fake_sp *s, const char *url);
void fake_sp_close(struct fake_sp *s);
/* Accepts peers and receives one message; false: none within timeout_ms. */
bool fake_sp_recv(struct fake_sp *s, int timeout_ms, struct fake_message *out_m);
/* Answers message m. A peer that is gone is ignored. */
void fake_sp_send(struct fake_sp *s, const struct fake_message *m, const void *body, size_t bytes);

#endif
