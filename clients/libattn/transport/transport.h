/* transport.h: how libattn moves messages: a table of functions a scheme.
 *
 * A transport connects by itself, again and again; it knows message ids and bytes, not what they
 * mean. Messages may be lost when a connection breaks: generation() grows then, and the client
 * sends again.
 */
#ifndef ATTN_TRANSPORT_H
#define ATTN_TRANSPORT_H

#include "clients/libattn/attn.h"

struct lane_memory_ops;

struct client_transport {
    const struct client_transport_ops *ops; /* first member of what a transport allocates */
};

/* A received message: body of a reply and the 32-bit id it answers. */
struct client_message {
    void *base;
    size_t bytes;
    uint32_t id;
};

/* Files of tls+tcp://, as in attn_client_options. */
struct client_credentials {
    const char *ca_file, *cert_file, *cert_key_file;
};

/* Unless said otherwise: any thread, several at once, never blocks. */
struct client_transport_ops {
    const char *schemes[4]; /* "ipc://", ..., NULL */
    bool is_shared; /* the daemon reads a message in the memory of message_alloc */

    /* Starts to connect and returns. ATTN_EINVAL url, ATTN_ENOTSUP, ATTN_ENOMEM; why gets the
     * sentence. */
    attn_status (*open)(const char *url, const struct client_credentials *files,
                        struct client_transport **out_t, char *why, size_t why_bytes);
    /* No other call may be running or follow. */
    void (*close)(struct client_transport *t);
    /* close in a forked child, where locks may be held by threads that are the parent's: frees
     * memory, leaves the connection to the parent. */
    void (*abandon)(struct client_transport *t);

    /* Memory for one message of this size, whose reply has at most reply_bytes. NULL: none; where
     * is_shared, none now: what is in flight has it, or there is no connection. */
    void *(*message_alloc)(struct client_transport *t, size_t bytes, size_t reply_bytes);
    /* A message from message_alloc has only so many bytes. NULL where is_shared. */
    void (*message_cut)(void *message, size_t bytes);
    /* Of a message from message_alloc that was not sent, or of base from recv. */
    void (*message_free)(struct client_transport *t, void *message);

    /* True: the message was taken. False: not now (no connection, or busy; where is_shared: its
     * connection is gone, this message can't be sent any more); it stays the caller's. is_beside:
     * it may overtake others and be overtaken, so it may go over a second connection, which is made
     * for it. */
    bool (*send)(struct client_transport *t, uint32_t id, void *message, bool is_beside);
    /* True: *out_m is a message, to be freed. One thread at a time. */
    bool (*recv)(struct client_transport *t, struct client_message *out_m);

    /* Blocks until recv or a send that was refused may succeed, wake is called, or ns are over. May
     * return early. The thread that calls recv. */
    void (*wait)(struct client_transport *t, uint64_t ns);
    /* Makes a wait, running or the next, return. */
    void (*wake)(struct client_transport *t);
    /* A descriptor that is readable when wait would return at once. */
    int (*fd)(struct client_transport *t);

    /* Grows with each connection, and when messages may have been lost. */
    uint64_t (*generation)(struct client_transport *t);
    bool (*is_connected)(struct client_transport *t);
    /* Attempts to connect that failed, and connections that ended. */
    uint64_t (*n_failures)(struct client_transport *t);
    /* Why there is no connection, as the latest failure says; "" before one and while connected. */
    void (*why_not)(struct client_transport *t, char *out, size_t out_bytes);
    /* The largest request and the largest reply that the connection can carry; 0: no limit of its
     * own. */
    uint64_t (*max_message)(struct client_transport *t);
    /* Larger messages are not received. */
    void (*set_max_message)(struct client_transport *t, uint64_t bytes);
    /* Page-locks memory of messages with a table of memory.h that can: where is_shared, all, now
     * and after each new connection; else of large ones, as they come. May block. */
    attn_status (*pin)(struct client_transport *t, const struct lane_memory_ops *ops, char *why,
                       size_t why_bytes);
};

/* What a failed connect, send or receive means; path of a Unix socket, or NULL. The thread's own.
 * */
const char *connect_error(int error, const char *path);

extern const struct client_transport_ops transport_sp_ops, transport_shm_ops;

#endif
