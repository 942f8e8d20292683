/* stages.h: the stages of a step, by which its time is measured.
 *
 * Stages follow each other without a gap, from the first byte of the message to the last byte of
 * its reply, so their sum is the total. A step that was never in a batch has no time in launch and
 * device.
 */
#ifndef ATTND_DAEMON_BASE_STAGES_H
#define ATTND_DAEMON_BASE_STAGES_H

#include <stdint.h>

/* X(enumerator, name, what happens in it) */
#define STAGE_MAP(X)                                                                               \
    X(RECEIVE, "receive", "the message arrives")                                                   \
    X(QUEUE, "queue", "the engine is at other work")                                               \
    X(WAIT, "wait", "for its sequences, and for a batch to be launched")                           \
    X(LAUNCH, "launch", "in flight but not on the device: copies, and the batch in front")         \
    X(DEVICE, "device", "its batches run on the device")                                           \
    X(REPLY, "reply", "lengths are committed, the reply is made")                                  \
    X(SEND, "send", "the transport writes the reply")

enum stage {
#define X(name, text, help) STAGE_##name,
    STAGE_MAP(X)
#undef X
        STAGE_N
};

const char *stage_name(enum stage s);

#endif
