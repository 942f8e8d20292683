/* sequence.c: sequences to files, out of them, and to another daemon. What is made belongs to a
 * session of attnctl's, which is not renewed: a worker adopts it within the lease.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "clients/attnctl/attnctl.h"

static json_t *number(uint64_t n)
{
    return json_sprintf("%" PRIu64, n); /* as sequences shows it: JSON's have 63 bits here */
}

/* What a file holds, and where it is or has gone. */
static json_t *file_object(const struct attn_seq_file *f, uint64_t seq, const char *path)
{
    json_int_t n_freed = f->freed_past - f->freed_first;
    return json_pack("{s:o, s:s, s:s, s:I, s:I, s:I, s:I, s:I}", "sequence", number(seq), "file",
                     path, "pool", f->pool, "tokens", (json_int_t)f->n_tokens, "known_ids",
                     (json_int_t)f->n_ids, "blocks", f->n_blocks - n_freed, "freed_blocks", n_freed,
                     "bytes", (json_int_t)f->bytes);
}

/* How long a worker has to adopt what attnctl leaves. */
static void add_lease(attn_client *c, json_t *object)
{
    struct attn_client_info info = {.struct_size = sizeof info};
    if (attn_client_info(c, &info) == ATTN_OK)
        json_object_set_new(object, "lease_seconds", json_real((double)info.lease_us * 1e-6));
}

attn_status ask_sequence_export(attn_client *c, const struct arguments *a, json_t **out)
{
    struct attn_seq_file file = {.struct_size = sizeof file};
    attn_status st = attn_seq_export(c, a->seq, a->operands[1], a->timeout_us, &file);
    if (st == ATTN_OK)
        *out = file_object(&file, a->seq, a->operands[1]);
    return st;
}

attn_status ask_sequence_import(attn_client *c, const struct arguments *a, json_t **out)
{
    struct attn_seq_file file = {.struct_size = sizeof file};
    struct attn_seq seq;
    attn_pool *pool;
    attn_status st = attn_seq_file_info(a->operands[0], &file);
    if (st != ATTN_OK)
        return st;
    if (a->pool != NULL)
        snprintf(file.pool, sizeof file.pool, "%s", a->pool);
    st = attn_pool_describe(c, file.pool, a->timeout_us, &pool);
    if (st != ATTN_OK)
        return st;
    uint64_t id = a->has_as ? a->as : file.id;
    st = attn_seq_import(pool, a->operands[0], id, a->timeout_us, &seq, NULL);
    attn_pool_close(pool);
    if (st != ATTN_OK)
        return st;
    *out = file_object(&file, id, a->operands[0]);
    json_object_set_new(*out, "epoch", json_integer(seq.epoch));
    add_lease(c, *out);
    return ATTN_OK;
}

static attn_status move_to(attn_client *from, attn_client *to, const struct arguments *a,
                           json_t **out)
{
    struct attn_moved moved = {.struct_size = sizeof moved};
    struct attn_seq seq;
    attn_pool *pool;
    char name[64];
    attn_status st = ATTN_OK;
    if (a->pool != NULL)
        snprintf(name, sizeof name, "%s", a->pool);
    else
        st = attn_seq_pool(from, a->seq, a->timeout_us, name);
    if (st == ATTN_OK)
        st = attn_pool_describe(to, name, a->timeout_us, &pool);
    if (st != ATTN_OK)
        return st;
    st = attn_seq_move(from, a->seq, pool, a->timeout_us, &seq, &moved);
    attn_pool_close(pool);
    if (st != ATTN_OK)
        return st;
    if (moved.is_left)
        fprintf(stderr,
                "attnctl: the source did not answer the close: do not adopt sequence %" PRIu64
                " there, its lease ends\n",
                a->seq);
    *out = json_pack("{s:o, s:s, s:s, s:I, s:I, s:I, s:I, s:f, s:I}", "sequence", number(a->seq),
                     "to", a->operands[1], "pool", name, "tokens", (json_int_t)moved.n_tokens,
                     "blocks", (json_int_t)moved.n_blocks, "bytes", (json_int_t)moved.bytes,
                     "blocks_in_stop", (json_int_t)moved.n_blocks_stopped, "stop_seconds",
                     (double)moved.stop_ns * 1e-9, "epoch", (json_int_t)seq.epoch);
    add_lease(to, *out);
    return ATTN_OK;
}

attn_status ask_sequence_move(attn_client *c, const struct arguments *a, json_t **out)
{
    struct arguments target = *a;
    attn_client *to;
    target.endpoint = a->operands[1];
    target.is_admin = false;
    attn_status st = connect_to(&target, &to);
    if (st != ATTN_OK)
        return st;
    st = move_to(c, to, a, out);
    attn_client_close(to);
    return st;
}
