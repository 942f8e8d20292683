/* test_engine_duplicates.c: late duplicates. Whatever request arrives again, however late, and
 * whatever has happened since: the cache stays as it is, to the token.
 *
 * A script is a client's work, each request answered before the next is sent. After each of its
 * requests every earlier one arrives again. The cache is compared whole: which sequences there are,
 * their epochs, owners and lengths, and which request wrote each token.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/daemon/engine/engine_rig.h"
#include "tests/random.h"

#define BOTH (WIRE_STEP_APPEND | WIRE_STEP_ATTEND)

enum { NAMES = 3, MAX_TOKENS = 64 };

static struct rig r;

/* --- what the cache holds --------------------------------------------------------------------- */

struct seq_view {
    bool is_open;
    uint32_t epoch, owner;
    uint32_t len[RIG_LAYERS];
    uint64_t writer[RIG_LAYERS][MAX_TOKENS]; /* the request that wrote each token */
};

struct view {
    struct seq_view seqs[NAMES + 1];
    uint32_t n_sequences;
};

/* The request that wrote each token of each block, as the backend saw it. */
static uint64_t writer[64][RIG_LAYERS][RIG_BLOCK_TOKENS];
static uint32_t n_seen; /* batches of the backend's log */
static uint32_t n_copied; /* tokens of it */

/* Notes what the backend has been given, all of it brought by one request. */
static void note_writes(uint64_t by)
{
    for (; n_seen < r.backend.n_batches; n_seen++) {
        const struct rig_batch *b = &r.backend.batches[n_seen];
        for (uint32_t i = b->first_copy; i < b->first_copy + b->n_copies; i++)
            memcpy(writer[r.backend.copies[i].dst], writer[r.backend.copies[i].src],
                   sizeof writer[0]);
        for (uint32_t i = b->first_item; i < b->first_item + b->n_items; i++) {
            const struct rig_item *x = &r.backend.items[i];
            struct kv_seq_info info;
            kv_seq_info(r.kv, (kv_seq_id){x->row}, &info);
            for (uint32_t p = x->pos; p < x->pos + x->n_tokens && (x->flags & BACKEND_APPEND); p++)
                writer[info.block_table[p / RIG_BLOCK_TOKENS]][x->layer][p % RIG_BLOCK_TOKENS] = by;
        }
    }
    for (; n_copied < r.backend.n_token_copies; n_copied++) {
        const struct backend_token_copy *x = &r.backend.token_copies[n_copied];
        for (uint32_t l = 0; l < RIG_LAYERS; l++)
            writer[x->to_block][l][x->to_slot] = writer[x->from_block][l][x->from_slot];
    }
}

static struct view look(void)
{
    struct view v;
    struct kv_stats s;
    memset(&v, 0, sizeof v);
    for (uint64_t name = 1; name <= NAMES; name++) {
        kv_seq_id id;
        struct kv_seq_info info;
        if (kv_seq_find(r.kv, TENANT_OPERATOR, name, &id) != ATTN_OK)
            continue;
        kv_seq_info(r.kv, id, &info);
        struct seq_view *q = &v.seqs[name];
        q->is_open = true;
        q->epoch = info.epoch;
        q->owner = info.owner;
        for (uint32_t l = 0; l < RIG_LAYERS; l++) {
            q->len[l] = info.layer_len[l];
            for (uint32_t t = 0; t < q->len[l]; t++)
                q->writer[l][t] =
                    writer[info.block_table[t / RIG_BLOCK_TOKENS]][l][t % RIG_BLOCK_TOKENS];
        }
    }
    kv_stats_read(r.kv, &s);
    v.n_sequences = (uint32_t)s.sequences;
    return v;
}

/* --- scripts ---------------------------------------------------------------------------------- */

enum kind { OPEN, APPEND, TRUNCATE, CLOSE, ADOPT, FORK, TREE, COMMIT };

struct op {
    enum kind kind;
    uint32_t who; /* which of the two sessions */
    uint64_t seq;
    uint32_t n; /* APPEND: tokens behind the layer's last; TRUNCATE: the length; FORK: the new name;
              TREE: nodes, all of which are roots; COMMIT: the one that is kept */
    uint32_t layer; /* APPEND, TREE */
};

static uint64_t sessions[2];

