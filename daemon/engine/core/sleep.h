/* sleep.h: waiting of an idle engine. */
#ifndef ATTND_DAEMON_ENGINE_CORE_SLEEP_H
#define ATTND_DAEMON_ENGINE_CORE_SLEEP_H

#include "daemon/engine/core/state.h"

attn_status engine_sleep_init(struct engine *e); /* ATTN_ENOMEM: no descriptors; errno says why */
void engine_sleep_fini(struct engine *e); /* of a half-opened engine, too: descriptors are -1 */
/* Spins, then sleeps, until there is work, the engine is woken, or max_ns have passed. */
void engine_idle(struct engine *e, uint64_t max_ns);
/* No work has arrived, and no stop was requested. */
bool engine_is_quiet(const struct engine *e);
bool engine_poll_pollers(struct engine *e); /* true: something came; it is in the inbox */
/* Pollers bring work so often that the next is worth looking out for. */
bool engine_is_polled(const struct engine *e);

#endif
