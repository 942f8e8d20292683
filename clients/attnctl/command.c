/* command.c: the commands that are one request, or a list that the daemon gives in pages. Each
 * makes the JSON object of its result. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "clients/attnctl/attnctl.h"

attn_status ask_ping(attn_client *c, const struct arguments *a, json_t **out)
{
    struct attn_client_info info = {.struct_size = sizeof info};
    uint64_t ns;
    attn_status st = attn_client_ping(c, a->timeout_us, &ns);
    if (st == ATTN_OK)
        st = attn_client_info(c, &info);
    if (st == ATTN_OK)
        *out = json_pack("{s:s, s:s, s:f}", "server_version", info.server_version, "backend",
                         info.backend, "seconds", (double)ns * 1e-9);
    return st;
}

attn_status ask_info(attn_client *c, const struct arguments *a, json_t **out)
{
    struct attn_client_info info = {.struct_size = sizeof info};
    (void)a;
    attn_status st = attn_client_info(c, &info);
    if (st == ATTN_OK)
        *out = json_pack(
            "{s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "server_version", info.server_version,
            "backend", info.backend, "protocol_version", (json_int_t)info.protocol_version,
            "lease_us", (json_int_t)info.lease_us, "max_message_bytes",
            (json_int_t)info.max_message_bytes, "max_step_items", (json_int_t)info.max_step_items,
            "max_step_tokens", (json_int_t)info.max_step_tokens, "max_seq_tokens",
            (json_int_t)info.max_seq_tokens, "max_sequences", (json_int_t)info.max_sequences);
    return st;
}

attn_status ask_stats(attn_client *c, const struct arguments *a, json_t **out)
{
    char *text = NULL;
    attn_status st = attn_client_stats(c, a->timeout_us, &text);
    if (st == ATTN_OK)
        *out = json_loads(text, 0, NULL);
    attn_free(text);
    return st;
}

/* What is asked first of a daemon that is said to be slow; of a tenant that has all it may see. */
static json_t *status_of(const json_t *stats, const struct attn_client_info *info)
{
    static const char *const counts[] = {
        "sessions",
        "sequences",
        "blocks",
        "blocks_free",
        "queue_requests",
        "steps_in_flight",
        "steps_received_total",
        "batches_failed_total",
        "canary_wrong_total",
        "config_last_load_successful",
    };
    const json_t *start = json_object_get(stats, "start_time_seconds");
    double up = (double)time(NULL) - json_number_value(start);
    bool is_draining = json_integer_value(json_object_get(stats, "draining")) != 0;
    bool is_ready = json_integer_value(json_object_get(stats, "ready")) != 0;
    json_t *o = json_pack("{s:s, s:s, s:s, s:o}", "state",
                          is_draining ? "draining" : (is_ready ? "ready" : "not ready"),
                          "server_version", info->server_version, "backend", info->backend,
                          "up_seconds", json_real(up > 0 ? up : 0));
    const char *key;
    json_t *n;
    if (json_object_get(stats, "tenant") != NULL) {
        json_object_foreach((json_t *)stats, key, n)
        {
            if (strncmp(key, "tenant", 6) == 0)
                json_object_set(o, key, n);
        }
        return o;
    }
    json_int_t refused = 0;
    json_object_foreach(json_object_get(stats, "steps_answered_total"), key, n)
    {
        refused += strcmp(key, "ok") != 0 ? json_integer_value(n) : 0;
    }
    json_object_set_new(o, "pools",
                        json_integer((json_int_t)json_array_size(json_object_get(stats, "pools"))));
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
        json_object_set(o, counts[i], json_object_get(stats, counts[i]));
    json_object_set_new(o, "steps_not_ok_total", json_integer(refused));
    json_object_set(o, "oldest_request_age_seconds",
                    json_object_get(stats, "oldest_request_age_seconds"));
    return o;
}

attn_status ask_status(attn_client *c, const struct arguments *a, json_t **out)
{
    struct attn_client_info info = {.struct_size = sizeof info};
    json_t *stats = NULL;
    attn_status st = ask_stats(c, a, &stats);
    if (st == ATTN_OK)
        st = attn_client_info(c, &info);
    if (st == ATTN_OK && stats != NULL)
        *out = status_of(stats, &info);
    json_decref(stats);
    return st;
}

