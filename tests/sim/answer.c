/* answer.c: replies against what the client knows. The first answer to a request changes the model;
 * an answer to a copy of it must not contradict that, however late it comes. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model.h"

_Noreturn static void is_wrong(const struct ask *a, const Attnd__Reply *r, const char *what)
{
    sim_fail("peer %u, request %llu (%s, sent %u times): %s; the answer is %s \"%s\"",
             a->peer->number, (unsigned long long)a->id, ask_kinds[a->kind], a->n_sent, what,
             attn_status_name((attn_status)r->status), r->message);
}

/* --- what a request holds --------------------------------------------------------------------- */

void ask_release(struct ask *a)
{
    a->is_answered = true;
    if (a->seq != NULL && a->seq->control == a)
        a->seq->control = NULL;
    if (a->new_seq != NULL && a->new_seq->control == a)
        a->new_seq->control = NULL;
    for (uint32_t i = 0; i < a->n_items; i++) {
        struct seq *s = a->of[i];
        if (a->kind == ASK_STEP && !(a->flags & WIRE_STEP_APPEND))
            s->n_readers -= s->owner == a->peer && s->n_readers > 0;
        else if (s->step[a->layer] == a)
            s->step[a->layer] = NULL;
    }
}

/* It is not asked again, but a copy of it may still be carried out. */
static void give_up(struct ask *a)
{
    if (a->kind == ASK_PLAN) {
        plan_end(a, true); /* no bell was rung */
        a->is_void = true;
        ask_release(a);
        return;
    }
    if (a->kind == ASK_IMPORT) {
        a->seq->is_unsure = true;
        a->seq->sure_len = a->first_block * BLOCK_TOKENS;
    }
    for (uint32_t i = 0; i < a->n_items && (a->flags & WIRE_STEP_APPEND); i++) {
        struct seq *s = a->of[i];
        uint32_t len = s->len[a->layer] < a->pos[i] ? s->len[a->layer] : a->pos[i];
        if (!s->is_unsure || len < s->sure_len)
            s->sure_len = len;
        s->is_unsure = true;
    }
    a->is_void = true;
    ask_release(a);
}

/* --- rows ------------------------------------------------------------------------------------- */

bool is_as_expected(float a, float b)
{
    return sim_plan.is_sum ? fabsf(a - b) < 1e-4f : a == b;
}

static void check_rows(const struct ask *a, const struct wire_reply *w)
{
    const Attnd__Reply *r = w->header;
    const Attnd__StepReply *b = r->body_case == ATTND__REPLY__BODY_STEP ? r->step : NULL;
    uint32_t n = 0, n_out = Q_FLOATS;
    for (uint32_t i = 0; i < a->n_items; i++)
        n += a->n_tokens[i];
    bool has_rows = a->flags & WIRE_STEP_ATTEND;
    if (b == NULL) {
        if (r->status == ATTN_OK)
            is_wrong(a, r, "a step's answer has no body");
        return; /* refused as a whole */
    }
    size_t out_bytes = has_rows ? (size_t)n * n_out * 4 : 0;
    size_t lse_at = (out_bytes + 63) / 64 * 64;
    bool has_lse = a->flags & WIRE_STEP_LSE;
    size_t bytes = has_lse ? lse_at + (size_t)n * Q_HEADS * 4 : out_bytes;
    if (w->payload_bytes != bytes || (b->n_item_status != 0 && b->n_item_status != a->n_items))
        is_wrong(a, r, "the answer has another size");
    const float *out = (const float *)(const void *)w->payload;
    const float *lse = (const float *)(const void *)(w->payload + lse_at);
    for (uint32_t i = 0, row = 0; i < a->n_items && has_rows; i++) {
        bool is_ok = b->n_item_status == 0 || b->item_status[i] == ATTN_OK;
        for (uint32_t t = 0; t < a->n_tokens[i]; t++, row++) {
            sim_counts.rows++;
            for (uint32_t k = 0; k < n_out; k++) {
                float x = out[(size_t)row * n_out + k];
                if (is_ok ? !is_as_expected(x, a->out[(size_t)row * n_out + k]) : !isnan(x))
                    is_wrong(a, r, is_ok ? "a row is wrong" : "a failed item's row is not NaN");
            }
            for (uint32_t h = 0; has_lse && h < Q_HEADS; h++) {
                float x = lse[(size_t)row * Q_HEADS + h];
                if (is_ok ? !is_as_expected(x, a->lse[(size_t)row * Q_HEADS + h]) : !isnan(x))
                    is_wrong(a, r, "an lse is wrong");
            }
        }
    }
}

