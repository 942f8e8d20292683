/* test_sp_frame.c: the SP framing machine over bytes in every kind of piece. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "daemon/transport/sp_frame.h"
#include "tests/random.h"

static const uint8_t req_hello[8] = {0, 'S', 'P', 0, 0, 0x30, 0, 0};

static void our_handshake_is_that_of_a_rep(void **state)
{
    (void)state;
    static const uint8_t expected[8] = {0, 0x53, 0x50, 0, 0, 0x31, 0, 0};
    assert_memory_equal(sp_handshake, expected, 8);
}

static void each_wrong_byte_of_a_handshake_is_refused_with_a_reason(void **state)
{
    (void)state;
    for (int i = 0; i < 8; i++) {
        struct sp_frame f;
        enum sp_event event;
        uint8_t bytes[8];
        memcpy(bytes, req_hello, 8);
        bytes[i] ^= 1;
        sp_frame_init(&f, true);
        assert_int_equal(sp_frame_feed(&f, bytes, 8, &event), 8);
        assert_int_equal(event, SP_BAD);
        assert_non_null(f.why);
        sp_frame_feed(&f, req_hello, 8, &event);
        assert_int_equal(event, SP_BAD); /* and stays so */
    }
}

/* A stream of messages and what must come out of it. */
enum { N_MESSAGES = 50, MAX_BODY = 300 };
struct sample {
    uint8_t *bytes;
    size_t n;
    uint32_t n_ids[N_MESSAGES];
    size_t n_body[N_MESSAGES];
    uint8_t ids[N_MESSAGES][4 * SP_MAX_IDS];
    uint8_t body[N_MESSAGES][MAX_BODY];
};

static struct sample *sample_new(bool is_ipc, uint64_t *seed)
{
    struct sample *s = calloc(1, sizeof(*s));
    s->bytes = malloc(8 + N_MESSAGES * (size_t)(SP_MAX_HEAD_BYTES + MAX_BODY));
    memcpy(s->bytes, req_hello, 8);
    s->n = 8;
    for (int m = 0; m < N_MESSAGES; m++) {
        s->n_ids[m] = 1 + (uint32_t)(random_mixed(seed) % SP_MAX_IDS);
        s->n_body[m] = m % 7 == 0 ? 0 : (size_t)(random_mixed(seed) % MAX_BODY);
        for (uint32_t i = 0; i < 4 * s->n_ids[m]; i++) {
            s->ids[m][i] = (uint8_t)random_mixed(seed);
            if (i % 4 == 0)
                s->ids[m][i] =
                    (uint8_t)((s->ids[m][i] & 0x7f) | (i / 4 == s->n_ids[m] - 1 ? 0x80 : 0));
        }
        for (size_t i = 0; i < s->n_body[m]; i++)
            s->body[m][i] = (uint8_t)random_mixed(seed);
        s->n += sp_head_encode(is_ipc, s->ids[m], s->n_ids[m], s->n_body[m], s->bytes + s->n);
        memcpy(s->bytes + s->n, s->body[m], s->n_body[m]);
        s->n += s->n_body[m];
    }
    return s;
}

/* Feeds the stream in pieces of at most max_piece bytes; pieces are malloc'ed to their size, so
 * that a sanitizer sees a read behind them. */
static void feed_and_compare(const struct sample *s, bool is_ipc, size_t max_piece, uint64_t *seed)
{
    struct sp_frame f;
    int n_messages = 0, n_ready = 0;
    size_t n_body = 0;
    bool is_in_body = false;
    sp_frame_init(&f, is_ipc);
    for (size_t at = 0; at < s->n;) {
        size_t n = 1 + (size_t)(random_mixed(seed) % max_piece);
        n = n < s->n - at ? n : s->n - at;
        uint8_t *piece = malloc(n);
        memcpy(piece, s->bytes + at, n);
        for (size_t k = 0; k < n;) {
            if (is_in_body) {
                size_t take = f.body_left < n - k ? (size_t)f.body_left : n - k;
                assert_memory_equal(piece + k, s->body[n_messages] + n_body, take);
                n_body += take;
                k += take;
                sp_frame_took(&f, take);
            } else {
                enum sp_event event;
                size_t used = sp_frame_feed(&f, piece + k, n - k, &event);
                assert_true(used > 0 && used <= n - k);
                assert_true(event != SP_MORE || used == n - k);
                assert_int_not_equal(event, SP_BAD);
                k += used;
                n_ready += event == SP_READY;
                is_in_body = event == SP_MESSAGE;
                n_body = 0;
                if (is_in_body) {
                    assert_int_equal(f.n_ids, s->n_ids[n_messages]);
                    assert_memory_equal(f.ids, s->ids[n_messages], 4 * (size_t)f.n_ids);
                    assert_int_equal(f.body_left, s->n_body[n_messages]);
                }
            }
            if (is_in_body && f.body_left == 0) {
                assert_false(sp_frame_is_inside(&f));
                is_in_body = false;
                n_messages++;
            }
        }
        free(piece);
        at += n;
    }
    assert_int_equal(n_ready, 1);
    assert_int_equal(n_messages, N_MESSAGES);
    assert_false(sp_frame_is_inside(&f));
}

