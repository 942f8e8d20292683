/* card_open.c: opens the devices of all cards, then their caches, then their engines. What a
 * predecessor kept is taken up on all of them or on none. */
#include "daemon/process/card_open.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sysexits.h>
#include <unistd.h>

#include "daemon/base/health.h"
#include "daemon/base/log.h"
#include "daemon/base/stats.h"
#include "daemon/cards/cards.h"
#include "daemon/cards/move.h"
#include "daemon/cards/restore.h"
#include "daemon/keeper/keep.h"

enum {
    CARD_WHY_BYTES = 512,
    LAST_ROUNDS = 4,
    STAT_BLOCK_BYTES = 512, /* stat(2) */
    MEMORY_TRIES = 15, /* three seconds, for a predecessor's memory to come back */
    MEMORY_AGAIN_US = 200000,
};

/* --- devices ---------------------------------------------------------------------------------- */

/* Drops all kept caches because one can't be used, even those that were taken up already. */
static void start_empty(struct card_list *list, const char *why)
{
    log_warn("starting empty, the kept cache can't be used: %s", why);
    for (uint32_t i = 0; i < list->n; i++)
        if (list->at[i].kept.arena_fd >= 0)
            kept_cache_drop(&list->at[i].kept);
}

/* What the memory of this descriptor, -1 none, has taken of the host's. */
static uint64_t taken_bytes(int fd)
{
    struct stat sb;
    return fd < 0 || fstat(fd, &sb) != 0 ? 0 : (uint64_t)sb.st_blocks * STAT_BLOCK_BYTES;
}

static uint64_t tables_taken_bytes(const struct card_list *list)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < list->n; i++)
        n += taken_bytes(list->at[i].kept.arena_fd) + taken_bytes(list->at[i].kept.idle_fd);
    return n;
}

/* Opens a card's device with its predecessor's memory. Where host memory is short, what has ended
 * may not be gone yet, so it is tried again for a while; then it goes on with what there is, since
 * giving the cache up would not make it more. */
static attn_status device_take(const struct config *cfg, const struct card_list *list,
                               struct device_choice *which, struct card *card, char *why,
                               size_t why_bytes)
{
    attn_status st = ATTN_EQUOTA;
    which->taken_bytes = tables_taken_bytes(list);
    for (uint32_t i = 0; i < MEMORY_TRIES && st == ATTN_EQUOTA; i++) {
        if (i > 0)
            usleep(MEMORY_AGAIN_US);
        which->may_be_short = i + 1 == MEMORY_TRIES;
        st = device_import(cfg, which, card->kept.backend, card->kept.memory_fd, &card->device, why,
                           why_bytes);
    }
    return st;
}

static int device_begin(const struct config *cfg, struct card_list *list,
                        struct device_choice *which, struct card *card)
{
    char why[CARD_WHY_BYTES];
    if (card->kept.arena_fd >= 0) {
        attn_status st = device_take(cfg, list, which, card, why, sizeof why);
        if (st == ATTN_OK)
            return EX_OK;
        if (st != ATTN_EINVAL &&
            st != ATTN_EQUOTA) { /* it may work later: end and be restarted, to save the cache */
            log_error("backend %s, whose cache is kept, can't be used: %s", card->kept.backend,
                      why);
            return EX_UNAVAILABLE;
        }
        start_empty(list, why);
    }
    which->taken_bytes = tables_taken_bytes(list);
    which->may_be_short = false;
    return device_open(cfg, which, &card->device) == ATTN_OK ? EX_OK : EX_UNAVAILABLE;
}

/* Takes what a predecessor with the same cards left, of all cards or of none. */
static void caches_take(struct card_list *list, const struct config_device *devices)
{
    uint32_t n_taken = 0;
    for (uint32_t i = 0; i < list->n; i++) {
        struct card *card = &list->at[i];
        card->kept = (struct kept_cache){.arena_fd = -1, .memory_fd = -1, .idle_fd = -1};
        n_taken += kept_cache_take(kept_owner(i, list->n, devices[i].index), &card->kept);
    }
    if (n_taken > 0 && list->at[0].kept.arena_fd < 0)
        start_empty(list, "that of the first card is not there");
    keep_drop_rest();
}

