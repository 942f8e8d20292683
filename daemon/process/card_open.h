/* card_open.h: the cards of a daemon as it starts and ends: each with its device, cache and
 * sessions, and the engine that works with them. One card is the usual case. Main thread. */
#ifndef ATTND_DAEMON_PROCESS_CARD_OPEN_H
#define ATTND_DAEMON_PROCESS_CARD_OPEN_H

#include "daemon/cards/cards.h"
#include "daemon/keeper/idle_memory.h"
#include "daemon/keeper/kept_cache.h"
#include "daemon/process/device.h"

struct card {
    struct device device;
    struct kept_cache kept; /* of a predecessor, until it is taken up; then names alone */
    struct kv *kv;
    struct idle_memory idle; /* of cache.idle_memory */
    struct session_table *sessions;
    struct tenants *tenants; /* of every card but the first, which uses the process's */
    struct engine *engine;
    bool is_given_up; /* it is lost, and its memory is no longer kept */
};

struct card_list {
    uint32_t n;
    struct card at[CONFIG_MAX_DEVICES];
    struct cards *cards; /* NULL: there is one card */
};

/* Opens the devices, with the KV memory that a predecessor had from them; all of it or none.
 * Anything but EX_OK, after a line in the log, is what the process ends with; cards_end and
 * cards_devices_end are for what is open by then. */
int cards_devices_begin(const struct config *cfg, struct card_list *list);
/* Caches, sessions and engines; these run when it returns. env: what all engines have. */
attn_status cards_engines_begin(struct card_list *list, const struct engine_env *env, char *why,
                                size_t why_bytes);
/* No card is left that works. */
bool cards_are_lost(const struct card_list *list);
/* Drops the kept memory of cards that are lost while others go on. */
void cards_give_up(struct card_list *list);
/* Some engine's thread has shown no life for so long. */
bool cards_are_stalled(const struct card_list *list, uint64_t timeout_ns);

/* Stops all engines. ATTN_ETIMEDOUT, ATTN_EDEVICE: a device does not give its batches back, or is
 * lost: the cards' memory must not be touched any more. */
attn_status cards_stop(struct card_list *list);
/* After that, or of what never began: all but the devices, which have the message buffers. */
void cards_end(struct card_list *list);
void cards_devices_end(struct card_list *list);

#endif
