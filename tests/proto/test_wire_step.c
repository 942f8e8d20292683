/* test_wire_step.c: where a step's tensors are, against plain 128-bit arithmetic. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "proto/wire.h"
#include "tests/random.h"

/* a step of n items of the same length */
static uint32_t pos[8], tokens[8];
static uint64_t seq[8];

static Attnd__Step step_of(uint32_t flags, size_t n_items, uint32_t n_tokens)
{
    Attnd__Step s = ATTND__STEP__INIT;
    for (size_t i = 0; i < n_items; i++) {
        pos[i] = 5;
        tokens[i] = n_tokens;
    }
    s.flags = flags;
    s.dtype = ATTND__DTYPE__BF16;
    s.n_seq = s.n_epoch = s.n_pos = s.n_n_tokens = n_items;
    s.seq = seq;
    s.epoch = s.pos = pos;
    s.n_tokens = tokens;
    return s;
}

static void tensors_start_at_multiples_of_64(void **state)
{
    (void)state;
    struct wire_step_layout l;
    char why[256] = "";
    Attnd__Step s = step_of(WIRE_STEP_APPEND | WIRE_STEP_ATTEND | WIRE_STEP_LSE, 3, 1);
    assert_int_equal(wire_step_layout_of(&s,
                                         &(struct wire_shape){5, 3, 8, 24, false, ATTN_BF16, 0, 0},
                                         &l, why, sizeof why),
                     ATTN_OK);
    assert_int_equal(l.n_tokens, 3);
    assert_int_equal(l.q_offset, 0); /* 3 * 5 * 8 * 2 = 240 */
    assert_int_equal(l.k_offset, 256); /* 3 * 3 * 8 * 2 = 144, ends at 400 */
    assert_int_equal(l.v_offset, 448); /* 3 * 3 * 24 * 2 = 432 */
    assert_int_equal(l.request_bytes, 880);
    assert_int_equal(l.out_offset, 0); /* 3 * 5 * 24 * 2 = 720 */
    assert_int_equal(l.lse_offset, 768); /* 3 * 5 * 4 = 60 */
    assert_int_equal(l.reply_bytes, 828);

    s = step_of(WIRE_STEP_APPEND, 1, 2);
    assert_int_equal(wire_step_layout_of(&s,
                                         &(struct wire_shape){5, 3, 8, 24, false, ATTN_BF16, 0, 0},
                                         &l, why, sizeof why),
                     ATTN_OK);
    assert_int_equal(l.k_offset, 0);
    assert_int_equal(l.v_offset, 128);
    assert_int_equal(l.request_bytes, 416);
    assert_int_equal(l.reply_bytes, 0);

    s = step_of(WIRE_STEP_ATTEND, 2, 1);
    assert_int_equal(wire_step_layout_of(&s,
                                         &(struct wire_shape){5, 3, 8, 24, false, ATTN_BF16, 0, 0},
                                         &l, why, sizeof why),
                     ATTN_OK);
    assert_int_equal(l.request_bytes, 160);
    assert_int_equal(l.reply_bytes, 480);
}

static void expect_invalid(const Attnd__Step *s, attn_dtype dtype, const char *sentence)
{
    struct wire_step_layout l, before;
    char why[256] = "";
    memset(&l, 0xee, sizeof l);
    before = l;
    assert_int_equal(wire_step_layout_of(s, &(struct wire_shape){8, 2, 64, 64, false, dtype, 0, 0},
                                         &l, why, sizeof why),
                     ATTN_EINVAL);
    assert_string_equal(why, sentence);
    assert_memory_equal(&l, &before, sizeof l);
}