static uint64_t send_tree(const struct op *o)
{
    static const int32_t roots[] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    const uint32_t pos = rig_len(&r, o->seq, o->layer);
    return rig_send_step(&r, &(struct rig_step){.layer = o->layer,
                                                .flags = BOTH | WIRE_STEP_TREE,
                                                .n_items = 1,
                                                .seq = &o->seq,
                                                .pos = &pos,
                                                .n_tokens = &o->n,
                                                .parents = roots});
}

static uint64_t send_op(const struct op *o)
{
    r.session = sessions[o->who];
    switch (o->kind) {
    case TREE:
        return send_tree(o);
    case COMMIT:
        return rig_send_commit(&r, o->seq, &o->n, 1);
    case OPEN:
        return rig_send_open(&r, o->seq);
    case APPEND:
        return rig_send_item(&r, o->seq, o->layer, rig_len(&r, o->seq, o->layer), o->n);
    case TRUNCATE:
        return rig_send_truncate(&r, o->seq, o->n);
    case CLOSE:
        return rig_send_close(&r, o->seq);
    case ADOPT:
        return rig_send_adopt(&r, o->seq);
    default:
        return rig_send_fork(&r, o->seq, o->n);
    }
}

static void assert_same(const struct view *before, const struct view *now, uint64_t id,
                        uint32_t after)
{
    if (memcmp(before, now, sizeof *now) == 0)
        return;
    for (uint64_t s = 1; s <= NAMES; s++) {
        const struct seq_view *a = &before->seqs[s], *b = &now->seqs[s];
        if (memcmp(a, b, sizeof *a) != 0)
            fail_msg(
                "request %llu came again after step %u of the script and changed sequence %llu: "
                "open %d -> %d, epoch %u -> %u, owner %u -> %u, length %u -> %u",
                (unsigned long long)id, after, (unsigned long long)s, a->is_open, b->is_open,
                a->epoch, b->epoch, a->owner, b->owner, a->len[0], b->len[0]);
    }
    fail_msg("request %llu came again and changed the number of sequences", (unsigned long long)id);
}

static void arrives_again(uint64_t id, uint32_t after)
{
    struct view before = look();
    rig_resend(&r, id);
    rig_run(&r);
    assert_non_null(rig_reply(&r, id)); /* answered, whatever with */
    note_writes(id);
    struct view now = look();
    assert_same(&before, &now, id, after);
}

static void begin(void)
{
    rig_open(&r, NULL);
    memset(writer, 0, sizeof writer);
    n_seen = n_copied = 0;
    r.keeps_sent = true;
    sessions[0] = r.session;
    sessions[1] = rig_hello(&r, "other");
}

/* Every step must be answered with ok; then all before arrive again, oldest first and newest
 * first. */
static void play(const struct op *script, uint32_t n)
{
    uint64_t ids[64];
    begin();
    for (uint32_t i = 0; i < n; i++) {
        ids[i] = send_op(&script[i]);
        rig_run(&r);
        const Attnd__Reply *reply = rig_answer(&r, ids[i]);
        if (reply->status != ATTN_OK)
            fail_msg("step %u of the script: %s", i, reply->message);
        note_writes(ids[i]);
        for (uint32_t k = 0; k <= i; k++)
            arrives_again(ids[k], i);
        for (uint32_t k = i + 1; k-- > 0;)
            arrives_again(ids[k], i);
    }
    rig_close(&r);
}
#define PLAY(...)                                                                                  \
    do {                                                                                           \
        static const struct op script[] = {__VA_ARGS__};                                           \
        play(script, sizeof script / sizeof script[0]);                                            \
    } while (0)

static void an_old_append_after_a_truncation(void **state)
{
    (void)state;
    PLAY({OPEN, 0, 1, 0, 0}, {APPEND, 0, 1, 9, 0}, {TRUNCATE, 0, 1, 3, 0}, {APPEND, 0, 1, 9, 0},
         {APPEND, 0, 1, 2, 0});
}

static void an_old_truncation_of_tokens_written_since(void **state)
{
    (void)state;
    PLAY({OPEN, 0, 1, 0, 0}, {APPEND, 0, 1, 20, 0}, {TRUNCATE, 0, 1, 8, 0}, {APPEND, 0, 1, 12, 0},
         {TRUNCATE, 0, 1, 8, 0}, {APPEND, 0, 1, 1, 0}, {TRUNCATE, 0, 1, 9, 0},
         {APPEND, 0, 1, 3, 0});
}