attn_status ask_drain(attn_client *c, const struct arguments *a, json_t **out)
{
    attn_status st = attn_client_drain(c, a->hold_us, a->timeout_us);
    if (st == ATTN_OK)
        *out = json_pack("{s:b}", "draining", 1);
    return st;
}

/* Closes the handle. */
static json_t *pool_object(attn_pool *p)
{
    const struct attn_pool_spec *s = attn_pool_spec_of(p);
    json_t *o = json_pack(
        "{s:s, s:I, s:I, s:I, s:I, s:I, s:b, s:I, s:I, s:I, s:s, s:s, s:b, s:s, s:s, s:s}", "name",
        s->name, "layers", (json_int_t)s->num_layers, "q_heads", (json_int_t)s->num_q_heads,
        "kv_heads", (json_int_t)s->num_kv_heads, "head_dim_k", (json_int_t)s->head_dim_k,
        "head_dim_v", (json_int_t)s->head_dim_v, "v_in_k", (int)s->is_v_in_k, "block_tokens",
        (json_int_t)s->block_tokens, "blocks", (json_int_t)s->n_blocks, "free_blocks",
        (json_int_t)attn_pool_free_blocks(p), "dtype", attn_dtype_name(s->q_dtype), "kv_dtype",
        attn_dtype_name(s->kv_dtype), "batch_invariant", (int)s->is_batch_invariant, "split",
        attn_split_name(s->split), "model", s->model, "rope", s->rope);
    attn_pool_close(p);
    return o;
}

attn_status ask_pool_create(attn_client *c, const struct arguments *a, json_t **out)
{
    struct attn_pool_spec spec = a->spec;
    attn_pool *p;
    spec.name = a->operands[0];
    spec.layers = &a->layer;
    spec.n_layers = 1;
    attn_status st = attn_pool_create(c, &spec, a->timeout_us, &p);
    if (st == ATTN_OK)
        *out = pool_object(p);
    return st;
}

attn_status ask_pool_describe(attn_client *c, const struct arguments *a, json_t **out)
{
    attn_pool *p;
    attn_status st = attn_pool_describe(c, a->operands[0], a->timeout_us, &p);
    if (st != ATTN_OK)
        return st;
    attn_pool_release(p, a->timeout_us); /* who looks keeps nothing; else its lease ends */
    *out = pool_object(p);
    return ATTN_OK;
}

/* ---- what operators ask ---- */

/* The text, which is freed, as an object. */
static json_t *loaded(char *text)
{
    json_t *object = text == NULL ? NULL : json_loads(text, 0, NULL);
    attn_free(text);
    return object;
}

attn_status inspect(attn_client *c, const char *topic, uint64_t after, uint64_t timeout_us,
                    json_t **out)
{
    char *text = NULL;
    attn_status st = attn_client_inspect(c, topic, after, timeout_us, &text);
    if (st == ATTN_OK)
        *out = loaded(text);
    return st;
}

/* All pages of a list, as {topic: [...]}. */
static attn_status all_pages(attn_client *c, const struct arguments *a, const char *topic,
                             json_t **out)
{
    json_t *list = json_array();
    uint64_t after = 0;
    do {
        json_t *page = NULL;
        attn_status st = inspect(c, topic, after, a->timeout_us, &page);
        if (st != ATTN_OK || page == NULL) {
            json_decref(list);
            return st;
        }
        json_array_extend(list, json_object_get(page, topic));
        after = (uint64_t)json_integer_value(json_object_get(page, "next"));
        json_decref(page);
    } while (after != 0);
    *out = json_pack("{s:o}", topic, list);
    return ATTN_OK;
}

attn_status ask_pools(attn_client *c, const struct arguments *a, json_t **out)
{
    return all_pages(c, a, "pools", out);
}

attn_status ask_pool_drop(attn_client *c, const struct arguments *a, json_t **out)
{
    attn_status st = attn_client_pool_drop(c, a->tenant, a->operands[0], a->timeout_us);
    if (st == ATTN_OK)
        *out = json_pack("{s:s}", "dropped", a->operands[0]);
    return st;
}

