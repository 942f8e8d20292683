/* engine_operator.c: what operators ask: lists as JSON, settings. Run inline on the engine thread;
 * every list is bounded.
 */
#include "daemon/engine_operator.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/engine_answer.h"
#include "daemon/engine_pool.h"
#include "daemon/log.h"
#include "daemon/settings.h"
#include "daemon/slow.h"

enum {
    MAX_LISTED = 500, /* entries of an answer */
    MAX_LOOKED_AT = 1 << 16, /* records that one answer walks over */
};

/* --- lists ------------------------------------------------------------------------------------ */

static json_t *list_pools(struct engine *e, const Attnd__Inspect *ask)
{
    json_t *list = json_array();
    (void)ask;
    for (struct pool *p = NULL; (p = pool_next(e, p)) != NULL;) {
        const struct backend_pool_config *c = &p->config;
        struct kv_pool_spec ks;
        uint32_t n_free = 0;
        kv_pool_info(e->parts.kv, p->id, &ks, &n_free);
        json_array_append_new(
            list, json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:s, s:I, s:I, s:I, s:I}",
                            "name", p->spec.wire->name, "layers", (json_int_t)c->num_layers,
                            "q_heads", (json_int_t)c->num_q_heads, "kv_heads",
                            (json_int_t)c->num_kv_heads, "head_dim_k", (json_int_t)c->head_dim_k,
                            "head_dim_v", (json_int_t)c->head_dim_v, "block_tokens",
                            (json_int_t)c->block_tokens, "dtype", attn_dtype_name(c->q_dtype),
                            "kv_dtype", attn_dtype_name(c->kv_dtype), "blocks",
                            (json_int_t)c->n_blocks, "free_blocks", (json_int_t)n_free, "sequences",
                            (json_int_t)kv_pool_sequences(e->parts.kv, p->id), "bytes",
                            (json_int_t)p->device_bytes));
    }
    return json_pack("{s:o}", "pools", list);
}

/* Entries from `after` on; `next` says where to go on, 0: these were the last. */
static json_t *paged(const char *name, json_t *list, uint64_t next)
{
    return json_pack("{s:o, s:I}", name, list, "next", (json_int_t)next);
}

static json_t *list_sessions(struct engine *e, const Attnd__Inspect *ask)
{
    json_t *list = json_array();
    uint32_t slot = (uint32_t)ask->after, n_looked = 0;
    for (; slot < e->parts.cfg->max_sessions && n_looked < MAX_LOOKED_AT; slot++, n_looked++) {
        const struct session *s = session_at(e->parts.sessions, slot);
        char label[16];
        if (s->id == 0)
            continue;
        if (json_array_size(list) == MAX_LISTED)
            break;
        snprintf(label, sizeof label, "%08" PRIx32, session_label(s->id));
        uint64_t idle_ns = e->turn_ns > s->seen_ns ? e->turn_ns - s->seen_ns : 0;
        json_array_append_new(list,
                              json_pack("{s:s, s:s, s:f, s:I}", "session", label, "client",
                                        s->client_name, "idle_seconds", (double)idle_ns * 1e-9,
                                        "requests", (json_int_t)s->n_held));
    }
    return paged("sessions", list, slot < e->parts.cfg->max_sessions ? slot : 0);
}

static json_t *sequence_object(struct engine *e, kv_seq_id seq)
{
    struct kv_seq_info info;
    char label[16] = "none";
    kv_seq_info(e->parts.kv, seq, &info);
    const struct pool *p = pool_of_kv(e, info.pool);
    uint32_t n_tokens = 0;
    for (uint32_t l = 0; p != NULL && l < p->config.num_layers; l++)
        n_tokens = info.layer_len[l] > n_tokens ? info.layer_len[l] : n_tokens;
    if (info.owner != KV_NO_OWNER)
        snprintf(label, sizeof label, "%08" PRIx32,
                 session_label(session_at(e->parts.sessions, info.owner)->id));
    char name[24];
    snprintf(name, sizeof name, "%" PRIu64, info.name); /* JSON numbers end at 2^53 */
    return json_pack("{s:s, s:s, s:s, s:I, s:I, s:I, s:b}", "sequence", name, "pool",
                     p == NULL ? "" : p->spec.wire->name, "session", label, "epoch",
                     (json_int_t)info.epoch, "tokens", (json_int_t)n_tokens, "blocks",
                     (json_int_t)info.n_blocks, "busy", e->seqs[seq.index].n_claims > 0);
}

static json_t *list_sequences(struct engine *e, const Attnd__Inspect *ask)
{
    json_t *list = json_array();
    kv_seq_id seq = {(uint32_t)ask->after};
    uint32_t end = ask->after > UINT32_MAX - MAX_LOOKED_AT ? UINT32_MAX : seq.index + MAX_LOOKED_AT;
    attn_status st;
    while ((st = kv_seq_next(e->parts.kv, end, &seq)) == ATTN_OK &&
           json_array_size(list) < MAX_LISTED) {
        json_array_append_new(list, sequence_object(e, seq));
        seq.index++;
    }
    return paged("sequences", list, st == ATTN_ENOTFOUND ? 0 : seq.index);
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
        json_t *object = json_loads(kept[i].json, 0, NULL);
        if (object == NULL) /* a name that was cut inside of a character */
            object = json_object();
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
    if (e->parts.settings != NULL)
        settings_each(e->parts.settings, add_setting, list);
    return json_pack("{s:o}", "config", list);
}

