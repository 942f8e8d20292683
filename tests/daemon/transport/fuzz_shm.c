/* fuzz_shm.c: fuzz target: what a client writes into the memory that it shares: the input is a
 * list of writes anywhere in the region, and of entries said to be submitted. The daemon's side
 * must stay within the region, and give everything back in the end.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <uv.h>

#include "daemon/base/stack.h"
#include "daemon/transport/shm_internal.h"
#include "tests/daemon/engine/engine_rig.h"
#include "tests/proto/fuzz.h"

enum { N_SLOTS = 4, REGION_BYTES = 32 << 10, MAX_TURNS = 64, WRITE_BYTES = 40 };

static struct rig r;
static struct transport_env env;
static struct transport_shm t;
static uv_loop_t loop;

static void client_open(struct shm_client *c)
{
    *c = (struct shm_client){.t = &t, .fd = -1, .n_slots = N_SLOTS, .region_bytes = REGION_BYTES};
    c->base = aligned_alloc(4096, REGION_BYTES); /* its end is the sanitizer's to watch */
    memset(c->base, 0, REGION_BYTES);
    c->wake_fd = eventfd(0, EFD_NONBLOCK);
    if (shm_client_init(c) != ATTN_OK)
        abort();
    (void)stack_push(&t.incoming, c);
    atomic_store(&t.has_news, true);
    rig_run(&r);
}

static void client_close(struct shm_client *c)
{
    atomic_store(&c->is_hung_up, true);
    atomic_store(&t.has_news, true);
    rig_run(&r);
    if (c->n_busy != 0 || atomic_exchange(&t.retired, NULL) != c)
        abort(); /* requests are not given back, or the client isn't */
    shm_client_fini(c);
    close(c->wake_fd);
    free(c->base);
}

/* Two bytes say where, the third how much, the fourth whether entries are submitted after it. */
static size_t write_one(struct shm_client *c, const uint8_t *data, size_t n)
{
    size_t at = (size_t)(data[0] | data[1] << 8) % REGION_BYTES, bytes = data[2] % WRITE_BYTES;
    if (bytes > n - 4)
        bytes = n - 4;
    if (bytes > REGION_BYTES - at)
        bytes = REGION_BYTES - at;
    memcpy(c->base + at, data + 4, bytes);
    if (data[3] & 1)
        atomic_fetch_add(&c->control->submitted, 1 + data[3] / 64);
    if (data[3] & 2)
        rig_run(&r);
    return 4 + bytes;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct shm_client c;
    rig_open(&r, NULL);
    uv_loop_init(&loop);
    env = (struct transport_env){.cfg = &r.cfg, .engine = r.engine, .shared_most = UINT64_MAX};
    t = (struct transport_shm){
        .env = &env,
        .poller = {.poll = shm_poll, .may_sleep = shm_may_sleep, .awake = shm_awake},
    };
    uv_async_init(&loop, &t.async, NULL);
    engine_poller_add(r.engine, &t.poller);
    client_open(&c);
    for (int i = 0; i < MAX_TURNS && n > 4; i++) {
        size_t used = write_one(&c, data, n);
        data += used;
        n -= used;
    }
    client_close(&c);
    rig_close(&r);
    uv_close((uv_handle_t *)&t.async, NULL);
    uv_run(&loop, UV_RUN_DEFAULT);
    uv_loop_close(&loop);
    return 0;
}

/* One write of the list. */
static size_t put(uint8_t *out, uint64_t at, const void *bytes, size_t n, uint8_t how)
{
    out[0] = (uint8_t)at;
    out[1] = (uint8_t)(at >> 8);
    out[2] = (uint8_t)n;
    out[3] = how;
    memcpy(out + 4, bytes, n);
    return 4 + n;
}

/* A request in pieces, and its entry; a hello each, the later ones with something wrong. */
size_t fuzz_seed(size_t i, uint8_t *out, size_t out_bytes)
{
    enum { SEEDS = 4 };
    uint64_t submits, completes, data = shm_layout(N_SLOTS, &submits, &completes);
    uint8_t msg[256];
    Attnd__Hello b = ATTND__HELLO__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.protocol_version = 1;
    b.client_name = i == 0 ? "a" : "somebody with a long name, as it goes";
    h.body_case = ATTND__REQUEST__BODY_HELLO;
    h.hello = &b;
    size_t head = wire_request_head_bytes(&h), n = 0;
    if (i >= SEEDS || head > sizeof msg || out_bytes < 2 * sizeof msg)
        return 0;
    wire_request_head_encode(&h, 1 + i, 0, msg);
    for (size_t at = 0; at < head; at += 32)
        n += put(out + n, data + at, msg + at, head - at < 32 ? head - at : 32, 0);
    struct shm_submit e = {.request_offset = data,
                           .room_offset = data + 4096,
                           .request_bytes = (uint32_t)head,
                           .room_bytes = i == 2 ? 64 : 4096,
                           .slot = i == 3 ? N_SLOTS : 0};
    n += put(out + n, submits, &e, sizeof e, 3);
    return n;
}