attn_status ask_pool_resize(attn_client *c, const struct arguments *a, json_t **out)
{
    uint32_t n_free;
    attn_status st =
        attn_client_pool_resize(c, a->tenant, a->operands[0], a->n_blocks, a->timeout_us, &n_free);
    if (st == ATTN_OK)
        *out = json_pack("{s:s, s:I, s:I}", "name", a->operands[0], "blocks",
                         (json_int_t)a->n_blocks, "free_blocks", (json_int_t)n_free);
    return st;
}

attn_status ask_sessions(attn_client *c, const struct arguments *a, json_t **out)
{
    return all_pages(c, a, "sessions", out);
}

attn_status ask_tenants(attn_client *c, const struct arguments *a, json_t **out)
{
    return all_pages(c, a, "tenants", out);
}

/* One page: with the sums of all pools. */
attn_status ask_cache(attn_client *c, const struct arguments *a, json_t **out)
{
    return inspect(c, "cache", 0, a->timeout_us, out);
}

static void print_list(const json_t *list, const char *name)
{
    json_t *one = json_pack("{s:O?}", name, list);
    print_table(one);
    json_decref(one);
}

/* The pools, what would be evicted next of each, and what is of all of them. */
void print_cache(const json_t *result)
{
    const json_t *next = json_object_get(result, "next");
    print_list(json_object_get(result, "cache"), "pools");
    if (json_array_size(next) > 0)
        print_list(next, "next");
    print_flat(json_object_get(result, "all"));
}

attn_status ask_kill_session(attn_client *c, const struct arguments *a, json_t **out)
{
    attn_status st = attn_client_kill_session(c, a->operands[0], a->timeout_us);
    if (st == ATTN_OK)
        *out = json_pack("{s:s}", "killed_session", a->operands[0]);
    return st;
}

attn_status ask_kill_sequence(attn_client *c, const struct arguments *a, json_t **out)
{
    attn_status st = attn_client_kill_seq(c, a->tenant, a->seq, a->timeout_us);
    if (st == ATTN_OK)
        *out = json_pack("{s:s}", "killed_sequence", a->operands[0]);
    return st;
}

attn_status ask_sequence_place(attn_client *c, const struct arguments *a, json_t **out)
{
    attn_status st = attn_client_move_seq(c, a->tenant, a->seq, (uint32_t)a->card, a->timeout_us);
    if (st == ATTN_OK)
        *out =
            json_pack("{s:s, s:I}", "placed_sequence", a->operands[0], "card", (json_int_t)a->card);
    return st;
}

attn_status ask_sequences(attn_client *c, const struct arguments *a, json_t **out)
{
    return all_pages(c, a, "sequences", out);
}

attn_status ask_slow(attn_client *c, const struct arguments *a, json_t **out)
{
    return all_pages(c, a, "slow", out);
}

/* The settings as an object of their values. */
attn_status ask_config(attn_client *c, const struct arguments *a, json_t **out)
{
    return all_pages(c, a, "config", out);
}

attn_status ask_config_get(attn_client *c, const struct arguments *a, json_t **out)
{
    json_t *all = NULL, *entry;
    size_t i;
    attn_status st = all_pages(c, a, "config", &all);
    json_array_foreach(json_object_get(all, "config"), i, entry)
    {
        const char *name = json_string_value(json_object_get(entry, "name"));
        if (*out == NULL && name != NULL && strcmp(name, a->operands[0]) == 0)
            *out = json_incref(entry);
    }
    json_decref(all);
    if (st != ATTN_OK || *out != NULL)
        return st;
    return attn_client_configure(c, a->operands[0], "", a->timeout_us); /* says what it is not */
}

attn_status ask_config_set(attn_client *c, const struct arguments *a, json_t **out)
{
    attn_status st = attn_client_configure(c, a->operands[0], a->operands[1], a->timeout_us);
    return st == ATTN_OK ? ask_config_get(c, a, out) : st;
}

attn_status ask_reload(attn_client *c, const struct arguments *a, json_t **out)
{
    char *text = NULL;
    attn_status st = attn_client_reload(c, a->timeout_us, &text);
    if (st == ATTN_OK)
        *out = loaded(text);
    return st;
}
