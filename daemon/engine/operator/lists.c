/* lists.c: lists of the engine's state, as JSON, for operators. Run inline on the engine thread;
 * every list is bounded.
 */
#include "daemon/engine/operator/lists.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cache/kv_owner.h"
#include "daemon/base/log.h"
#include "daemon/base/slow.h"
#include "daemon/base/stats.h"
#include "daemon/config/settings.h"
#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/published.h"
#include "daemon/engine/core/trace.h"
#include "daemon/engine/operator/blocks.h"

enum {
    MAX_LISTED = 500, /* entries of a page */
    MAX_LOOKED_AT = 1 << 16, /* records that one page walks over */
    MAX_NEXT = 4, /* next evicted blocks listed of a pool */
    /* positions in lists that visit the cards in turn: the card is above this bit */
    CARD_SHIFT = 40,
};

/* Adds the tenant's name, if there are tenants. */
static void add_tenant(struct engine *e, json_t *object, uint32_t id)
{
    const struct tenant *t = tenants_of_id(e->env.tenants, id);
    if (e->env.tenants != NULL)
        json_object_set_new(object, "tenant", json_string(t == NULL ? "?" : t->name));
}

static json_t *list_pools(struct engine *e, const Attnd__Inspect *ask)
{
    json_t *list = json_array();
    (void)ask;
    for (struct pool *p = NULL; (p = pool_next(e, p)) != NULL;) {
        const struct backend_pool_config *c = &p->config;
        struct pool_count n = pool_count_all(e, p);
        json_t *o = json_pack(
            "{s:s, s:I, s:I, s:I, s:I, s:I, s:b, s:I, s:I, s:I, s:s, s:s, s:I, s:I, s:I, s:I, s:I, "
            "s:s}",
            "name", p->spec.wire->name, "layers", (json_int_t)c->num_layers, "q_heads",
            (json_int_t)c->num_q_heads, "kv_heads", (json_int_t)c->num_kv_heads, "head_dim_k",
            (json_int_t)c->head_dim_k, "head_dim_v", (json_int_t)c->head_dim_v, "v_in_k",
            (int)c->is_v_in_k, "q_nope_dim", (json_int_t)c->q_nope_dim, "out_dim",
            (json_int_t)c->out_dim, "block_tokens", (json_int_t)c->block_tokens, "dtype",
            attn_dtype_name(c->q_dtype), "kv_dtype", attn_dtype_name(c->kv_dtype), "blocks",
            (json_int_t)n.blocks, "free_blocks", (json_int_t)n.free, "reserved_blocks",
            (json_int_t)n.reserved, "sequences", (json_int_t)n.sequences, "bytes",
            (json_int_t)n.bytes, "split", attn_split_name((attn_split)p->spec.wire->split));
        add_tenant(e, o, p->tenant);
        json_array_append_new(list, o);
    }
    return json_pack("{s:o}", "pools", list);
}

/* A page of a list; `next` is the position to continue at, 0: this is the last page. */
static json_t *paged(const char *name, json_t *list, uint64_t next)
{
    return json_pack("{s:o, s:I}", name, list, "next", (json_int_t)next);
}

/* The same for a list that visits all cards in turn. */
static json_t *paged_by_card(const struct engine *e, const char *name, json_t *list, uint64_t next)
{
    uint64_t card = e->env.card;
    if (next == 0 && card + 1 < peers_n(e))
        next = (card + 1) << CARD_SHIFT;
    else if (next != 0)
        next |= card << CARD_SHIFT;
    return paged(name, list, next);
}

static uint32_t first_row(const Attnd__Inspect *ask)
{
    uint64_t row = ask->after & ((1ull << CARD_SHIFT) - 1);
    return row < UINT32_MAX ? (uint32_t)row : UINT32_MAX;
}

/* Blocks that the session has reserved, of all pools. */
static uint64_t n_reserved(struct engine *e, uint32_t session)
{
    uint64_t n = 0;
    for (struct pool *p = NULL; (p = pool_next(e, p)) != NULL;)
        n += kv_reserved(e->env.kv, session, p->id);
    return n;
}

