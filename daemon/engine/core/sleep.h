/* sleep.h: how an idle engine waits, and how it polls. Engine thread. */
#ifndef ATTND_DAEMON_ENGINE_CORE_SLEEP_H
#define ATTND_DAEMON_ENGINE_CORE_SLEEP_H

#include "daemon/engine/core/state.h"

attn_status engine_sleep_init(struct engine *e); /* ATTN_ENOMEM: no descriptors; errno says why */
void engine_sleep_fini(struct engine *e); /* also for a half-opened engine; descriptors may be -1 */
/* Spins, then sleeps, until there is work, the engine is woken, or max_ns have passed. */
void engine_idle(struct engine *e, uint64_t max_ns);
/* Whether no work has arrived and no stop was requested. */
bool engine_is_quiet(const struct engine *e);
bool engine_poll_pollers(struct engine *e); /* true: something came and is in the inbox */
/* Whether pollers bring work so often that spinning is worthwhile. */
bool engine_is_polled(const struct engine *e);

#endif
