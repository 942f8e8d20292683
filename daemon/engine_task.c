/* engine_task.c: requests inside the engine: admission of steps, claims and waiting of their items,
 * deadlines, and the answer.
 *
 * A step that is wrong as a whole is refused before anything is touched. An item that is wrong fails
 * alone: it gets its status, its rows are NaN, the others go on.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "daemon/engine_internal.h"

/* A reply's head without its item statuses: preamble, the other fields at their longest, padding. */
enum { REPLY_HEAD_BYTES = WIRE_PREAMBLE_BYTES + WHY_BYTES + 64 };

/* --- the list of all held tasks ---------------------------------------------------------------- */

void task_link(struct engine *e, struct task *t)
{
    t->stamp = e->next_stamp++;
    t->prev = e->newest;
    t->next = NULL;
    if (e->newest == NULL)
        e->oldest = t;
    else
        e->newest->next = t;
    e->newest = t;
    session_at(e->sessions, t->session)->n_held++;
    if (t->req->deadline_ns < e->next_deadline_ns)
        e->next_deadline_ns = t->req->deadline_ns;
}

void task_unlink(struct engine *e, struct task *t)
{
    if (t->prev == NULL)
        e->oldest = t->next;
    else
        t->prev->next = t->next;
    if (t->next == NULL)
        e->newest = t->prev;
    else
        t->next->prev = t->prev;
    session_at(e->sessions, t->session)->n_held--;
    session_renew(e->sessions, t->session, e->turn_ns); /* the lease runs from the answer */
}

/* --- items ------------------------------------------------------------------------------------- */

static void item_list_push(struct item **head, struct item **tail, struct item *it)
{
    it->next = NULL;
    it->prev = *tail;
    if (*tail == NULL)
        *head = it;
    else
        (*tail)->next = it;
    *tail = it;
}

static void item_list_remove(struct item **head, struct item **tail, struct item *it)
{
    if (it->prev == NULL)
        *head = it->next;
    else
        it->prev->next = it->next;
    if (it->next == NULL)
        *tail = it->prev;
    else
        it->next->prev = it->prev;
}

void item_done(struct item *it)
{
    it->state = ITEM_DONE;
    it->task->n_done++;
}

void item_fail(struct item *it, attn_status st, const char *format, ...)
{
    struct task *t = it->task;
    uint32_t i = (uint32_t)(it - t->items);
    t->item_status[i] = st;
    if (i < t->first_failed) {
        t->first_failed = i;
        int n = snprintf(t->why, sizeof t->why, "item %" PRIu32 " (sequence %" PRIu64 "): ", i,
                         t->req->wire.header->step->seq[i]);
        va_list args;
        va_start(args, format);
        vsnprintf(t->why + n, sizeof t->why - (size_t)n, format, args);
        va_end(args);
    }
    item_done(it);
}

/* false: an item of this layer is in work, or too many layers are, or the sequence is copying */
static bool seq_claim(struct seq_state *s, uint32_t layer)
{
    if (s->n_claims == MAX_CLAIMS || s->is_copying)
        return false;
    for (uint32_t i = 0; i < s->n_claims; i++)
        if (s->claimed[i] == layer)
            return false;
    s->claimed[s->n_claims++] = (uint16_t)layer;
    return true;
}

static void seq_unclaim(struct seq_state *s, uint32_t layer)
{
    uint32_t i = 0;
    while (s->claimed[i] != layer)
        i++;
    s->claimed[i] = s->claimed[--s->n_claims];
}

static void wake_later(struct engine *e, uint32_t seq)
{
    struct seq_state *s = &e->seqs[seq];
    if (s->head == NULL || s->is_on_wake_list)
        return;
    s->is_on_wake_list = true;
    e->wake_list[e->n_wakes++] = seq;
}

void item_release(struct engine *e, struct item *it)
{
    struct seq_state *s = &e->seqs[it->seq];
    seq_unclaim(s, it->task->layer);
    if (it->state == ITEM_ACTIVE) {
        s->n_active--;
        s->is_copying = false; /* a copying item is the only active one */
    }
    wake_later(e, it->seq);
}

void item_unready(struct item *it)
{
    struct task *t = it->task;
    item_list_remove(&t->ready_head, &t->ready_tail, it);
    t->n_ready--;
    t->n_ready_tokens -= it->n_tokens;
    t->pool->ready.n_items--;
}

