/* place.h: which daemon a new sequence goes to, by what is known of each. The same rule, with the
 * same numbers, as clients/cluster/src/attnd_cluster/place.py, which says why. */
#ifndef PLACE_H
#define PLACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PLACE_PROBED 4 /* daemons that are asked about a prompt at once */
#define PLACE_WINDOW 64 /* what was given lately is of about so many sequences */

struct candidate {
    const char *name;
    void *host;
    double free_part; /* of its pool, as the registry says */
    double queue_seconds;
    double
        backlog; /* tokens that this client gave it lately to compute, and for each sequence those
                       of a mean prompt: it is decoded, too */
    bool is_asked, has_answered;
    uint32_t cached_tokens, n_blocks, n_free_blocks; /* its answer */
    double cost; /* of place_order */
};

struct prompt {
    const uint32_t *tokens;
    uint32_t n, block_tokens;
    uint64_t adapter;
};

/* 16 bits of a daemon's name, the top ones of ids of sequences that begin there. */
uint64_t place_home(const char *name);
/* The emptiest first, by what is known without asking. */
void place_by_emptiness(struct candidate *c, size_t n);
/* out_which gets the indices of the prompt's homes, PLACE_PROBED at most; how many there are. */
size_t place_homes(const struct candidate *c, size_t n, const struct prompt *p,
                   size_t out_which[PLACE_PROBED]);
/* Those that have answered, the best first, before all others; how many have. */
size_t place_order(struct candidate *c, size_t n, const struct prompt *p);
/* Whether more is ahead of the best of them than the whole prompt. After place_order. */
bool place_is_behind(const struct candidate *c, size_t n_answered, const struct prompt *p);

#endif
