/* step.c: steps: gathering q, k and v into one message, and the answer back into the caller's
 * arrays.
 *
 * The caller's arrays are read when a message is built (again if it must be sent again) and written
 * once, from the reply in place.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clients/libattn/core/copy.h"
#include "clients/libattn/core/core.h"
#include "clients/libattn/pool/pool.h"
#include "clients/libattn/step/split.h"
#include "clients/libattn/step/step.h"
#include "proto/wire_codes.h"

#define STACK_ITEMS 64
#define STEP_HEAD_BYTES 256u /* of a request before its tensors, at most, and per item */
#define STEP_HEAD_ITEM_BYTES 24u
#define STEP_HEAD_PART_BYTES 10u
#define STEP_LARGE_BYTES (256u << 10) /* there and back: 0.1 ms on 25 Gbit/s, or of TLS */

/* The header's parallel arrays. */
struct item_arrays {
    uint64_t seq[STACK_ITEMS];
    uint32_t epoch[STACK_ITEMS], pos[STACK_ITEMS], n_tokens[STACK_ITEMS];
    uint32_t key_base[STACK_ITEMS], n_keys[STACK_ITEMS];
};

static uint32_t step_flags(const struct attn_step *s)
{
    const struct attn_in_place *p = s->in_place;
    bool is_append = p != NULL ? p->is_append : s->k != NULL;
    bool is_attend = p != NULL ? p->is_attend : s->q != NULL;
    bool has_lse = p != NULL ? p->has_lse : s->lse != NULL;
    return (is_append ? WIRE_STEP_APPEND : 0) | (is_attend ? WIRE_STEP_ATTEND : 0) |
           (has_lse ? WIRE_STEP_LSE : 0) | (s->parents != NULL ? WIRE_STEP_TREE : 0) |
           (s->is_full ? WIRE_STEP_FULL : 0) | (s->indices != NULL ? WIRE_STEP_SPARSE : 0) |
           (s->choose_blocks > 0 ? WIRE_STEP_CHOOSE : 0) | (s->parts != NULL ? WIRE_STEP_PART : 0);
}

/* The caller's arrays are f32, the pool's tensors bf16. */
static bool is_converted(const struct attn_pool *p, const struct attn_step *s)
{
    return s->array_dtype == ATTN_F32 && p->spec.q_dtype == ATTN_BF16;
}

static void set_scalars(Attnd__Step *h, const struct attn_pool *p, const struct attn_step *s)
{
    h->pool = p->id;
    h->layer = s->layer;
    h->flags = step_flags(s);
    h->dtype = (Attnd__Dtype)p->spec.q_dtype;
    h->n_seq = h->n_epoch = h->n_pos = h->n_n_tokens = s->n_items;
    h->parent = (int32_t *)(uintptr_t)s->parents; /* packing only reads it */
    h->n_indices = s->n_indices;
    h->index_tokens = s->index_tokens;
    h->choose_blocks = s->choose_blocks;
}

/* Points h's arrays of parts into memory, of 8 bytes an item. */
static void set_parts(Attnd__Step *h, const struct attn_step *s, uint32_t *key_base,
                      uint32_t *n_keys)
{
    for (uint32_t i = 0; i < s->n_items; i++) {
        key_base[i] = s->parts[i].key_base;
        n_keys[i] = s->parts[i].n_keys;
    }
    h->key_base = key_base;
    h->n_keys = n_keys;
    h->n_key_base = s->n_items;
    h->n_n_keys = s->is_full ? s->n_items : 0;
}

/* Points h's arrays into memory, of 20 bytes an item. */
static void set_items(Attnd__Step *h, const struct attn_step *s, uint64_t *seq, uint32_t *epoch,
                      uint32_t *pos, uint32_t *n_tokens)
{
    for (uint32_t i = 0; i < s->n_items; i++) {
        seq[i] = s->items[i].seq.id;
        epoch[i] = s->items[i].seq.epoch;
        pos[i] = s->items[i].pos;
        n_tokens[i] = s->items[i].n_tokens;
    }
    h->seq = seq;
    h->epoch = epoch;
    h->pos = pos;
    h->n_tokens = n_tokens;
}

