/* fuzz_session.c: fuzz target: what a client says to the engine, and how time passes: each request
 * is a few bytes of the input. Names, epochs and positions are small numbers, so that they hit; old
 * requests come again. After each the cache is consistent, in the end nothing is held. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "tests/daemon/engine/engine_rig.h"
#include "tests/proto/fuzz.h"

enum { MAX_REQUESTS = 60, REQUEST_BYTES = 6, NAMES = 5 };

static struct rig r;
static uint64_t first_id; /* of the input's requests */

static void small(struct rig *rig)
{
    rig->cfg.max_sequences = 8;
    rig->cfg.io_memory_bytes = 1 << 20;
    rig->cfg.max_message_bytes = 64 << 10;
    rig->cfg.max_sessions = 4;
}

static void say_step(const uint8_t *b)
{
    uint64_t seq[2] = {b[1] % NAMES, b[2] % NAMES};
    uint32_t pos[2] = {b[3] % 40, b[4] % 40}, n_tokens[2] = {1 + b[3] % 9, 1 + b[4] % 9};
    uint32_t epoch[2] = {b[5] & 15, b[5] >> 4};
    struct rig_step s = {.layer = b[2] >> 5,
                         .flags = b[1] >> 5,
                         .n_items = 1 + (b[0] >> 7),
                         .seq = seq,
                         .pos = pos,
                         .n_tokens = n_tokens,
                         .epoch = b[5] & 1 ? epoch : NULL,
                         .timeout_us = b[4] & 1 ? 1000 : 0};
    /* what libattn would not send is not said here, but by fuzz_header */
    if (s.flags != 0 && s.flags < 8 && s.layer < 6 && (s.n_items == 1 || seq[0] != seq[1]) &&
        (s.flags & (WIRE_STEP_APPEND | WIRE_STEP_ATTEND)) != 0 &&
        (!(s.flags & WIRE_STEP_LSE) || (s.flags & WIRE_STEP_ATTEND)))
        rig_send_step(&r, &s);
}

static void say(const uint8_t *b)
{
    uint64_t name = b[1] % NAMES, other = b[2] % NAMES;
    r.epoch = b[5] & 1 ? b[5] >> 4 : 0; /* a wrong one, or the right one */
    switch (b[0] % 13) {
    case 0:
        rig_send_open(&r, name);
        break;
    case 1:
        rig_send_close(&r, name);
        break;
    case 2:
        rig_send_truncate(&r, name, b[3] % 40);
        break;
    case 3:
        rig_send_fork(&r, name, other);
        break;
    case 4:
        rig_send_adopt(&r, name);
        break;
    case 5:
        rig_hello_with(&r, b[1] & 1 ? r.session : b[2], NULL);
        break;
    case 6:
        if (r.sent != NULL) { /* one of the latest comes again */
            uint64_t n = r.next_id - first_id;
            rig_resend(&r, r.next_id - 1 - b[1] % (n < 8 ? n : 8));
        }
        break;
    case 7:
        rig_now_ns += (uint64_t)b[1] * b[1] * 1000000;
        break;
    case 8:
        r.backend.is_held = b[1] & 1;
        break;
    case 9:
        r.backend.fail_batch = b[1] & 1 ? ATTN_EINTERNAL : ATTN_OK;
        break;
    case 10: {
        const Attnd__Reply *reply = rig_hello_with(&r, 0, NULL);
        if (reply->status == ATTN_OK)
            r.session = reply->hello->session;
        break;
    }
    default:
        say_step(b);
        break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    rig_open(&r, small);
    r.keeps_sent = true;
    first_id = r.next_id;
    for (size_t i = 0; i < MAX_REQUESTS && (i + 1) * REQUEST_BYTES <= n; i++) {
        say(data + i * REQUEST_BYTES);
        if (data[i * REQUEST_BYTES + 4] & 2)
            rig_run(&r);
        if (kv_check(r.kv) != ATTN_OK)
            abort();
    }
    rig_close(&r);
    return 0;
}

size_t fuzz_seed(size_t i, uint8_t *out, size_t out_bytes)
{
    /* open 1 and 2; steps; fork, truncate, adopt, close; time; duplicates */
    static const uint8_t script[][REQUEST_BYTES] = {
        {0, 1, 0, 0, 2, 0},     {0, 2, 0, 0, 2, 0},         {11, 0x61, 0, 0, 2, 0},
        {12, 0x62, 0, 0, 3, 0}, {139, 0x61, 0x22, 0, 2, 0}, {3, 1, 3, 0, 2, 0},
        {2, 1, 0, 0, 2, 0},     {6, 2, 0, 0, 2, 0},         {4, 2, 0, 0, 2, 0},
        {8, 1, 0, 0, 0, 0},     {11, 0x63, 0, 1, 0, 0},     {7, 200, 0, 0, 2, 0},
        {1, 1, 0, 0, 2, 0},     {10, 0, 0, 0, 2, 0},        {4, 3, 0, 0, 2, 0},
        {9, 1, 0, 0, 0, 0},     {11, 0x63, 0, 1, 2, 0},     {5, 1, 0, 0, 2, 0},
    };
    size_t from = i * 3, n = sizeof script - from * REQUEST_BYTES;
    if (from * REQUEST_BYTES >= sizeof script || n > out_bytes)
        return 0;
    memcpy(out, script[from], n);
    return n;
}
