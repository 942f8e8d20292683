/* lane_device.h: which device a lane's own region is on; every device works with both of its
 * regions, since its plans may name sequences of any. */
#ifndef ATTND_DAEMON_ENGINE_STEP_LANE_DEVICE_H
#define ATTND_DAEMON_ENGINE_STEP_LANE_DEVICE_H

#include "kernels/backend.h"

struct engine;

/* All devices have what lanes need, of one backend. ATTN_ENOTSUP: why names the one that has not.
 * Any thread. */
attn_status lane_check(const struct engine *primary, char *why, size_t why_bytes);
/* The engine of the device with that uuid, for a lane whose worker is on it; else of the first that
 * is not lost. Any thread. */
struct engine *lane_home(struct engine *primary, const uint8_t uuid[16]);
struct backend *lane_backend(const struct engine *home, const struct backend_ops **out_ops);
/* As region_open of home's backend, for every device that is not lost. ATTN_ENOTSUP: why names the
 * one that can't. The loop's thread. */
attn_status lane_region_open(struct engine *home, uint64_t bytes, int import_fd,
                             struct backend_region *out_r, char *why, size_t why_bytes);
/* A device is lost that may still write to regions which it reached. Any thread. */
bool lane_is_stuck(const struct engine *home);

#endif