static size_t pad(size_t n)
{
    return (n + WIRE_ALIGN - 1) & ~(size_t)(WIRE_ALIGN - 1);
}

/* The step's tensors into the payload, and zeroes between them. */
static void put_tensors(const struct client_request *r, uint8_t *payload)
{
    const struct attn_step *s = &r->step;
    const struct attn_pool_spec *spec = &r->pool->spec;
    const struct wire_step_layout *l = &r->layout;
    const struct wire_shape shape = pool_shape(r->pool);
    const uint32_t flags = step_flags(s);
    const size_t e = attn_dtype_bytes(spec->q_dtype), kv_row = spec->num_kv_heads * e;
    struct {
        uint32_t flag;
        uint64_t at;
        size_t bytes;
        const void *src;
        uint8_t *dst;
    } parts[] = {
        {WIRE_STEP_ATTEND, l->q_offset, l->n_tokens * spec->num_q_heads * wire_q_dim(&shape) * e,
         s->q, NULL},
        {WIRE_STEP_APPEND, l->k_offset, l->n_tokens * kv_row * spec->head_dim_k, s->k, NULL},
        {WIRE_STEP_APPEND, l->v_offset, l->n_tokens * kv_row * spec->head_dim_v, s->v, NULL},
    };
    for (int i = 0; i < 3; i++) {
        if (!(flags & parts[i].flag) || (i == 2 && spec->is_v_in_k))
            continue;
        uint64_t end = parts[i].at + parts[i].bytes, padded = pad(end);
        parts[i].dst = payload + parts[i].at;
        if (is_converted(r->pool, s))
            copy_to_bf16((uint16_t *)(void *)parts[i].dst, parts[i].src, parts[i].bytes / e);
        else if (s->in_place == NULL)
            attn_client_copy(r->client, parts[i].dst, parts[i].src, parts[i].bytes);
        memset(payload + end, 0, (padded < l->request_bytes ? padded : l->request_bytes) - end);
    }
    if (s->indices != NULL)
        attn_client_copy(r->client, payload + l->indices_offset, s->indices,
                         l->request_bytes - l->indices_offset);
    if (s->in_place != NULL)
        s->in_place->fill(s->in_place->user, parts[0].dst, parts[1].dst, parts[2].dst);
    if (r->client->is_streaming)
        copy_fence(); /* before the message is sent */
}

/* All of the step's header; its items in on_stack or, where there are more, on the heap. */
static attn_status set_header(Attnd__Step *step, const struct client_request *r,
                              struct item_arrays *on_stack, void **out_heap)
{
    const struct attn_step *s = &r->step;
    *out_heap = NULL;
    set_scalars(step, r->pool, s);
    if (s->n_items <= STACK_ITEMS) {
        set_items(step, s, on_stack->seq, on_stack->epoch, on_stack->pos, on_stack->n_tokens);
        if (s->parts != NULL)
            set_parts(step, s, on_stack->key_base, on_stack->n_keys);
        return ATTN_OK;
    }
    void *heap = malloc((sizeof(uint64_t) + 5 * sizeof(uint32_t)) * (size_t)s->n_items);
    if (heap == NULL)
        return ATTN_ENOMEM;
    uint32_t *u32 = (uint32_t *)((uint64_t *)heap + s->n_items);
    set_items(step, s, heap, u32, u32 + s->n_items, u32 + 2 * (size_t)s->n_items);
    if (s->parts != NULL)
        set_parts(step, s, u32 + 3 * (size_t)s->n_items, u32 + 4 * (size_t)s->n_items);
    *out_heap = heap;
    return ATTN_OK;
}

