/* shm_ring.h: the memory that a worker and the daemon share: the layout of a client's region, and
 * the two packets that hand it over. The protocol is in docs/protocol/shared-memory.md.
 *
 * The region is a sealed memfd: control words, the submit ring, the complete ring, and the data
 * area, which the client divides as it likes. Either side can write to all of it at any time, so
 * whatever is taken from it is read once, into private memory, and checked there.
 */
#ifndef ATTND_PROTO_SHM_RING_H
#define ATTND_PROTO_SHM_RING_H

#include <stdatomic.h>
#include <stdint.h>

#define SHM_MAGIC 0x4d485341u /* "ASHM" as bytes */
#define SHM_VERSION 1u
#define SHM_ALIGN 64u /* alignment of messages and rooms in the data area */
#define SHM_MAX_SLOTS 1024u
#define SHM_MIN_ROOM_BYTES 1024u /* least room for a reply: any error fits */
#define SHM_HEAD_ROOM_BYTES 512u /* for a step's reply, besides tensors and a byte per item */

/* client -> daemon, the first packet */
struct shm_hello {
    uint32_t magic, version;
    uint32_t n_slots; /* the most that is wanted; 0: the daemon's setting */
    uint32_t reserved; /* 0 */
    uint64_t region_bytes; /* likewise */
};

/* daemon -> client, the answer; with status 0 it carries two descriptors: the region's memfd and
 * the eventfd that wakes the daemon */
struct shm_welcome {
    uint32_t magic, version;
    int32_t status; /* attn_status */
    uint32_t n_slots; /* a power of two: entries of each ring, requests in flight */
    uint64_t region_bytes;
    uint64_t submit_offset, complete_offset, data_offset;
    char message[208]; /* why the status is not 0; ends with a 0 */
};

/* Values of client_sleeps. */
enum {
    SHM_AWAKE = 0,
    SHM_WAITS_ON_FUTEX = 1, /* on client_sleeps itself */
    SHM_WAITS_ON_SOCKET = 2, /* for a byte */
};

/* At offset 0 of the region; each word alone on its cache line. */
struct shm_control {
    _Alignas(64) _Atomic uint32_t submitted; /* entries put into the submit ring, by the client */
    _Alignas(64) _Atomic uint32_t daemon_sleeps; /* 1: the next submit writes the eventfd */
    _Alignas(64) _Atomic uint32_t completed; /* entries put into the complete ring, by the daemon */
    _Alignas(64) _Atomic uint32_t client_sleeps; /* how the next completion wakes the client */
};

/* Entry (count % n_slots) of the submit ring. Offsets are from the start of the region, multiples
 * of SHM_ALIGN, in the data area. */
struct shm_submit {
    uint64_t request_offset;
    uint64_t room_offset; /* where the reply goes */
    uint32_t request_bytes; /* of the message, exactly */
    uint32_t room_bytes; /* at least SHM_MIN_ROOM_BYTES */
    uint32_t slot; /* < n_slots; names the request until it is completed */
    uint32_t reserved; /* 0 */
};

/* Entry (count % n_slots) of the complete ring. */
struct shm_complete {
    uint64_t reply_offset; /* inside the request's room, a multiple of SHM_ALIGN */
    uint32_t reply_bytes;
    uint32_t slot;
};

_Static_assert(sizeof(struct shm_hello) == 24, "as documented");
_Static_assert(sizeof(struct shm_welcome) == 256, "as documented");
_Static_assert(sizeof(struct shm_control) == 256, "as documented");
_Static_assert(sizeof(struct shm_submit) == 32, "as documented");
_Static_assert(sizeof(struct shm_complete) == 16, "as documented");
_Static_assert(sizeof(_Atomic uint32_t) == 4, "shared between compilers");

#endif