static void requests_of_a_former_life(void **state)
{
    (void)state;
    PLAY({OPEN, 0, 1, 0, 0}, {APPEND, 0, 1, 5, 0}, {CLOSE, 0, 1, 0, 0}, {OPEN, 0, 1, 0, 0},
         {APPEND, 0, 1, 5, 0}, {ADOPT, 1, 1, 0, 0}, {CLOSE, 1, 1, 0, 0}, {OPEN, 1, 1, 0, 0},
         {APPEND, 1, 1, 2, 0});
}

static void an_open_whose_sequence_was_closed(void **state)
{
    (void)state;
    PLAY({OPEN, 0, 1, 0, 0}, {CLOSE, 0, 1, 0, 0}, {OPEN, 0, 2, 0, 0}, {CLOSE, 0, 2, 0, 0});
}

static void an_adoption_that_another_followed(void **state)
{
    (void)state;
    PLAY({OPEN, 0, 1, 0, 0}, {APPEND, 0, 1, 4, 0}, {ADOPT, 1, 1, 0, 0}, {APPEND, 1, 1, 4, 0},
         {ADOPT, 0, 1, 0, 0}, {APPEND, 0, 1, 4, 0}, {ADOPT, 0, 1, 0, 0}, {TRUNCATE, 0, 1, 4, 0},
         {ADOPT, 1, 1, 0, 0});
}

static void a_fork_whose_child_was_closed(void **state)
{
    (void)state;
    PLAY({OPEN, 0, 1, 0, 0}, {APPEND, 0, 1, 12, 0}, {APPEND, 0, 1, 12, 1}, {APPEND, 0, 1, 12, 2},
         {APPEND, 0, 1, 12, 3}, {FORK, 0, 1, 2, 0}, {APPEND, 0, 2, 3, 0}, {CLOSE, 0, 2, 0, 0},
         {FORK, 0, 1, 2, 0}, {TRUNCATE, 0, 2, 6, 0}, {APPEND, 0, 2, 4, 0}, {CLOSE, 0, 1, 0, 0},
         {OPEN, 0, 1, 0, 0});
}

static void a_tree_whose_path_was_committed_and_the_commit(void **state)
{
    (void)state;
    PLAY({OPEN, 0, 1, 0, 0}, {APPEND, 0, 1, 5, 0}, {APPEND, 0, 1, 5, 1}, {APPEND, 0, 1, 5, 2},
         {APPEND, 0, 1, 5, 3}, {TREE, 0, 1, 12, 0}, {TREE, 0, 1, 12, 1}, {TREE, 0, 1, 12, 2},
         {TREE, 0, 1, 12, 3}, {COMMIT, 0, 1, 11, 0}, {APPEND, 0, 1, 2, 0}, {APPEND, 0, 1, 2, 1},
         {APPEND, 0, 1, 2, 2}, {APPEND, 0, 1, 2, 3}, {TREE, 0, 1, 3, 0}, {TREE, 0, 1, 3, 1},
         {TREE, 0, 1, 3, 2}, {TREE, 0, 1, 3, 3}, {ADOPT, 1, 1, 0, 0}, {COMMIT, 1, 1, 0, 0},
         {APPEND, 1, 1, 1, 0}, {TRUNCATE, 1, 1, 6, 0});
}

/* --- every short script ----------------------------------------------------------------------- */

/* Every script of up to DEPTH requests about two names, of those that must succeed. Copies of all
 * requests before, oldest first and newest first, come after each: as they change nothing, any
 * number of copies in any order changes nothing. A script is played whose last request is new; what
 * stands before it has been played without it. Then once more, its last request in the middle of
 * copies that the engine finds at one time. */
enum { DEPTH = 5, DEEPER = 7 };

static struct op chosen[DEEPER];
static uint32_t n_scripts;

/* What is open, by the script; enough to say what must succeed. */
struct known {
    bool is_open[3];
    uint32_t owner[3], len[3];
};

static uint32_t possible(const struct known *k, struct op out[16])
{
    uint32_t n = 0;
    for (uint32_t s = 1; s <= 2; s++) {
        uint32_t who = k->owner[s];
        if (!k->is_open[s]) {
            for (uint32_t w = 0; w < 2 && s == 1; w++)
                out[n++] = (struct op){OPEN, w, s, 0, 0};
            continue;
        }
        if (s == 1 || k->len[s] > 0)
            out[n++] = (struct op){APPEND, who, s, 3, 0};
        if (k->len[s] > 0)
            out[n++] = (struct op){TRUNCATE, who, s, k->len[s] - 1, 0};
        out[n++] = (struct op){CLOSE, who, s, 0, 0};
        out[n++] = (struct op){ADOPT, 1 - who, s, 0, 0};
        if (s == 1 && !k->is_open[2])
            out[n++] = (struct op){FORK, who, 1, 2, 0};
    }
    return n;
}