/* The devices that the settings name; "all": as many as there are. */
static uint32_t devices_of(const struct config *cfg, struct config_device out[CONFIG_MAX_DEVICES])
{
    uint32_t n;
    memset(out, 0, CONFIG_MAX_DEVICES * sizeof *out);
    config_devices(cfg->device_index, out, &n);
    if (n > 0)
        return n;
    n = device_count(cfg); /* if there is none, opening the first one logs why */
    n = n < 1 ? 1 : n > CONFIG_MAX_DEVICES ? CONFIG_MAX_DEVICES : n;
    for (uint32_t i = 0; i < n; i++)
        out[i].index = i;
    return n;
}

/* The choice of the i-th device. usual: the backend for devices that name none; NULL: not known
 * yet. */
static struct device_choice choice_of(const struct config_device *devices, uint32_t i, uint32_t n,
                                      const char *usual)
{
    const struct config_device *d = &devices[i];
    struct device_choice which = {.index = d->index, .n = i, .n_all = n, .backend = usual};
    if (d->backend[0] != '\0')
        which.backend = d->backend;
    for (uint32_t k = 0; k < n; k++) {
        bool is_alike = strcmp(devices[k].backend, d->backend) == 0;
        which.n_alike += is_alike;
        which.n_alike_to_come += is_alike && k >= i;
    }
    return which;
}

/* Logs how devices of one module are linked: without a link, copies between them are slow. */
static void say_links(const struct card_list *list, const struct config_device *devices)
{
    for (uint32_t i = 0; i < list->n; i++) {
        const struct device *d = &list->at[i].device;
        struct backend_info info;
        d->ops->info(d->backend, &info);
        for (uint32_t k = 0; k < i; k++) {
            bool is_alike = list->at[k].device.ops->moves_submit == d->ops->moves_submit;
            uint32_t other = devices[k].index;
            if (is_alike && !(other < 64 && (info.reached >> other & 1)))
                log_warn("devices %" PRIu32 " and %" PRIu32
                         " don't reach each other's memory: what "
                         "goes between them goes through the host's, which is slower",
                         other, devices[i].index);
        }
    }
}

int cards_devices_begin(const struct config *cfg, struct card_list *list)
{
    struct config_device devices[CONFIG_MAX_DEVICES];
    const char *usual = NULL;
    list->n = devices_of(cfg, devices);
    caches_take(list, devices);
    for (uint32_t i = 0; i < list->n; i++) {
        struct device_choice which = choice_of(devices, i, list->n, usual);
        int code = device_begin(cfg, list, &which, &list->at[i]);
        if (code != EX_OK)
            return code;
        if (devices[i].backend[0] == '\0')
            usual = list->at[i].device.ops->name;
    }
    say_links(list, devices);
    return EX_OK;
}

/* --- caches and engines ----------------------------------------------------------------------- */

static attn_status cache_begin(const struct config *cfg, struct card_list *list, struct card *card,
                               char *why, size_t why_bytes)
{
    struct backend_info info;
    card->device.ops->info(card->device.backend, &info);
    struct kv_config kc = engine_kv_config(cfg, info.kv_bytes);
    if (card->idle.base == NULL) {
        attn_status st = idle_memory_open(cfg->idle_memory_bytes, card->kept.idle_fd, &card->idle,
                                          why, why_bytes);
        card->kept.idle_fd = -1; /* card->idle has it, or it is closed */
        if (st != ATTN_OK)
            return st;
    }
    kc.idle_is_new = card->idle.is_new;
    if (card->kept.arena_fd >= 0) {
        struct kv_config kept = kc;
        if (card->device.is_short)
            kept.table_pages = 1; /* what there is stays, and grows no more */
        attn_status st = kv_open(&kept, card->kept.arena_fd, &card->kv, why, why_bytes);
        if (st == ATTN_OK || st == ATTN_ENOMEM)
            return st;
        start_empty(list, why);
    }
    return kv_open(&kc, -1, &card->kv, why, why_bytes);
}

/* Opens the caches of all cards. If one kept cache can't be used, none is, and arenas that were
 * opened before are made anew. */
static attn_status caches_begin(const struct config *cfg, struct card_list *list, char *why,
                                size_t why_bytes)
{
    bool had = list->at[0].kept.arena_fd >= 0;
    for (uint32_t i = 0; i < list->n; i++) {
        struct card *card = &list->at[i];
        attn_status st = cache_begin(cfg, list, card, why, why_bytes);
        if (st != ATTN_OK)
            return st;
        if (had && list->at[0].kept.arena_fd < 0) {
            had = false;
            for (uint32_t k = 0; k < i; k++) {
                kv_close(list->at[k].kv);
                list->at[k].kv = NULL;
                st = cache_begin(cfg, list, &list->at[k], why, why_bytes);
                if (st != ATTN_OK)
                    return st;
            }
        }
    }
    return ATTN_OK;
}