static attn_status step_build(struct client_request *r, uint64_t timeout_us, void **out_message)
{
    const struct attn_step *s = &r->step;
    struct item_arrays on_stack;
    void *heap;
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__Step step = ATTND__STEP__INIT;
    step.n_parent = s->parents != NULL ? r->layout.n_tokens : 0;
    if (set_header(&step, r, &on_stack, &heap) != ATTN_OK)
        return ATTN_ENOMEM;
    if (r->pool->is_coded)
        step.dtype = ATTND__DTYPE__FP8_E4M3;
    req.session = r->session;
    req.timeout_us = timeout_us;
    req.body_case = ATTND__REQUEST__BODY_STEP;
    req.step = &step;

    const struct wire_step_layout *l = &r->layout;
    const size_t payload_bytes =
        r->pool->is_coded ? wire_codes_bytes(l->request_bytes / 2) : l->request_bytes;
    size_t head_bytes = wire_request_head_bytes(&req);
    uint64_t reply_bytes = CLIENT_STEP_REPLY_HEAD_BYTES + s->n_items + l->reply_bytes;
    attn_status st =
        client_request_memory(r, head_bytes, l->request_bytes, reply_bytes, out_message);
    if (st == ATTN_OK) {
        uint8_t *payload = (uint8_t *)*out_message + head_bytes;
        put_tensors(r, payload);
        wire_request_head_encode(&req, r->id, payload_bytes, *out_message);
        if (r->pool->is_coded) {
            wire_codes_put((const uint16_t *)(const void *)payload, l->request_bytes / 2, payload);
            r->client->t->ops->message_cut(*out_message, head_bytes + payload_bytes);
        }
    }
    free(heap);
    return st;
}

static void step_fail(struct client_request *r)
{
    for (uint32_t i = 0; r->step.item_status != NULL && i < r->step.n_items; i++)
        r->step.item_status[i] = r->result.status;
}

static attn_status step_take(struct client_request *r, const struct wire_reply *reply)
{
    const Attnd__Reply *h = reply->header;
    const struct attn_step *s = &r->step;
    const struct attn_pool_spec *spec = &r->pool->spec;
    const struct wire_step_layout *l = &r->layout;
    const Attnd__StepReply *b = h->body_case == ATTND__REPLY__BODY_STEP ? h->step : NULL;
    uint32_t n_status = b != NULL ? (uint32_t)b->n_item_status : 0;
    if (h->status != ATTN_OK && n_status == 0)
        return (attn_status)h->status; /* all of it failed; there is no payload */
    if (b == NULL || (n_status != 0 && n_status != s->n_items) ||
        reply->payload_bytes != l->reply_bytes) {
        snprintf(r->result.message, sizeof r->result.message,
                 "step reply with %u item statuses and %zu payload bytes, expected %u and %llu",
                 n_status, reply->payload_bytes, s->n_items, (unsigned long long)l->reply_bytes);
        return ATTN_EPROTO;
    }
    uint32_t n_failed = 0;
    for (uint32_t i = 0; i < s->n_items; i++) {
        int32_t st = n_status != 0 ? b->item_status[i] : ATTN_OK;
        n_failed += st != ATTN_OK;
        if (s->item_status != NULL)
            s->item_status[i] = st;
    }
    r->has_item_status = true;
    r->result.n_failed = n_failed;
    const uint8_t *out = reply->payload + l->out_offset;
    const float *lse = (const float *)(const void *)(reply->payload + l->lse_offset);
    if (s->in_place != NULL && s->in_place->is_attend)
        s->in_place->take(s->in_place->user, out, s->in_place->has_lse ? lse : NULL, n_failed);
    const struct wire_shape shape = pool_shape(r->pool);
    size_t n_out = l->n_tokens * spec->num_q_heads * wire_out_dim(&shape);
    if (s->q != NULL && is_converted(r->pool, s))
        copy_from_bf16(s->out, (const uint16_t *)(const void *)out, n_out);
    else if (s->q != NULL)
        memcpy(s->out, out, n_out * attn_dtype_bytes(spec->q_dtype));
    if (s->lse != NULL)
        memcpy(s->lse, lse, l->n_tokens * spec->num_q_heads * sizeof(float));
    return (attn_status)h->status;
}