static json_t *list_sessions(struct engine *e, const Attnd__Inspect *ask)
{
    json_t *list = json_array();
    uint32_t slot = (uint32_t)ask->after, n_looked = 0;
    for (; slot < session_slots(e->env.cfg->max_sessions) && n_looked < MAX_LOOKED_AT;
         slot++, n_looked++) {
        const struct session *s = session_at(e->env.sessions, slot);
        char label[16];
        if (s->id == 0)
            continue;
        if (json_array_size(list) == MAX_LISTED)
            break;
        snprintf(label, sizeof label, "%08" PRIx32, session_label(s->id));
        uint64_t idle_ns = e->turn_ns > s->seen_ns ? e->turn_ns - s->seen_ns : 0;
        json_t *o =
            json_pack("{s:s, s:s, s:f, s:I, s:I}", "session", label, "client", s->client_name,
                      "idle_seconds", (double)idle_ns * 1e-9, "requests", (json_int_t)s->n_held,
                      "reserved_blocks", (json_int_t)n_reserved(e, slot));
        add_tenant(e, o, tenant_id(s->tenant));
        json_array_append_new(list, o);
    }
    return paged("sessions", list, slot < session_slots(e->env.cfg->max_sessions) ? slot : 0);
}

/* The beginning of a sequence's note, as text. */
static void note_text(struct engine *e, kv_seq_id seq, char out[64])
{
    const struct kv_note note = kv_seq_note_get(e->env.kv, seq);
    uint32_t n = note.n_bytes < 63 ? note.n_bytes : 63;
    for (uint32_t i = 0; i < n; i++)
        out[i] = note.bytes[i] >= 0x20 && note.bytes[i] < 0x7f ? (char)note.bytes[i] : '.';
    out[n] = '\0';
}

static json_t *sequence_object(struct engine *e, kv_seq_id seq)
{
    struct kv_seq_info info;
    char label[16] = "none";
    kv_seq_info(e->env.kv, seq, &info);
    const struct pool *p = pool_of_kv(e, info.pool);
    uint32_t n_tokens = 0;
    for (uint32_t l = 0; p != NULL && l < p->config.num_layers; l++)
        n_tokens = info.layer_len[l] > n_tokens ? info.layer_len[l] : n_tokens;
    if (info.owner != KV_NO_OWNER)
        snprintf(label, sizeof label, "%08" PRIx32,
                 session_label(session_at(e->env.sessions, info.owner)->id));
    char name[24], note[64];
    note_text(e, seq, note);
    snprintf(name, sizeof name, "%" PRIu64, info.name); /* JSON numbers end at 2^53 */
    json_t *o = json_pack("{s:s, s:s, s:s, s:I, s:I, s:I, s:b, s:s}", "sequence", name, "pool",
                          p == NULL ? "" : p->spec.wire->name, "session", label, "epoch",
                          (json_int_t)info.epoch, "tokens", (json_int_t)n_tokens, "blocks",
                          (json_int_t)info.n_blocks - (info.hole_past - info.hole_first), "busy",
                          e->seqs[seq.index].n_claims > 0, "note", note);
    if (!is_alone(e))
        json_object_set_new(o, "card", json_integer(e->env.card));
    add_tenant(e, o, info.tenant);
    return o;
}

static json_t *list_sequences(struct engine *e, const Attnd__Inspect *ask)
{
    json_t *list = json_array();
    kv_seq_id seq = {first_row(ask)};
    uint32_t end = seq.index > UINT32_MAX - MAX_LOOKED_AT ? UINT32_MAX : seq.index + MAX_LOOKED_AT;
    attn_status st;
    while ((st = kv_seq_next(e->env.kv, end, &seq)) == ATTN_OK &&
           json_array_size(list) < MAX_LISTED) {
        json_array_append_new(list, sequence_object(e, seq));
        seq.index++;
    }
    return paged_by_card(e, "sequences", list, st == ATTN_ENOTFOUND ? 0 : seq.index);
}

