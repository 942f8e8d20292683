/* tenants.h: applies a new file of tenants: removed tenants lose sessions, sequences and pools. */
#ifndef ATTND_DAEMON_ENGINE_TENANTS_H
#define ATTND_DAEMON_ENGINE_TENANTS_H

#include "daemon/engine/core/state.h"

/* Applies tenants from engine_take_tenants, and continues to drop pools of removed ones. */
void tenants_turn(struct engine *e);

#endif
