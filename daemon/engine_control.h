/* engine_control.h: requests that are neither steps nor hello. */
#ifndef ATTND_DAEMON_ENGINE_CONTROL_H
#define ATTND_DAEMON_ENGINE_CONTROL_H

#include "daemon/engine_state.h"

/* Runs the request, or has it wait for the sequence that it names. */
void control_admit(struct engine *e, struct request *req, uint64_t now_ns);

/* Name and epoch of the sequence that a request is about. false: it is about none. */
bool seq_of_request(const Attnd__Request *h, uint64_t *out_name, uint32_t *out_epoch);

#endif
