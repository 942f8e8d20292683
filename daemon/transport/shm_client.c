/* shm_client.c: serves a client's rings, on the engine's thread.
 *
 * The client can change everything in the region at any time. So an entry is read once, field by
 * field, into a local; a message's preamble and header are copied once into the request's arena;
 * both are checked there and not read again. The backend reads tensors in place: they may change,
 * but no decision depends on them. What the engine must remember (which slots are taken, how many
 * entries were read and written) is in its own memory. A client with an invalid entry is cut:
 * nothing of it is read any more, and it is retired once the engine has answered all its requests.
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/stack.h"
#include "daemon/engine/step/lane.h"
#include "daemon/transport/shm_internal.h"

enum { PAGE_BYTES = 4096 };
static const uint64_t BELL_NAP_NS = 1000 * 1000; /* sleep while a bell is expected, but not soon */

/* --- life ------------------------------------------------------------------------------------- */

uint64_t shm_layout(uint32_t n_slots, uint64_t *out_submits, uint64_t *out_completes)
{
    *out_submits = sizeof(struct shm_control);
    *out_completes = *out_submits + n_slots * sizeof(struct shm_submit);
    uint64_t end = *out_completes + n_slots * sizeof(struct shm_complete);
    return (end + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

uint64_t shm_slots_bytes(const struct shm_client *c)
{
    return c->n_slots * sizeof *c->slots;
}

attn_status shm_client_init(struct shm_client *c)
{
    uint64_t submits, completes;
    c->slots = calloc(c->n_slots, sizeof *c->slots);
    if (c->slots == NULL)
        return ATTN_ENOMEM;
    c->data_offset = shm_layout(c->n_slots, &submits, &completes);
    c->control = (struct shm_control *)(void *)c->base;
    c->submits = (const volatile struct shm_submit *)(void *)(c->base + submits);
    c->completes = (volatile struct shm_complete *)(void *)(c->base + completes);
    return ATTN_OK;
}

void shm_client_fini(struct shm_client *c)
{
    free(c->slots);
    c->slots = NULL;
}

static void cut(struct shm_client *c, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static void cut(struct shm_client *c, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(c->why, sizeof c->why, format, args);
    va_end(args);
    c->is_dead = true;
    atomic_store(&c->t->has_news, true);
}

/* --- requests --------------------------------------------------------------------------------- */

/* Copies out of shared memory once: keeps the compiler from reading src again in place of dst. */
static void copy_once(void *dst, const uint8_t *src, size_t n)
{
    memcpy(dst, src, n);
    __asm__ volatile("" ::: "memory");
}

static bool is_in_data(const struct shm_client *c, uint64_t offset, uint64_t n_bytes)
{
    return offset % SHM_ALIGN == 0 && offset >= c->data_offset && offset <= c->region_bytes &&
           n_bytes <= c->region_bytes - offset;
}

/* Why an entry is invalid; NULL: it is valid. */
static const char *entry_fault(const struct shm_client *c, const struct shm_submit *e)
{
    if (e->slot >= c->n_slots)
        return "slot is none";
    if (c->slots[e->slot].is_busy)
        return "slot is in flight";
    if (e->reserved != 0)
        return "reserved is not 0";
    if (!is_in_data(c, e->request_offset, e->request_bytes))
        return "request is not in the data area";
    if (e->room_bytes < SHM_MIN_ROOM_BYTES || !is_in_data(c, e->room_offset, e->room_bytes))
        return "room is too small or not in the data area";
    return NULL;
}

/* Copies the message's head and decodes it. */
static attn_status decode(struct shm_client *c, struct shm_slot *s, uint64_t now_ns, char *why,
                          size_t why_bytes)
{
    struct request *req = &s->req;
    const struct config *cfg = c->t->env->cfg;
    uint8_t preamble[WIRE_PREAMBLE_BYTES];
    struct wire_preamble p = {0};
    attn_status st = ATTN_EPROTO;
    if (s->msg.n_bytes < sizeof preamble) {
        snprintf(why, why_bytes, "message has %zu bytes, a preamble alone has %zu", s->msg.n_bytes,
                 sizeof preamble);
    } else {
        copy_once(preamble, s->msg.data, sizeof preamble);
        st = wire_preamble_decode(preamble, UINT64_MAX, &p, why, why_bytes);
    }
    req->wire.request_id = p.request_id;
    if (st == ATTN_OK && s->msg.n_bytes > config_now(cfg, max_message_bytes)) {
        snprintf(why, why_bytes,
                 "message of %zu bytes is over the limit of %" PRIu64 " (listen.max_message)",
                 s->msg.n_bytes, config_now(cfg, max_message_bytes));
        return ATTN_EINVAL;
    }
    if (st == ATTN_OK && wire_message_bytes(&p) != s->msg.n_bytes) {
        snprintf(why, why_bytes, "message has %zu bytes, its preamble makes %" PRIu64,
                 s->msg.n_bytes, wire_message_bytes(&p));
        st = ATTN_EPROTO;
    }
    uint64_t head_bytes = wire_head_bytes(&p);
    uint8_t *head = st == ATTN_OK ? wire_arena_alloc(&req->arena, head_bytes) : NULL;
    if (st == ATTN_OK && head == NULL) {
        snprintf(why, why_bytes, "no memory for a header of %" PRIu32 " bytes", p.header_bytes);
        st = ATTN_ENOMEM;
    }
    if (st != ATTN_OK) {
        stats_add(messages_malformed, 1);
        return st;
    }
    memcpy(head, preamble, sizeof preamble);
    copy_once(head + sizeof preamble, s->msg.data + sizeof preamble, head_bytes - sizeof preamble);
    return request_decode_apart(req, head, s->msg.data + head_bytes, now_ns,
                                config_now(cfg, default_timeout_us),
                                config_now(cfg, max_timeout_us), why, why_bytes);
}

static void take(struct shm_client *c, const struct shm_submit *e, uint64_t now_ns)
{
    struct shm_slot *s = &c->slots[e->slot];
    char why[256];
    s->is_busy = true;
    c->n_busy++;
    s->msg = (struct iobuf){.data = c->base + e->request_offset,
                            .capacity_bytes = e->request_bytes,
                            .n_bytes = e->request_bytes};
    s->room = (struct iobuf){.data = c->base + e->room_offset, .capacity_bytes = e->room_bytes};
    request_init(&s->req, &transport_shm_ops, c);
    s->req.principal = c->principal;
    s->req.share = c->share;
    request_set_bufs(&s->req, c->t->env->bufs);
    s->req.msg = &s->msg;
    s->req.room = &s->room;
    stats_add(received_bytes, e->request_bytes);
    attn_status st = decode(c, s, now_ns, why, sizeof why);
    if (st == ATTN_OK)
        engine_submit(c->t->env->engine, &s->req);
    else
        request_reply_error(&s->req, st, 0, "%s", why);
}

/* Takes all entries that the client has submitted. */
static void take_all(struct shm_client *c, uint32_t submitted)
{
    uint64_t now_ns = clock_now_ns();
    if (submitted - c->taken > c->n_slots) {
        cut(c, "submitted is %" PRIu32 " with %" PRIu32 " taken and %" PRIu32 " slots", submitted,
            c->taken, c->n_slots);
        return;
    }
    while (c->taken != submitted && !c->is_dead) {
        const volatile struct shm_submit *shared = &c->submits[c->taken % c->n_slots];
        struct shm_submit e = {
            .request_offset = shared->request_offset,
            .room_offset = shared->room_offset,
            .request_bytes = shared->request_bytes,
            .room_bytes = shared->room_bytes,
            .slot = shared->slot,
            .reserved = shared->reserved,
        };
        c->taken++;
        const char *fault = entry_fault(c, &e);
        if (fault != NULL)
            cut(c,
                "entry %" PRIu32 ": %s (slot %" PRIu32 ", request %" PRIu32 " at %" PRIu64
                ", room %" PRIu32 " at %" PRIu64 ")",
                c->taken - 1, fault, e.slot, e.request_bytes, e.request_offset, e.room_bytes,
                e.room_offset);
        else
            take(c, &e, now_ns);
    }
}

/* --- replies ---------------------------------------------------------------------------------- */

static void wake_client(struct shm_client *c)
{
    _Atomic uint32_t *word = &c->control->client_sleeps;
    if (atomic_load(word) == SHM_AWAKE)
        return;
    uint32_t how = atomic_exchange(word, SHM_AWAKE);
    if (how == SHM_WAITS_ON_FUTEX)
        syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    else if (how == SHM_WAITS_ON_SOCKET && send(c->fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
        return; /* the socket is full, so the client wakes anyway; or the client is gone */
}

void shm_reply(struct request *req)
{
    struct shm_client *c = req->peer;
    struct shm_slot *s = (struct shm_slot *)(void *)req; /* its first member */
    const struct iobuf *reply = req->reply;
    request_sent(req); /* a moment before the client has it */
    if (req->principal.tenant[0] != '\0') /* a hello has identified the tenant */
        c->principal = req->principal;
    wire_arena_reset(&req->arena);
    s->is_busy = false;
    c->n_busy--;
    if (c->is_dead) {
        if (c->n_busy == 0)
            atomic_store(&c->t->has_news, true);
        return;
    }
    volatile struct shm_complete *e = &c->completes[c->completed % c->n_slots];
    e->reply_offset = (uint64_t)(reply->data - c->base) + reply->offset;
    e->reply_bytes = (uint32_t)reply->n_bytes;
    e->slot = (uint32_t)(s - c->slots);
    c->completed++;
    stats_add(sent_bytes, reply->n_bytes);
    /* sequentially consistent with the check in wake_client, because the client says that it sleeps
     * and then checks `completed` */
    atomic_store(&c->control->completed, c->completed);
    wake_client(c);
}

/* --- the poller ------------------------------------------------------------------------------- */

static void retire(struct shm_client *c)
{
    struct transport_shm *t = c->t;
    if (c->lane != NULL)
        engine_lane_remove(c->lane);
    else
        engine_unwatch(t->env->engine, c->wake_fd);
    (void)stack_push(&t->retired, c);
    uv_async_send(&t->async);
}

/* Takes clients that are new, and retires those that have gone. */
static void take_news(struct transport_shm *t)
{
    atomic_store(&t->has_news, false);
    struct shm_client *c, *next;
    stack_for_each(struct shm_client, new, stack_take_all(&t->incoming)) {
        LIST_INSERT_HEAD(&t->clients, new, entry);
        if (new->lane != NULL)
            engine_lane_add(t->env->engine, new->lane);
    }
    for (c = LIST_FIRST(&t->clients); c != NULL; c = next) {
        next = LIST_NEXT(c, entry);
        c->is_dead |= atomic_load(&c->is_hung_up);
        if (c->is_dead && c->lane != NULL)
            lane_close(c->lane);
        if (c->is_dead && (c->lane != NULL ? c->lane->n_busy : c->n_busy) == 0) {
            LIST_REMOVE(c, entry);
            retire(c);
        }
    }
}

static struct transport_shm *of_poller(struct engine_poller *p)
{
    return (struct transport_shm *)(void *)((char *)p - offsetof(struct transport_shm, poller));
}

bool shm_poll(struct engine_poller *p)
{
    struct transport_shm *t = of_poller(p);
    bool has_work = false;
    if (atomic_load_explicit(&t->has_news, memory_order_relaxed))
        take_news(t);
    if (atomic_load_explicit(&t->is_stopped, memory_order_relaxed))
        return false;
    struct shm_client *c;
    LIST_FOREACH(c, &t->clients, entry) {
        if (c->lane != NULL) {
            has_work |= lane_poll(c->lane);
            continue;
        }
        uint32_t submitted = atomic_load_explicit(&c->control->submitted, memory_order_acquire);
        if (submitted == c->taken || c->is_dead)
            continue;
        take_all(c, submitted);
        has_work = true;
    }
    return has_work;
}

bool shm_may_sleep(struct engine_poller *p)
{
    struct transport_shm *t = of_poller(p);
    bool is_quiet = true;
    struct shm_client *c;
    LIST_FOREACH(c, &t->clients, entry)
        if (c->lane == NULL)
            atomic_store_explicit(&c->control->daemon_sleeps, 1, memory_order_relaxed);
    /* pairs with the client's fence between writing `submitted` and reading `daemon_sleeps` */
    atomic_thread_fence(memory_order_seq_cst);
    LIST_FOREACH(c, &t->clients, entry)
        is_quiet &= c->is_dead || c->lane != NULL ||
                    c->taken == atomic_load_explicit(&c->control->submitted, memory_order_relaxed);
    return is_quiet && !atomic_load(&t->has_news);
}

void shm_awake(struct engine_poller *p)
{
    struct transport_shm *t = of_poller(p);
    struct shm_client *c;
    LIST_FOREACH(c, &t->clients, entry)
        if (c->lane == NULL)
            atomic_store_explicit(&c->control->daemon_sleeps, 0, memory_order_relaxed);
}

/* A bell wakes no thread: while one is expected the engine sleeps briefly or not at all. */
uint64_t shm_nap_ns(struct engine_poller *p)
{
    struct transport_shm *t = of_poller(p);
    uint64_t ns = UINT64_MAX, now_ns = clock_now_ns();
    struct shm_client *c;
    LIST_FOREACH(c, &t->clients, entry) {
        const struct lane *l = c->lane;
        if (l != NULL && l->n_plans > 0)
            ns = now_ns - l->taken_ns < LANE_SOON_NS || ns == 0 ? 0 : BELL_NAP_NS;
    }
    return ns;
}
