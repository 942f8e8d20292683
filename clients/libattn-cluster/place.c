/* place.c: costs in tokens, and homes by rendezvous hashing. */
#include "place.h"

#include <math.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>

#define TOKENS_PER_QUEUE_SECOND 10000.0
#define BALANCE 0.1
#define FULL 0.5

/* The first 8 bytes of SHA-256 of the bytes of a and then of b, as a number whose first byte is the
 * highest. 0 where memory is missing: another home, no wrong one. */
static uint64_t hash(const void *a, size_t a_bytes, const void *b, size_t b_bytes)
{
    uint64_t digest[EVP_MAX_MD_SIZE / 8] = {0};
    EVP_MD_CTX *ctx = EVP_MD_CTX_new();
    bool is_made = ctx != NULL && EVP_DigestInit_ex(ctx, EVP_sha256(), NULL) == 1 &&
                   EVP_DigestUpdate(ctx, a, a_bytes) == 1 &&
                   EVP_DigestUpdate(ctx, b, b_bytes) == 1 &&
                   EVP_DigestFinal_ex(ctx, (unsigned char *)digest, NULL) == 1;
    EVP_MD_CTX_free(ctx);
    return is_made ? __builtin_bswap64(digest[0]) : 0;
}

uint64_t place_home(const char *name)
{
    return hash(name, strlen(name), "", 0) >> 48;
}

static int compare(double a, double b)
{
    return (a > b) - (a < b);
}

static int by_emptiness(const void *left, const void *right)
{
    const struct candidate *a = left, *b = right;
    int order = compare(a->backlog, b->backlog);
    order = order != 0 ? order : compare(b->free_part, a->free_part);
    return order != 0 ? order : strcmp(a->name, b->name);
}

void place_by_emptiness(struct candidate *c, size_t n)
{
    qsort(c, n, sizeof *c, by_emptiness);
}

static uint64_t rank_of(const char *name, uint64_t key)
{
    uint64_t bytes = __builtin_bswap64(key);
    return hash(&bytes, sizeof bytes, name, strlen(name));
}

/* The index of the one that ranks first with key, of all or of those that are not in which[n]. */
static size_t first_of(const struct candidate *c, size_t n, uint64_t key, const size_t *which,
                       size_t n_which)
{
    size_t best = SIZE_MAX;
    uint64_t best_rank = 0;
    for (size_t i = 0; i < n; i++) {
        bool is_there = false;
        for (size_t j = 0; j < n_which; j++)
            is_there |= which[j] == i;
        uint64_t rank = is_there ? 0 : rank_of(c[i].name, key);
        if (!is_there && (best == SIZE_MAX || rank > best_rank)) {
            best = i;
            best_rank = rank;
        }
    }
    return best;
}

size_t place_homes(const struct candidate *c, size_t n, const struct prompt *p,
                   size_t out_which[PLACE_PROBED])
{
    uint64_t keys[32]; /* of the first 1, 2, 4, 8, ... blocks */
    size_t n_keys = 0, n_found = 0;
    uint64_t bytes = p->adapter;
    for (uint64_t to = p->block_tokens, done = 0; to <= p->n; done = to, to *= 2) {
        keys[n_keys] =
            hash(&bytes, sizeof bytes, p->tokens + done, (size_t)(to - done) * sizeof *p->tokens);
        bytes = __builtin_bswap64(keys[n_keys++]);
    }
    for (size_t k = n_keys; k-- > 0 && n_found < PLACE_PROBED && n_found < n;) {
        size_t first = first_of(c, n, keys[k], NULL, 0);
        bool is_there = false;
        for (size_t j = 0; j < n_found; j++)
            is_there |= out_which[j] == first;
        if (!is_there)
            out_which[n_found++] = first;
    }
    for (; n_keys > 0 && n_found < PLACE_PROBED && n_found < n; n_found++)
        out_which[n_found] = first_of(c, n, keys[n_keys - 1], out_which, n_found);
    return n_found;
}

/* Infinite: it has no room. */
static double cost_of(const struct candidate *c, const struct prompt *p, double least_backlog)
{
    double n_lacking = (double)p->n - c->cached_tokens;
    if (c->n_free_blocks < ceil(n_lacking / p->block_tokens) + 1)
        return INFINITY;
    double used = 1 - (double)c->n_free_blocks / (c->n_blocks > 0 ? c->n_blocks : 1);
    double queue = c->queue_seconds * TOKENS_PER_QUEUE_SECOND;
    return n_lacking + FULL * used * p->n + queue + BALANCE * (c->backlog - least_backlog);
}

static int by_cost(const void *left, const void *right)
{
    const struct candidate *a = left, *b = right;
    int order = b->has_answered - a->has_answered;
    order = order != 0 || !a->has_answered ? order : compare(a->cost, b->cost);
    order = order != 0 ? order : compare(a->backlog, b->backlog);
    order = order != 0 ? order : compare(b->n_free_blocks, a->n_free_blocks);
    return order != 0 ? order : strcmp(a->name, b->name);
}

size_t place_order(struct candidate *c, size_t n, const struct prompt *p)
{
    double least = INFINITY;
    size_t n_answered = 0;
    for (size_t i = 0; i < n; i++) {
        if (c[i].has_answered && c[i].backlog < least)
            least = c[i].backlog;
        n_answered += c[i].has_answered;
    }
    for (size_t i = 0; i < n; i++)
        c[i].cost = c[i].has_answered ? cost_of(&c[i], p, least) : INFINITY;
    qsort(c, n, sizeof *c, by_cost);
    return n_answered;
}

bool place_is_behind(const struct candidate *c, size_t n_answered, const struct prompt *p)
{
    return n_answered == 0 || c->cost + c->cached_tokens > 2.0 * p->n;
}
