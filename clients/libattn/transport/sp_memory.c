/* sp_memory.c: memory of messages. Once the client page-locks (attn_client_pin), large messages lie
 * in buffers that are page-locked and kept for the next ones.
 *
 * The buffers that nobody has are kept without a lock, because a forked child frees messages, too.
 */
#include <stdio.h>
#include <stdlib.h>

#include "clients/libattn/memory/memory.h"
#include "clients/libattn/transport/sp_internal.h"

#define SP_PINNED_LEAST (256u << 10) /* of a message: smaller ones are no device's to copy */
#define SP_PINNED_UNIT (1u << 20)
#define SP_PAGE_BYTES 4096u

/* There is a place: no more buffers are made. */
static void put(struct sp_memory *sm, struct sp_message *m)
{
    for (int i = 0; i < SP_MAX_PINNED; i++) {
        struct sp_message *none = NULL;
        if (atomic_compare_exchange_strong(&sm->spare[i], &none, m))
            return;
    }
}

/* The smallest spare buffer with this room; NULL: none. */
static struct sp_message *take_spare(struct sp_memory *sm, size_t room)
{
    struct sp_message *best = NULL;
    for (int i = 0; i < SP_MAX_PINNED; i++) {
        if (atomic_load(&sm->spare[i]) == NULL)
            continue;
        struct sp_message *m = atomic_exchange(&sm->spare[i], NULL);
        if (m != NULL && (m->room < room || (best != NULL && best->room <= m->room))) {
            put(sm, m);
        } else if (m != NULL) {
            if (best != NULL)
                put(sm, best);
            best = m;
        }
    }
    return best;
}

static void drop(struct sp_memory *sm, struct sp_message *m)
{
    atomic_load(&sm->pins)->unpin(m);
    atomic_fetch_sub(&sm->n_pinned, sizeof *m + m->room);
    free(m);
}

/* With its head, in whole units, so that it shares no page. */
static size_t bytes_for(size_t room)
{
    const size_t bytes = sizeof(struct sp_message) + room;
    return (bytes + SP_PINNED_UNIT - 1) / SP_PINNED_UNIT * SP_PINNED_UNIT;
}

/* False: there would be more than there may be. */
static bool reserve(struct sp_memory *sm, size_t bytes)
{
    if (atomic_fetch_add(&sm->n_pinned, bytes) + bytes <= SP_MAX_PINNED * (size_t)SP_PINNED_UNIT)
        return true;
    atomic_fetch_sub(&sm->n_pinned, bytes);
    return false;
}

/* Of bytes that are reserved. */
static attn_status new_pinned(struct sp_memory *sm, const struct lane_memory_ops *pins,
                              size_t bytes, struct sp_message **out_m, char *why, size_t why_bytes)
{
    attn_status st = ATTN_ENOMEM;
    int device = atomic_load(&sm->device);
    struct sp_message *m = aligned_alloc(SP_PAGE_BYTES, bytes);
    if (m != NULL)
        st = pins->pin(m, bytes, &device, why, why_bytes);
    else
        snprintf(why, why_bytes, "no memory to page-lock");
    if (st != ATTN_OK) {
        atomic_fetch_sub(&sm->n_pinned, bytes);
        free(m);
        return st;
    }
    atomic_store(&sm->device, device);
    m->room = bytes - sizeof *m;
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
    while (!reserve(sm, bytes_for(room))) {
        small = take_spare(sm, 0);
        if (small == NULL)
            return NULL;
        drop(sm, small);
    }
    return new_pinned(sm, pins, bytes_for(room), &m, why, sizeof why) == ATTN_OK ? m : NULL;
}

attn_status sp_memory_pin(struct sp_memory *sm, const struct lane_memory_ops *pins, char *why,
                          size_t why_bytes)
{
    struct sp_message *m;
    if (atomic_load(&sm->pins) != NULL || !reserve(sm, SP_PINNED_UNIT))
        return ATTN_OK;
    atomic_store(&sm->device, -1);
    attn_status st = new_pinned(sm, pins, SP_PINNED_UNIT, &m, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    put(sm, m);
    atomic_store(&sm->pins, pins);
    return ATTN_OK;
}

void sp_memory_end(struct sp_memory *sm, bool is_ours)
{
    for (int i = 0; i < SP_MAX_PINNED; i++) {
        struct sp_message *m = atomic_exchange(&sm->spare[i], NULL);
        if (m != NULL && is_ours)
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
