/* device.h: opens the backend of a device: the one that device.backend names, or with "auto" the
 * first of cuda, hip and cpu that can be used. Main thread. */
#ifndef ATTND_DAEMON_PROCESS_DEVICE_H
#define ATTND_DAEMON_PROCESS_DEVICE_H

#include <stdio.h>

#include "daemon/config/config.h"
#include "daemon/process/memory.h"
#include "kernels/backend.h"

/* One of the devices that are opened together. */
struct device_choice {
    uint32_t index; /* the driver's number */
    uint32_t n, n_all; /* how many are opened before it, and in all */
    uint32_t n_alike, n_alike_to_come; /* devices of its backend: in all, and from this one on */
    const char *backend; /* NULL: the one of the settings */
    bool may_be_short; /* host memory, with a predecessor's: then the log says so */
    uint64_t taken_bytes; /* of host memory, by what a predecessor's devices have left */
};

struct device {
    const struct backend_ops *ops; /* NULL: not open */
    struct backend *backend;
    bool is_short; /* host memory is, and tables must not grow */
    uint64_t left_bytes; /* of host memory, beside all that is counted; UINT64_MAX: not known */
};

/* How many devices the backend of the settings has; with "auto", the first that has any. */
uint32_t device_count(const struct config *cfg);
/* What host memory a daemon with these settings and n devices takes at most; opens none. */
struct memory_need device_memory_need(const struct config *cfg, uint32_t n);
/* Opens the device, and logs which backend it has and why others are not used. The last device gets
 * the faults that the settings inject. ATTN_ENOTSUP: no backend can be used; the log says why. */
attn_status device_open(const struct config *cfg, const struct device_choice *which,
                        struct device *out_device);
/* Opens this backend with the KV memory that a predecessor had from it.
 * Errors   ATTN_EINVAL the memory does not fit the settings, or can't be mapped; ATTN_EQUOTA host
 *          memory is short, as memory_check says, and may not be; all else: the backend can't be
 *          opened now, but may be later; why gets the reason */
attn_status device_import(const struct config *cfg, const struct device_choice *which,
                          const char *backend, int memory_fd, struct device *out_device, char *why,
                          size_t why_bytes);
/* Whether the backends that the settings name are there, without opening them. ATTN_ENOTSUP: one is
 * not, and why says where it was looked for. */
attn_status device_modules_check(const struct config *cfg, char *why, size_t why_bytes);
void device_close(struct device *d); /* also one that was never opened */

/* Instead of serving, checks the backend against the float64 reference (kernels/selftest.h) and
 * writes a report to out. ATTN_ENOTSUP: no backend can be used. */
attn_status device_self_test(const struct config *cfg, FILE *out);

#endif
