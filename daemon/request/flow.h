/* flow.h: device time between tenants: weighted fair queueing, by the start of batches. Pure
 * functions: no engine, no clock.
 *
 * A flow is a tenant's. Its virtual time is its device time divided by its share; the flow whose
 * next batch would start earliest goes next. The clock of all is where the latest batch has
 * started: a flow that was idle starts there, and has saved nothing. A flow that always has
 * something ready gets its part of the shares of all such flows, whatever the others send.
 */
#ifndef ATTND_DAEMON_REQUEST_FLOW_H
#define ATTND_DAEMON_REQUEST_FLOW_H

#include <stdint.h>

enum { FLOW_MAX_SHARE = 1000 };

struct flow {
    uint32_t share; /* 1 to FLOW_MAX_SHARE */
    uint64_t end; /* virtual: where its last batch ends, and the next one starts */
};

/* The flow was idle and now has work. */
void flow_begin(struct flow *f, uint64_t clock);
/* Charges the flow for a batch that starts and will probably take ns. */
void flow_charge(struct flow *f, uint64_t *clock, uint64_t ns);
/* Corrects the charge: a batch charged with charged_ns took took_ns; 0: it never ran. */
void flow_settle(struct flow *f, uint64_t charged_ns, uint64_t took_ns);

#endif