/* A step's sizes, and what one message may hold of it. */
struct step_size {
    struct wire_step_layout layout;
    uint32_t max_tokens; /* of a piece; UINT32_MAX: the step is one message */
    bool is_whole; /* items may not be cut */
};

bool step_sees_all(const struct attn_pool_spec *spec, uint32_t layer)
{
    if (spec->n_layers == 0 || (spec->n_layers > 1 && layer >= spec->n_layers))
        return false;
    return spec->layers[spec->n_layers == 1 ? 0 : layer].is_full != 0;
}

/* Indices that a query has, or tokens that they name, whichever are more; or blocks that it
 * chooses. */
static uint64_t step_listed(const struct attn_pool *p, const struct attn_step *s)
{
    uint64_t end = 0, unit = s->index_tokens > 0 ? s->index_tokens : 1;
    if (s->indices == NULL && s->choose_blocks == 0)
        return 0;
    for (uint32_t i = 0; i < s->n_items; i++)
        if ((uint64_t)s->items[i].pos + s->items[i].n_tokens > end)
            end = (uint64_t)s->items[i].pos + s->items[i].n_tokens;
    if (s->choose_blocks > 0)
        return s->choose_blocks < end / (p->spec.block_tokens > 0 ? p->spec.block_tokens : 16) + 1
                   ? (uint64_t)s->choose_blocks * p->spec.num_kv_heads
                   : 0;
    const uint64_t n = s->n_indices * unit < end ? s->n_indices * unit : end;
    return n > s->n_indices ? n : s->n_indices;
}

/* Whether the step fits one message, and else what a piece of it may have. */
static attn_status step_cut(const struct attn_pool *p, const struct attn_step *s,
                            const struct attn_client_info *info, struct step_size *z)
{
    const struct wire_step_layout *l = &z->layout;
    uint64_t most = client_max_message(p->client);
    uint64_t head = STEP_HEAD_BYTES + (uint64_t)s->n_items * STEP_HEAD_ITEM_BYTES +
                    (s->parents != NULL ? l->n_tokens : 0); /* each is below 64: a byte */
    head += s->parts != NULL ? (uint64_t)s->n_items * STEP_HEAD_PART_BYTES : 0;
    uint64_t reply_head = CLIENT_STEP_REPLY_HEAD_BYTES + s->n_items;
    z->max_tokens = UINT32_MAX;
    z->is_whole = (step_flags(s) & WIRE_STEP_ATTEND) != 0 && step_sees_all(&p->spec, s->layer);
    z->is_whole |= s->parents != NULL || (s->is_full && s->parts == NULL);
    const uint64_t listed = step_listed(p, s);
    if (l->n_tokens <= info->max_step_tokens && head + l->request_bytes <= most &&
        reply_head + l->reply_bytes <= most && l->n_tokens * listed <= WIRE_MAX_INDICES)
        return ATTN_OK;
    uint64_t tokens = info->max_step_tokens;
    if (listed > 0)
        tokens = WIRE_MAX_INDICES / listed < tokens ? WIRE_MAX_INDICES / listed : tokens;
    uint64_t row = l->request_bytes / l->n_tokens + 1, reply_row = l->reply_bytes / l->n_tokens + 1;
    uint64_t room = most > head + 4 * WIRE_ALIGN ? most - head - 4 * WIRE_ALIGN : 0;
    uint64_t reply_room =
        most > reply_head + 2 * WIRE_ALIGN ? most - reply_head - 2 * WIRE_ALIGN : 0;
    tokens = room / row < tokens ? room / row : tokens;
    tokens = reply_room / reply_row < tokens ? reply_room / reply_row : tokens;
    uint32_t least = 1;
    for (uint32_t i = 0; i < s->n_items; i++) {
        const struct attn_item *it = &s->items[i];
        const bool is_behind = s->is_full && s->parts != NULL; /* of tokens that are elsewhere */
        if (!is_behind && (uint64_t)it->pos + it->n_tokens > info->max_seq_tokens)
            return error_set(ATTN_EINVAL,
                             "items[%u] ends at token %llu, a sequence has at most %u "
                             "(cache.max_seq_tokens)",
                             i, (unsigned long long)it->pos + it->n_tokens, info->max_seq_tokens);
        if (z->is_whole && it->n_tokens > least)
            least = it->n_tokens;
    }
    if (tokens < least)
        return error_set(
            ATTN_EINVAL,
            "%u token%s of %llu bytes, and %llu of the answer, in one message: it has at "
            "most %llu bytes (listen.max_message%s) and %u tokens (engine.max_step_tokens)",
            least, least > 1 ? "s that see each other," : "", (unsigned long long)row,
            (unsigned long long)reply_row, (unsigned long long)most,
            p->client->t->ops->is_shared ? ", listen.shm_client" : "", info->max_step_tokens);
    z->max_tokens = (uint32_t)tokens;
    return ATTN_OK;
}

