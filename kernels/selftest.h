/* selftest.h: one backend on this machine against the float64 reference, with a report that a user
 * can send: every kind of kernel, order of batches, block copies and transfers, graphs, host
 * memory, export.
 *
 * The backend must not be in use: the self test opens it, with a pool of its own of some MiB.
 */
#ifndef ATTND_KERNELS_SELFTEST_H
#define ATTND_KERNELS_SELFTEST_H

#include "kernels/backend.h"

#include <stdio.h>

/* Writes a line a check to out: "ok", "not supported" (the device refuses it; no failure) or
 * "FAILED" with what and where. device_index and n_threads as in struct backend_config.
 * Errors   ATTN_ENOTSUP the backend cannot be opened; ATTN_ENOMEM; ATTN_EINTERNAL a check failed */
attn_status selftest_run(const struct backend_ops *ops, int32_t device_index, uint32_t n_threads,
                         FILE *out);

#endif
