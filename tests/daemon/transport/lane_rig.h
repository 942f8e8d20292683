/* lane_rig.h: two lanes under an engine rig, and a worker for each: plans in few words, and what a
 * worker does with its regions. For tests of lanes, one rig a process. */
#ifndef ATTND_TESTS_DAEMON_TRANSPORT_LANE_RIG_H
#define ATTND_TESTS_DAEMON_TRANSPORT_LANE_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "daemon/engine/step/lane.h"
#include "tests/daemon/engine/engine_rig.h"

enum { LANE_RIG_BYTES = 1 << 18, LANE_RIG_SEQS = 6 };

struct side {
    struct lane lane; /* 11 and 12 */
    struct lane_page page;
    _Alignas(64) uint8_t in[LANE_RIG_BYTES], out[LANE_RIG_BYTES];
};

extern struct rig lane_rig; /* sequences 1 to LANE_RIG_SEQS, without tokens */
extern struct side *sides[2];
extern _Atomic bool lane_rig_has_news; /* as lane.out_news says */

/* A plan; 0 of timeout_us, pool and epoch: as they are. */
struct planned {
    uint64_t lane;
    uint32_t first_bell, n_layers, n_items, pos, n_tokens;
    uint32_t layers[RIG_LAYERS];
    uint64_t first_seq, in_offset, out_offset, timeout_us;
    uint32_t flags, pool, epoch, step_layer;
    bool is_twice; /* all items name the first sequence */
};

/* One token each of n_items sequences from the first, in all layers, on lane 11. */
struct planned plan_of(uint32_t first_bell, uint32_t n_items, uint32_t pos);
uint64_t plan_send(const struct planned *p); /* the request's id */
attn_status plan_make(const struct planned *p); /* sends it and runs: the reply's status */
void plan_refused(const struct planned *p, attn_status st, const char *part);

void side_ring(int side, uint32_t bell);
uint32_t side_done(int side);
int32_t side_verdict(int side, uint32_t bell); /* the host's, which is of this bell */
float side_output(int side, uint64_t offset);
void side_pass(int side, uint32_t bell); /* rings, and the device answers */

/* A test between opening and closing of the rig: what it keeps would count as the test's leak. Of
 * the others, the cache is one that a successor would take up; of the last, the device cannot reach
 * its words. */
void lane_run(void **state);
void lane_run_kept(void **state);
void lane_run_kept_unsignalled(void **state);
#define LANE_TEST(name) LANE_TEST_BY(lane_run, name)
#define LANE_KEPT(name) LANE_TEST_BY(lane_run_kept, name)
#define LANE_KEPT_UNSIGNALLED(name) LANE_TEST_BY(lane_run_kept_unsignalled, name)
#define LANE_TEST_BY(run, name)                                                                    \
    {                                                                                              \
#name, run, NULL, NULL, &(void (*)(void **))                                               \
        {                                                                                          \
            name                                                                                   \
        }                                                                                          \
    }

#endif