/* Everything that can be refused without the daemon. */
static attn_status step_check(struct attn_pool *p, const struct attn_step *s,
                              struct step_size *out_size)
{
    struct wire_step_layout *out_layout = &out_size->layout;
    if (p == NULL || s == NULL)
        return error_set(ATTN_EINVAL, "pool or step is NULL");
    attn_status st = client_check(p->client);
    if (st != ATTN_OK)
        return st;
    if (s->struct_size != sizeof *s)
        return error_set(ATTN_EINVAL, "attn_step.struct_size %u: this library knows %zu",
                         s->struct_size, sizeof *s);
    st = pool_check(p);
    if (st != ATTN_OK)
        return st;
    const struct attn_client_info of_client = client_info(p->client), *info = &of_client;
    if (s->n_items == 0 || s->items == NULL || s->n_items > info->max_step_items)
        return error_set(ATTN_EINVAL, "n_items %u: expected 1 to %u (engine.max_step_items)",
                         s->n_items, info->max_step_items);
    const struct attn_in_place *ip = s->in_place;
    if (ip != NULL && (s->q || s->k || s->v || s->out || s->lse))
        return error_set(ATTN_EINVAL, "q, k, v, out or lse beside in_place");
    if (ip != NULL && (ip->fill == NULL || (ip->is_attend && ip->take == NULL)))
        return error_set(ATTN_EINVAL, "in_place.%s is NULL", ip->fill == NULL ? "fill" : "take");
    if (s->array_dtype != ATTN_DTYPE_NONE && s->array_dtype != p->spec.q_dtype &&
        !is_converted(p, s))
        return error_set(ATTN_EINVAL,
                         "array_dtype %s and a pool of %s: arrays have the pool's dtype, or f32 "
                         "with a pool of bf16",
                         attn_dtype_name(s->array_dtype), attn_dtype_name(p->spec.q_dtype));
    if (ip != NULL && is_converted(p, s))
        return error_set(ATTN_EINVAL, "array_dtype f32 beside in_place");
    if (p->is_coded && s->indices != NULL)
        return error_set(ATTN_EINVAL, "indices in a pool whose wire dtype is fp8_e4m3");
    if (p->spec.is_v_in_k && s->v != NULL)
        return error_set(ATTN_EINVAL, "v is given, the pool has it in k (is_v_in_k)");
    if ((s->k == NULL) != (s->v == NULL) && !p->spec.is_v_in_k)
        return error_set(ATTN_EINVAL, "k and v must be given both or neither");
    if ((s->q == NULL) != (s->out == NULL))
        return error_set(ATTN_EINVAL, "q and out must be given both or neither");
    uint32_t flags = step_flags(s);
    if ((flags & WIRE_STEP_TREE) && (flags & 3) != (WIRE_STEP_APPEND | WIRE_STEP_ATTEND))
        return error_set(ATTN_EINVAL, "parents: a tree's step has q and k");
    if ((flags & WIRE_STEP_FULL) && (flags & 3) != WIRE_STEP_ATTEND)
        return error_set(ATTN_EINVAL, "is_full is 1: such a step has q and no k");
    if ((flags & WIRE_STEP_SPARSE) && (!(flags & WIRE_STEP_ATTEND) || (flags & WIRE_STEP_TREE)))
        return error_set(ATTN_EINVAL, "indices: a sparse step has q and no parents");
    if ((s->indices != NULL) != (s->n_indices > 0) || (s->indices == NULL && s->index_tokens > 0))
        return error_set(ATTN_EINVAL, "indices is %sNULL, n_indices %u, index_tokens %u",
                         s->indices != NULL ? "not " : "", s->n_indices, s->index_tokens);
    if (s->n_indices > WIRE_MAX_INDICES)
        return error_set(ATTN_EINVAL, "n_indices is %u, a query has %u at most", s->n_indices,
                         WIRE_MAX_INDICES);
    if ((flags & WIRE_STEP_CHOOSE) &&
        (!(flags & WIRE_STEP_ATTEND) || (flags & (WIRE_STEP_TREE | WIRE_STEP_SPARSE))))
        return error_set(ATTN_EINVAL,
                         "choose_blocks is %u: such a step has q, no parents and no indices",
                         s->choose_blocks);
    if (!(flags & WIRE_STEP_ATTEND) && (flags & ~(uint32_t)WIRE_STEP_PART) != WIRE_STEP_APPEND)
        return error_set(ATTN_EINVAL, "%s without q", flags & WIRE_STEP_LSE ? "lse" : "no k and v");

