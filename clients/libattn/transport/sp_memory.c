/* sp_memory.c: memory of messages. Once the client page-locks (attn_client_pin), large messages lie
 * in buffers that are page-locked and kept for the next ones.
 *
 * The buffers that nobody has are a list without a lock, because a forked child frees messages,
 * too: it is taken as a whole, and what is not needed is put back one by one.
 */
#include <stdio.h>
#include <stdlib.h>

#include "clients/libattn/memory/memory.h"
#include "clients/libattn/transport/sp_internal.h"

#define SP_PINNED_LEAST (256u << 10) /* of a message: smaller ones are no device's to copy */
#define SP_PINNED_MOST (128u << 20) /* of all buffers: two large steps in flight, and answers */
#define SP_PINNED_UNIT (1u << 20)
#define SP_PAGE_BYTES 4096u

static void put(struct sp_memory *sm, struct sp_message *m)
{
    m->next = atomic_load(&sm->spare);
    while (!atomic_compare_exchange_weak(&sm->spare, &m->next, m))
        ;
}

/* The smallest spare buffer with this room; NULL: none. */
static struct sp_message *take_spare(struct sp_memory *sm, size_t room)
{
    struct sp_message *best = NULL, *next = NULL;
    for (struct sp_message *m = atomic_exchange(&sm->spare, NULL); m != NULL; m = next) {
        next = m->next;
        if (m->room < room || (best != NULL && best->room <= m->room)) {
            put(sm, m);
            continue;
        }
        if (best != NULL)
            put(sm, best);
        best = m;
    }
    return best;
}

static void drop(struct sp_memory *sm, struct sp_message *m)
{
    atomic_load(&sm->pins)->unpin(m);
    atomic_fetch_sub(&sm->n_pinned, m->room);
    free(m);
}

static attn_status new_pinned(struct sp_memory *sm, const struct lane_memory_ops *pins, size_t room,
                              struct sp_message **out_m, char *why, size_t why_bytes)
{
    /* with the head, whole units, so that it shares no page */
    const size_t all =
        (sizeof(struct sp_message) + room + SP_PINNED_UNIT - 1) / SP_PINNED_UNIT * SP_PINNED_UNIT;
    struct sp_message *m = aligned_alloc(SP_PAGE_BYTES, all);
    if (m == NULL) {
        snprintf(why, why_bytes, "no memory to page-lock");
        return ATTN_ENOMEM;
    }
    int device = atomic_load(&sm->device);
    attn_status st = pins->pin(m, all, &device, why, why_bytes);
    if (st != ATTN_OK) {
        free(m);
        return st;
    }
    atomic_store(&sm->device, device);
    m->room = all - sizeof *m;
    atomic_fetch_add(&sm->n_pinned, m->room);
    *out_m = m;
    return ATTN_OK;
}

/* NULL: there are as many as there may be, or the driver has no more. */
static struct sp_message *find_pinned(struct sp_memory *sm, const struct lane_memory_ops *pins,
                                      size_t room)
{
    char why[ATTN_MESSAGE_BYTES];
    struct sp_message *m = take_spare(sm, room), *small;
    if (m != NULL)
        return m;
    while (atomic_load(&sm->n_pinned) + room > SP_PINNED_MOST &&
           (small = take_spare(sm, 0)) != NULL)
        drop(sm, small);
    if (atomic_load(&sm->n_pinned) + room > SP_PINNED_MOST)
        return NULL;
    return new_pinned(sm, pins, room, &m, why, sizeof why) == ATTN_OK ? m : NULL;
}

attn_status sp_memory_pin(struct sp_memory *sm, const struct lane_memory_ops *pins, char *why,
                          size_t why_bytes)
{
    struct sp_message *m;
    if (atomic_load(&sm->pins) != NULL)
        return ATTN_OK;
    atomic_store(&sm->device, -1);
    attn_status st = new_pinned(sm, pins, SP_PINNED_LEAST, &m, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    put(sm, m);
    atomic_store(&sm->pins, pins);
    return ATTN_OK;
}

void sp_memory_end(struct sp_memory *sm, bool is_ours)
{
    struct sp_message *m = atomic_exchange(&sm->spare, NULL), *next;
    for (; m != NULL; m = next) {
        next = m->next;
        if (is_ours)
            drop(sm, m);
        else
            free(m); /* it is the parent's driver that knows it */
    }
}

struct sp_message *sp_message_new(struct sp_memory *sm, size_t bytes)
{
    const struct lane_memory_ops *pins = atomic_load(&sm->pins);
    struct sp_message *m = NULL;
    if (bytes > SIZE_MAX / 2)
        return NULL;
    if (pins != NULL && bytes >= SP_PINNED_LEAST)
        m = find_pinned(sm, pins, bytes);
    if (m == NULL) {
        m = aligned_alloc(SP_ALIGN, sizeof *m + (bytes + SP_ALIGN - 1) / SP_ALIGN * SP_ALIGN);
        if (m != NULL)
            m->room = 0;
    }
    if (m != NULL)
        m->bytes = bytes;
    return m;
}

void sp_message_free(struct sp_memory *sm, struct sp_message *m)
{
    if (m != NULL && m->room > 0)
        put(sm, m);
    else
        free(m);
}