/* Gives the keeper what is new. true: it has the caches of all cards. */
static bool caches_put(const struct config *cfg, struct card_list *list)
{
    struct config_device devices[CONFIG_MAX_DEVICES];
    bool is_kept = true;
    devices_of(cfg, devices);
    for (uint32_t i = 0; i < list->n; i++) {
        struct card *card = &list->at[i];
        struct kept_owner owner = kept_owner(i, list->n, devices[i].index);
        bool was_kept = card->kept.arena_fd >= 0;
        is_kept &= was_kept || kept_cache_put(owner, card->kv, card->device.ops,
                                              card->device.backend, &card->kept);
        if (!was_kept || card->idle.is_new || card->idle.base == NULL)
            kept_cache_put_idle(owner, card->kv, card->idle.fd, &card->kept);
    }
    return is_kept;
}

static attn_status engine_begin(struct card_list *list, struct card *card,
                                const struct engine_env *shared, char *why, size_t why_bytes)
{
    const struct config *cfg = shared->cfg;
    struct engine_env env = *shared;
    attn_status st = session_table_open(cfg->max_sessions, &card->sessions);
    if (st != ATTN_OK) {
        snprintf(why, why_bytes, "no memory for %" PRIu32 " sessions (engine.max_sessions)",
                 cfg->max_sessions);
        return st;
    }
    env.ops = card->device.ops;
    env.backend = card->device.backend;
    env.kv = card->kv;
    env.idle = &card->idle;
    env.sessions = card->sessions;
    env.peers = cards_peers(list->cards);
    env.card = (uint32_t)(card - list->at);
    if (env.card > 0 && tenants_copy(shared->tenants, &card->tenants) != ATTN_OK) {
        snprintf(why, why_bytes, "no memory for tenants");
        return ATTN_ENOMEM;
    }
    env.tenants = env.card > 0 ? card->tenants : shared->tenants;
    st = engine_open(&env, &card->engine, why, why_bytes);
    if (st == ATTN_OK && list->cards != NULL)
        cards_join(list->cards, card->engine);
    return st;
}

/* Restores what a predecessor left on the cards: first all pools, because the sequences of some are
 * split over all cards. */
