/* test_shm_rings.c: one client's rings under an engine without a thread: what is taken, what is
 * answered, what a client that breaks the rules gets, and when its memory may go. The client's side
 * is shm_link.c on the same memory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/stack.h"
#include "daemon/transport/shm_internal.h"
#include "tests/daemon/engine/engine_rig.h"
#include "tests/daemon/transport/shm_link.h"
#include "tests/random.h"

enum { N_SLOTS = 8, REGION_BYTES = 1 << 20 };

static struct rig r;
static struct transport_shm t;
static struct transport_env env;
static uv_loop_t loop;

struct side {
    struct shm_client c;
    struct shm_link l;
};

static int open_rig(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    uv_loop_init(&loop);
    env = (struct transport_env){.cfg = &r.cfg, .engine = r.engine, .shared_most = UINT64_MAX};
    t = (struct transport_shm){
        .env = &env,
        .poller = {.poll = shm_poll, .may_sleep = shm_may_sleep, .awake = shm_awake},
    };
    uv_async_init(&loop, &t.async, NULL);
    engine_poller_add(r.engine, &t.poller);
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
    return 0;
}

static int close_rig(void **state)
{
    (void)state;
    rig_close(&r);
    uv_close((uv_handle_t *)&t.async, NULL);
    uv_run(&loop, UV_RUN_DEFAULT);
    return uv_loop_close(&loop);
}

static void side_open(struct side *s)
{
    *s = (struct side){0};
    struct shm_client *c = &s->c;
    c->t = &t;
    c->fd = -1;
    c->principal =
        (struct principal){.kind = PRINCIPAL_USER, .family = AF_UNIX, .uid = 7, .gid = 8, .pid = 9};
    c->n_slots = N_SLOTS;
    c->region_bytes = REGION_BYTES;
    c->base = aligned_alloc(4096, REGION_BYTES);
    memset(c->base, 0, REGION_BYTES);
    c->wake_fd = eventfd(0, EFD_NONBLOCK);
    assert_int_equal(shm_client_init(c), ATTN_OK);
    s->l.base = c->base;
    s->l.control = c->control;
    s->l.wake_fd = c->wake_fd;
    s->l.welcome = (struct shm_welcome){.n_slots = N_SLOTS, .region_bytes = REGION_BYTES};
    s->l.welcome.data_offset =
        shm_layout(N_SLOTS, &s->l.welcome.submit_offset, &s->l.welcome.complete_offset);
    s->l.submits = (struct shm_submit *)(void *)(c->base + s->l.welcome.submit_offset);
    s->l.completes = (struct shm_complete *)(void *)(c->base + s->l.welcome.complete_offset);
    s->l.part_bytes = (REGION_BYTES - s->l.welcome.data_offset) / N_SLOTS / 128 * 128;
    (void)stack_push(&t.incoming, c);
    atomic_store(&t.has_news, true);
}

static bool is_served(const struct side *s)
{
    const struct shm_client *c;
    LIST_FOREACH(c, &t.clients, entry)
        if (c == &s->c)
            return true;
    return false;
}

/* Hangs up if that has not happened, and frees. */
static void side_close(struct side *s)
{
    atomic_store(&s->c.is_hung_up, true);
    atomic_store(&t.has_news, true);
    rig_run(&r);
    assert_false(is_served(s));
    bool is_retired = false;
    for (struct shm_client *c = atomic_load(&t.retired); c != NULL; c = c->next)
        is_retired |= c == &s->c;
    assert_true(is_retired);
    atomic_store(&t.retired, NULL);
    assert_int_equal(s->c.n_busy, 0);
    shm_client_fini(&s->c);
    close(s->c.wake_fd);
    free(s->c.base);
}

/* --- messages --------------------------------------------------------------------------------- */

static size_t hello_message(uint64_t id, uint8_t *dst)
{
    Attnd__Hello b = ATTND__HELLO__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.protocol_version = 1;
    b.client_name = "rings";
    b.resume_session = r.session;
    h.body_case = ATTND__REQUEST__BODY_HELLO;
    h.hello = &b;
    wire_request_head_encode(&h, id, 0, dst);
    return wire_request_head_bytes(&h);
}

