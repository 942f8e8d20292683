/* sp_frame.h: parses the framing of nanomsg's REP side (SP over tcp and ipc), as a state machine
 * over bytes.
 *
 * Knows no socket and allocates nothing, so it is tested byte by byte. A connection is
 *
 *   handshake   00 'S' 'P' 00, protocol u16 BE (REQ 0x30, ours REP 0x31), 00 00; both sides send it
 *   message     on ipc a byte 01; length u64 BE; length bytes
 *   its bytes   first the id stack: u32 BE words up to and including the first with its top bit
 *               set, then the body; a reply carries the same stack in front of its body
 *
 * The body does not pass through here: after SP_MESSAGE the caller reads body_left bytes itself and
 * reports them with sp_frame_took.
 */
#ifndef ATTND_DAEMON_TRANSPORT_SP_FRAME_H
#define ATTND_DAEMON_TRANSPORT_SP_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SP_MAX_IDS 16u
#define SP_MAX_HEAD_BYTES (9 + 4 * SP_MAX_IDS)
#define SP_HANDSHAKE_BYTES 8

enum sp_event {
    SP_MORE, /* all bytes consumed, nothing to report */
    SP_READY, /* the handshake is complete and the peer is a REQ */
    SP_MESSAGE, /* ids and body_left are set; the body comes next (it may be empty) */
    SP_BAD, /* bytes break the protocol, as why says; the frame is unusable */
};

struct sp_frame {
    bool is_ipc;
    uint8_t state;
    uint8_t n_have; /* bytes of the part being read */
    uint8_t part[9];
    uint8_t ids[4 * SP_MAX_IDS]; /* as on the wire */
    uint32_t n_ids;
    uint64_t body_left;
    const char *why;
};

extern const uint8_t sp_handshake[SP_HANDSHAKE_BYTES]; /* what we send */

void sp_frame_init(struct sp_frame *f, bool is_ipc);
/* Reads up to the next event; returns the bytes consumed. body_left must be 0. */
size_t sp_frame_feed(struct sp_frame *f, const uint8_t *bytes, size_t n, enum sp_event *out_event);
/* The caller has taken n <= body_left bytes of the body from the stream. */
void sp_frame_took(struct sp_frame *f, uint64_t n);
/* Whether a message (not the handshake) has arrived only in part. */
bool sp_frame_is_inside(const struct sp_frame *f);
/* Writes what goes before a reply's body; returns its size. */
size_t sp_head_encode(bool is_ipc, const uint8_t *ids, uint32_t n_ids, uint64_t body_bytes,
                      uint8_t out[SP_MAX_HEAD_BYTES]);

#endif