void item_defer(struct engine *e, struct item *it)
{
    struct seq_state *s = &e->seqs[it->seq];
    item_unready(it);
    seq_unclaim(s, it->task->layer);
    it->state = ITEM_WAITING;
    it->prev = NULL;
    it->next = s->head;
    if (s->head == NULL)
        s->tail = it;
    else
        s->head->prev = it;
    s->head = it;
}

void seq_queue_push(struct seq_state *s, struct item *it)
{
    it->state = ITEM_WAITING;
    item_list_push(&s->head, &s->tail, it);
}

bool seq_is_busy(const struct engine *e, uint32_t seq)
{
    return e->seqs[seq].n_claims > 0 || e->seqs[seq].head != NULL;
}

/* A claimed item is checked against its sequence, and ready if it is right. What is checked here
 * can't change until the claim is released. */
static void item_check(struct engine *e, struct item *it)
{
    struct task *t = it->task;
    const Attnd__Step *step = t->req->wire.header->step;
    uint32_t i = (uint32_t)(it - t->items), epoch = step->epoch[i];
    struct kv_seq_info info;
    kv_seq_info(e->kv, (kv_seq_id){it->seq}, &info);

    if (info.epoch != epoch)
        item_fail(it, ATTN_ESTALE, "epoch is %" PRIu32 ", the sequence is at %" PRIu32, epoch,
                  info.epoch);
    else if (info.owner != t->session)
        item_fail(it, ATTN_ESTALE, "epoch %" PRIu32 " belongs to another session; adopt it first",
                  epoch);
    else if (info.pool.index != t->pool->id.index)
        item_fail(it, ATTN_EINVAL, "the sequence is in pool %" PRIu32 ", step.pool is %" PRIu32,
                  info.pool.index + 1, step->pool);
    else if ((uint64_t)it->pos + it->n_tokens > e->cfg->max_seq_tokens)
        item_fail(it, ATTN_EINVAL,
                  "pos %" PRIu32 " + n_tokens %" PRIu32 " passes the limit of %" PRIu32
                  " tokens a sequence",
                  it->pos, it->n_tokens, e->cfg->max_seq_tokens);
    else if ((t->flags & WIRE_STEP_APPEND) && it->pos > info.layer_len[t->layer])
        item_fail(it, ATTN_EINVAL, "pos is %" PRIu32 ", layer %" PRIu32 " has %" PRIu32 " tokens",
                  it->pos, t->layer, info.layer_len[t->layer]);
    else if (!(t->flags & WIRE_STEP_APPEND) && it->pos + it->n_tokens > info.layer_len[t->layer])
        item_fail(it, ATTN_EINVAL,
                  "pos %" PRIu32 " + n_tokens %" PRIu32 " is not appended yet: layer %" PRIu32
                  " has %" PRIu32 " tokens",
                  it->pos, it->n_tokens, t->layer, info.layer_len[t->layer]);
    else {
        it->state = ITEM_READY;
        item_list_push(&t->ready_head, &t->ready_tail, it);
        t->n_ready++;
        t->n_ready_tokens += it->n_tokens;
        t->pool->ready.n_items++;
        return;
    }
    seq_unclaim(&e->seqs[it->seq], t->layer);
}

/* Finds the item's sequence; it becomes ready, waits, or fails. */
static void item_admit(struct engine *e, struct item *it)
{
    if (it->seq == SEQ_NONE) {
        item_fail(it, ATTN_ENOTFOUND, "no such sequence");
        return;
    }
    struct seq_state *s = &e->seqs[it->seq];
    if (s->head != NULL || !seq_claim(s, it->task->layer))
        seq_queue_push(s, it);
    else
        item_check(e, it);
}

static void item_find(struct engine *e, struct item *it)
{
    uint64_t name = it->task->req->wire.header->step->seq[it - it->task->items];
    kv_seq_id id;
    it->seq = kv_seq_find(e->kv, TENANT, name, &id) == ATTN_OK ? id.index : SEQ_NONE;
}

/* --- waking ------------------------------------------------------------------------------------ */

static void seq_wake(struct engine *e, uint32_t seq)
{
    struct seq_state *s = &e->seqs[seq];
    while (s->head != NULL) {
        struct item *it = s->head;
        struct task *t = it->task;
        if (t->pool == NULL) {
            if (s->n_claims > 0)
                return;
            item_list_remove(&s->head, &s->tail, it);
            control_run(e, t);
            continue;
        }
        if (!seq_claim(s, t->layer))
            return;
        item_list_remove(&s->head, &s->tail, it);
        item_check(e, it);
        task_settle(e, t);
    }
}