/* Append and attend of one token of sequence 1 in layer 0. */
static size_t step_message(uint64_t id, uint32_t pos, uint8_t *dst)
{
    Attnd__Step b = ATTND__STEP__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    uint64_t seq = 1;
    uint32_t one = 1;
    b.pool = r.pool;
    b.flags = WIRE_STEP_APPEND | WIRE_STEP_ATTEND;
    b.dtype = ATTND__DTYPE__F32;
    b.n_seq = b.n_epoch = b.n_pos = b.n_n_tokens = 1;
    b.seq = &seq;
    b.epoch = b.n_tokens = &one;
    b.pos = &pos;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_STEP;
    h.step = &b;
    size_t payload = (RIG_Q_HEADS + 2 * RIG_KV_HEADS) * RIG_DIM * sizeof(float);
    size_t head = wire_request_head_bytes(&h);
    wire_request_head_encode(&h, id, payload, dst);
    for (size_t i = 0; i < payload / sizeof(float); i++)
        memcpy(dst + head + i * sizeof(float), &(float){(float)i + 0.5f}, sizeof(float));
    return head + payload;
}

struct answer {
    uint8_t bytes[8192];
    uint8_t memory[4096];
    struct wire_arena arena;
    struct wire_reply reply;
};

/* The next reply, decoded; false: there is none now. */
static bool take_answer(struct side *s, struct answer *a)
{
    const uint8_t *bytes;
    size_t n;
    char why[256];
    static _Alignas(64) uint8_t copy[8192];
    if (atomic_load(&s->l.control->completed) == s->l.completed)
        return false;
    assert_true(shm_link_receive(&s->l, 0, &bytes, &n));
    assert_true(bytes >= s->l.base + s->l.welcome.data_offset && n <= sizeof copy &&
                bytes + n <= s->l.base + REGION_BYTES);
    memcpy(copy, bytes, n);
    wire_arena_init(&a->arena, a->memory, sizeof a->memory, sizeof a->memory);
    if (wire_reply_decode(copy, n, &a->arena, &a->reply, why, sizeof why) != ATTN_OK)
        fail_msg("a reply does not decode: %s", why);
    return true;
}

static void assert_serves(struct side *s)
{
    uint8_t msg[512];
    struct answer a;
    assert_true(shm_link_send(&s->l, msg, hello_message(77, msg)));
    rig_run(&r);
    assert_true(take_answer(s, &a));
    assert_int_equal(a.reply.request_id, 77);
    assert_int_equal(a.reply.header->status, ATTN_OK);
    assert_false(take_answer(s, &a));
}

/* --- tests ------------------------------------------------------------------------------------ */

static void a_steps_tensors_are_read_and_written_in_place(void **state)
{
    (void)state;
    struct side s;
    struct answer a;
    uint8_t msg[1024];
    side_open(&s);
    memset(s.l.base + s.l.welcome.data_offset, 0xee, REGION_BYTES - s.l.welcome.data_offset);
    size_t n = step_message(5, 0, msg);
    assert_true(shm_link_send(&s.l, msg, n));
    r.backend.is_held = true;
    rig_run(&r);
    const struct backend_item *it = &r.backend.in_flight[0]->items[0];
    const uint8_t *request = s.l.base + s.l.welcome.data_offset, *end = request + s.l.part_bytes;
    assert_true((const uint8_t *)it->q >= request && (const uint8_t *)it->v < request + n);
    assert_true((const uint8_t *)it->out >= request + s.l.part_bytes / 2 &&
                (const uint8_t *)it->out < end);
    assert_int_equal((uintptr_t)it->out % 16, 0);
    assert_false(take_answer(&s, &a));
    r.backend.is_held = false;
    rig_run(&r);
    assert_true(take_answer(&s, &a));
    assert_int_equal(a.reply.request_id, 5);
    assert_int_equal(a.reply.header->status, ATTN_OK);
    assert_int_equal(a.reply.payload_bytes, RIG_Q_HEADS * RIG_DIM * sizeof(float));
    for (size_t i = 0; i < RIG_Q_HEADS * RIG_DIM; i++) {
        float x;
        memcpy(&x, a.reply.payload + i * sizeof x, sizeof x);
        assert_true(x == 1); /* what the rig's backend computes for position 0 */
    }
    side_close(&s);
}