static json_t *slow_object(const struct slow_step *s)
{
    uint64_t total_ns = 0;
    json_t *stages = json_object();
    char session[16], request[24];
    for (enum stage i = 0; i < STAGE_N; i++) {
        json_object_set_new(stages, stage_name(i), json_real((double)s->stage_ns[i] * 1e-9));
        total_ns += s->stage_ns[i];
    }
    snprintf(session, sizeof session, "%08" PRIx32, session_label(s->session));
    snprintf(request, sizeof request, "%" PRIu64, s->request_id);
    return json_pack("{s:I, s:f, s:f, s:o, s:s, s:s, s:I, s:I, s:I, s:I, s:s, s:s, s:s}", "number",
                     (json_int_t)s->number, "unix_seconds", (double)s->unix_ns * 1e-9,
                     "total_seconds", (double)total_ns * 1e-9, "stages", stages, "session", session,
                     "request", request, "pool", (json_int_t)s->pool, "layer", (json_int_t)s->layer,
                     "items", (json_int_t)s->n_items, "tokens", (json_int_t)s->n_tokens, "status",
                     attn_status_message(s->status), "transport", s->transport, "peer", s->who);
}

static json_t *list_slow(struct engine *e, const Attnd__Inspect *ask)
{
    (void)e;
    json_t *list = json_array();
    struct slow_step *kept = calloc(SLOW_MAX, sizeof *kept);
    uint32_t n = kept == NULL ? 0 : slow_read(kept);
    for (uint32_t i = 0; i < n; i++)
        if (kept[i].number > ask->after)
            json_array_append_new(list, slow_object(&kept[i]));
    free(kept);
    return json_pack("{s:o}", "slow", list);
}

static json_t *list_events(struct engine *e, const Attnd__Inspect *ask)
{
    (void)e;
    json_t *list = json_array();
    struct log_record *kept = calloc(LOG_KEPT, sizeof *kept);
    uint64_t after = ask->after, dropped = 0;
    uint32_t n = kept == NULL ? 0 : log_read(after, kept);
    if (n > 0 && after > 0)
        dropped = kept[0].number - after - 1;
    for (uint32_t i = 0; i < n; i++) {
        json_t *object = json_loads(kept[i].json, 0, NULL); /* NULL: no memory for it */
        json_object_set_new(object, "number", json_integer((json_int_t)kept[i].number));
        json_array_append_new(list, object);
        after = kept[i].number;
    }
    free(kept);
    return json_pack("{s:o, s:I, s:I}", "events", list, "next", (json_int_t)after, "dropped",
                     (json_int_t)dropped);
}

static void add_setting(void *user, const char *name, const char *value, const char *origin,
                        bool changes_at_once)
{
    json_array_append_new(user, json_pack("{s:s, s:s, s:s, s:b}", "name", name, "value", value,
                                          "origin", origin, "changes_at_once", changes_at_once));
}

static json_t *list_config(struct engine *e, const Attnd__Inspect *ask)
{
    (void)ask;
    json_t *list = json_array();
    if (e->env.settings != NULL)
        settings_each(e->env.settings, add_setting, list);
    return json_pack("{s:o}", "config", list);
}

/* --- tenants ---------------------------------------------------------------------------------- */

static json_t *tenant_object(const struct tenant *t)
{
    const struct stats_tenant *counted = &stats.tenants[t->stats];
    json_t *o = json_pack("{s:s}", "tenant", t->name);
    for (int i = 0; i < TENANT_N_QUOTAS; i++) {
        const char *quota = tenant_quota_name((enum tenant_quota)i);
        char most[32];
        snprintf(most, sizeof most, "max_%s", quota);
        json_object_set_new(o, quota, json_integer((json_int_t)t->used[i]));
        json_object_set_new(o, most,
                            t->most[i] == 0 ? json_null() : json_integer((json_int_t)t->most[i]));
    }
    json_object_set_new(o, "steps", json_integer((json_int_t)counted->used[STATS_TENANT_STEPS]));
    json_object_set_new(o, "steps_failed",
                        json_integer((json_int_t)counted->used[STATS_TENANT_FAILED]));
    return o;
}

