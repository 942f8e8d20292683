/* engine_control.h: requests that are neither steps nor hello. */
#ifndef ATTND_DAEMON_ENGINE_CONTROL_H
#define ATTND_DAEMON_ENGINE_CONTROL_H

#include "daemon/engine_state.h"

/* Runs the request, or has it wait for the sequence that it names. */
void control_admit(struct engine *e, struct request *req, uint64_t now_ns);

#endif
