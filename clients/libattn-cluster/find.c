/* find.c: where a new sequence goes, and where one is that was moved or lost, as
 * clients/cluster/src/attnd_cluster/pool.py and sequence.py do it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "cluster_internal.h"
#include "place.h"
#include "proto/attn_time.h"

#define PAUSE_US 50000
#define LOCATE_US 1000000 /* after which it is looked whether the daemon is still a member */
#define ASK_NS 2000000000u /* of one that need not have the sequence: it may be lost, too */
#define MOVE_NS 5000000000u /* that a move may take from its adoption of a sequence to its end */

/* ---- a new one ---- */

static bool is_state(const struct host *h, const char *state)
{
    const char *is = text_of(h->record, "state");
    return strcmp(is[0] != '\0' ? is : "serving", state) == 0;
}

/* All that take sequences. The caller frees *out; NULL: no memory. */
static size_t candidates_of(struct attn_cluster *c, const char *pool, struct candidate **out)
{
    size_t n = 0;
    pthread_mutex_lock(&c->lock);
    *out = calloc(json_object_size(c->now) + 1, sizeof **out);
    for (struct host *h = c->hosts; *out != NULL && h != NULL; h = h->next) {
        if (h->is_gone || json_object_get(c->now, h->name) == NULL || !is_state(h, "serving"))
            continue;
        const json_t *load = json_object_get(json_object_get(h->record, "pools"), pool);
        double n_blocks = json_number_value(json_array_get(load, 0));
        double n_free = json_number_value(json_array_get(load, 1));
        (*out)[n++] = (struct candidate){
            .name = h->name,
            .host = h,
            .free_part = load == NULL ? 1 : n_free / (n_blocks > 0 ? n_blocks : 1),
            .queue_seconds = json_number_value(json_object_get(h->record, "queue_seconds")),
            .backlog = h->backlog};
    }
    pthread_mutex_unlock(&c->lock);
    return n;
}

static void ask(struct attn_cluster *c, const struct attn_pool_spec *spec,
                const struct attn_tokens *t, struct candidate *of)
{
    struct host *h = of->host;
    struct attn_probe p;
    attn_pool *pool;
    of->is_asked = true;
    for (int i = 0; i < 2; i++) {
        if (host_is_silent(h) || host_pool(c, h, spec, 2 * c->probe_us, &pool) != ATTN_OK)
            return;
        attn_status st = attn_seq_probe(pool, t, c->probe_us, &p);
        host_answered(h, st);
        if (st == ATTN_OK) {
            of->has_answered = true;
            of->cached_tokens = p.cached_tokens;
            of->n_blocks = p.n_blocks;
            of->n_free_blocks = p.n_free_blocks;
            return;
        }
        if (!host_begin_anew(h, pool, c->probe_us))
            return;
    }
}

/* Asks those that are to be asked; the best are the first of c then. How many have answered. */
static size_t choose(struct attn_cluster *c, const struct attn_pool_spec *spec,
                     const struct attn_tokens *t, struct candidate *of, size_t n)
{
    struct prompt p = {t->ids, t->n, spec->block_tokens != 0 ? spec->block_tokens : 16, t->adapter};
    size_t which[PLACE_PROBED], n_which = 0, n_answered;
    place_by_emptiness(of, n);
    if (n > PLACE_PROBED)
        n_which = place_homes(of, n, &p, which);
    for (size_t i = 0; i < n_which; i++)
        ask(c, spec, t, &of[which[i]]);
    for (size_t i = 0; n_which == 0 && i < n && i < PLACE_PROBED; i++)
        ask(c, spec, t, &of[i]);
    n_answered = place_order(of, n, &p);
    if (!place_is_behind(of, n_answered, &p))
        return n_answered;
    place_by_emptiness(of, n);
    for (size_t i = 0, n_more = 0; i < n && n_more < PLACE_PROBED; i++) {
        n_more += !of[i].is_asked;
        if (!of[i].is_asked)
            ask(c, spec, t, &of[i]);
    }
    return place_order(of, n, &p);
}