static void steps_that_make_no_sense_are_refused_by_name(void **state)
{
    (void)state;
    Attnd__Step s = step_of(0, 1, 1);
    expect_invalid(&s, ATTN_BF16,
                   "step.flags is 0x0, it must be append 1, attend 2 or both; lse is 4, tree 8, "
                   "full 16, sparse 32, choose 64, part 128");
    s.flags = 256 | WIRE_STEP_ATTEND;
    expect_invalid(&s, ATTN_BF16,
                   "step.flags is 0x102, it must be append 1, attend 2 or both; lse is 4, tree 8, "
                   "full 16, sparse 32, choose 64, part 128");
    s.flags = WIRE_STEP_FULL | WIRE_STEP_ATTEND | WIRE_STEP_APPEND;
    expect_invalid(&s, ATTN_BF16, "step.flags is 0x13, full 16 needs attend 2 without append 1");
    s.flags = WIRE_STEP_LSE;
    expect_invalid(&s, ATTN_BF16,
                   "step.flags is 0x4, it must be append 1, attend 2 or both; lse is 4, tree 8, "
                   "full 16, sparse 32, choose 64, part 128");
    s.flags = WIRE_STEP_LSE | WIRE_STEP_APPEND;
    expect_invalid(&s, ATTN_BF16, "step.flags is 0x5, lse 4 needs attend 2");
    s.flags = WIRE_STEP_TREE | WIRE_STEP_ATTEND;
    expect_invalid(&s, ATTN_BF16, "step.flags is 0xa, tree 8 needs append 1 and attend 2");
    s.flags = WIRE_STEP_SPARSE | WIRE_STEP_APPEND;
    expect_invalid(&s, ATTN_BF16, "step.flags is 0x21, sparse 32 needs attend 2 without tree 8");
    s.flags = WIRE_STEP_SPARSE | WIRE_STEP_TREE | WIRE_STEP_ATTEND | WIRE_STEP_APPEND;
    expect_invalid(&s, ATTN_BF16, "step.flags is 0x2b, sparse 32 needs attend 2 without tree 8");
    s.flags = WIRE_STEP_CHOOSE | WIRE_STEP_APPEND;
    expect_invalid(&s, ATTN_BF16,
                   "step.flags is 0x41, choose 64 needs attend 2 without tree 8 and sparse 32");
    s.flags = WIRE_STEP_CHOOSE | WIRE_STEP_SPARSE | WIRE_STEP_ATTEND;
    expect_invalid(&s, ATTN_BF16,
                   "step.flags is 0x62, choose 64 needs attend 2 without tree 8 and sparse 32");
    s.flags = WIRE_STEP_CHOOSE | WIRE_STEP_PART | WIRE_STEP_ATTEND;
    expect_invalid(
        &s, ATTN_BF16,
        "step.flags is 0xc2, choose 64 is not of parts 128: blocks are chosen of a whole "
        "sequence");
    s.flags = WIRE_STEP_ATTEND;
    expect_invalid(&s, ATTN_F16, "step.dtype is bf16 (3), the pool's q_dtype is f16");
    s.dtype = (Attnd__Dtype)77;
    expect_invalid(&s, ATTN_F16, "step.dtype is ? (77), the pool's q_dtype is f16");
    s = step_of(WIRE_STEP_ATTEND, 0, 1);
    expect_invalid(&s, ATTN_BF16, "step has no items");
    s = step_of(WIRE_STEP_ATTEND, 3, 1);
    tokens[1] = 0;
    expect_invalid(&s, ATTN_BF16, "step.n_tokens[1] is 0");
    tokens[1] = 2;
    pos[1] = UINT32_MAX - 1;
    expect_invalid(&s, ATTN_BF16, "step.pos[1] 4294967294 and step.n_tokens[1] 2 pass 32 bits");
    pos[1] = UINT32_MAX - 2;
    struct wire_step_layout l;
    char why[256];
    assert_int_equal(wire_step_layout_of(&s,
                                         &(struct wire_shape){8, 2, 64, 64, false, ATTN_BF16, 0, 0},
                                         &l, why, sizeof why),
                     ATTN_OK);
    s = step_of(WIRE_STEP_ATTEND, 8, UINT32_MAX - 5);
    expect_invalid(&s, ATTN_BF16, "step of 34359738320 tokens makes a payload past 32 bits");
}

typedef unsigned __int128 u128;

static u128 place(u128 *end, u128 bytes)
{
    u128 offset = (*end + 63) / 64 * 64;
    *end = offset + bytes;
    return offset;
}