static void a_stream_reads_the_same_in_any_pieces(void **state)
{
    (void)state;
    uint64_t seed = (uint64_t)time(NULL) * 7919 | 1;
    print_message("seed %llu\n", (unsigned long long)seed);
    for (int is_ipc = 0; is_ipc < 2; is_ipc++) {
        struct sample *s = sample_new(is_ipc, &seed);
        feed_and_compare(s, is_ipc, 1, &seed); /* byte by byte */
        for (int round = 0; round < 20; round++)
            feed_and_compare(s, is_ipc, 1 + (size_t)(random_mixed(&seed) % 700), &seed);
        feed_and_compare(s, is_ipc, s->n, &seed);
        free(s->bytes);
        free(s);
    }
}

static enum sp_event feed_after_handshake(bool is_ipc, const uint8_t *bytes, size_t n,
                                          struct sp_frame *f)
{
    enum sp_event event;
    sp_frame_init(f, is_ipc);
    sp_frame_feed(f, req_hello, 8, &event);
    assert_int_equal(event, SP_READY);
    sp_frame_feed(f, bytes, n, &event);
    return event;
}

static void a_message_without_a_whole_id_stack_is_refused(void **state)
{
    (void)state;
    struct sp_frame f;
    for (uint8_t length = 0; length < 4; length++) {
        const uint8_t bytes[8] = {0, 0, 0, 0, 0, 0, 0, length};
        assert_int_equal(feed_after_handshake(false, bytes, 8, &f), SP_BAD);
    }
    static const uint8_t no_top_bit[] = {0, 0, 0, 0, 0, 0, 0, 7, 0x7f, 0, 0, 0, 0x80, 0, 0};
    assert_int_equal(feed_after_handshake(false, no_top_bit, sizeof(no_top_bit), &f), SP_BAD);
    uint8_t many[8 + 4 * (SP_MAX_IDS + 1)] = {0};
    many[7] = 4 * (SP_MAX_IDS + 1);
    many[sizeof(many) - 4] = 0x80;
    assert_int_equal(feed_after_handshake(false, many, sizeof(many), &f), SP_BAD);
    assert_string_equal(f.why, "more than 16 ids in front of a message");
}

static void a_type_byte_other_than_1_is_refused_on_ipc(void **state)
{
    (void)state;
    struct sp_frame f;
    for (int type = 0; type < 256; type++) {
        const uint8_t bytes[9] = {(uint8_t)type, 0, 0, 0, 0, 0, 0, 0, 4};
        assert_int_equal(feed_after_handshake(true, bytes, 9, &f), type == 1 ? SP_MORE : SP_BAD);
    }
}

static void the_largest_length_is_read_without_overflow(void **state)
{
    (void)state;
    struct sp_frame f;
    static const uint8_t bytes[] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x80, 0, 0, 1};
    assert_int_equal(feed_after_handshake(false, bytes, sizeof(bytes), &f), SP_MESSAGE);
    assert_true(f.body_left == UINT64_MAX - 4);
    assert_true(sp_frame_is_inside(&f));
}

static void being_inside_a_message_begins_with_its_first_byte(void **state)
{
    (void)state;
    struct sp_frame f;
    enum sp_event event;
    sp_frame_init(&f, true);
    sp_frame_feed(&f, req_hello, 7, &event);
    assert_false(sp_frame_is_inside(&f));
    sp_frame_feed(&f, req_hello + 7, 1, &event);
    assert_int_equal(event, SP_READY);
    assert_false(sp_frame_is_inside(&f));
    sp_frame_feed(&f, (const uint8_t[]){1}, 1, &event);
    assert_true(sp_frame_is_inside(&f));
}

static void random_bytes_never_crash_it(void **state)
{
    (void)state;
    uint64_t seed = (uint64_t)time(NULL) * 104729 | 1;
    print_message("seed %llu\n", (unsigned long long)seed);
    for (int round = 0; round < 20000; round++) {
        struct sp_frame f;
        enum sp_event event;
        uint8_t bytes[64];
        sp_frame_init(&f, round & 1);
        if (round & 2)
            sp_frame_feed(&f, req_hello, 8, &event);
        for (size_t i = 0; i < sizeof(bytes); i++)
            bytes[i] =
                round & 4 ? (uint8_t)random_mixed(&seed) : (uint8_t)(random_mixed(&seed) & 1);
        for (size_t at = 0; at < sizeof(bytes);) {
            if (f.body_left > 0 && !(f.state == 2)) {
                uint64_t left = sizeof(bytes) - at;
                uint64_t k = f.body_left < left ? f.body_left : left;
                sp_frame_took(&f, k);
                at += (size_t)k;
                continue;
            }
            at += sp_frame_feed(&f, bytes + at, sizeof(bytes) - at, &event);
            if (event == SP_BAD)
                break;
        }
        assert_true(f.n_ids <= SP_MAX_IDS && f.n_have <= 9);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(our_handshake_is_that_of_a_rep),
        cmocka_unit_test(each_wrong_byte_of_a_handshake_is_refused_with_a_reason),
        cmocka_unit_test(a_stream_reads_the_same_in_any_pieces),
        cmocka_unit_test(a_message_without_a_whole_id_stack_is_refused),
        cmocka_unit_test(a_type_byte_other_than_1_is_refused_on_ipc),
        cmocka_unit_test(the_largest_length_is_read_without_overflow),
        cmocka_unit_test(being_inside_a_message_begins_with_its_first_byte),
        cmocka_unit_test(random_bytes_never_crash_it),
    };
    return cmocka_run_group_tests_name("sp_frame", tests, NULL, NULL);
}