/* --- the first answer ------------------------------------------------------------------------- */

void take_step(struct ask *a)
{
    uint32_t row = 0;
    for (uint32_t i = 0; i < a->n_items; i++) {
        struct seq *s = a->of[i];
        uint32_t end = a->pos[i] + a->n_tokens[i];
        if (a->flags & WIRE_STEP_APPEND) {
            memcpy(s->token[a->layer] + a->pos[i], a->tokens + row,
                   a->n_tokens[i] * sizeof *a->tokens);
            s->len[a->layer] = end;
        }
        row += a->n_tokens[i];
    }
}

/* A name is never twice at an epoch, whoever had it before: each card's rise. */
static void begin(const struct ask *a, const Attnd__Reply *r, struct seq *s)
{
    s->epoch = r->seq->epoch;
    s->is_open = true;
    bool is_again = false;
    for (uint32_t i = 0; i < EPOCH_STEP; i++)
        is_again |= s->older_epoch[i] != 0;
    if (is_again && s->epoch <= s->older_epoch[s->epoch & (EPOCH_STEP - 1)])
        is_wrong(a, r, "a name that begins again has an epoch that is over");
    sim_counts.names_again += is_again;
}

static void take_open(struct ask *a, const Attnd__Reply *r)
{
    struct seq *s = a->seq;
    uint32_t n = a->n_cached = r->seq->cached_tokens;
    if (n > 0 && (n >= a->len || n % BLOCK_TOKENS != 0))
        is_wrong(a, r, "it begins with too many tokens");
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        s->len[l] = n;
        for (uint32_t i = 0; i < n; i++)
            s->token[l][i] = prompt_token(s->prompt, l, i, NULL, NULL);
    }
    begin(a, r, s);
    sim_counts.cached_tokens += n;
}

static void take_fork(struct ask *a, const Attnd__Reply *r)
{
    struct seq *s = a->new_seq;
    if (r->seq->n_layer_len != N_LAYERS)
        is_wrong(a, r, "a fork does not tell its lengths");
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        if (r->seq->layer_len[l] != a->len)
            is_wrong(a, r, "a fork has another length");
        s->len[l] = a->len;
        memcpy(s->token[l], a->seq->token[l], a->len * sizeof s->token[l][0]);
    }
    s->prompt = prompt_like(a->seq->prompt, a->len);
    begin(a, r, s);
    sim_counts.forks++;
}

static void take_reserve(const struct ask *a, const Attnd__Reply *r)
{
    if (r->body_case != ATTND__REPLY__BODY_PROBE || r->probe->n_reserved_blocks != a->n_blocks)
        is_wrong(a, r, "another number of blocks is reserved");
    sim_counts.reserves++;
}

/* Those who share blocks read and write them at once. */
static void use_shared(const struct ask *a)
{
    struct seq *both[] = {a->new_seq, a->seq};
    for (uint32_t i = sim_plan.forks > 0 ? 2 + sim_below(4) : 0; i > 0; i--) {
        struct seq *s = both[sim_below(2)];
        uint32_t layer = sim_below(N_LAYERS);
        if (s->is_gone || s->owner != a->peer || s->control != NULL)
            continue;
        if (sim_chance(500))
            ask_append(a->peer, s);
        else if (s->len[layer] > 0)
            ask_attend(s, layer, sim_below(s->len[layer]), 1);
    }
}

/* Does an epoch follow on another? A card that the sequence has moved to makes epochs of its
 * own. */
