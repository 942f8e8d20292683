/* flow.h: divides device time between tenants: start-time weighted fair queueing. Pure functions.
 *
 * Each tenant has a flow. Its virtual time is its device time divided by its share; the flow whose
 * next batch would start earliest goes next. The common clock is the virtual start of the latest
 * batch: a flow that was idle starts there, so it has saved nothing up. A flow that always has work
 * gets device time in proportion to its share among all such flows, whatever the others send.
 */
#ifndef ATTND_DAEMON_REQUEST_FLOW_H
#define ATTND_DAEMON_REQUEST_FLOW_H

#include <stdint.h>

enum { FLOW_MAX_SHARE = 1000 };

struct flow {
    uint32_t share; /* 1 to FLOW_MAX_SHARE */
    uint64_t end; /* virtual time at which its last batch ends and its next one starts */
};

/* The flow was idle and now has work. */
void flow_begin(struct flow *f, uint64_t clock);
/* Charges the flow for a batch that starts and is expected to take ns; advances the clock. */
void flow_charge(struct flow *f, uint64_t *clock, uint64_t ns);
/* Corrects the charge: a batch charged with charged_ns took took_ns; 0: it never ran. */
void flow_settle(struct flow *f, uint64_t charged_ns, uint64_t took_ns);

#endif
