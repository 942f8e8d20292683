/* dedup.c: owners, and how late duplicates of requests are recognized, so that they change nothing.
 *
 * A request that names an epoch is checked by it: truncation and adoption raise the epoch of a
 * sequence, and a new sequence begins above every epoch that has ended. Caches that move sequences
 * to each other make different epochs (kv_set_epochs), so no two can make the same. Requests that
 * name no epoch (open, adopt), make a sequence of another name (fork), or create or find pools are
 * remembered by their owner, a bounded number of them; older ids are refused. Those that set
 * something of a pool are not carried out after a higher one was: one that was refused is not
 * remembered, and a copy of it may come late. All of this is truth and holds across a successor.
 *
 * A process that dies after it published a sequence and before it noted the request leaves the
 * request in the sequence's record, from where recovery notes it (also that of a truncation, which
 * does no harm).
 */
#include "cache/kv_internal.h"

#include <stdio.h>
#include <string.h>

bool kv_owner_has_seen(const struct kv *kv, uint32_t owner, uint64_t request)
{
    if (owner == KV_NO_OWNER || request == KV_NO_REQUEST)
        return false;
    const struct kv_seen_rec *s = &kv->seen[owner];
    bool is_seen = request <= s->floor;
    for (uint32_t i = 0; i < KV_MAX_SEEN; i++)
        is_seen |= s->id[i] == request;
    return is_seen;
}

void kv_request_see(struct kv *kv, uint32_t owner, uint64_t request)
{
    if (owner == KV_NO_OWNER || request == KV_NO_REQUEST || kv_owner_has_seen(kv, owner, request))
        return;
    struct kv_seen_rec *s = &kv->seen[owner];
    uint64_t *least = &s->id[0];
    for (uint32_t i = 1; i < KV_MAX_SEEN; i++)
        least = s->id[i] < *least ? &s->id[i] : least;
    if (request < *least) { /* lower than all stored ones */
        kv_publish64(&s->floor, request);
        return;
    }
    if (*least > s->floor)
        kv_publish64(&s->floor, *least);
    kv_publish64(least, request);
}

static uint64_t *last_set(const struct kv *kv, uint32_t owner, uint32_t pool)
{
    return kv->last_set[(size_t)owner * kv->config.max_pools + pool];
}

void kv_owner_begin(struct kv *kv, uint32_t owner, uint64_t id, uint32_t tenant, const char *label)
{
    struct kv_owner_rec *o = &kv->owners[owner];
    kv_owner_end(kv, owner);
    memset(&kv->seen[owner], 0, sizeof kv->seen[owner]);
    memset(last_set(kv, owner, 0), 0, kv->config.max_pools * sizeof kv->last_set[0]);
    o->tenant = tenant;
    snprintf(o->label, sizeof o->label, "%s", label);
    kv_publish64(&o->id, id);
}

void kv_owner_end(struct kv *kv, uint32_t owner)
{
    kv_publish64(&kv->owners[owner].id, 0);
    kv_reservations_end(kv, owner);
}

uint64_t kv_owner_id(const struct kv *kv, uint32_t owner)
{
    return kv->owners[owner].id;
}

uint32_t kv_owner_tenant(const struct kv *kv, uint32_t owner)
{
    return kv->owners[owner].tenant;
}

const char *kv_owner_label(const struct kv *kv, uint32_t owner)
{
    return kv->owners[owner].label;
}

uint64_t kv_owner_last_request(const struct kv *kv, uint32_t owner)
{
    const struct kv_seen_rec *s = &kv->seen[owner];
    uint64_t last = s->floor;
    for (uint32_t i = 0; i < KV_MAX_SEEN; i++)
        last = s->id[i] > last ? s->id[i] : last;
    return last;
}

void kv_owner_saw(struct kv *kv, uint32_t owner, uint64_t request)
{
    kv_request_see(kv, owner, request);
}

bool kv_owner_has_set(const struct kv *kv, uint32_t owner, kv_pool_id pool, enum kv_setting what,
                      uint64_t request)
{
    return kv_owner_has_seen(kv, owner, request) || request < last_set(kv, owner, pool.index)[what];
}

/* A pool that takes the place of another one may find its numbers: those of requests that name it
 * are higher. */
void kv_owner_set(struct kv *kv, uint32_t owner, kv_pool_id pool, enum kv_setting what,
                  uint64_t request)
{
    uint64_t *last = &last_set(kv, owner, pool.index)[what];
    if (request > *last)
        kv_publish64(last, request);
    kv_request_see(kv, owner, request);
}

void kv_owner_saw_all(struct kv *kv, const struct kv *other, uint32_t owner)
{
    const struct kv_seen_rec *s = &other->seen[owner];
    for (uint32_t i = 0; i < KV_MAX_SEEN; i++)
        kv_request_see(kv, owner, s->id[i]);
    if (s->floor > kv->seen[owner].floor)
        kv_publish64(&kv->seen[owner].floor, s->floor);
}