static void know(struct known *k, const struct op *o)
{
    switch (o->kind) {
    case OPEN:
        k->is_open[o->seq] = true;
        k->owner[o->seq] = o->who;
        k->len[o->seq] = 0;
        break;
    case APPEND:
        k->len[o->seq] += o->n;
        break;
    case TRUNCATE:
        k->len[o->seq] = o->n;
        break;
    case CLOSE:
        k->is_open[o->seq] = false;
        break;
    case ADOPT:
        k->owner[o->seq] = o->who;
        break;
    default:
        k->is_open[o->n] = true;
        k->owner[o->n] = o->who;
        k->len[o->n] = 0; /* the other layers have nothing */
    }
}

/* Lengths, owners and epochs alone: who wrote a token can't be told within one turn. */
static void forget_writers(struct view *v)
{
    for (uint32_t s = 1; s <= NAMES; s++)
        memset(v->seqs[s].writer, 0, sizeof v->seqs[s].writer);
}

static void play_chosen(uint32_t n, bool is_at_once)
{
    static struct view plain;
    uint64_t ids[DEEPER];
    begin();
    for (uint32_t i = 0; i < n; i++) {
        bool is_last = i + 1 == n;
        for (uint32_t k = 0; is_at_once && is_last && k < i; k++)
            rig_resend(&r, ids[k]);
        ids[i] = send_op(&chosen[i]);
        for (uint32_t k = i; is_at_once && is_last && k-- > 0;)
            rig_resend(&r, ids[k]);
        rig_run(&r);
        const Attnd__Reply *reply = rig_answer(&r, ids[i]);
        if (reply->status != ATTN_OK)
            fail_msg("script %u, request %u: %s", n_scripts, i, reply->message);
        if (!is_at_once) /* else what was written may be gone */
            note_writes(ids[i]);
    }
    for (uint32_t k = 0; !is_at_once && k < n; k++)
        arrives_again(ids[k], n);
    for (uint32_t k = n; !is_at_once && k-- > 0;)
        arrives_again(ids[k], n);
    struct view v = look();
    forget_writers(&v);
    if (is_at_once)
        assert_same(&plain, &v, ids[0], n);
    plain = v;
    rig_close(&r);
}

static void play_every(struct known k, uint32_t n, uint32_t depth)
{
    struct op ops[16];
    uint32_t n_ops = possible(&k, ops);
    for (uint32_t i = 0; n < depth && i < n_ops; i++) {
        struct known next = k;
        chosen[n] = ops[i];
        know(&next, &ops[i]);
        n_scripts++;
        play_chosen(n + 1, false);
        play_chosen(n + 1, true);
        play_every(next, n + 1, depth);
    }
}

/* $DUPLICATES_DEPTH up to 7: longer scripts. */
static void every_short_script_with_every_late_duplicate(void **state)
{
    const char *deeper = getenv("DUPLICATES_DEPTH");
    uint32_t depth = deeper != NULL ? (uint32_t)strtoul(deeper, NULL, 10) : DEPTH;
    (void)state;
    n_scripts = 0;
    play_every((struct known){.is_open = {false}}, 0, depth < DEEPER ? depth : DEEPER);
    print_message("%u scripts\n", n_scripts);
    assert_true(n_scripts > 100);
}

/* --- random scripts --------------------------------------------------------------------------- */

static uint64_t seed;

static uint32_t below(uint32_t n)
{
    return random_below(&seed, n);
}

/* A request that the sequence can take as it is now. */
static struct op random_op(void)
{
    struct view v = look();
    struct op o = {.seq = 1 + below(NAMES)};
    const struct seq_view *s = &v.seqs[o.seq];
    if (!s->is_open) {
        o.who = below(2);
        o.kind = OPEN;
        return o;
    }
    uint32_t slot, dice = below(100), longest = 0;
    for (uint32_t l = 0; l < RIG_LAYERS; l++)
        longest = s->len[l] > longest ? s->len[l] : longest;
    assert_int_equal(session_find(r.sessions, sessions[0], &slot), ATTN_OK);
    o.who = s->owner != slot;
    if (dice < 15) {
        o.kind = TRUNCATE;
        o.n = below(longest + 1);
    } else if (dice < 25) {
        o.kind = CLOSE;
    } else if (dice < 40) {
        o.kind = ADOPT;
        o.who = below(2);
    } else if (dice < 50 && !v.seqs[o.seq % NAMES + 1].is_open) {
        o.kind = FORK;
        o.n = (uint32_t)(o.seq % NAMES + 1);
    } else if (longest + 12 > MAX_TOKENS) {
        o.kind = TRUNCATE;
        o.n = below(8);
    } else {
        o.kind = APPEND;
        o.n = 1 + below(12);
        o.layer = below(RIG_LAYERS);
    }
    return o;
}

