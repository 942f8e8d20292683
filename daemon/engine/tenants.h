/* tenants.h: another file of tenants: removed tenants lose sessions, sequences and pools. */
#ifndef ATTND_DAEMON_ENGINE_TENANTS_H
#define ATTND_DAEMON_ENGINE_TENANTS_H

#include "daemon/engine/core/state.h"

/* Takes over what engine_take_tenants brought, and goes on ending what has no owner. */
void tenants_turn(struct engine *e);

#endif