static bool is_next_epoch(uint32_t was, uint32_t is)
{
    bool has_moved = (was ^ is) & (EPOCH_STEP - 1);
    return has_moved ? is > was : is == was + EPOCH_STEP;
}

static void take_truncate(struct ask *a, const Attnd__Reply *r)
{
    struct seq *s = a->seq;
    if (!is_next_epoch(s->epoch, r->seq->epoch))
        is_wrong(a, r, "a truncation did not raise the epoch by one");
    for (uint32_t l = 0; l < N_LAYERS; l++)
        s->len[l] = s->len[l] < a->len ? s->len[l] : a->len;
    s->prompt = prompt_like(s->prompt, a->len);
    s->epoch = r->seq->epoch;
    s->cuts[s->n_cuts++ % MAX_CUTS] = (struct cut){s->epoch, a->len};
    s->is_unsure = false;
    sim_counts.truncates++;
}

/* Lengths are as the last owner knew them, or as a step of its makes them whose answer it never
 * had. */
static void take_adopt(struct ask *a, const Attnd__Reply *r)
{
    struct seq *s = a->seq;
    if (!is_next_epoch(s->epoch, r->seq->epoch) || r->seq->n_layer_len != N_LAYERS)
        is_wrong(a, r, "an adoption did not raise the epoch by one");
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        struct ask *step = s->step[l];
        uint32_t len = r->seq->layer_len[l], row = 0;
        s->step[l] = NULL;
        if (len == s->len[l])
            continue;
        uint32_t i = 0;
        for (; step != NULL && i < step->n_items && step->of[i] != s; i++)
            row += step->n_tokens[i];
        if (step == NULL || step->kind != ASK_STEP || len != step->pos[i] + step->n_tokens[i])
            is_wrong(a, r, "an adopted sequence has a length that nobody gave it");
        memcpy(s->token[l] + step->pos[i], step->tokens + row,
               step->n_tokens[i] * sizeof *step->tokens);
        s->len[l] = len;
    }
    s->epoch = r->seq->epoch;
    sim_counts.adoptions++;
}

static void take_hello(struct ask *a, const Attnd__Reply *r)
{
    struct peer *p = a->peer;
    if (a->is_resuming && r->hello->session != p->session)
        is_wrong(a, r, "another session was resumed");
    if (!a->is_resuming) {
        p->session = r->hello->session;
        p->known_since_ns = a->first_sent_ns;
    }
}

static void take_answer(struct ask *a, const struct wire_reply *w)
{
    const Attnd__Reply *r = w->header;
    bool has_seq = r->body_case == ATTND__REPLY__BODY_SEQ && r->seq != NULL;
    bool wants_seq = a->kind == ASK_OPEN || a->kind == ASK_FORK || a->kind == ASK_TRUNCATE ||
                     a->kind == ASK_ADOPT || a->kind == ASK_TOKENS;
    if (wants_seq && !has_seq)
        is_wrong(a, r, "the answer has no body");
    a->epoch = wants_seq ? r->seq->epoch : 0;
    switch (a->kind) {
    case ASK_HELLO:
        take_hello(a, r);
        break;
    case ASK_POOL:
        a->peer->pool = r->pool->pool;
        for (uint32_t i = sim_below(3); i > 0; i--)
            ask_open(a->peer); /* at once: who answered may still be at work on it */
        break;
    case ASK_OPEN:
        take_open(a, r);
        break;
    case ASK_FORK:
        take_fork(a, r);
        break;
    case ASK_TRUNCATE:
        take_truncate(a, r);
        break;
    case ASK_CLOSE:
        a->seq->is_gone = true;
        a->seq->closed_ns = sim_now_ns;
        sim_counts.closes++;
        break;
    case ASK_ADOPT:
        take_adopt(a, r);
        break;
    case ASK_TOKENS:
        break;
    case ASK_EXPORT:
        if (r->body_case != ATTND__REPLY__BODY_EXPORT)
            is_wrong(a, r, "the answer has no body");
        check_export(a, r->export, w->payload, w->payload_bytes);
        break;
    case ASK_IMPORT:
        take_import(a);
        break;
    case ASK_PLAN: /* bells come now */
        break;
    case ASK_KILL:
        a->seq->is_gone = true;
        sim_counts.killed++;
        break;
    case ASK_KILL_SESSION:
        sim_counts.killed_sessions++;
        break;
    case ASK_RESIZE:
        if (r->body_case != ATTND__REPLY__BODY_POOL)
            is_wrong(a, r, "the answer has no body");
        sim_counts.resizes++;
        break;
    case ASK_RESERVE:
        take_reserve(a, r);
        break;
    case ASK_STEP:
        take_step(a);
        break;
    case ASK_GAP:
    case ASK_STALE:
        is_wrong(a, r, "it had to be refused");
    }
    ask_release(a);
    if (a->kind == ASK_FORK)
        use_shared(a);
    if (a->kind == ASK_RESERVE && a->n_blocks > 0 && !sim_has_faults)
        ask_reserve(a->peer, 0); /* as peers_unreserve would have */
    if (a->kind == ASK_TRUNCATE && sim_chance(500)) /* what has it kept? */
        ask_export(a->peer, a->seq);
}

