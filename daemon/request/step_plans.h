/* request/step_plans.h: plans without a lane: which items the steps of some layers will have, so
 * that each of these steps need only name its plan and its layer.
 *
 * A plan is known by its session and the id of the request that made it, and holds nothing: a step
 * of it is filled in from here and is then like any other. A session has a few, of which a new one
 * takes the oldest one's place. They die with the process.
 *
 * The lead's; where there are several cards its doors look here, too. Any thread.
 */
#ifndef ATTND_DAEMON_REQUEST_STEP_PLANS_H
#define ATTND_DAEMON_REQUEST_STEP_PLANS_H

#include "daemon/request/request.h"

enum {
    STEP_PLANS_OF_SESSION = 4,
    STEP_PLANS_MAX_BYTES = 64 << 20, /* of all sessions' plans */
};

struct step_plans;

struct step_plans *step_plans_open(void); /* NULL: no memory */
void step_plans_close(struct step_plans *s); /* NULL is fine */

/* The request is a step that is still to be filled in. */
static inline bool step_plans_is_bare(const Attnd__Request *h)
{
    return h->body_case == ATTND__REQUEST__BODY_STEP && h->step->plan != 0 && h->step->n_seq == 0;
}

/* Keeps a plan that was checked, of a session that lives. One that is there already changes
 * nothing.
 * Errors   ATTN_EINVAL a late copy; ATTN_EOVERLOAD, ATTN_ENOMEM. Nothing has changed then */
attn_status step_plans_put(struct step_plans *s, const struct request *req, char *why,
                           size_t why_bytes);
/* Fills in a step that is bare.
 * Errors   ATTN_ENOPLAN; ATTN_EINVAL the plan has no such layer; ATTN_ENOMEM. It is bare then */
attn_status step_plans_fill(struct step_plans *s, struct request *req, char *why, size_t why_bytes);
/* The highest request that has made one for the session; 0: none. */
uint64_t step_plans_latest(struct step_plans *s, uint64_t session);
/* The session has ended. */
void step_plans_end(struct step_plans *s, uint64_t session);

#endif
