/* survive.h: workers that check everything the daemon answers against a model of what it has
 * acknowledged, for tests that end the daemon's process under them.
 *
 * Layer 0 sees one key only, the newest, and its queries are unit vectors: out is the token's v,
 * lse has as many elements of its k as there are heads, so what the daemon has stored can be read
 * back and compared to the bit. Layer 1 is plain attention, compared with a float64 reference; with
 * SURVIVE_CHOOSE=n both layers are so, and their queries choose n blocks. What a token's k and v
 * are follows from (stream, layer, position), and from the dtype that they are stored as
 * (SURVIVE_KV_DTYPE); a stream is a number that the model notes for every token.
 */
#ifndef TESTS_CLIENTS_SURVIVE_H
#define TESTS_CLIENTS_SURVIVE_H

#include <pthread.h>
#include <stdatomic.h>

#include "clients/libattn/attn.h"

enum {
    SURVIVE_LAYERS = 2,
    SURVIVE_Q_HEADS = 8,
    SURVIVE_DIM = 32, /* whole groups of every dtype */
    SURVIVE_SEQS = 4, /* of a worker */
    SURVIVE_TOKENS = 160, /* of a sequence, at most */
};

struct survive_seq {
    bool is_open;
    struct attn_seq seq;
    uint32_t len[SURVIVE_LAYERS];
    uint32_t stream[SURVIVE_LAYERS][SURVIVE_TOKENS];
    uint32_t lse_bits[SURVIVE_TOKENS][SURVIVE_Q_HEADS]; /* of layer 0, as acknowledged */
};

struct survive_worker {
    attn_client *c;
    attn_pool *p;
    uint32_t number;
    attn_dtype kv_dtype;
    uint32_t choose_blocks;
    /* outputs of one token are the same to the bit, whatever they are computed with */
    bool is_exact;
    uint64_t random;
    uint32_t next_stream;
    uint64_t next_name;
    struct survive_seq seqs[SURVIVE_SEQS];
    pthread_t thread;
    _Atomic uint64_t n_acknowledged; /* calls */
    _Atomic uint64_t n_tokens; /* appended and acknowledged, layers counted apart */
    _Atomic bool is_stopping, has_failed;
    char failure[512];
};

/* Connects, makes the pool and starts to work. false: failure says why. */
bool survive_start(struct survive_worker *w, const char *url, uint32_t number, uint64_t seed);
/* Ends the thread, reads every sequence back once more, closes them all. false: something was not
 * as acknowledged, or a call failed: failure says what. */
bool survive_stop(struct survive_worker *w);

#endif
