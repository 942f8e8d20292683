/* test_engine_probes.c: a tenant asks for names and prefixes, some of which are another tenant's
 * and some nobody's. Both are answered alike, but for the name itself. With an argument it is a
 * measurement, too: so many probes of each kind, and how well the time that the engine takes for
 * them tells the two apart (AUC; 0.5 is not at all), without a network's or a thread's noise in
 * between. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/attn_time.h"
#include "tests/daemon/engine/engine_rig.h"
#include "tests/random.h"

enum {
    N_POOLS = 24,
    N_SEQS = 450,
    NAMES = 900, /* half of them: each is asked for as often */
    N_SESSIONS = 8,
    N_PREFIXES = 8, /* that the cache has of the owner's; as many it has not */
    PREFIX_TOKENS = RIG_BLOCK_TOKENS + 1,
    FIRST_NAME = 100,
    OWNER = 5001,
    PROBER = 5002
};

static struct rig r;
static uint64_t seed = 1;
static uint32_t n_probes = 60;
static bool is_theirs[FIRST_NAME + NAMES], is_their_pool[FIRST_NAME + NAMES];
static uint32_t handles[N_POOLS], own_pool;
static bool is_cached[FIRST_NAME + 2 * N_PREFIXES];
static uint64_t sessions[2][N_SESSIONS], own_session; /* of nobody, and theirs */

static uint32_t below(uint32_t n)
{
    return random_below(&seed, n);
}

static void tweak(struct rig *rig)
{
    char path[64], why[256];
    snprintf(path, sizeof path, "/tmp/attnd_probes_%ld", (long)getpid());
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fchmod(fileno(f), 0600), 0);
    fprintf(f, "[owner]\nusers = %d\n[prober]\nusers = %d\n", OWNER, PROBER);
    fclose(f);
    if (tenants_open(path, &rig->fixture.tenants, why, sizeof why) != ATTN_OK)
        fail_msg("%s", why);
    unlink(path);
    rig->principal = (struct principal){.kind = PRINCIPAL_USER};
    rig->cfg.max_pools = 64;
    rig->cfg.max_sequences = 512;
    rig->backend.kv_bytes = 16 << 20;
    rig->epoch = 1;
}

/* Names of three digits, drawn alike from those that are taken and those that are not. */
static uint32_t draw(const bool taken[], uint32_t n_names, bool wants_taken)
{
    uint32_t name;
    do
        name = FIRST_NAME + below(n_names);
    while (taken[name] != wants_taken);
    return name;
}

/* The tokens of prefix number n. */
static struct kv_tokens prefix(uint32_t n)
{
    static uint32_t ids[PREFIX_TOKENS];
    for (uint32_t i = 0; i < PREFIX_TOKENS; i++)
        ids[i] = (n * 4096 + i) * 2654435761u;
    return (struct kv_tokens){.ids = ids, .n = PREFIX_TOKENS};
}

/* Prefixes that the owner has computed, and that its own sequences begin with. */
static void cache_prefixes(void)
{
    enum { SEQ = 50 };
    r.pool = rig_pool(&r, "prefixes", 2 * N_PREFIXES);
    for (uint32_t i = 0; i < N_PREFIXES; i++) {
        uint32_t n = draw(is_cached, 2 * N_PREFIXES, false);
        struct kv_tokens t = prefix(n);
        is_cached[n] = true;
        uint64_t id = rig_send_open_with(&r, SEQ, &t);
        rig_run(&r);
        assert_int_equal(rig_answer(&r, id)->status, ATTN_OK);
        r.epoch = rig_answer(&r, id)->seq->epoch;
        for (uint32_t l = 0; l < RIG_LAYERS; l++)
            assert_int_equal(rig_item(&r, SEQ, l, 0, PREFIX_TOKENS), ATTN_OK);
        assert_int_equal(rig_close_seq(&r, SEQ, r.epoch), ATTN_OK);
        id = rig_send_open_with(&r, SEQ, &t);
        rig_run(&r);
        assert_int_equal(rig_answer(&r, id)->seq->cached_tokens, RIG_BLOCK_TOKENS);
        r.epoch = rig_answer(&r, id)->seq->epoch;
        assert_int_equal(rig_close_seq(&r, SEQ, r.epoch), ATTN_OK);
    }
    r.epoch = 1;
}

