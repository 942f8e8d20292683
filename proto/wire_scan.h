/* wire_scan.h: checks a header against all limits before protobuf-c unpacks it. Internal to
 * proto/. */
#ifndef ATTND_PROTO_WIRE_SCAN_H
#define ATTND_PROTO_WIRE_SCAN_H

#include "attnd.pb-c.h"
#include "proto/attn_types.h"

/* Walks the wire format of one message of this kind, guided by its descriptor. After ATTN_OK,
 * protobuf_c_message_unpack of the same bytes can fail only for want of memory.
 *
 * Refused   anything over wire_limits.h's limits; truncated or overlong varints; lengths past the
 *           end; groups and reserved wire types; a known field in another type's encoding, out of
 *           its type's range or, unless repeated, twice; two members of a oneof; floats that are
 *           not finite; strings that are not UTF-8 or hold control characters.
 * Ignored   unknown fields, within the limits.
 * Errors    ATTN_EPROTO; why names the field's path and the value. */
attn_status wire_scan(const ProtobufCMessageDescriptor *desc, const uint8_t *bytes, size_t n_bytes,
                      char *why, size_t why_bytes);

#endif
