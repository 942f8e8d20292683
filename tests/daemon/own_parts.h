/* own_parts.h: an engine without a thread that has a cache and sessions of its own. */
#ifndef TESTS_DAEMON_OWN_PARTS_H
#define TESTS_DAEMON_OWN_PARTS_H

#include "cache/kv.h"
#include "daemon/cards/cards.h"
#include "daemon/engine/engine.h"
#include "daemon/keeper/idle_memory.h"
#include "daemon/request/session.h"

struct own_parts {
    struct kv *kv;
    struct session_table *sessions;
    struct tenants *tenants; /* borrowed; NULL: nobody is asked */
    bool is_kept; /* as if there were a keeper */
    struct cards *cards; /* borrowed; NULL: there is one */
    uint32_t card;
    struct idle_memory idle; /* of cache.idle_memory: a successor's is the same, if it stays open */
};

/* arena_fd: a predecessor's, -1: none. */
static inline attn_status own_engine_take(struct own_parts *own, int arena_fd,
                                          const struct config *cfg, const struct backend_ops *ops,
                                          struct backend *b, struct iobuf_pool *bufs,
                                          struct engine **out_engine, char *why, size_t why_bytes)
{
    struct backend_info info;
    ops->info(b, &info);
    struct kv_config kc = engine_kv_config(cfg, info.kv_bytes);
    if (own->idle.base == NULL &&
        idle_memory_open(cfg->idle_memory_bytes, -1, &own->idle, why, why_bytes) != ATTN_OK)
        return ATTN_ENOMEM;
    kc.idle_is_new = own->idle.is_new;
    own->idle.is_new = false;
    attn_status st = kv_open(&kc, arena_fd, &own->kv, why, why_bytes);
    if (st == ATTN_OK)
        st = session_table_open(cfg->max_sessions, &own->sessions);
    if (st != ATTN_OK)
        return st;
    struct engine_env env = {
        .cfg = cfg,
        .ops = ops,
        .backend = b,
        .bufs = bufs,
        .kv = own->kv,
        .sessions = own->sessions,
        .tenants = own->tenants,
        .is_kept = own->is_kept,
        .peers = cards_peers(own->cards),
        .card = own->card,
        .idle = &own->idle,
    };
    return engine_open(&env, out_engine, why, why_bytes);
}

static inline attn_status own_engine_open(struct own_parts *own, const struct config *cfg,
                                          const struct backend_ops *ops, struct backend *b,
                                          struct iobuf_pool *bufs, struct engine **out_engine,
                                          char *why, size_t why_bytes)
{
    return own_engine_take(own, -1, cfg, ops, b, bufs, out_engine, why, why_bytes);
}

/* After engine_close. */
static inline void own_parts_close(struct own_parts *own)
{
    session_table_close(own->sessions);
    kv_close(own->kv);
}

#endif