/* --- refusals --------------------------------------------------------------------------------- */

/* The same request may succeed later. */
static bool is_passing(attn_status st)
{
    return st == ATTN_ENOBLOCKS || st == ATTN_EOVERLOAD || st == ATTN_EDEADLINE ||
           st == ATTN_EDEVICE || st == ATTN_ENOMEM || st == ATTN_EDRAINING || st == ATTN_EINTERNAL;
}

/* May the daemon have forgotten this session? It has begun empty, or the client was silent. */
static bool may_be_over(const struct peer *p)
{
    return process_empty_since_ns() > p->known_since_ns || sim_now_ns - p->renewed_ns > LEASE_NS ||
           p->is_killed;
}

/* A sequence that it names may have been ended by somebody else: those are gone now, or closed
 * later. */
static bool names_doomed(struct ask *a)
{
    bool is_doomed = a->seq != NULL && a->seq->is_doomed;
    if (is_doomed)
        a->seq->is_gone = true;
    for (uint32_t i = 0; i < a->n_items; i++)
        is_doomed |= a->of[i]->is_doomed;
    return is_doomed;
}

static void take_refusal(struct ask *a, const Attnd__Reply *r)
{
    struct peer *p = a->peer;
    attn_status st = (attn_status)r->status;
    sim_counts.refusals++;
    if (a->kind == ASK_RESIZE &&
        (is_passing(st) || st == ATTN_ENOTSUP || strstr(r->message, "no pool is named") != NULL)) {
        ask_release(a); /* too few for what is there, split, or the process began empty */
        return;
    }
    if (a->kind == ASK_RESERVE && a->n_blocks > 0 && is_passing(st)) {
        ask_release(a); /* others have them */
        if (!sim_has_faults)
            ask_reserve(a->peer, 0);
        return;
    }
    if (is_passing(st)) {
        bool is_for_good = ++a->n_refused > 4 &&
                           (a->kind == ASK_STEP || a->kind == ASK_GAP || a->kind == ASK_STALE ||
                            a->kind == ASK_PLAN || a->kind == ASK_IMPORT || a->kind == ASK_EXPORT);
        a->again_ns = sim_now_ns + sim_between(100 * SIM_US, 20 * SIM_MS);
        if (is_for_good)
            give_up(a);
        else if (a->kind == ASK_FORK && st == ATTN_ENOBLOCKS && a->n_refused > 20)
            peer_lose_session(p); /* a source in idle memory, for which nobody makes room */
        return;
    }
    if (a->kind == ASK_PLAN && st == ATTN_ENOTFOUND && strstr(r->message, "no such lane") != NULL) {
        give_up(a);
        return;
    }
    if (a->kind == ASK_KILL_SESSION && st == ATTN_ENOTFOUND &&
        strstr(r->message, "sessions are called so") != NULL) {
        if (a->n_sent == 1 && !may_be_over(a->victim) && a->victim->session != 0)
            is_wrong(a, r, "the session must be known");
        ask_release(a);
        return;
    }
    if (st == ATTN_ENOTFOUND && strstr(r->message, "session") != NULL) {
        if (!may_be_over(p))
            is_wrong(a, r, "the session must live");
        peer_lose_session(p);
        return;
    }
    bool is_end = a->kind == ASK_CLOSE || a->kind == ASK_KILL;
    if (is_end && st == ATTN_ENOTFOUND &&
        (a->n_sent > 1 || a->seq->is_gone || may_be_over(a->seq->owner))) {
        a->seq->is_gone = true;
        sim_counts.closes++;
        ask_release(a);
        return;
    }
    if (a->kind == ASK_EXPORT && st == ATTN_ENOTFOUND &&
        (a->seq->is_gone || may_be_over(a->seq->owner))) {
        ask_release(a);
        return;
    }
    if (a->kind == ASK_ADOPT && st == ATTN_ENOTFOUND && may_be_over(a->former)) {
        a->seq->is_gone = true; /* there were no blocks for it until its lease ended */
        give_up(a);
        return;
    }
    if (st == ATTN_ENOTFOUND && (p->is_killed || names_doomed(a))) {
        give_up(a);
        return;
    }
    if ((a->kind == ASK_GAP && st == ATTN_EINVAL) || (a->kind == ASK_STALE && st == ATTN_ESTALE)) {
        if (a->kind == ASK_GAP)
            give_up(a); /* a late copy may find that there is no gap any more */
        else
            ask_release(a);
        return;
    }
    is_wrong(a, r, "it had to be carried out");
}