void seqs_wake(struct engine *e)
{
    while (e->n_wakes > 0) {
        uint32_t seq = e->wake_list[--e->n_wakes];
        e->seqs[seq].is_on_wake_list = false;
        seq_wake(e, seq);
    }
}

void seq_closed(struct engine *e, uint32_t seq)
{
    struct seq_state *s = &e->seqs[seq];
    struct item *it = s->head;
    s->head = s->tail = NULL;
    while (it != NULL) {
        struct item *next = it->next;
        struct task *t = it->task;
        if (t->pool == NULL) {
            control_dispatch(e, t);
        } else {
            item_find(e, it);
            item_admit(e, it);
            task_settle(e, t);
        }
        it = next;
    }
}

/* --- the answer -------------------------------------------------------------------------------- */

attn_status task_reserve_reply(struct task *t)
{
    if (t->payload != NULL)
        return ATTN_OK;
    size_t head = REPLY_HEAD_BYTES + t->n_items;
    head = (head + WIRE_ALIGN - 1) / WIRE_ALIGN * WIRE_ALIGN;
    attn_status st = request_reply_reserve(t->req, head + t->layout.reply_bytes);
    if (st != ATTN_OK)
        return st;
    t->head_room = head;
    t->payload = t->req->reply->data + head;
    return ATTN_OK;
}

static void fill_nan(uint8_t *dst, size_t n, attn_dtype dtype)
{
    if (dtype == ATTN_F32) {
        uint32_t nan = 0x7fc00000;
        for (size_t i = 0; i < n; i++)
            memcpy(dst + 4 * i, &nan, 4);
    } else {
        uint16_t nan = dtype == ATTN_BF16 ? 0x7fc0 : 0x7e00;
        for (size_t i = 0; i < n; i++)
            memcpy(dst + 2 * i, &nan, 2);
    }
}

static void fill_failed_rows(struct task *t)
{
    const struct backend_pool_config *c = &t->pool->config;
    size_t row = (size_t)c->num_q_heads * c->head_dim_v, e = attn_dtype_bytes(c->q_dtype);
    for (uint32_t i = t->first_failed; i < t->n_items; i++) {
        const struct item *it = &t->items[i];
        if (t->item_status[i] == ATTN_OK)
            continue;
        if (t->flags & WIRE_STEP_ATTEND)
            fill_nan(t->payload + t->layout.out_offset + it->row * row * e, it->n_tokens * row,
                     c->q_dtype);
        if (t->flags & WIRE_STEP_LSE)
            fill_nan(t->payload + t->layout.lse_offset + (size_t)it->row * c->num_q_heads * 4,
                     (size_t)it->n_tokens * c->num_q_heads, ATTN_F32);
    }
}

static void task_answer(struct engine *e, struct task *t)
{
    struct request *req = t->req;
    task_unlink(e, t);
    if (task_reserve_reply(t) != ATTN_OK) {
        engine_refuse(e, req, ATTN_EOVERLOAD, "no message buffer for a reply of %" PRIu64 " bytes",
                      t->layout.reply_bytes);
        return;
    }
    Attnd__StepReply body = ATTND__STEP_REPLY__INIT;
    Attnd__Reply header = ATTND__REPLY__INIT;
    attn_status st = ATTN_OK;
    header.body_case = ATTND__REPLY__BODY_STEP;
    header.step = &body;
    if (t->first_failed < t->n_items) {
        st = (attn_status)t->item_status[t->first_failed];
        header.status = st;
        header.message = t->why;
        body.n_item_status = t->n_items;
        body.item_status = t->item_status;
        fill_failed_rows(t);
    }
    if (req->batched_ns != 0)
        header.queue_ns = req->batched_ns - req->received_ns;
    header.device_ns = req->device_ns;

    size_t head = wire_reply_head_bytes(&header);
    req->reply->offset = t->head_room - head;
    req->reply->n_bytes = head + t->layout.reply_bytes;
    wire_reply_head_encode(&header, req->wire.request_id, t->layout.reply_bytes,
                           req->reply->data + req->reply->offset);
    stats_add(step_items, t->n_items);
    stats_add(step_tokens, t->layout.n_tokens);
    engine_answer(e, req, st);
}

void task_settle(struct engine *e, struct task *t)
{
    if (t->n_done == t->n_items)
        task_answer(e, t);
    else if (t->n_ready > 0 && t->place == TASK_NOWHERE)
        ready_push_woken(&t->pool->ready, t);
}