static attn_status engines_restore(struct card_list *list, char *why, size_t why_bytes)
{
    struct engine_kept of[CONFIG_MAX_DEVICES] = {0}, all;
    attn_status st = ATTN_OK;
    for (uint32_t i = 0; i < list->n && st == ATTN_OK; i++)
        if (list->at[i].kept.arena_fd >= 0)
            st = engine_restore_pools(list->at[i].engine, &of[i]);
    if (st != ATTN_OK)
        goto fail;
    if (list->cards != NULL)
        st = cards_restore_pools(list->cards, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    for (uint32_t i = 0; i < list->n && st == ATTN_OK; i++)
        if (list->at[i].kept.arena_fd >= 0)
            st = engine_restore(list->at[i].engine, &of[i]);
    if (st != ATTN_OK)
        goto fail;
    if (list->cards != NULL)
        st = cards_restore(list->cards);
    if (st != ATTN_OK)
        goto fail;
    all = of[0]; /* pools and sessions are counted on the first card */
    for (uint32_t i = 1; i < list->n; i++) {
        all.n_sequences += of[i].n_sequences;
        all.n_tokens += of[i].n_tokens;
        all.n_dropped += of[i].n_dropped;
    }
    if (list->at[0].kept.arena_fd >= 0)
        log_info("kept: %" PRIu32 " sequences of %" PRIu64 " tokens, %" PRIu32 " pools, %" PRIu32
                 " sessions; dropped: %" PRIu64,
                 all.n_sequences, all.n_tokens, all.n_pools, all.n_sessions, all.n_dropped);
    return ATTN_OK;
fail:
    snprintf(why, why_bytes, "the kept cache can't be taken up: %s", attn_status_message(st));
    return st;
}

static void stats_cards_name(const struct config *cfg, const struct card_list *list)
{
    struct config_device devices[CONFIG_MAX_DEVICES];
    devices_of(cfg, devices);
    for (uint32_t i = 0; i < list->n; i++) {
        struct stats_card *s = &stats.cards[i];
        s->device = devices[i].index;
        snprintf(s->name, sizeof s->name, "%.7s%s%" PRIu32, devices[i].backend,
                 devices[i].backend[0] != '\0' ? ":" : "", devices[i].index);
    }
    atomic_store(&stats.n_cards, list->n > 1 ? list->n : 0);
}

attn_status cards_engines_begin(struct card_list *list, const struct engine_env *env, char *why,
                                size_t why_bytes)
{
    const struct config *cfg = env->cfg;
    struct engine_env shared = *env;
    attn_status st = caches_begin(cfg, list, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    if (list->n > 1 &&
        cards_open(list->n, cfg->max_pools, cfg->max_sessions, &list->cards) != ATTN_OK) {
        snprintf(why, why_bytes, "no memory for %" PRIu32 " cards", list->n);
        return ATTN_ENOMEM;
    }
    shared.is_kept = caches_put(cfg, list);
    for (uint32_t i = 0; i < list->n && st == ATTN_OK; i++)
        st = engine_begin(list, &list->at[i], &shared, why, why_bytes);
    stats_cards_name(cfg, list);
    if (st == ATTN_OK)
        st = engines_restore(list, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    for (uint32_t i = 0; i < list->n; i++)
        kept_cache_close(&list->at[i].kept);
    for (uint32_t i = 0; i < list->n && st == ATTN_OK; i++)
        st = engine_start(list->at[i].engine, why, why_bytes);
    return st;
}

/* --- while they run --------------------------------------------------------------------------- */

bool cards_are_lost(const struct card_list *list)
{
    for (uint32_t i = 0; i < list->n; i++)
        if (engine_health(list->at[i].engine) == ATTN_OK)
            return false;
    return true;
}

void cards_give_up(struct card_list *list)
{
    if (cards_are_lost(list))
        return; /* the process ends, and a successor starts */
    for (uint32_t i = 0; i < list->n && list->n > 1; i++) {
        struct card *card = &list->at[i];
        if (card->is_given_up || engine_health(card->engine) == ATTN_OK)
            continue;
        card->is_given_up = true;
        log_error("card %" PRIu32 " is lost; the others go on without it until a restart", i);
        if (card->kept.arena_name[0] != '\0')
            kept_cache_drop(&card->kept);
    }
}

bool cards_are_stalled(const struct card_list *list, uint64_t timeout_ns)
{
    uint64_t silent_ns;
    for (uint32_t i = 0; i < list->n; i++)
        if (health_is_stalled(HEALTH_ENGINE + i, timeout_ns, &silent_ns))
            return true;
    return false;
}

/* --- the end ---------------------------------------------------------------------------------- */

static attn_status stop_one(struct engine *e)
{
    attn_status st = e == NULL ? ATTN_OK : engine_health(e);
    if (engine_close(e) == ATTN_OK)
        return st;
    log_error("the device does not give its batches back; ending without it");
    return ATTN_ETIMEDOUT;
}

attn_status cards_stop(struct card_list *list)
{
    if (list->n <= 1)
        return stop_one(list->at[0].engine);
    attn_status st = ATTN_OK;
    bool has_all = true;
    for (uint32_t i = 0; i < list->n; i++) {
        struct engine *e = list->at[i].engine;
        has_all &= e != NULL;
        if (e == NULL)
            continue;
        bool is_lost = engine_health(e) != ATTN_OK;
        if (engine_stop(e) != ATTN_OK) {
            log_error("the device does not give its batches back; ending without it");
            st = ATTN_ETIMEDOUT;
        } else if (is_lost && st == ATTN_OK) {
            st = ATTN_EDEVICE;
        }
    }
    /* delivers the last messages between engines, and the answers to them */
    for (uint32_t i = 0; i < LAST_ROUNDS * list->n && list->cards != NULL && has_all; i++)
        engine_take_messages(list->at[i % list->n].engine);
    for (uint32_t i = 0; i < list->n && st == ATTN_OK; i++) {
        engine_close(list->at[i].engine);
        list->at[i].engine = NULL;
    }
    return st;
}

void cards_end(struct card_list *list)
{
    cards_move_fini(list->cards);
    cards_close(list->cards);
    for (uint32_t i = 0; i < list->n; i++) {
        session_table_close(list->at[i].sessions);
        tenants_close(list->at[i].tenants);
        kv_close(list->at[i].kv);
        idle_memory_close(&list->at[i].idle);
    }
}

void cards_devices_end(struct card_list *list)
{
    for (uint32_t i = list->n; i-- > 0;)
        device_close(&list->at[i].device);
}