/* A sequence with a prompt of n_prompt tokens, of which n_tokens are to be computed. */
static void give(struct attn_cluster *c, struct host *to, uint32_t n_tokens, uint32_t n_prompt)
{
    pthread_mutex_lock(&c->lock);
    c->mean_prompt += (n_prompt - c->mean_prompt) / PLACE_WINDOW;
    for (struct host *h = c->hosts; h != NULL; h = h->next)
        h->backlog *= 1 - 1.0 / PLACE_WINDOW;
    to->backlog += (n_tokens > 0 ? n_tokens : 1) + c->mean_prompt;
    pthread_mutex_unlock(&c->lock);
}

static void set_seq(struct attn_cluster_seq *s, struct host *h, attn_pool *pool,
                    const struct attn_seq *seq, uint32_t n_cached)
{
    *s = (struct attn_cluster_seq){.struct_size = sizeof *s,
                                   .n_cached = n_cached,
                                   .client = h->client,
                                   .pool = pool,
                                   .seq = *seq};
    snprintf(s->member, sizeof s->member, "%s", h->name);
}

static attn_status open_at(struct attn_cluster *c, struct host *h,
                           const struct attn_pool_spec *spec, const struct attn_tokens *t,
                           uint64_t until, struct attn_cluster_seq *out)
{
    struct attn_seq seq;
    attn_pool *pool;
    uint32_t n_cached;
    uint64_t id = 0;
    for (int i = 0;; i++) {
        attn_status st = host_pool(c, h, spec, left_us(until), &pool);
        if (st != ATTN_OK)
            return st;
        if (getrandom(&id, 6, 0) != 6)
            return fail(ATTN_EINTERNAL, "no random number for a sequence's id");
        id |= place_home(h->name) << 48;
        st = attn_seq_open_with(pool, id, t, left_us(until), &seq, &n_cached);
        if (st == ATTN_OK)
            break;
        fail_at(h);
        if (i > 0 || !host_begin_anew(h, pool, left_us(until)))
            return st;
    }
    give(c, h, t->n - n_cached, t->n);
    set_seq(out, h, pool, &seq, n_cached);
    return ATTN_OK;
}

static bool is_elsewhere(attn_status st)
{
    return st == ATTN_ECONN || st == ATTN_ETIMEDOUT || st == ATTN_EDRAINING ||
           st == ATTN_EOVERLOAD || st == ATTN_ENOMEM || st == ATTN_ENOBLOCKS;
}

/* attn_cluster_place, whose arguments are right. */
static attn_status place_seq(struct attn_cluster *c, const struct attn_pool_spec *spec,
                             const struct attn_tokens *t, uint64_t until,
                             struct attn_cluster_seq *out_seq)
{
    for (;;) {
        struct candidate *of;
        size_t n = candidates_of(c, spec->name, &of);
        if (of == NULL)
            return fail(ATTN_ENOMEM, "no memory");
        attn_status st = ATTN_ECONN;
        size_t n_answered = choose(c, spec, t, of, n);
        for (size_t i = 0; i < n_answered && is_elsewhere(st); i++)
            st = open_at(c, of[i].host, spec, t, until, out_seq);
        free(of);
        if (st == ATTN_OK || n_answered > 0)
            return st;
        if (attn_now_ns() >= until)
            return fail(ATTN_ECONN, "%.100s: of %zu members none answered", c->url, n);
        pthread_mutex_lock(&c->lock); /* others may come */
        watch_wait(c, PAUSE_US < left_us(until) ? PAUSE_US : left_us(until));
        pthread_mutex_unlock(&c->lock);
    }
}

static bool is_right(const struct attn_cluster *c, const struct attn_pool_spec *spec,
                     const struct attn_tokens *t, const struct attn_cluster_seq *s)
{
    const char *what = c == NULL                    ? "c"
                       : spec == NULL               ? "spec"
                       : spec->name == NULL         ? "spec.name"
                       : t == NULL                  ? "t"
                       : t->n > 0 && t->ids == NULL ? "t.ids"
                       : s == NULL                  ? "seq"
                                                    : NULL;
    if (what != NULL)
        fail(ATTN_EINVAL, "%s is NULL", what);
    return what == NULL && seq_is_known(s);
}

attn_status attn_cluster_place(attn_cluster *c, const struct attn_pool_spec *spec,
                               const struct attn_tokens *t, uint64_t timeout_us,
                               struct attn_cluster_seq *out_seq)
{
    if (!is_right(c, spec, t, out_seq))
        return ATTN_EINVAL;
    return place_seq(c, spec, t, until_of(c, timeout_us), out_seq);
}