/* --- copies ----------------------------------------------------------------------------------- */

/* A second answer to a request that has one. */
static void check_copy(const struct ask *a, const struct wire_reply *w)
{
    const Attnd__Reply *r = w->header;
    if (a->is_void || r->status != ATTN_OK)
        return;
    if (a->kind == ASK_GAP || a->kind == ASK_STALE)
        is_wrong(a, r, "a copy of it was carried out");
    if (r->body_case == ATTND__REPLY__BODY_SEQ &&
        (r->seq->epoch != a->epoch ||
         (a->kind == ASK_OPEN && r->seq->cached_tokens != a->n_cached)))
        is_wrong(a, r, "a copy of it has another answer");
}

void answer_take(struct peer *p, uint8_t *message, size_t n)
{
    struct wire_arena arena;
    struct wire_reply w;
    char why[256];
    wire_arena_init(&arena, NULL, 0, WIRE_ARENA_LIMIT_BYTES);
    if (wire_reply_decode(message, n, &arena, &w, why, sizeof why) != ATTN_OK)
        sim_fail("a reply to peer %u does not decode: %s", p->number, why);
    if (w.request_id == 0 || w.request_id > p->n_asks)
        sim_fail("peer %u: a reply to request %llu, which it has not made", p->number,
                 (unsigned long long)w.request_id);
    struct ask *a = p->asks[w.request_id - 1];
    const Attnd__Reply *r = w.header;
    sim_say("peer %u <- %llu %s: %s %s", p->number, (unsigned long long)a->id, ask_kinds[a->kind],
            attn_status_name((attn_status)r->status), r->message);
    sim_counts.answers_checked++;
    bool is_rightful = !a->is_void || a->kind == ASK_STEP;
    if (a->kind == ASK_STEP && is_rightful)
        check_rows(a, &w);
    if (a->is_answered) {
        check_copy(a, &w);
    } else {
        a->status = (attn_status)r->status;
        if (a->first_sent_ns > p->renewed_ns && r->status != ATTN_ENOTFOUND)
            p->renewed_ns = a->first_sent_ns;
        if (r->status == ATTN_OK)
            take_answer(a, &w);
        else
            take_refusal(a, r);
    }
    wire_arena_reset(&arena);
}
