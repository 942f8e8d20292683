/* wire_limits.h: the most that a message's header may have, checked before anything is unpacked
 * (wire_scan.h). docs/protocol/messages.md lists them.
 */
#ifndef ATTND_PROTO_WIRE_LIMITS_H
#define ATTND_PROTO_WIRE_LIMITS_H

#define WIRE_MAX_HEADER_BYTES (1u << 20)
#define WIRE_MAX_DEPTH 5u /* the header itself is 1 */
#define WIRE_MAX_SUBMESSAGES 1100u /* of one header: layer specs are the many */
#define WIRE_MAX_FIELDS 32768u /* of one header, unknown ones and unpacked elements included */
#define WIRE_MAX_STEP_ITEMS 4096u
#define WIRE_MAX_PARENTS 65536u /* of one step: tokens of its trees */
#define WIRE_MAX_TREE_NODES 64u /* of one sequence */
#define WIRE_MAX_INDICES (1u << 19) /* of one step, and tokens that they name */
#define WIRE_MAX_TOKENS 131072u /* ids of one message */
#define WIRE_MAX_RETENTIONS 8 /* ranges of tokens in one message */
#define WIRE_MAX_CALLS 128u /* of one message: half of the ids that a session remembers */
#define WIRE_MAX_CHUNK_BLOCKS 1024u /* of export and import */
#define WIRE_MAX_WEIGHTS_BYTES (1u << 20) /* of one piece */
#define WIRE_MAX_STRING_BYTES 4096u /* and of bytes: a note */
#define WIRE_MAX_JSON_BYTES (256u << 10) /* of StatsReply.json */
#define WIRE_MAX_LAYERS 512u
#define WIRE_MAX_HEADS 1024u
#define WIRE_MAX_FEATURES 64u /* required_features */

#endif
