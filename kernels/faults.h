/* faults.h: a backend that misbehaves on purpose, for tests of what is around it: another backend's
 * table, with faults at launches that a text names.
 *
 *   WHAT@N    at the Nth batch with items, from 1
 *   WHAT%P    at each with probability P, 0 to 1
 *   seed=S    of those probabilities; 1 if not given
 *
 * separated by commas; WHAT is
 *
 *   fail      the batch comes back with ATTN_EINTERNAL
 *   lose      it and all that follow come back with ATTN_EDEVICE
 *   delay=MS  it comes back that much later
 *   hang      it never comes back
 *   corrupt   a bit of its first output is flipped
 */
#ifndef ATTND_KERNELS_FAULTS_H
#define ATTND_KERNELS_FAULTS_H

#include "kernels/backend.h"

/* The table; one for the process, valid until the next call. ATTN_EINVAL: why names the part of the
 * text that means nothing. */
attn_status backend_faults(const struct backend_ops *inner, const char *text,
                           const struct backend_ops **out_ops, char *why, size_t why_bytes);

#endif
