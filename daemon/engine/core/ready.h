/* ready.h: the ready tasks of a pool, the oldest first. */
#ifndef ATTND_DAEMON_ENGINE_CORE_READY_H
#define ATTND_DAEMON_ENGINE_CORE_READY_H

#include "daemon/engine/core/state.h"

void ready_init(struct ready_queue *q);
struct task *ready_first(const struct ready_queue *q); /* NULL: none */
void ready_push_fresh(struct ready_queue *q, struct task *t); /* younger than all fresh ones */
void ready_push_woken(struct ready_queue *q, struct task *t);
void ready_remove(struct ready_queue *q, struct task *t); /* does nothing if it is not queued */

#endif