static void start(bool has_prefixes)
{
    rig_open(&r, tweak);
    r.principal.uid = OWNER;
    for (int i = 0; i < N_SESSIONS; i++) {
        sessions[1][i] = r.session = rig_hello(&r, "owner");
        sessions[0][i] = (uint64_t)below(1u << 30) << 33 | below(1u << 30);
    }
    for (uint32_t i = 0; i < N_POOLS; i++) {
        char name[16];
        uint32_t number = draw(is_their_pool, 2 * N_POOLS, false);
        is_their_pool[number] = true;
        snprintf(name, sizeof name, "%u", number);
        handles[i] = r.pool = rig_pool(&r, name, 8);
    }
    for (uint32_t i = 0; i < N_SEQS; i++) {
        uint32_t name = draw(is_theirs, 2 * N_SEQS, false);
        is_theirs[name] = true;
        assert_int_equal(rig_open_seq(&r, name), ATTN_OK);
    }
    if (has_prefixes)
        cache_prefixes();
    r.principal.uid = PROBER;
    own_session = r.session = rig_hello(&r, "prober");
    strcpy(r.principal.tenant, "prober"); /* what its transport has learnt from the reply */
    own_pool = r.pool = rig_pool(&r, "own", 8);
}

static void stop(void)
{
    struct tenants *t = r.fixture.tenants;
    r.principal.tenant[0] = '\0';
    rig_close(&r);
    tenants_close(t);
}

/* ---- what is asked ---- */

static uint64_t describe(bool there)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__PoolDescribe body = ATTND__POOL_DESCRIBE__INIT;
    char name[16];
    snprintf(name, sizeof name, "%u", draw(is_their_pool, 2 * N_POOLS, there));
    body.name = name;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_POOL_DESCRIBE;
    h.pool_describe = &body;
    return rig_send(&r, &h, NULL, 0);
}

static uint64_t adopt(bool there)
{
    return rig_send_adopt(&r, draw(is_theirs, 2 * N_SEQS, there));
}

static uint64_t close_seq(bool there)
{
    return rig_send_close(&r, draw(is_theirs, 2 * N_SEQS, there));
}

static uint64_t truncate_seq(bool there)
{
    return rig_send_truncate(&r, draw(is_theirs, 2 * N_SEQS, there), 0);
}

static uint64_t fork_seq(bool there)
{
    return rig_send_fork(&r, draw(is_theirs, 2 * N_SEQS, there), 99);
}

static uint64_t step(bool there)
{
    return rig_send_item(&r, draw(is_theirs, 2 * N_SEQS, there), 0, 0, 1);
}

/* Handles that look alike: of a pool of the owner's, and of a place that has none. */
static uint32_t draw_handle(bool there)
{
    return there ? handles[N_POOLS - 1 - below(12)] : handles[N_POOLS - 1] + 3 + below(12);
}

static uint64_t open_in_pool(bool there)
{
    r.pool = draw_handle(there);
    uint64_t id = rig_send_open(&r, 99);
    r.pool = own_pool;
    return id;
}

static uint64_t release_pool(bool there)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__PoolRelease body = ATTND__POOL_RELEASE__INIT;
    body.pool = draw_handle(there);
    body.request = 1;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_POOL_RELEASE;
    h.pool_release = &body;
    return rig_send(&r, &h, NULL, 0);
}

static uint64_t step_in_pool(bool there)
{
    r.pool = draw_handle(there);
    uint64_t id = rig_send_item(&r, 99, 0, 0, 1);
    r.pool = own_pool;
    return id;
}

static uint64_t use_session(bool there)
{
    r.session = sessions[there][below(N_SESSIONS)];
    uint64_t id = rig_send_adopt(&r, FIRST_NAME);
    r.session = own_session;
    return id;
}

