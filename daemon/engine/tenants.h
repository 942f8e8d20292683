/* tenants.h: applies a new file of tenants: removed tenants lose sessions, sequences and pools. */
#ifndef ATTND_DAEMON_ENGINE_TENANTS_H
#define ATTND_DAEMON_ENGINE_TENANTS_H

#include "daemon/engine/core/state.h"

/* Applies tenants from engine_take_tenants, and continues to drop pools of removed ones. */
void tenants_turn(struct engine *e);
/* Counts from now on what the cache's tables take as they fill for the tenants, with what there is;
 * false: gives it back, and counts no more. */
void tenants_count_tables(struct engine *e, bool is_on);

#endif
