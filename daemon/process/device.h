/* device.h: which backend computes: the one asked for by device.backend, or with "auto" the first
 * of cuda, hip and cpu that can. Main thread. */
#ifndef ATTND_DAEMON_PROCESS_DEVICE_H
#define ATTND_DAEMON_PROCESS_DEVICE_H

#include <stdio.h>

#include "daemon/config/config.h"
#include "kernels/backend.h"

/* Which of the devices that are opened. */
struct device_choice {
    uint32_t index; /* by the driver's number */
    uint32_t n, n_all; /* how many are opened before it, and in all */
    uint32_t n_alike, n_alike_to_come; /* of the same backend: in all, and from this one on */
    const char *backend; /* NULL: as the settings say */
};

struct device {
    const struct backend_ops *ops; /* NULL: not open */
    struct backend *backend;
};

/* How many devices the backend of the settings has; with "auto", the first that has any. */
uint32_t device_count(const struct config *cfg);
/* Opens it, and logs which it is and why others are not used. Faults that the settings inject are
 * the last device's. ATTN_ENOTSUP: none can be used; the log says why. */
attn_status device_open(const struct config *cfg, const struct device_choice *which,
                        struct device *out_device);
/* Opens the backend with the KV memory that a predecessor had from it. why gets the reason.
 * Errors   ATTN_EINVAL the memory is not what the settings ask for, or can't be mapped; all else:
 *          the backend can't be opened now, and may be later */
attn_status device_import(const struct config *cfg, const struct device_choice *which,
                          const char *backend, int memory_fd, struct device *out_device, char *why,
                          size_t why_bytes);
void device_close(struct device *d); /* one that was never opened, too */

/* Checks it against the float64 reference instead (kernels/selftest.h), with a report to out.
 * ATTN_ENOTSUP: none can be used. */
attn_status device_self_test(const struct config *cfg, FILE *out);

#endif
