/* sp_internal.h: a connection of sp.c, and what its files share: sp_connect.c makes it,
 * sp_message.c has the messages on it.
 */
#ifndef ATTND_LIBATTN_SP_INTERNAL_H
#define ATTND_LIBATTN_SP_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "clients/libattn/transport/sp_address.h"
#include "clients/libattn/transport/transport.h"

#define SP_READ_BYTES 4096u /* read at once where no message is known yet */
#define SP_RETRY_NS 10000000u
#define SP_HEAD_BYTES (9u + 4u) /* on ipc; on tcp without the first */
#define SP_ALIGN 64u
#define SP_MAX_PINNED 128 /* buffers, and MiB of them all: two large steps and their answers */

enum sp_state { SP_CLOSED, SP_LOOKING_UP, SP_CONNECTING, SP_SECURING, SP_HANDSHAKE, SP_READY };

/* Where messages lie (sp_memory.c); any thread. */
struct sp_memory {
    _Atomic(const struct lane_memory_ops *) pins; /* large ones are page-locked by it; NULL: none */
    _Atomic(struct sp_message *) spare[SP_MAX_PINNED]; /* page-locked, and nobody's */
    atomic_int device; /* on which, once there is one */
    atomic_size_t n_pinned; /* bytes, spare or not */
};

struct sp {
    struct client_transport base;
    struct sp_address address;
    struct secure *secure; /* of a tls+tcp:// url; NULL: no TLS */
    int epoll_fd, wake_fd; /* never change */
    struct sp_memory *memory; /* own_memory; the second connection has the first's */
    struct sp_memory own_memory;
    atomic_bool is_ready, is_woken;
    atomic_uint_fast64_t generation, n_failures, max_message_bytes;

    /* A second connection, for large messages that others need not wait for; NULL: none was needed
     * yet. Its descriptor is in our epoll set, its receiving thread is ours. */
    _Atomic(struct sp *) beside;
    atomic_bool has_beside; /* it is made, or could not be */
    /* If it is closed, it is to be made: the first always, the second when it would be used. */
    atomic_bool is_wanted;
    bool is_beside;
    atomic_uint_fast64_t n_lost; /* connections over which something was sent */
    char *url; /* for it, and the files: */
    char *ca_file, *cert_file, *cert_key_file;

    pthread_mutex_t lock;
    int socket; /* -1: none. Changed by the receiving thread alone, under the lock */
    struct sp_message *out; /* partly written, or NULL */
    uint8_t out_head[SP_HEAD_BYTES];
    size_t out_at; /* bytes of head and message that are written */
    bool has_sent; /* over this connection */
    char why_not[256]; /* there is no connection; "" if there is one */

    /* the receiving thread's */
    enum sp_state state;
    enum sp_state furthest; /* that an address of this round came to; */
    char why_furthest[256]; /* why it was no further. It tells more than the last one's */
    struct sp_lookup *lookup; /* while LOOKING_UP */
    bool has_spare_core;
    uint64_t spin_ns;
    uint64_t retry_ns, retry_at_ns, connect_until_ns;
    uint8_t read[SP_READ_BYTES]; /* [read_at, read_end) is not looked at yet */
    size_t read_at, read_end;
    struct sp_message *in; /* partly read, or NULL */
    size_t in_at;
    uint32_t in_id;
};

/* A message's memory; the message is behind it. */
struct sp_message {
    _Alignas(SP_ALIGN) size_t bytes;
    size_t room; /* page-locked, for so many; 0: not page-locked */
};

/* The connection goes on to be made as far as it can now, or it is time to try again. */
void sp_connect_on(struct sp *sp);
/* Tries to connect, now. */
void sp_connect_begin(struct sp *sp);
/* Closes the connection, keeps why there is none, and sets when to try again: at once, if there was
 * none and the host has another address. */
void sp_disconnect(struct sp *sp, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Has the epoll descriptor look at the socket: for bytes, and for room if that is wanted. */
void sp_watch(struct sp *sp, int op, bool wants_write);
/* Bytes from the daemon, as recv(2); through TLS, if that is spoken. */
ssize_t sp_read(struct sp *sp, void *dst, size_t n);
/* What a failed connect, send or sp_read means. */
const char *sp_why_broken(const struct sp *sp);

/* NULL: no memory. */
struct sp_message *sp_message_new(struct sp_memory *sm, size_t bytes);
void sp_message_free(struct sp_memory *sm, struct sp_message *m); /* m may be NULL */
/* As the transport's pin. */
attn_status sp_memory_pin(struct sp_memory *sm, const struct lane_memory_ops *pins, char *why,
                          size_t why_bytes);
/* Frees what is spare: all, once no connection has a message. is_ours: not in a forked child. */
void sp_memory_end(struct sp_memory *sm, bool is_ours);
/* Reads what has come, of a large message at most about max bytes. true: sp->in is whole. false:
 * not yet (*out_has_more: it stopped at max), or the connection is gone. */
bool sp_message_read(struct sp *sp, size_t max, bool *out_has_more);
/* sp->out has this head. */
void sp_message_put_head(struct sp *sp, size_t message_bytes, uint32_t id);
/* Writes of sp->out what the socket takes, at most max bytes (more than a head). true: all of it
 * is written. Under the lock. */
bool sp_message_write_locked(struct sp *sp, size_t max);

#endif
