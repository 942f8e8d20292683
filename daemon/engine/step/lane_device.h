/* lane_device.h: which device a lane's regions are opened on. Every device works with them, since
 * plans may name sequences on any device. */
#ifndef ATTND_DAEMON_ENGINE_STEP_LANE_DEVICE_H
#define ATTND_DAEMON_ENGINE_STEP_LANE_DEVICE_H

#include "kernels/backend.h"

struct engine;

/* Checks that the primary's device can have lanes and that all devices use its backend.
 * ATTN_ENOTSUP: why names the obstacle. Any thread. */
attn_status lane_check(const struct engine *primary, char *why, size_t why_bytes);
/* The engine of the device with that uuid, where the lane's worker is; if there is none, the first
 * whose device is not lost. Any thread. */
struct engine *lane_home(struct engine *primary, const uint8_t uuid[16]);
struct backend *lane_backend(const struct engine *home, const struct backend_ops **out_ops);
/* Like region_open of home's backend, but lets every device that is not lost reach the region.
 * ATTN_ENOTSUP: why names one that can't. The loop's thread. */
attn_status lane_region_open(struct engine *home, uint64_t bytes, int import_fd,
                             struct backend_region *out_r, char *why, size_t why_bytes);
/* Whether a lost device may still write to regions that it reached. Any thread. */
bool lane_is_stuck(const struct engine *home);

#endif