static void random_layouts_agree_with_wide_arithmetic(void **state)
{
    (void)state;
    uint64_t seed = 99;
    int n_fits = 0, n_over = 0;
    print_message("seed 99\n");
    for (int round = 0; round < 200000; round++) {
        uint32_t v[7];
        for (int i = 0; i < 7; i++) {
            uint64_t bits = random_mixed(&seed);
            v[i] = (uint32_t)(bits >> 32) >> (round % 8 == 0 ? 0 : 20 + (bits >> 28) % 12);
            v[i] = v[i] ? v[i] : 1;
        }
        const uint32_t flags = (uint32_t[]){1, 2, 3, 6, 7, 34, 39, 50}[v[5] % 8];
        Attnd__Step s = step_of(flags, 1 + v[6] % 8, v[0] & 0x7fffffff ? v[0] & 0x7fffffff : 1);
        s.dtype = (Attnd__Dtype)(ATTN_F32 + v[4] % 3);
        s.n_indices = flags & WIRE_STEP_SPARSE ? v[2] : 0;
        u128 n = (u128)tokens[0] * s.n_seq, e = attn_dtype_bytes((attn_dtype)s.dtype);
        u128 request = 0, reply = 0, q = 0, k = 0, vv = 0, indices = 0, out = 0, lse = 0;
        uint32_t hq = v[1], hkv = v[2], dk = v[3], dv = v[4];
        if (flags & WIRE_STEP_ATTEND) {
            q = place(&request, n * hq * dk * e);
            out = place(&reply, n * hq * dv * e);
        }
        if (flags & WIRE_STEP_LSE)
            lse = place(&reply, n * hq * 4);
        if (flags & WIRE_STEP_APPEND) {
            k = place(&request, n * hkv * dk * e);
            vv = place(&request, n * hkv * dv * e);
        }
        if (flags & WIRE_STEP_SPARSE)
            indices = place(&request, n * s.n_indices * 4);
        /* n, heads, dim and e together stay below 2^(34 + 64 + 2): exact */
        bool fits = request <= UINT32_MAX && reply <= UINT32_MAX;
        struct wire_step_layout l;
        char why[256] = "";
        attn_status st = wire_step_layout_of(
            &s, &(struct wire_shape){hq, hkv, dk, dv, false, (attn_dtype)s.dtype, 0, 0}, &l, why,
            sizeof why);
        assert_int_equal(st, fits ? ATTN_OK : ATTN_EINVAL);
        *(fits ? &n_fits : &n_over) += 1;
        if (!fits)
            continue;
        assert_int_equal(l.n_tokens, n);
        assert_int_equal(l.q_offset, q);
        assert_int_equal(l.k_offset, k);
        assert_int_equal(l.v_offset, vv);
        assert_int_equal(l.indices_offset, indices);
        assert_int_equal(l.out_offset, out);
        assert_int_equal(l.lse_offset, lse);
        assert_int_equal(l.request_bytes, request);
        assert_int_equal(l.reply_bytes, reply);
    }
    assert_in_range(n_fits, 10000, 200000);
    assert_in_range(n_over, 10000, 200000);
}

static void payloads_end_exactly_at_32_bits(void **state)
{
    (void)state;
    struct wire_step_layout l;
    char why[256];
    Attnd__Step s = step_of(WIRE_STEP_ATTEND | WIRE_STEP_LSE, 1, 1);
    s.dtype = ATTND__DTYPE__F32;
    /* out ends at 2^32 - 4, so lse would start at 2^32 */
    assert_int_equal(wire_step_layout_of(
                         &s, &(struct wire_shape){1, 1, 1, (1u << 30) - 1, false, ATTN_F32, 0, 0},
                         &l, why, sizeof why),
                     ATTN_EINVAL);
    s.flags = WIRE_STEP_ATTEND;
    assert_int_equal(wire_step_layout_of(
                         &s, &(struct wire_shape){1, 1, 1, (1u << 30) - 1, false, ATTN_F32, 0, 0},
                         &l, why, sizeof why),
                     ATTN_OK);
    assert_int_equal(l.reply_bytes, UINT32_MAX - 3);
    assert_int_equal(
        wire_step_layout_of(&s, &(struct wire_shape){1, 1, 1, 1u << 30, false, ATTN_F32, 0, 0}, &l,
                            why, sizeof why),
        ATTN_EINVAL);
}

static void products_that_wrap_around_are_refused(void **state)
{
    (void)state;
    static const struct {
        uint32_t n_items, n_tokens, heads, dim;
    } cases[] = {
        /* bf16: each product is 2^64 or a multiple, at the first, second or third factor */
        {8, 1u << 31, 1u << 30, 1},        {8, 1u << 31, 1u << 15, 1u << 15},
        {1, 1u << 31, 1u << 31, 4},        {1, 1u << 1, 1u << 31, 1u << 31},
        {8, 1u << 31, 1u << 31, 1u << 31},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (uint32_t flags = WIRE_STEP_APPEND; flags <= WIRE_STEP_ATTEND; flags++) {
            struct wire_step_layout l;
            char why[256] = "";
            Attnd__Step s = step_of(flags, cases[i].n_items, cases[i].n_tokens);
            assert_int_equal(wire_step_layout_of(
                                 &s,
                                 &(struct wire_shape){cases[i].heads, cases[i].heads, cases[i].dim,
                                                      cases[i].dim, false, ATTN_BF16, 0, 0},
                                 &l, why, sizeof why),
                             ATTN_EINVAL);
            assert_non_null(strstr(why, "past 32 bits"));
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tensors_start_at_multiples_of_64),
        cmocka_unit_test(steps_that_make_no_sense_are_refused_by_name),
        cmocka_unit_test(random_layouts_agree_with_wide_arithmetic),
        cmocka_unit_test(payloads_end_exactly_at_32_bits),
        cmocka_unit_test(products_that_wrap_around_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
