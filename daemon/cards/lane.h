/* lane.h: which card a lane's own region is on, and that every card works with both of its
 * regions: its plans may name sequences of any. A daemon with one card is one of these, too.
 */
#ifndef ATTND_DAEMON_CARDS_LANE_H
#define ATTND_DAEMON_CARDS_LANE_H

#include "kernels/backend.h"

struct engine;
struct request;

/* All cards have what lanes need, of one backend. ATTN_ENOTSUP: why names the one that has not. Any
 * thread. */
attn_status cards_lane_check(const struct engine *lead, char *why, size_t why_bytes);
/* The card on that GPU; else the first that is not lost: the lane's. Any thread. */
struct engine *cards_lane_home(struct engine *lead, const uint8_t uuid[16]);

struct backend *cards_lane_backend(const struct engine *home, const struct backend_ops **out_ops);
/* As region_open of home's backend, for every card that is not lost. ATTN_ENOTSUP: why names the
 * one that can't. The loop's thread. */
attn_status cards_lane_open(struct engine *home, uint64_t bytes, int import_fd,
                            struct backend_region *out_r, char *why, size_t why_bytes);
/* The cards but the lead that have sequences of the plan's step, a bit each. Its thread. */
uint32_t cards_lane_others(struct engine *lead, const struct request *plan);
/* A card is lost that may still write to regions which it reached. Any thread. */
bool cards_lane_is_stuck(const struct engine *home);

#endif