void kv_set_epochs(struct kv *kv, uint32_t n_bits, uint32_t maker)
{
    kv->epoch_bits = n_bits;
    kv->epoch_maker = maker;
}

/* The lowest epoch above `than` that this cache can make; 0: there is none. */
static uint32_t epoch_above(const struct kv *kv, uint32_t than)
{
    uint32_t n = (than >> kv->epoch_bits) + 1;
    uint32_t epoch = n << kv->epoch_bits | kv->epoch_maker;
    return epoch > than && epoch >> kv->epoch_bits == n ? epoch : 0;
}

uint32_t kv_epoch_first(const struct kv *kv)
{
    return epoch_above(kv, kv->epochs->ended);
}

/* If another cache made the present epoch, the name may have had higher epochs here before: then
 * the result is also above every epoch that has ended here. */
uint32_t kv_epoch_next(const struct kv *kv, uint32_t epoch)
{
    bool is_own = (epoch & ((1u << kv->epoch_bits) - 1)) == kv->epoch_maker;
    uint32_t ended = kv->epochs->ended;
    return epoch_above(kv, is_own || epoch > ended ? epoch : ended);
}

void kv_epoch_end(struct kv *kv, uint32_t epoch)
{
    if (epoch > kv->epochs->ended)
        kv_publish32(&kv->epochs->ended, epoch);
}

void kv_epoch_announce(struct kv_seq_rec *s, uint32_t epoch, uint64_t request)
{
    kv_publish32(&s->made, 0);
    kv_publish64(&s->request, request);
    kv_publish32(&s->made, epoch);
}

bool kv_seq_is_repeat(const struct kv *kv, kv_seq_id seq, uint32_t owner, uint64_t request)
{
    const struct kv_seq_rec *s = kv_seq_live(kv, seq.index);
    return s != NULL && request != KV_NO_REQUEST && kv_owner_of(s) == owner &&
           s->made == kv_epoch_of(s) && s->request == request;
}

/* --- where sequences went --- */

static uint64_t seal_of(const struct kv *kv, const struct kv_moved_rec *r)
{
    uint64_t url = siphash(kv->key, r->url, strnlen(r->url, sizeof r->url));
    uint64_t words[] = {
        r->serial,  r->tenant, r->name, r->id, (uint64_t)r->at_epoch << 32 | r->epoch,
        r->until_s, url};
    return siphash(kv->key, words, sizeof words);
}

static struct kv_moved_rec *rec_of(const struct kv *kv, uint64_t serial)
{
    return &kv->moved[serial % KV_MAX_MOVED];
}

void kv_moved_note(struct kv *kv, uint32_t tenant, uint64_t name, uint32_t epoch,
                   const struct kv_moved *to, uint32_t life_s)
{
    uint64_t serial = kv->heads->moved + 1;
    struct kv_moved_rec *r = rec_of(kv, serial);
    kv_publish32(&r->state, 0);
    r->serial = serial;
    r->tenant = tenant;
    r->name = name;
    r->id = to->id;
    r->at_epoch = epoch;
    r->epoch = to->epoch;
    r->until_s = kv->now_s + life_s;
    memset(r->url, 0, sizeof r->url);
    memcpy(r->url, to->url, strnlen(to->url, KV_URL_BYTES - 1));
    r->seal = seal_of(kv, r);
    kv_publish32(&r->state, KV_LIVE);
    kv->heads->moved = serial;
}

bool kv_moved_find(const struct kv *kv, uint32_t tenant, uint64_t name, uint32_t epoch,
                   struct kv_moved *out)
{
    uint64_t last = kv->heads->moved, n = last < KV_MAX_MOVED ? last : KV_MAX_MOVED;
    for (uint64_t i = 0; i < n; i++) {
        const struct kv_moved_rec *r = rec_of(kv, last - i);
        if (r->state != KV_LIVE || r->name != name || r->tenant != tenant)
            continue;
        if (epoch > r->at_epoch || kv->now_s >= r->until_s)
            return false;
        *out = (struct kv_moved){.id = r->id, .epoch = r->epoch, .url = r->url};
        return true;
    }
    return false;
}

bool kv_moved_is_damaged(const struct kv *kv, uint32_t i)
{
    const struct kv_moved_rec *r = &kv->moved[i];
    return r->state != KV_LIVE || r->serial % KV_MAX_MOVED != i || r->serial == 0 ||
           r->url[KV_URL_BYTES - 1] != '\0' || r->seal != seal_of(kv, r);
}

void kv_moved_recover(struct kv *kv)
{
    kv->heads->moved = 0;
    for (uint32_t i = 0; i < KV_MAX_MOVED; i++) {
        struct kv_moved_rec *r = &kv->moved[i];
        if (r->state == 0)
            continue;
        if (kv_moved_is_damaged(kv, i))
            kv_publish32(&r->state, 0);
        else if (r->serial > kv->heads->moved)
            kv->heads->moved = r->serial;
    }
}