static const struct topic {
    const char *name;
    bool is_for_all; /* who may send steps may see it */
    json_t *(*list)(struct engine *e, const Attnd__Inspect *ask);
} topics[] = {
    {"pools", true, list_pools},          {"sessions", false, list_sessions},
    {"sequences", false, list_sequences}, {"slow", false, list_slow},
    {"events", false, list_events},       {"config", false, list_config},
};

/* --- answers ---------------------------------------------------------------------------------- */

/* Takes the object over. */
static void answer_json(struct engine *e, struct request *req, json_t *object)
{
    char *text = object == NULL ? NULL : json_dumps(object, JSON_COMPACT | JSON_REAL_PRECISION(15));
    Attnd__StatsReply body = ATTND__STATS_REPLY__INIT;
    Attnd__Reply header = ATTND__REPLY__INIT;
    body.json = text;
    header.body_case = ATTND__REPLY__BODY_STATS;
    header.stats = &body;
    json_decref(object);
    if (text == NULL || strlen(text) > WIRE_MAX_JSON_BYTES)
        engine_refuse(e, req, ATTN_ENOMEM, "no memory for the answer");
    else
        engine_answer(e, req, &header);
    free(text);
}

static void run_inspect(struct engine *e, struct request *req, const struct topic *t)
{
    const Attnd__Inspect *ask = req->wire.header->inspect;
    if (t == NULL)
        engine_refuse(e, req, ATTN_ENOTSUP, "inspect.topic: this daemon has no \"%.60s\"",
                      ask->topic);
    else
        answer_json(e, req, t->list(e, ask));
}

static void run_pool_drop(struct engine *e, struct request *req)
{
    const char *name = req->wire.header->pool_drop->name;
    struct pool *p = pool_find(e, NULL, name);
    Attnd__Reply header = ATTND__REPLY__INIT;
    char why[2 * WHY_BYTES];
    attn_status st;
    if (p == NULL)
        engine_refuse(e, req, ATTN_ENOTFOUND, "no pool is named \"%.100s\"", name);
    else if ((st = pool_drop(e, p, why, sizeof why)) != ATTN_OK)
        engine_refuse(e, req, st, "%s", why);
    else
        engine_answer(e, req, &header);
}

static void run_configure(struct engine *e, struct request *req)
{
    const Attnd__Configure *c = req->wire.header->configure;
    char why[2 * WHY_BYTES] = "this daemon's settings can't change";
    attn_status st = ATTN_ENOTSUP;
    if (e->parts.settings != NULL)
        st = settings_set(e->parts.settings, c->name, c->value, why, sizeof why);
    if (st != ATTN_OK)
        engine_refuse(e, req, st, "%s", why);
    else
        answer_json(e, req, json_pack("{s:s, s:s}", "name", c->name, "value", c->value));
}

static void run_reload(struct engine *e, struct request *req)
{
    char why[2 * WHY_BYTES] = "this daemon's settings can't change";
    uint32_t n_taken = 0, n_kept = 0;
    attn_status st = ATTN_ENOTSUP;
    if (e->parts.settings != NULL)
        st = settings_reload(e->parts.settings, &n_taken, &n_kept, why, sizeof why);
    if (st != ATTN_OK)
        engine_refuse(e, req, st, "%s", why);
    else
        answer_json(e, req,
                    json_pack("{s:I, s:I}", "changed", (json_int_t)n_taken, "need_restart",
                              (json_int_t)n_kept));
}

bool operator_run(struct engine *e, struct request *req)
{
    const Attnd__Request *h = req->wire.header;
    const struct topic *t = NULL;
    if (h->body_case != ATTND__REQUEST__BODY_INSPECT &&
        h->body_case != ATTND__REQUEST__BODY_POOL_DROP &&
        h->body_case != ATTND__REQUEST__BODY_CONFIGURE &&
        h->body_case != ATTND__REQUEST__BODY_RELOAD)
        return false;
    if (h->body_case == ATTND__REQUEST__BODY_INSPECT)
        for (size_t i = 0; i < sizeof topics / sizeof topics[0]; i++)
            if (strcmp(topics[i].name, h->inspect->topic) == 0)
                t = &topics[i];
    bool is_for_all = t != NULL && t->is_for_all && e->parts.tenants == NULL;
    if (!is_for_all && !request_may_administer(req)) {
        char who[PRINCIPAL_TEXT_BYTES];
        engine_refuse(e, req, ATTN_EAUTH,
                      "only root and the daemon's user may ask that; this is %s",
                      principal_format(&req->principal, who));
        return true;
    }
    if (h->body_case == ATTND__REQUEST__BODY_INSPECT)
        run_inspect(e, req, t);
    else if (h->body_case == ATTND__REQUEST__BODY_POOL_DROP)
        run_pool_drop(e, req);
    else if (h->body_case == ATTND__REQUEST__BODY_CONFIGURE)
        run_configure(e, req);
    else
        run_reload(e, req);
    return true;
}