/* ---- one that was somewhere ---- */

static bool is_gone(struct attn_cluster *c, const struct host *h)
{
    pthread_mutex_lock(&c->lock);
    bool is = h->is_gone;
    pthread_mutex_unlock(&c->lock);
    return is;
}

/* ATTN_OK: it is here, and seq still its handle; ATTN_EMOVED: it went to url; ATTN_ENOTFOUND: it is
 * gone from here, or its daemon is; ATTN_ESTALE: somebody else has adopted it; ATTN_ETIMEDOUT. */
static attn_status ask_where(struct attn_cluster *c, struct host *h,
                             const struct attn_cluster_seq *s, uint64_t until,
                             struct attn_place *out)
{
    uint64_t pause_us = 1000, stale_at = 0;
    while (!is_gone(c, h)) {
        uint64_t wait_us = left_us(until) < LOCATE_US ? left_us(until) : LOCATE_US;
        attn_status st = attn_seq_locate(s->client, s->seq.id, s->seq.epoch, wait_us, out);
        if (st == ATTN_ENOTFOUND)
            return st;
        if (st == ATTN_OK && out->url[0] != '\0')
            return ATTN_EMOVED;
        if (st == ATTN_OK && out->epoch == s->seq.epoch)
            return ATTN_OK;
        uint64_t now = attn_now_ns();
        stale_at = st == ATTN_OK && stale_at == 0 ? now : stale_at;
        /* a move, which ends with it gone from here, or another worker */
        if (st == ATTN_OK && (now - stale_at > MOVE_NS || now >= until))
            return fail(ATTN_ESTALE, "another worker has adopted sequence %llu",
                        (unsigned long long)s->seq.id);
        if (now >= until)
            return fail(ATTN_ETIMEDOUT,
                        "member %.60s (%.100s) does not answer, and is not gone yet", h->name,
                        h->url);
        pthread_mutex_lock(&c->lock);
        if (!h->is_gone)
            watch_wait(c, pause_us < left_us(until) ? pause_us : left_us(until));
        pthread_mutex_unlock(&c->lock);
        pause_us = pause_us < 50000 ? 2 * pause_us : 100000;
    }
    return ATTN_ENOTFOUND;
}

/* Adopts it there, if it has all of t's tokens in each layer; a copy that lacks some is closed. */
static attn_status adopt_at(struct attn_cluster *c, struct host *h,
                            const struct attn_pool_spec *spec, const struct attn_tokens *t,
                            uint64_t until, struct attn_cluster_seq *s)
{
    uint32_t *layer_len = calloc(spec->num_layers + 1, sizeof *layer_len), least = UINT32_MAX;
    struct attn_seq seq;
    attn_pool *pool = NULL;
    attn_status st = layer_len != NULL ? ATTN_OK : ATTN_ENOMEM;
    for (int i = 0; i < 2 && st == ATTN_OK; i++) {
        st = host_pool(c, h, spec, left_us(until), &pool);
        if (st != ATTN_OK)
            break;
        st = attn_seq_adopt(pool, s->seq.id, left_us(until), &seq, layer_len);
        if (st == ATTN_OK)
            break;
        if (i == 0 && host_begin_anew(h, pool, left_us(until)))
            st = ATTN_OK;
    }
    for (uint32_t i = 0; st == ATTN_OK && i < spec->num_layers; i++)
        least = layer_len[i] < least ? layer_len[i] : least;
    free(layer_len);
    if (st != ATTN_OK)
        return st;
    if (least < t->n) {
        attn_seq_close(pool, &seq, left_us(until)); /* its blocks are of use */
        return ATTN_ENOTFOUND;
    }
    set_seq(s, h, pool, &seq, least);
    return ATTN_OK;
}

struct place {
    struct host *host;
    size_t rank;
};

static int by_rank(const void *left, const void *right)
{
    const struct place *a = left, *b = right;
    return (a->rank > b->rank) - (a->rank < b->rank);
}

/* Where `from` says that it went, where that one's latest moves went, where its id says that it
 * began, then all others. */
