/* reader.h: one who keeps an index of what the cache has published, from events and snapshots. */
#ifndef TESTS_CACHE_READER_H
#define TESTS_CACHE_READER_H

#include "cache/kv_tier.h"

struct reader {
    uint64_t number; /* of the latest event that it has read */
    bool is_in_snapshot;
    struct kv_published_at at;
    struct reader_entry {
        struct kv_content content; /* ids: a hash of them in key[0], the pointer is NULL */
        uint32_t block;
    } known[256];
    uint32_t n;
    uint32_t n_snapshots, n_events, n_gone; /* n_gone: events whose block was gone already */
};

/* Reads n_most events, or blocks of a snapshot, at most. */
void reader_turn(struct reader *r, struct kv *kv, uint32_t n_most);
/* Reads until there is nothing more. */
void reader_catch_up(struct reader *r, struct kv *kv);
bool reader_is_current(const struct reader *r, const struct kv *kv);
/* Empty, or how what it knows differs from what is published. */
const char *reader_difference(const struct reader *r, const struct kv *kv);

#endif
