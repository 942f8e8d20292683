/* lane_steps.h: the steps of e2e.h's model by a lane: planned over any transport, rung for, and
 * checked. */
#ifndef TESTS_DAEMON_LANE_STEPS_H
#define TESTS_DAEMON_LANE_STEPS_H

#include "tests/daemon/e2e/e2e.h"
#include "tests/daemon/transport/lane_link.h"

enum { LANE_LONG_MS = 300000 };

/* Where a plan's tensors are. */
struct lane_places {
    uint64_t in, out;
};

/* Plans these layers of a step from the lane's next bell on; the answer. */
const Attnd__Reply *lane_plan(struct e2e_client *c, const struct lane_link *l,
                              const uint32_t *layers, uint32_t n_layers, const struct e2e_step *s,
                              struct lane_places at);
/* Sends one from this bell on; the request's id. */
uint64_t lane_send_plan(struct e2e_client *c, const struct lane_link *l, uint32_t first_bell,
                        const uint32_t *layers, uint32_t n_layers, const struct e2e_step *s,
                        struct lane_places at);
/* As lane_plan; fails the test where it is refused. */
void lane_plan_well(struct e2e_client *c, const struct lane_link *l, const uint32_t *layers,
                    uint32_t n_layers, const struct e2e_step *s, struct lane_places at);
/* Puts q, k and v of the planned items where they are to be, poisons the outputs, and rings; the
 * bell's status. */
int lane_try(struct lane_link *l, const struct e2e_step *s, const struct e2e_item *items,
             uint32_t layer, struct lane_places at);
/* The same; fails the test where outputs are not the reference's. */
void lane_layer(struct lane_link *l, const struct e2e_step *s, const struct e2e_item *items,
                uint32_t layer, struct lane_places at);

#endif