static size_t rank_of(const struct host *h, const struct host *from, const char *url, uint64_t id)
{
    const json_t *moved_to = json_object_get(from->record, "moved_to");
    size_t n = json_array_size(moved_to);
    if (strcmp(h->url, url) == 0)
        return 0;
    for (size_t i = 0; i < n; i++) {
        const char *name = json_string_value(json_array_get(moved_to, n - 1 - i));
        if (name != NULL && strcmp(name, h->name) == 0)
            return 1 + i;
    }
    return 1 + n + (place_home(h->name) != id >> 48);
}

static attn_status search(struct attn_cluster *c, const struct host *from, const char *url,
                          const struct attn_pool_spec *spec, const struct attn_tokens *t,
                          uint64_t until, struct attn_cluster_seq *s)
{
    size_t n = 0, n_hosts = 0;
    pthread_mutex_lock(&c->lock);
    for (struct host *h = c->hosts; h != NULL; h = h->next)
        n_hosts++;
    struct place *places = calloc(n_hosts + 1, sizeof *places);
    for (struct host *h = c->hosts; places != NULL && h != NULL; h = h->next) {
        if (!h->is_gone && h != from)
            places[n++] = (struct place){h, rank_of(h, from, url, s->seq.id)};
    }
    pthread_mutex_unlock(&c->lock);
    attn_status st = places != NULL ? ATTN_ENOTFOUND : fail(ATTN_ENOMEM, "no memory");
    if (places != NULL)
        qsort(places, n, sizeof *places, by_rank);
    bool is_found = false;
    for (size_t i = 0; i < n && !is_found; i++) {
        uint64_t some = attn_now_ns() + ASK_NS;
        some = places[i].rank == 0 || some > until ? until : some;
        is_found = adopt_at(c, places[i].host, spec, t, some, s) == ATTN_OK;
    }
    free(places);
    return is_found ? ATTN_OK : st;
}

static attn_status make_anew(struct attn_cluster *c, const struct attn_pool_spec *spec,
                             const struct attn_tokens *t, uint64_t until,
                             struct attn_cluster_seq *s)
{
    struct attn_cluster_seq made;
    if (c->rebuild == NULL)
        return fail(ATTN_ENOTFOUND,
                    "sequence %llu went with member %.60s: place another and feed it again",
                    (unsigned long long)s->seq.id, s->member);
    attn_status st = place_seq(c, spec, t, until, &made);
    if (st != ATTN_OK)
        return st;
    st = c->rebuild(c->user, &made, t);
    if (st != ATTN_OK) {
        attn_seq_close(made.pool, &made.seq, 0);
        return fail(st, "sequence %llu was not made anew on member %.60s: rebuild gave %s",
                    (unsigned long long)s->seq.id, made.member, attn_status_name(st));
    }
    made.n_cached = t->n;
    *s = made;
    return ATTN_OK;
}

attn_status attn_cluster_follow(attn_cluster *c, const struct attn_pool_spec *spec,
                                const struct attn_tokens *t, uint64_t timeout_us,
                                struct attn_cluster_seq *seq)
{
    if (!is_right(c, spec, t, seq))
        return ATTN_EINVAL;
    uint64_t until = until_of(c, timeout_us);
    pthread_mutex_lock(&c->lock);
    struct host *h = c->hosts;
    while (h != NULL && atomic_load(&h->client) != seq->client)
        h = h->next;
    pthread_mutex_unlock(&c->lock);
    if (h == NULL || seq->client == NULL)
        return fail(ATTN_EINVAL, "seq.client is none of this cluster's");
    struct attn_place to = {.url = ""};
    attn_status st = ask_where(c, h, seq, until, &to);
    pthread_mutex_lock(&c->lock);
    bool is_leaving = is_state(h, "leaving"), is_lost = h->is_gone && !is_leaving;
    pthread_mutex_unlock(&c->lock);
    if (st == ATTN_ESTALE && is_leaving) /* the move was given up, and it is ours here again */
        return adopt_at(c, h, spec, t, until, seq) == ATTN_OK ? ATTN_OK : ATTN_ESTALE;
    if (st != ATTN_EMOVED && st != ATTN_ENOTFOUND)
        return st;
    if (!is_lost || st == ATTN_EMOVED)
        st = search(c, h, to.url, spec, t, until, seq);
    return st == ATTN_OK || st == ATTN_ENOMEM ? st : make_anew(c, spec, t, until, seq);
}