static void requests_complete_out_of_order(void **state)
{
    (void)state;
    struct side s;
    struct answer a;
    uint8_t msg[1024];
    side_open(&s);
    r.backend.is_held = true;
    assert_true(shm_link_send(&s.l, msg, step_message(1, 0, msg)));
    assert_true(shm_link_send(&s.l, msg, hello_message(2, msg)));
    rig_run(&r);
    assert_true(take_answer(&s, &a));
    assert_int_equal(a.reply.request_id, 2);
    assert_false(take_answer(&s, &a));
    r.backend.is_held = false;
    rig_run(&r);
    assert_true(take_answer(&s, &a));
    assert_int_equal(a.reply.request_id, 1);
    side_close(&s);
}

static void rings_go_round_many_times(void **state)
{
    (void)state;
    struct side s;
    struct answer a;
    uint8_t msg[1024];
    side_open(&s);
    s.l.submitted = s.l.completed = s.c.taken = s.c.completed =
        UINT32_MAX - 40; /* counts wrap, too */
    atomic_store(&s.l.control->submitted, s.l.submitted);
    atomic_store(&s.l.control->completed, s.l.completed);
    for (uint64_t i = 1; i <= 200; i++) {
        for (uint64_t k = 0; k < N_SLOTS; k++)
            assert_true(shm_link_send(&s.l, msg, hello_message(i * 100 + k, msg)));
        assert_false(shm_link_send(&s.l, msg, hello_message(1, msg))); /* no slot is free */
        rig_run(&r);
        for (uint64_t k = 0; k < N_SLOTS; k++) {
            assert_true(take_answer(&s, &a));
            assert_int_equal(a.reply.request_id, i * 100 + k);
        }
    }
    side_close(&s);
}

static void entries_that_make_no_sense_cut_their_client_alone(void **state)
{
    (void)state;
    const uint64_t data = 4096, end = REGION_BYTES;
    const struct {
        struct shm_submit e;
        const char *why;
    } cases[] = {
        {{data, data + 4096, 64, 4096, N_SLOTS, 0}, "slot is none"},
        {{data, data + 4096, 64, 4096, UINT32_MAX, 0}, "slot is none"},
        {{data, data + 4096, 64, 4096, 0, 1}, "reserved"},
        {{0, data + 4096, 64, 4096, 0, 0}, "request is not in the data area"},
        {{data - 64, data + 4096, 64, 4096, 0, 0}, "request is not in the data area"},
        {{data + 8, data + 4096, 64, 4096, 0, 0}, "request is not in the data area"},
        {{end, data + 4096, 64, 4096, 0, 0}, "request is not in the data area"},
        {{end - 64, data + 4096, 65, 4096, 0, 0}, "request is not in the data area"},
        {{data, data + 4096, UINT32_MAX, 4096, 0, 0}, "request is not in the data area"},
        {{UINT64_MAX - 63, data + 4096, 64, 4096, 0, 0}, "request is not in the data area"},
        {{data, data + 4096, 64, 1023, 0, 0}, "room is too small or not in the data area"},
        {{data, data + 4096, 64, 0, 0, 0}, "room is too small or not in the data area"},
        {{data, end - 1024, 64, 1025, 0, 0}, "room is too small or not in the data area"},
        {{data, 0, 64, 4096, 0, 0}, "room is too small or not in the data area"},
        {{data, data + 4100, 64, 4096, 0, 0}, "room is too small or not in the data area"},
        {{data, UINT64_MAX - 63, 64, UINT32_MAX, 0, 0}, "room is too small or not in"},
    };
    struct side good;
    side_open(&good);
    assert_int_equal(good.l.welcome.data_offset, data);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct side bad;
        side_open(&bad);
        shm_link_submit(&bad.l, &cases[i].e);
        rig_run(&r);
        if (!bad.c.is_dead || strstr(bad.c.why, cases[i].why) == NULL)
            fail_msg("case %zu: \"%s\", not \"%s\"", i, bad.c.why, cases[i].why);
        assert_int_equal(atomic_load(&bad.l.control->completed), 0);
        assert_false(is_served(&bad));
        assert_serves(&good);
        side_close(&bad);
    }
    side_close(&good);
}