/* All tenants of the file, without the operator, which has no bounds and is not counted. */
static json_t *list_tenants(struct engine *e, const Attnd__Inspect *ask)
{
    json_t *list = json_array();
    const struct tenant *t;
    (void)ask;
    for (uint32_t i = 1; (t = tenants_at(e->env.tenants, i)) != NULL; i++)
        if (!t->is_gone)
            json_array_append_new(list, tenant_object(t));
    return json_pack("{s:o}", "tenants", list);
}

/* --- cache ------------------------------------------------------------------------------------ */

static void add_count(json_t *all, const char *name, uint64_t n)
{
    json_object_set_new(all, name, json_integer((json_int_t)n));
}

/* Adds the share of blocks found when sequences were opened, and counts of host memory. */
static void add_hits(json_t *all, const struct kv_stats *s)
{
    uint64_t n = s->prefix_hits + s->prefix_misses;
    if (n > 0)
        json_object_set_new(all, "hit_ratio", json_real((double)s->prefix_hits / (double)n));
    add_count(all, "blocks_host", stats.blocks_host);
    add_count(all, "host_hits", stats.host_hits);
    add_count(all, "host_evictions", stats.host_evictions);
    add_count(all, "host_no_room", stats.host_no_room);
    add_count(all, "host_damaged", stats.host_damaged);
}

/* Adds the pool's blocks that are evicted next on this card. */
static void add_next(struct engine *e, json_t *list, const struct pool *p)
{
    struct kv_evictable next[MAX_NEXT];
    uint32_t n = kv_pool_next_evicted(e->env.kv, p->id, MAX_NEXT, next);
    for (uint32_t i = 0; i < n; i++)
        json_array_append_new(
            list, json_pack("{s:s, s:I, s:I, s:i, s:I, s:I, s:b}", "next_evicted",
                            p->spec.wire->name, "block", (json_int_t)next[i].block, "place",
                            (json_int_t)next[i].index, "priority", (int)next[i].priority, "age_s",
                            (json_int_t)next[i].age_s, "time_to_live_s", (json_int_t)next[i].life_s,
                            "is_expired", (int)next[i].is_expired));
}

/* Adds counts of the tiers of all cards. */
static void add_tiers(json_t *all)
{
    add_count(all, "blocks_host", stats_get(blocks_host));
    add_count(all, "blocks_disk", stats_get(blocks_disk));
    add_count(all, "host_hits", stats_get(host_hits));
    add_count(all, "disk_hits", stats_get(disk_hits));
    add_count(all, "host_out_bytes", stats_get(host_out_bytes));
    add_count(all, "host_in_bytes", stats_get(host_in_bytes));
    add_count(all, "disk_out_bytes", stats_get(disk_out_bytes));
    add_count(all, "disk_in_bytes", stats_get(disk_in_bytes));
    add_count(all, "tiers_damaged", stats_get(host_damaged));
    add_count(all, "disk_errors", stats_get(disk_errors));
}

/* Blocks by state, per pool and in total, with counts of evictions. */
static json_t *list_cache(struct engine *e, const Attnd__Inspect *ask)
{
    json_t *list = json_array(), *all = json_object(), *next = json_array();
    struct kv_stats total;
    (void)ask;
    for (struct pool *p = NULL; (p = pool_next(e, p)) != NULL;) {
        struct pool_count n = pool_count_all(e, p);
        json_t *o =
            json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I}", "name", p->spec.wire->name, "blocks",
                      (json_int_t)n.blocks, "free", (json_int_t)(n.free - n.cached), "cached",
                      (json_int_t)n.cached, "used", (json_int_t)(n.blocks - n.free), "bytes",
                      (json_int_t)n.bytes, "sequences", (json_int_t)n.sequences);
        add_tenant(e, o, p->tenant);
        json_array_append_new(list, o);
        add_next(e, next, p);
    }
    kv_stats_all(e, &total);
