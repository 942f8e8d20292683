/* engine_ahead.h: bells that are launched before they are rung. */
#ifndef ATTND_DAEMON_ENGINE_AHEAD_H
#define ATTND_DAEMON_ENGINE_AHEAD_H

#include "daemon/engine_state.h"

/* Calls announced bells off if somebody else wants the device, or one has waited for long. */
void lanes_watch(struct engine *e, uint64_t now_ns);

#endif