static uint64_t resume_session(bool there)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__Hello hello = ATTND__HELLO__INIT;
    hello.protocol_version = 1;
    hello.resume_session = sessions[there][below(N_SESSIONS)];
    h.body_case = ATTND__REQUEST__BODY_HELLO;
    h.hello = &hello;
    return rig_send(&r, &h, NULL, 0);
}

/* These two succeed; the sequence is closed before the next probe. */
static uint64_t made;

static uint64_t open_seq(bool there)
{
    made = draw(is_theirs, 2 * N_SEQS, there);
    return rig_send_open(&r, made);
}

static uint64_t open_prefix(bool there)
{
    struct kv_tokens t = prefix(draw(is_cached, 2 * N_PREFIXES, there));
    made = 99;
    return rig_send_open_with(&r, made, &t);
}

static const struct {
    const char *name;
    uint64_t (*send)(bool there);
    bool is_guessable; /* the number of a session, 64 random bits, is not */
} kinds[] = {
    {"open, a name", open_seq, true},
    {"open, a prefix", open_prefix, true},
    {"pool_describe, a name", describe, true},
    {"open, a pool's handle", open_in_pool, true},
    {"step, a pool's handle", step_in_pool, true},
    {"pool_release, a pool's handle", release_pool, true},
    {"step, a sequence", step, true},
    {"adopt", adopt, true},
    {"close", close_seq, true},
    {"truncate", truncate_seq, true},
    {"fork", fork_seq, true},
    {"a session", use_session, false},
    {"hello, a session", resume_session, false},
};
enum { N_KINDS = sizeof kinds / sizeof kinds[0] };

/* ---- the measure ---- */

struct sample {
    uint64_t ns;
    bool there;
};

static int by_time(const void *a, const void *b)
{
    const struct sample *x = a, *y = b;
    return x->ns < y->ns ? -1 : x->ns > y->ns;
}

/* The chance that of one of each kind that which is there takes longer; ties count half. */
static double auc(struct sample *s, uint32_t n)
{
    double ranks = 0, n_there = 0;
    qsort(s, n, sizeof *s, by_time);
    for (uint32_t i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && s[end].ns == s[i].ns;)
            end++;
        for (uint32_t k = i; k < end; k++) {
            ranks += s[k].there ? (i + end + 1) / 2.0 : 0;
            n_there += s[k].there;
        }
    }
    return (ranks - n_there * (n_there + 1) / 2) / (n_there * (n - n_there));
}

static void forget_answers(void)
{
    while (r.answers != NULL) {
        struct rig_answer *a = r.answers;
        r.answers = a->next;
        wire_arena_reset(&a->arena);
        request_free(a->req);
        test_free(a);
    }
}

/* A sentence without its numbers. */
static void blot(const char *text, char out[256])
{
    size_t n = 0;
    for (; *text != '\0' && n < 255; text++)
        if ((*text < '0' || *text > '9') && (*text < 'a' || *text > 'f'))
            out[n++] = *text;
    out[n] = '\0';
}

/* The bytes of the answer's header, without the numbers that say which was asked for: those of the
 * sentence, and the epoch, which rises with each open of anybody. */
static size_t answer_bytes(uint64_t id, uint8_t out[512])
{
    char why[256], none[] = "";
    Attnd__Reply reply = *rig_answer(&r, id);
    Attnd__SeqReply seq;
    blot(reply.message == NULL ? none : reply.message, why);
    reply.message = why;
    if (reply.body_case == ATTND__REPLY__BODY_SEQ) {
        seq = *reply.seq;
        assert_true(seq.epoch > 0);
        seq.epoch = 0;
        reply.seq = &seq;
    }
    assert_true(attnd__reply__get_packed_size(&reply) <= 512);
    return attnd__reply__pack(&reply, out);
}

static void close_what_was_made(uint64_t id)
{
    const Attnd__Reply *reply = rig_answer(&r, id);
    if (reply->status == ATTN_OK)
        assert_int_equal(rig_close_seq(&r, made, reply->seq->epoch), ATTN_OK);
}