#define X(field) add_count(all, #field, total.field);
    KV_STATS_MAP(X)
#undef X
    add_hits(all, &total);
    add_tiers(all);
    return json_pack("{s:o, s:o, s:o}", "next", next, "all", all, "cache", list);
}

/* --- requests --------------------------------------------------------------------------------- */

static json_t *trace_object(uint64_t number, const struct trace_entry *t)
{
    return json_pack("{s:I, s:f, s:I, s:I}", "number", (json_int_t)number, "timestamp",
                     (double)t->began_ns * 1e-6, "input_length", (json_int_t)t->n_input,
                     "output_length", (json_int_t)t->n_output);
}

/* Ended sequences, as requests of a trace; `after` is the number of the last one seen, `next` that
 * of the last one listed. */
static json_t *list_requests(struct engine *e, const Attnd__Inspect *ask)
{
    json_t *list = json_array();
    uint64_t number = ask->after, dropped = 0;
    struct trace_entry t;
    if (ask->after > e->trace.n_ended) /* no number of this daemon: list from now on */
        number = e->trace.n_ended;
    else if (e->trace.n_ended - ask->after > TRACE_KEPT)
        dropped = e->trace.n_ended - ask->after - TRACE_KEPT;
    for (number += dropped; trace_read(&e->trace, number + 1, &t); number++) {
        if (json_array_size(list) == MAX_LISTED)
            break;
        json_array_append_new(list, trace_object(number + 1, &t));
    }
    return json_pack("{s:o, s:I, s:I, s:f}", "requests", list, "next", (json_int_t)number,
                     "dropped", (json_int_t)dropped, "now", (double)e->turn_ns * 1e-6);
}

/* The same for open sequences; `after` is a position in the table. */
static json_t *list_open_requests(struct engine *e, const Attnd__Inspect *ask)
{
    json_t *list = json_array();
    kv_seq_id seq = {first_row(ask)};
    uint32_t end = seq.index > UINT32_MAX - MAX_LOOKED_AT ? UINT32_MAX : seq.index + MAX_LOOKED_AT;
    attn_status st;
    while ((st = kv_seq_next(e->env.kv, end, &seq)) == ATTN_OK &&
           json_array_size(list) < MAX_LISTED) {
        const struct trace_entry *t = &e->seqs[seq.index].trace;
        if (t->n_input > 0)
            json_array_append_new(list, trace_object(0, t));
        seq.index++;
    }
    return paged_by_card(e, "open_requests", list, st == ATTN_ENOTFOUND ? 0 : seq.index);
}

/* --- topics ----------------------------------------------------------------------------------- */

static const struct topic topics[] = {
    {"pools", true, list_pools},
    {"sessions", false, list_sessions},
    {"sequences", false, list_sequences},
    {"tenants", false, list_tenants},
    {"cache", false, list_cache},
    {"requests", false, list_requests},
    {"open_requests", false, list_open_requests},
    {"slow", false, list_slow},
    {"events", false, list_events},
    {"config", false, list_config},
    {"blocks", false, list_blocks},
    {"block_events", false, list_block_events},
};

const struct topic *topic_find(const char *name)
{
    for (size_t i = 0; i < sizeof topics / sizeof topics[0]; i++)
        if (strcmp(topics[i].name, name) == 0)
            return &topics[i];
    return NULL;
}

uint32_t list_device(const struct engine *e, const Attnd__Inspect *ask)
{
    if (strcmp(ask->topic, "blocks") == 0 || strcmp(ask->topic, "block_events") == 0)
        return blocks_device(e, ask->after);
    bool is_by_card =
        strcmp(ask->topic, "sequences") == 0 || strcmp(ask->topic, "open_requests") == 0;
    uint64_t card = ask->after >> CARD_SHIFT;
    return is_by_card && card < peers_n(e) ? (uint32_t)card : 0;
}