void task_abort(struct engine *e, struct task *t, attn_status st, const char *why)
{
    struct request *req = t->req;
    if (t->pool == NULL) {
        struct seq_state *s = &e->seqs[t->items[0].seq];
        item_list_remove(&s->head, &s->tail, &t->items[0]);
        wake_later(e, t->items[0].seq);
        task_unlink(e, t);
        engine_refuse(e, req, st, "%s", why);
        return;
    }
    for (uint32_t i = 0; i < t->n_items; i++) {
        struct item *it = &t->items[i];
        if (it->state == ITEM_WAITING) {
            item_list_remove(&e->seqs[it->seq].head, &e->seqs[it->seq].tail, it);
            wake_later(e, it->seq);
        } else if (it->state == ITEM_READY) {
            item_unready(it);
            item_release(e, it);
        } else {
            continue;
        }
        item_fail(it, st, "%s", why);
    }
    ready_remove(&t->pool->ready, t);
    if (t->was_launched) {
        task_settle(e, t);
    } else {
        task_unlink(e, t);
        engine_refuse(e, req, st, "%s", why);
    }
}

void tasks_expire(struct engine *e, uint64_t now_ns)
{
    if (now_ns < e->next_deadline_ns)
        return;
    e->next_deadline_ns = UINT64_MAX;
    for (struct task *t = e->oldest, *next; t != NULL; t = next) {
        next = t->next;
        uint64_t deadline_ns = t->req->deadline_ns;
        if (t->n_done + t->n_active == t->n_items)
            continue; /* all in a batch or done: nothing is left to give up */
        if (deadline_ns <= now_ns) {
            char why[WHY_BYTES];
            snprintf(why, sizeof why, "%" PRIu64 " us passed before a batch could take it",
                     (now_ns - t->req->received_ns) / 1000);
            task_abort(e, t, ATTN_EDEADLINE, why);
        } else if (deadline_ns < e->next_deadline_ns) {
            e->next_deadline_ns = deadline_ns;
        }
    }
}

/* --- admission --------------------------------------------------------------------------------- */

