/* card_open.h: opens and closes the cards of a daemon: each has a device, a cache, sessions and the
 * engine that works with them. One card is the usual case. Main thread. */
#ifndef ATTND_DAEMON_PROCESS_CARD_OPEN_H
#define ATTND_DAEMON_PROCESS_CARD_OPEN_H

#include "daemon/cards/cards.h"
#include "daemon/keeper/idle_memory.h"
#include "daemon/keeper/kept_cache.h"
#include "daemon/process/device.h"

struct card {
    struct device device;
    struct kept_cache kept; /* a predecessor's, until it is taken up; then only the names */
    struct kv *kv;
    struct idle_memory idle; /* of cache.idle_memory */
    struct session_table *sessions;
    struct tenants *tenants; /* this card's copy; NULL for the first, which uses the process's */
    struct engine *engine;
    bool is_given_up; /* it is lost, and the keeper has dropped its memory */
};

struct card_list {
    uint32_t n;
    struct card at[CONFIG_MAX_DEVICES];
    struct cards *cards; /* NULL: there is one card */
};

/* Opens the devices, with the KV memory that a predecessor had from them, all of it or none. EX_OK,
 * or the exit code with which the process must end; then the log says why, and cards_end and
 * cards_devices_end close what is open. */
int cards_devices_begin(const struct config *cfg, struct card_list *list);
/* Opens caches, sessions and engines; the engines run when it returns. env: what all engines share.
 * On failure why gets the reason, and cards_end closes what is open. */
attn_status cards_engines_begin(struct card_list *list, const struct engine_env *env, char *why,
                                size_t why_bytes);
/* Whether no card is left that works. */
bool cards_are_lost(const struct card_list *list);
/* Drops the kept memory of cards that are lost while others go on. */
void cards_give_up(struct card_list *list);
/* Whether some engine's thread has sent no heartbeat for timeout_ns. */
bool cards_are_stalled(const struct card_list *list, uint64_t timeout_ns);

/* Stops all engines. ATTN_ETIMEDOUT, ATTN_EDEVICE: a device does not return its batches, or is
 * lost: then the memory of cards must not be touched any more. */
attn_status cards_stop(struct card_list *list);
/* After cards_stop, or if engines never began: closes all but the devices, which own the message
 * buffers; cards_devices_end closes those. */
void cards_end(struct card_list *list);
void cards_devices_end(struct card_list *list);

#endif