static void what_is_anothers_is_answered_like_what_has_no_owner(void **state)
{
    (void)state;
    start(true);
    struct sample *samples = test_calloc(n_probes, sizeof *samples);
    for (int kind = 0; kind < N_KINDS; kind++) {
        uint8_t first[512], bytes[512];
        size_t n_first = 0;
        for (uint32_t i = 0; i < n_probes; i++) {
            bool there = below(2);
            uint64_t id = kinds[kind].send(there);
            uint64_t since_ns = attn_now_ns();
            engine_turn(r.engine, 0);
            samples[i] = (struct sample){attn_now_ns() - since_ns, there};
            size_t n = answer_bytes(id, bytes);
            if (i == 0)
                memcpy(first, bytes, n_first = n);
            assert_int_equal(n, n_first);
            assert_memory_equal(bytes, first, n);
            close_what_was_made(id);
            forget_answers();
        }
        if (n_probes >= 1000 && kinds[kind].is_guessable)
            printf("| %s | %.3f |\n", kinds[kind].name, auc(samples, n_probes));
    }
    test_free(samples);
    stop();
}

/* ---- what is left in buffers ---- */

/* A pool whose outputs of a token end in the middle of 64 bytes, before its lse. */
static uint32_t make_narrow_pool(void)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__PoolSpec spec = ATTND__POOL_SPEC__INIT;
    Attnd__PoolCreate body = ATTND__POOL_CREATE__INIT;
    spec.name = "narrow";
    spec.num_layers = spec.num_q_heads = spec.num_kv_heads = 1;
    spec.head_dim_k = RIG_DIM;
    spec.block_tokens = RIG_BLOCK_TOKENS;
    spec.q_dtype = ATTND__DTYPE__F32;
    spec.n_blocks = 8;
    body.spec = &spec;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_POOL_CREATE;
    h.pool_create = &body;
    const Attnd__Reply *reply = rig_call(&r, &h);
    assert_int_equal(reply->status, ATTN_OK);
    return reply->pool->pool;
}

enum { NARROW_BYTES = 2 * 64 + RIG_DIM * 4, POISON_BYTES = 3000 };

static uint64_t send_narrow(uint64_t seq, size_t payload_bytes)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__Step s = ATTND__STEP__INIT;
    uint8_t payload[POISON_BYTES];
    uint32_t pos = 0, n = 1, epoch = 1;
    memset(payload, 0xee, sizeof payload);
    s.pool = r.pool;
    s.flags = WIRE_STEP_APPEND | WIRE_STEP_ATTEND | WIRE_STEP_LSE;
    s.dtype = ATTND__DTYPE__F32;
    s.n_seq = s.n_epoch = s.n_pos = s.n_n_tokens = 1;
    s.seq = &seq;
    s.epoch = &epoch;
    s.pos = &pos;
    s.n_tokens = &n;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_STEP;
    h.step = &s;
    return rig_send(&r, &h, payload, payload_bytes);
}

/* Replies are built in buffers that other messages have been in. */
static void bytes_between_tensors_have_no_owner(void **state)
{
    (void)state;
    enum { OUT_BYTES = RIG_DIM * 4, LSE_OFFSET = 64 };
    start(false);
    r.pool = make_narrow_pool();
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
    for (int i = 0; i < 50; i++) {
        send_narrow(1, POISON_BYTES); /* refused for its size */
        rig_run(&r);
        forget_answers();
        uint64_t id = send_narrow(1, NARROW_BYTES);
        rig_run(&r);
        const struct wire_reply *w = rig_wire_reply(&r, id);
        assert_non_null(w);
        assert_int_equal(w->header->status, ATTN_OK);
        assert_int_equal(w->payload_bytes, LSE_OFFSET + 4);
        for (int k = OUT_BYTES; k < LSE_OFFSET; k++)
            assert_int_equal(w->payload[k], 0);
        forget_answers();
    }
    stop();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_anothers_is_answered_like_what_has_no_owner),
        cmocka_unit_test(bytes_between_tensors_have_no_owner),
    };
    if (argc > 1)
        n_probes = (uint32_t)atoi(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