static void a_slot_in_flight_can_not_be_submitted_again(void **state)
{
    (void)state;
    struct side s;
    uint8_t msg[1024];
    side_open(&s);
    r.backend.is_held = true;
    assert_true(shm_link_send(&s.l, msg, step_message(1, 0, msg)));
    rig_run(&r);
    struct shm_submit e = s.l.submits[0];
    shm_link_submit(&s.l, &e);
    rig_run(&r);
    assert_true(s.c.is_dead);
    assert_non_null(strstr(s.c.why, "slot is in flight"));
    assert_true(is_served(&s)); /* the backend still writes to its memory */
    r.backend.is_held = false;
    rig_run(&r);
    assert_false(is_served(&s));
    assert_int_equal(atomic_load(&s.l.control->completed), 0); /* nothing is written to the dead */
    side_close(&s);
}

static void a_count_beyond_the_ring_cuts(void **state)
{
    (void)state;
    static const uint32_t counts[] = {N_SLOTS + 1, 1000, INT32_MAX, UINT32_MAX};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        struct side s;
        side_open(&s);
        atomic_store(&s.l.control->submitted, counts[i]);
        rig_run(&r);
        assert_true(s.c.is_dead);
        assert_non_null(strstr(s.c.why, "submitted is"));
        side_close(&s);
    }
}

static void memory_of_the_gone_stays_until_their_steps_are_back(void **state)
{
    (void)state;
    struct side s;
    uint8_t msg[1024];
    side_open(&s);
    r.backend.is_held = true;
    assert_true(shm_link_send(&s.l, msg, step_message(1, 0, msg)));
    rig_run(&r);
    atomic_store(&s.c.is_hung_up, true);
    atomic_store(&t.has_news, true);
    rig_run(&r);
    assert_true(is_served(&s));
    assert_null(atomic_load(&t.retired));
    r.backend.is_held = false;
    rig_run(&r);
    assert_false(is_served(&s));
    assert_ptr_equal(atomic_load(&t.retired), &s.c);
    assert_int_equal(rig_len(&r, 1, 0), 1); /* the step was done all the same */
    side_close(&s);
}

static void what_changes_after_it_was_taken_changes_nothing(void **state)
{
    (void)state;
    struct side s;
    struct answer a;
    uint8_t msg[1024];
    side_open(&s);
    size_t n = step_message(9, 0, msg);
    assert_true(shm_link_send(&s.l, msg, n));
    assert_true(shm_poll(&t.poller)); /* decoded, in the engine's inbox */
    assert_memory_equal(&s.c.slots[s.l.submits[0].slot].req.principal, &s.c.principal,
                        sizeof s.c.principal);
    memset(s.l.base + s.l.welcome.submit_offset, 0xff,
           s.l.welcome.data_offset - s.l.welcome.submit_offset);
    memset(s.l.base + s.l.welcome.data_offset, 0xff, 128); /* preamble and header */
    rig_run(&r);
    assert_true(take_answer(&s, &a));
    assert_int_equal(a.reply.request_id, 9);
    assert_int_equal(a.reply.header->status, ATTN_OK);
    assert_int_equal(rig_len(&r, 1, 0), 1);
    side_close(&s);
}

static void any_bytes_as_a_message_are_answered(void **state)
{
    (void)state;
    uint64_t seed = 11;
    struct side s;
    struct answer a;
    uint8_t msg[1024];
    side_open(&s);
    for (uint32_t i = 0; i < 3000; i++) {
        size_t n = i % 2 == 0 ? hello_message(i + 1, msg) : step_message(i + 1, 0, msg);
        if (i % 3 == 0)
            n = random_below(&seed, (uint32_t)n);
        else
            for (int k = (int)random_below(&seed, 4); k >= 0; k--)
                msg[random_below(&seed, n < 96 ? (uint32_t)n : 96)] ^=
                    (uint8_t)(1 + random_below(&seed, 255));
        assert_true(shm_link_send(&s.l, msg, n));
        rig_run(&r);
        if (!take_answer(&s, &a))
            fail_msg("message %u (seed 11) was not answered", i);
        assert_false(s.c.is_dead);
    }
    assert_serves(&s);
    side_close(&s);
}