    uint64_t n_tokens = 0;
    for (uint32_t i = 0; i < s->n_items; i++) {
        if (s->items[i].n_tokens == 0)
            return error_set(ATTN_EINVAL, "items[%u].n_tokens is 0", i);
        if (s->parents != NULL && s->items[i].n_tokens > WIRE_MAX_TREE_NODES)
            return error_set(ATTN_EINVAL, "items[%u].n_tokens is %u, a tree has %u nodes at most",
                             i, s->items[i].n_tokens, WIRE_MAX_TREE_NODES);
        n_tokens += s->items[i].n_tokens;
    }
    if (n_tokens > UINT32_MAX)
        return error_set(ATTN_EINVAL, "%llu tokens in a step", (unsigned long long)n_tokens);
    /* the layout depends on the sum alone: one item stands for all */
    char why[ATTN_MESSAGE_BYTES] = "";
    uint32_t sum = (uint32_t)n_tokens, pos = 0;
    Attnd__Step h = ATTND__STEP__INIT;
    set_scalars(&h, p, s);
    h.n_seq = h.n_epoch = h.n_pos = h.n_n_tokens = 1;
    h.n_tokens = &sum;
    h.pos = &pos;
    const struct wire_shape shape = pool_shape(p);
    st = wire_step_layout_of(&h, &shape, out_layout, why, sizeof why);
    if (st != ATTN_OK)
        return error_set(st, "%s", why);
    return step_cut(p, s, info, out_size);
}

static step_start_piece_fn start_piece;

/* deadline_ns 0: by the step's timeout. */
static attn_status start(struct attn_pool *p, const struct attn_step *s, uint64_t deadline_ns,
                         attn_step_cb cb, void *user, struct client_request **out_r,
                         attn_ticket *out_ticket)
{
    struct step_size size;
    struct client_request *r;
    attn_status st = step_check(p, s, &size);
    if (st != ATTN_OK)
        return st;
    st = client_request_new(p->client, s->timeout_us, 0, &r);
    if (st != ATTN_OK)
        return st;
    r->is_step = true;
    r->pool = p;
    r->step = *s;
    r->layout = size.layout;
    r->build = step_build;
    r->take = step_take;
    r->fail = step_fail;
    r->cb = cb;
    r->user = user;
    attn_ticket ticket = r->id;
    if (size.max_tokens < UINT32_MAX) {
        st = split_start(r, size.max_tokens, size.is_whole, start_piece);
    } else {
        r->is_large = out_r != NULL && out_ticket == NULL &&
                      size.layout.request_bytes + size.layout.reply_bytes >= STEP_LARGE_BYTES;
        r->is_piece = deadline_ns != 0;
        if (r->is_piece)
            r->deadline_ns = deadline_ns;
        st = client_request_start(r);
    }
    if (st != ATTN_OK) {
        client_request_free(r);
        return st;
    }
    if (out_r != NULL)
        *out_r = r;
    if (out_ticket != NULL)
        *out_ticket = ticket; /* r may be gone: its callback may have run */
    return ATTN_OK;
}

