/* engine_fixture.h: an engine without a thread that has a cache and sessions of its own. */
#ifndef TESTS_DAEMON_ENGINE_FIXTURE_H
#define TESTS_DAEMON_ENGINE_FIXTURE_H

#include "cache/kv.h"
#include "daemon/cards/cards.h"
#include "daemon/engine/engine.h"
#include "daemon/keeper/idle_memory.h"
#include "daemon/request/session.h"

struct engine_fixture {
    struct kv *kv;
    struct session_table *sessions;
    struct tenants *tenants; /* borrowed; NULL: none is asked */
    bool is_kept; /* as if there were a keeper */
    struct cards *cards; /* borrowed; NULL: there is one */
    uint32_t card;
    struct idle_memory idle; /* of cache.idle_memory: a successor's is the same, if it stays open */
};

/* arena_fd: a predecessor's, -1: none. */
static inline attn_status
engine_fixture_take_over(struct engine_fixture *fixture, int arena_fd, const struct config *cfg,
                         const struct backend_ops *ops, struct backend *b, struct iobuf_pool *bufs,
                         struct engine **out_engine, char *why, size_t why_bytes)
{
    struct backend_info info;
    ops->info(b, &info);
    struct kv_config kc = engine_kv_config(cfg, info.kv_bytes);
    if (fixture->idle.base == NULL &&
        idle_memory_open(cfg->idle_memory_bytes, -1, &fixture->idle, why, why_bytes) != ATTN_OK)
        return ATTN_ENOMEM;
    kc.idle_is_new = fixture->idle.is_new;
    fixture->idle.is_new = false;
    attn_status st = kv_open(&kc, arena_fd, &fixture->kv, why, why_bytes);
    if (st == ATTN_OK)
        st = session_table_open(cfg->max_sessions, &fixture->sessions);
    if (st != ATTN_OK)
        return st;
    struct engine_env env = {
        .cfg = cfg,
        .ops = ops,
        .backend = b,
        .bufs = bufs,
        .kv = fixture->kv,
        .sessions = fixture->sessions,
        .tenants = fixture->tenants,
        .is_kept = fixture->is_kept,
        .peers = cards_peers(fixture->cards),
        .card = fixture->card,
        .idle = &fixture->idle,
    };
    return engine_open(&env, out_engine, why, why_bytes);
}

static inline attn_status engine_fixture_open(struct engine_fixture *fixture,
                                              const struct config *cfg,
                                              const struct backend_ops *ops, struct backend *b,
                                              struct iobuf_pool *bufs, struct engine **out_engine,
                                              char *why, size_t why_bytes)
{
    return engine_fixture_take_over(fixture, -1, cfg, ops, b, bufs, out_engine, why, why_bytes);
}

/* After engine_close. */
static inline void engine_fixture_close(struct engine_fixture *fixture)
{
    session_table_close(fixture->sessions);
    kv_close(fixture->kv);
}

#endif