/* Everything of a step that can be wrong without looking at a sequence. */
static attn_status step_check(struct engine *e, const struct request *req, struct pool *p,
                              struct wire_step_layout *out, char *why, size_t why_bytes)
{
    const Attnd__Step *s = req->wire.header->step;
    const struct backend_pool_config *c = &p->config;
    attn_status st = wire_step_layout_of(s, c->num_q_heads, c->num_kv_heads, c->head_dim_k,
                                         c->head_dim_v, c->q_dtype, out, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    if (s->layer >= c->num_layers) {
        snprintf(why, why_bytes, "step.layer is %" PRIu32 ", the pool has %" PRIu32 " layers",
                 s->layer, c->num_layers);
        return ATTN_EINVAL;
    }
    if (s->n_seq > e->cfg->max_step_items) {
        snprintf(why, why_bytes, "step has %zu items, %" PRIu32 " are allowed (max_step_items)",
                 s->n_seq, e->cfg->max_step_items);
        return ATTN_EINVAL;
    }
    if (out->n_tokens > e->cfg->max_step_tokens) {
        snprintf(why, why_bytes,
                 "step has %" PRIu64 " tokens, %" PRIu32 " are allowed (max_step_tokens)",
                 out->n_tokens, e->cfg->max_step_tokens);
        return ATTN_EINVAL;
    }
    if (req->wire.payload_bytes != out->request_bytes) {
        snprintf(why, why_bytes,
                 "payload has %zu bytes, %" PRIu64 " tokens with flags %" PRIu32 " need %" PRIu64,
                 req->wire.payload_bytes, out->n_tokens, s->flags, out->request_bytes);
        return ATTN_EINVAL;
    }
    uint64_t most =
        req->room != NULL ? req->room->capacity_bytes : (uint64_t)e->cfg->max_message_bytes;
    if (out->reply_bytes + REPLY_HEAD_BYTES + s->n_seq + WIRE_ALIGN > most) {
        snprintf(why, why_bytes,
                 "the reply would have %" PRIu64 " bytes, and up to %" PRIu64
                 " before them; there is room for %" PRIu64,
                 out->reply_bytes, (uint64_t)(REPLY_HEAD_BYTES + s->n_seq + WIRE_ALIGN), most);
        return ATTN_EINVAL;
    }
    return ATTN_OK;
}

/* Fills the items in; a sequence named twice and an item no batch can hold are errors of the step. */
static attn_status step_items(struct engine *e, struct task *t, char *why, size_t why_bytes)
{
    const Attnd__Step *s = t->req->wire.header->step;
    uint64_t stamp = e->next_stamp++; /* no earlier step's */
    uint32_t row = 0;
    for (uint32_t i = 0; i < t->n_items; i++) {
        struct item *it = &t->items[i];
        *it = (struct item){.task = t, .pos = s->pos[i], .n_tokens = s->n_tokens[i], .row = row};
        row += it->n_tokens;
        t->item_status[i] = ATTN_OK;
        if (it->n_tokens > e->cfg->max_batch_tokens) {
            snprintf(why, why_bytes,
                     "step.n_tokens[%" PRIu32 "] is %" PRIu32 ", an item may have %" PRIu32
                     " (max_batch_tokens)",
                     i, it->n_tokens, e->cfg->max_batch_tokens);
            return ATTN_EINVAL;
        }
        item_find(e, it);
        if (it->seq == SEQ_NONE)
            continue;
        if (e->seqs[it->seq].step_stamp == stamp) {
            snprintf(why, why_bytes, "step.seq[%" PRIu32 "] %" PRIu64 " is in this step twice", i,
                     s->seq[i]);
            return ATTN_EINVAL;
        }
        e->seqs[it->seq].step_stamp = stamp;
    }
    return ATTN_OK;
}

struct request *steps_warm(struct engine *e, struct request *first)
{
    uint64_t names[KV_WARM_MAX] = {0};
    uint32_t pos[KV_WARM_MAX] = {0}, n = 0;
    kv_seq_id seqs[KV_WARM_MAX];
    struct request *req = first;
    for (; req != NULL && n < KV_WARM_MAX; req = req->next) {
        if (req->wire.header->body_case != ATTND__REQUEST__BODY_STEP)
            continue;
        const Attnd__Step *s = req->wire.header->step;
        for (size_t i = 0; i < s->n_seq && n < KV_WARM_MAX; i++, n++) {
            names[n] = s->seq[i];
            pos[n] = s->pos[i];
        }
    }
    kv_warm(e->kv, TENANT, names, pos, n, seqs);
    for (uint32_t i = 0; i < n; i++)
        if (seqs[i].index != UINT32_MAX)
            __builtin_prefetch(&e->seqs[seqs[i].index], 1);
    return req;
}

void step_admit(struct engine *e, struct request *req, uint64_t now_ns)
{
    const Attnd__Step *s = req->wire.header->step;
    char why[WHY_BYTES];
    uint32_t session;
    attn_status st = session_of_request(e, req, now_ns, &session, why, sizeof why);
    if (st != ATTN_OK) {
        engine_refuse(e, req, st, "%s", why);
        return;
    }
    struct pool *p = pool_of_handle(e, s->pool);
    if (p == NULL) {
        engine_refuse(e, req, ATTN_ENOTFOUND, "step.pool is %" PRIu32 ", no such pool", s->pool);
        return;
    }
    struct wire_step_layout layout;
    st = step_check(e, req, p, &layout, why, sizeof why);
    if (st != ATTN_OK) {
        engine_refuse(e, req, st, "%s", why);
        return;
    }

    size_t head_bytes = sizeof(struct task) + s->n_seq * sizeof(struct item);
    struct task *t = wire_arena_alloc(&req->arena, head_bytes + s->n_seq * sizeof(int32_t));
    if (t == NULL) {
        engine_refuse(e, req, ATTN_ENOMEM, "no memory for a step of %zu items", s->n_seq);
        return;
    }
    *t = (struct task){
        .req = req,
        .pool = p,
        .session = session,
        .layer = s->layer,
        .flags = s->flags,
        .n_items = (uint32_t)s->n_seq,
        .first_failed = (uint32_t)s->n_seq,
        .layout = layout,
        .item_status = (int32_t *)((uint8_t *)t + head_bytes),
    };
    st = step_items(e, t, why, sizeof why);
    if (st != ATTN_OK) {
        engine_refuse(e, req, st, "%s", why);
        return;
    }
    task_link(e, t);
    for (uint32_t i = 0; i < t->n_items; i++)
        item_admit(e, &t->items[i]);
    if (t->n_ready > 0)
        ready_push_fresh(&p->ready, t);
    task_settle(e, t);
}