static void a_reply_that_does_not_fit_its_room_is_refused(void **state)
{
    (void)state;
    struct side s;
    struct answer a;
    side_open(&s);
    struct shm_submit e = {
        .request_offset = 4096, .room_offset = 65536, .room_bytes = SHM_MIN_ROOM_BYTES, .slot = 3};
    uint8_t guard[64];
    memset(s.l.base + 65536 + SHM_MIN_ROOM_BYTES, 0xee, 64);
    memset(guard, 0xee, sizeof guard);
    Attnd__Stats b = ATTND__STATS__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_STATS;
    h.stats = &b;
    wire_request_head_encode(&h, 1, 0, s.l.base + 4096);
    e.request_bytes = (uint32_t)wire_request_head_bytes(&h);
    s.l.is_busy[3] = true;
    shm_link_submit(&s.l, &e);
    rig_run(&r);
    assert_true(take_answer(&s, &a));
    assert_int_equal(a.reply.header->status, ATTN_EINVAL);
    assert_non_null(strstr(a.reply.header->message, "room of 1024 bytes"));

    e.request_bytes = (uint32_t)step_message(2, 0, s.l.base + 4096); /* 128 bytes and a head */
    shm_link_submit(&s.l, &e);
    rig_run(&r);
    assert_true(take_answer(&s, &a));
    assert_int_equal(a.reply.header->status, ATTN_OK);
    assert_memory_equal(s.l.base + 65536 + SHM_MIN_ROOM_BYTES, guard, sizeof guard);
    side_close(&s);
}

static void a_sleeping_engine_says_so_in_every_ring(void **state)
{
    (void)state;
    struct side s[2];
    uint8_t msg[512];
    side_open(&s[0]);
    side_open(&s[1]);
    rig_run(&r);
    assert_true(shm_may_sleep(&t.poller));
    assert_int_equal(atomic_load(&s[0].l.control->daemon_sleeps), 1);
    assert_int_equal(atomic_load(&s[1].l.control->daemon_sleeps), 1);
    assert_true(shm_link_send(&s[1].l, msg, hello_message(1, msg)));
    uint64_t n_wakes = 0;
    assert_int_equal(read(s[1].l.wake_fd, &n_wakes, sizeof n_wakes), sizeof n_wakes);
    assert_int_equal(n_wakes, 1);
    assert_false(shm_may_sleep(&t.poller)); /* there is something now */
    shm_awake(&t.poller);
    assert_int_equal(atomic_load(&s[0].l.control->daemon_sleeps), 0);
    rig_run(&r);
    assert_true(
        shm_link_send(&s[0].l, msg, hello_message(2, msg))); /* awake: no wake-up is needed */
    assert_true(read(s[0].l.wake_fd, &n_wakes, sizeof n_wakes) < 0);
    rig_run(&r);
    side_close(&s[0]);
    side_close(&s[1]);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, open_rig, close_rig)
    const struct CMUnitTest tests[] = {
        TEST(a_steps_tensors_are_read_and_written_in_place),
        TEST(requests_complete_out_of_order),
        TEST(rings_go_round_many_times),
        TEST(entries_that_make_no_sense_cut_their_client_alone),
        TEST(a_slot_in_flight_can_not_be_submitted_again),
        TEST(a_count_beyond_the_ring_cuts),
        TEST(memory_of_the_gone_stays_until_their_steps_are_back),
        TEST(what_changes_after_it_was_taken_changes_nothing),
        TEST(any_bytes_as_a_message_are_answered),
        TEST(a_reply_that_does_not_fit_its_room_is_refused),
        TEST(a_sleeping_engine_says_so_in_every_ring),
    };
    return cmocka_run_group_tests_name("rings", tests, NULL, NULL);
}
