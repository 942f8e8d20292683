/* samples.h: one message of every kind, with every field set, for the tests and the vectors. */
#ifndef ATTND_TESTS_PROTO_SAMPLES_H
#define ATTND_TESTS_PROTO_SAMPLES_H

#include "proto/wire.h"

struct sample {
    const char *name; /* also its vector's file name */
    const char *about; /* one line for the vector's head */
    bool is_reply;
    size_t payload_bytes;
    void (*fill)(Attnd__Request *request, Attnd__Reply *reply); /* the one that is_reply names */
};

extern const struct sample samples[];
extern const size_t n_samples;

#define SAMPLE_REQUEST_ID 0x1122334455667788u

/* The whole message, from aligned_alloc(WIRE_ALIGN); payload byte i is 7 i + 1. NULL: no memory. */
uint8_t *sample_build(const struct sample *s, size_t *out_bytes);

/* Decodes msg and encodes what came out again. NULL: it did not decode, why says why. */
uint8_t *sample_recode(uint8_t *msg, size_t msg_bytes, bool is_reply, size_t *out_bytes, char *why,
                       size_t why_bytes);

#endif