static void random_scripts_with_random_duplicates(void **state)
{
    (void)state;
    enum { SEEDS = 60, OPS = 120 };
    static uint64_t ids[OPS];
    for (uint32_t s = 0; s < SEEDS; s++) {
        seed = 1000 + s;
        begin();
        for (uint32_t i = 0; i < OPS; i++) {
            struct op o = random_op();
            ids[i] = send_op(&o);
            rig_run(&r);
            const Attnd__Reply *reply = rig_answer(&r, ids[i]);
            if (reply->status != ATTN_OK)
                fail_msg("seed %u, step %u: %s", 1000 + s, i, reply->message);
            note_writes(ids[i]);
            for (uint32_t k = 0; k < 4; k++)
                arrives_again(ids[below(i + 1)], i);
        }
        rig_close(&r);
    }
}

/* --- hello ------------------------------------------------------------------------------------ */

static uint64_t send_hello(uint64_t nonce)
{
    Attnd__Hello b = ATTND__HELLO__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.protocol_version = 1;
    b.nonce = nonce;
    h.body_case = ATTND__REQUEST__BODY_HELLO;
    h.hello = &b;
    return rig_send(&r, &h, NULL, 0);
}

static uint64_t session_of_hello(uint64_t id)
{
    assert_int_equal(rig_answer(&r, id)->status, ATTN_OK);
    return rig_answer(&r, id)->hello->session;
}

static void a_hello_that_comes_again_gives_the_same_session(void **state)
{
    (void)state;
    struct principal who = {.kind = PRINCIPAL_USER};
    struct share_table *shares = share_table_open(100, 100);
    struct share *here = share_open(shares, &who), *there = share_open(shares, &who);
    rig_open(&r, NULL);
    r.keeps_sent = true;
    uint32_t n = session_count(r.sessions);
    r.share = here;
    uint64_t bare = send_hello(0), named = send_hello(77);
    rig_run(&r);
    uint64_t bare_session = session_of_hello(bare), named_session = session_of_hello(named);
    assert_int_not_equal(bare_session, named_session);
    for (int i = 0; i < 5; i++) { /* on the wire twice */
        rig_resend(&r, bare);
        rig_resend(&r, named);
        rig_run(&r);
        assert_int_equal(session_of_hello(bare), bare_session);
        assert_int_equal(session_of_hello(named), named_session);
        r.share = i % 2 == 0 ? here : there;
        uint64_t again = send_hello(77); /* a client that did not hear the answer */
        rig_run(&r);
        assert_int_equal(session_of_hello(again), named_session);
        assert_int_equal(session_count(r.sessions), n + 2);
        r.share = here;
    }
    r.share = there; /* another connection's first request may have the same id */
    rig_resend(&r, bare);
    rig_run(&r);
    assert_int_equal(session_count(r.sessions), n + 3);
    rig_now_ns += 30000000000; /* all are gone, and the hello is a new one */
    rig_run(&r);
    assert_int_equal(session_count(r.sessions), 0);
    rig_resend(&r, named);
    rig_run(&r);
    assert_int_not_equal(session_of_hello(named), named_session);
    r.share = NULL;
    rig_close(&r);
    share_unref(here);
    share_unref(there);
    share_table_close(shares);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_old_append_after_a_truncation),
        cmocka_unit_test(an_old_truncation_of_tokens_written_since),
        cmocka_unit_test(requests_of_a_former_life),
        cmocka_unit_test(an_open_whose_sequence_was_closed),
        cmocka_unit_test(an_adoption_that_another_followed),
        cmocka_unit_test(a_fork_whose_child_was_closed),
        cmocka_unit_test(a_tree_whose_path_was_committed_and_the_commit),
        cmocka_unit_test(every_short_script_with_every_late_duplicate),
        cmocka_unit_test(random_scripts_with_random_duplicates),
        cmocka_unit_test(a_hello_that_comes_again_gives_the_same_session),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