static attn_status start_piece(struct attn_pool *p, const struct attn_step *s,
                               const struct client_request *parent, attn_step_cb cb, void *user)
{
    return start(p, s, parent->deadline_ns, cb, user, NULL, NULL);
}

/* A daemon that began anew asks again; one that has all and still asks is not asked for ever. */
enum { MAX_WEIGHTS_SENT = 3 };

/* The step ended so without a request of its own: its weights could not be sent, or not it
 * again. */
static attn_status end_unsent(const struct attn_step *s, attn_status st,
                              struct attn_result *out_result)
{
    for (uint32_t i = 0; s->item_status != NULL && i < s->n_items; i++)
        s->item_status[i] = st;
    if (out_result == NULL)
        return st;
    out_result->status = st;
    out_result->n_failed = s->n_items;
    out_result->retry_after_us = attn_last_error()->retry_after_us;
    snprintf(out_result->message, sizeof out_result->message, "%s", attn_last_error()->message);
    return st;
}

/* Waits for the step; where the daemon lacks its layer's weights, sends them and the step again. */
static attn_status finish(struct client_request *r, struct attn_result *out_result)
{
    for (int n_sent = 0;; n_sent++) {
        client_request_wait(r);
        attn_status st = error_from_request(r);
        struct attn_pool *p = (struct attn_pool *)(uintptr_t)r->pool;
        const struct attn_step s = r->step;
        const bool may_help = st == ATTN_ENOWEIGHTS && n_sent < MAX_WEIGHTS_SENT;
        if (out_result != NULL)
            *out_result = r->result;
        client_request_free(r);
        if (!may_help || !pool_has_weights(p, s.layer))
            return st;
        st = attn_pool_send_weights(p, s.layer, s.timeout_us);
        if (st == ATTN_OK)
            st = start(p, &s, 0, NULL, NULL, &r, NULL);
        if (st != ATTN_OK)
            return end_unsent(&s, st, out_result);
    }
}

static attn_status check_waiting(struct attn_client *c, const struct attn_result *out_result)
{
    attn_status st = client_check(c);
    if (st != ATTN_OK)
        return st;
    if (out_result != NULL && out_result->struct_size != sizeof *out_result)
        return error_set(ATTN_EINVAL, "attn_result.struct_size %u: this library knows %zu",
                         out_result->struct_size, sizeof *out_result);
    if (!client_request_may_wait(c))
        return error_set(ATTN_EINVAL, "a call that waits was made inside a completion callback");
    return ATTN_OK;
}

attn_status attn_step(attn_pool *p, const struct attn_step *s, struct attn_result *out_result)
{
    struct client_request *r;
    attn_status st = check_waiting(p != NULL ? p->client : NULL, out_result);
    if (st != ATTN_OK)
        return st;
    st = start(p, s, 0, NULL, NULL, &r, NULL); /* the ticket is not given out */
    return st == ATTN_OK ? finish(r, out_result) : st;
}

attn_status attn_step_start(attn_pool *p, const struct attn_step *s, attn_step_cb cb, void *user,
                            attn_ticket *out_ticket)
{
    if (cb == NULL && out_ticket == NULL)
        return error_set(ATTN_EINVAL, "neither a callback nor out_ticket");
    return start(p, s, 0, cb, user, NULL, out_ticket);
}

attn_status attn_step_wait(attn_client *c, attn_ticket ticket, struct attn_result *out_result)
{
    attn_status st = check_waiting(c, out_result);
    if (st != ATTN_OK)
        return st;
    struct client_request *r = client_request_claim(c, ticket);
    if (r == NULL)
        return error_set(ATTN_ENOTFOUND, "ticket %llu: no such step, or somebody waits for it",
                         (unsigned long long)ticket);
    return finish(r, out_result);
}
